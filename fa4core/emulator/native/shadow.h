// Shadow memory: who last wrote and read each granule of shared memory, TMEM and global memory, and
// which bytes anything wrote at all. A granule is 16 bytes (TMEM: 16 lanes of one column).
//
// An access is packed in 64 bits: component (24) | atomic (1) | clock (23) | byte mask (16). Most
// granules have one writer and one reader; more go to a side list. Byte masks make unrelated accesses
// to neighbouring bytes harmless. Idea: FastTrack (Flanagan, Freund, PLDI 2009), epochs instead of
// whole clocks for the common case.
#pragma once
#include <memory>
#include <unordered_map>

#include "clocks.h"

namespace emu {

struct Warp;
struct Cluster;

using Access = u64;
constexpr u64 LISTED = ~0ull << 40;  // component field all ones: index of a list instead
inline u32 component(Access a) { return (u32)(a >> 40); }
inline u32 clock_of(Access a) { return (u32)(a >> 16) & 0x7fffff; }
inline bool atomic_of(Access a) { return a >> 39 & 1; }
inline u16 mask_of(Access a) { return (u16)a; }
inline Access pack(u32 comp, bool atomic, u32 clock, u16 mask) {
  return (u64)comp << 40 | (u64)atomic << 39 | (u64)(clock & 0x7fffff) << 16 | mask;
}

// An accessor: on whose behalf, what it knows, and how it touches memory.
struct Who {
  u32 comp = 0;                // component of the actor, global number
  u32 clock = 0;
  const u32* knows = nullptr;  // its clock, cluster-local components
  const Cluster* cluster = nullptr;
  u32 base = 0;                // component number of the cluster's first component
  u32 size = 0;                // number of components of a cluster
  bool async = false;          // through the async proxy
  bool atomic = false;         // a strong or atomic access: two of these never race
  bool silent = false;         // writes what is there already: harmless beside another write
  u32 own = ~0u;               // another component that is always ordered before (its own pipe)
  u32 ignore = ~0u;            // accesses of this component are the caller's own
};

struct Granule {
  Access write = 0, read = 0;  // 0: none
};

enum class Space : u8 { Shared, Tensor, Global };

class Lists {
 public:
  std::vector<std::vector<Access>> lists;
  std::vector<u32> free_lists;
  u32 make();
  void drop(u32 i) { lists[i].clear(); free_lists.push_back(i); }
};

struct Conflict {
  bool found = false;
  bool proxy = false;       // ordered, but a proxy fence is missing
  Access other = 0;
  bool other_is_write = false;
  size_t granule = 0;
};

class Shadow {
 public:
  std::vector<Granule> g;
  std::vector<u16> written;  // per granule: bytes that something wrote
  Lists lists;
  u32 workers_per_cluster = 0;  // components that belong to warps

  void resize(size_t granules) { g.assign(granules, {}); written.assign(granules, 0); }
  // Records the access and says whether it races. `mask`: bytes of each granule.
  void read(size_t first, size_t n, u16 mask, const Who& who, Conflict& c) { touch<false>(first, n, mask, who, c); }
  void write(size_t first, size_t n, u16 mask, const Who& who, Conflict& c) { touch<true>(first, n, mask, who, c); }
  // Byte ranges [at, at + n).
  void range(bool is_write, u64 at, u64 n, const Who& who, Conflict& c);
  void mark(u64 at, u64 n);
  i64 first_unwritten(u64 at, u64 n) const;  // byte, or -1
  void forget() { std::fill(g.begin(), g.end(), Granule{}); lists = {}; }

 private:
  template <bool W> void touch(size_t first, size_t n, u16 mask, const Who& who, Conflict& c);
  bool ordered(Access a, const Who& who, bool& proxy) const;
  bool conflicts(Access field, u16 mask, const Who& who, bool field_is_write, Conflict& c);
  void add(Access& field, u16 mask, const Who& who);
  void set_write(Granule& g, u16 mask, const Who& who);
};

// Global memory: pages of shadow made on demand, looked up by address.
class GlobalShadow {
 public:
  static constexpr u64 PAGE = 4096;
  std::unordered_map<u64, std::unique_ptr<Shadow>> pages;
  Shadow& page(u64 address);
  void access(bool is_write, u64 at, u64 n, const Who& who, Conflict& c);
  void forget() { pages.clear(); last = ~0ull; }

 private:
  u64 last = ~0ull;
  Shadow* last_page = nullptr;
};

}  // namespace emu
