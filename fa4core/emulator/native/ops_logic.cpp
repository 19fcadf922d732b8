// Logic, shifts, moves, comparisons and selections. PTX ISA: "Logic and Shift Instructions",
// "Comparison and Selection Instructions", "Data Movement: mov, prmt, cvta, isspacep".
#include "lanes.h"
#include "numbers.h"

namespace emu {
namespace {

constexpr auto And = [](auto a, auto b) { return (decltype(a))(a & b); };
constexpr auto Or = [](auto a, auto b) { return (decltype(a))(a | b); };
constexpr auto Xor = [](auto a, auto b) { return (decltype(a))(a ^ b); };
constexpr auto Not = []<class T>(T a) { return (T)~a; };
constexpr auto Cnot = []<class T>(T a) { return (T)(a == 0); };
constexpr auto Shl = []<class T>(T a, u32 b) { return b >= 8 * sizeof(T) ? (T)0 : (T)(a << b); };
constexpr auto Shr = []<class T>(T a, u32 b) {
  constexpr u32 W = 8 * sizeof(T);
  if constexpr (std::is_signed_v<T>) return (T)(a >> (b >= W ? W - 1 : b));
  return b >= W ? (T)0 : (T)(a >> b);
};

void two_of(Decoder& d, Type t, Type u) { d.ins.a[0] = d.dst(0, t), d.ins.a[1] = d.src(1, t), d.ins.a[2] = d.src(2, u); }

// Predicates: a[0] = op(a[1], a[2]); n holds which sources are negated.
template <int OP> void pred_logic(Warp& w, const Ins& i, Mask m) {
  Mask a = w.preds[i.a[1]] ^ (i.n & 1 ? FULL : 0);
  Mask b = OP == 3 ? 0 : w.preds[i.a[2]] ^ (i.n & 2 ? FULL : 0);
  Mask r = OP == 0 ? a & b : OP == 1 ? a | b : OP == 2 ? a ^ b : OP == 3 ? ~a : a;
  Mask& d = w.preds[i.a[0]];
  d = (d & ~m) | (r & m);
}

void pred_source(Decoder& d, size_t op, int at) {
  d.ins.a[at] = d.pred(op);
  if (d.op(op).negate) d.ins.n |= 1 << (at - 1);
}

template <auto F, int OP> void decode_logic(Decoder& d) {
  Type t = d.type();
  if (t == PRED) {
    d.ins.a[0] = d.pred(0);
    pred_source(d, 1, 1), pred_source(d, 2, 2);
    d.ins.fn = pred_logic<OP>;
    return;
  }
  two_of(d, t, t);
  int b = type_bits(t);
  d.ins.fn = b == 16 ? binary<u16, F> : b == 32 ? binary<u32, F> : binary<u64, F>;
}

void decode_not(Decoder& d) {
  Type t = d.type();
  if (t == PRED) {
    d.ins.a[0] = d.pred(0);
    pred_source(d, 1, 1);
    d.ins.fn = pred_logic<3>;
    return;
  }
  d.ins.a[0] = d.dst(0, t), d.ins.a[1] = d.src(1, t);
  int b = type_bits(t);
  d.ins.fn = b == 16 ? unary<u16, Not> : b == 32 ? unary<u32, Not> : unary<u64, Not>;
}

void decode_cnot(Decoder& d) {
  Type t = d.type();
  d.ins.a[0] = d.dst(0, t), d.ins.a[1] = d.src(1, t);
  int b = type_bits(t);
  d.ins.fn = b == 16 ? unary<u16, Cnot> : b == 32 ? unary<u32, Cnot> : unary<u64, Cnot>;
}

void decode_shl(Decoder& d) {
  Type t = d.type();
  two_of(d, t, U32);
  int b = type_bits(t);
  d.ins.fn = b == 16 ? binary<u16, Shl, u32> : b == 32 ? binary<u32, Shl, u32> : binary<u64, Shl, u32>;
}

void decode_shr(Decoder& d) {
  Type t = d.type();
  two_of(d, t, U32);
  switch (t) {
    case S16: d.ins.fn = binary<i16, Shr, u32>; break;
    case S32: d.ins.fn = binary<i32, Shr, u32>; break;
    case S64: d.ins.fn = binary<i64, Shr, u32>; break;
    default: {
      int b = type_bits(t);
      d.ins.fn = b == 16 ? binary<u16, Shr, u32> : b == 32 ? binary<u32, Shr, u32> : binary<u64, Shr, u32>;
    }
  }
}

template <bool RIGHT, bool WRAP> void shf(Warp& w, const Ins& i, Mask m) {
  const u32 *a = w.r(i.a[1]), *b = w.r(i.a[2]), *c = w.r(i.a[3]);
  alignas(64) u32 r[LANES];
  for (int l = 0; l < LANES; l++) {
    u32 n = WRAP ? c[l] & 31 : std::min(c[l], 32u);
    u64 v = (u64)b[l] << 32 | a[l];
    r[l] = RIGHT ? (u32)(v >> n) : (u32)((v << n) >> 32);
  }
  write(w, i.a[0], r, m);
}

void decode_shf(Decoder& d) {
  two_of(d, B32, B32);
  d.ins.a[3] = d.src(3, U32);
  bool r = d.has("r"), wrap = d.has("wrap");
  d.ins.fn = r ? (wrap ? shf<1, 1> : shf<1, 0>) : (wrap ? shf<0, 1> : shf<0, 0>);
}

void lop3(Warp& w, const Ins& i, Mask m) {
  const u32 *a = w.r(i.a[1]), *b = w.r(i.a[2]), *c = w.r(i.a[3]);
  alignas(64) u32 r[LANES] = {};
  for (int k = 0; k < 8; k++) {
    if (!(i.n >> k & 1)) continue;
    u32 x = k & 4 ? 0 : ~0u, y = k & 2 ? 0 : ~0u, z = k & 1 ? 0 : ~0u;
    for (int l = 0; l < LANES; l++) r[l] |= (a[l] ^ x) & (b[l] ^ y) & (c[l] ^ z);
  }
  write(w, i.a[0], r, m);
}

void decode_lop3(Decoder& d) {
  if (d.st.mods.size() != 1 || d.st.mods[0] != "b32") d.unknown();
  two_of(d, B32, B32);
  d.ins.a[3] = d.src(3, B32);
  d.ins.n = (i32)d.op(4).value;
  d.ins.fn = lop3;
}

void prmt(Warp& w, const Ins& i, Mask m) {
  const u32 *a = w.r(i.a[1]), *b = w.r(i.a[2]), *c = w.r(i.a[3]);
  alignas(64) u32 r[LANES];
  for (int l = 0; l < LANES; l++) {
    u64 v = (u64)b[l] << 32 | a[l];
    u32 x = 0;
    for (int k = 0; k < 4; k++) {
      u32 s = c[l] >> (4 * k);
      u32 byte = (u32)(v >> (8 * (s & 7))) & 0xff;
      if (s & 8) byte = byte & 0x80 ? 0xff : 0;
      x |= byte << (8 * k);
    }
    r[l] = x;
  }
  write(w, i.a[0], r, m);
}

void prmt_mode(Warp& w, const Ins& i, Mask m) {
  static const u16 table[6][4] = {{0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123},
                                  {0x0000, 0x1111, 0x2222, 0x3333}, {0x3210, 0x3211, 0x3222, 0x3333},
                                  {0x0000, 0x1110, 0x2210, 0x3210}, {0x1010, 0x3232, 0x1010, 0x3232}};
  const u32 *a = w.r(i.a[1]), *b = w.r(i.a[2]), *c = w.r(i.a[3]);
  alignas(64) u32 r[LANES];
  for (int l = 0; l < LANES; l++) {
    u64 v = (u64)b[l] << 32 | a[l];
    u32 s = table[i.n][c[l] & 3], x = 0;
    for (int k = 0; k < 4; k++) x |= ((u32)(v >> (8 * (s >> (4 * k) & 7))) & 0xff) << (8 * k);
    r[l] = x;
  }
  write(w, i.a[0], r, m);
}

void decode_prmt(Decoder& d) {
  two_of(d, B32, B32);
  d.ins.a[3] = d.src(3, B32);
  d.ins.fn = prmt;
  static const char* modes[] = {"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"};
  for (int k = 0; k < 6; k++)
    if (d.has(modes[k])) d.ins.fn = prmt_mode, d.ins.n = k;
}

// ---- comparisons ----
enum Cmp { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_ };

template <class T, Cmp C> inline bool compare(T a, T b) {
  if constexpr (C == EQ) return a == b;
  else if constexpr (C == NE) return std::is_floating_point_v<T> ? (a < b || a > b) : a != b;
  else if constexpr (C == LT) return a < b;
  else if constexpr (C == LE) return a <= b;
  else if constexpr (C == GT) return a > b;
  else if constexpr (C == GE) return a >= b;
  else if constexpr (C == EQU) return !(a < b || a > b);
  else if constexpr (C == NEU) return !(a == b);
  else if constexpr (C == LTU) return !(a >= b);
  else if constexpr (C == LEU) return !(a > b);
  else if constexpr (C == GTU) return !(a <= b);
  else if constexpr (C == GEU) return !(a < b);
  else if constexpr (C == NUM) return a == a && b == b;
  else return !(a == a && b == b);
}

template <class T, Cmp C> Mask compare_lanes(const Warp& w, u32 pa, u32 pb) {
  auto a = read<T>(w, pa);
  auto b = read<T>(w, pb);
  alignas(64) u32 r[LANES];
  for (int l = 0; l < LANES; l++) r[l] = compare<T, C>(a[l], b[l]);
  return gather_bits(r);
}
template <auto TO, Cmp C> Mask compare_half(const Warp& w, u32 pa, u32 pb) {
  const u32 *a = w.r(pa), *b = w.r(pb);
  Mask m = 0;
  for (int l = 0; l < LANES; l++) m |= (Mask)compare<float, C>(TO((u16)a[l]), TO((u16)b[l])) << l;
  return m;
}

using Comparer = Mask (*)(const Warp&, u32, u32);

// n: bit 0 third operand negated, bits 1.. boolean operation (0 none, 1 and, 2 or, 3 xor)
template <Comparer F> void setp(Warp& w, const Ins& i, Mask m) {
  Mask r = F(w, i.a[2], i.a[3]), q = ~r;
  if (i.n >> 1) {
    Mask c = w.preds[i.a[4]] ^ (i.n & 1 ? FULL : 0);
    switch (i.n >> 1) {
      case 1: r &= c, q &= c; break;
      case 2: r |= c, q |= c; break;
      default: r ^= c, q ^= c;
    }
  }
  auto put = [&](u32 d, Mask v) { if (d != NONE) w.preds[d] = (w.preds[d] & ~m) | (v & m); };
  put(i.a[0], r);
  put(i.a[1], q);
}

// set: a register of ones / zeros; bytes: 1 if the result is 1.0f
template <Comparer F> void set_(Warp& w, const Ins& i, Mask m) {
  Mask r = F(w, i.a[2], i.a[3]);
  if (i.n >> 1) {
    Mask c = w.preds[i.a[4]] ^ (i.n & 1 ? FULL : 0);
    r = i.n >> 1 == 1 ? r & c : i.n >> 1 == 2 ? r | c : r ^ c;
  }
  alignas(64) u32 v[LANES];
  u32 one = i.bytes ? 0x3f800000u : 0xffffffffu;
  for (int l = 0; l < LANES; l++) v[l] = r >> l & 1 ? one : 0;
  write(w, i.a[0], v, m);
}

template <class T, Cmp C> Handler pick(bool set) { return set ? set_<compare_lanes<T, C>> : setp<compare_lanes<T, C>>; }
template <auto TO, Cmp C> Handler pick_half(bool set) { return set ? set_<compare_half<TO, C>> : setp<compare_half<TO, C>>; }

template <Cmp C> Handler pick_type(Type t, bool set, Decoder& d) {
  switch (t) {
    case B16: case U16: return pick<u16, C>(set);
    case S16: return pick<i16, C>(set);
    case B32: case U32: return pick<u32, C>(set);
    case S32: return pick<i32, C>(set);
    case B64: case U64: return pick<u64, C>(set);
    case S64: return pick<i64, C>(set);
    case F32: return pick<float, C>(set);
    case F64: return pick<double, C>(set);
    case F16: return pick_half<half_to_float, C>(set);
    case BF16: return pick_half<bfloat_to_float, C>(set);
    default: d.unknown("type");
  }
}

Handler pick_compare(const std::string& c, Type t, bool set, Decoder& d) {
  if (c == "eq") return pick_type<EQ>(t, set, d);
  if (c == "ne") return pick_type<NE>(t, set, d);
  if (c == "lt" || c == "lo") return pick_type<LT>(t, set, d);
  if (c == "le" || c == "ls") return pick_type<LE>(t, set, d);
  if (c == "gt" || c == "hi") return pick_type<GT>(t, set, d);
  if (c == "ge" || c == "hs") return pick_type<GE>(t, set, d);
  if (c == "equ") return pick_type<EQU>(t, set, d);
  if (c == "neu") return pick_type<NEU>(t, set, d);
  if (c == "ltu") return pick_type<LTU>(t, set, d);
  if (c == "leu") return pick_type<LEU>(t, set, d);
  if (c == "gtu") return pick_type<GTU>(t, set, d);
  if (c == "geu") return pick_type<GEU>(t, set, d);
  if (c == "num") return pick_type<NUM>(t, set, d);
  if (c == "nan") return pick_type<NAN_>(t, set, d);
  d.unknown("comparison");
}

void decode_compare(Decoder& d, bool set) {
  Type t = d.type();
  if (set) {
    Type r = d.type(1);
    d.ins.a[0] = d.dst(0, r);
    d.ins.bytes = r == F32;
  } else {
    d.ins.a[0] = d.pred(0);
    if (d.op(0).pair >= 0) d.ins.a[1] = (u32)d.op(0).pair;
  }
  d.ins.a[2] = d.src(1, t), d.ins.a[3] = d.src(2, t);
  if (d.count() > 3) {
    d.ins.a[4] = d.pred(3);
    int op = d.has("and") ? 1 : d.has("or") ? 2 : d.has("xor") ? 3 : 0;
    d.ins.n = op << 1 | (d.op(3).negate ? 1 : 0);
  }
  d.ins.fn = pick_compare(d.st.mods.at(0), t, set, d);
}

template <int PLANES> void selp(Warp& w, const Ins& i, Mask m) {
  Mask p = w.preds[i.a[3]] ^ (i.n ? FULL : 0);
  for (int k = 0; k < PLANES; k++) {
    const u32 *a = w.r(i.a[1] + (u32)k), *b = w.r(i.a[2] + (u32)k);
    alignas(64) u32 r[LANES];
    for (int l = 0; l < LANES; l++) r[l] = p >> l & 1 ? a[l] : b[l];
    store(w.w(i.a[0] + (u32)k), r, m);
  }
}

void decode_selp(Decoder& d) {
  Type t = d.type();
  two_of(d, t, t);
  d.ins.a[3] = d.pred(3);
  d.ins.n = d.op(3).negate;
  d.ins.fn = type_bits(t) == 64 ? selp<2> : selp<1>;
}

void slct(Warp& w, const Ins& i, Mask m) {
  const u32 *a = w.r(i.a[1]), *b = w.r(i.a[2]), *c = w.r(i.a[3]);
  alignas(64) u32 r[LANES];
  for (int l = 0; l < LANES; l++)
    r[l] = (i.n ? bits<float>(c[l]) >= 0 : (i32)c[l] >= 0) ? a[l] : b[l];
  write(w, i.a[0], r, m);
}

void decode_slct(Decoder& d) {
  Type t = d.type(1), c = d.type();
  if (type_bits(t) != 32) d.unknown("type");
  two_of(d, t, t);
  d.ins.a[3] = d.src(3, c);
  d.ins.n = c == F32;
  d.ins.fn = slct;
}

}  // namespace

void register_logic(Table& t) {
  t["and"] = decode_logic<And, 0>;
  t["or"] = decode_logic<Or, 1>;
  t["xor"] = decode_logic<Xor, 2>;
  t["not"] = decode_not;
  t["cnot"] = decode_cnot;
  t["shl"] = decode_shl;
  t["shr"] = decode_shr;
  t["shf"] = decode_shf;
  t["lop3"] = decode_lop3;
  t["prmt"] = decode_prmt;
  t["setp"] = [](Decoder& d) { decode_compare(d, false); };
  t["set"] = [](Decoder& d) { decode_compare(d, true); };
  t["selp"] = decode_selp;
  t["slct"] = decode_slct;
}

}  // namespace emu
