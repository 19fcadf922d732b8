// Basic types shared by every part of the core: fixed-width names, the lane mask of a warp, bit
// casts, the random source that makes a run repeatable, and the exception that carries a finding.
#pragma once
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace emu {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;
using Mask = u32;  // bit l: lane l

constexpr int LANES = 32;
constexpr Mask FULL = 0xffffffffu;

template <class To, class From>
inline To bits(const From& x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

inline int lowest(Mask m) { return __builtin_ctz(m); }
inline int popcount(Mask m) { return __builtin_popcount(m); }

#define FOR_LANES(l, m) \
  for (Mask m_ = (m), l = 0; m_ && ((l = (Mask)lowest(m_)), true); m_ &= m_ - 1)

// xoshiro-like small generator (splitmix64): the same seed gives the same run everywhere.
struct Random {
  u64 s = 0;
  u64 next() {
    u64 z = (s += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  u32 below(u32 n) { return (u32)(((next() >> 32) * n) >> 32); }
};

// The address windows of the generic address space that do not lie in host memory. Shared addresses
// are (CTA rank in cluster << 24) | offset, the shared::cluster form; a plain offset is the CTA's own.
constexpr u64 SHARED_WINDOW = 0x0100'0000'0000'0000ull;
constexpr u64 LOCAL_WINDOW = 0x0200'0000'0000'0000ull;
constexpr u64 PARAM_WINDOW = 0x0300'0000'0000'0000ull;
constexpr u64 WINDOW_MASK = 0xff00'0000'0000'0000ull;
constexpr int RANK_SHIFT = 24;
constexpr u32 OFFSET_MASK = (1u << RANK_SHIFT) - 1;

// A finding that stops the run. kind is that of launch.py's Report.
struct Fatal : std::runtime_error {
  std::string kind;
  int line;  // PTX line if the thrower knows better than the current instruction, else 0
  Fatal(std::string kind, const std::string& text, int line = 0)
      : std::runtime_error(text), kind(std::move(kind)), line(line) {}
};

std::string format(const char* fmt, ...) __attribute__((format(printf, 1, 2)));

}  // namespace emu
