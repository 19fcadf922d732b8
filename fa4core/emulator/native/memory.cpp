// Address spaces: resolution, bounds, alignment, initialisation and race checks, and what strong
// accesses order. PTX ISA: "State Spaces", "Memory Consistency Model".
#include <algorithm>

#include "machine.h"

namespace emu {

Cta& Machine::cta_of(Warp& w, u32 address) {
  u32 rank = address >> RANK_SHIFT;
  if (rank >= w.cluster->ctas.size())
    fatal("bounds", format("shared address 0x%x names CTA %u of a cluster of %zu", address, rank, w.cluster->ctas.size()));
  return *w.cluster->ctas[rank];
}

u8* Machine::shared(Warp& w, u32 address, u32 bytes, const char* what) {
  Cta& t = cta_of(w, address);
  u32 at = address & OFFSET_MASK;
  if ((u64)at + bytes > t.shared.size() || at < 1024)
    fatal("bounds", format("%s of %u bytes at shared offset %u: the CTA has [1024, %zu)", what, bytes, at, t.shared.size()));
  return t.shared.data() + at;
}

u8* Machine::global(u64 address, u64 bytes, bool write, const char* what) {
  Allocation* a = last_allocation;
  if (!a || address < a->address || address + bytes > a->address + a->bytes) {
    auto f = memory.upper_bound(address);
    a = f == memory.end() ? nullptr : &f->second;
    if (!a || address < a->address || address + bytes > a->address + a->bytes) {
      std::string near = "no allocation is near";
      if (a && address >= a->address)
        near = format("it runs over the end of '%s' [0x%llx, +%llu)", a->name.c_str(), (unsigned long long)a->address, (unsigned long long)a->bytes);
      else if (f != memory.begin()) {
        auto& b = std::prev(f)->second;
        near = format("%llu bytes behind the end of '%s'", (unsigned long long)(address - b.address - b.bytes), b.name.c_str());
      }
      fatal("bounds", format("%s of %llu bytes at global address 0x%llx: %s", what, (unsigned long long)bytes,
                             (unsigned long long)address, near.c_str()));
    }
    last_allocation = a;
  }
  (void)write;
  return (u8*)address;
}

u8* Machine::generic(Warp& w, u64 address, u32 bytes, bool write, u32 lane) {
  u64 window = address & WINDOW_MASK;
  if (window == 0) return global(address, bytes, write, write ? "write" : "read");
  if (window == SHARED_WINDOW) return shared(w, (u32)address, bytes, write ? "write" : "read");
  u64 at = address & ~WINDOW_MASK;
  if (window == LOCAL_WINDOW) {
    if (at + bytes > w.program->local_bytes) fatal("bounds", format("local access at %llu", (unsigned long long)at));
    return w.local.data() + lane * w.program->local_bytes + at;
  }
  if (window == PARAM_WINDOW && !write && at + bytes <= info.params.size()) return info.params.data() + at;
  fatal("bounds", format("access of %u bytes at generic address 0x%llx", bytes, (unsigned long long)address));
}

Who Machine::who(Warp& w, Actor a) const {
  Who x;
  Cluster& k = *w.cluster;
  x.base = k.base;
  x.size = k.components;
  x.comp = k.base + w.comp(a);
  x.clock = w.clock[w.comp(a)];
  x.knows = w.clock.data();
  x.cluster = w.cluster;
  return x;
}

FlightShot shoot(Warp& w) {
  FlightShot s;
  if (!w.machine->race) return s;
  s.knows = w.snapshot();
  return s;
}

Who async_who(const Warp& w, const FlightShot& s, u32 local_comp, u32 clock) {
  Who x;
  x.base = w.cluster->base;
  x.size = w.cluster->components;
  x.comp = x.base + local_comp;
  x.clock = clock;
  x.knows = s.knows ? s.knows->data() : nullptr;
  x.cluster = w.cluster;
  x.async = true;
  return x;
}

std::string Machine::describe(const Cluster& k, Access a) {
  u32 comp = component(a), local = comp - k.base;
  if (local >= k.components) return format("another cluster (the %u. to start)", comp / k.components + 1);
  u32 workers = (u32)k.warps.size() * ACTORS;
  if (local >= workers) {
    u32 b = local - workers;
    return format("a bulk copy that completes on mbarrier %u of CTA rank %u", b % BARRIERS_PER_CTA, b / BARRIERS_PER_CTA);
  }
  static const char* what[] = {"", "", "bulk store issued by ", "bulk store issued by ", "cp.async of ", "cp.async of ",
                               "tcgen05.st of ", "tcgen05.ld of ", "tcgen05.mma/cp issued by ", "wgmma of "};
  return what[local % ACTORS] + k.warps[local / ACTORS]->name();
}

void Machine::conflict(const char* space, u64 at, bool write, const Conflict& c, Warp* w, int pc, const Cluster& k) {
  std::string other = describe(k, c.other);
  std::string text = c.proxy
      ? format("%s at %s %llu is not visible to the async proxy: the write by %s needs a fence.proxy.async behind it",
               write ? "asynchronous write" : "asynchronous read", space, (unsigned long long)at, other.c_str())
      : format("%s at %s %llu is not ordered with an earlier %s by %s", write ? "write" : "read", space,
               (unsigned long long)at, c.other_is_write ? "write" : "read", other.c_str());
  report("race", text, w, pc);
}

void Machine::shared_race(Cta& t, bool write, u64 at, u64 n, const Who& x, Warp* w, int pc) {
  Conflict c;
  t.shared_shadow.range(write, at, n, x, c);
  if (c.found) conflict("shared offset", c.granule * 16, write, c, w, pc, *t.cluster);
}

void Machine::global_race(bool write, u64 at, u64 n, const Who& x, Warp* w, int pc) {
  Conflict c;
  global_shadow.access(write, at, n, x, c);
  if (!c.found) return;
  auto f = memory.upper_bound(at);
  std::string space = "global memory";
  u64 offset = at;
  if (f != memory.end() && at >= f->second.address) {
    space = "'" + f->second.name + "' byte";
    offset = at - f->second.address;
  }
  conflict(space.c_str(), offset, write, c, w, pc, *w->cluster);
}

void Machine::tensor_race(Cta& t, bool write, u32 lane, u32 lanes, u32 column, u32 columns, const Who& x, Warp* w, int pc) {
  Conflict c;
  for (u32 n = column; n < column + columns; n++) {
    u32 first = n * 8 + lane / 16;
    if (write) t.tmem_shadow.write(first, (lanes + 15) / 16, 0xffff, x, c);
    else t.tmem_shadow.read(first, (lanes + 15) / 16, 0xffff, x, c);
  }
  if (c.found) {
    std::string where = format("TMEM (lanes from %zu) column", c.granule % 8 * 16);
    conflict(where.c_str(), c.granule / 8, write, c, w, pc, *t.cluster);
  }
}

void Machine::global_initialise(u64 at, u64 n) {
  auto f = memory.upper_bound(at);
  if (f == memory.end() || f->second.initialised || at < f->second.address) return;
  Allocation& a = f->second;
  for (u64 b = at - a.address; n; ) {
    if (b % 64 == 0 && n >= 64) { a.written[b / 64] = ~0ull; b += 64; n -= 64; }
    else { a.written[b / 64] |= 1ull << (b % 64); b++; n--; }
  }
}

void Machine::global_read_check(u64 at, u64 n, Warp* w, int pc) {
  auto f = memory.upper_bound(at);
  if (f == memory.end() || f->second.initialised || at < f->second.address) return;
  Allocation& a = f->second;
  for (u64 b = at - a.address, e = b + n; b < e; b++) {
    if (b % 64 == 0 && a.written[b / 64] == ~0ull) { b += 63; continue; }
    if (a.written[b / 64] >> (b % 64) & 1) continue;
    report("uninitialised", format("read of '%s' at byte %llu, which nothing wrote", a.name.c_str(), (unsigned long long)b), w, pc);
    return;
  }
}

void Machine::shared_read_check(Cta& t, u64 at, u64 n, Warp* w, int pc) {
  i64 b = t.shared_shadow.first_unwritten(at, n);
  if (b >= 0)
    report("uninitialised", format("read of shared offset %lld of CTA rank %u, which nothing wrote", (long long)b, t.rank), w, pc);
}

void Machine::shared_access(Warp& w, u32 address, u32 bytes, bool write, bool atomic) {
  if (!race && !uninitialised) return;
  Cta& t = cta_of(w, address);
  u32 at = address & OFFSET_MASK;
  if (uninitialised) {
    if (write) t.shared_shadow.mark(at, bytes);
    else shared_read_check(t, at, bytes, &w, (int)w.at);
  }
  if (race) {
    Who x = who(w, GENERIC);
    x.atomic = atomic;
    shared_race(t, write, at, bytes, x, &w, (int)w.at);
  }
}

void Machine::global_access(Warp& w, u64 address, u32 bytes, bool write, bool atomic, bool silent) {
  if (uninitialised) {
    if (write) global_initialise(address, bytes);
    else global_read_check(address, bytes, &w, (int)w.at);
  }
  if (race) {
    Who x = who(w, GENERIC);
    x.atomic = atomic;
    x.silent = silent;
    global_race(write, address, bytes, x, &w, (int)w.at);
  }
}

}  // namespace emu
