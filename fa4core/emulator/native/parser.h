// The PTX parser, shared by ptx.cpp (statements) and ptx_module.cpp (declarations).
#pragma once
#include "ptx.h"

namespace emu {

inline bool is_name_start(char c) { return isalpha((u8)c) || c == '_' || c == '$' || c == '%'; }
inline bool is_name(char c) { return isalnum((u8)c) || c == '_' || c == '$' || c == '%'; }

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
  struct Jump {
    size_t statement;
    size_t operand;
    int scope;
  };
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
    if (!eat(c))
      fail(format("expected '%c' before '%.20s'", c, std::string(s.substr(at, 20)).c_str()));
  }
  std::string name();
  std::string directive();  // after '.', with "::"
  i64 integer();
  void skip_statement() {
    while (at < s.size() && peek() != ';') {
      if (peek() == '\n') line++;
      at++;
    }
    at++;
  }
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

}  // namespace emu
