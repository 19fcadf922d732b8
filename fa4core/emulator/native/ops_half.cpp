// f16, bf16 and their packed forms. PTX ISA: "Half Precision Floating Point Instructions".
// Computed in double and rounded once: products of two 11-bit numbers are exact there.
#include "lanes.h"
#include "numbers.h"

namespace emu {
namespace {

enum Op { ADD, SUB, MUL, FMA, MIN, MAX, ABS, NEG, EX2, TANH };

inline double widen(u16 x, bool bf) { return bf ? bfloat_to_float(x) : half_to_float(x); }

inline u16 narrow(double x, bool bf) {
  if (!bf) return round_half(x, Round::Near);
  // To bf16 without rounding twice: to odd in float first.
  float f = (float)x;
  if ((double)f != x && !std::isnan(x) && !std::isinf(f)) {
    u32 b = bits<u32>(f);
    bool away = std::fabs((double)f) > std::fabs(x);
    f = bits<float>((away ? b - 1 : b) | 1);
  }
  return bfloat_near(f);
}

inline u16 extreme(u16 a, u16 b, bool max, bool nan, bool bf) {
  double x = widen(a, bf), y = widen(b, bf);
  if (nan && (x != x || y != y)) return 0x7fff;
  if (x != x && y != y) return 0x7fff;
  if (x != x) return b;
  if (y != y) return a;
  if (x == y) return max ? a & b : a | b;
  return (max ? x > y : x < y) ? a : b;
}

// n: operation; bytes: bit 0 bf16, bit 1 relu, bit 2 sat, bit 3 NaN, bit 4 ftz
inline u16 apply(const Ins& i, u16 a, u16 b, u16 c) {
  bool bf = i.bytes & 1;
  double x = widen(a, bf), y = widen(b, bf), z = widen(c, bf), r = 0;
  switch (i.n) {
    case ADD: r = x + y; break;
    case SUB: r = x - y; break;
    case MUL: r = x * y; break;
    case FMA: r = __builtin_fma(x, y, z); break;
    case MIN: return extreme(a, b, false, i.bytes & 8, bf);
    case MAX: return extreme(a, b, true, i.bytes & 8, bf);
    case ABS: return a & 0x7fff;
    case NEG: return a ^ 0x8000;
    case EX2: r = std::exp2(x); break;
    case TANH: r = std::tanh(x); break;
  }
  if (i.bytes & 4) r = r > 0 ? std::min(r, 1.0) : 0;
  if ((i.bytes & 2) && !(r > 0) && r == r) r = 0;
  return narrow(r, bf);
}

template <int N> void half(Warp& w, const Ins& i, Mask m) {  // N halves per register
  const u32 *a = w.r(i.a[1]), *b = w.r(i.a[2]), *c = w.r(i.a[3]);
  alignas(64) u32 r[LANES];
  for (int l = 0; l < LANES; l++) {
    r[l] = apply(i, (u16)a[l], (u16)b[l], (u16)c[l]);
    if (N == 2) r[l] |= (u32)apply(i, (u16)(a[l] >> 16), (u16)(b[l] >> 16), (u16)(c[l] >> 16)) << 16;
  }
  write(w, i.a[0], r, m);
}

}  // namespace

bool decode_half(Decoder& d) {
  static const std::unordered_map<std::string, std::pair<Op, int>> ops = {
      {"add", {ADD, 2}}, {"sub", {SUB, 2}}, {"mul", {MUL, 2}}, {"fma", {FMA, 3}}, {"min", {MIN, 2}},
      {"max", {MAX, 2}}, {"abs", {ABS, 1}}, {"neg", {NEG, 1}}, {"ex2", {EX2, 1}}, {"tanh", {TANH, 1}}};
  Type t = d.type();
  auto f = ops.find(d.st.opcode);
  if (f == ops.end() || (t != F16 && t != BF16 && t != F16X2 && t != BF16X2)) return false;
  if (d.types().size() > 1 || d.has("xorsign")) d.unknown("type");
  d.ins.a[0] = d.dst(0, t);
  for (int k = 1; k <= 3; k++) d.ins.a[k] = d.src((size_t)std::min(k, f->second.second), t);
  d.ins.n = f->second.first;
  bool bf = t == BF16 || t == BF16X2;
  d.ins.bytes = (u8)(bf | d.has("relu") << 1 | d.has("sat") << 2 | d.has("NaN") << 3 | d.has("ftz") << 4);
  d.ins.fn = t == F16X2 || t == BF16X2 ? half<2> : half<1>;
  return true;
}

void register_half(Table&) {}

}  // namespace emu
