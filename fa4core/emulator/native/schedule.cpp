// Launches, residency of clusters, and the scheduler with its hostile orders.
//
// Everything is drawn from one random source seeded by the launch's seed, so a run repeats exactly.
// What varies by seed: which warp runs and for how long, whether some warps starve others, and
// whether asynchronous work happens at once, in between, or only when nothing else can run. With an
// odd seed every SM has a cluster at work from the start; with an even one, a cluster begins when
// the one before it has ended or waits for others.
#include <algorithm>
#include <cstdlib>

#include "machine.h"

namespace emu {

const char* const TRAFFIC_NAMES[TRAFFIC] = {
    "global.read",  "global.write",  "global.atomic", "shared.read",
    "shared.write", "shared.atomic", "other.read",    "other.write",
    "tma.load",     "tma.store",     "tma.reduce",    "bulk.shared",
    "cp.async",     "tmem.read",     "tmem.write",    "mma.shared.read",
    "tma.outside"};

constexpr u64 SPIN_LIMIT = 40'000;      // instructions without progress before more clusters join
constexpr u64 AFTER_FINDING = 500'000;  // instructions to run on after the first finding
constexpr u64 HANG_LIMIT = 20'000'000;  // ... before it counts as a hang

void Machine::pick_policy() {
  random.s = seed * 0x9e3779b97f4a7c15ull + 12345;
  policy = seed == 0 ? Mixed : (Policy)random.below(3);
  slice = seed == 0 ? 2 : (int)random.below(4);
  by_priority = seed != 0 && random.below(3) == 0;
}

static u32 product(const u32* v) { return v[0] * v[1] * v[2]; }

static void special_value(Warp& w, const std::string& n, u32* p) {
  Machine& k = *w.machine;
  Cluster& c = *w.cluster;
  const LaunchInfo& li = k.info;
  auto fill = [&](u64 v) {
    for (int l = 0; l < LANES; l++) p[l] = (u32)v, p[l + LANES] = (u32)(v >> 32);
  };
  u32 axis = n.size() > 2 && n[n.size() - 2] == '.' ? (u32)(n.back() - 'x') : 0;
  std::string base = n.size() > 2 && n[n.size() - 2] == '.' ? n.substr(0, n.size() - 2) : n;
  u32 cta_in[3], clusters[3];
  for (u32 a = 0, r = w.cta->rank; a < 3; a++) {
    cta_in[a] = r % li.cluster[a];
    r /= li.cluster[a];
    clusters[a] = li.grid[a] / li.cluster[a];
  }
  if (n.rfind("shared+", 0) == 0)
    fill((u64)w.cta->rank << RANK_SHIFT | strtoull(n.c_str() + 7, nullptr, 10));
  else if (base == "tid") {
    for (int l = 0; l < LANES; l++) {
      u32 t = (u32)(w.index * LANES + l),
          v[3] = {t % li.block[0], t / li.block[0] % li.block[1], t / (li.block[0] * li.block[1])};
      p[l] = v[axis];
      p[l + LANES] = 0;
    }
  } else if (base == "laneid") {
    for (int l = 0; l < LANES; l++) p[l] = (u32)l, p[l + LANES] = 0;
  } else if (base.rfind("lanemask_", 0) == 0) {
    std::string op = base.substr(9);
    for (int l = 0; l < LANES; l++) {
      u32 lt = (1u << l) - 1, eq = 1u << l;
      p[l] = op == "lt"   ? lt
             : op == "le" ? lt | eq
             : op == "eq" ? eq
             : op == "ge" ? ~lt
                          : ~(lt | eq);
      p[l + LANES] = 0;
    }
  } else if (base == "ntid") fill(li.block[axis]);
  else if (base == "ctaid") fill(w.cta->id[axis]);
  else if (base == "nctaid") fill(li.grid[axis]);
  else if (base == "warpid") fill((u64)w.index);
  else if (base == "nwarpid") fill(w.cta->warps.size());
  else if (base == "clusterid") fill(c.id[axis]);
  else if (base == "nclusterid") fill(clusters[axis]);
  else if (base == "cluster_ctaid") fill(cta_in[axis]);
  else if (base == "cluster_nctaid") fill(li.cluster[axis]);
  else if (base == "cluster_ctarank") fill(w.cta->rank);
  else if (base == "cluster_nctarank") fill(product(li.cluster));
  else if (base == "is_explicit_cluster") fill(product(li.cluster) > 1);
  else if (base == "smid") fill((c.number * c.ctas.size() + w.cta->rank) % k.num_sms);
  else if (base == "nsmid") fill(k.num_sms);
  else if (base == "gridid") fill(1);
  else if (base == "dynamic_smem_size") fill(li.dynamic_smem);
  else if (base == "total_smem_size") fill(w.cta->shared.size() - 1024);
  else if (base == "aggr_smem_size") fill(w.cta->shared.size());
  else throw Fatal("instruction", "not understood: special register %" + n);
}

void Machine::start_cluster(u32 linear) {
  auto owned = std::make_unique<Cluster>();
  Cluster& c = *owned;
  c.machine = this;
  c.number = clusters_started++;
  u32 n = product(info.cluster), nw = (product(info.block) + LANES - 1) / LANES;
  for (u32 a = 0, r = linear; a < 3; a++) {
    u32 m = info.grid[a] / info.cluster[a];
    c.id[a] = r % m;
    r /= m;
  }
  c.components = n * nw * ACTORS + n * BARRIERS_PER_CTA;
  c.base = c.number * c.components;
  u64 smem = program->entry->shared_bytes;
  if (program->entry->dynamic_shared) smem = (smem + 1023) / 1024 * 1024;
  smem += info.dynamic_smem;
  int launch_regs = program->entry->max_regs ? program->entry->max_regs
                                             : std::min(255, (int)(65536 / (nw * LANES) / 8 * 8));
  if (program->entry->min_ctas > 1)
    launch_regs =
        std::min(launch_regs, (int)(65536 / (nw * LANES) / (u32)program->entry->min_ctas / 8 * 8));
  size_t planes = program->planes + 2;
  for (u32 r = 0; r < n; r++) {
    auto t = std::make_unique<Cta>();
    t->cluster = &c;
    t->rank = r;
    for (u32 a = 0, q = r; a < 3; a++) {
      t->id[a] = c.id[a] * info.cluster[a] + q % info.cluster[a];
      q /= info.cluster[a];
    }
    t->shared.resize((smem + 15) / 16 * 16);
    t->barrier_at.assign(t->shared.size() / 8 + 1, 0);
    if (race || uninitialised) t->shared_shadow.resize(t->shared.size() / 16 + 1);
    t->shared_shadow.workers_per_cluster = t->tmem_shadow.workers_per_cluster = n * nw * ACTORS;
    if (program->uses_tensor_memory) {
      t->tmem.resize(128 * 512);
      if (race || uninitialised) t->tmem_shadow.resize(8 * 512);
    }
    for (u32 i = 0; i < nw; i++) {
      auto w = std::make_unique<Warp>();
      w->machine = this, w->cluster = &c, w->cta = t.get(), w->program = program.get();
      w->index = (int)i, w->number = (int)c.warps.size();
      if (register_files.empty()) register_files.push_back((u32*)calloc(planes * LANES + 64, 4));
      w->regs = (u32*)(((u64)register_files.back() + 63) & ~63ull);
      w->file = register_files.back();
      register_files.pop_back();
      w->preds.assign(program->predicates + 1, 0);
      w->preds[program->predicates - 2] = FULL;
      u32 threads = product(info.block) - i * LANES;
      w->live = w->active = threads >= LANES ? FULL : (1u << threads) - 1;
      w->registers = launch_regs;
      w->registers_known = program->entry->max_regs || launch_regs < 255;
      w->local.resize((size_t)program->local_bytes * LANES);
      w->pending_plane.assign(program->uses_tensor_memory || program->uses_wgmma ? planes : 0, 0);
      if (race) w->clock.assign(c.components, 0), w->clock[w->comp(GENERIC)] = 1;
      w->unfenced.assign(program->uses_wgmma ? planes : 0, 0);
      w->priority = (u32)random.next();
      for (auto& [plane, v] : program->constants)
        for (int l = 0; l < LANES; l++) w->w(plane)[l] = v;
      for (auto& [name, plane] : program->specials) special_value(*w, name, w->w(plane));
      t->warps.push_back(w.get());
      c.warps.push_back(std::move(w));
    }
    t->alive = (int)nw;
    c.ctas.push_back(std::move(t));
  }
  c.alive = (int)c.warps.size();
  for (auto& w : c.warps) make_ready(w.get());
  resident.push_back(std::move(owned));
  progress++;
}

void Machine::make_ready(Warp* w) {
  if (w->ready_slot >= 0 || w->wait == Wait::Done) return;
  if (timeline && w->wait != Wait::None && time > w->blocked_since)
    stats.timeline.push_back(
        {(u32)(w->cluster->number * w->cluster->ctas.size() + w->cta->rank),
         format("warp %d", w->index), "wait", w->blocked_since, time,
         w->program->entry->code[std::min<size_t>(w->pc, w->program->entry->code.size() - 1)]
             .line});
  w->wait = Wait::None;
  w->waiting_for = nullptr;
  for (auto& g : w->groups)
    if (g.wait != Wait::Lanes) g.wait = Wait::None;
  w->ready_slot = (i64)ready.size();
  ready.push_back(w);
}

void Machine::drop_ready(Warp* w) {
  Warp* last = ready.back();
  ready[(size_t)w->ready_slot] = last;
  last->ready_slot = w->ready_slot;
  ready.pop_back();
  w->ready_slot = -1;
}

void Machine::wake(Cluster& c, Mbarrier* b) {
  progress++;
  for (auto& w : c.warps) {
    if (w->wait == Wait::None || w->wait == Wait::Done || w->ready_slot >= 0) continue;
    bool mine = b ? (w->wait == Wait::Mbarrier && w->waiting_for == b) : w->wait != Wait::Mbarrier;
    if (mine || !w->groups.empty()) make_ready(w.get());
  }
}

Warp* Machine::pick() {
  Warp* w = ready[random.below((u32)ready.size())];
  if (by_priority && random.below(16)) {
    for (Warp* v : ready)
      if (v->priority > w->priority) w = v;
    if (random.below(64) == 0) w->priority = (u32)random.next();
  }
  return w;
}

void Machine::step(Flight& f) {
  progress++;
  Flight* outer = flying;
  flying = &f;
  if (f.advance(policy == Eager)) f.stage = 2, flights--, completed(f);
  flying = outer;
}

void Machine::force(Flight& f, int stage) {
  Flight* outer = flying;
  flying = &f;
  while (f.stage < stage) {
    progress++;
    if (f.stage == 0) {
      f.land();
      f.stage = 1;
    } else {
      f.stage = 2;
      flights--;
      f.complete();
      completed(f);
    }
  }
  flying = outer;
}

void Machine::completed(Flight& f) {
  if (timeline && f.unit())
    stats.timeline.push_back(
        {(u32)(f.warp->cluster->number * f.warp->cluster->ctas.size() + f.warp->cta->rank), "tma",
         f.unit(), f.issued, time, program->entry->code[(size_t)f.pc].line});
}

void Machine::add_flight(Cluster& c, FlightRef f) {
  flights++;
  f->issued = time;
  bool now = policy == Eager   ? random.below(8) != 0
             : policy == Mixed ? random.below(4) == 0
                               : false;
  if (now) force(*f, 1);
  c.flight.push_back(std::move(f));
}

// Lets one asynchronous operation make a step; false: none is under way.
bool Machine::run_flight() {
  if (!flights) return false;
  size_t start = resident.size() > 1 ? random.below((u32)resident.size()) : 0;
  for (size_t n = 0; n < resident.size(); n++) {
    Cluster& c = *resident[(start + n) % resident.size()];
    while (!c.flight.empty()) {
      size_t i = random.below((u32)c.flight.size());
      FlightRef f = c.flight[i];
      auto remove = [&] {
        c.flight[i] = c.flight.back();
        c.flight.pop_back();
      };
      if (f->stage == 2) {
        remove();
        continue;
      }
      step(*f);
      if (f->stage == 2) {
        for (i = 0; i < c.flight.size() && c.flight[i] != f; i++) {}
        if (i < c.flight.size()) remove();
      }
      return true;
    }
  }
  return false;
}

void Machine::start_next() {
  u32 n = waiting_clusters.front();
  waiting_clusters.pop_front();
  start_cluster(n);
}

void Machine::finish_cluster(size_t i) {
  Cluster& c = *resident[i];
  for (auto& f : c.flight) force(*f, 2);
  check_leftovers(c);
  for (auto& w : c.warps) {
    register_files.push_back(w->file);
    if (trace) trace->finish(*w);
  }
  resident.erase(resident.begin() + (long)i);
}

void Machine::check_leftovers(Cluster& c) {
  for (auto& t : c.ctas)
    if (tensor_rules && !t->allocations.empty()) {
      auto [column, n] = *t->allocations.begin();
      report("tmem",
             format("CTA (%u,%u,%u) ended with %u TMEM columns from %u still allocated", t->id[0],
                    t->id[1], t->id[2], n, column),
             t->warps[0], -1);
    }
}

// Other CTAs' accesses to this one's shared memory must be known to be over when it ends.
void Machine::check_leaving(Cta& t) {
  Cluster& c = *t.cluster;
  if (!race || c.ctas.size() == 1) return;
  Clock known(c.components, 0);
  for (Warp* w : t.warps) join(known, w->clock);
  Who x;
  x.base = c.base, x.size = c.components, x.knows = known.data(), x.cluster = &c;
  x.comp = c.base + t.warps[0]->comp(GENERIC);
  auto ours = [&](Access a) {  // of its own warps: those have ended (their asynchronous work is
                               // another matter)
    u32 local = component(a) - c.base, worker = local / ACTORS;
    return local >= c.warps.size() * ACTORS || c.warps[worker]->cta == &t;
  };
  Conflict found = t.shared_shadow.unordered_access(x, ours);
  if (!found.found) return;
  report(
      "race",
      format("CTA (%u,%u,%u) may end before the %s at shared offset %zu of its shared memory by %s",
             t.id[0], t.id[1], t.id[2], found.other_is_write ? "write" : "read", found.granule * 16,
             describe(c, found.other).c_str()),
      t.warps[0], -1);
}

bool Machine::has_room() const {
  return resident.size() * resident[0]->ctas.size() < num_sms;
}

// All warps are blocked and nothing is in flight: blocked try_waits may give up once, as on
// hardware.
bool Machine::give_up_waits() {
  bool any = false;
  for (auto& c : resident)
    for (auto& w : c->warps)
      if (w->wait == Wait::Mbarrier) {
        w->timed_out = true;
        make_ready(w.get());
        any = true;
      }
  return any;
}

void Machine::loop() {
  static const u32 slices[4][2] = {{1, 8}, {1, 60}, {50, 1000}, {1, 400}};
  u64 seen_progress = ~0ull, since = 0, given_up_at = ~0ull;
  u64 found_at = 0;
  int given_up = 0;
  while (!resident.empty() || !waiting_clusters.empty()) {
    if (resident.empty()) start_next();
    while (seed % 2 && !waiting_clusters.empty() && has_room()) start_next();
    bool flight_now = ready.empty() || (flights && (policy == Eager   ? random.below(2)
                                                    : policy == Mixed ? random.below(4) == 0
                                                                      : random.below(64) == 0));
    if (flight_now && run_flight()) continue;
    if (ready.empty()) {
      for (size_t i = 0; i < resident.size(); i++)
        if (resident[i]->done()) {
          finish_cluster(i);
          progress++;
          i--;
        }
      if (resident.empty() || !ready.empty()) continue;
      if (given_up_at == progress && ++given_up > 2) {
        bool spinning = !waiting_clusters.empty() && has_room();
        if (!spinning) deadlock();
        start_next();
      }
      if (given_up_at != progress) given_up = 0;
      given_up_at = progress;
      if (!give_up_waits()) {
        if (!waiting_clusters.empty() && has_room()) {
          start_next();
          continue;
        }
        deadlock();
      }
      continue;
    }
    if (!findings.empty()) {  // a run with a bug may never end: look for more bugs for a while only
      if (!found_at) found_at = time + 1;
      if (time - found_at > AFTER_FINDING) {
        resident.clear();
        ready.clear();
        return;
      }
    }
    if (progress != seen_progress) seen_progress = progress, since = time;
    else if (time - since > SPIN_LIMIT) {
      if (!waiting_clusters.empty() && has_room()) {
        start_next();
        continue;
      }
      if (time - since > HANG_LIMIT) deadlock();
    }
    Warp* w = pick();
    current = w;
    const u32* range = slices[slice];
    u64 begin = time;
    w->run(range[0] + random.below(range[1]));
    if (timeline && time > begin)
      stats.timeline.push_back({(u32)(w->cluster->number * w->cluster->ctas.size() + w->cta->rank),
                                format("warp %d", w->index), "run", begin, time, 0});
    current = nullptr;
    if (w->wait == Wait::None) continue;
    drop_ready(w);
    w->blocked_since = time;
    static const char* waits[] = {"",      "mbarrier",      "bar.sync",   "barrier.cluster",
                                  "lanes", "tcgen05.alloc", "setmaxnreg", ""};
    if (w->wait != Wait::Done) {
      stats.waits[waits[(int)w->wait]]++;
      continue;
    }
    progress++;
    if (--w->cta->alive == 0) check_leaving(*w->cta);
    Cluster& c = *w->cluster;
    if (--c.alive == 0) {
      for (size_t i = 0; i < resident.size(); i++)
        if (resident[i].get() == &c) {
          finish_cluster(i);
          break;
        }
    } else cluster_barrier_check(c);
  }
}

void Machine::launch(const std::string& ptx, const std::string& kernel, const LaunchInfo& li) {
  auto& p = programs[kernel + "\n" + ptx];
  if (!p) p = decode(parse(ptx, kernel), kernel);
  program = p;
  info = li;
  findings.clear();
  seen.clear();
  stats = Stats{};
  trace = tracing ? std::make_unique<Tracer>() : nullptr;
  u32 nw = (product(li.block) + LANES - 1) / LANES;
  stats.executed.assign(nw, std::vector<u64>(program->code.size(), 0));
  time = progress = flights = 0;
  clusters_started = 0;
  resident.clear();
  ready.clear();
  waiting_clusters.clear();
  global_sync.clear();
  global_shadow.forget();
  for (u32* r : register_files) free(r);
  register_files.clear();
  last_allocation = nullptr;
  flying = nullptr;
  pick_policy();
  const Entry& e = *program->entry;
  for (auto& [n, v] : program->module->globals)
    if (n.rfind("shared ", 0) != 0 && v.bytes)
      memory[v.address + v.bytes] = {v.address, v.bytes, n, true, {}};
  if (e.required_threads && (u32)e.required_threads != product(li.block))
    throw Fatal("instruction",
                format("the kernel asks for %d threads (.reqntid), the launch has %u",
                       e.required_threads, product(li.block)));
  for (int a = 0; a < 3; a++)
    if (li.grid[a] % li.cluster[a])
      throw Fatal("instruction", "the grid is not a multiple of the cluster");
  if (li.params.size() < e.param_bytes)
    throw Fatal("instruction", format("%zu bytes of parameters, the kernel has %u",
                                      li.params.size(), e.param_bytes));
  if (e.shared_bytes - 1024 + li.dynamic_smem > 232448)
    throw Fatal("bounds", "more than 227 KiB of shared memory");
  u32 clusters = product(li.grid) / product(li.cluster);
  for (u32 i = 0; i < clusters; i++) waiting_clusters.push_back(i);
  loop();
}

}  // namespace emu
