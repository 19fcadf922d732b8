// The C interface that fa4core/timing/replay.py calls: tables in, one JSON text out.
#include <set>

#include "machine.h"

using namespace timing;

namespace {

std::string number(double v) {
  char text[40];
  snprintf(text, sizeof text, "%.10g", v);
  return text;
}

template <class T>
std::string list(const T* v, size_t n) {
  std::string r = "[";
  for (size_t k = 0; k < n; k++) r += (k ? "," : "") + number((double)v[k]);
  return r + "]";
}

std::string counts(const std::map<u64, i64>& m) {
  std::string r = "[";
  for (auto& [k, n] : m)
    r += (r.size() > 1 ? ",[" : "[") + std::to_string(k >> 32) + "," +
         std::to_string(k & 0xffffffff) + "," + std::to_string(n) + "]";
  return r + "]";
}

std::string result(const Machine& m) {
  std::string r = "{\"cycles\":" + std::to_string(m.now) + ",\"warps\":[";
  for (size_t k = 0; k < m.warps.size(); k++) {
    auto& w = m.warps[k];
    r += (k ? ",{" : "{") + std::string("\"cta\":") + std::to_string(w.cta) +
         ",\"warp\":" + std::to_string(w.index) + ",\"finished\":" + std::to_string(w.finished) +
         ",\"spent\":" + list(w.spent, REASONS) + ",\"mbarriers\":" + counts(w.at_mbarrier) +
         ",\"pipes\":" + counts(w.on_pipe) + ",\"others\":" + counts(w.at_other) + "}";
  }
  r += "],\"sms\":[";
  for (size_t k = 0; k < m.sms.size(); k++) {
    auto& s = m.sms[k];
    r += (k ? ",{" : "{") + std::string("\"pipes\":") + list(s.busy, PIPES) +
         ",\"smem\":" + std::to_string(s.smem_busy) + ",\"tma\":" + std::to_string(s.tma_busy) +
         ",\"tmem\":" + number(s.tmem_busy) + ",\"issued\":" + std::to_string(s.issued) + "}";
  }
  r += "],\"tensor\":[";
  for (size_t k = 0; k < m.tensors.size(); k++)
    r += (k ? "," : "") + std::to_string(m.tensors[k].busy);
  r += "],\"spots\":[";
  bool first = true;
  for (size_t k = 0; k < m.spots.size(); k++)
    if (m.spots[k]) {
      r += (first ? "[" : ",[") + std::to_string(k / REASONS) + "," + std::to_string(k % REASONS) +
           "," + std::to_string(m.spots[k]) + "]";
      first = false;
    }
  r += "],\"spans\":[";
  for (size_t k = 0; k < m.spans.size(); k++) {
    auto& s = m.spans[k];
    r += (k ? ",[" : "[") + std::to_string(s.cta) + "," + std::to_string(s.lane) + "," +
         std::to_string(s.kind) + "," + std::to_string(s.start) + "," + std::to_string(s.stop) + "]";
  }
  return r + "]}";
}

std::string text;

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// parameters: doubles in the order of `Parameters`. statics: n_statics x 10. events: n_events x 6.
// warps: n_warps x 3 (CTA rank, warp, steps). steps: of all warps, x 3 (instruction, first event,
// events). pair: MMAs use the tensor cores of two CTAs.
const char* replay(const double* parameters, const i32* statics, u64 n_statics, const i32* events,
                   u64 n_events, const i32* warps, u64 n_warps, const i32* steps, i32 n_ctas,
                   i32 pair, u64 seed, i64 limit, i32 spans) {
  Machine m;
  std::copy(parameters, parameters + sizeof(Parameters) / sizeof(double), (double*)&m.p);
  m.statics.assign((const Static*)statics, (const Static*)statics + n_statics);
  m.events.assign((const Event*)events, (const Event*)events + n_events);
  m.spots.assign(n_statics * REASONS, 0);
  m.random.s = seed;
  m.keep_spans = spans;
  m.sms.resize((size_t)n_ctas);
  for (i32 c = 0; c < n_ctas; c++) {
    if (!pair || c % 2 == 0) m.tensors.emplace_back(), m.tensors.back().first_cta = c;
    m.tensors.back().sms.push_back(&m.sms[(size_t)c]);
  }
  for (u64 k = 0; k < n_warps; k++) {
    m.warps.emplace_back();
    Warp& w = m.warps.back();
    w.cta = warps[3 * k], w.index = warps[3 * k + 1], w.scheduler = w.index % SCHEDULERS;
    i32 n = warps[3 * k + 2];
    w.code.assign((const Dynamic*)steps, (const Dynamic*)steps + n);
    steps += 3 * n;
    Sm& sm = m.sms[(size_t)w.cta];
    sm.warps[w.scheduler].push_back(&w);
    sm.warpgroups[w.index / WARPS_OF_GROUP].warps.push_back(&w);
  }
  m.cluster_warps = (i32)n_warps;
  try {
    m.run(limit);
    text = result(m);
  } catch (std::exception& e) { text = std::string("error: ") + e.what(); }
  return text.c_str();
}

}  // extern "C"
