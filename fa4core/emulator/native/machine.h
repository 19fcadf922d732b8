// The machine: warps, CTAs, clusters, barriers, memories, and the work in flight between them.
//
// One cluster at a time is resident unless warps spin on global memory (then more join). A warp
// runs until it blocks or its slice ends; asynchronous operations lie in `Cluster::flight` until
// the scheduler lets them happen or a wait forces them. PTX ISA: "Programming Model", "Machine
// Model".
#pragma once
#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>

#include "program.h"
#include "shadow.h"
#include "trace.h"

namespace emu {

struct Machine;
struct Cluster;
struct Cta;
struct Warp;

enum class Wait : u8 {
  None,
  Mbarrier,
  NamedBarrier,
  ClusterBarrier,
  Lanes,
  TensorAlloc,
  Registers,
  Done
};

// An mbarrier object. PTX ISA: "mbarrier: phase of the object, tracking asynchronous operations".
struct Mbarrier {
  u32 address = 0, rank = 0, index = 0;   // index: in its CTA
  u32 count = 0, pending = 0, phase = 0;  // phase: number of the current one, its parity is bit 0
  i64 tx = 0;
  bool valid = false;
  u32 comp = 0;                       // local component
  u32 init_comp = 0, init_clock = 0;  // who initialised it, to see that users know of it
  int init_line = 0;
  Clock gathered;     // of the current phase so far
  Snapshot released;  // of the last complete one
  struct Arrival {
    Warp* warp;
    int pc;
    u32 phase;
  };
  std::vector<Arrival> arrivals;  // each warp and place once, with its last phase
};

struct NamedBarrier {
  u32 expected = 0, arrived = 0, generation = 0;
  u32 ones = 0, voters = 0, result[2] = {};  // of a reduction, by parity of the generation
  Clock gathered, released;
};

// Asynchronous work. land(): its effect on memory; complete(): what tells others of it.
struct Flight {
  int stage = 0;  // 0 issued, 1 landed, 2 complete
  int pc = 0;     // of the issuing instruction
  Warp* warp = nullptr;
  bool queued = false;  // part of a pipe: happens in order
  bool waited = false;  // its warp has waited for it
  virtual ~Flight() = default;
  virtual void land() = 0;
  virtual void complete() = 0;
  // One step of its own accord; true when it is complete. `alone`: only its effect, if it has two
  // steps.
  virtual bool advance(bool alone) {
    if (stage == 0) {
      land();
      stage = 1;
      if (alone) return false;
    }
    if (stage == 1) {
      stage = 2;
      complete();
    }
    return true;
  }
  virtual std::string describe() const = 0;
  virtual const char* unit() const { return nullptr; }  // "load", "store": shown in the timeline
  u64 issued = 0;
};
using FlightRef = std::shared_ptr<Flight>;

struct Group {
  u32 number = 0;
  std::vector<FlightRef> ops;
};
struct Groups {  // of one thread: bulk groups or cp.async groups
  std::vector<FlightRef> open;
  std::deque<Group> closed;
};

struct PendingLoad {  // a tcgen05.ld whose registers are not there yet, or a wgmma in flight
  std::vector<u32> planes;
  std::function<void()> perform;
  u32 number = 0;
  FlightRef flight;
};

struct LaneGroup {
  u32 pc;
  Mask mask;
  Wait wait = Wait::None;
};

struct Warp {
  Machine* machine = nullptr;
  Cluster* cluster = nullptr;
  Cta* cta = nullptr;
  const Program* program = nullptr;
  int index = 0;                         // in its CTA
  int number = 0;                        // in its cluster
  u32 *regs = nullptr, *file = nullptr;  // file: the block that regs lies in
  std::vector<Mask> preds;
  u32 pc = 0, at = 0;             // next, and the one being executed
  Mask live = 0, active = 0;      // lanes that have not exited; lanes of the running group
  std::vector<LaneGroup> groups;  // the other groups, when diverged
  Wait wait = Wait::None;
  bool yield = false;      // a handler asks to stop running this warp now
  bool timed_out = false;  // a blocked try_wait is to give up once
  Mbarrier* waiting_for = nullptr;
  u32 waiting_phase = 0;
  u32 waiting_on = 0;  // named barrier number
  u32 barrier_generation = 0;
  bool barrier_arrived = false;  // already counted, now only waiting
  u32 cluster_target = 0;        // generation of barrier.cluster it has arrived for
  i64 ready_slot = -1;           // place in Machine::ready
  u32 priority = 0;
  u64 blocked_since = 0;
  // asynchronous work of this warp
  std::unordered_map<u32, Groups> bulk, copies;  // by lane
  u32 bulk_number = 0, copy_number = 0, store_number = 0, load_number = 0, wgmma_number = 0;
  std::vector<PendingLoad> loads;
  std::vector<u8> pending_plane;
  Groups wgmma;  // of the whole warp
  FlightRef last_wgmma;
  std::vector<u8> unfenced;       // registers written since the last wgmma.fence
  bool wgmma_fenced = false;      // there was one
  std::vector<FlightRef> stores;  // tcgen05.st since the last wait
  FlightRef last_store;
  bool alloc_done = false;  // tcgen05.alloc: the peer has finished it for both
  u32 alloc_columns = 0, alloc_to = 0;
  u32 tensor_number = 0;
  std::shared_ptr<Flight> pipe;
  int registers = 0;  // per thread, for setmaxnreg
  bool registers_known = true;
  std::vector<u8> local;
  // what it knows
  Clock clock;
  std::vector<std::pair<u32, Snapshot>> learnt;  // of other clusters; see LEARNT
  Snapshot shot;
  bool clock_changed = true;
  // A wait orders only once its result is looked at: predicate of a try_wait -> what to acquire
  // then.
  struct Owed {
    u32 pred;
    Snapshot from;
  };
  std::vector<Owed> owed;
  Foreign seen;  // learnt by relaxed reads since the last fence
  Clock fenced;  // its clock at the last fence that a relaxed arrive carries

