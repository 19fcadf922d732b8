// call: only of vprintf, which is what a printf in a kernel becomes. Its arguments lie in a buffer
// in local memory, each at its natural alignment (CUDA C++ Programming Guide, "Formatted output").
#include <cstdio>

#include "lanes.h"
#include "strong.h"

namespace emu {
namespace {

u64 local_word(Warp& w, u32 lane, u64 at) {
  u64 v;
  std::memcpy(&v, w.machine->generic(w, LOCAL_WINDOW + at, 8, false, lane), 8);
  return v;
}

// One conversion (from '%' on) with its argument; moves `buffer` behind the argument.
std::string convert(Warp& w, u32 lane, const std::string& spec, u64& buffer) {
  char kind = spec.back();
  if (kind == '%') return "%";
  bool real = std::string("fFeEgGaA").find(kind) != std::string::npos;
  bool wide = real || kind == 's' || kind == 'p' || spec.find('l') != std::string::npos;
  u32 bytes = wide ? 8 : 4;
  buffer = (buffer + bytes - 1) / bytes * bytes;
  u64 v = 0;
  std::memcpy(&v, w.machine->generic(w, buffer, bytes, false, lane), bytes);
  buffer += bytes;
  char text[512];
  if (real) snprintf(text, sizeof text, spec.c_str(), bits<double>(v));
  else if (kind == 's') snprintf(text, sizeof text, spec.c_str(), (const char*)v);
  else if (wide) snprintf(text, sizeof text, spec.c_str(), v);
  else snprintf(text, sizeof text, spec.c_str(), (u32)v);
  return text;
}

void vprintf_(Warp& w, const Ins& i, Mask m) {
  FOR_LANES (l, m) {
    u64 fmt = local_word(w, l, (u64)i.x->n[0]), buffer = local_word(w, l, (u64)i.x->n[1]);
    std::string out;
    for (u64 p = fmt;; p++) {
      char c = *(const char*)w.machine->generic(w, p, 1, false, l);
      if (!c) break;
      if (c != '%') {
        out += c;
        continue;
      }
      std::string spec = "%";
      do spec += c = *(const char*)w.machine->generic(w, ++p, 1, false, l);
      while (c && std::string("diouxXcsfFeEgGaAp%").find(c) == std::string::npos);
      if (!c) break;
      out += convert(w, l, spec, buffer);
    }
    fwrite(out.data(), 1, out.size(), stdout);
  }
  fflush(stdout);
}

}  // namespace

void decode_call(Decoder& d) {
  auto& words = d.op(0).parts;
  for (size_t k = 0; k < words.size(); k++)
    if (words[k].name == "vprintf" && k + 2 < words.size()) {
      for (size_t a = 0; a < 2; a++) {
        auto f = d.p.entry->local.find(words[k + 1 + a].name);
        if (f == d.p.entry->local.end()) d.unknown("argument");
        d.extra().n[a] = (int)f->second.address;
      }
      d.ins.fn = vprintf_;
      return;
    }
  d.unknown(words.empty() ? "" : "of " + words.back().name);
}

}  // namespace emu
