// cp.async.bulk and cp.reduce.async.bulk, plain and tensor, bulk groups, cp.async.mbarrier.arrive.
// PTX ISA: "Data Movement and Conversion Instructions: Asynchronous copy", "bulk copy", "tensor
// copy".
#include <algorithm>

#include "lanes.h"
#include "strong.h"
#include "tensor_map.h"

namespace emu {

void reduce_element(int op, Type t, u8* p, const u8* q);
int reduction_of(Decoder& d);

namespace {

struct BulkBase : Flight {
  Machine* k;
  bool tensor = false, gather = false;
  TensorMap map;
  i32 coords[5];
  u64 global = 0;
  u32 bytes = 0;
  FlightShot shot;
  void rows(const RowFn& f) const {
    if (!tensor) f(global, 0, 0, bytes, bytes);
    else if (gather) for_gathered_rows(map, coords, f);
    else for_rows(map, coords, f);
  }
};

// Into shared memory, completing on an mbarrier.
struct BulkLoad : BulkBase {
  Cta *to_cta, *bar_cta;
  Cta* from_cta = nullptr;  // shared to shared
  u32 to, bar, from = 0;
  int op = -1;
  Type type = B32;
  Mbarrier* barrier_of() { return k->barrier(warp, *bar_cta, bar, pc); }
  void land() override {
    Mbarrier* b = barrier_of();
    Who x = async_who(*warp, shot, b->comp, b->phase + 1);
    if (k->race) k->shared_race(*to_cta, true, to, bytes, x, warp, pc);
    if (k->uninitialised) to_cta->shared_shadow.mark(to, bytes);
    u8* base = to_cta->shared.data();
    if (from_cta) {
      if (k->race) k->shared_race(*from_cta, false, from, bytes, x, warp, pc);
      if (k->uninitialised) k->shared_read_check(*from_cta, from, bytes, warp, pc);
      const u8* s = from_cta->shared.data() + from;
      if (op < 0) std::memcpy(base + to, s, bytes);
      else
        for (u32 i = 0, n = (u32)type_bits(type) / 8; i < bytes; i += n)
          reduce_element(op, type, base + to + i, s + i);
      return;
    }
    int swizzle = tensor ? map.swizzle : 0;
    rows([&](u64 a, u32 offset, u32 skip, u32 valid, u32 row) {
      if (valid) {
        k->global(a, valid, false, "bulk copy read");
        if (k->race) k->global_race(false, a, valid, x, warp, pc);
        if (k->uninitialised) k->global_read_check(a, valid, warp, pc);
      }
      if (!swizzle && valid == row) {
        std::memcpy(base + to + offset, (void*)a, row);
        return;
      }
      const u8* s = (const u8*)a - skip;
      for (u32 p = 0; p < row; p += 16) {
        u8* d = base + swizzled(to + offset + p, swizzle);
        if (p >= skip && p + 16 <= skip + valid) {
          std::memcpy(d, s + p, 16);
          continue;
        }
        for (u32 q = p; q < p + 16 && q < row; q++)
          d[q - p] = q >= skip && q < skip + valid ? s[q] : 0;
      }
    });
  }
  void complete() override {
    Mbarrier* b = barrier_of();
    if (k->race) b->gathered[b->comp] = std::max(b->gathered[b->comp], b->phase + 1);
    k->complete_tx(*b, *bar_cta, bytes);
  }
  const char* unit() const override { return "load"; }
  std::string describe() const override {
    return format("bulk copy of %u bytes to shared offset %u of CTA rank %u", bytes, to,
                  to_cta->rank);
  }
};

// From shared memory to global memory; the source is read in land(), the destination written in
// complete().
struct BulkStore : BulkBase {
  u32 from;
  u32 number;
  int op = -1;
  Type type = B32;
  std::vector<u8> data;
  void land() override {
    Cta& t = *warp->cta;
    Who x = async_who(*warp, shot, warp->comp(BULK_READ), number);
    if (k->race) k->shared_race(t, false, from, bytes, x, warp, pc);
    if (k->uninitialised) read_check(t);
    data.resize(bytes);
    int swizzle = tensor ? map.swizzle : 0;
    const u8* base = t.shared.data();
    if (!swizzle) std::memcpy(data.data(), base + from, bytes);
    else
      for (u32 p = 0; p < bytes; p += 16)
        std::memcpy(&data[p], base + swizzled(from + p, swizzle), std::min(16u, bytes - p));
  }
  void read_check(Cta& t) {  // what is out of bounds is not stored and may be anything
    int swizzle = tensor ? map.swizzle : 0;
    if (!tensor) {
      k->shared_read_check(t, from, bytes, warp, pc);
      return;
    }
    rows([&](u64, u32 offset, u32 skip, u32 valid, u32) {
      for (u32 p = skip; p < skip + valid;) {
        u32 n = std::min(16 - (offset + p) % 16, skip + valid - p);
        k->shared_read_check(t, swizzled(from + offset + p, swizzle), n, warp, pc);
        p += n;
      }
    });
  }
  void complete() override {
    Who x = async_who(*warp, shot, warp->comp(BULK_WRITE), number);
    x.atomic = op >= 0;
    rows([&](u64 a, u32 offset, u32 skip, u32 valid, u32) {
      if (!valid) return;
      k->global(a, valid, true, "bulk copy write");
      if (k->race) k->global_race(true, a, valid, x, warp, pc);
      if (k->uninitialised) {
        if (op >= 0) k->global_read_check(a, valid, warp, pc);
        k->global_initialise(a, valid);
      }
      const u8* s = data.data() + offset + skip;
      if (op < 0) {
        std::memcpy((void*)a, s, valid);
        return;
      }
      if (op == 0 && type == F32) {
        float* p = (float*)a;
        const float* q = (const float*)s;
        for (u32 i = 0; i < valid / 4; i++) p[i] += q[i];
        return;
      }
      for (u32 i = 0, n = (u32)type_bits(type) / 8; i < valid; i += n)
        reduce_element(op, type, (u8*)a + i, s + i);
    });
    data.clear();
    data.shrink_to_fit();
  }
  const char* unit() const override { return "store"; }
  std::string describe() const override {
    return format("bulk store of %u bytes from shared offset %u", bytes, from);
  }
};

// a[0] memory operand 0, a[1] operand 1, a[2] size, a[3] mbarrier, a[4] mask; x->n[0..3]: offsets
// of the operands 0, 1 and of the mbarrier; x->n[4]: kind; [5] op; [6] type; [7] flags 1 tensor 2
// gather 4 multicast 8 cta_group::2; [8] number of coordinates; x->regs: coordinates
enum Kind { LOAD, SHARED_COPY, STORE };

u64 address64(Warp& w, u32 plane, u32 lane, i32 offset) {
  return ((u64)w.r(plane + 1)[lane] << 32 | w.r(plane)[lane]) + (u64)(i64)offset;
}

void need(Machine& k, bool ok, const std::string& text) {
  if (!ok && k.bounds) k.fatal("bounds", text);
}

void set_tensor(Warp& w, const Ins& i, u32 lane, BulkBase& f, u32 map_plane, i32 offset) {
  f.tensor = true;
  f.gather = i.x->n[7] & 2;
  u64 at = address64(w, map_plane, lane, offset);
  need(*w.machine, at % 64 == 0, "the tensor map is not aligned to 64 bytes");
  f.map = decode_map(w.machine->generic(w, at, 128, false, lane));
  need(*w.machine, f.gather || i.x->n[8] == f.map.rank,
       format("%d coordinates for a tensor map of rank %d", i.x->n[8], f.map.rank));
  for (int c = 0; c < i.x->n[8]; c++) f.coords[c] = (i32)w.r(i.x->regs[(size_t)c])[lane];
  f.bytes = box_bytes(f.map) * (f.gather ? 4 : 1);
  if (!f.gather && outside(f.map, f.coords)) w.machine->stats.traffic[TMA_OUTSIDE] += f.bytes;
}

void bulk_load(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  const int* x = i.x->n;
  FOR_LANES (l, m) {
    BulkLoad proto;
    proto.k = &k, proto.warp = &w, proto.pc = (int)w.at;
    proto.shot = shoot(w);
    u32 to = w.r(i.a[0])[l] + (u32)x[0], bar = w.r(i.a[3])[l] + (u32)x[2];
    if (x[7] & 1) set_tensor(w, i, l, proto, i.a[1], x[1]);
    else {
      proto.bytes = w.r(i.a[2])[l];
      need(k, proto.bytes % 16 == 0,
           format("bulk copy of %u bytes, not a multiple of 16", proto.bytes));
      if (x[4] == LOAD) {
        proto.global = address64(w, i.a[1], l, x[1]);
        need(k, proto.global % 16 == 0, "bulk copy from an address not aligned to 16 bytes");
        k.global(proto.global, proto.bytes, false, "bulk copy read");
      } else {
        u32 from = w.r(i.a[1])[l] + (u32)x[1];
        proto.from_cta = &k.cta_of(w, from);
        proto.from = from & OFFSET_MASK;
        k.shared(w, from, proto.bytes, "bulk copy read");
        need(k, from % 16 == 0, "bulk copy from a shared address not aligned to 16 bytes");
      }
    }
    proto.op = x[5], proto.type = (Type)x[6];
    u32 align = x[7] & 1 ? 128 : 16;
    need(k, to % align == 0,
         format("bulk copy to shared offset %u, not aligned to %u bytes", to & OFFSET_MASK, align));
    u32 mask = 1u << (to >> RANK_SHIFT), pair = bar >> RANK_SHIFT & 1;
    if (x[7] & 4) mask = w.r(i.a[4])[l] & 0xffff;
    if (mask >> w.cluster->ctas.size())
      k.fatal("bounds",
              format("multicast to CTAs 0x%x of a cluster of %zu", mask, w.cluster->ctas.size()));
    for (u32 c = 0; c < w.cluster->ctas.size(); c++) {
      if (!(mask >> c & 1)) continue;
      auto f = std::make_shared<BulkLoad>(proto);
      f->to_cta = w.cluster->ctas[c].get();
      u32 bar_rank = x[7] & 8 ? (c & ~1u) | pair : x[7] & 4 ? c : bar >> RANK_SHIFT;
      if (bar_rank >= w.cluster->ctas.size())
        k.fatal("bounds", format("mbarrier in CTA %u of the cluster", bar_rank));
      f->bar_cta = w.cluster->ctas[bar_rank].get();
      f->to = to & OFFSET_MASK, f->bar = bar & OFFSET_MASK;
      k.shared(w, c << RANK_SHIFT | f->to, f->bytes, "bulk copy write");
      k.barrier(&w, *f->bar_cta, f->bar, (int)w.at);
      k.stats.traffic[x[4] == LOAD ? TMA_LOAD : BULK_SHARED] += f->bytes;
      if (k.trace)
        k.trace->event(w, Traced::BulkLoad, (i32)bar_rank, (i32)f->bar, (i32)f->bytes, (i32)c,
                       x[4] != LOAD);
      k.add_flight(*w.cluster, f);
    }
  }
}

void bulk_store(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  const int* x = i.x->n;
  FOR_LANES (l, m) {
    auto f = std::make_shared<BulkStore>();
    f->k = &k, f->warp = &w, f->pc = (int)w.at;
    f->shot = shoot(w);
    f->number = w.bulk_number + 1;
    f->op = x[5], f->type = (Type)x[6];
    if (x[7] & 1) {
      set_tensor(w, i, l, *f, i.a[0], x[0]);
      static const Type types[16] = {U8,  U16, U32,  S32, U64, S64, F16, F32,
                                     F32, F64, BF16, F32, F32, U8,  U8,  U8};
      f->type = types[f->map.element_code];
    } else {
      f->global = address64(w, i.a[0], l, x[0]);
      f->bytes = w.r(i.a[2])[l];
      need(k, f->bytes % 16 == 0 && f->global % 16 == 0,
           format("bulk copy of %u bytes to 0x%llx: multiples of 16 are needed", f->bytes,
                  (unsigned long long)f->global));
      k.global(f->global, f->bytes, true, "bulk copy write");
    }
    u32 from = w.r(i.a[1])[l] + (u32)x[1];
    if (from >> RANK_SHIFT != w.cta->rank)
      k.fatal("bounds", "bulk store from another CTA's shared memory");
    f->from = from & OFFSET_MASK;
    u32 align = x[7] & 1 ? 128 : 16;
    need(k, from % align == 0,
         format("bulk copy from shared offset %u, not aligned to %u bytes", f->from, align));
    k.shared(w, from, f->bytes, "bulk copy read");
    k.stats.traffic[f->op < 0 ? TMA_STORE : TMA_REDUCE] += f->bytes;
    if (k.trace) k.trace->event(w, Traced::BulkStore, 0, 0, (i32)f->bytes, f->op >= 0);
    w.bulk[l].open.push_back(f);
    k.add_flight(*w.cluster, f);
  }
}

void bulk_commit(Warp& w, const Ins&, Mask m) {
  w.bulk_number++;
  if (w.machine->trace) w.machine->trace->event(w, Traced::BulkCommit);
  FOR_LANES (l, m) {
    Groups& g = w.bulk[l];
    g.closed.push_back({w.bulk_number, std::move(g.open)});
    g.open.clear();
  }
}

void bulk_wait(Warp& w, const Ins& i, Mask m) {  // n: groups that may stay; bytes: .read
  Machine& k = *w.machine;
  if (k.trace) k.trace->event(w, Traced::BulkWait, i.n, 0, 0, i.bytes);
  u32 known = 0;
  FOR_LANES (l, m) {
    Groups& g = w.bulk[l];
    for (size_t q = 0; q + (size_t)i.n < g.closed.size(); q++) {
      for (auto& f : g.closed[q].ops) k.force(*f, i.bytes ? 1 : 2);
      known = std::max(known, g.closed[q].number);
    }
    auto finished = [](const Group& q) {
      for (auto& f : q.ops)
        if (f->stage < 2) return false;
      return true;
    };
    while ((int)g.closed.size() > i.n && (!i.bytes || finished(g.closed.front())))
      g.closed.pop_front();
  }
  if (k.race && known) {
    u32 &r = w.clock[w.comp(BULK_READ)], &v = w.clock[w.comp(BULK_WRITE)];
    r = std::max(r, known);
    if (!i.bytes) v = std::max(v, known);
    w.clock_changed = true;
  }
}

// cp.async.mbarrier.arrive: an arrival once all earlier cp.async of the thread are done.
struct CopyArrive : Flight {
  Machine* k;
  std::vector<FlightRef> before;
  Cta* cta;
  u32 bar, lanes, number;
  bool noinc;
  FlightShot shot;
  void land() override {}
  void complete() override {
    for (auto& f : before) k->force(*f, 2);
    Mbarrier* b = k->barrier(warp, *cta, bar, pc);
    if (k->race) {
      if (shot.knows) join(b->gathered, *shot.knows);
      for (Actor a :
           {COPY, COPY_PUBLISHED}) {  // visible to the async proxy too: kernels rely on it
        u32& c = b->gathered[warp->comp(a)];
        c = std::max(c, number);
      }
    }
    if (!noinc) b->pending += lanes;
    k->arrive(*b, *cta, lanes, "cp.async.mbarrier.arrive");
  }
  std::string describe() const override { return "cp.async.mbarrier.arrive"; }
};

void copy_arrive(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  u32 number = ++w.copy_number;
  Mask todo = m;
  while (todo) {
    u32 a = (u32)w.addr(i, i.a[1], (u32)lowest(todo));
    auto f = std::make_shared<CopyArrive>();
    f->k = &k, f->warp = &w, f->pc = (int)w.at, f->number = number, f->noinc = i.n, f->lanes = 0;
    f->cta = &k.cta_of(w, a);
    f->bar = a & OFFSET_MASK;
    f->shot = shoot(w);
    k.barrier(&w, *f->cta, f->bar, (int)w.at);
    FOR_LANES (l, todo) {
      if ((u32)w.addr(i, i.a[1], l) != a) continue;
      todo &= ~(1u << l);
      f->lanes++;
      for (auto& q : w.copies[l].closed)
        for (auto& op : q.ops)
          if (f->before.empty() || f->before.back() != op) f->before.push_back(op);
      for (auto& op : w.copies[l].open)
        if (f->before.empty() || f->before.back() != op) f->before.push_back(op);
      w.copies[l] = {};
    }
    if (k.trace)
      k.trace->event(w, Traced::CopyArrive, (i32)f->cta->rank, (i32)f->bar, (i32)f->lanes, i.n);
    k.add_flight(*w.cluster, f);
  }
}

void nothing(Warp&, const Ins&, Mask) {}

void decode_bulk(Decoder& d, bool reduce) {
  auto& x = d.extra();
  if (d.has("commit_group")) {
    d.ins.fn = bulk_commit;
    return;
  }
  if (d.has("wait_group")) {
    d.ins.n = (i32)d.op(0).value;
    d.ins.bytes = d.has("read");
    d.ins.fn = bulk_wait;
    return;
  }
  if (d.has("prefetch")) {
    d.ins.fn = nothing;
    return;
  }
  if (d.has("im2col") || d.has("cp_mask")) d.unknown();
  bool tensor = d.has("tensor"), mbar = d.has("mbarrier::complete_tx::bytes");
  auto place = [&](const std::string& s) { return s.rfind("shared", 0) == 0 || s == "global"; };
  std::vector<std::string> spaces;
  for (auto& s : d.st.mods)
    if (place(s)) spaces.push_back(s);
  if (spaces.size() != 2) d.unknown();
  bool to_shared = spaces[0] != "global", from_global = spaces[1] == "global";
  x.n[4] = to_shared ? (from_global ? LOAD : SHARED_COPY) : STORE;
  if (to_shared != mbar) d.unknown("completion mechanism");
  x.n[5] = -1, x.n[6] = B32;
  if (reduce) {
    x.n[5] = reduction_of(d);
    if (!tensor) x.n[6] = d.type();
  }
  auto group = d.has("cta_group::2");
  x.n[7] = tensor | (d.has("tile::gather4") || d.has("tile::scatter4")) << 1 |
           d.has("multicast::cluster") << 2 | group << 3;
  d.ins.a[0] = d.address(0), x.n[0] = d.ins.offset;
  d.ins.a[1] = d.address(1), x.n[1] = d.ins.offset;
  size_t k = 2;
  if (tensor) {
    const Operand& o = d.op(to_shared ? 1 : 0);
    if (o.parts.size() < 2) d.unknown("coordinates missing");
    const Operand& c = o.parts[1];
    if (c.kind == Operand::Vector)
      for (auto& q : c.parts) x.regs.push_back(d.src(q, S32));
    else x.regs.push_back(d.src(c, S32));
    x.n[8] = (int)x.regs.size();
  } else d.ins.a[2] = d.src(k++, U32);
  if (mbar) {
    d.ins.a[3] = d.address(k), x.n[2] = d.ins.offset;
    k++;
    if (x.n[7] & 4) d.ins.a[4] = d.src(k++, U16);
  }
  d.ins.fn = to_shared ? bulk_load : bulk_store;
}

}  // namespace

void register_bulk(Table& t) {
  t["cp"] = [](Decoder& d) {
    auto& mods = d.st.mods;
    if (d.has("bulk")) return decode_bulk(d, mods[0] == "reduce");
    if (mods.size() > 1 && mods[0] == "async" && mods[1] == "mbarrier") {
      d.ins.a[1] = d.address(0);
      d.ins.bytes = d.address_is_64(0) ? 0 : 0x80;
      d.ins.n = d.has("noinc");
      d.ins.fn = copy_arrive;
      return;
    }
    if (!mods.empty() && mods[0] == "async") return decode_cp_async(d);
    d.unknown();
  };
}

}  // namespace emu