  const u32* r(u32 plane) const { return regs + (size_t)plane * LANES; }
  u32* w(u32 plane) { return regs + (size_t)plane * LANES; }
  u64 addr(const Ins& i, u32 plane, u32 lane) const {  // a 64-bit or (bytes & 0x80) 32-bit base
    u64 v = r(plane)[lane];
    if (!(i.bytes & 0x80)) v |= (u64)r(plane + 1)[lane] << 32;
    return v + (i64)i.offset;
  }
  u32 comp(Actor a) const { return (u32)number * ACTORS + a; }
  void run(u32 slice);
  bool regroup();  // false: no group can run
  void split(u32 target, Mask taken);
  void exit_lanes(Mask m);
  void block(Wait why) {
    wait = why;
    yield = true;
    pc = at;
  }
  void finish_load(size_t i);
  void finish_loads();
  void finish_loads_of(const std::vector<u32>& planes);
  void acquire(const Clock& from);
  void settle(const std::vector<u32>& preds);
  void release(Clock& to);  // joins its clock into `to` and starts a new epoch
  Snapshot snapshot();
  std::string name() const;
};

struct Cta {
  Cluster* cluster = nullptr;
  u32 rank = 0;
  u32 id[3] = {};
  std::vector<u8> shared;
  Shadow shared_shadow;
  std::vector<u16> barrier_at;  // by address / 8: index + 1
  std::deque<Mbarrier> mbarriers;
  std::array<NamedBarrier, 16> named;
  std::vector<Warp*> warps;
  int alive = 0;
  // TMEM, column-major: column c holds 128 lanes
  std::vector<u32> tmem;
  Shadow tmem_shadow;
  std::array<u8, 16> columns{};    // per 32 columns: allocated?
  std::map<u32, u32> allocations;  // column -> columns
  bool may_allocate = true;
  int register_pool = 0;
};

struct Cluster {
  Machine* machine = nullptr;
  u32 number = 0;  // in order of start
  u32 id[3] = {};
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<FlightRef> flight;
  u32 components = 0, base = 0;
  // barrier.cluster
  u32 cluster_arrived = 0, cluster_generation = 0;
  Clock cluster_gathered, cluster_released;
  // tcgen05.alloc with cta_group::2: who has come
  std::map<u32, std::vector<Warp*>> pair_allocs, pair_frees;
  int alive = 0;
  bool done() const { return alive == 0; }
};

struct Allocation {
  u64 address, bytes;
  std::string name;
  bool initialised;
  std::vector<u64> written;
};

struct Finding {
  std::string kind, message;
  bool located = false;
  u32 cta[3] = {};
  int warp = 0, line = 0;
  std::string ptx, source;
};

struct TimelineEvent {
  u32 cta;
  std::string lane;
  const char* kind;
  u64 start, stop;
  int line;
};

enum Traffic {
  GLOBAL_READ,
  GLOBAL_WRITE,
  GLOBAL_ATOMIC,
  SHARED_READ,
  SHARED_WRITE,
  SHARED_ATOMIC,
  OTHER_READ,
  OTHER_WRITE,
  TMA_LOAD,
  TMA_STORE,
  TMA_REDUCE,
  BULK_SHARED,
  COPY_ASYNC,
  TMEM_READ,
  TMEM_WRITE,
  MMA_SHARED,
  TMA_OUTSIDE,
  TRAFFIC
};
extern const char* const TRAFFIC_NAMES[TRAFFIC];

struct Stats {
  std::vector<std::vector<u64>> executed;  // warp index -> pc -> count
  u64 traffic[TRAFFIC] = {};
  std::map<std::string, u64> waits, mma;
  std::vector<TimelineEvent> timeline;
};

struct LaunchInfo {
  u32 grid[3], block[3], cluster[3];
  u32 dynamic_smem;
  std::vector<u8> params;
};

struct Machine {
  // settings
  std::string target;
  u64 seed = 0;
  bool uninitialised = true, race = true, bounds = true, tensor_rules = true, barrier_rules = true,
       register_rules = true, timeline = false, tracing = false;
  u32 num_sms = 148;
  enum Policy { Mixed, Eager, Late } policy = Mixed;  // of asynchronous work, by seed
  int slice = 0;                                      // how long a warp runs at a stretch, by seed
  bool by_priority = false;  // always the ready warp with the highest priority
  // state that lives across launches
  std::map<u64, Allocation> memory;  // by end address
  std::unordered_map<std::string, std::shared_ptr<Program>> programs;
  // of this launch
  std::shared_ptr<Program> program;
  LaunchInfo info;
  Random random;
  GlobalShadow global_shadow;
  std::unordered_map<u64, Foreign> global_sync;  // what strong writes have left at an address
  std::vector<std::unique_ptr<Cluster>> resident;
  std::deque<u32> waiting_clusters;  // linear numbers not started yet
  std::vector<Warp*> ready;
  std::vector<u32*> register_files;  // to be used again
  std::vector<Finding> findings;
  std::set<std::pair<std::string, int>> seen;
  Stats stats;
  std::unique_ptr<Tracer> trace;  // null unless tracing
  u64 time = 0;
  u64 flights = 0;   // asynchronous operations not complete
  u64 progress = 0;  // rises whenever anything others could see changes
  u32 clusters_started = 0;
  Warp* current = nullptr;   // the warp that runs
  Flight* flying = nullptr;  // the asynchronous operation that takes effect
  Allocation* last_allocation = nullptr;

