// The trace of a launch, recorded on request: per warp the statements that it executed, and what its
// synchronising, asynchronous and memory operations did. It says what happened, in program order;
// when, and what that costs on a GPU, is for its readers to model.
#pragma once
#include "common.h"

namespace emu {

struct Warp;

// What an operation did. Operands a to e by kind; a barrier is (CTA rank in the cluster, offset in
// its shared memory). fa4core/emulator/trace.py has the same list.
enum class Traced : i32 {
  MbarrierInit,    // a, b barrier; c arrivals of a phase
  MbarrierArrive,  // a, b barrier; c arrivals; d bytes that it expects
  MbarrierBytes,   // a, b barrier; d bytes expected (negative: complete)
  MbarrierWait,    // a, b barrier; c parity; d 1: the phase was complete
  BarrierSync,     // a number; c threads
  BarrierArrive,   // a number; c threads
  ClusterArrive,
  ClusterWait,
  Mma,         // a M; b N; c K; d flags, see MmaFlags; e first TMEM column of D, if it is there
  TensorCopy,  // a rows; b columns
  Commit,      // a mask of CTAs; b offset of the barrier
  TmemLoad,    // a lanes; b columns; e first column
  TmemStore,   // the same
  TmemWait,    // a 0: for loads, 1: for stores
  BulkLoad,    // a, b barrier; c bytes; d CTA that receives; e 1: from shared memory
  BulkStore,   // c bytes; d 1: a reduction
  BulkCommit,
  BulkWait,       // a groups that may be open; d 1: only their reads
  SharedRead,     // c bytes; d passes through the banks; e clocks of the data's way (wavefronts)
  SharedWrite,    // the same
  SharedAtomic,   // the same
  GlobalRead,     // c bytes; d sectors of 32 bytes
  GlobalWrite,    // the same
  GlobalAtomic,   // the same
  CopyAsync,      // c bytes; d sectors read; e wavefronts written
  CopyArrive,     // a, b barrier; c arrivals; d 1: noinc
  CopyCommit,     //
  CopyWait,       // a groups that may be open
  WorkId,         // clusterlaunchcontrol.try_cancel; a, b barrier; c bytes; d CTA that receives
};

struct MmaFlags {
  enum { PAIR = 1, A_ELSEWHERE = 2, ACCUMULATES = 4, TF32 = 8, F8 = 16, WARPGROUP = 32 };
};

struct TraceEvent {
  i32 step;  // index of the statement in the warp's sequence
  i32 pc;    // its number in the kernel
  Traced kind;
  i32 a, b, c, d, e;
};

// Passes through the banks of shared memory, and sectors of 32 bytes, that lanes touch.
i32 wavefronts(const u64* address, u32 bytes, Mask m);
i32 sectors(const u64* address, u32 bytes, Mask m);

class Tracer {
 public:
  void step(const Warp& w, u32 pc);
  void finish(const Warp& w);  // it has ended
  void undo(const Warp& w);  // the statement has blocked and will be executed again
  void event(const Warp& w, Traced kind, i32 a = 0, i32 b = 0, i32 c = 0, i32 d = 0, i32 e = 0);
  // An access of the lanes in m, `bytes` at each of the generic addresses.
  void access(const Warp& w, const u64* address, u32 bytes, Mask m, bool write, bool atomic);
  // Count of statements, line of each; count of warps; for each its CTA's linear index in the grid,
  // its number in the CTA, counts of runs and events, runs (first statement, length), events.
  std::vector<i32> serialised(const std::vector<i32>& lines) const;

 private:
  struct Run {
    i32 first, length;
  };
  struct Log {
    i32 cta, warp, steps = 0;
    std::vector<Run> runs;
    std::vector<TraceEvent> events;
  };
  std::vector<Log> logs;  // by the order in which warps start
  std::vector<const Warp*> owner;
  Log& log_of(const Warp& w);
  Log* last = nullptr;
  const Warp* last_warp = nullptr;
};

}  // namespace emu
