// Control flow, exchanges between lanes, register budget, and instructions without effect here.
// PTX ISA: "Control Flow Instructions", "shfl.sync", "vote.sync", "match.sync", "redux.sync",
// "elect.sync", "setmaxnreg", "griddepcontrol".
#include "lanes.h"
#include "strong.h"

namespace emu {
namespace {

void bra(Warp& w, const Ins& i, Mask m) { w.split((u32)i.n, m); }

void exit_(Warp& w, const Ins&, Mask m) {
  w.finish_loads();
  w.exit_lanes(m);
}

void trap(Warp& w, const Ins&, Mask) { w.machine->fatal("instruction", "the kernel executed trap"); }
void nothing(Warp&, const Ins&, Mask) {}

// Waits until every live lane of the member mask is here; false: not yet.
bool together(Warp& w, const Ins& i, Mask m, u32 plane) {
  (void)i;
  Mask want = w.r(plane)[lowest(m)];
  if (want & w.live & ~w.active) { w.block(Wait::Lanes); return false; }
  return true;
}

// a[0] d, a[1] a, a[2] b, a[3] c, a[4] member mask, a[5] predicate; n: 0 up, 1 down, 2 bfly, 3 idx
void shfl(Warp& w, const Ins& i, Mask m) {
  if (!together(w, i, m, i.a[4])) return;
  const u32 *a = w.r(i.a[1]), *b = w.r(i.a[2]), *c = w.r(i.a[3]);
  alignas(64) u32 r[LANES];
  Mask inside = 0;
  for (int l = 0; l < LANES; l++) {
    int seg = (int)(c[l] >> 8 & 31), clamp = (int)(c[l] & 31), bv = (int)(b[l] & 31);
    int max = (l & seg) | (clamp & ~seg), min = l & seg, j;
    bool p;
    switch (i.n) {
      case 0: j = l - bv; p = j >= max; break;
      case 1: j = l + bv; p = j <= max; break;
      case 2: j = l ^ bv; p = j <= max; break;
      default: j = min | (bv & ~seg); p = j <= max;
    }
    if (!p) j = l;
    r[l] = a[j & 31];
    inside |= (Mask)p << l;
  }
  if (i.a[0] != NONE) write(w, i.a[0], r, m);
  if (i.a[5] != NONE) { Mask& p = w.preds[i.a[5]]; p = (p & ~m) | (inside & m); }
}

void decode_shfl(Decoder& d) {
  d.ins.n = d.has("up") ? 0 : d.has("down") ? 1 : d.has("bfly") ? 2 : 3;
  d.ins.a[0] = d.dst(0, B32), d.ins.a[1] = d.src(1, B32), d.ins.a[2] = d.src(2, B32), d.ins.a[3] = d.src(3, B32);
  d.ins.a[4] = d.count() > 4 ? d.src(4, B32) : d.p.constant(FULL);
  if (d.op(0).pair >= 0) d.ins.a[5] = (u32)d.op(0).pair;
  d.ins.fn = shfl;
}

// n: 0 all, 1 any, 2 uni, 3 ballot; bytes: source negated
void vote(Warp& w, const Ins& i, Mask m) {
  if (!together(w, i, m, i.a[2])) return;
  Mask v = (w.preds[i.a[1]] ^ (i.bytes ? FULL : 0)) & m;
  if (i.n == 3) {
    FOR_LANES(l, m) w.w(i.a[0])[l] = v;
    return;
  }
  bool r = i.n == 0 ? v == m : i.n == 1 ? v != 0 : v == m || v == 0;
  Mask& p = w.preds[i.a[0]];
  p = r ? p | m : p & ~m;
}

void decode_vote(Decoder& d) {
  d.ins.n = d.has("all") ? 0 : d.has("any") ? 1 : d.has("uni") ? 2 : 3;
  d.ins.a[0] = d.ins.n == 3 ? d.dst(0, B32) : d.pred(0);
  d.ins.a[1] = d.pred(1);
  d.ins.bytes = d.op(1).negate;
  d.ins.a[2] = d.count() > 2 ? d.src(2, B32) : d.p.constant(FULL);
  d.ins.fn = vote;
}

template <class T> void match(Warp& w, const Ins& i, Mask m) {
  if (!together(w, i, m, i.a[2])) return;
  auto a = read<T>(w, i.a[1]);
  Mask all = 0;
  alignas(64) u32 r[LANES] = {};
  FOR_LANES(l, m) {
    for (u32 j = 0; j < LANES; j++) if ((m >> j & 1) && a[(int)j] == a[(int)l]) r[l] |= 1u << j;
    if (r[l] == m) all |= 1u << l;
  }
  if (i.n) FOR_LANES(l, m) r[l] = all ? m : 0;
  write(w, i.a[0], r, m);
  if (i.a[5] != NONE) { Mask& p = w.preds[i.a[5]]; p = (p & ~m) | all; }
}

void decode_match(Decoder& d) {
  Type t = d.type();
  d.ins.n = d.has("all");
  d.ins.a[0] = d.dst(0, B32), d.ins.a[1] = d.src(1, t), d.ins.a[2] = d.src(2, B32);
  if (d.op(0).pair >= 0) d.ins.a[5] = (u32)d.op(0).pair;
  d.ins.fn = type_bits(t) == 64 ? match<u64> : match<u32>;
}

// n: 0 add, 1 min, 2 max, 3 and, 4 or, 5 xor; bytes: bit 0 signed, 1 float, 2 abs, 3 NaN
void redux(Warp& w, const Ins& i, Mask m) {
  if (!together(w, i, m, i.a[2])) return;
  const u32* a = w.r(i.a[1]);
  u32 r = a[lowest(m)];
  auto abs_of = [&](u32 x) { return i.bytes & 4 ? x & 0x7fffffff : x; };
  if (i.bytes & 2) r = abs_of(r);
  FOR_LANES(l, m & (m - 1)) {
    u32 x = a[l];
    if (i.bytes & 2) {
      float p = bits<float>(r), q = bits<float>(abs_of(x));
      if (i.bytes & 8 && (p != p || q != q)) { r = 0x7fffffff; continue; }
      if (p != p) r = bits<u32>(q);
      else if (q == q) r = bits<u32>(i.n == 1 ? std::min(p, q) : std::max(p, q));
      continue;
    }
    switch (i.n) {
      case 0: r += x; break;
      case 1: r = i.bytes & 1 ? (u32)std::min((i32)r, (i32)x) : std::min(r, x); break;
      case 2: r = i.bytes & 1 ? (u32)std::max((i32)r, (i32)x) : std::max(r, x); break;
      case 3: r &= x; break;
      case 4: r |= x; break;
      default: r ^= x;
    }
  }
  FOR_LANES(l, m) w.w(i.a[0])[l] = r;
}

void decode_redux(Decoder& d) {
  Type t = d.type();
  static const char* ops[] = {"add", "min", "max", "and", "or", "xor"};
  for (int k = 0; k < 6; k++) if (d.has(ops[k])) d.ins.n = k;
  d.ins.bytes = (u8)((t == S32) | (t == F32) << 1 | d.has("abs") << 2 | d.has("NaN") << 3);
  d.ins.a[0] = d.dst(0, t), d.ins.a[1] = d.src(1, t), d.ins.a[2] = d.src(2, B32);
  d.ins.fn = redux;
}

void elect(Warp& w, const Ins& i, Mask m) {
  if (!together(w, i, m, i.a[1])) return;
  Mask members = w.r(i.a[1])[lowest(m)] & w.live;
  u32 leader = (u32)lowest(members ? members : m);
  if (i.a[0] != NONE) FOR_LANES(l, m) w.w(i.a[0])[l] = leader;
  if (i.a[5] != NONE) { Mask& p = w.preds[i.a[5]]; p = (p & ~m) | (1u << leader & m); }
}

void decode_elect(Decoder& d) {
  d.ins.a[0] = d.dst(0, B32), d.ins.a[1] = d.src(1, B32);
  if (d.op(0).pair >= 0) d.ins.a[5] = (u32)d.op(0).pair;
  d.ins.fn = elect;
}

// The registers of a CTA are a pool: .dec gives back, .inc waits until there are enough.
void setmaxnreg(Warp& w, const Ins& i, Mask) {
  Machine& k = *w.machine;
  int want = i.n & 0xffff;
  bool inc = i.n >> 16;
  if (k.register_rules && (want < 24 || want > 256 || want % 8))
    k.fatal("registers", format("setmaxnreg %d: 24 to 256 in steps of 8 are allowed", want));
  int change = want - w.registers;
  if (!w.registers_known) {  // PTX does not say what ptxas gave the kernel
    w.registers = want;
    return;
  }
  if (inc ? change < 0 : change > 0) {
    if (k.register_rules)
      k.report("registers", format("setmaxnreg.%s to %d, but the warp has %d registers per thread", inc ? "inc" : "dec", want, w.registers), &w, (int)w.at);
    return;
  }
  if (change > w.cta->register_pool && k.register_rules) { w.block(Wait::Registers); return; }
  w.cta->register_pool -= change;
  w.registers = want;
  if (change < 0) k.wake(*w.cluster, nullptr);
}

}  // namespace

void register_warp(Table& t) {
  t["bra"] = [](Decoder& d) {
    d.ins.n = (i32)d.op(d.count() - 1).value;
    d.ins.fn = bra;
  };
  t["exit"] = t["ret"] = [](Decoder& d) { d.ins.fn = exit_; };
  t["trap"] = [](Decoder& d) { d.ins.fn = trap; };
  t["brkpt"] = t["nanosleep"] = t["pmevent"] = t["griddepcontrol"] = [](Decoder& d) { d.ins.fn = nothing; };
  t["shfl"] = decode_shfl;
  t["vote"] = decode_vote;
  t["match"] = decode_match;
  t["redux"] = decode_redux;
  t["elect"] = decode_elect;
  t["activemask"] = [](Decoder& d) {
    d.ins.a[0] = d.dst(0, B32);
    d.ins.fn = [](Warp& w, const Ins& i, Mask m) { FOR_LANES(l, m) w.w(i.a[0])[l] = w.active; };
  };
  t["setmaxnreg"] = [](Decoder& d) {
    d.ins.n = (i32)d.op(0).value | (d.has("inc") ? 1 << 16 : 0);
    d.ins.fn = setmaxnreg;
  };
}

}  // namespace emu