  void launch(const std::string& ptx, const std::string& kernel, const LaunchInfo& li);
  void loop();
  void start_cluster(u32 linear);
  void finish_cluster(size_t i);
  void make_ready(Warp* w);
  void drop_ready(Warp* w);
  Warp* pick();
  void pick_policy();
  void wake(Cluster& c, Mbarrier* b);  // those blocked on it; null: on anything else
  bool run_flight();
  void step(Flight& f);  // one more stage
  void force(Flight& f, int stage);
  void add_flight(Cluster& c, FlightRef f);  // may happen at once, as the seed wants
  bool has_room() const;  // whether an SM is idle
  bool give_up_waits();
  void start_next();
  void check_leftovers(Cluster& c);
  void check_leaving(Cta& t);  // its last warp has ended
  void completed(Flight& f);
  void source_of(int pc, Finding& f) const;
  [[noreturn]] void deadlock();
  void report(const std::string& kind, const std::string& message, Warp* w, int pc);
  [[noreturn]] void fatal(const std::string& kind, const std::string& message);

  // memory (memory.cpp)
  Cta& cta_of(Warp& w, u32 shared_address);
  u8* shared(Warp& w, u32 address, u32 bytes, const char* what);
  u8* global(u64 address, u64 bytes, bool write, const char* what);
  u8* generic(Warp& w, u64 address, u32 bytes, bool write, u32 lane);
  void shared_access(Warp& w, u32 address, u32 bytes, bool write, int flags);
  void global_access(Warp& w, u64 address, u32 bytes, bool write, int flags);
  void shared_race(Cta& t, bool write, u64 at, u64 n, const Who& who, Warp* w, int pc);
  void global_race(bool write, u64 at, u64 n, const Who& who, Warp* w, int pc);
  void tensor_race(Cta& t, bool write, u32 lane, u32 lanes, u32 column, u32 columns, const Who& who,
                   Warp* w, int pc);
  void global_initialise(u64 at, u64 n);
  void global_read_check(u64 at, u64 n, Warp* w, int pc);
  void shared_read_check(Cta& t, u64 at, u64 n, Warp* w, int pc);
  void conflict(const char* space, u64 at, bool write, const Conflict& c, Warp* w, int pc,
                const Cluster& k);
  Who who(Warp& w, Actor a) const;
  std::string describe(const Cluster& k, Access a);

  // barriers (barrier.cpp)
  Mbarrier* barrier(Warp* w, Cta& t, u32 offset, int pc, bool must = true);
  void arrive(Mbarrier& b, Cta& t, u32 count, const char* who);
  void complete_tx(Mbarrier& b, Cta& t, i64 bytes);
  void check_phase(Mbarrier& b, Cta& t);
  void cluster_barrier_check(Cluster& c);
};

struct FlightShot {  // what an asynchronous operation knew when it was issued
  Snapshot knows;
};
FlightShot shoot(Warp& w);
Who async_who(const Warp& w, const FlightShot& s, u32 local_comp, u32 clock);

}  // namespace emu
