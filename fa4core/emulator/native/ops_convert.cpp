// cvt, mov (with packing and unpacking), cvta. PTX ISA: "Data Movement and Conversion Instructions".
#include "lanes.h"
#include "numbers.h"

namespace emu {
namespace {

constexpr auto Same = [](auto a) { return a; };
template <class To> constexpr auto Cast = [](auto a) { return (To)a; };
constexpr auto BfToF = [](u16 a) { return bfloat_to_float(a); };
constexpr auto HToF = [](u16 a) { return half_to_float(a); };

// ---- the general conversion, one lane at a time ----
struct Conversion { Type to, from; Round round; bool integral, sat, relu, ftz, satfinite; int to_width; };

inline double round_integral(double x, Round r) {
  switch (r) {
    case Round::Near: return std::nearbyint(x);
    case Round::Zero: return std::trunc(x);
    case Round::Down: return std::floor(x);
    case Round::Up: return std::ceil(x);
    default: return std::round(x);
  }
}

inline double source_float(u64 v, Type t) {
  switch (t) {
    case F16: return half_to_float((u16)v);
    case BF16: return bfloat_to_float((u16)v);
    case F32: return bits<float>((u32)v);
    default: return bits<double>(v);
  }
}

inline i64 source_int(u64 v, Type t) {
  switch (t) {
    case U8: return (u8)v;
    case S8: return (i8)v;
    case U16: return (u16)v;
    case S16: return (i16)v;
    case U32: return (u32)v;
    case S32: return (i32)v;
    default: return (i64)v;
  }
}

inline float double_to_float(double x, Round r) {
  float f = (float)x;
  if (r == Round::Near || std::isnan(x) || (double)f == x) return f;
  float lo = (double)f > x ? std::nextafter(f, -INFINITY) : f, hi = (double)f < x ? std::nextafter(f, INFINITY) : f;
  if (r == Round::Down) return lo;
  if (r == Round::Up) return hi;
  return x > 0 ? lo : hi;
}

u64 to_int(double x, Type t, Round r) {  // saturates, NaN -> 0 (PTX ISA, cvt)
  x = round_integral(x, r);
  if (x != x) return t == U64 || t == S64 ? 0x8000000000000000ull : t == U32 || t == S32 ? (t == S32 ? 0 : 0) : 0;
  int b = type_bits(t);
  if (is_signed(t)) {
    double lim = std::ldexp(1.0, b - 1);
    if (x >= lim) return (u64)((1ull << (b - 1)) - 1);
    if (x < -lim) return (u64)(-(i64)(1ull << (b - 1) ) );
    return (u64)(i64)x;
  }
  if (x <= 0) return 0;
  if (x >= std::ldexp(1.0, b)) return b == 64 ? ~0ull : (1ull << b) - 1;
  return (u64)x;
}

u64 from_double(double x, const Conversion& c) {
  if (c.sat) x = x > 0 ? std::min(x, 1.0) : 0.0;
  if (c.relu && !(x > 0) && x == x) x = 0;
  if (c.relu && x != x) x = NAN;
  switch (c.to) {
    case F64: return bits<u64>(x);
    case F32: {
      float f = double_to_float(x, c.round);
      if (c.ftz) f = flush(f);
      return bits<u32>(f == f ? f : bits<float>(0x7fffffffu));
    }
    case F16: {
      u16 h = round_half(x, c.round);
      return c.satfinite && (h & 0x7fff) == 0x7c00 ? (h & 0x8000) | 0x7bff : h;
    }
    case BF16: {
      u16 h = round_bfloat((float)x, c.round);
      return c.satfinite && (h & 0x7fff) == 0x7f80 ? (h & 0x8000) | 0x7f7f : h;
    }
    case TF32: return bits<u32>(round_tf32((float)x, c.round));
    case E4M3: return round_e4m3((float)x, c.round);
    case E5M2: return round_e5m2((float)x, c.round);
    default: return to_int(x, c.to, c.round);
  }
}

u64 convert(u64 v, const Conversion& c) {
  if (is_float(c.from)) {
    double x = source_float(v, c.from);
    if (c.ftz && c.from == F32) x = flush((float)x);
    if (is_float(c.to) && c.integral) x = round_integral(x, c.round);
    return from_double(x, c);
  }
  i64 x = source_int(v, c.from);
  if (is_float(c.to)) {
    if (c.to == F32) {  // a double may round first: 64-bit sources go through long double
      long double y = c.from == U64 ? (long double)(u64)x : (long double)x;
      if (c.round == Round::Near) return bits<u32>((float)y);
      float f = (float)y;
      if ((long double)f != y) {
        if (c.round == Round::Down || (c.round == Round::Zero && y > 0)) { if ((long double)f > y) f = std::nextafter(f, -INFINITY); }
        else if ((long double)f < y) f = std::nextafter(f, INFINITY);
      }
      return bits<u32>(f);
    }
    return from_double(c.from == U64 ? (double)(u64)x : (double)x, c);
  }
  if (c.sat) {
    int b = type_bits(c.to);
    __int128 y = c.from == U64 ? (__int128)(u64)x : (__int128)x;
    __int128 lo = is_signed(c.to) ? -((__int128)1 << (b - 1)) : 0;
    __int128 hi = is_signed(c.to) ? ((__int128)1 << (b - 1)) - 1 : ((__int128)1 << b) - 1;
    y = y < lo ? lo : y > hi ? hi : y;
    return (u64)y;
  }
  return (u64)source_int((u64)x, c.to);
}

void general(Warp& w, const Ins& i, Mask m) {
  const Conversion c = {(Type)i.x->n[0], (Type)i.x->n[1], (Round)i.x->n[2], i.x->n[3] != 0, i.x->n[4] != 0,
                        i.x->n[5] != 0, i.x->n[6] != 0, i.x->n[7] != 0, i.x->n[8]};
  bool wide_in = type_bits(c.from) == 64;
  FOR_LANES(l, m) {
    u64 v = w.r(i.a[1])[l];
    if (wide_in) v |= (u64)w.r(i.a[1] + 1)[l] << 32;
    u64 r = convert(v, c);
    if (c.to_width == 16) r &= 0xffff;
    w.w(i.a[0])[l] = (u32)r;
    if (c.to_width == 64) w.w(i.a[0] + 1)[l] = (u32)(r >> 32);
  }
}

// ---- packed: two sources into one register (the first goes to the upper half), or fp8/fp4 pairs ----
template <bool BF> void pack_near(Warp& w, const Ins& i, Mask m) {
  const float *a = (const float*)w.r(i.a[1]), *b = (const float*)w.r(i.a[2]);
  alignas(64) u32 r[LANES];
  for (int l = 0; l < LANES; l++) {
    u32 hi = BF ? bfloat_near(a[l]) : half_near(a[l]), lo = BF ? bfloat_near(b[l]) : half_near(b[l]);
    r[l] = hi << 16 | lo;
  }
  write(w, i.a[0], r, m);
}

u32 pair_from_floats(float hi, float lo, const Conversion& c) {
  if (c.relu) { hi = hi > 0 ? hi : hi == hi ? 0 : hi; lo = lo > 0 ? lo : lo == lo ? 0 : lo; }
  switch (c.to) {
    case E4M3X2: return (u32)round_e4m3(hi) << 8 | round_e4m3(lo);
    case E5M2X2: return (u32)round_e5m2(hi) << 8 | round_e5m2(lo);
    case E2M1X2: return (u32)round_e2m1(hi) << 4 | round_e2m1(lo);
    case BF16X2: case F16X2: {
      Conversion one = c;
      one.to = c.to == BF16X2 ? BF16 : F16;
      one.sat = one.relu = false;
      return (u32)from_double(hi, one) << 16 | (u32)from_double(lo, one);
    }
    default: {  // ue8m0x2: powers of two
      auto e = [&](float x) -> u32 {
        if (x != x) return 255;
        u32 b = bits<u32>(std::fabs(x)), up = c.round == Round::Up && (b & 0x7fffff);
        return std::min((b >> 23) + up, 254u);
      };
      return e(hi) << 8 | e(lo);
    }
  }
}

void packed(Warp& w, const Ins& i, Mask m) {
  Conversion c = {(Type)i.x->n[0], (Type)i.x->n[1], (Round)i.x->n[2], false, false, i.x->n[5] != 0, false, i.x->n[7] != 0, 0};
  auto half_pair = [&](float hi, float lo) {  // exact: fp8 values are halves
    u32 x = c.to == F16X2 ? half_near(hi) : bfloat_near(hi), y = c.to == F16X2 ? half_near(lo) : bfloat_near(lo);
    return x << 16 | y;
  };
  FOR_LANES(l, m) {
    u32 v = w.r(i.a[1])[l], r;
    switch (c.from) {
      case F32: r = pair_from_floats(bits<float>(v), bits<float>(w.r(i.a[2])[l]), c); break;
      case F16X2: r = pair_from_floats(half_to_float((u16)(v >> 16)), half_to_float((u16)v), c); break;
      case BF16X2: r = pair_from_floats(bfloat_to_float((u16)(v >> 16)), bfloat_to_float((u16)v), c); break;
      case E4M3X2: r = half_pair(e4m3_to_float((u8)(v >> 8)), e4m3_to_float((u8)v)); break;
      case E5M2X2: r = half_pair(e5m2_to_float((u8)(v >> 8)), e5m2_to_float((u8)v)); break;
      case E2M1X2: r = half_pair(e2m1_to_float(v >> 4 & 15), e2m1_to_float(v & 15)); break;
      default: r = half_pair(std::ldexp(1.0f, (int)(v >> 8 & 255) - 127), std::ldexp(1.0f, (int)(v & 255) - 127));
    }
    w.w(i.a[0])[l] = r;
  }
}

bool is_pair(Type t) {
  return t == BF16X2 || t == F16X2 || t == E4M3X2 || t == E5M2X2 || t == E2M1X2 || t == E8M0X2;
}

Handler fast(const Conversion& c) {
  if (c.sat || c.relu || c.satfinite || c.ftz || c.integral) return nullptr;
  int to = type_bits(c.to), from = type_bits(c.from);
  bool ints = !is_float(c.to) && !is_float(c.from) && c.to != TF32;
  if (ints && to >= 32 && from >= 16 && c.to_width == to) {
    if (to == 32 && from == 16) return c.from == S16 ? unary<i16, Cast<i32>> : unary<u16, Cast<u32>>;
    if (to == 32 && from == 32) return unary<u32, Same>;
    if (to == 32) return unary<u64, Cast<u32>>;
    if (from == 16) return c.from == S16 ? unary<i16, Cast<i64>> : unary<u16, Cast<u64>>;
    if (from == 32) return c.from == S32 ? unary<i32, Cast<i64>> : unary<u32, Cast<u64>>;
    return unary<u64, Same>;
  }
  if (ints && to == 16 && c.to_width == 16 && from >= 16)
    return from == 64 ? unary<u64, Cast<u16>> : from == 32 ? unary<u32, Cast<u16>> : unary<u16, Same>;
  if (c.to == F32 && c.from == BF16) return unary<u16, BfToF>;
  if (c.to == F32 && c.from == F16) return unary<u16, HToF>;
  if (c.to == F32 && c.round == Round::Near) {
    if (c.from == S32) return unary<i32, Cast<float>>;
    if (c.from == U32) return unary<u32, Cast<float>>;
  }
  if (c.to == F64 && c.from == F32) return unary<float, Cast<double>>;
  return nullptr;
}

void decode_cvt(Decoder& d) {
  auto t = d.types();
  if (t.size() != 2 || d.has("rs") || d.has("pack")) d.unknown();
  Conversion c{t[0], t[1], Round::Near, false, d.has("sat"), d.has("relu"), d.has("ftz"), d.has("satfinite"), 0};
  bool up = d.has("rp") || d.has("rpi"), down = d.has("rm") || d.has("rmi"), zero = d.has("rz") || d.has("rzi");
  c.round = up ? Round::Up : down ? Round::Down : zero ? Round::Zero : d.has("rna") ? Round::Away : Round::Near;
  c.integral = d.has("rni") || d.has("rzi") || d.has("rmi") || d.has("rpi");
  auto& x = d.extra();
  int n[] = {c.to, c.from, (int)c.round, c.integral, c.sat, c.relu, c.ftz, c.satfinite};
  std::copy(n, n + 8, x.n);
  if (is_pair(c.to) || is_pair(c.from)) {
    d.ins.a[0] = d.dst(0, c.to), d.ins.a[1] = d.src(1, c.from);
    if (c.from == F32) d.ins.a[2] = d.src(2, F32);
    bool plain = c.from == F32 && c.round == Round::Near && !c.relu && !c.satfinite;
    d.ins.fn = plain && c.to == BF16X2 ? pack_near<true> : plain && c.to == F16X2 ? pack_near<false> : packed;
    return;
  }
  d.ins.a[0] = d.dst(0, c.to), d.ins.a[1] = d.src(1, c.from);
  c.to_width = x.n[8] = d.op(0).width;
  if (Handler h = fast(c)) d.ins.fn = h; else d.ins.fn = general;
}

// ---- mov ----
template <int N> void copy(Warp& w, const Ins& i, Mask m) {
  for (u32 k = 0; k < N; k++) store(w.w(i.a[0] + k), w.r(i.a[1] + k), m);
}

void copy_zero_high(Warp& w, const Ins& i, Mask m) {  // a 32-bit special register into 64 bits
  static const u32 zero[LANES] = {};
  store(w.w(i.a[0]), w.r(i.a[1]), m);
  store(w.w(i.a[0] + 1), zero, m);
}

void moving_special(Warp& w, const Ins& i, Mask m) {  // clocks and the active mask
  alignas(64) u64 r[LANES];
  u64 v = i.n == 1 ? (u64)w.active : w.machine->time * 8 + w.program->code.size();
  for (auto& x : r) x = v;
  if (i.bytes == 8) write(w, i.a[0], r, m);
  else {
    alignas(64) u32 q[LANES];
    for (auto& x : q) x = (u32)(i.n == 2 ? v >> 32 : v);
    write(w, i.a[0], q, m);
  }
}

// Packing: pieces of `n` bits of the vector operand against the whole register.
void pack_planes(Warp& w, const Ins& i, Mask m) {
  alignas(64) u32 tmp[4][LANES];
  size_t n = i.x->regs.size();
  for (size_t k = 0; k < n; k++) std::memcpy(tmp[k], w.r(i.x->regs[k]), sizeof tmp[k]);
  for (size_t k = 0; k < n; k++) store(w.w(i.a[0] + (u32)k), tmp[k], m);
}
void unpack_planes(Warp& w, const Ins& i, Mask m) {
  alignas(64) u32 tmp[4][LANES];
  size_t n = i.x->regs.size();
  for (size_t k = 0; k < n; k++) std::memcpy(tmp[k], w.r(i.a[1] + (u32)k), sizeof tmp[k]);
  for (size_t k = 0; k < n; k++)
    if (i.x->regs[k] != NONE) store(w.w(i.x->regs[k]), tmp[k], m);
}
void pack_pieces(Warp& w, const Ins& i, Mask m) {
  int b = i.n;
  u32 field = b == 32 ? ~0u : (1u << b) - 1;
  size_t n = i.x->regs.size();
  FOR_LANES(l, m) {
    u64 v = 0;
    for (size_t k = 0; k < n; k++) v |= (u64)(w.r(i.x->regs[k])[l] & field) << (b * (int)k);
    w.w(i.a[0])[l] = (u32)v;
    if (b * (int)n > 32) w.w(i.a[0] + 1)[l] = (u32)(v >> 32);
  }
}
void unpack_pieces(Warp& w, const Ins& i, Mask m) {
  int b = i.n;
  u32 field = b == 32 ? ~0u : (1u << b) - 1;
  size_t n = i.x->regs.size();
  FOR_LANES(l, m) {
    u64 v = w.r(i.a[1])[l];
    if (b * (int)n > 32) v |= (u64)w.r(i.a[1] + 1)[l] << 32;
    for (size_t k = 0; k < n; k++)
      if (i.x->regs[k] != NONE) w.w(i.x->regs[k])[l] = (u32)(v >> (b * (int)k)) & field;
  }
}

void wide_pieces(Warp& w, const Ins& i, Mask m) {  // b128 <-> two 64-bit registers; n: packing
  alignas(64) u32 tmp[4][LANES];
  for (u32 k = 0; k < 4; k++)
    std::memcpy(tmp[k], i.n ? w.r(i.x->regs[k / 2] + k % 2) : w.r(i.a[1] + k), sizeof tmp[k]);
  for (u32 k = 0; k < 4; k++) {
    u32 to = i.n ? i.a[0] + k : i.x->regs[k / 2] == NONE ? NONE : i.x->regs[k / 2] + k % 2;
    if (to != NONE) store(w.w(to), tmp[k], m);
  }
}

Type piece_type(int bits_) { return bits_ == 8 ? B8 : bits_ == 16 ? B16 : bits_ == 32 ? B32 : B64; }

void decode_mov(Decoder& d) {
  Type t = d.type();
  int width = type_bits(t);
  if (t == PRED) {
    d.ins.a[0] = d.pred(0), d.ins.a[1] = d.pred(1);
    d.ins.n = d.op(1).negate;
    d.ins.fn = [](Warp& w, const Ins& i, Mask m) {
      Mask v = w.preds[i.a[1]] ^ (i.n ? FULL : 0), &p = w.preds[i.a[0]];
      p = (p & ~m) | (v & m);
    };
    return;
  }
  bool from_vector = d.op(1).kind == Operand::Vector, to_vector = d.op(0).kind == Operand::Vector;
  if (from_vector || to_vector) {
    int n = (int)d.op(from_vector ? 1 : 0).parts.size(), b = width / n;
    if (from_vector) d.ins.a[0] = d.dst(0, t), d.extra().regs = d.list(1, piece_type(b), false);
    else d.ins.a[1] = d.src(1, t), d.extra().regs = d.list(0, piece_type(b), true);
    d.ins.n = b;
    if (b == 32) d.ins.fn = from_vector ? pack_planes : unpack_planes;
    else if (b == 64) d.ins.n = from_vector, d.ins.fn = wide_pieces;
    else d.ins.fn = from_vector ? pack_pieces : unpack_pieces;
    return;
  }
  d.ins.a[0] = d.dst(0, t);
  if (d.op(1).kind == Operand::Special) {
    auto& s = d.op(1).name;
    if (s.rfind("clock", 0) == 0 || s.rfind("globaltimer", 0) == 0) {
      d.ins.n = s == "clock_hi" || s == "globaltimer_hi" ? 2 : 0;
      d.ins.bytes = (u8)(width / 8);
      d.ins.fn = moving_special;
      return;
    }
    d.ins.a[1] = d.p.special(s);
    d.ins.fn = width == 64 ? copy_zero_high : copy<1>;
    return;
  }
  if (width != d.op(0).width && d.op(0).width > width) d.unknown("width");
  d.ins.a[1] = d.src(1, t);
  d.ins.fn = width <= 32 ? copy<1> : width == 64 ? copy<2> : copy<4>;
}

// cvta: shared and local addresses get their window, global and param are the same already.
void add_window(Warp& w, const Ins& i, Mask m) {
  const u32 *lo = w.r(i.a[1]), *hi = i.bytes == 8 ? w.r(i.a[1] + 1) : nullptr;
  u64 window = i.n == 1 ? SHARED_WINDOW : LOCAL_WINDOW;
  FOR_LANES(l, m) {
    u64 v = lo[l] | (hi ? (u64)hi[l] << 32 : 0);
    if (i.n == 1 && !(v >> RANK_SHIFT)) v |= (u64)w.cta->rank << RANK_SHIFT;
    v |= window;
    w.w(i.a[0])[l] = (u32)v;
    w.w(i.a[0] + 1)[l] = (u32)(v >> 32);
  }
}
void strip_window(Warp& w, const Ins& i, Mask m) {
  FOR_LANES(l, m) {
    u64 v = w.r(i.a[1])[l] | (u64)w.r(i.a[1] + 1)[l] << 32;
    v &= ~WINDOW_MASK;
    w.w(i.a[0])[l] = (u32)v;
    if (i.bytes == 8) w.w(i.a[0] + 1)[l] = (u32)(v >> 32);
  }
}

void decode_cvta(Decoder& d) {
  bool to = d.has("to");
  Type t = d.type();
  d.ins.a[0] = d.dst(0, t), d.ins.a[1] = d.src(1, t);
  d.ins.bytes = (u8)(type_bits(t) / 8);
  std::string space = d.st.mods[to ? 1 : 0];
  d.ins.n = space.rfind("shared", 0) == 0 ? 1 : space == "local" ? 2 : 0;
  if (!d.ins.n) { d.ins.fn = d.ins.bytes == 8 ? copy<2> : copy<1>; return; }
  d.ins.fn = to ? strip_window : add_window;
}

void isspacep(Warp& w, const Ins& i, Mask m) {
  Mask r = 0;
  for (int l = 0; l < LANES; l++) {
    u64 v = (u64)w.r(i.a[1] + 1)[l] << 32 | w.r(i.a[1])[l], window = v & WINDOW_MASK;
    bool own = (v >> RANK_SHIFT & 0xff) == w.cta->rank;
    bool yes = i.n == 1 ? window == SHARED_WINDOW && (own || i.bytes) : i.n == 2 ? window == LOCAL_WINDOW : window == 0;
    r |= (Mask)yes << l;
  }
  Mask& p = w.preds[i.a[0]];
  p = (p & ~m) | (r & m);
}

void decode_isspacep(Decoder& d) {
  d.ins.a[0] = d.pred(0), d.ins.a[1] = d.src(1, B64);
  auto& s = d.st.mods.at(0);
  d.ins.n = s.rfind("shared", 0) == 0 ? 1 : s == "local" ? 2 : 0;
  d.ins.bytes = s == "shared::cluster";
  d.ins.fn = isspacep;
}

}  // namespace

void register_convert(Table& t) {
  t["cvt"] = decode_cvt;
  t["mov"] = decode_mov;
  t["cvta"] = decode_cvta;
  t["isspacep"] = decode_isspacep;
}

}  // namespace emu
