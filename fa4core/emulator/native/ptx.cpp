// The PTX parser. See ptx.h. Grammar: PTX ISA, chapters "Syntax", "State Spaces, Types, and
// Variables", "Directives"; inline assembly arrives as nested { } scopes with their own names.
#include "ptx.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace emu {

std::string format(const char* fmt, ...) {
  char buffer[2048];
  va_list args;
  va_start(args, fmt);
  vsnprintf(buffer, sizeof buffer, fmt, args);
  va_end(args);
  return buffer;
}

std::string Statement::text() const {
  std::string s = opcode;
  for (auto& m : mods) s += "." + m;
  return s;
}

bool Statement::has(std::string_view mod) const {
  for (auto& m : mods)
    if (m == mod) return true;
  return false;
}

namespace {

bool is_name_start(char c) { return isalpha((u8)c) || c == '_' || c == '$' || c == '%'; }
bool is_name(char c) { return isalnum((u8)c) || c == '_' || c == '$' || c == '%'; }

struct Scope {
  std::unordered_map<std::string, std::pair<int, int>> regs;  // name -> slot, width (1: predicate)
  std::unordered_map<std::string, std::pair<int, int>> families;  // prefix of %r<N> -> slot, width
  std::unordered_map<std::string, int> labels;
  int parent = -1;
};

class Parser {
 public:
  Parser(Module& m, const std::string& kernel) : m(m), want(kernel), s(m.text) {}
  void run();

 private:
  Module& m;
  std::string want;
  std::string_view s;
  size_t at = 0;
  int line = 1;
  Entry* entry = nullptr;
  std::vector<Scope> scopes;
  int scope = -1;
  int file = 0, source_line = 0;
  struct Jump { size_t statement; size_t operand; int scope; };
  std::vector<Jump> jumps;

  [[noreturn]] void fail(const std::string& what) {
    throw Fatal("instruction", "cannot parse PTX: " + what, line);
  }
  char peek(size_t n = 0) { return at + n < s.size() ? s[at + n] : 0; }
  void skip();
  bool eat(char c) {
    skip();
    if (peek() != c) return false;
    at++;
    return true;
  }
  void expect(char c) {
    if (!eat(c)) fail(format("expected '%c' before '%.20s'", c, std::string(s.substr(at, 20)).c_str()));
  }
  std::string name();
  std::string directive();  // after '.', with "::"
  i64 integer();
  void skip_statement() { while (at < s.size() && peek() != ';') { if (peek() == '\n') line++; at++; } at++; }
  void skip_block();
  void entry_decl();
  void func_decl();
  void body();
  void declare_registers();
  void variable(const std::string& space);
  void loc();
  void statement();
  Operand operand();
  Operand number();
  bool lookup(const std::string& n, Operand& o);
  void resolve_jumps();
};

void Parser::skip() {
  for (;;) {
    char c = peek();
    if (c == '\n') { line++; at++; }
    else if (c == ' ' || c == '\t' || c == '\r') at++;
    else if (c == '/' && peek(1) == '/') { while (at < s.size() && peek() != '\n') at++; }
    else if (c == '/' && peek(1) == '*') {
      while (at < s.size() && !(peek() == '*' && peek(1) == '/')) { if (peek() == '\n') line++; at++; }
      at += 2;
    } else return;
  }
}

std::string Parser::name() {
  skip();
  if (!is_name_start(peek())) fail(format("a name expected, found '%.20s'", std::string(s.substr(at, 20)).c_str()));
  size_t b = at++;
  while (is_name(peek())) at++;
  return std::string(s.substr(b, at - b));
}

std::string Parser::directive() {
  size_t b = at;
  while (is_name(peek()) || (peek() == ':' && peek(1) == ':')) at += peek() == ':' ? 2 : 1;
  return std::string(s.substr(b, at - b));
}

i64 Parser::integer() {
  skip();
  char* end;
  const char* p = s.data() + at;
  bool neg = *p == '-';
  if (neg) p++;
  u64 v = strtoull(p, &end, 0);
  if (end == p) fail("an integer expected");
  if (*end == 'U') end++;
  at = end - s.data();
  return neg ? -(i64)v : (i64)v;
}

void Parser::skip_block() {
  expect('{');
  int depth = 1;
  while (depth && at < s.size()) {
    char c = s[at++];
    if (c == '\n') line++;
    depth += (c == '{') - (c == '}');
  }
}

void Parser::run() {
  for (;;) {
    skip();
    if (at >= s.size()) break;
    if (!eat('.')) fail(format("a directive expected, found '%.20s'", std::string(s.substr(at, 20)).c_str()));
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
      name(); skip_block();
    } else if (d == "pragma" || d == "alias") skip_statement();
    else fail("unknown directive ." + d);
  }
}

