// mbarrier objects and cluster barriers: their state, and what they order.
// PTX ISA: "Parallel Synchronization and Communication Instructions: mbarrier", "barrier.cluster".
#include "machine.h"

namespace emu {

Mbarrier* Machine::barrier(Warp* w, Cta& t, u32 offset, int pc, bool must) {
  Mbarrier* b = nullptr;
  if (offset / 8 < t.barrier_at.size() && offset % 8 == 0 && t.barrier_at[offset / 8])
    b = &t.mbarriers[t.barrier_at[offset / 8] - 1u];
  if (b && b->valid) {
    if (race && must && w && w->clock[b->init_comp] < b->init_clock && b->init_comp != w->comp(GENERIC))
      report("race", format("mbarrier at shared offset %u of CTA rank %u is used before its initialisation by %s (PTX line %d) "
                            "is known to be visible", offset, t.rank, t.cluster->warps[b->init_comp / ACTORS]->name().c_str(), b->init_line), w, pc);
    return b;
  }
  if (!must) return b;
  fatal("barrier", format("no mbarrier was initialised at shared offset %u of CTA rank %u", offset, t.rank));
}

void Machine::check_phase(Mbarrier& b, Cta& t) {
  if (b.pending || b.tx) return;
  b.phase++;
  b.pending = b.count;
  if (race) b.released = b.gathered;
  b.arrivals.clear();
  wake(*t.cluster, &b);
}

void Machine::arrive(Mbarrier& b, Cta& t, u32 count, const char* who) {
  progress++;
  if (count > b.pending) {
    std::string text = format("mbarrier at shared offset %u of CTA rank %u: %u more arrival(s) (%s) than the %u it was "
                              "initialised with, in phase %u", b.address, t.rank, count - b.pending, who, b.count, b.phase);
    if (barrier_rules) fatal("barrier", text);
    count = b.pending;
  }
  b.pending -= count;
  check_phase(b, t);
}

void Machine::complete_tx(Mbarrier& b, Cta& t, i64 bytes) {
  progress++;
  b.tx -= bytes;
  if (barrier_rules && (b.tx < -(1 << 20) + 1 || b.tx > (1 << 20) - 1))
    fatal("barrier", format("mbarrier at shared offset %u of CTA rank %u: transaction count %lld leaves the range of +-(2^20 - 1)",
                            b.address, t.rank, (long long)b.tx));
  check_phase(b, t);
}

// All threads of the cluster that have not exited must arrive.
void Machine::cluster_barrier_check(Cluster& c) {
  if (!c.cluster_arrived || (int)c.cluster_arrived < c.alive) return;
  c.cluster_arrived = 0;
  c.cluster_generation++;
  if (race) c.cluster_released = c.cluster_gathered;
  wake(c, nullptr);
}

}  // namespace emu
