// The PTX parser: words, operands, statements and the bodies of kernels. Grammar: PTX ISA,
// "Syntax"; inline assembly arrives as nested { } scopes with their own names.
#include "parser.h"

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

void Parser::skip() {
  for (;;) {
    char c = peek();
    if (c == '\n') {
      line++;
      at++;
    } else if (c == ' ' || c == '\t' || c == '\r') at++;
    else if (c == '/' && peek(1) == '/') {
      while (at < s.size() && peek() != '\n') at++;
    } else if (c == '/' && peek(1) == '*') {
      while (at < s.size() && !(peek() == '*' && peek(1) == '/')) {
        if (peek() == '\n') line++;
        at++;
      }
      at += 2;
    } else return;
  }
}

std::string Parser::name() {
  skip();
  if (!is_name_start(peek()))
    fail(format("a name expected, found '%.20s'", std::string(s.substr(at, 20)).c_str()));
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

void Parser::loc() {
  file = (int)integer();
  source_line = (int)integer();
  while (at < s.size() && peek() != '\n') at++;
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
  if (p[0] == '0' && (p[1] == 'f' || p[1] == 'F' || p[1] == 'd' || p[1] == 'D')) {
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
    while (!eat('}')) {
      o.parts.push_back(operand());
      eat(',');
    }
    return o;
  }
  if (c == '[') {
    at++;
    o.kind = Operand::Address;
    o.parts.push_back(operand());
    if (o.parts[0].kind == Operand::Int) {
      o.offset = (i64)o.parts[0].value;
      o.parts[0].value = 0;
    }
    if (o.parts[0].kind == Operand::Symbol) o.offset = o.parts[0].offset, o.parts[0].offset = 0;
    if (eat('+')) o.offset += integer();
    else {
      skip();
      if (peek() == '-') o.offset += integer();
    }
    while (eat(',')) o.parts.push_back(operand());
    expect(']');
    return o;
  }
  if (c == '!') {
    at++;
    o = operand();
    o.negate = true;
    return o;
  }
  if (isdigit((u8)c) || (c == '-' && (isdigit((u8)peek(1)) || peek(1) == '.'))) return number();
  if (c == '-') {
    at++;
    o = operand();
    o.negate = true;
    return o;
  }
  if (c == '(') fail("calls are not supported");
  std::string n = name();
  if (n == "_") o.kind = Operand::Sink;
  else if (!lookup(n, o)) {
    if (n[0] == '%') {
      o.kind = Operand::Special;
      o.name = n.substr(1);
      if (peek() == '.') {
        at++;
        o.name += "." + name();
      }
    } else {
      o.kind = Operand::Symbol;
      o.name = n;
      skip();
      if (peek() == '+') {
        at++;
        o.offset = integer();
      }
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
  while (peek() == '.') {
    at++;
    st.mods.push_back(directive());
  }
  if (st.opcode == "call") {  // results, callee and arguments as words; see ops_call.cpp
    Operand words;
    words.kind = Operand::Vector;
    while (at < s.size() && peek() != ';') {
      skip();
      if (!is_name_start(peek())) {
        at++;
        continue;
      }
      Operand o;
      o.kind = Operand::Symbol;
      o.name = name();
      words.parts.push_back(o);
    }
    st.ops.push_back(words);
    skip_statement();
    entry->code.push_back(std::move(st));
    return;
  }
  while (!eat(';')) {
    st.ops.push_back(operand());
    skip();
    if (peek() != ';') {
      if (!eat(',')) fail("',' or ';' expected in " + st.text());
    }
  }
  if (st.opcode == "bra") jumps.push_back({entry->code.size(), st.ops.size() - 1, scope});
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
    if (c == '{') {
      at++;
      scopes.push_back({});
      scopes.back().parent = scope;
      scope = (int)scopes.size() - 1;
      continue;
    }
    if (c == '}') {
      at++;
      scope = scopes[scope].parent;
      continue;
    }
    if (c == ';') {
      at++;
      continue;
    }
    if (c == '.') {
      at++;
      std::string d = directive();
      if (d == "reg") declare_registers();
      else if (d == "loc") loc();
      else if (d == "pragma") skip_statement();
      else if (d == "local" || d == "shared" || d == "param") variable(d);
      else fail("unknown directive ." + d + " in a body");
      continue;
    }
    if (is_name_start(c)) {  // a label?
      size_t save = at;
      std::string n = name();
      skip();
      if (peek() == ':' && peek(1) != ':') {
        at++;
        scopes[scope].labels[n] = (int)entry->code.size();
        continue;
      }
      at = save;
    }
    statement();
  }
  resolve_jumps();
}

}  // namespace emu
