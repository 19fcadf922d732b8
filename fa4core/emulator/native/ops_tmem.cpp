// Tensor memory as warps see it: tcgen05.alloc, dealloc, relinquish_alloc_permit, ld, st, wait.
// PTX ISA: "TensorCore 5th Generation Family Instructions: tensor memory allocation and management,
// tcgen05.ld, tcgen05.st, tcgen05.wait, data movement shapes".
#include <algorithm>

#include "lanes.h"
#include "tensor.h"

namespace emu {

void check_columns(Machine& k, Cta& t, u32 column, u32 columns, const char* what, Warp* w, int pc) {
  if (column + columns > 512)
    k.fatal("tmem", format("%s of TMEM columns %u to %u: there are 512", what, column,
                           column + columns - 1));
  if (!k.tensor_rules) return;
  for (u32 c = column / 32; c <= (column + columns - 1) / 32; c++)
    if (!t.columns[c]) {
      k.report("tmem",
               format("%s of TMEM columns %u to %u of CTA rank %u: column %u is not allocated",
                      what, column, column + columns - 1, t.rank, std::max(c * 32, column)),
               w, pc);
      return;
    }
}

namespace {

// ---- allocation ----
bool find_columns(Machine& k, Cta& a, Cta* b, u32 n, u32& at) {
  std::vector<u32> fits;
  for (u32 c = 0; c + n <= 512; c += n) {  // aligned to its size, which is a power of two
    bool free_ = true;
    for (u32 q = c / 32; q < (c + n) / 32; q++) free_ &= !a.columns[q] && !(b && b->columns[q]);
    if (free_) fits.push_back(c);
  }
  if (fits.empty()) return false;
  at = k.seed == 0 ? fits[0] : fits[k.random.below((u32)fits.size())];  // any place is legal
  return true;
}

void take_columns(Machine& k, Warp& w, u32 dst, u32 at, u32 n) {
  for (u32 q = at / 32; q < (at + n) / 32; q++) w.cta->columns[q] = 1;
  w.cta->allocations[at] = n;
  u8* p = k.shared(w, dst, 4, "tcgen05.alloc");
  std::memcpy(p, &at, 4);
  k.shared_access(w, dst, 4, true, 0);
  if (k.uninitialised)  // new columns hold nothing
    for (u32 g = at * 8; g < (at + n) * 8; g++) w.cta->tmem_shadow.written[g] = 0;
}

void alloc(Warp& w, const Ins& i, Mask m) {  // n: cta_group
  Machine& k = *w.machine;
  if (w.alloc_done) {
    w.alloc_done = false;
    return;
  }
  u32 lane = (u32)lowest(m), n = w.r(i.a[2])[lane], dst = (u32)w.addr(i, i.a[1], lane);
  if (n < 32 || n > 512 || (n & (n - 1)))
    k.fatal("tmem",
            format("tcgen05.alloc of %u columns: a power of two from 32 to 512 is allowed", n));
  if (!w.cta->may_allocate)
    k.fatal("tmem", "tcgen05.alloc after tcgen05.relinquish_alloc_permit of the same CTA");
  w.alloc_columns = n, w.alloc_to = dst;
  if (i.n == 1) {
    u32 at;
    if (!find_columns(k, *w.cta, nullptr, n, at)) {
      w.block(Wait::TensorAlloc);
      return;
    }
    take_columns(k, w, dst, at, n);
    return;
  }
  auto& waiting = w.cluster->pair_allocs[w.cta->rank / 2];
  for (Warp* v : waiting) {  // a warp of each CTA of the pair must come
    if (v->cta == w.cta) continue;
    if (v->alloc_columns != n)
      k.fatal("tmem", format("tcgen05.alloc.cta_group::2 of %u columns here and %u in the peer CTA",
                             n, v->alloc_columns));
    u32 at;
    if (!find_columns(k, *w.cta, v->cta, n, at)) break;
    take_columns(k, w, dst, at, n);
    take_columns(k, *v, v->alloc_to, at, n);
    v->alloc_done = true;
    if (k.race) {  // each waited for the other
      w.acquire(v->clock), v->acquire(w.clock);
      for (Warp* q : {&w, v}) q->clock[q->comp(GENERIC)]++;
    }
    waiting.erase(std::find(waiting.begin(), waiting.end(), v));
    waiting.erase(std::remove(waiting.begin(), waiting.end(), &w), waiting.end());
    k.wake(*w.cluster, nullptr);
    return;
  }
  if (std::find(waiting.begin(), waiting.end(), &w) == waiting.end()) waiting.push_back(&w);
  w.block(Wait::TensorAlloc);
}

void dealloc(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  u32 lane = (u32)lowest(m), at = w.r(i.a[1])[lane] & 0xffff, n = w.r(i.a[2])[lane];
  auto f = w.cta->allocations.find(at);
  if (f == w.cta->allocations.end() || f->second != n) {
    std::string have;
    for (auto& [c, q] : w.cta->allocations) have += format(" %u columns from %u", q, c);
    k.report("tmem",
             format("tcgen05.dealloc of %u columns from %u; allocated are:%s", n, at,
                    have.empty() ? " none" : have.c_str()),
             &w, (int)w.at);
    return;
  }
  w.cta->allocations.erase(f);
  for (u32 q = at / 32; q < (at + n) / 32; q++) w.cta->columns[q] = 0;
  k.wake(*w.cluster, nullptr);
}

// ---- ld and st ----
struct Place {
  u8 lane;
  u16 column;
};

// Register `reg` of thread `t`: which lane (from the first of the access) and column.
enum Shape { S32x32, S16x64, S16x128, S16x256, S16x32x2 };
Place place(int shape, u32 t, u32 reg, u32 split) {
  switch (shape) {
    case S32x32: return {(u8)t, (u16)reg};
    case S16x64: return {(u8)((t & 1) * 8 + t / 4), (u16)((t >> 1 & 1) + 2 * reg)};
    case S16x128: return {(u8)(t / 4 + 8 * (reg & 1)), (u16)(t % 4 + reg / 2 * 4)};
    case S16x256:
      return {(u8)(t / 4 + 8 * (reg >> 1 & 1)), (u16)(2 * (t % 4) + (reg & 1) + reg / 4 * 8)};
    default: return {(u8)(t % 16), (u16)(reg + (t < 16 ? 0 : split))};
  }
}

struct Access_ {  // one ld or st, decoded
  int shape;
  bool packed;  // .pack::16b / .unpack::16b
  u32 split, lane, column, lanes, columns;
};

// n: shape | packed << 4; x->regs registers; x->n[0] columns, x->n[1] split
Access_ access_of(Warp& w, const Ins& i, Mask m, const char* what) {
  Machine& k = *w.machine;
  u32 address = w.r(i.a[1])[lowest(m)] + (u32)i.offset;
  Access_ a;
  a.shape = i.n & 15, a.packed = i.n >> 4, a.split = (u32)i.x->n[1];
  a.lane = address >> 16, a.column = address & 0xffff;
  a.lanes = a.shape == S32x32 ? 32 : 16;
  a.columns = (u32)i.x->n[0];
  u32 quadrant = (u32)w.index % 4;
  if (a.lane / 32 != quadrant || a.lane % a.lanes)
    k.fatal("tmem",
            format("%s at TMEM lane %u: warp %d may use lanes %u to %u, from a multiple of %u",
                   what, a.lane, w.index, quadrant * 32, quadrant * 32 + 31, a.lanes));
  if (m != FULL) k.fatal("tmem", format("%s with only part of the warp's threads", what));
  check_columns(k, *w.cta, a.column, a.columns, what, &w, (int)w.at);
  return a;
}

void load_now(Warp& w, const Access_& a, const std::vector<u32>& regs) {
  const u32* tmem = w.cta->tmem.data();
  for (u32 r = 0; r < regs.size(); r++) {
    if (regs[r] == NONE) continue;
    u32* d = w.w(regs[r]);
    if (a.shape == S32x32 && !a.packed) {
      std::memcpy(d, tmem + (a.column + r) * 128 + a.lane, 128);
      continue;
    }
    for (u32 t = 0; t < LANES; t++) {
      Place p = place(a.shape, t, r, a.split);
      auto get = [&](u32 column) { return tmem[(a.column + column) * 128 + a.lane + p.lane]; };
      d[t] =
          a.packed ? (get(2u * p.column) & 0xffff) | get(2u * p.column + 1) << 16 : get(p.column);
    }
  }
}

void ld(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  Access_ a = access_of(w, i, m, "tcgen05.ld");
  k.stats.traffic[TMEM_READ] += (u64)a.lanes * a.columns * 4;
  if (k.trace)
    k.trace->event(w, Traced::TmemLoad, (i32)a.lanes, (i32)a.columns, 0, 0, (i32)a.column);
  u32 number = ++w.load_number;
  int pc = (int)w.at;
  FlightShot shot = shoot(w);
  const std::vector<u32>* regs = &i.x->regs;
  auto perform = [&w, &k, a, regs, shot, number, pc] {
    if (k.race) {
      Who x = async_who(w, shot, w.comp(TMEM_LOAD), number);
      x.async = false;
      k.tensor_race(*w.cta, false, a.lane, a.lanes, a.column, a.columns, x, &w, pc);
    }
    if (k.uninitialised) tmem_read_check(k, *w.cta, a.lane, a.lanes, a.column, a.columns, &w, pc);
    check_columns(k, *w.cta, a.column, a.columns, "tcgen05.ld", &w, pc);
    load_now(w, a, *regs);
  };
  PendingLoad p;
  p.planes = i.x->regs;
  p.number = number;
  bool now = k.policy == Machine::Eager || (k.policy == Machine::Mixed && k.random.below(2));
  if (now) perform();
  else p.perform = perform;
  for (u32 r : p.planes)
    if (r != NONE) w.pending_plane[r] = 1;
  w.loads.push_back(std::move(p));
}

struct Store : Flight {
  Machine* k;
  Access_ a;
  std::vector<u32> data;  // by register, 32 lanes each
  FlightShot shot;
  u32 number;
  std::weak_ptr<Flight> before;
  void land() override {
    if (auto b = before.lock()) k->force(*b, 2);  // a warp's stores keep their order
    u32 n = (u32)data.size() / LANES;
    if (k->race) {
      Who x = async_who(*warp, shot, warp->comp(TMEM_STORE), number);
      x.async = false;
      x.own = x.comp;
      k->tensor_race(*warp->cta, true, a.lane, a.lanes, a.column, a.columns, x, warp, pc);
    }
    check_columns(*k, *warp->cta, a.column, a.columns, "tcgen05.st", warp, pc);
    if (k->uninitialised) tmem_mark(*warp->cta, a.lane, a.lanes, a.column, a.columns);
    u32* tmem = warp->cta->tmem.data();
    for (u32 r = 0; r < n; r++)
      for (u32 t = 0; t < LANES; t++) {
        Place p = place(a.shape, t, r, a.split);
        auto put = [&](u32 column, u32 v) {
          tmem[(a.column + column) * 128 + a.lane + p.lane] = v;
        };
        u32 v = data[r * LANES + t];
        if (a.packed) put(2u * p.column, v & 0xffff), put(2u * p.column + 1, v >> 16);
        else put(p.column, v);
      }
  }
  void complete() override {}
  std::string describe() const override { return "tcgen05.st"; }
};

void st(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  auto f = std::make_shared<Store>();
  f->k = &k, f->warp = &w, f->pc = (int)w.at;
  f->a = access_of(w, i, m, "tcgen05.st");
  if (k.trace)
    k.trace->event(w, Traced::TmemStore, (i32)f->a.lanes, (i32)f->a.columns, 0, 0,
                   (i32)f->a.column);
  f->shot = shoot(w);
  f->number = ++w.store_number;
  f->before = w.last_store;
  f->data.resize(i.x->regs.size() * LANES);
  for (size_t r = 0; r < i.x->regs.size(); r++)
    std::memcpy(&f->data[r * LANES], w.r(i.x->regs[r]), 128);
  k.stats.traffic[TMEM_WRITE] += (u64)f->a.lanes * f->a.columns * 4;
  w.last_store = f;
  w.stores.push_back(f);
  k.add_flight(*w.cluster, f);
}

void wait_ld(Warp& w, const Ins&, Mask) {
  if (w.machine->trace) w.machine->trace->event(w, Traced::TmemWait);
  w.finish_loads();
}
void wait_st(Warp& w, const Ins&, Mask) {
  if (w.machine->trace) w.machine->trace->event(w, Traced::TmemWait, 1);
  for (auto& f : w.stores) w.machine->force(*f, 2);
  w.stores.clear();
  if (w.machine->race) {
    w.clock[w.comp(TMEM_STORE)] = w.store_number;
    w.clock_changed = true;
  }
}

void decode_access(Decoder& d, bool load) {
  auto& x = d.extra();
  static const std::pair<const char*, int> shapes[] = {{"32x32b", S32x32},
                                                       {"16x64b", S16x64},
                                                       {"16x128b", S16x128},
                                                       {"16x256b", S16x256},
                                                       {"16x32bx2", S16x32x2}};
  int shape = -1, times = 0;
  for (auto& [n, s] : shapes)
    if (d.has(n)) shape = s;
  for (auto& s : d.st.mods)
    if (s[0] == 'x' && isdigit((u8)s[1])) times = atoi(s.c_str() + 1);
  if (shape < 0 || !times || d.has("red")) d.unknown();
  bool packed = d.has("pack::16b") || d.has("unpack::16b");
  size_t list = load ? 0 : 1, mem = load ? 1 : 0;
  d.ins.a[1] = d.address(mem);
  if (shape == S16x32x2) {
    x.n[1] = (i32)d.op(load ? 2 : 1).value;
    if (!load) list = 2;
  }
  x.regs = d.list(list, B32, load);
  static const int per[] = {1, 2, 4, 8, 1};
  x.n[0] = times * per[shape];
  if (shape == S16x32x2) x.n[0] = times + x.n[1];
  u32 regs = (u32)(times * (shape == S16x128 ? 2 : shape == S16x256 ? 4 : 1));
  if (packed) x.n[0] *= 2;  // two 16-bit columns in each register
  if (x.regs.size() != regs) d.unknown(format("%zu registers", x.regs.size()));
  d.ins.n = shape | packed << 4;
  d.ins.fn = load ? ld : st;
}

}  // namespace

void tmem_mark(Cta& t, u32 lane, u32 lanes, u32 column, u32 columns) {
  for (u32 c = column; c < column + columns; c++)
    for (u32 g = lane / 16; g < (lane + lanes + 15) / 16; g++) t.tmem_shadow.written[c * 8 + g] = 1;
}

void tmem_read_check(Machine& k, Cta& t, u32 lane, u32 lanes, u32 column, u32 columns, Warp* w,
                     int pc) {
  for (u32 c = column; c < column + columns; c++)
    for (u32 g = lane / 16; g < (lane + lanes + 15) / 16; g++)
      if (!t.tmem_shadow.written[c * 8 + g]) {
        k.report(
            "uninitialised",
            format("read of TMEM column %u, lanes from %u, of CTA rank %u, which nothing wrote", c,
                   g * 16, t.rank),
            w, pc);
        return;
      }
}

void decode_tmem(Decoder& d) {
  auto& op = d.st.mods.at(0);
  int group = d.has("cta_group::2") ? 2 : 1;
  if (op == "alloc") {
    d.ins.a[1] = d.address(0), d.ins.a[2] = d.src(1, U32);
    d.ins.bytes = d.address_is_64(0) ? 0 : 0x80;
    d.ins.n = group;
    d.ins.fn = alloc;
  } else if (op == "dealloc") {
    d.ins.a[1] = d.src(0, U32), d.ins.a[2] = d.src(1, U32);
    d.ins.fn = dealloc;
  } else if (op == "relinquish_alloc_permit")
    d.ins.fn = [](Warp& w, const Ins&, Mask) { w.cta->may_allocate = false; };
  else if (op == "ld") decode_access(d, true);
  else if (op == "st") decode_access(d, false);
  else if (op == "wait::ld") d.ins.fn = wait_ld;
  else if (op == "wait::st") d.ins.fn = wait_st;
  else if (op.rfind("fence", 0) == 0) d.ins.fn = [](Warp&, const Ins&, Mask) {};
  else d.unknown();
}

}  // namespace emu
