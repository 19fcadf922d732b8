// mbarrier.*, bar/barrier.*, barrier.cluster.*, fences. PTX ISA: "Parallel Synchronization and
// Communication Instructions". Blocking instructions are executed again when their warp wakes.
#include "lanes.h"
#include "strong.h"

namespace emu {
namespace {

enum { INIT, INVAL, ARRIVE, DROP, EXPECT_TX, COMPLETE_TX, TEST, TRY };

// a[0]: destination (state or predicate), a[1]: address, a[2]: count / tx / parity / state
// n: operation; x->n[0]: .expect_tx, [1]: .noComplete, [2]: .parity, [3]: relaxed, [4]: 32-bit
// address, x->n[5]: has a count
struct Target {
  Cta* cta;
  Mbarrier* bar;
  u32 offset;
};

u32 shared_address(Warp& w, const Ins& i, u32 lane) { return (u32)w.addr(i, i.a[1], lane); }

Target target(Warp& w, const Ins& i, u32 lane, bool must = true) {
  u32 a = shared_address(w, i, lane);
  Cta& t = w.machine->cta_of(w, a);
  u32 off = a & OFFSET_MASK;
  if (off % 8 || off + 8 > t.shared.size())
    w.machine->fatal("bounds", format("mbarrier at shared offset %u", off));
  return {&t, w.machine->barrier(&w, t, off, (int)w.at, must), off};
}

void init(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  FOR_LANES (l, m) {
    auto [t, b, off] = target(w, i, l, false);
    u32 count = w.r(i.a[2])[l];
    bool pristine =
        b && b->count == count && b->pending == count && !b->phase && !b->tx;  // harmless to repeat
    if (b && b->valid && !pristine && k.barrier_rules)
      k.fatal("barrier", format("mbarrier.init at shared offset %u, which already holds an "
                                "mbarrier (phase %u, %u of %u arrivals pending); "
                                "mbarrier.inval must come first",
                                off, b->phase, b->pending, b->count));
    if (!count || count > (1u << 20) - 1)
      k.fatal("barrier", format("mbarrier.init with count %u", count));
    if (!b) {
      t->mbarriers.emplace_back();
      b = &t->mbarriers.back();
      t->barrier_at[off / 8] = (u16)t->mbarriers.size();
      b->index = (u32)t->mbarriers.size() - 1;
    }
    Cluster& c = *w.cluster;
    b->address = off, b->rank = t->rank, b->count = b->pending = count, b->tx = 0, b->phase = 0,
    b->valid = true;
    b->comp = (u32)c.warps.size() * ACTORS + t->rank * BARRIERS_PER_CTA +
              std::min(b->index, BARRIERS_PER_CTA - 1);
    b->init_line = w.program->entry->code[w.at].line;
    if (k.race) {
      b->init_comp = w.comp(GENERIC), b->init_clock = w.clock[b->init_comp];
      b->gathered.assign(c.components, 0);
      b->released = nullptr;
    }
    k.progress++;
    if (k.trace)
      k.trace->event(w, Traced::MbarrierInit, (i32)t->rank, (i32)off, (i32)count);
    if (k.uninitialised) t->shared_shadow.mark(off, 8);
  }
}

void inval(Warp& w, const Ins& i, Mask m) {
  FOR_LANES (l, m) {
    auto t = target(w, i, l);
    t.bar->valid = false;
  }
}

void put_state(Warp& w, const Ins& i, u32 lane, u64 v) {
  if (i.a[0] == NONE) return;
  w.w(i.a[0])[lane] = (u32)v;
  w.w(i.a[0] + 1)[lane] = (u32)(v >> 32);
}

void arrive(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  const int* x = i.x->n;
  Mask todo = m;
  while (todo) {  // lanes with one address together
    u32 first = (u32)lowest(todo);
    u32 a = shared_address(w, i, first);
    auto t = target(w, i, first);
    Mbarrier& b = *t.bar;
    u32 count = 0, phase = b.phase;
    i64 tx = 0;
    Mask same = 0;
    FOR_LANES (l, todo) {
      if (shared_address(w, i, l) != a) continue;
      same |= 1u << l;
      if (x[0]) tx += w.r(i.a[2])[l], count++;
      else count += x[5] ? w.r(i.a[2])[l] : 1;
    }
    todo &= ~same;
    FOR_LANES (l, same) put_state(w, i, l, phase);
    if (x[3]) {
      if (k.race && !w.fenced.empty()) join(b.gathered, w.fenced);
    } else w.release(b.gathered);
    b.tx += tx;
    if (k.barrier_rules && b.tx > (1 << 20) - 1)
      k.fatal("barrier",
              format("mbarrier at shared offset %u: expect_tx raises the transaction count to %lld",
                     b.address, (long long)b.tx));
    if (k.trace)
      k.trace->event(w, Traced::MbarrierArrive, (i32)b.rank, (i32)b.address, (i32)count, (i32)tx);
    if (i.n == DROP) b.count -= count;
    k.arrive(b, *t.cta, count, "mbarrier.arrive");
  }
}

void transactions(Warp& w, const Ins& i, Mask m) {
  FOR_LANES (l, m) {
    auto t = target(w, i, l);
    i64 bytes = w.r(i.a[2])[l];
    if (Tracer* trace = w.machine->trace.get())
      trace->event(w, Traced::MbarrierBytes, (i32)t.cta->rank, (i32)t.offset, 0,
                   (i32)(i.n == EXPECT_TX ? bytes : -bytes));
    w.machine->complete_tx(*t.bar, *t.cta, i.n == EXPECT_TX ? -bytes : bytes);
  }
}

void wait(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  std::vector<Warp::Owed> fresh;
  Mask passed = 0;
  i32 parity = 0;
  Mbarrier *failed = nullptr, *seen = nullptr;
  FOR_LANES (l, m) {
    auto t = target(w, i, l);
    Mbarrier& b = *t.bar;
    u32 v = w.r(i.a[2])[l];
    parity = (i32)(v & 1);
    bool done = i.x->n[2] ? (b.phase & 1) != (v & 1) : b.phase != v;
    if (done) {
      passed |= 1u << l;
      if (k.race && !i.x->n[3] && &b != seen && b.released) fresh.push_back({i.a[0], b.released});
      seen = &b;
      continue;
    }
    failed = &b;
  }
  Mbarrier* seen_or_failed = failed ? failed : seen;
  std::erase_if(w.owed, [&](auto& o) { return o.pred == i.a[0]; });
  bool peek = k.policy != Machine::Late && k.random.below(4) == 0;  // it may return at once as well
  if (failed && i.n == TRY && !w.timed_out && !peek) {
    w.waiting_for = failed;
    w.waiting_phase = failed->phase;
    w.block(Wait::Mbarrier);
    return;
  }
  if (k.trace && seen_or_failed)
    k.trace->event(w, Traced::MbarrierWait, (i32)seen_or_failed->rank,
                   (i32)seen_or_failed->address, parity, !failed);
  w.owed.insert(w.owed.end(), fresh.begin(), fresh.end());
  if (i.n == TRY) w.timed_out = false;
  Mask& p = w.preds[i.a[0]];
  p = (p & ~m) | passed;
}

void pending_count(Warp& w, const Ins& i, Mask m) {
  FOR_LANES (l, m) w.w(i.a[0])[l] = 0;  // of an opaque state; ours does not hold it
  w.machine->fatal("instruction", "not understood: mbarrier.pending_count");
}

void decode_mbarrier(Decoder& d) {
  auto& st = d.st;
  auto& x = d.extra();
  x.n[0] = d.has("expect_tx"), x.n[1] = d.has("noComplete"), x.n[2] = d.has("parity"),
  x.n[3] = d.has("relaxed");
  const std::string& op = st.mods.at(0);
  auto at = [&](size_t n) {
    d.ins.a[1] = d.address(n);
    d.ins.bytes = d.address_is_64(n) ? 0 : 0x80;
  };
  if (op == "init") {
    at(0);
    d.ins.a[2] = d.src(1, U32);
    d.ins.fn = init;
  } else if (op == "inval") {
    at(0);
    d.ins.fn = inval;
  } else if (op == "arrive" || op == "arrive_drop") {
    d.ins.n = op == "arrive" ? ARRIVE : DROP;
    size_t k = d.op(0).kind == Operand::Address ? 0 : 1;
    if (k) d.ins.a[0] = d.dst(0, B64);
    at(k);
    x.n[5] = d.count() > k + 1;
    if (x.n[5]) d.ins.a[2] = d.src(k + 1, U32);
    d.ins.fn = arrive;
  } else if (op == "expect_tx" || op == "complete_tx") {
    d.ins.n = op == "expect_tx" ? EXPECT_TX : COMPLETE_TX;
    at(0);
    d.ins.a[2] = d.src(1, U32);
    d.ins.fn = transactions;
  } else if (op == "test_wait" || op == "try_wait") {
    d.ins.n = op == "test_wait" ? TEST : TRY;
    d.ins.a[0] = d.pred(0);
    at(1);
    d.ins.a[2] = x.n[2] ? d.src(2, U32) : d.src(2, B64);
    d.ins.fn = wait;
  } else if (op == "pending_count") {
    d.ins.a[0] = d.dst(0, U32);
    d.ins.fn = pending_count;
  } else d.unknown();
}

// ---- named barriers ----
// a[0]: destination of a reduction, a[1]: number, a[2]: threads, a[3]: predicate
// n: 0 sync, 1 arrive, 2 red.popc, 3 red.and, 4 red.or; x->n[0]: predicate negated
void named(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  u32 lane = (u32)lowest(m), id = w.r(i.a[1])[lane];
  u32 threads = i.a[2] == NONE ? (u32)w.cta->warps.size() * LANES : w.r(i.a[2])[lane];
  if (id > 15) k.fatal("barrier", format("barrier %u: there are 16", id));
  NamedBarrier& b = w.cta->named[id];
  if (i.n != 1 && w.barrier_arrived) {
    if (b.generation == w.barrier_generation) {
      w.waiting_on = id;
      w.block(Wait::NamedBarrier);
      return;
    }
    w.barrier_arrived = false;
    w.acquire(b.released);
    if (i.n >= 2) {
      u32 v = b.result[w.barrier_generation & 1];
      if (i.n == 2) {
        FOR_LANES (l, m) w.w(i.a[0])[l] = v;
      } else {
        Mask& p = w.preds[i.a[0]];
        p = v ? p | m : p & ~m;
      }
    }
    return;
  }
  if (i.n != 1 && (w.live & ~w.active)) {
    w.block(Wait::Lanes);
    return;
  }
  if (threads % LANES && k.barrier_rules)
    k.fatal("barrier",
            format("barrier %u with %u threads, not a multiple of the warp size", id, threads));
  if (b.arrived && b.expected != threads && k.barrier_rules)
    k.fatal("barrier", format("barrier %u is used with %u threads while %u warps wait for %u", id,
                              threads, b.arrived / LANES, b.expected));
  b.expected = threads;
  if (b.arrived == 0) b.ones = 0, b.voters = 0;
  b.arrived += LANES;
  if (i.n >= 2) {
    Mask v = (w.preds[i.a[3]] ^ (i.x->n[0] ? FULL : 0)) & m;
    b.ones += (u32)popcount(v);
    b.voters += (u32)popcount(m);
  }
  if (k.trace)
    k.trace->event(w, i.n == 1 ? Traced::BarrierArrive : Traced::BarrierSync, (i32)id, 0,
                   (i32)threads);
  w.release(b.gathered);
  w.barrier_generation = b.generation;
  k.progress++;
  if (b.arrived >= b.expected) {
    b.result[b.generation & 1] = i.n == 2 ? b.ones : i.n == 3 ? b.ones == b.voters : b.ones != 0;
    b.arrived = 0;
    b.generation++;
    if (k.race) b.released = b.gathered;
    k.wake(*w.cluster, nullptr);
  }
  if (i.n == 1) return;
  w.barrier_arrived = true;
  named(w, i, m);
}

void decode_bar(Decoder& d) {
  auto& mods = d.st.mods;
  size_t first = !mods.empty() && mods[0] == "cta" ? 1 : 0;
  std::string op = mods.at(first);
  if (op == "cluster") {
    std::string what = mods.at(first + 1);
    d.ins.n = d.has("relaxed");
    if (what == "arrive")
      d.ins.fn = [](Warp& w, const Ins& i, Mask) {
        if (w.live & ~w.active) {
          w.block(Wait::Lanes);
          return;
        }
        Cluster& c = *w.cluster;
        Machine& k = *w.machine;
        if (w.cluster_target && k.barrier_rules)
          k.fatal("barrier", "barrier.cluster.arrive twice without a wait");
        if (k.trace) k.trace->event(w, Traced::ClusterArrive);
        w.cluster_target = c.cluster_generation + 1;
        if (c.cluster_gathered.empty()) c.cluster_gathered.assign(k.race ? c.components : 0, 0);
        if (!i.n) w.release(c.cluster_gathered);
        else if (k.race && !w.fenced.empty()) join(c.cluster_gathered, w.fenced);
        c.cluster_arrived++;
        k.progress++;
        k.cluster_barrier_check(c);
      };
    else if (what == "wait")
      d.ins.fn = [](Warp& w, const Ins&, Mask) {
        if (!w.cluster_target) {
          if (w.machine->barrier_rules)
            w.machine->fatal("barrier", "barrier.cluster.wait without an arrive before it");
          return;
        }
        if (w.cluster->cluster_generation < w.cluster_target) {
          w.block(Wait::ClusterBarrier);
          return;
        }
        w.cluster_target = 0;
        if (w.machine->trace) w.machine->trace->event(w, Traced::ClusterWait);
        w.acquire(w.cluster->cluster_released);
      };
    else d.unknown();
    return;
  }
  if (op == "warp") {
    d.ins.a[1] = d.src(0, B32);
    d.ins.fn = [](Warp& w, const Ins& i, Mask m) {
      Mask want = w.r(i.a[1])[lowest(m)];
      if (want & w.live & ~w.active) w.block(Wait::Lanes);
    };
    return;
  }
  auto& x = d.extra();
  size_t k = 0;
  if (op == "sync") d.ins.n = 0;
  else if (op == "arrive") d.ins.n = 1;
  else if (op == "red") {
    d.ins.n = d.has("popc") ? 2 : d.has("and") ? 3 : 4;
    d.ins.a[0] = d.ins.n == 2 ? d.dst(0, U32) : d.pred(0);
    k = 1;
  } else d.unknown();
  d.ins.a[1] = d.src(k++, U32);
  size_t rest = d.count() - k - (d.ins.n >= 2 ? 1 : 0);
  if (rest) d.ins.a[2] = d.src(k++, U32);
  if (d.ins.n >= 2) {
    d.ins.a[3] = d.pred(k);
    x.n[0] = d.op(k).negate;
  }
  d.ins.fn = named;
}

// ---- fences ----
void fence_generic(Warp& w, const Ins&, Mask) { fence(w); }
void fence_nothing(Warp&, const Ins&, Mask) {}

void fence_async(Warp& w, const Ins&, Mask) {
  if (!w.machine->race) return;
  for (u32 v = 0; v < w.cluster->warps.size(); v++) {
    u32* c = &w.clock[v * ACTORS];
    c[PUBLISHED] = std::max(c[PUBLISHED], c[GENERIC]);
    c[COPY_PUBLISHED] = std::max(c[COPY_PUBLISHED], c[COPY]);
  }
  w.clock[w.comp(GENERIC)]++;  // later writes are not covered
  w.clock_changed = true;
}

void decode_fence(Decoder& d) {
  if (d.has("proxy"))
    d.ins.fn = d.has("async") || d.has("async::generic") || d.st.mods.size() < 2 ? fence_async
                                                                                 : fence_nothing;
  else {
    bool async = false;
    for (auto& m : d.st.mods) async |= m.rfind("async", 0) == 0;
    d.ins.fn = async ? fence_async : fence_generic;
  }
}

}  // namespace

void register_barrier(Table& t) {
  t["mbarrier"] = decode_mbarrier;
  t["bar"] = t["barrier"] = decode_bar;
  t["fence"] = decode_fence;
  t["membar"] = [](Decoder& d) { d.ins.fn = fence_generic; };
}

}  // namespace emu
