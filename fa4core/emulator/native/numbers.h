// Number formats narrower than float, and their roundings. All loops over these vectorise.
// PTX ISA: "Fundamental types", "Alternate floating-point data formats", "cvt".
#pragma once
#include <cmath>

#include "common.h"

namespace emu {

inline float bfloat_to_float(u16 x) { return bits<float>((u32)x << 16); }

inline float half_to_float(u16 h) {
  u32 sign = (u32)(h & 0x8000) << 16, e = (h >> 10) & 31, f = h & 0x3ff;
  float normal = bits<float>(sign | (e + 112) << 23 | f << 13);
  float small = bits<float>(bits<u32>((float)(i32)f * 5.9604644775390625e-8f) | sign);  // f * 2^-24
  float special = bits<float>(sign | 0x7f800000u | f << 13);
  return e == 31 ? special : e == 0 ? small : normal;
}

enum class Round : u8 { Near, Zero, Down, Up, Away };  // Away: .rna; Near: ties to even

// float -> a format with E exponent bits (given bias) and F fraction bits; the result is the bit
// pattern without overflow treatment if `inf` is given. Used for f16, e4m3 and e5m2.
inline u16 round_bfloat(float x, Round mode) {
  u32 b = bits<u32>(x);
  if ((b & 0x7fffffff) > 0x7f800000) return 0x7fff;
  u32 low = b & 0xffff, up;
  switch (mode) {
    case Round::Near: up = low > 0x8000 || (low == 0x8000 && (b >> 16 & 1)); break;
    case Round::Away: up = low >= 0x8000; break;
    case Round::Zero: up = 0; break;
    case Round::Down: up = low && (b >> 31); break;
    default: up = low && !(b >> 31);
  }
  return (u16)((b >> 16) + ((b & 0x7fffffff) == 0x7f800000 ? 0 : up));
}

inline u16 bfloat_near(float x) {
  u32 b = bits<u32>(x);
  u32 r = (b + 0x7fff + (b >> 16 & 1)) >> 16;
  return (b & 0x7fffffff) > 0x7f800000 ? (u16)0x7fff : (u16)r;
}

// Rounds |x| (a double, exact) to F fraction bits with minimum exponent emin; returns the value in
// units of 2^(e - F) together with e. Works for every small format.
struct Small { int fraction_bits, bias, max_exponent; };  // max_exponent: biased, of finite values

inline u32 round_small(double x, const Small& f, Round mode, bool& overflow) {
  overflow = false;
  bool neg = std::signbit(x);
  double a = std::fabs(x);
  if (a == 0) return 0;
  int e = std::ilogb(a);
  int emin = 1 - f.bias;
  if (e < emin) e = emin;
  double scaled = std::ldexp(a, f.fraction_bits - e);
  double whole = std::floor(scaled), rest = scaled - whole;
  bool up = false;
  switch (mode) {
    case Round::Near: up = rest > 0.5 || (rest == 0.5 && std::fmod(whole, 2) == 1); break;
    case Round::Away: up = rest >= 0.5; break;
    case Round::Zero: break;
    case Round::Down: up = rest > 0 && neg; break;
    case Round::Up: up = rest > 0 && !neg; break;
  }
  u64 n = (u64)whole + up;
  if (n >> (f.fraction_bits + 1)) n >>= 1, e++;
  u32 biased = (u32)(e + f.bias);
  if (!(n >> f.fraction_bits)) biased = 0;  // subnormal
  if ((int)biased > f.max_exponent) { overflow = true; return 0; }
  return biased << f.fraction_bits | (u32)(n & ((1ull << f.fraction_bits) - 1));
}

inline u16 round_half(double x, Round mode) {
  u16 sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return 0x7fff;
  if (std::isinf(x)) return sign | 0x7c00;
  bool over;
  u32 r = round_small(x, {10, 15, 30}, mode, over);
  if (over) {
    bool to_inf = mode == Round::Near || mode == Round::Away || (mode == Round::Down && sign) || (mode == Round::Up && !sign);
    return sign | (to_inf ? 0x7c00 : 0x7bff);
  }
  return sign | (u16)r;
}

inline u16 half_near(float x) {  // the common case, without branches on the value's size
  u32 b = bits<u32>(x), sign = b >> 16 & 0x8000, a = b & 0x7fffffff;
  u32 normal = (a + 0xfff + (a >> 13 & 1) - 0x38000000u) >> 13;
  float shifted = bits<float>(a) + 0.5f;               // subnormal halves: units of 2^-24 by alignment
  u32 small = bits<u32>(shifted) - 0x3f000000u;
  u32 r = a > 0x7f800000 ? 0x7fff : a >= 0x477ff000 ? 0x7c00 : a < 0x38800000 ? small : normal;
  return (u16)(a > 0x7f800000 ? 0x7fff : (r | sign));
}

inline float e4m3_to_float(u8 x) {
  u32 e = x >> 3 & 15, f = x & 7;
  float v = (x & 0x7f) == 0x7f ? NAN : e ? std::ldexp((float)(8 + f), (int)e - 10) : std::ldexp((float)f, -9);
  return x & 0x80 ? -v : v;
}
inline float e5m2_to_float(u8 x) { return half_to_float((u16)(x << 8)); }
inline float e2m1_to_float(u8 x) {
  static const float t[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return x & 8 ? -t[x & 7] : t[x & 7];
}

// cvt.rn.satfinite to fp8. PTX ISA "cvt": out of range becomes the largest finite value, NaN stays.
inline u8 round_e4m3(float x, Round mode = Round::Near) {
  u8 sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return 0x7f;
  if (std::isinf(x)) return sign | 0x7e;
  bool over;
  u32 r = round_small(x, {3, 7, 15}, mode, over);
  return sign | (over || r >= 0x7f ? 0x7e : (u8)r);
}
inline u8 round_e5m2(float x, Round mode = Round::Near) {
  u8 sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return 0x7f;
  if (std::isinf(x)) return sign | 0x7b;
  bool over;
  u32 r = round_small(x, {2, 15, 30}, mode, over);
  return sign | (over ? 0x7b : (u8)r);
}
inline u8 round_e2m1(float x) {
  u8 sign = std::signbit(x) ? 8 : 0;
  if (std::isnan(x)) return 7;
  bool over;
  u32 r = std::isinf(x) ? 8 : round_small(x, {1, 1, 3}, Round::Near, over);
  return sign | (r > 7 || (!std::isinf(x) && over) ? 7 : (u8)r);
}

inline float round_tf32(float x, Round mode) {
  u32 b = bits<u32>(x);
  if ((b & 0x7f800000) == 0x7f800000) return x;
  u32 low = b & 0x1fff, up = mode == Round::Away ? low >= 0x1000 : mode == Round::Near ? (low > 0x1000 || (low == 0x1000 && (b >> 13 & 1))) : 0;
  return bits<float>((b & ~0x1fffu) + (up << 13));
}

inline float flush(float x) {  // .ftz
  u32 b = bits<u32>(x);
  return bits<float>((b & 0x7f800000) ? b : b & 0x80000000u);
}

}  // namespace emu