void Parser::func_decl() {  // only declarations and unused bodies; a call is refused when executed
  while (peek() != ';' && peek() != '{') { if (peek() == '\n') line++; at++; }
  if (peek() == ';') at++; else skip_block();
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
      if (eat('[')) { count = (u64)integer(); expect(']'); }
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
    if (peek() == ';') { at++; return; }
    if (peek() == '{') break;
    expect('.');
    std::string d = directive();
    std::vector<i64> v;
    skip();
    while (isdigit((u8)peek())) { v.push_back(integer()); eat(','); skip(); }
    if (d == "maxnreg") e.max_regs = (int)v[0];
    if (d == "minnctapersm") e.min_ctas = (int)v[0];
    if (d == "reqntid") { e.required_threads = 1; for (i64 x : v) e.required_threads *= (int)x; }
    if (d == "pragma") skip_statement();
  }
  if (e.name != want) { skip_block(); return; }
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
    else if (t == "attribute") { expect('('); while (!eat(')')) at++; }
    else if (t == "v2" || t == "v4") size = (u32)(t[1] - '0');
    else size = (size ? size : 1) * (u32)atoi(t.c_str() + 1) / 8;
  }
  v.name = name();
  u64 count = 1;
  bool unsized_ = false;
  while (eat('[')) {
    skip();
    if (peek() == ']') { unsized_ = true; count = 0; } else count *= (u64)integer();
    expect(']');
  }
  v.bytes = size * count;
  if (v.align < size) v.align = size;
  if (eat('=')) {
    std::vector<u64> values;
    if (eat('{')) {
      while (!eat('}')) { values.push_back((u64)integer()); eat(','); }
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
  } else if (space == "local") {
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

void Parser::loc() {
  file = (int)integer();
  source_line = (int)integer();
  while (at < s.size() && peek() != '\n') at++;
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
    if (family) { count = (int)integer(); expect('>'); }
    int& next = width == 1 ? entry->predicates : entry->planes;
    (family ? scopes[scope].families : scopes[scope].regs)[n] = {next, width};
    next += count * (width <= 32 ? 1 : width / 32);
  } while (eat(','));
  expect(';');
}

bool Parser::lookup(const std::string& n, Operand& o) {
  size_t digits = n.size();
  while (digits && isdigit((u8)n[digits - 1])) digits--;
  std::string prefix = n.substr(0, digits);
  for (int i = scope; i >= 0; i = scopes[i].parent) {
    auto& sc = scopes[i];
    if (auto f = sc.regs.find(n); f != sc.regs.end()) {
      o.slot = f->second.first, o.width = f->second.second;
      o.kind = o.width == 1 ? Operand::Pred : Operand::Reg;
      return true;
    }
    if (digits < n.size())
      if (auto f = sc.families.find(prefix); f != sc.families.end()) {
        o.width = f->second.second;
        o.slot = f->second.first + atoi(n.c_str() + digits) * (o.width <= 32 ? 1 : o.width / 32);
        o.kind = o.width == 1 ? Operand::Pred : Operand::Reg;
        return true;
      }
  }
  return false;
}

Operand Parser::number() {
  Operand o;
  const char* p = s.data() + at;
  bool neg = *p == '-';
  if (neg) p++;
  if (p[0] == '0' && (p[1] == 'f' || p[1] == 'F' || p[1] == 'd' || p[1] == 'D') ) {
    o.kind = Operand::Float;
    o.float_bits = (p[1] | 32) == 'f' ? 32 : 64;
    std::string hex(p + 2, o.float_bits / 4);
    o.value = strtoull(hex.c_str(), nullptr, 16);
    if (neg) o.value ^= 1ull << (o.float_bits - 1);
    at = p + 2 + o.float_bits / 4 - s.data();
    return o;
  }
  char *end_int, *end_real;
  u64 v = strtoull(p, &end_int, 0);
  double r = strtod(p, &end_real);
  bool hex = p[0] == '0' && (p[1] | 32) == 'x';
  if (!hex && end_real > end_int) {
    o.kind = Operand::Float;
    o.real = neg ? -r : r;
    at = end_real - s.data();
  } else {
    if (end_int == p) fail("a number expected");
    o.kind = Operand::Int;
    o.value = neg ? (u64)(-(i64)v) : v;
    at = end_int - s.data();
    if (peek() == 'U') at++;
  }
  return o;
}

Operand Parser::operand() {
  Operand o;
  skip();
  char c = peek();
  if (c == '{') {
    at++;
    o.kind = Operand::Vector;
    while (!eat('}')) { o.parts.push_back(operand()); eat(','); }
    return o;
  }
  if (c == '[') {
    at++;
    o.kind = Operand::Address;
    o.parts.push_back(operand());
    if (o.parts[0].kind == Operand::Int) { o.offset = (i64)o.parts[0].value; o.parts[0].value = 0; }
    if (o.parts[0].kind == Operand::Symbol) o.offset = o.parts[0].offset, o.parts[0].offset = 0;
    if (eat('+')) o.offset += integer();
    else { skip(); if (peek() == '-') o.offset += integer(); }
    while (eat(',')) o.parts.push_back(operand());
    expect(']');
    return o;
  }
  if (c == '!') { at++; o = operand(); o.negate = true; return o; }
  if (isdigit((u8)c) || (c == '-' && (isdigit((u8)peek(1)) || peek(1) == '.'))) return number();
  if (c == '-') { at++; o = operand(); o.negate = true; return o; }
  if (c == '(') fail("calls are not supported");
  std::string n = name();
  if (n == "_") o.kind = Operand::Sink;
  else if (!lookup(n, o)) {
    if (n[0] == '%') {
      o.kind = Operand::Special;
      o.name = n.substr(1);
      if (peek() == '.') { at++; o.name += "." + name(); }
    } else {
      o.kind = Operand::Symbol;
      o.name = n;
      skip();
      if (peek() == '+') { at++; o.offset = integer(); }
    }
  }
  skip();
  if (peek() == '|') {
    at++;
    Operand p = operand();
    if (p.kind == Operand::Pred) o.pair = p.slot;
    else if (p.kind != Operand::Sink) fail("a predicate expected behind '|'");
  }
  return o;
}

void Parser::statement() {
  Statement st;
  skip();
  st.line = line;
  st.file = file;
  st.source_line = source_line;
  if (eat('@')) {
    if (eat('!')) st.guard_negate = true;
    Operand p = operand();
    if (p.kind != Operand::Pred) fail("a predicate expected behind '@'");
    st.guard = p.slot;
    skip();
  }
  st.opcode = name();
  while (peek() == '.') { at++; st.mods.push_back(directive()); }
  if (st.opcode == "call") {
    skip_statement();
    entry->code.push_back(std::move(st));
    return;
  }
  while (!eat(';')) {
    st.ops.push_back(operand());
    skip();
    if (peek() != ';') { if (!eat(',')) fail("',' or ';' expected in " + st.text()); }
  }
  if (st.opcode == "bra")
    jumps.push_back({entry->code.size(), st.ops.size() - 1, scope});
  entry->code.push_back(std::move(st));
}

void Parser::resolve_jumps() {
  for (auto& j : jumps) {
    Operand& o = entry->code[j.statement].ops[j.operand];
    int target = -1;
    for (int i = j.scope; i >= 0 && target < 0; i = scopes[i].parent)
      if (auto f = scopes[i].labels.find(o.name); f != scopes[i].labels.end()) target = f->second;
    if (target < 0) throw Fatal("instruction", "no label " + o.name, entry->code[j.statement].line);
    o.kind = Operand::Label;
    o.value = (u64)target;
  }
}

void Parser::body() {
  expect('{');
  scopes.push_back({});
  scope = 0;
  while (scope >= 0) {
    skip();
    if (at >= s.size()) fail("the body does not end");
    char c = peek();
    if (c == '{') { at++; scopes.push_back({}); scopes.back().parent = scope; scope = (int)scopes.size() - 1; continue; }
    if (c == '}') { at++; scope = scopes[scope].parent; continue; }
    if (c == ';') { at++; continue; }
    if (c == '.') {
      at++;
      std::string d = directive();
      if (d == "reg") declare_registers();
      else if (d == "loc") loc();
      else if (d == "pragma") skip_statement();
      else if (d == "local" || d == "shared") variable(d);
      else fail("unknown directive ." + d + " in a body");
      continue;
    }
    if (is_name_start(c)) {  // a label?
      size_t save = at;
      std::string n = name();
      skip();
      if (peek() == ':' && peek(1) != ':') { at++; scopes[scope].labels[n] = (int)entry->code.size(); continue; }
      at = save;
    }
    statement();
  }
  resolve_jumps();
}

}  // namespace

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
