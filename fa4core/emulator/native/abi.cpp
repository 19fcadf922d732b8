// The C interface that native.py calls. One opaque machine; launches return 0, or 1 if there are
// findings; what happened is fetched as one JSON text.
#include <chrono>

#include "machine.h"

using namespace emu;

namespace {

struct Handle {
  Machine m;
  std::string result;
  std::vector<i32> trace;
};

std::string json_string(std::string_view s) {
  std::string r = "\"";
  for (char c : s) {
    if (c == '"' || c == '\\') r += '\\', r += c;
    else if (c == '\n') r += "\\n";
    else if ((u8)c < 32) r += ' ';
    else r += c;
  }
  return r + "\"";
}

std::string counts_json(const std::map<std::string, u64>& m) {
  std::string r = "{";
  for (auto& [k, v] : m) r += (r.size() > 1 ? "," : "") + json_string(k) + ":" + std::to_string(v);
  return r + "}";
}

void write_result(Handle& h, double seconds) {
  Machine& m = h.m;
  std::string& r = h.result;
  r = "{\"seconds\":" + std::to_string(seconds) + ",\"findings\":[";
  for (size_t i = 0; i < m.findings.size(); i++) {
    Finding& f = m.findings[i];
    r += format("%s{\"kind\":", i ? "," : "") + json_string(f.kind);
    r += ",\"message\":" + json_string(f.message);
    if (f.located)
      r += format(",\"cta\":[%u,%u,%u],\"warp\":%d", f.cta[0], f.cta[1], f.cta[2], f.warp);
    r += format(",\"line\":%d,\"ptx\":", f.line) + json_string(f.ptx) +
         ",\"source\":" + json_string(f.source) + "}";
  }
  r += "],\"by_warp\":[";
  for (size_t w = 0; w < m.stats.executed.size(); w++) {
    std::map<std::string, u64> by;
    for (size_t pc = 0; pc < m.stats.executed[w].size(); pc++)
      if (u64 n = m.stats.executed[w][pc]) by[m.program->kinds[m.program->code[pc].kind]] += n;
    r += (w ? "," : "") + counts_json(by);
  }
  std::map<std::string, u64> bytes;
  for (int t = 0; t < TRAFFIC; t++)
    if (m.stats.traffic[t]) bytes[TRAFFIC_NAMES[t]] = m.stats.traffic[t];
  r += "],\"waits\":" + counts_json(m.stats.waits) + ",\"bytes\":" + counts_json(bytes) +
       ",\"mma\":" + counts_json(m.stats.mma);
  r += ",\"timeline\":[";
  for (size_t i = 0; i < m.stats.timeline.size(); i++) {
    auto& e = m.stats.timeline[i];
    r += format("%s[%u,\"%s\",\"%s\",%llu,%llu,%d]", i ? "," : "", e.cta, e.lane.c_str(), e.kind,
                (unsigned long long)e.start, (unsigned long long)e.stop, e.line);
  }
  r += "]}";
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// flags: 1 uninitialised, 2 race, 4 bounds, 8 tmem, 16 barrier, 32 registers, 64 timeline,
// 128 trace
void* emu_create(const char* target, u64 seed, u32 flags, u32 num_sms) {
  auto* h = new Handle;
  Machine& m = h->m;
  m.target = target;
  m.seed = seed;
  m.uninitialised = flags & 1, m.race = flags & 2, m.bounds = flags & 4, m.tensor_rules = flags & 8;
  m.barrier_rules = flags & 16, m.register_rules = flags & 32, m.timeline = flags & 64;
  m.tracing = flags & 128;
  m.num_sms = num_sms;
  return h;
}

void emu_destroy(void* p) {
  auto* h = (Handle*)p;
  for (u32* r : h->m.register_files) free(r);
  delete h;
}

void emu_register(void* p, u64 address, u64 bytes, const char* name, int initialised) {
  Machine& m = ((Handle*)p)->m;
  if (!bytes) return;
  // an allocation that lies where older ones were replaces them
  for (auto f = m.memory.upper_bound(address);
       f != m.memory.end() && f->second.address < address + bytes;)
    f = m.memory.erase(f);
  emu::Allocation a{address, bytes, name, initialised != 0, {}};
  if (!a.initialised) a.written.assign((bytes + 63) / 64, 0);
  m.memory[address + bytes] = std::move(a);
  m.last_allocation = nullptr;
}

void emu_forget(void* p, u64 address) {
  Machine& m = ((Handle*)p)->m;
  for (auto f = m.memory.upper_bound(address); f != m.memory.end() && f->second.address == address;)
    f = m.memory.erase(f);
  m.last_allocation = nullptr;
}

int emu_launch(void* p, const char* ptx, u64 ptx_bytes, const char* kernel, const u32* dims,
               u32 dynamic_smem, const u8* params, u64 param_bytes) {
  auto* h = (Handle*)p;
  Machine& m = h->m;
  LaunchInfo li;
  std::copy(dims, dims + 3, li.grid);
  std::copy(dims + 3, dims + 6, li.block);
  std::copy(dims + 6, dims + 9, li.cluster);
  li.dynamic_smem = dynamic_smem;
  li.params.assign(params, params + param_bytes);
  auto begin = std::chrono::steady_clock::now();
  m.current = nullptr;
  try {
    m.launch(std::string(ptx, ptx_bytes), kernel, li);
  } catch (Fatal& e) {
    if (!e.kind.empty()) {
      Finding f;
      f.kind = e.kind;
      f.message = e.what();
      Warp* w = m.flying ? m.flying->warp : m.current;
      if (w) {
        f.located = true;
        std::copy(w->cta->id, w->cta->id + 3, f.cta);
        f.warp = w->index;
        m.source_of(m.flying ? m.flying->pc : (int)w->at, f);
      } else if (e.line) f.line = e.line;
      m.findings.push_back(f);
    }
    m.resident.clear();
    m.ready.clear();
  } catch (std::exception& e) {
    Finding f;
    f.kind = "instruction";
    f.message = std::string("internal error: ") + e.what();
    m.findings.push_back(f);
  }
  double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  write_result(*h, s);
  return m.findings.empty() ? 0 : 1;
}

// The trace of the last launch, as Tracer::serialised has it; its length in `count`, 0 without one.
const i32* emu_trace(void* p, u64* count) {
  auto* h = (Handle*)p;
  h->trace.clear();
  if (h->m.trace) {
    std::vector<i32> lines;
    for (auto& st : h->m.program->entry->code) lines.push_back(st.line);
    h->trace = h->m.trace->serialised(lines);
  }
  *count = h->trace.size();
  return h->trace.data();
}

const char* emu_result(void* p) { return ((Handle*)p)->result.c_str(); }

// The layout of the kernel's parameters: "offset bytes\n" for each; nullptr and a message on an
// error.
const char* emu_params(void* p, const char* ptx, u64 ptx_bytes, const char* kernel) {
  auto* h = (Handle*)p;
  h->result.clear();
  try {
    auto& q = h->m.programs[std::string(kernel) + "\n" + std::string(ptx, ptx_bytes)];
    if (!q) q = decode(parse(std::string(ptx, ptx_bytes), kernel), kernel);
    for (auto& a : q->entry->params)
      h->result += std::to_string(a.offset) + " " + std::to_string(a.bytes) + "\n";
  } catch (Fatal& e) { h->result = format("error %d %s", e.line, e.what()); }
  return h->result.c_str();
}

}  // extern "C"
