// See shadow.h.
#include "shadow.h"

#include <algorithm>

#include "machine.h"

namespace emu {

u32 Lists::make() {
  if (!free_lists.empty()) {
    u32 i = free_lists.back();
    free_lists.pop_back();
    return i;
  }
  lists.emplace_back();
  return (u32)lists.size() - 1;
}

// Did the access `a` happen before what `who` does now? proxy: yes, but not visible to its proxy.
bool Shadow::ordered(Access a, const Who& who, bool& proxy) const {
  u32 comp = component(a), clock = clock_of(a);
  if (comp == who.own || comp == who.ignore) return true;
  u32 local = comp - who.base;
  if (local < who.size) {
    if (who.knows[local] < clock) return false;
    if (who.async && local < workers_per_cluster) {
      u32 actor = local % ACTORS;
      if ((actor == GENERIC || actor == COPY) && who.knows[local + 1] < clock) proxy = true;
    }
    return true;
  }
  for (auto& w : who.cluster->warps) {  // did anyone we know of learn of that cluster's work?
    u32 known = who.knows[w->comp(LEARNT)];
    for (u32 i = 0; i < known; i++)
      if (w->learnt[i].first == comp / who.size && (*w->learnt[i].second)[comp % who.size] >= clock) return true;
  }
  return false;
}

bool Shadow::conflicts(Access field, u16 mask, const Who& who, bool field_is_write, Conflict& c) {
  auto one = [&](Access a) {
    if (!(mask_of(a) & mask) || (who.atomic && atomic_of(a))) return false;
    bool proxy = false;
    if (ordered(a, who, proxy) && !(proxy && field_is_write)) return false;
    if (!c.found) c = {true, proxy, a, field_is_write, 0};
    return true;
  };
  if ((field & LISTED) != LISTED) return field && one(field);
  for (Access a : lists.lists[(u32)field])
    if (one(a)) return true;
  return false;
}

// Adds an access to a field; an older access of the same actor to bytes within it is replaced.
void Shadow::add(Access& field, u16 mask, const Who& who) {
  Access mine = pack(who.comp, who.atomic, who.clock, mask);
  if (!field) { field = mine; return; }
  auto absorb = [&](Access& a) {
    if (component(a) != who.comp || atomic_of(a) != who.atomic) return false;
    if (clock_of(a) == (who.clock & 0x7fffff)) { a |= mask; return true; }
    if (!(mask_of(a) & ~mask)) { a = mine; return true; }
    return false;
  };
  if ((field & LISTED) != LISTED) {
    if (absorb(field)) return;
    bool proxy = false;
    if (!(mask_of(field) & ~mask) && ordered(field, who, proxy) && !proxy && !atomic_of(field)) { field = mine; return; }
    u32 i = lists.make();
    lists.lists[i] = {field, mine};
    field = LISTED | i;
    return;
  }
  auto& l = lists.lists[(u32)field];
  for (Access& a : l)
    if (absorb(a)) return;
  if (l.size() < 64) l.push_back(mine);
}

void Shadow::set_write(Granule& s, u16 mask, const Who& who) {
  auto clear = [&](Access& field) {
    if ((field & LISTED) == LISTED) {
      auto& l = lists.lists[(u32)field];
      for (Access& a : l) a &= ~(u64)mask;
      std::erase_if(l, [](Access a) { return !mask_of(a); });
      if (l.size() > 1) return;
      u32 i = (u32)field;
      field = l.empty() ? 0 : l[0];
      lists.drop(i);
    } else {
      field &= ~(u64)mask;
      if (!mask_of(field)) field = 0;
    }
  };
  clear(s.write);
  clear(s.read);
  add(s.write, mask, who);
}

template <bool W>
void Shadow::touch(size_t first, size_t n, u16 mask, const Who& who, Conflict& c) {
  const Access mine = pack(who.comp, who.atomic, who.clock, mask);
  Access ok_write = 1, ok_read = 1;  // the last pair of simple fields that was found in order
  for (size_t i = first; i < first + n; i++) {
    Granule& s = g[i];
    bool simple = (s.write & LISTED) != LISTED && (s.read & LISTED) != LISTED;
    if (W) {
      if (simple && s.write == mine && s.read == 0) continue;
      if (!(simple && s.write == ok_write && s.read == ok_read)) {
        if (simple) ok_write = s.write, ok_read = s.read;
        bool was = c.found;
        if (!who.silent) conflicts(s.write, mask, who, true, c);
        conflicts(s.read, mask, who, false, c);
        if (c.found && !was) c.granule = i;
      }
      if (simple && mask == 0xffff) s.write = mine, s.read = 0;
      else set_write(s, mask, who);
    } else {
      if (simple && s.read == mine && s.write == ok_write) continue;
      if (!(simple && s.write == ok_write)) {
        if (simple) ok_write = s.write;
        bool was = c.found;
        conflicts(s.write, mask, who, true, c);
        if (c.found && !was) c.granule = i;
      }
      add(s.read, mask, who);
    }
  }
}

template void Shadow::touch<true>(size_t, size_t, u16, const Who&, Conflict&);
template void Shadow::touch<false>(size_t, size_t, u16, const Who&, Conflict&);

void Shadow::range(bool is_write, u64 at, u64 n, const Who& who, Conflict& c) {
  auto go = [&](u64 granule, u64 count, u16 mask) {
    if (is_write) write(granule, count, mask, who, c); else read(granule, count, mask, who, c);
  };
  u64 end = at + n;
  u64 first = at / 16, last = (end - 1) / 16;
  u16 head = (u16)(0xffff << (at % 16)), tail = (u16)(0xffff >> (15 - (end - 1) % 16));
  if (first == last) { go(first, 1, head & tail); return; }
  if (head != 0xffff) go(first++, 1, head);
  if (tail != 0xffff) go(last--, 1, tail);
  if (last + 1 > first) go(first, last + 1 - first, 0xffff);
}

void Shadow::mark(u64 at, u64 n) {
  for (u64 b = at; b < at + n;) {
    if (b % 16 == 0 && b + 16 <= at + n) { written[b / 16] = 0xffff; b += 16; }
    else { written[b / 16] |= (u16)(1 << (b % 16)); b++; }
  }
}

i64 Shadow::first_unwritten(u64 at, u64 n) const {
  for (u64 b = at; b < at + n;) {
    if (written[b / 16] == 0xffff) { b = (b / 16 + 1) * 16; continue; }
    if (!(written[b / 16] >> (b % 16) & 1)) return (i64)b;
    b++;
  }
  return -1;
}

Shadow& GlobalShadow::page(u64 address) {
  u64 n = address / PAGE;
  if (n == last) return *last_page;
  auto& p = pages[n];
  if (!p) {
    p = std::make_unique<Shadow>();
    p->g.assign(PAGE / 16, {});
  }
  last = n;
  last_page = p.get();
  return *p;
}

void GlobalShadow::access(bool is_write, u64 at, u64 n, const Who& who, Conflict& c) {
  while (n) {
    u64 here = std::min(n, PAGE - at % PAGE);
    page(at).range(is_write, at % PAGE, here, who, c);
    at += here;
    n -= here;
  }
}

}  // namespace emu
