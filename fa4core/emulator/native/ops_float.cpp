// float, double and packed f32x2 arithmetic. PTX ISA: "Floating Point Instructions", "Mixed Precision
// Floating Point Instructions". NaN results are 0x7fffffff, as the hardware gives.
// The .approx functions are computed in double and rounded once; the hardware's own results differ
// from that by the few ulp the ISA states for each of them.
#include <cfenv>

#include "lanes.h"
#include "numbers.h"

namespace emu {
namespace {

inline float canonical(float x) { return x == x ? x : bits<float>(0x7fffffffu); }
inline double canonical(double x) { return x; }

constexpr auto FAdd = [](auto a, auto b) { return a + b; };
constexpr auto FSub = [](auto a, auto b) { return a - b; };
constexpr auto FMul = [](auto a, auto b) { return a * b; };
constexpr auto FDiv = [](auto a, auto b) { return a / b; };
constexpr auto FDivApprox = [](float a, float b) { return (float)((double)a / (double)b); };

template <class T> using Int = std::conditional_t<sizeof(T) == 4, u32, u64>;
template <bool MAX, bool NAN_, bool XOR> struct Extreme {
  template <class T> T operator()(T a, T b) const {
    using I = Int<T>;
    constexpr I SIGN = (I)1 << (8 * sizeof(T) - 1);
    I sign = 0;
    if (XOR) {
      sign = (bits<I>(a) ^ bits<I>(b)) & SIGN;
      a = bits<T>(bits<I>(a) & ~SIGN), b = bits<T>(bits<I>(b) & ~SIGN);
    }
    T r = ((MAX ? a > b : a < b) || b != b) ? a : b;
    I same = MAX ? bits<I>(a) & bits<I>(b) : bits<I>(a) | bits<I>(b);
    r = a == b ? bits<T>(same) : r;
    bool nan = NAN_ ? (a != a || b != b) : r != r;
    if (sizeof(T) == 4 && nan) return bits<T>((I)0x7fffffffu);
    if (nan) return a + b;
    return bits<T>(bits<I>(r) | sign);
  }
};

inline void saturate(Warp& w, u32 plane, Mask m) {
  u32* d = w.w(plane);
  alignas(64) float r[LANES];
  for (int l = 0; l < LANES; l++) {
    float x = bits<float>(d[l]);
    r[l] = x > 0 ? (x < 1 ? x : 1.0f) : 0.0f;
  }
  write(w, plane, r, m);
}

template <bool FTZ> inline float in(float x) { return FTZ ? flush(x) : x; }

// n: .sat. P: planes (2 for f32x2).
template <int P, bool FTZ, auto F> void fbinary(Warp& w, const Ins& i, Mask m) {
  for (u32 k = 0; k < P; k++) {
    const float *a = (const float*)w.r(i.a[1] + k), *b = (const float*)w.r(i.a[2] + k);
    alignas(64) float r[LANES];
    for (int l = 0; l < LANES; l++) r[l] = in<FTZ>(canonical(F(in<FTZ>(a[l]), in<FTZ>(b[l]))));
    write(w, i.a[0] + k, r, m);
    if (i.n) saturate(w, i.a[0] + k, m);
  }
}

template <int P, bool FTZ> void ffma(Warp& w, const Ins& i, Mask m) {
  for (u32 k = 0; k < P; k++) {
    const float *a = (const float*)w.r(i.a[1] + k), *b = (const float*)w.r(i.a[2] + k), *c = (const float*)w.r(i.a[3] + k);
    alignas(64) float r[LANES];
    for (int l = 0; l < LANES; l++)
      r[l] = in<FTZ>(canonical(__builtin_fmaf(in<FTZ>(a[l]), in<FTZ>(b[l]), in<FTZ>(c[l]))));
    write(w, i.a[0] + k, r, m);
    if (i.n) saturate(w, i.a[0] + k, m);
  }
}

// Mixed precision: a (and b) are f16 or bf16, the rest f32. bytes: 1 bf16, 2 f16
inline const float* widen(const Warp& w, u32 plane, int kind, float* to) {
  const u32* a = w.r(plane);
  for (int l = 0; l < LANES; l++) to[l] = kind == 1 ? bfloat_to_float((u16)a[l]) : half_to_float((u16)a[l]);
  return to;
}
template <int OP> void mixed(Warp& w, const Ins& i, Mask m) {  // 0 fma, 1 add, 2 sub
  alignas(64) float x[LANES], y[LANES], r[LANES];
  const float* a = widen(w, i.a[1], i.bytes, x);
  const float* b = OP ? (const float*)w.r(i.a[2]) : widen(w, i.a[2], i.bytes, y);
  const float* c = OP ? nullptr : (const float*)w.r(i.a[3]);
  for (int l = 0; l < LANES; l++)
    r[l] = canonical(OP == 0 ? __builtin_fmaf(a[l], b[l], c[l]) : OP == 1 ? a[l] + b[l] : a[l] - b[l]);
  write(w, i.a[0], r, m);
  if (i.n) saturate(w, i.a[0], m);
}

template <bool FTZ, auto F> void funary(Warp& w, const Ins& i, Mask m) {
  const float* a = (const float*)w.r(i.a[1]);
  alignas(64) float r[LANES];
  for (int l = 0; l < LANES; l++) r[l] = in<FTZ>(canonical(F(in<FTZ>(a[l]))));
  write(w, i.a[0], r, m);
  if (i.n) saturate(w, i.a[0], m);
}

template <bool FTZ, auto F, int N> void fextreme(Warp& w, const Ins& i, Mask m) {
  const float *a = (const float*)w.r(i.a[1]), *b = (const float*)w.r(i.a[2]);
  const float* c = N > 2 ? (const float*)w.r(i.a[3]) : nullptr;
  alignas(64) float r[LANES];
  for (int l = 0; l < LANES; l++) {
    float x = F(in<FTZ>(a[l]), in<FTZ>(b[l]));
    r[l] = N > 2 ? F(x, in<FTZ>(c[l])) : x;
  }
  write(w, i.a[0], r, m);
}

// 2^x in double: x = n + f, |f| <= 1/2, Taylor series of 2^f (error below 3e-10), exact scaling.
inline double exp2_double(double x) {
  x = x < -1000 ? -1000 : x > 1000 ? 1000 : x;
  double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  double shifted = x + magic, n = shifted - magic, f = (x - n) * 0.69314718055994530942;
  double p = 1.0 / 40320;
  p = p * f + 1.0 / 5040, p = p * f + 1.0 / 720, p = p * f + 1.0 / 120, p = p * f + 1.0 / 24;
  p = p * f + 1.0 / 6, p = p * f + 0.5, p = p * f + 1.0, p = p * f + 1.0;
  return p * bits<double>((bits<u64>(shifted) + 1023) << 52);
}
constexpr auto Ex2 = [](float x) { return x != x ? x : (float)exp2_double(x); };
constexpr auto Lg2 = [](float x) { return (float)std::log2((double)x); };
constexpr auto Rcp = [](float x) { return 1.0f / x; };
constexpr auto Sqrt = [](auto x) { return std::sqrt(x); };
constexpr auto Rsqrt = [](float x) { return (float)(1.0 / std::sqrt((double)x)); };
constexpr auto Sin = [](float x) { return (float)std::sin((double)x); };
constexpr auto Cos = [](float x) { return (float)std::cos((double)x); };
constexpr auto Tanh = [](float x) { return (float)std::tanh((double)x); };
constexpr auto DRcp = [](double x) { return 1.0 / x; };
constexpr auto DRsqrt = [](double x) { return 1.0 / std::sqrt(x); };
constexpr auto DNeg = [](double x) { return -x; };
constexpr auto DAbs = [](double x) { return std::fabs(x); };
constexpr auto DFma = [](double a, double b, double c) { return __builtin_fma(a, b, c); };

template <u32 AND, u32 XOR, bool FTZ> void fsign(Warp& w, const Ins& i, Mask m) {
  const u32* a = w.r(i.a[1]);
  alignas(64) u32 r[LANES];
  for (int l = 0; l < LANES; l++) {
    u32 x = FTZ ? bits<u32>(flush(bits<float>(a[l]))) : a[l];
    r[l] = (x & AND) ^ XOR;
  }
  write(w, i.a[0], r, m);
}

template <class T> void copysign_(Warp& w, const Ins& i, Mask m) {
  auto a = read<T>(w, i.a[1]);
  auto b = read<T>(w, i.a[2]);
  constexpr T SIGN = (T)1 << (8 * sizeof(T) - 1);
  alignas(64) T r[LANES];
  for (int l = 0; l < LANES; l++) r[l] = (b[l] & ~SIGN) | (a[l] & SIGN);
  write(w, i.a[0], r, m);
}

template <int MODE, Handler H> void rounded(Warp& w, const Ins& i, Mask m) {
  std::fesetround(MODE);
  H(w, i, m);
  std::fesetround(FE_TONEAREST);
}
template <Handler H> Handler in_mode(Decoder& d) {
  if (d.has("rm")) return rounded<FE_DOWNWARD, H>;
  if (d.has("rp")) return rounded<FE_UPWARD, H>;
  if (d.has("rz")) return rounded<FE_TOWARDZERO, H>;
  return H;
}

void operands(Decoder& d, Type t, int sources) {
  d.ins.a[0] = d.dst(0, t);
  for (int k = 1; k <= sources; k++) d.ins.a[k] = d.src((size_t)k, t);
  d.ins.n = d.has("sat");
}

template <auto F> void arithmetic(Decoder& d, Type t) {
  operands(d, t, 2);
  bool z = d.has("ftz");
  if (t == F64) d.ins.n = 0, d.ins.fn = in_mode<binary<double, F>>(d);
  else if (t == F32X2) d.ins.fn = z ? in_mode<fbinary<2, true, F>>(d) : in_mode<fbinary<2, false, F>>(d);
  else d.ins.fn = z ? in_mode<fbinary<1, true, F>>(d) : in_mode<fbinary<1, false, F>>(d);
}

void fma_(Decoder& d, Type t) {
  operands(d, t, 3);
  bool z = d.has("ftz");
  if (t == F64) d.ins.n = 0, d.ins.fn = in_mode<ternary<double, DFma>>(d);
  else if (t == F32X2) d.ins.fn = z ? in_mode<ffma<2, true>>(d) : in_mode<ffma<2, false>>(d);
  else d.ins.fn = z ? in_mode<ffma<1, true>>(d) : in_mode<ffma<1, false>>(d);
}

template <auto F, auto D> void function(Decoder& d, Type t) {
  operands(d, t, 1);
  if (t == F64) d.ins.n = 0, d.ins.fn = in_mode<unary<double, D>>(d);
  else d.ins.fn = d.has("ftz") ? in_mode<funary<true, F>>(d) : in_mode<funary<false, F>>(d);
}
template <auto F> void function32(Decoder& d) {
  if (d.type() != F32) { if (decode_half(d)) return; d.unknown("type"); }
  function<F, DRcp>(d, F32);
}

template <bool MAX> void extreme(Decoder& d, Type t) {
  int n = d.count() > 3 ? 3 : 2;
  operands(d, t, n);
  d.ins.n = 0;
  bool nan = d.has("NaN"), z = d.has("ftz"), x = d.has("xorsign");
  if (t == F64) { d.ins.fn = binary<double, Extreme<MAX, false, false>{}>; return; }
  if (t != F32) d.unknown("type");
#define E(N, X) if (nan == N && x == X) d.ins.fn = z ? (n == 3 ? fextreme<true, Extreme<MAX, N, X>{}, 3> : fextreme<true, Extreme<MAX, N, X>{}, 2>) \
                                                     : (n == 3 ? fextreme<false, Extreme<MAX, N, X>{}, 3> : fextreme<false, Extreme<MAX, N, X>{}, 2>)
  E(false, false); E(true, false); E(false, true); E(true, true);
#undef E
}

bool decode_mixed(Decoder& d) {
  auto t = d.types();
  if (t.size() != 2 || t[0] != F32 || (t[1] != BF16 && t[1] != F16)) return false;
  auto& o = d.st.opcode;
  d.ins.a[0] = d.dst(0, F32);
  d.ins.a[1] = d.src(1, t[1]);
  d.ins.bytes = t[1] == BF16 ? 1 : 2;
  d.ins.n = d.has("sat");
  if (o == "fma") {
    d.ins.a[2] = d.src(2, t[1]), d.ins.a[3] = d.src(3, F32);
    d.ins.fn = in_mode<mixed<0>>(d);
  } else if (o == "add" || o == "sub") {
    d.ins.a[2] = d.src(2, F32);
    d.ins.fn = o == "add" ? in_mode<mixed<1>>(d) : in_mode<mixed<2>>(d);
  } else d.unknown();
  return true;
}

void testp(Warp& w, const Ins& i, Mask m) {
  const float* a = (const float*)w.r(i.a[1]);
  Mask r = 0;
  for (int l = 0; l < LANES; l++) {
    float x = a[l];
    bool v = i.n == 0 ? std::isfinite(x) : i.n == 1 ? std::isinf(x) : i.n == 2 ? !std::isnan(x) : i.n == 3 ? std::isnan(x) :
             i.n == 4 ? std::isnormal(x) : std::fpclassify(x) == FP_SUBNORMAL;
    r |= (Mask)v << l;
  }
  Mask& d = w.preds[i.a[0]];
  d = (d & ~m) | (r & m);
}

void decode_testp(Decoder& d) {
  static const char* names[] = {"finite", "infinite", "number", "notanumber", "normal", "subnormal"};
  d.ins.a[0] = d.pred(0), d.ins.a[1] = d.src(1, F32);
  if (d.type() != F32) d.unknown("type");
  for (int k = 0; k < 6; k++) if (d.has(names[k])) d.ins.n = k;
  d.ins.fn = testp;
}

void decode_copysign(Decoder& d) {
  Type t = d.type();
  operands(d, t, 2);
  d.ins.fn = t == F64 ? copysign_<u64> : copysign_<u32>;
}

}  // namespace

bool decode_float(Decoder& d) {
  Type t = d.type();
  if (!is_float(t) && d.types().size() < 2) return false;
  if (decode_mixed(d)) return true;
  if (t == F16 || t == BF16 || t == F16X2 || t == BF16X2) return decode_half(d);
  if (t != F32 && t != F64 && t != F32X2) return false;
  auto& o = d.st.opcode;
  if (o == "add") arithmetic<FAdd>(d, t);
  else if (o == "sub") arithmetic<FSub>(d, t);
  else if (o == "mul") arithmetic<FMul>(d, t);
  else if (o == "mad" || o == "fma") fma_(d, t);
  else if (o == "div") {
    if (d.has("approx") || d.has("full")) arithmetic<FDivApprox>(d, t); else arithmetic<FDiv>(d, t);
  } else if (o == "min") extreme<false>(d, t);
  else if (o == "max") extreme<true>(d, t);
  else if (o == "abs" || o == "neg") {
    operands(d, t, 1);
    d.ins.n = 0;
    bool z = d.has("ftz"), neg = o == "neg";
    if (t == F64) d.ins.fn = neg ? unary<double, DNeg> : unary<double, DAbs>;
    else if (t == F32) d.ins.fn = neg ? (z ? fsign<~0u, 0x80000000u, true> : fsign<~0u, 0x80000000u, false>)
                                      : (z ? fsign<0x7fffffffu, 0, true> : fsign<0x7fffffffu, 0, false>);
    else d.unknown("type");
  } else return false;
  return true;
}

void register_float(Table& t) {
  t["fma"] = [](Decoder& d) { if (!decode_float(d)) d.unknown("type"); };
  t["rcp"] = [](Decoder& d) { function<Rcp, DRcp>(d, d.type()); };
  t["sqrt"] = [](Decoder& d) { function<Sqrt, Sqrt>(d, d.type()); };
  t["rsqrt"] = [](Decoder& d) { function<Rsqrt, DRsqrt>(d, d.type()); };
  t["ex2"] = function32<Ex2>;
  t["lg2"] = function32<Lg2>;
  t["sin"] = function32<Sin>;
  t["cos"] = function32<Cos>;
  t["tanh"] = function32<Tanh>;
  t["testp"] = decode_testp;
  t["copysign"] = decode_copysign;
}

}  // namespace emu
