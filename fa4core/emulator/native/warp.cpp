// A warp: the interpreter's loop, divergence, and what the warp knows of others' work.
//
// Diverged lanes form groups; the group with the lowest PC runs, and groups that meet join, which
// reconverges structured code at its join points. A group that blocks lets the others run, as
// independent thread scheduling does. PTX ISA: "SIMT architecture", "Control Flow Instructions".
#include <algorithm>

#include "machine.h"
#include "strong.h"

namespace emu {

std::string Warp::name() const {
  return format("CTA (%u,%u,%u) warp %d", cta->id[0], cta->id[1], cta->id[2], index);
}

void Warp::run(u32 slice) {
  const Ins* code = program->code.data();
  Tracer* trace = machine->trace.get();
  u64* counts = machine->stats.executed[(size_t)index].data();
  while (slice--) {
    if (!groups.empty() && !regroup()) return;
    const Ins& i = code[pc];
    at = pc;
    Mask m = active;
    if (i.guard >= 0) m &= i.guard_negate ? ~preds[(u32)i.guard] : preds[(u32)i.guard];
    counts[pc]++;
    machine->time++;
    if (trace) trace->step(*this, pc);
    if (!loads.empty()) finish_loads_of(program->uses[pc]);
    if (!owed.empty()) settle(program->tests[pc]);
    for (u32 p : program->writes[pc]) unfenced[p] = 1;
    pc++;
    if (m) i.fn(*this, i, m);
    if (!yield) continue;
    yield = false;
    if (wait == Wait::Done) return;
    counts[at]--;
    if (trace) trace->undo(*this);
    if (groups.empty()) return;
    groups.push_back({pc, active, wait});  // let another group run
    wait = Wait::None;
    active = 0;
  }
}

// Chooses the group to run; false: all of them wait.
bool Warp::regroup() {
  if (active) {
    for (size_t g = 0; g < groups.size();)
      if (groups[g].pc == pc) {
        active |= groups[g].mask;
        groups.erase(groups.begin() + (long)g);
      } else g++;
  }
  size_t best = groups.size();
  for (size_t g = 0; g < groups.size(); g++)
    if (groups[g].wait == Wait::None && (best == groups.size() || groups[g].pc < groups[best].pc))
      best = g;
  if (best < groups.size() && (!active || groups[best].pc < pc)) {
    LaneGroup next = groups[best];
    groups.erase(groups.begin() + (long)best);
    if (active) groups.push_back({pc, active, Wait::None});
    pc = next.pc;
    active = next.mask;
    for (size_t g = 0; g < groups.size();)
      if (groups[g].pc == pc) {
        active |= groups[g].mask;
        groups.erase(groups.begin() + (long)g);
      } else g++;
    return true;
  }
  if (active) return true;
  wait = groups[0].wait;
  for (auto& g : groups)
    if (g.wait != Wait::Lanes) wait = g.wait;
  return false;
}

void Warp::split(u32 target, Mask taken) {
  Mask rest = active & ~taken;
  if (!rest) {
    pc = target;
    return;
  }
  if (target == pc) return;
  if (target < pc) {
    groups.push_back({pc, rest, Wait::None});
    pc = target;
    active = taken;
  } else {
    groups.push_back({target, taken, Wait::None});
    active = rest;
  }
}

void Warp::exit_lanes(Mask m) {
  live &= ~m;
  active &= ~m;
  for (auto& g : groups)
    if (g.wait == Wait::Lanes) g.wait = Wait::None;  // fewer lanes to wait for
  if (active) return;
  if (!live) {
    wait = Wait::Done;
    yield = true;
    return;
  }
}

void Warp::finish_load(size_t i) {
  PendingLoad load = std::move(loads[i]);
  loads.erase(loads.begin() + (long)i);
  for (u32 p : load.planes) pending_plane[p] = 0;
  if (load.perform) load.perform();
  if (machine->race) {  // loads are done in order, so all up to this one count as done only if they
                        // are
    u32 done = loads.empty() ? load_number : loads.front().number - 1;
    u32& c = clock[comp(TMEM_LOAD)];
    if (done > c) c = done, clock_changed = true;
  }
}

void Warp::finish_loads() {
  if (program->uses_wgmma) return;  // those are waited for in groups
  while (!loads.empty()) finish_load(0);
}

void Warp::finish_loads_of(const std::vector<u32>& planes) {
  for (u32 p : planes) {
    if (p >= pending_plane.size() || !pending_plane[p]) continue;
    for (size_t i = 0; i < loads.size(); i++)
      if (std::find(loads[i].planes.begin(), loads[i].planes.end(), p) != loads[i].planes.end()) {
        finish_load(i);
        break;
      }
    if (loads.empty()) return;
  }
}

void Warp::acquire(const Clock& from) {
  if (!machine->race || from.empty()) return;
  join(clock, from);
  clock_changed = true;
}

void Warp::settle(const std::vector<u32>& preds) {
  for (u32 p : preds)
    for (size_t i = 0; i < owed.size(); i++)
      if (owed[i].pred == p) {
        acquire(*owed[i].from);
        owed.erase(owed.begin() + (long)i--);
      }
}

void Warp::release(Clock& to) {
  if (!machine->race) return;
  if (to.empty()) to = clock;
  else join(to, clock);
  clock[comp(GENERIC)]++;
  clock_changed = true;
}

Snapshot Warp::snapshot() {
  if (clock_changed || !shot) {
    shot = std::make_shared<const Clock>(clock);
    clock_changed = false;
  }
  return shot;
}

// ---- ordering through memory ----

static u64 sync_key(Warp& w, u64 address) {
  return (address & WINDOW_MASK) == SHARED_WINDOW ? address ^ (u64)(w.cluster->number + 1) << 32
                                                  : address;
}

static void take(Warp& w, const Foreign& from) {
  for (auto& [cluster, clock] : from) {
    if (cluster == w.cluster->number) {
      join(w.clock, *clock);
      continue;
    }
    bool have = false;
    for (auto& [c, s] : w.learnt) have |= c == cluster && s == clock;
    if (have) continue;
    w.learnt.push_back({cluster, clock});
    w.clock[w.comp(LEARNT)] = (u32)w.learnt.size();
  }
  w.clock_changed = true;
}

static void give_learnt(Warp& w, const Clock& known, Foreign& to) {
  for (auto& v : w.cluster->warps)
    for (u32 i = 0; i < known[v->comp(LEARNT)]; i++)
      join(to, Foreign{{v->learnt[i].first, v->learnt[i].second}});
}

void observe(Warp& w, u64 address, bool acquire) {
  Machine& k = *w.machine;
  if (!k.race) return;
  auto f = k.global_sync.find(sync_key(w, address));
  if (f == k.global_sync.end()) return;
  if (acquire) take(w, f->second);
  else join(w.seen, f->second);
}

void publish(Warp& w, u64 address, bool release) {
  Machine& k = *w.machine;
  if (!k.race) return;
  if (!release && w.fenced.empty()) return;
  Foreign& to = k.global_sync[sync_key(w, address)];
  Snapshot mine = release ? w.snapshot() : std::make_shared<const Clock>(w.fenced);
  give_learnt(w, *mine, to);
  join(to, Foreign{{w.cluster->number, mine}});
}

void released(Warp& w) {
  if (!w.machine->race) return;
  w.clock[w.comp(GENERIC)]++;
  w.clock_changed = true;
}

void fence(Warp& w) {
  if (!w.machine->race) return;
  if (!w.seen.empty()) take(w, w.seen), w.seen.clear();
  w.release(w.fenced);
}

}  // namespace emu
