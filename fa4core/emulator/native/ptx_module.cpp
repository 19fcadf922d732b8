// The PTX parser: what stands outside of kernels, and declarations. Grammar: PTX ISA, "State
// Spaces, Types, and Variables", "Directives".
#include <cstdlib>

#include "parser.h"

namespace emu {

void Parser::run() {
  for (;;) {
    skip();
    if (at >= s.size()) break;
    if (!eat('.'))
      fail(format("a directive expected, found '%.20s'", std::string(s.substr(at, 20)).c_str()));
    std::string d = directive();
    if (d == "version" || d == "target" || d == "address_size") {
      while (at < s.size() && peek() != '\n') at++;
    } else if (d == "visible" || d == "weak" || d == "extern" || d == "common") {
      continue;
    } else if (d == "entry") entry_decl();
    else if (d == "func") func_decl();
    else if (d == "shared" || d == "global" || d == "const") variable(d);
    else if (d == "file") {
      int n = (int)integer();
      skip();
      expect('"');
      size_t b = at;
      while (peek() != '"') at++;
      m.files[n] = std::string(s.substr(b, at - b));
      at++;
      while (at < s.size() && peek() != '\n') at++;
    } else if (d == "section") {
      name();
      skip_block();
    } else if (d == "pragma" || d == "alias") skip_statement();
    else fail("unknown directive ." + d);
  }
}

void Parser::func_decl() {  // only declarations and unused bodies; a call is refused when executed
  while (peek() != ';' && peek() != '{') {
    if (peek() == '\n') line++;
    at++;
  }
  if (peek() == ';') at++;
  else skip_block();
}

void Parser::entry_decl() {
  Entry e;
  e.name = name();
  u32 offset = 0;
  if (eat('(')) {
    while (!eat(')')) {
      expect('.');
      directive();  // param
      u32 align = 0, size = 0;
      std::string n;
      while (eat('.')) {
        std::string t = directive();
        if (t == "align") align = (u32)integer();
        else if (t == "ptr" || t == "global" || t == "shared" || t == "const") continue;
        else { size = (u32)atoi(t.c_str() + 1) / 8; }
      }
      n = name();
      u64 count = 1;
      if (eat('[')) {
        count = (u64)integer();
        expect(']');
      }
      if (!align) align = size;
      offset = (offset + align - 1) / align * align;
      e.params.push_back({n, offset, (u32)(size * count)});
      offset += (u32)(size * count);
      eat(',');
    }
  }
  e.param_bytes = offset;
  for (;;) {
    skip();
    if (peek() == ';') {
      at++;
      return;
    }
    if (peek() == '{') break;
    expect('.');
    std::string d = directive();
    std::vector<i64> v;
    skip();
    while (isdigit((u8)peek())) {
      v.push_back(integer());
      eat(',');
      skip();
    }
    if (d == "maxnreg") e.max_regs = (int)v[0];
    if (d == "minnctapersm") e.min_ctas = (int)v[0];
    if (d == "reqntid") {
      e.required_threads = 1;
      for (i64 x : v) e.required_threads *= (int)x;
    }
    if (d == "pragma") skip_statement();
  }
  if (e.name != want) {
    skip_block();
    return;
  }
  entry = &(m.entries[e.name] = std::move(e));
  for (auto& [n, v] : m.globals) (void)n, (void)v;
  body();
  entry = nullptr;
}

void Parser::variable(const std::string& space) {
  Variable v;
  v.align = 1;
  u32 size = 0;
  while (eat('.')) {
    std::string t = directive();
    if (t == "align") v.align = (u32)integer();
    else if (t == "attribute") {
      expect('(');
      while (!eat(')')) at++;
    } else if (t == "v2" || t == "v4") size = (u32)(t[1] - '0');
    else size = (size ? size : 1) * (u32)atoi(t.c_str() + 1) / 8;
  }
  v.name = name();
  u64 count = 1;
  bool unsized_ = false;
  while (eat('[')) {
    skip();
    if (peek() == ']') {
      unsized_ = true;
      count = 0;
    } else count *= (u64)integer();
    expect(']');
  }
  v.bytes = size * count;
  if (v.align < size) v.align = size;
  if (eat('=')) {
    std::vector<u64> values;
    if (eat('{')) {
      while (!eat('}')) {
        values.push_back((u64)integer());
        eat(',');
      }
    } else values.push_back((u64)integer());
    v.init.resize(v.bytes);
    for (size_t i = 0; i < values.size(); i++) std::memcpy(&v.init[i * size], &values[i], size);
  }
  expect(';');
  if (space == "shared") {
    if (entry) {
      u32 a = (entry->shared_bytes + v.align - 1) / v.align * v.align;
      v.address = a;
      entry->shared_bytes = a + (u32)v.bytes;
      entry->shared[v.name] = v;
    } else {  // module scope: offsets are laid out when the entry is known
      v.address = unsized_ ? ~0ull : 0;
      m.globals["shared " + v.name] = v;
    }
  } else if (space == "local" || space == "param") {  // arguments of calls live in local memory
    auto f = entry->local.find(v.name);
    if (f != entry->local.end() && f->second.bytes >= v.bytes) return;
    u32 a = (entry->local_bytes + v.align - 1) / v.align * v.align;
    v.address = a;
    entry->local_bytes = a + (u32)v.bytes;
    entry->local[v.name] = v;
  } else {
    m.storage.emplace_back(v.bytes + 256);
    u64 base = ((u64)m.storage.back().data() + 255) & ~255ull;
    if (v.init.size()) std::memcpy((void*)base, v.init.data(), v.init.size());
    v.address = base;
    m.globals[v.name] = v;
  }
}

void Parser::declare_registers() {
  expect('.');
  std::string t = directive();
  if (t == "v2" || t == "v4") fail("vector registers are not supported");
  int width = t == "pred" ? 1 : atoi(t.c_str() + 1);
  do {
    std::string n = name();
    int count = 1;
    bool family = eat('<');
    if (family) {
      count = (int)integer();
      expect('>');
    }
    int& next = width == 1 ? entry->predicates : entry->planes;
    (family ? scopes[scope].families : scopes[scope].regs)[n] = {next, width};
    next += count * (width <= 32 ? 1 : width / 32);
  } while (eat(','));
  expect(';');
}

std::unique_ptr<Module> parse(const std::string& text, const std::string& kernel) {
  auto m = std::make_unique<Module>();
  m->text = text;
  std::string_view t = m->text;
  for (size_t b = 0; b <= t.size();) {
    size_t e = t.find('\n', b);
    if (e == std::string_view::npos) e = t.size();
    m->lines.push_back(t.substr(b, e - b));
    b = e + 1;
  }
  Parser(*m, kernel).run();
  if (!m->entries.count(kernel)) throw Fatal("instruction", "the module has no entry " + kernel);
  Entry& e = m->entries[kernel];
  for (auto& [n, v] : m->globals)  // module-scope shared variables: static ones first
    if (n.rfind("shared ", 0) == 0 && v.address != ~0ull) {
      v.address = (e.shared_bytes + v.align - 1) / v.align * v.align;
      e.shared_bytes = (u32)(v.address + v.bytes);
      e.shared[v.name] = v;
    }
  for (auto& [n, v] : m->globals)
    if (n.rfind("shared ", 0) == 0 && v.address == ~0ull) {
      Variable d = v;
      d.address = (e.shared_bytes + 1023) / 1024 * 1024;
      e.shared[d.name] = d;
      e.dynamic_shared = true;
    }
  return m;
}

}  // namespace emu
