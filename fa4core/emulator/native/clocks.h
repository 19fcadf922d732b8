// Happens-before for the race detector: vector clocks whose components are not only warps but also
// each kind of asynchronous work of a warp and each mbarrier.
//
// A component says "how much of this actor's work is known to be done". Asynchronous work never orders
// itself: its component only rises in a warp's clock when the warp waits (wait_group, tcgen05.wait, first
// use of a loaded register) or learns it through a barrier (tcgen05.commit, complete_tx).
// PTX ISA: "Memory consistency model", "Asynchronous operations", "Async proxy", "tcgen05 memory
// consistency model".
#pragma once
#include <map>
#include <memory>

#include "common.h"

namespace emu {

enum Actor : u32 {   // components of one warp
  GENERIC = 0,       // its own ordinary accesses
  PUBLISHED,         // of those, what fence.proxy.async has made visible to the async proxy
  BULK_READ,         // sources of its bulk stores, by group
  BULK_WRITE,        // destinations of its bulk stores, by group
  COPY,              // cp.async, by group
  COPY_PUBLISHED,    // of those, what the async proxy may see
  TMEM_STORE,        // tcgen05.st
  TMEM_LOAD,         // tcgen05.ld
  TENSOR,            // tcgen05.mma, .cp, .shift: in issue order
  WGMMA,             // wgmma.mma_async
  LEARNT,            // what it has learnt of other clusters: entries of Warp::learnt
  ACTORS
};
constexpr u32 BARRIERS_PER_CTA = 160;  // components for mbarriers; later ones share the last

using Clock = std::vector<u32>;
using Snapshot = std::shared_ptr<const Clock>;

// What a warp knows of other clusters, learnt through global memory: cluster number -> its clock.
using Foreign = std::map<u32, Snapshot>;

inline void join(Clock& to, const Clock& from) {
  u32* a = to.data();
  const u32* b = from.data();
  for (size_t i = 0, n = to.size(); i < n; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
}

inline void join(Foreign& to, const Foreign& from) {
  for (auto& [c, s] : from) {
    Snapshot& t = to[c];
    if (!t) { t = s; continue; }
    if (t == s) continue;
    auto merged = std::make_shared<Clock>(*t);
    join(*merged, *s);
    t = merged;
  }
}

}  // namespace emu
