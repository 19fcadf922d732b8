// The machine that replays instruction sequences: SMs with four schedulers each, their units, and
// barriers between them. Time advances cycle by cycle. It knows no kernel; the numbers of the
// hardware come in as `Parameters`. fa4core/timing/parameters.py explains each and says where it
// is from; fa4core/timing/replay.py packs the tables.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <queue>
#include <stdexcept>
#include <string>
#include <vector>

namespace timing {

using i32 = int32_t;
using u32 = uint32_t;
using i64 = int64_t;
using u64 = uint64_t;

constexpr int SCHEDULERS = 4;  // of an SM; warp w belongs to number w % 4
constexpr int SCOREBOARDS = 6;
constexpr int WARPS_OF_GROUP = 4;  // that multiply together
constexpr int NONE = 7;  // no scoreboard

enum Pipe : i32 { FMA, ALU, MUFU, TMEM, LSU, TENSOR, TMA, BARRIER, UNIFORM, CONTROL, PIPES };

enum class Op : i32 {
  Plain,  // its result is there after `latency`
  SharedRead,
  SharedWrite,
  GlobalRead,
  GlobalWrite,
  TmemLoad,
  TmemStore,
  TmemFence,    // waits for the warp's TMEM stores
  SharedFence,  // waits for the warp's shared writes
  Mma,
  Commit,
  ProductWait,  // for groups of the warp's own products
  BulkLoad,
  BulkStore,
  BulkCommit,
  BulkWait,
  MbarrierInit,
  MbarrierArrive,
  MbarrierWait,
  BarrierSync,
  BarrierArrive,
  ClusterArrive,
  ClusterWait,
  CopyAsync,
  CopyArrive,
  CopyWait,
  WorkId,
  Exit
};

// The same order as fa4core/timing/parameters.py.
struct Parameters {
  double mac, smem_bytes, tmem_bytes, tma_bytes;             // rates, per clock and SM (scheduler)
  double mma_latency, tmem_load_latency, tmem_store_latency;  // cycles
  double shared_latency, global_latency, bulk_load_latency;
  double arrive_latency, wait_latency, wake_latency, retry_stalls;
  double remote_latency, barrier_latency, cluster_latency;
  double operand_latency, work_id_latency, lsu_queue;
  double jitter, greedy;
  double dispatch_conflict;  // share of the instructions that are issued beside products
  double warp_skew;  // cycles over which warps begin
};

struct Static {
  i32 pipe, cycles, stall, yield, write, read, wait, op, latency;
  i32 groups;  // of a product: 1 if it ends a group; of a ProductWait: how many may be open
};

struct Event {  // a row of the emulator's trace: kind, operands
  i32 kind, a, b, c, d, e;
};

struct Dynamic {
  i32 instruction, first_event, events;
};

struct Random {
  u64 s;
  u64 next() {
    u64 z = (s += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  double unit() { return (double)(next() >> 11) * 0x1p-53; }
};

struct Machine;
struct Warp;

struct Mbarrier {
  i32 count = 0, pending = 0;
  i64 bytes = 0;
  u32 phase = 0;
  struct Waiter {
    Warp* warp;
    i32 parity, scoreboard;
  };
  std::vector<Waiter> waiters;
};

struct NamedBarrier {
  i32 arrived = 0;
  std::vector<Warp*> waiters;
};

// Why a warp did not issue in a cycle.
enum Reason : i32 { ISSUED, FIXED, NOT_CHOSEN, PIPE, OPERANDS, AT_BARRIER, AT_MBARRIER, DONE, REASONS };

struct Warp {
  i32 cta, index, scheduler;
  std::vector<Dynamic> code;
  size_t at = 0;
  i64 next_issue = 0, finished = -1;
  i32 scoreboard[SCOREBOARDS] = {};
  u64 holder[SCOREBOARDS] = {};  // who took it last: key of an mbarrier, or a pipe
  bool blocked = false;          // at a named or cluster barrier, a fence or a bulk wait
  u64 blocked_on = 0;
  i32 tmem_stores = 0, shared_writes = 0, waiting_for = 0;
  i64 last_copy = 0;
  i32 cluster_waits = 0;
  u64 products = 0;        // issued
  i32 product_groups = 0;  // open
  i32 open_stores = 0;
  std::deque<i32> groups;  // bulk stores not read yet, of each committed group
  i32 allowed_groups = 0;  // of stores or of products, whichever it waits for
  i64 waits_since = -1;  // for the spans
  i64 spent[REASONS] = {};
  std::map<u64, i64> at_mbarrier, at_other, on_pipe;
};

// A request for passes through shared memory, and what follows when all were served.
struct Access {
  enum Kind { Load, Store, Bulk, BulkRead } kind;
  double passes;
  Warp* warp;
  i32 scoreboard, read;
  i64 latency;  // until a load's result is there
  u64 barrier;  // that a bulk load completes on, and the bytes of it that are then complete
  i64 bytes;
  i64 returning = 0;  // clocks beyond its passes until registers have all data
};

struct Transfer {  // a bulk load on its way into an SM
  i64 ready;
  double bytes, total;
  u64 barrier;
};

struct TensorOp {
  bool commit = false, in_registers = false;  // where its accumulators are
  double cycles = 0, bytes = 0, fetched[2] = {};
  u32 mask = 0, offset = 0;
  std::vector<Warp*> group;  // whose group ends with it
};

// Four warps that multiply together: a product begins when all of them have issued it.
struct Warpgroup {
  u64 complete = 0;         // products that all have issued
  std::deque<i32> partial;  // warps that have issued each of the next ones
  std::vector<Warp*> warps;
};

struct Sm {
  i64 pipe_free[SCHEDULERS][PIPES] = {};
  double tmem_free[SCHEDULERS] = {};
  i64 dispatched[SCHEDULERS] = {};  // when the last instruction has read its registers
  double accumulates = 0;           // until then a product uses registers
  i64 returned = 0;  // when the way from shared memory to registers is free
  std::vector<Warp*> warps[SCHEDULERS];
  int last[SCHEDULERS] = {};
  std::deque<Access> accesses, bulk_accesses;
  std::deque<Transfer> transfers;
  double link = 0;  // bytes that have arrived and are not in an access yet
  int turn = 0;
  std::map<i32, NamedBarrier> named;
  std::map<i32, Warpgroup> warpgroups;
  i64 busy[PIPES] = {}, smem_busy = 0, tma_busy = 0, issued = 0;
  double tmem_busy = 0;
};

struct Tensor {  // a tensor core, or the two of a pair that work as one
  std::vector<Sm*> sms;
  std::deque<TensorOp> ops;
  double free = 0;
  i64 busy = 0;
  i32 first_cta = 0;
};

struct Timed {
  i64 time;
  u64 order;
  enum Kind { Release, Arrive, Unblock, StoreDone, SharedDone, BulkRead, ProductsDone } kind;
  Warp* warp;
  u64 key;
  i64 value, bytes;
  bool operator<(const Timed& o) const {
    return time != o.time ? time > o.time : order > o.order;
  }
};

struct Span {
  i32 cta, lane;  // lane: warp, or -1 tensor core, -2 bulk copies
  i32 kind;       // 0 product, 1 bulk load, 2 bulk store, 3 a warp waits at a barrier
  i64 start, stop;
};

struct Machine {
  Parameters p;
  std::vector<Static> statics;
  std::vector<Event> events;
  std::deque<Warp> warps;
  std::deque<Sm> sms;
  std::deque<Tensor> tensors;
  std::map<u64, Mbarrier> mbarriers;
  std::priority_queue<Timed> timed;
  std::vector<Span> spans;
  std::vector<i64> spots;  // of the first CTA: cycles by instruction and reason
  bool keep_spans = false;
  Random random{0};
  i64 now = 0;
  u64 order = 0;
  i32 cluster_arrived = 0, cluster_warps = 0, cluster_generation = 0;
  std::vector<Warp*> cluster_waiters;
  size_t running = 0;

  void run(i64 limit);
  i64 jittered(double latency);
  void at(i64 time, Timed::Kind kind, Warp* w, u64 key = 0, i64 value = 0, i64 bytes = 0);
  void handle(const Timed& t);
  void shared_memory(Sm& sm);
  void tensor(Tensor& t);
  Tensor& tensor_of(const Warp& w);
  void multiply(Sm& sm, Warp& w, const Static& s, const Event& e);
  void schedule(Sm& sm, int which);
  Reason why_not(Sm& sm, Warp& w, u64& culprit);
  void issue(Sm& sm, Warp& w);
  void perform(Sm& sm, Warp& w, const Static& s, const Dynamic& d);
  void block(Warp& w, u64 on);
  void hold(Warp& w, i32 scoreboard, u64 who);
  void release_after(Warp& w, i32 scoreboard, i64 latency);
  void arrive(u64 key, i64 count, i64 expected, i64 completed);
  void check(u64 key, Mbarrier& b);
  void count(Warp& w, Reason r, u64 culprit);
  void note(Warp& w, bool waits);
  std::string stuck();
};

inline u64 key_of(i32 rank, i32 offset) { return (u64)(u32)rank << 32 | (u32)offset; }

}  // namespace timing
