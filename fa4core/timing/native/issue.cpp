// Schedulers: which warp issues, why the others do not, and what an issued instruction sets off.
#include <algorithm>
#include <cmath>

#include "machine.h"

namespace timing {

constexpr u64 IS_MBARRIER = 1ull << 63;
constexpr i32 WARP = 32;

void Machine::hold(Warp& w, i32 scoreboard, u64 who) {
  if (scoreboard == NONE) return;
  w.scoreboard[scoreboard]++;
  w.holder[scoreboard] = who;
}

void Machine::release_after(Warp& w, i32 scoreboard, i64 latency) {
  if (scoreboard == NONE) at(now + latency, Timed::Unblock, &w);
  else at(now + latency, Timed::Release, &w, 0, scoreboard);
}

void Machine::block(Warp& w, u64 on) {
  w.blocked = true;
  w.blocked_on = on;
}

Reason Machine::why_not(Sm& sm, Warp& w, u64& culprit) {
  if (w.blocked) {
    culprit = w.blocked_on;
    return culprit & IS_MBARRIER ? AT_MBARRIER : AT_BARRIER;
  }
  if (w.next_issue > now) return FIXED;
  const Static& s = statics[(size_t)w.code[w.at].instruction];
  for (int k = 0; k < SCOREBOARDS; k++)
    if (s.wait >> k & 1 && w.scoreboard[k]) {
      culprit = w.holder[k];
      return culprit & IS_MBARRIER ? AT_MBARRIER : OPERANDS;
    }
  bool full = s.pipe == LSU && (double)sm.accesses.size() >= p.lsu_queue;
  if (full || sm.pipe_free[w.scheduler][s.pipe] > now) {
    culprit = (u64)s.pipe;
    return PIPE;
  }
  return NOT_CHOSEN;  // it could
}

void Machine::note(Warp& w, bool waits) {
  if (!keep_spans || waits == (w.waits_since >= 0)) return;
  if (!waits) spans.push_back({w.cta, w.index, 3, w.waits_since, now});
  w.waits_since = waits ? now : -1;
}

void Machine::count(Warp& w, Reason r, u64 culprit) {
  note(w, r == AT_MBARRIER || r == AT_BARRIER);
  w.spent[r]++;
  if (!w.cta) spots[(size_t)w.code[w.at].instruction * REASONS + (size_t)r]++;
  if (r == AT_MBARRIER) w.at_mbarrier[culprit & ~IS_MBARRIER]++;
  else if (r == OPERANDS) w.on_pipe[culprit]++;
  else if (r == AT_BARRIER) w.at_other[culprit]++;
}

// Sometimes the warp that issued last goes on, sometimes the next one has its turn.
void Machine::schedule(Sm& sm, int which) {
  auto& list = sm.warps[which];
  int n = (int)list.size(), last = sm.last[which], chosen = -1;
  bool greedy = random.unit() < p.greedy, held = sm.dispatched[which] > now;
  for (int k = 0; k < n; k++) {
    int index = (last + (greedy ? k : k + 1)) % n;
    Warp& w = *list[(size_t)index];
    if (w.finished >= 0) continue;
    u64 culprit = 0;
    Reason r = why_not(sm, w, culprit);
    if (r == NOT_CHOSEN && chosen < 0 && !held) chosen = index;
    else count(w, r, culprit);
  }
  if (chosen < 0) return;
  Warp& w = *list[(size_t)chosen];
  note(w, false);
  w.spent[ISSUED]++;
  if (!w.cta) spots[(size_t)w.code[w.at].instruction * REASONS + ISSUED]++;
  sm.last[which] = chosen;
  issue(sm, w);
}

void Machine::issue(Sm& sm, Warp& w) {
  const Dynamic& d = w.code[w.at];
  const Static& s = statics[(size_t)d.instruction];
  sm.issued++;
  sm.busy[s.pipe] += s.cycles;
  sm.pipe_free[w.scheduler][s.pipe] = now + s.cycles;
  w.next_issue = now + std::max(1, s.stall);
  // Products that accumulate in registers leave fewer ports to what warps issue meanwhile.
  bool reads = s.pipe == FMA || s.pipe == ALU || s.pipe == MUFU;
  if (reads && sm.accumulates > (double)now && random.unit() < p.dispatch_conflict)
    sm.dispatched[w.scheduler] = now + 2;
  perform(sm, w, s, d);
  if (++w.at < w.code.size()) return;
  w.finished = now;
  running--;
}

static i64 own_rank(const Warp& w) { return w.cta; }

Tensor& Machine::tensor_of(const Warp& w) {
  bool pair = tensors.size() < sms.size();
  return tensors[pair ? (size_t)w.cta / 2 : (size_t)w.cta];
}

void Machine::multiply(Sm& sm, Warp& w, const Static& s, const Event& e) {
  bool pair = e.d & 1, a_elsewhere = e.d & 2, warpgroup = e.d & 32;
  int group = pair ? 2 : 1, bytes = e.d & 8 ? 4 : e.d & 16 ? 1 : 2;
  // All lanes of a Blackwell tensor core take part, however few rows a product has; a pair with 64
  // rows each has half of the columns in the other half of the lanes (PTX ISA, layout B).
  double rows = e.a / group, filled = warpgroup ? rows : std::max(128.0 / group, rows);
  TensorOp o;
  o.cycles = filled * e.b * e.c / (p.mac * 2 / bytes);
  o.bytes = ((a_elsewhere ? 0 : rows) + (double)e.b / group) * e.c * bytes;
  o.in_registers = warpgroup;
  if (warpgroup) {
    Warpgroup& g = sm.warpgroups[w.index / WARPS_OF_GROUP];
    w.product_groups += s.groups;
    size_t ahead = (size_t)(w.products++ - g.complete);
    if (ahead == g.partial.size()) g.partial.push_back(0);
    if (++g.partial[ahead] < WARPS_OF_GROUP) return;
    g.partial.pop_front(), g.complete++;
    if (s.groups) o.group = g.warps;
  }
  tensor_of(w).ops.push_back(o);
}

void Machine::perform(Sm& sm, Warp& w, const Static& s, const Dynamic& d) {
  const Event* e = d.events ? &events[(size_t)d.first_event] : nullptr;
  auto each = [&](auto f) {
    for (i32 k = 0; k < d.events; k++) f(e[k]);
  };
  auto later = [&](i32 scoreboard, i64 latency) {
    if (scoreboard == NONE) return;
    hold(w, scoreboard, (u64)s.pipe);
    release_after(w, scoreboard, latency);
  };
  bool read_later = true;  // source registers are read soon
  switch ((Op)s.op) {
    case Op::SharedRead:
    case Op::SharedWrite:
    case Op::GlobalRead:
    case Op::GlobalWrite: {
      bool global = (Op)s.op == Op::GlobalRead || (Op)s.op == Op::GlobalWrite;
      double passes = e ? (global ? std::ceil(e->d / 4.0) : e->d) : 1;
      bool store = (Op)s.op == Op::SharedWrite;
      i64 returning = e && !global ? std::max(0, e->e - e->d) : 0;
      hold(w, s.write, (u64)s.pipe), hold(w, s.read, (u64)s.pipe);
      if (store) w.shared_writes++;
      sm.accesses.push_back({store ? Access::Store : Access::Load, std::max(1.0, passes), &w,
                             s.write, s.read,
                             (i64)(global ? p.global_latency : p.shared_latency) + returning, 0, 0,
                             returning});
      read_later = false;
      break;
    }
    case Op::TmemLoad:
    case Op::TmemStore: {
      bool store = (Op)s.op == Op::TmemStore;
      double& free = sm.tmem_free[w.scheduler];
      double cycles = e ? e->a * e->b * 4 / p.tmem_bytes : 1;
      free = std::max(free, (double)now) + cycles;
      sm.tmem_busy += cycles;
      i64 done = (i64)std::ceil(free) - now +
                 jittered(store ? p.tmem_store_latency : p.tmem_load_latency);
      later(s.write, done);
      later(s.read, (i64)std::ceil(free) - now);
      if (store) w.tmem_stores++, at(now + done, Timed::StoreDone, &w);
      read_later = false;
      break;
    }
    case Op::TmemFence:
      w.waiting_for = s.op;
      if (w.tmem_stores) block(w, (u64)Op::TmemFence);
      later(s.write, s.latency);
      break;
    case Op::SharedFence:
      w.waiting_for = s.op;
      if (w.shared_writes) block(w, (u64)Op::SharedFence);
      later(s.write, s.latency);
      break;
    case Op::Mma:
      each([&](const Event& v) { multiply(sm, w, s, v); });
      later(s.write, jittered(p.operand_latency));
      break;
    case Op::Commit:
      each([&](const Event& v) {
        TensorOp o;
        o.commit = true, o.mask = (u32)v.a, o.offset = (u32)v.b;
        tensor_of(w).ops.push_back(o);
      });
      later(s.write, jittered(p.operand_latency));
      break;
    case Op::ProductWait:
      w.allowed_groups = s.groups;
      if (w.product_groups > s.groups) block(w, (u64)Op::ProductWait);
      break;
    case Op::BulkLoad:
      each([&](const Event& v) {
        Sm& to = sms[(size_t)v.d];
        if (v.e)  // from this CTA's shared memory
          sm.bulk_accesses.push_back(
              {Access::Bulk, std::ceil(v.c / 128.0), nullptr, NONE, NONE, 0, 0, 0});
        i64 ready = now + jittered(v.e ? p.remote_latency : p.bulk_load_latency);
        if (!to.transfers.empty()) ready = std::max(ready, to.transfers.back().ready);
        to.transfers.push_back({ready, (double)v.c, (double)v.c, key_of(v.a, v.b)});
        if (keep_spans) spans.push_back({v.d, -2, 1, now, ready + (i64)(v.c / p.tma_bytes)});
      });
      later(s.write, jittered(p.operand_latency));
      break;
    case Op::BulkStore:
      each([&](const Event& v) {
        sm.bulk_accesses.push_back({Access::BulkRead, std::ceil(v.c / 128.0), &w, NONE, NONE, 0, 0, 0});
        w.open_stores++;
        if (keep_spans) spans.push_back({w.cta, -2, 2, now, now + (i64)(v.c / p.smem_bytes)});
      });
      break;
    case Op::BulkCommit:
      if (w.open_stores) w.groups.push_back(w.open_stores);
      w.open_stores = 0;
      break;
    case Op::BulkWait:
      w.waiting_for = s.op;
      w.allowed_groups = e ? e->a : 0;
      if (e && (i32)w.groups.size() > e->a) block(w, (u64)Op::BulkWait);
      break;
    case Op::MbarrierInit:
      each([&](const Event& v) {
        Mbarrier& b = mbarriers[key_of(v.a, v.b)];
        b.count = b.pending = v.c;
      });
      later(s.write, s.latency);
      break;
    case Op::MbarrierArrive:
      each([&](const Event& v) {
        i64 way = jittered(p.arrive_latency) + (v.a == own_rank(w) ? 0 : jittered(p.remote_latency));
        at(now + way, Timed::Arrive, nullptr, key_of(v.a, v.b), v.c, -v.d);
      });
      later(s.write, s.latency);
      break;
    case Op::MbarrierWait: {
      if (!e) break;
      u64 key = key_of(e->a, e->b);
      Mbarrier& b = mbarriers[key];
      hold(w, s.write, key | IS_MBARRIER);
      if (s.write == NONE) block(w, key | IS_MBARRIER);
      if ((i32)(b.phase & 1) != e->c) release_after(w, s.write, jittered(p.wait_latency));
      else b.waiters.push_back({&w, e->c, s.write});
      break;
    }
    case Op::BarrierSync:
    case Op::BarrierArrive: {
      if (!e) break;
      NamedBarrier& b = sm.named[e->a];
      b.arrived += WARP;
      bool sync = (Op)s.op == Op::BarrierSync;
      if (sync) b.waiters.push_back(&w), block(w, (u64)Op::BarrierSync);
      w.waiting_for = s.op;
      if (b.arrived < e->c) break;
      b.arrived = 0;
      i64 latency = jittered(p.barrier_latency);
      for (Warp* v : b.waiters) at(now + latency, Timed::Unblock, v);
      b.waiters.clear();
      break;
    }
    case Op::ClusterArrive:
      if (++cluster_arrived < cluster_warps) break;
      cluster_arrived = 0;
      cluster_generation++;
      for (Warp* v : cluster_waiters) at(now + jittered(p.cluster_latency), Timed::Unblock, v);
      cluster_waiters.clear();
      break;
    case Op::ClusterWait:
      if (cluster_generation > w.cluster_waits++) break;
      block(w, (u64)Op::ClusterWait);
      w.waiting_for = s.op;
      cluster_waiters.push_back(&w);
      break;
    case Op::CopyAsync: {
      i64 done = now + jittered(p.global_latency);
      w.last_copy = std::max(w.last_copy, done);
      sm.bulk_accesses.push_back(
          {Access::Load, e ? std::max(1, e->e) * 1.0 : 1, &w, NONE, NONE, 0, 0, 0});
      break;
    }
    case Op::CopyArrive:
      each([&](const Event& v) {
        if (!v.d) mbarriers[key_of(v.a, v.b)].pending += v.c;
        i64 done = std::max(now, w.last_copy) + jittered(p.arrive_latency);
        at(done, Timed::Arrive, nullptr, key_of(v.a, v.b), v.c);
      });
      break;
    case Op::CopyWait:
      if (e && e->a == 0 && w.last_copy > now) {
        block(w, (u64)Op::CopyWait);
        at(w.last_copy, Timed::Unblock, &w);
      }
      break;
    case Op::WorkId:
      each([&](const Event& v) {
        at(now + jittered(p.work_id_latency), Timed::Arrive, nullptr, key_of(v.a, v.b), 0, v.c);
      });
      later(s.write, s.latency);
      break;
    default: later(s.write, std::max<i64>(1, jittered(s.latency)));
  }
  if (read_later) later(s.read, jittered(p.operand_latency));
}

}  // namespace timing
