// Findings: where, what, and for a hang who waits for whom.
#include <algorithm>

#include "machine.h"

namespace emu {

void Machine::source_of(int pc, Finding& f) const {
  const Entry& e = *program->entry;
  if (pc < 0 || pc >= (int)e.code.size()) return;
  const Statement& st = e.code[(size_t)pc];
  f.line = st.line;
  if (st.line > 0 && st.line <= (int)program->module->lines.size()) f.ptx = std::string(program->module->lines[(size_t)st.line - 1]);
  auto file = program->module->files.find(st.file);
  if (file != program->module->files.end() && st.source_line) f.source = file->second + ":" + std::to_string(st.source_line);
}

void Machine::report(const std::string& kind, const std::string& message, Warp* w, int pc) {
  if (!seen.insert({kind, pc}).second || findings.size() >= 100) return;
  Finding f;
  f.kind = kind;
  f.message = message;
  if (w) {
    f.located = true;
    std::copy(w->cta->id, w->cta->id + 3, f.cta);
    f.warp = w->index;
  }
  source_of(pc, f);
  findings.push_back(std::move(f));
}

void Machine::fatal(const std::string& kind, const std::string& message) { throw Fatal(kind, message); }

static std::string waiting_of(Machine& k, Warp& w) {
  static const char* why[] = {"runs", "", "bar.sync", "barrier.cluster.wait", "the other threads of its warp",
                              "tcgen05.alloc", "setmaxnreg", "done"};
  Finding f;
  k.source_of((int)w.pc, f);
  std::string place = format(" (PTX line %d%s%s)", f.line, f.source.empty() ? "" : ", ", f.source.c_str());
  if (w.wait == Wait::Mbarrier && w.waiting_for) {
    Mbarrier& b = *w.waiting_for;
    std::string s = format("%s waits for phase %u of the mbarrier at shared offset %u of CTA rank %u: %u of %u arrivals and %lld bytes are missing%s",
                           w.name().c_str(), w.waiting_phase, b.address, b.rank, b.pending, b.count, (long long)b.tx, place.c_str());
    return s;
  }
  if (w.wait == Wait::NamedBarrier) {
    NamedBarrier& b = w.cta->named[w.waiting_on];
    return format("%s waits at barrier %u: %u of %u threads have come%s", w.name().c_str(), w.waiting_on, b.arrived, b.expected, place.c_str());
  }
  return format("%s waits for %s%s", w.name().c_str(), why[(int)w.wait], place.c_str());
}

// PTX lines of instructions that arrive on a barrier at the same shared offset are not known statically,
// so the report names what each waiting warp waits for; the one that waits for nobody's barrier is the clue.
void Machine::deadlock() {
  std::string text = "nothing can run any more:";
  Warp* first = nullptr;
  int shown = 0;
  for (auto& c : resident)
    for (auto& w : c->warps) {
      if (w->wait == Wait::Done) continue;
      if (!first) first = w.get();
      if (shown++ < 24) text += "\n    " + waiting_of(*this, *w);
    }
  if (shown > 24) text += format("\n    (%d more)", shown - 24);
  bool registers = false;
  for (auto& c : resident) for (auto& w : c->warps) registers |= w->wait == Wait::Registers;
  if (registers) report("registers", "setmaxnreg.inc waits for registers that no warp gives back", first, first ? (int)first->pc : -1);
  report("deadlock", text, first, first ? (int)first->pc : -1);
  throw Fatal("", "");
}

}  // namespace emu
