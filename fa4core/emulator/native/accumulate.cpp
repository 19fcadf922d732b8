// See accumulate.h. Products and aligned summands are exact in double.
#include "accumulate.h"

#include "numbers.h"

namespace emu {
namespace {

constexpr int ROWS = 16;
constexpr int OF_ZERO = -100'000, OF_SPECIAL = 1'000'000;  // special: infinities and NaN

int least_exponent(Number n) {
  switch (n) {
    case Number::E4M3: return -6;
    case Number::E5M2:
    case Number::F16: return -14;
    default: return -126;
  }
}

// The exponent that decides the alignment: subnormals have the least one.
inline int exponent(float x, int least) {
  int field = (int)(bits<u32>(x) >> 23 & 255), e = std::max(field - 127, least);
  return x == 0 ? OF_ZERO : field == 255 ? OF_SPECIAL : e;
}

inline double power(int e) { return bits<double>((u64)(e + 1023) << 52); }

inline float cut(double x, int fraction_bits) {
  float f = (float)x;
  if (std::fabs((double)f) > std::fabs(x) && std::fabs(x) < 0x1p128)
    f = bits<float>(bits<u32>(f) - 1);
  return std::isinf(f) ? f : bits<float>(bits<u32>(f) & ~0u << (23 - fraction_bits));
}

inline float stored(const Adder& s, double x) {
  if (std::isnan(x)) return bits<float>(0x7fffffff);
  return s.half ? half_to_float(round_half(x, Round::Near)) : cut(x, s.stored);
}

}  // namespace

void fused16(const Adder& s, float* d, int ldd, const float* a, int lda, const float* b, int ldb,
             int columns, int ks) {
  const int least_a = least_exponent(s.a), least_b = least_exponent(s.b);
  const int least_d = s.half ? -14 : -126;
  int exponents[64][ROWS];
  for (int k = 0; k < ks; k++)
    for (int r = 0; r < ROWS; r++) exponents[k][r] = exponent(a[k * lda + r], least_a);
  for (int c = 0; c < columns; c++) {
    float* column = d + c * ldd;
    int greatest[ROWS];
    double unit[ROWS], sum[ROWS];  // unit: what is multiplied to make the last kept bit 1
    for (int r = 0; r < ROWS; r++) greatest[r] = exponent(column[r], least_d);
    for (int k = 0; k < ks; k++) {
      int e = exponent(b[k * ldb + c], least_b);
      for (int r = 0; r < ROWS; r++) greatest[r] = std::max(greatest[r], exponents[k][r] + e);
    }
    for (int r = 0; r < ROWS; r++) {
      unit[r] = power(s.kept - std::clamp(greatest[r], -900, 900));
      sum[r] = std::trunc(column[r] * unit[r]);
    }
    for (int k = 0; k < ks; k++) {
      double y = b[k * ldb + c];
      for (int r = 0; r < ROWS; r++) sum[r] += std::trunc(a[k * lda + r] * y * unit[r]);
    }
    for (int r = 0; r < ROWS; r++) column[r] = stored(s, sum[r] / unit[r]);
  }
}

}  // namespace emu
