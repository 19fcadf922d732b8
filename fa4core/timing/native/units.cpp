// Units that work on their own: shared memory, tensor cores, bulk copies, and barriers.
#include <algorithm>
#include <cmath>

#include "machine.h"

namespace timing {

constexpr double PASS = 128;  // bytes that shared memory moves in a pass

i64 Machine::jittered(double latency) {
  double factor = 1 + p.jitter * (2 * random.unit() - 1);
  return std::max<i64>(1, (i64)std::lround(latency * factor));
}

void Machine::at(i64 time, Timed::Kind kind, Warp* w, u64 key, i64 value, i64 bytes) {
  timed.push({std::max(time, now + 1), order++, kind, w, key, value, bytes});
}

void Machine::handle(const Timed& t) {
  Warp* w = t.warp;
  switch (t.kind) {
    case Timed::Release: w->scoreboard[t.value]--; break;
    case Timed::Arrive: arrive(t.key, t.value, 0, t.bytes); break;
    case Timed::Unblock: w->blocked = false; break;
    case Timed::StoreDone:
      if (--w->tmem_stores == 0 && w->waiting_for == (i32)Op::TmemFence) w->blocked = false;
      break;
    case Timed::SharedDone:
      if (--w->shared_writes == 0 && w->waiting_for == (i32)Op::SharedFence) w->blocked = false;
      break;
    case Timed::ProductsDone:
      w->product_groups--;
      if (w->blocked_on == (u64)Op::ProductWait && w->product_groups <= w->allowed_groups)
        w->blocked = false;
      break;
    case Timed::BulkRead: {
      auto open = std::find_if(w->groups.begin(), w->groups.end(), [](i32 n) { return n > 0; });
      if (open != w->groups.end()) --*open;
      else w->open_stores--;
      while (!w->groups.empty() && !w->groups.front()) w->groups.pop_front();
      if (w->waiting_for == (i32)Op::BulkWait && (i32)w->groups.size() <= w->allowed_groups)
        w->blocked = false;
      break;
    }
  }
}

void Machine::arrive(u64 key, i64 count, i64 expected, i64 completed) {
  Mbarrier& b = mbarriers[key];
  b.pending -= (i32)count;
  b.bytes += expected - completed;
  check(key, b);
}

void Machine::check(u64, Mbarrier& b) {
  if (b.pending > 0 || b.bytes != 0) return;
  b.phase++;
  b.pending += b.count;
  auto ready = [&](Mbarrier::Waiter& x) { return (i32)(b.phase & 1) != x.parity; };
  for (auto& x : b.waiters)
    if (ready(x))  // it sleeps: it is woken, asks again, and comes back from the retry
      release_after(*x.warp, x.scoreboard,
                    jittered(p.wake_latency + p.wait_latency) + (i64)p.retry_stalls);
  std::erase_if(b.waiters, ready);
}

// A pass a cycle; the tensor core's operands, the warps' accesses and the bulk copies take turns.
void Machine::shared_memory(Sm& sm) {
  for (auto& t : sm.transfers) {  // what has come over the link since the last cycle
    if (t.ready > now) break;
    double n = std::min(p.tma_bytes, t.bytes);
    t.bytes -= n, sm.link += n;
    sm.tma_busy++;
    bool last = t.bytes <= 0;
    if (sm.link >= PASS || last) {
      sm.bulk_accesses.push_back(
          {Access::Bulk, 1, nullptr, NONE, NONE, 0, t.barrier, last ? (i64)t.total : 0});
      sm.link = last ? 0 : sm.link - PASS;
    }
    if (last) sm.transfers.pop_front();
    break;
  }
  Tensor* core = nullptr;
  TensorOp* op = nullptr;
  int side = 0;
  for (auto& t : tensors)
    for (int n = 0; n < (int)t.sms.size(); n++)
      if (t.sms[(size_t)n] == &sm)
        for (auto& o : t.ops)
          if (!o.commit) {
            if (o.fetched[n] < o.bytes) core = &t, op = &o, side = n;
            break;
          }
  for (int n = 0; n < 3; n++) {
    int client = (sm.turn + n) % 3;
    auto& list = client == 1 ? sm.accesses : sm.bulk_accesses;
    if (client == 0 ? !core : list.empty()) continue;
    if (client == 1 && sm.returned > now) continue;
    sm.turn = (client + 1) % 3;
    sm.smem_busy++;
    if (client == 0) {
      op->fetched[side] += p.smem_bytes;
      return;
    }
    Access& a = list.front();
    if ((a.passes -= 1) > 0) return;
    if (a.returning) sm.returned = now + 1 + a.returning;
    if (a.kind == Access::Bulk && a.bytes)
      at(now + jittered(p.arrive_latency), Timed::Arrive, nullptr, a.barrier, 0, a.bytes);
    if (a.kind == Access::BulkRead) at(now + 1, Timed::BulkRead, a.warp);
    if (a.kind == Access::Store) at(now + 1, Timed::SharedDone, a.warp);
    if (a.scoreboard != NONE) release_after(*a.warp, a.scoreboard, jittered((double)a.latency));
    if (a.read != NONE) release_after(*a.warp, a.read, 1);
    list.pop_front();
    return;
  }
}

// Work of a tensor core happens in order. The operands of the next one are fetched meanwhile.
void Machine::tensor(Tensor& t) {
  while (!t.ops.empty()) {
    TensorOp& o = t.ops.front();
    if (o.commit) {
      i64 done = std::max(now, (i64)std::ceil(t.free)) + jittered(p.mma_latency);
      for (i32 c = 0; c < (i32)sms.size(); c++) {
        if (!(o.mask >> c & 1)) continue;
        i64 way = c == t.first_cta ? 0 : jittered(p.remote_latency);
        at(done + way, Timed::Arrive, nullptr, key_of(c, (i32)o.offset), 1);
      }
      t.ops.pop_front();
      continue;
    }
    for (size_t n = 0; n < t.sms.size(); n++)
      if (o.fetched[n] < o.bytes) return;
    if (t.free > (double)now) return;
    t.free = (double)now + o.cycles;
    t.busy += (i64)o.cycles;
    if (o.in_registers)
      for (Sm* sm : t.sms) sm->accumulates = t.free;
    if (keep_spans)
      for (size_t n = 0; n < t.sms.size(); n++)
        spans.push_back({t.first_cta + (i32)n, -1, 0, now, now + (i64)o.cycles});
    if (!o.group.empty()) {
      i64 done = now + (i64)std::ceil(o.cycles) + jittered(p.mma_latency);
      for (Warp* w : o.group) at(done, Timed::ProductsDone, w);
    }
    t.ops.pop_front();
    return;
  }
}

void Machine::run(i64 limit) {
  for (auto& w : warps) {
    w.next_issue = (i64)(random.unit() * p.warp_skew);
    if (w.code.empty()) w.finished = 0;
    else running++;
  }
  i64 progress = 0;
  u64 issued = 0, before = ~0ull;
  for (; running; now++) {
    while (!timed.empty() && timed.top().time <= now) {
      Timed t = timed.top();
      timed.pop();
      handle(t);
      progress = now;
    }
    for (auto& t : tensors) tensor(t);
    for (auto& sm : sms) {
      shared_memory(sm);
      for (int k = 0; k < SCHEDULERS; k++) schedule(sm, k);
    }
    issued = 0;
    for (auto& sm : sms) issued += (u64)sm.issued;
    if (issued != before) before = issued, progress = now;
    if (now - progress > 50'000 || now > limit) throw std::runtime_error(stuck());
  }
}

std::string Machine::stuck() {
  std::string text = "the replay does not go on after " + std::to_string(now) + " cycles:";
  for (auto& w : warps) {
    if (w.finished >= 0) continue;
    text += "\n  CTA " + std::to_string(w.cta) + " warp " + std::to_string(w.index) +
            " at step " + std::to_string(w.at) + " of " + std::to_string(w.code.size()) +
            (w.blocked ? ", blocked" : "");
    for (auto& [key, b] : mbarriers)
      for (auto& x : b.waiters)
        if (x.warp == &w)
          text += ", waits for the mbarrier at " + std::to_string(key & 0xffffffff) + " of CTA " +
                  std::to_string(key >> 32) + " (phase " + std::to_string(b.phase) + ", " +
                  std::to_string(b.pending) + " arrivals and " + std::to_string(b.bytes) +
                  " bytes missing)";
  }
  return text;
}

}  // namespace timing
