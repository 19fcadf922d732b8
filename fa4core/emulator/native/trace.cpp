// Recording and serialising a trace; see trace.h.
#include "trace.h"

#include <algorithm>

#include "machine.h"

namespace emu {

Tracer::Log& Tracer::log_of(const Warp& w) {
  if (&w == last_warp) return *last;
  auto f = std::find(owner.rbegin(), owner.rend(), &w);  // warps of later clusters come last
  if (f == owner.rend()) {
    i32 cta = (i32)(w.cluster->number * w.cluster->ctas.size() + w.cta->rank);
    logs.push_back({cta, w.index, 0, {}, {}});
    owner.push_back(&w);
    f = owner.rbegin();
  }
  last_warp = &w;
  return *(last = &logs[(size_t)(owner.rend() - f) - 1]);
}

void Tracer::finish(const Warp& w) {  // another warp may be made at the same address
  for (auto& o : owner)
    if (o == &w) o = nullptr;
  if (last_warp == &w) last_warp = nullptr;
}

void Tracer::step(const Warp& w, u32 pc) {
  Log& log = log_of(w);
  if (log.runs.empty() || log.runs.back().first + log.runs.back().length != (i32)pc)
    log.runs.push_back({(i32)pc, 0});
  log.runs.back().length++;
  log.steps++;
}

void Tracer::undo(const Warp& w) {
  Log& log = log_of(w);
  log.steps--;
  if (--log.runs.back().length == 0) log.runs.pop_back();
}

void Tracer::event(const Warp& w, Traced kind, i32 a, i32 b, i32 c, i32 d, i32 e) {
  Log& log = log_of(w);
  log.events.push_back({log.steps - 1, (i32)w.at, kind, a, b, c, d, e});
}

// Whether every active lane has the address of the one whose number differs in this bit.
bool in_pairs(const u64* address, Mask m, u32 bit) {
  FOR_LANES (l, m)
    if (m >> (l ^ bit) & 1 && address[l] != address[l ^ bit]) return false;
  return true;
}

// Shared memory has 32 banks of 4 bytes. A pass serves 128 bytes at most, so lanes with wide
// accesses go in groups; a group takes as many passes as the most loaded bank has words. Groups
// are twice as large where lanes in pairs, neighbours or next but one, have the same address
// (forums.developer.nvidia.com/t/77228, for compute capability 7.0 and above).
i32 wavefronts(const u64* address, u32 bytes, Mask m) {
  u32 words = std::max(1u, bytes / 4), group = LANES / words;
  if (words > 1 && (in_pairs(address, m, 1) || in_pairs(address, m, 2))) group *= 2;
  i32 passes = 0;
  for (u32 first = 0; first < (u32)LANES; first += group) {
    std::vector<u64> banks[LANES];
    size_t most = 0;
    for (u32 l = first; l < first + group; l++) {
      if (!(m >> l & 1)) continue;
      for (u32 k = 0; k < words; k++) {
        u64 word = address[l] / 4 + k;
        auto& bank = banks[word % LANES];
        if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
        most = std::max(most, bank.size());
      }
    }
    passes += (i32)most;
  }
  return passes;
}

// Whether all lanes have one address: the banks are read once, however long it takes to return.
bool uniform(const u64* address, Mask m) {
  FOR_LANES (l, m)
    if (address[l] != address[lowest(m)]) return false;
  return true;
}

i32 sectors(const u64* address, u32 bytes, Mask m) {
  std::vector<u64> touched;
  FOR_LANES (l, m)
    for (u64 s = address[l] / 32; s <= (address[l] + bytes - 1) / 32; s++) touched.push_back(s);
  std::sort(touched.begin(), touched.end());
  return (i32)(std::unique(touched.begin(), touched.end()) - touched.begin());
}

void Tracer::access(const Warp& w, const u64* address, u32 bytes, Mask m, bool write, bool atomic) {
  if (!m) return;
  u64 window = address[lowest(m)] & WINDOW_MASK;
  i32 total = (i32)bytes * popcount(m), which = atomic ? 2 : write;
  if (window == SHARED_WINDOW) {
    i32 clocks = wavefronts(address, bytes, m), passes = uniform(address, m) ? 1 : clocks;
    event(w, (Traced)((i32)Traced::SharedRead + which), 0, 0, total, passes, clocks);
  }
  else if (window == 0)
    event(w, (Traced)((i32)Traced::GlobalRead + which), 0, 0, total, sectors(address, bytes, m));
}

std::vector<i32> Tracer::serialised(const std::vector<i32>& lines) const {
  std::vector<i32> r{(i32)lines.size()};
  r.insert(r.end(), lines.begin(), lines.end());
  r.push_back((i32)logs.size());
  for (auto& log : logs) {
    r.insert(r.end(), {log.cta, log.warp, (i32)log.runs.size(), (i32)log.events.size()});
    for (auto& run : log.runs) r.insert(r.end(), {run.first, run.length});
    for (auto& e : log.events)
      r.insert(r.end(), {e.step, e.pc, (i32)e.kind, e.a, e.b, e.c, e.d, e.e});
  }
  return r;
}

}  // namespace emu
