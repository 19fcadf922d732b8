// Integer arithmetic. PTX ISA: "Integer Arithmetic Instructions", "Extended-Precision Integer
// Arithmetic Instructions".
#include "lanes.h"

namespace emu {
namespace {

template <class T>
using U = std::make_unsigned_t<T>;
template <class T>
using Wide = std::conditional_t<
    sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, i32, u32>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, i64, u64>,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;

constexpr auto Add = []<class T>(T a, T b) { return (T)((U<T>)a + (U<T>)b); };
constexpr auto Sub = []<class T>(T a, T b) { return (T)((U<T>)a - (U<T>)b); };
constexpr auto MulLo = []<class T>(T a, T b) { return (T)((Wide<U<T>>)(U<T>)a * (U<T>)b); };
constexpr auto MulHi = []<class T>(T a, T b) {
  return (T)((Wide<T>)a * (Wide<T>)b >> (8 * sizeof(T)));
};
constexpr auto MulWide = []<class T>(T a, T b) { return (Wide<T>)((Wide<T>)a * (Wide<T>)b); };
constexpr auto Mul24 = [](auto a, auto b) {
  using T = decltype(a);
  return (T)((U<T>)((T)((U<T>)a << 8) >> 8) * (U<T>)((T)((U<T>)b << 8) >> 8));
};
constexpr auto Div = []<class T>(T a, T b) {
  return b == 0 ? (T)-1 : (std::is_signed_v<T> && b == (T)-1) ? (T)(0 - (U<T>)a) : (T)(a / b);
};
constexpr auto Rem = []<class T>(T a, T b) {
  return b == 0 ? a : (std::is_signed_v<T> && b == (T)-1) ? (T)0 : (T)(a % b);
};
constexpr auto Min = [](auto a, auto b) { return a < b ? a : b; };
constexpr auto Max = [](auto a, auto b) { return a > b ? a : b; };
constexpr auto Abs = []<class T>(T a) { return (T)(a < 0 ? 0 - (U<T>)a : (U<T>)a); };
constexpr auto Neg = []<class T>(T a) { return (T)(0 - (U<T>)a); };
constexpr auto MadLo = []<class T>(T a, T b, T c) { return (T)(MulLo(a, b) + (U<T>)c); };
constexpr auto MadHi = []<class T>(T a, T b, T c) { return (T)((U<T>)MulHi(a, b) + (U<T>)c); };
constexpr auto MadWide = [](auto a, auto b, auto c) {
  using T = decltype(a);
  using W = decltype(c);
  return (W)((U<W>)((Wide<T>)a * (Wide<T>)b) + (U<W>)c);
};
constexpr auto Sad = []<class T>(T a, T b, T c) {
  return (T)((U<T>)c + (a < b ? (U<T>)b - (U<T>)a : (U<T>)a - (U<T>)b));
};
constexpr auto MinRelu = []<class T>(T a, T b) { return std::max<T>(std::min(a, b), 0); };
constexpr auto MaxRelu = []<class T>(T a, T b) { return std::max<T>(std::max(a, b), 0); };
constexpr auto AddSat = [](i32 a, i32 b) {
  i64 s = (i64)a + b;
  return (i32)(s > INT32_MAX ? INT32_MAX : s < INT32_MIN ? INT32_MIN : s);
};
constexpr auto SubSat = [](i32 a, i32 b) {
  i64 s = (i64)a - b;
  return (i32)(s > INT32_MAX ? INT32_MAX : s < INT32_MIN ? INT32_MIN : s);
};
constexpr auto Popc = [](auto a) { return (u32)__builtin_popcountll((u64)a); };
constexpr auto Clz = []<class T>(T a) {
  return (u32)(a ? __builtin_clzll((u64)a) - (64 - 8 * (int)sizeof(T)) : 8 * sizeof(T));
};
constexpr auto Brev = []<class T>(T a) {
  T r = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); i++) r |= (T)((a >> i & 1)) << (8 * sizeof(T) - 1 - i);
  return r;
};
constexpr auto Bfind = []<class T>(T a) {
  U<T> v = std::is_signed_v<T> && a < 0 ? (U<T>)~a : (U<T>)a;
  return v ? (u32)(63 - __builtin_clzll((u64)v)) : 0xffffffffu;
};
constexpr auto BfindShift = []<class T>(T a) {
  u32 b = Bfind(a);
  return b == 0xffffffffu ? b : (u32)(8 * sizeof(T) - 1 - b);
};

