// Reading and writing planes as 32 values of a C++ type. Loops over 32 elements with a local result
// are what the compiler turns into vector code; the result is then stored under the lane mask.
#pragma once
#include "machine.h"

namespace emu {

template <class T>
struct Values {  // by value: 8-, 16- and 64-bit types
  alignas(64) T v[LANES];
  T operator[](int l) const { return v[l]; }
};

template <class T>
inline auto read(const Warp& w, u32 plane) {
  if constexpr (sizeof(T) == 4) {
    return reinterpret_cast<const T*>(w.r(plane));
  } else {
    Values<T> x;
    const u32* lo = w.r(plane);
    if constexpr (sizeof(T) == 8) {
      const u32* hi = w.r(plane + 1);
      for (int l = 0; l < LANES; l++) x.v[l] = bits<T>((u64)lo[l] | (u64)hi[l] << 32);
    } else {
      for (int l = 0; l < LANES; l++) x.v[l] = (T)lo[l];
    }
    return x;
  }
}

inline void store(u32* d, const u32* s, Mask m) {
  if (m == FULL) { std::memcpy(d, s, 4 * LANES); return; }
  for (int l = 0; l < LANES; l++) d[l] = (m >> l & 1) ? s[l] : d[l];
}

template <class T>
inline void write(Warp& w, u32 plane, const T* v, Mask m) {
  if constexpr (sizeof(T) == 4) {
    store(w.w(plane), reinterpret_cast<const u32*>(v), m);
  } else if constexpr (sizeof(T) == 8) {
    alignas(64) u32 lo[LANES], hi[LANES];
    for (int l = 0; l < LANES; l++) { u64 x = bits<u64>(v[l]); lo[l] = (u32)x; hi[l] = (u32)(x >> 32); }
    store(w.w(plane), lo, m);
    store(w.w(plane + 1), hi, m);
  } else {
    alignas(64) u32 x[LANES];
    for (int l = 0; l < LANES; l++) x[l] = (u16)v[l];
    store(w.w(plane), x, m);
  }
}

inline Mask gather_bits(const u32* flags) {  // nonzero -> bit
  Mask m = 0;
  for (int l = 0; l < LANES; l++) m |= (Mask)(flags[l] != 0) << l;
  return m;
}

template <class T, auto F>
void unary(Warp& w, const Ins& i, Mask m) {
  auto a = read<T>(w, i.a[1]);
  alignas(64) decltype(F(a[0])) r[LANES];
  for (int l = 0; l < LANES; l++) r[l] = F(a[l]);
  write(w, i.a[0], r, m);
}

template <class T, auto F, class U = T>
void binary(Warp& w, const Ins& i, Mask m) {
  auto a = read<T>(w, i.a[1]);
  auto b = read<U>(w, i.a[2]);
  alignas(64) decltype(F(a[0], b[0])) r[LANES];
  for (int l = 0; l < LANES; l++) r[l] = F(a[l], b[l]);
  write(w, i.a[0], r, m);
}

template <class T, auto F, class V = T>
void ternary(Warp& w, const Ins& i, Mask m) {
  auto a = read<T>(w, i.a[1]);
  auto b = read<T>(w, i.a[2]);
  auto c = read<V>(w, i.a[3]);
  alignas(64) decltype(F(a[0], b[0], c[0])) r[LANES];
  for (int l = 0; l < LANES; l++) r[l] = F(a[l], b[l], c[l]);
  write(w, i.a[0], r, m);
}

// Chooses a handler by integer type: TYPED(t, binary, [](auto a, auto b) {...}) etc. are spelled out
// in the families, because a lambda must be instantiated per type.
}  // namespace emu
