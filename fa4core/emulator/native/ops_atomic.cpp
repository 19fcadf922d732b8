// atom and red on global, shared and generic memory, st.async, red.async.
// PTX ISA: "Parallel Synchronization and Communication Instructions: atom, red", "st.async".
#include "lanes.h"
#include "numbers.h"
#include "strong.h"

namespace emu {

enum AtomOp { A_ADD, A_MIN, A_MAX, A_AND, A_OR, A_XOR, A_EXCH, A_CAS, A_INC, A_DEC };

static u64 apply(int op, Type t, u64 old, u64 b, u64 c) {
  auto by_type = [&](auto tag) -> u64 {
    using T = decltype(tag);
    T x = (T)old, y = (T)b;
    switch (op) {
      case A_ADD: return (u64)(T)(x + y);
      case A_MIN: return (u64)std::min(x, y);
      case A_MAX: return (u64)std::max(x, y);
      default: return (u64)y;
    }
  };
  auto pair = [&](u16 x, u16 y, bool bf) -> u16 {
    double p = bf ? bfloat_to_float(x) : half_to_float(x),
           q = bf ? bfloat_to_float(y) : half_to_float(y);
    double r = op == A_ADD ? p + q : op == A_MIN ? std::min(p, q) : std::max(p, q);
    return bf ? bfloat_near((float)r) : round_half(r, Round::Near);
  };
  switch (op) {
    case A_AND: return old & b;
    case A_OR: return old | b;
    case A_XOR: return old ^ b;
    case A_EXCH: return b;
    case A_CAS: return old == b ? c : old;
    case A_INC: return (u32)old >= (u32)b ? 0 : old + 1;
    case A_DEC: return (u32)old == 0 || (u32)old > (u32)b ? b : old - 1;
  }
  switch (t) {
    case S32: return (u32)by_type(i32{});
    case U32:
    case B32: return by_type(u32{});
    case S64: return by_type(i64{});
    case F32: {
      float x = bits<float>((u32)old), y = bits<float>((u32)b);
      return bits<u32>(op == A_ADD ? x + y : op == A_MIN ? std::fmin(x, y) : std::fmax(x, y));
    }
    case F64: return bits<u64>(bits<double>(old) + bits<double>(b));
    case F16:
    case BF16: return pair((u16)old, (u16)b, t == BF16);
    case F16X2:
    case BF16X2:
      return pair((u16)old, (u16)b, t == BF16X2) |
             (u32)pair((u16)(old >> 16), (u16)(b >> 16), t == BF16X2) << 16;
    default: return by_type(u64{});
  }
}

// Shared with bulk reductions.
void reduce_element(int op, Type t, u8* p, const u8* q) {
  int n = type_bits(t) / 8;
  u64 a = 0, b = 0;
  std::memcpy(&a, p, (size_t)n);
  std::memcpy(&b, q, (size_t)n);
  a = apply(op, t, a, b, 0);
  std::memcpy(p, &a, (size_t)n);
}

int reduction_of(Decoder& d) {
  static const char* names[] = {"add", "min",  "max", "and", "or",
                                "xor", "exch", "cas", "inc", "dec"};
  for (int k = 0; k < 10; k++)
    if (d.has(names[k])) return k;
  d.unknown("operation");
}

namespace {

// n: space | release << 4 | acquire << 5; x->n[0] op, [1] type, [2] elements; x->regs destinations
// (may be empty), x->regs2 sources
void atomic(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  u64 a[LANES];
  lane_addresses(w, i, i.a[1], i.n & 15, m, a);
  Type t = (Type)i.x->n[1];
  u32 eb = (u32)type_bits(t) / 8, count = (u32)i.x->n[2];
  bool has_result = !i.x->regs.empty();
  k.progress++;
  if (k.trace) k.trace->access(w, a, eb * count, m, true, true);
  FOR_LANES (l, m) {
    if (a[l] % (eb * count))
      k.fatal("bounds", format("atomic at 0x%llx is not aligned to %u bytes",
                               (unsigned long long)a[l], eb * count));
    u8* p = k.generic(w, a[l], eb * count, true, l);
    bool shared = (a[l] & WINDOW_MASK) == SHARED_WINDOW;
    if (shared)
      k.shared_access(w, (u32)a[l], eb * count, false, ATOMIC),
          k.shared_access(w, (u32)a[l], eb * count, true, ATOMIC);
    else
      k.global_access(w, a[l], eb * count, false, ATOMIC),
          k.global_access(w, a[l], eb * count, true, ATOMIC);
    k.stats.traffic[shared ? SHARED_ATOMIC : GLOBAL_ATOMIC] += eb * count;
    observe(w, a[l], i.n & 32);
    publish(w, a[l], i.n & 16);
    for (u32 e = 0; e < count; e++) {
      u32 s = i.x->regs2[e];
      u64 old = 0, b = w.r(s)[l], c = 0;
      if (eb == 8) b |= (u64)w.r(s + 1)[l] << 32;
      if (i.a[3] != NONE) {
        c = w.r(i.a[3])[l];
        if (eb == 8) c |= (u64)w.r(i.a[3] + 1)[l] << 32;
      }
      std::memcpy(&old, p + e * eb, eb);
      if (eb == 2) b &= 0xffff;
      u64 v = apply(i.x->n[0], t, old, b, c);
      std::memcpy(p + e * eb, &v, eb);
      if (has_result && i.x->regs[e] != NONE) {
        w.w(i.x->regs[e])[l] = (u32)old;
        if (eb == 8) w.w(i.x->regs[e] + 1)[l] = (u32)(old >> 32);
      }
    }
  }
  if (i.n & 16) released(w);
}

void decode_atomic(Decoder& d, bool result) {
  auto& x = d.extra();
  if (d.has("async")) return decode_st_async(d);
  Type t = d.type();
  if (t == B128) d.unknown("type");
  x.n[0] = reduction_of(d), x.n[1] = t;
  x.n[2] = d.has("v2") ? 2 : d.has("v4") ? 4 : d.has("v8") ? 8 : 1;
  size_t k = 0;
  if (result) x.regs = d.list(k++, t, true);
  d.ins.a[1] = d.address(k);
  d.ins.bytes = d.address_is_64(k) ? 0 : 0x80;
  k++;
  x.regs2 = d.list(k++, t, false);
  if (x.n[0] == A_CAS) d.ins.a[3] = d.src(k, t);
  bool shared = false;
  for (auto& s : d.st.mods) shared |= s.rfind("shared", 0) == 0;
  bool rel = d.has("release") || d.has("acq_rel"), acq = d.has("acquire") || d.has("acq_rel");
  d.ins.n = (shared ? 1 : 0) | rel << 4 | acq << 5;
  d.ins.fn = atomic;
}

// st.async / red.async: writes to shared memory of the cluster, completes on an mbarrier there.
struct RemoteStore : Flight {
  Machine* k;
  u32 to, bytes, bar;
  u8 data[16];
  int op = -1;
  Type type = B32;
  FlightShot shot;
  void land() override {
    Cta& t = k->cta_of(*warp, to);
    u32 at = to & OFFSET_MASK;
    Mbarrier* b = k->barrier(warp, k->cta_of(*warp, bar), bar & OFFSET_MASK, pc);
    if (k->race) {
      Who x = async_who(*warp, shot, b->comp, b->phase + 1);
      x.atomic = op >= 0;
      k->shared_race(t, true, at, bytes, x, warp, pc);
    }
    if (k->uninitialised) t.shared_shadow.mark(at, bytes);
    if (op < 0) std::memcpy(t.shared.data() + at, data, bytes);
    else reduce_element(op, type, t.shared.data() + at, data);
  }
  void complete() override {
    Cta& t = k->cta_of(*warp, bar);
    Mbarrier* b = k->barrier(warp, t, bar & OFFSET_MASK, pc);
    if (k->race) b->gathered[b->comp] = std::max(b->gathered[b->comp], b->phase + 1);
    k->complete_tx(*b, t, bytes);
  }
  std::string describe() const override { return "st.async"; }
};

void st_async(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  u32 eb = (u32)i.x->n[0], count = (u32)i.x->n[1];
  FlightShot shot = shoot(w);
  FOR_LANES (l, m) {
    auto f = std::make_shared<RemoteStore>();
    f->k = &k, f->warp = &w, f->pc = (int)w.at, f->shot = shot;
    f->to = w.r(i.a[1])[l] + (u32)i.x->n[2], f->bar = w.r(i.a[2])[l] + (u32)i.x->n[3];
    f->bytes = eb * count;
    f->op = i.n, f->type = (Type)i.x->n[4];
    for (u32 e = 0; e < count; e++) {
      u64 v = w.r(i.x->regs[e])[l];
      if (eb == 8) v |= (u64)w.r(i.x->regs[e] + 1)[l] << 32;
      std::memcpy(f->data + e * eb, &v, eb);
    }
    k.shared(w, f->to, f->bytes, "st.async");
    if (f->to % f->bytes)
      k.fatal("bounds", format("st.async to shared offset %u is not aligned", f->to & OFFSET_MASK));
    k.stats.traffic[BULK_SHARED] += f->bytes;
    if (k.trace)
      k.trace->event(w, Traced::BulkLoad, (i32)(f->bar >> RANK_SHIFT), (i32)(f->bar & OFFSET_MASK),
                     (i32)f->bytes, (i32)(f->to >> RANK_SHIFT), 1);
    k.add_flight(*w.cluster, f);
  }
}

}  // namespace

void decode_st_async(Decoder& d) {
  Type t = d.type();
  auto& x = d.extra();
  x.n[0] = type_bits(t) / 8, x.n[1] = d.has("v2") ? 2 : d.has("v4") ? 4 : 1, x.n[4] = t;
  d.ins.n = d.st.opcode == "red" ? reduction_of(d) : -1;
  d.ins.a[1] = d.address(0), x.n[2] = d.ins.offset;
  x.regs = d.list(1, t, false);
  d.ins.a[2] = d.address(2), x.n[3] = d.ins.offset;
  d.ins.fn = st_async;
}

void register_atomic(Table& t) {
  t["atom"] = [](Decoder& d) { decode_atomic(d, true); };
  t["red"] = [](Decoder& d) { decode_atomic(d, false); };
}

}  // namespace emu