template <auto F>
Handler bin_int(Type t, Decoder& d) {
  switch (t) {
    case U16: return binary<u16, F>;
    case S16: return binary<i16, F>;
    case U32: return binary<u32, F>;
    case S32: return binary<i32, F>;
    case U64: return binary<u64, F>;
    case S64: return binary<i64, F>;
    default: d.unknown("type");
  }
}

template <class T>
constexpr auto F_add = [](T a, T b, T) { return (T)(a + b); };

template <auto F>
Handler un_int(Type t, Decoder& d) {
  switch (t) {
    case S16: return unary<i16, F>;
    case S32: return unary<i32, F>;
    case S64: return unary<i64, F>;
    default: d.unknown("type");
  }
}

template <auto F>
Handler un_bits(Type t, Decoder& d) {
  switch (t) {
    case B32:
    case U32: return unary<u32, F>;
    case B64:
    case U64: return unary<u64, F>;
    case S32: return unary<i32, F>;
    case S64: return unary<i64, F>;
    default: d.unknown("type");
  }
}

Type int_type(Decoder& d) {  // add.b32 etc. do not exist, but u/s do not matter for most
  Type t = d.type();
  return t == B16 ? U16 : t == B32 ? U32 : t == B64 ? U64 : t;
}

void three(Decoder& d, Type t) {
  d.ins.a[0] = d.dst(0, t), d.ins.a[1] = d.src(1, t), d.ins.a[2] = d.src(2, t);
}

// Two packed 16-bit integers: add/min/max.u16x2 and s16x2.
template <class T, auto F>
void packed16(Warp& w, const Ins& i, Mask m) {
  const u32 *a = w.r(i.a[1]), *b = w.r(i.a[2]);
  alignas(64) u32 r[LANES];
  for (int l = 0; l < LANES; l++)
    r[l] = (u16)F((T)a[l], (T)b[l]) | (u32)(u16)F((T)(a[l] >> 16), (T)(b[l] >> 16)) << 16;
  write(w, i.a[0], r, m);
}
constexpr auto Add16 = [](auto a, auto b) { return (decltype(a))(a + b); };

bool decode_packed(Decoder& d) {
  bool is_signed_ = d.has("s16x2");
  if (!is_signed_ && !d.has("u16x2")) return false;
  three(d, B32);
  auto& o = d.st.opcode;
  if (o == "add") d.ins.fn = packed16<u16, Add16>;
  else if (o == "min") d.ins.fn = is_signed_ ? packed16<i16, Min> : packed16<u16, Min>;
  else if (o == "max") d.ins.fn = is_signed_ ? packed16<i16, Max> : packed16<u16, Max>;
  else d.unknown();
  return true;
}

// add.cc, addc, sub.cc, subc: the carry of each lane is kept in the warp's extra predicate.
template <class T, bool SUB, bool IN, bool OUT>
void carry(Warp& w, const Ins& i, Mask m) {
  auto a = read<T>(w, i.a[1]);
  auto b = read<T>(w, i.a[2]);
  Mask& cc = w.preds[(u32)i.n];
  alignas(64) T r[LANES];
  Mask out = 0;
  for (int l = 0; l < LANES; l++) {
    unsigned __int128 x = a[l], y = b[l], c = IN ? cc >> l & 1 : 0, s = SUB ? x - y - c : x + y + c;
    r[l] = (T)s;
    out |= (Mask)((s >> (8 * sizeof(T))) & 1) << l;
  }
  write(w, i.a[0], r, m);
  if (OUT) cc = (cc & ~m) | (out & m);
}

void decode_carry(Decoder& d, bool sub, bool in) {
  Type t = int_type(d);
  three(d, t);
  bool out = d.has("cc"), wide = type_bits(t) == 64;
  d.ins.n = (i32)d.p.predicates;  // one past the program's own
#define C(S, I, O) \
  if (sub == S && in == I && out == O) d.ins.fn = wide ? carry<u64, S, I, O> : carry<u32, S, I, O>
  C(0, 0, 1);
  C(0, 1, 0);
  C(0, 1, 1);
  C(1, 0, 1);
  C(1, 1, 0);
  C(1, 1, 1);
#undef C
}

void decode_add(Decoder& d) {
  if (decode_packed(d) || decode_float(d)) return;
  if (d.has("cc")) return decode_carry(d, false, false);
  Type t = int_type(d);
  three(d, t);
  d.ins.fn = d.has("sat") ? binary<i32, AddSat> : bin_int<Add>(t, d);
}
void decode_sub(Decoder& d) {
  if (decode_float(d)) return;
  if (d.has("cc")) return decode_carry(d, true, false);
  Type t = int_type(d);
  three(d, t);
  d.ins.fn = d.has("sat") ? binary<i32, SubSat> : bin_int<Sub>(t, d);
}

