// ld, st, cp.async, prefetches. PTX ISA: "Data Movement and Conversion Instructions".
#include "lanes.h"
#include "strong.h"

namespace emu {

// Calls touch(first address, bytes) for every stretch of lanes that lie one behind the other.
template <class F>
static void stretches(const u64* a, u32 bytes, Mask m, F touch) {
  u64 start = 0, end = 0;
  bool open = false;
  FOR_LANES (l, m) {
    if (open && a[l] == end) {
      end += bytes;
      continue;
    }
    if (open) touch(start, (u32)(end - start));
    start = a[l];
    end = start + bytes;
    open = true;
  }
  if (open) touch(start, (u32)(end - start));
}

void track(Warp& w, const u64* a, u32 bytes, Mask m, bool write, int flags) {
  Machine& k = *w.machine;
  if (!k.race && !k.uninitialised) return;
  stretches(a, bytes, m, [&](u64 at, u32 n) {
    u64 window = at & WINDOW_MASK;
    if (window == SHARED_WINDOW) k.shared_access(w, (u32)at, n, write, flags);
    else if (window == 0) k.global_access(w, at, n, write, flags);
  });
}

// The addresses of the active lanes as generic ones. space: 0 generic/global, 1 shared, 2 local, 3
// param
void lane_addresses(Warp& w, const Ins& i, u32 plane, int space, Mask m, u64* a) {
  static const u64 windows[] = {0, SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW};
  FOR_LANES (l, m) {
    u64 v = w.addr(i, plane, l);
    if (space) v = (v & ~WINDOW_MASK & (space == 1 ? 0xffffffffull : ~0ull)) | windows[space];
    a[l] = v;
  }
}

static void check_aligned(Warp& w, u64 a, u32 bytes) {
  if (a & (bytes - 1) && w.machine->bounds)
    w.machine->fatal("bounds", format("address 0x%llx is not aligned to the %u bytes of the access",
                                      (unsigned long long)a, bytes));
}

namespace {

const char* const WEAK_MODS[] = {"volatile", "relaxed", "acquire", "release", "mmio"};

// n: space | sign-extend << 4 | strong << 5 | acquire << 6; a[0] unused, x->regs destinations;
// x->n[0] element bytes, x->n[1] elements, x->n[2] register bits
void load(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  u64 a[LANES];
  lane_addresses(w, i, i.a[1], i.n & 15, m, a);
  u32 eb = (u32)i.x->n[0], count = (u32)i.x->n[1], bytes = eb * count;
  bool wide = i.x->n[2] == 64, strong = i.n & 32;
  const u8* from[LANES];  // bounds are checked before anything else
  FOR_LANES (l, m) check_aligned(w, a[l], bytes), from[l] = k.generic(w, a[l], bytes, false, l);
  if (k.trace) k.trace->access(w, a, bytes, m, false, false);
  track(w, a, bytes, m, false, strong ? ATOMIC : 0);
  FOR_LANES (l, m) {
    const u8* p = from[l];
    for (u32 e = 0; e < count; e++) {
      u64 v = 0;
      std::memcpy(&v, p + e * eb, eb > 8 ? 8 : eb);
      if (i.n & 16)
        v = eb == 1 ? (u64)(i64)(i8)v : eb == 2 ? (u64)(i64)(i16)v : eb == 4 ? (u64)(i64)(i32)v : v;
      u32 d = i.x->regs[e];
      if (d == NONE) continue;
      w.w(d)[l] = i.x->n[2] == 16 ? (u16)v : (u32)v;
      if (wide) w.w(d + 1)[l] = (u32)(v >> 32);
      if (eb == 16) {
        w.w(d + 1)[l] = (u32)(v >> 32);
        std::memcpy(&w.w(d + 2)[l], p + 8, 4);
        std::memcpy(&w.w(d + 3)[l], p + 12, 4);
      }
    }
    if (strong) observe(w, a[l], i.n & 64);
  }
  u64 total = (u64)bytes * popcount(m);
  w.machine->stats.traffic[(i.n & 15) == 1   ? SHARED_READ
                           : (i.n & 15) >= 2 ? OTHER_READ
                                             : GLOBAL_READ] += total;
}

inline void value_of(const Warp& w, u32 plane, u32 lane, u32 bytes, u8* v) {
  for (u32 k = 0; k < (bytes + 3) / 4; k++) std::memcpy(v + 4 * k, &w.r(plane + k)[lane], 4);
}

bool same_bytes(const Warp& w, const Ins& i, u32 lane, const u8* p, u32 eb, u32 count) {
  for (u32 e = 0; e < count; e++) {
    u8 v[16];
    value_of(w, i.x->regs[e], lane, eb, v);
    if (std::memcmp(p + e * eb, v, eb)) return false;
  }
  return true;
}

void store_mem(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  u64 a[LANES];
  lane_addresses(w, i, i.a[1], i.n & 15, m, a);
  u32 eb = (u32)i.x->n[0], count = (u32)i.x->n[1], bytes = eb * count;
  bool strong = i.n & 32;
  k.progress++;
  u8* p[LANES];
  FOR_LANES (l, m) {
    check_aligned(w, a[l], bytes);
    p[l] = k.generic(w, a[l], bytes, true, l);
    if (strong) publish(w, a[l], i.n & 64);
  }
  if (k.trace) k.trace->access(w, a, eb * count, m, true, false);
  Mask silent = 0;  // lanes that write what is there already
  if (k.race && !strong)
    FOR_LANES (l, m)
      if (!(a[l] & WINDOW_MASK)) silent |= (Mask)same_bytes(w, i, l, p[l], eb, count) << l;
  if (m & ~silent) track(w, a, bytes, m & ~silent, true, strong ? ATOMIC : 0);
  if (silent) track(w, a, bytes, silent, true, SILENT);
  FOR_LANES (l, m) {
    for (u32 e = 0; e < count; e++) {
      u8 v[16];
      value_of(w, i.x->regs[e], l, eb, v);
      std::memcpy(p[l] + e * eb, v, eb);
    }
  }
  if (strong && (i.n & 64)) released(w);
  k.stats.traffic[(i.n & 15) == 1   ? SHARED_WRITE
                  : (i.n & 15) >= 2 ? OTHER_WRITE
                                    : GLOBAL_WRITE] += (u64)bytes * popcount(m);
}

int space_of(Decoder& d) {
  for (auto& s : d.st.mods) {
    if (s == "global" || s == "const") return 0;
    if (s.rfind("shared", 0) == 0) return 1;
    if (s == "local") return 2;
    if (s.rfind("param", 0) == 0) return 3;
  }
  return 0;
}

void decode_access(Decoder& d, bool is_store) {
  if (d.has("async")) d.unknown("st.async");
  Type t = d.type();
  int bytes = type_bits(t) / 8, count = d.has("v2") ? 2 : d.has("v4") ? 4 : d.has("v8") ? 8 : 1;
  auto& x = d.extra();
  size_t data = is_store ? 1 : 0, mem = is_store ? 0 : 1;
  const Operand& o = d.op(data);
  const Operand& first = o.kind == Operand::Vector ? o.parts.at(0) : o;
  x.n[2] = first.kind == Operand::Reg ? first.width : std::max(32, bytes * 8);
  if (!is_store)
    for (auto& q : o.parts)
      if (q.kind == Operand::Reg) x.n[2] = q.width;
  Type rt = bytes == 16 ? B128 : bytes == 8 ? B64 : is_store ? t : x.n[2] == 64 ? B64 : B32;
  x.regs = d.list(data, rt, !is_store);
  if ((int)x.regs.size() != count) d.unknown("vector size");
  x.n[0] = bytes, x.n[1] = count;
  d.ins.a[1] = d.address(mem);
  int space = space_of(d);
  const Operand& base = d.op(mem).parts.at(0);
  if (space == 3 && base.kind == Operand::Symbol && d.p.entry->local.count(base.name))
    space = 2;  // an argument of a call
  bool strong = false;
  for (auto* s : WEAK_MODS) strong |= d.has(s);
  bool order = d.has(is_store ? "release" : "acquire");
  d.ins.n = space | (is_signed(t) ? 16 : 0) | (strong ? 32 : 0) | (order ? 64 : 0);
  d.ins.bytes = d.address_is_64(mem) ? 0 : 0x80;
  d.ins.fn = is_store ? store_mem : load;
}

// cp.async: each lane copies `size` bytes global -> shared; done at the latest when the group is
// waited for. n: bytes; a[3]: number of source bytes or NONE; a[4]: ignore predicate or NONE
struct Copy : Flight {
  Machine* k;
  struct Piece {
    u64 from;
    u32 to, bytes, source;
  };
  std::vector<Piece> pieces;
  FlightShot shot;
  u32 number;
  void land() override {
    for (auto& q : pieces) {
      Cta& t = k->cta_of(*warp, q.to);
      u32 at = q.to & OFFSET_MASK;
      if (k->race) {
        Who x = async_who(*warp, shot, warp->comp(COPY), number);
        x.async = false;
        if (q.source) k->global_race(false, q.from, q.source, x, warp, pc);
        k->shared_race(t, true, at, q.bytes, x, warp, pc);
      }
      if (k->uninitialised) t.shared_shadow.mark(at, q.bytes);
      std::memcpy(t.shared.data() + at, (void*)q.from, q.source);
      std::memset(t.shared.data() + at + q.source, 0, q.bytes - q.source);
    }
  }
  void complete() override {}
  std::string describe() const override { return "cp.async"; }
};

void trace_copy(Machine& k, const Warp& w, const std::vector<Copy::Piece>& pieces) {
  u64 from[LANES], to[LANES];
  Mask read = 0, written = 0;
  u32 bytes = 0;
  for (size_t l = 0; l < pieces.size(); l++) {
    from[l] = pieces[l].from, to[l] = pieces[l].to, bytes = pieces[l].bytes;
    written |= 1u << l;
    if (pieces[l].source) read |= 1u << l;
  }
  k.trace->event(w, Traced::CopyAsync, 0, 0, (i32)(bytes * pieces.size()),
                 sectors(from, bytes, read), wavefronts(to, bytes, written));
}

void cp_async(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  auto f = std::make_shared<Copy>();
  f->k = &k;
  f->warp = &w;
  f->pc = (int)w.at;
  f->shot = shoot(w);
  f->number = w.copy_number + 1;
  FOR_LANES (l, m) {
    u32 to = w.r(i.a[0])[l] + (u32)i.x->n[0];
    u64 from = ((u64)w.r(i.a[1] + 1)[l] << 32 | w.r(i.a[1])[l]) + (u64)(i64)i.x->n[1];
    u32 bytes = (u32)i.n, source = i.a[3] == NONE ? bytes : std::min(w.r(i.a[3])[l], bytes);
    if (i.a[4] != NONE && (w.preds[i.a[4]] >> l & 1)) source = 0;
    k.shared(w, to, bytes, "cp.async write");
    check_aligned(w, to, bytes);
    if (source) {
      k.global(from, source, false, "cp.async read");
      check_aligned(w, from, bytes);
      if (k.uninitialised) k.global_read_check(from, source, &w, (int)w.at);
    }
    f->pieces.push_back({from, to, bytes, source});
    k.stats.traffic[COPY_ASYNC] += bytes;
  }
  if (k.trace) trace_copy(k, w, f->pieces);
  FOR_LANES (l, m) w.copies[l].open.push_back(f);
  k.add_flight(*w.cluster, f);
}

void cp_async_commit(Warp& w, const Ins&, Mask m) {
  w.copy_number++;
  if (w.machine->trace) w.machine->trace->event(w, Traced::CopyCommit);
  FOR_LANES (l, m) {
    Groups& g = w.copies[l];
    g.closed.push_back({w.copy_number, std::move(g.open)});
    g.open.clear();
  }
}

void cp_async_wait(Warp& w, const Ins& i, Mask m) {  // n: groups that may stay open; -1: wait_all
  u32 known = 0;
  if (w.machine->trace) w.machine->trace->event(w, Traced::CopyWait, i.n < 0 ? 0 : i.n);
  FOR_LANES (l, m) {
    Groups& g = w.copies[l];
    while ((int)g.closed.size() > std::max(i.n, 0)) {
      for (auto& f : g.closed.front().ops) w.machine->force(*f, 2);
      known = std::max(known, g.closed.front().number);
      g.closed.pop_front();
    }
    if (i.n < 0) {
      for (auto& f : g.open) w.machine->force(*f, 2);
      if (!g.open.empty()) known = ++w.copy_number;
      g.open.clear();
    }
  }
  if (w.machine->race && known) {
    u32& c = w.clock[w.comp(COPY)];
    c = std::max(c, known);
    w.clock_changed = true;
  }
}

void no_operation(Warp&, const Ins&, Mask) {}

}  // namespace

void decode_cp_async(Decoder& d) {  // the non-bulk forms
  if (d.has("commit_group")) {
    d.ins.fn = cp_async_commit;
    return;
  }
  if (d.has("wait_all")) {
    d.ins.n = -1;
    d.ins.fn = cp_async_wait;
    return;
  }
  if (d.has("wait_group")) {
    d.ins.n = (i32)d.op(0).value;
    d.ins.fn = cp_async_wait;
    return;
  }
  auto& x = d.extra();
  d.ins.a[0] = d.address(0), x.n[0] = d.ins.offset;
  d.ins.a[1] = d.address(1), x.n[1] = d.ins.offset;
  d.ins.n = (i32)d.op(2).value;
  if (d.count() > 3 && !(d.has("L2::cache_hint") && d.count() == 4)) {
    if (d.op(3).kind == Operand::Pred) d.ins.a[4] = d.pred(3);
    else d.ins.a[3] = d.src(3, U32);
  }
  d.ins.fn = cp_async;
}

void register_memory(Table& t) {
  t["ld"] = [](Decoder& d) { decode_access(d, false); };
  t["ldu"] = t["ld"];
  t["call"] = decode_call;
  t["st"] = [](Decoder& d) {
    if (d.has("async")) decode_st_async(d);
    else decode_access(d, true);
  };
  for (auto* n : {"prefetch", "prefetchu", "createpolicy", "applypriority", "discard"})
    t[n] = [](Decoder& d) {
      d.ins.fn = no_operation;
      if (d.st.opcode == "createpolicy") {  // any 64-bit token
        d.ins.a[0] = d.dst(0, B64);
        d.ins.fn = [](Warp& w, const Ins& i, Mask m) {
          alignas(64) static const u64 one[LANES] = {};
          write(w, i.a[0], one, m);
        };
      }
    };
}

}  // namespace emu