template <auto F>
void wide_handler(Decoder& d, Type t) {
  switch (t) {
    case U16: d.ins.fn = binary<u16, F>; break;
    case S16: d.ins.fn = binary<i16, F>; break;
    case U32: d.ins.fn = binary<u32, F>; break;
    case S32: d.ins.fn = binary<i32, F>; break;
    default: d.unknown("type");
  }
}

Type widened(Type t) { return t == U16 ? U32 : t == S16 ? S32 : t == U32 ? U64 : S64; }

void decode_mul(Decoder& d) {
  if (decode_float(d)) return;
  Type t = int_type(d);
  if (d.has("wide")) {
    d.ins.a[0] = d.dst(0, widened(t)), d.ins.a[1] = d.src(1, t), d.ins.a[2] = d.src(2, t);
    wide_handler<MulWide>(d, t);
    return;
  }
  three(d, t);
  d.ins.fn = d.has("hi") ? bin_int<MulHi>(t, d) : bin_int<MulLo>(t, d);
}

void decode_mul24(Decoder& d) {
  Type t = int_type(d);
  three(d, t);
  if (!d.has("lo")) d.unknown();
  d.ins.fn = t == S32 ? binary<i32, Mul24> : binary<u32, Mul24>;
}

template <auto F>
Handler tern_int(Type t, Decoder& d) {
  switch (t) {
    case U16: return ternary<u16, F>;
    case S16: return ternary<i16, F>;
    case U32: return ternary<u32, F>;
    case S32: return ternary<i32, F>;
    case U64: return ternary<u64, F>;
    case S64: return ternary<i64, F>;
    default: d.unknown("type");
  }
}

void decode_mad(Decoder& d) {
  if (decode_float(d)) return;
  Type t = int_type(d);
  if (d.has("cc") || d.has("sat")) d.unknown("carry or saturation");
  d.ins.a[1] = d.src(1, t), d.ins.a[2] = d.src(2, t);
  if (d.has("wide")) {
    d.ins.a[0] = d.dst(0, widened(t)), d.ins.a[3] = d.src(3, widened(t));
    switch (t) {
      case U16: d.ins.fn = ternary<u16, MadWide, u32>; break;
      case S16: d.ins.fn = ternary<i16, MadWide, i32>; break;
      case U32: d.ins.fn = ternary<u32, MadWide, u64>; break;
      case S32: d.ins.fn = ternary<i32, MadWide, i64>; break;
      default: d.unknown("type");
    }
    return;
  }
  d.ins.a[0] = d.dst(0, t), d.ins.a[3] = d.src(3, t);
  d.ins.fn = d.has("hi") ? tern_int<MadHi>(t, d) : tern_int<MadLo>(t, d);
}

void decode_sad(Decoder& d) {
  Type t = int_type(d);
  three(d, t);
  d.ins.a[3] = d.src(3, t);
  d.ins.fn = tern_int<Sad>(t, d);
}

template <auto F>
void decode_bin(Decoder& d) {
  if (decode_packed(d) || decode_float(d)) return;
  Type t = int_type(d);
  three(d, t);
  d.ins.fn = bin_int<F>(t, d);
}

// RELU: the same, and 0 for negative results, of signed types.
template <auto F, auto RELU>
void decode_extreme(Decoder& d) {
  bool is_packed = d.has("s16x2");
  if (!d.has("relu") || (!is_packed && d.type() != S32)) return decode_bin<F>(d);
  three(d, is_packed ? B32 : S32);
  d.ins.fn = is_packed ? packed16<i16, RELU> : binary<i32, RELU>;
}

template <auto F>
void decode_un(Decoder& d) {
  if (decode_float(d)) return;
  Type t = int_type(d);
  d.ins.a[0] = d.dst(0, t), d.ins.a[1] = d.src(1, t);
  d.ins.fn = un_int<F>(t, d);
}

template <auto F>
void decode_count(Decoder& d) {  // the result is always 32 bits
  Type t = d.type();
  d.ins.a[0] = d.dst(0, U32), d.ins.a[1] = d.src(1, t);
  d.ins.fn = un_bits<F>(t, d);
}

void decode_bfind(Decoder& d) {
  if (d.has("shiftamt")) decode_count<BfindShift>(d);
  else decode_count<Bfind>(d);
}

void decode_brev(Decoder& d) {
  Type t = d.type();
  d.ins.a[0] = d.dst(0, t), d.ins.a[1] = d.src(1, t);
  d.ins.fn = t == B64 ? unary<u64, Brev> : unary<u32, Brev>;
}

template <class T>
void bfe(Warp& w, const Ins& i, Mask m) {
  auto a = read<T>(w, i.a[1]);
  const u32 *b = w.r(i.a[2]), *c = w.r(i.a[3]);
  alignas(64) T r[LANES];
  constexpr int W = 8 * sizeof(T);
  for (int l = 0; l < LANES; l++) {
    int pos = b[l] & 0xff, len = c[l] & 0xff;
    using V = U<T>;
    V v = pos < W ? (V)a[l] >> pos : 0;
    bool sign = false;
    if (std::is_signed_v<T> && len) sign = (V)a[l] >> std::min(pos + len - 1, W - 1) & 1;
    int kept = std::min(len, pos < W ? W - pos : 0);
    V keep = kept >= W ? (V) ~(V)0 : (V)(((V)1 << kept) - 1);
    r[l] = (T)((v & keep) | (sign ? (V)~keep : (V)0));
  }
  write(w, i.a[0], r, m);
}

void decode_bfe(Decoder& d) {
  Type t = d.type();
  d.ins.a[0] = d.dst(0, t), d.ins.a[1] = d.src(1, t), d.ins.a[2] = d.src(2, U32),
  d.ins.a[3] = d.src(3, U32);
  d.ins.fn = t == U32 ? bfe<u32> : t == S32 ? bfe<i32> : t == U64 ? bfe<u64> : bfe<i64>;
}

template <class T>
void bfi(Warp& w, const Ins& i, Mask m) {
  auto a = read<T>(w, i.a[1]);
  auto b = read<T>(w, i.a[2]);
  const u32 *c = w.r(i.a[3]), *e = w.r(i.a[4]);
  alignas(64) T r[LANES];
  constexpr int W = 8 * sizeof(T);
  for (int l = 0; l < LANES; l++) {
    int pos = c[l] & 0xff, len = std::min((int)(e[l] & 0xff), W);
    T field = len >= W ? (T) ~(T)0 : (T)(((T)1 << len) - 1);
    T keep = pos < W ? (T)(field << pos) : 0;
    r[l] = (b[l] & ~keep) | (pos < W ? (T)(a[l] << pos) & keep : 0);
  }
  write(w, i.a[0], r, m);
}

void decode_bfi(Decoder& d) {
  Type t = d.type();
  three(d, t);
  d.ins.a[3] = d.src(3, U32), d.ins.a[4] = d.src(4, U32);
  d.ins.fn = t == B64 ? bfi<u64> : bfi<u32>;
}

void dp4a(Warp& w, const Ins& i, Mask m) {
  const u32 *a = w.r(i.a[1]), *b = w.r(i.a[2]), *c = w.r(i.a[3]);
  alignas(64) u32 r[LANES];
  for (int l = 0; l < LANES; l++) {
    r[l] = c[l];
    for (int k = 0; k < 32; k += 8) {
      i32 x = i.n & 1 ? (i32)(i8)(a[l] >> k) : (i32)(u8)(a[l] >> k);
      i32 y = i.n & 2 ? (i32)(i8)(b[l] >> k) : (i32)(u8)(b[l] >> k);
      r[l] += (u32)(x * y);
    }
  }
  write(w, i.a[0], r, m);
}

void decode_dp4a(Decoder& d) {
  three(d, B32);
  d.ins.a[3] = d.src(3, B32);
  d.ins.n = is_signed(d.type(1)) | is_signed(d.type(0)) << 1;
  d.ins.fn = dp4a;
}

}  // namespace

void register_integer(Table& t) {
  t["add"] = decode_add;
  t["sub"] = decode_sub;
  t["addc"] = [](Decoder& d) { decode_carry(d, false, true); };
  t["subc"] = [](Decoder& d) { decode_carry(d, true, true); };
  t["mul"] = decode_mul;
  t["mul24"] = decode_mul24;
  t["mad"] = decode_mad;
  t["sad"] = decode_sad;
  t["div"] = decode_bin<Div>;
  t["rem"] = decode_bin<Rem>;
  t["min"] = decode_extreme<Min, MinRelu>;
  t["max"] = decode_extreme<Max, MaxRelu>;
  t["abs"] = decode_un<Abs>;
  t["neg"] = decode_un<Neg>;
  t["popc"] = decode_count<Popc>;
  t["clz"] = decode_count<Clz>;
  t["bfind"] = decode_bfind;
  t["brev"] = decode_brev;
  t["bfe"] = decode_bfe;
  t["bfi"] = decode_bfi;
  t["dp4a"] = decode_dp4a;
}

}  // namespace emu
