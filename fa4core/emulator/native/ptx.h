// PTX text -> statements: names resolved to register slots, labels to statement numbers, scopes gone.
// Rules: PTX ISA, "Syntax" and "State spaces, types, and variables". Opcodes are not interpreted here.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common.h"

namespace emu {

struct Operand {
  enum Kind { None, Reg, Pred, Int, Float, Special, Symbol, Address, Vector, Label, Sink } kind = None;
  int slot = -1;     // Reg: first 32-bit plane; Pred: predicate number
  int width = 0;     // Reg: bits (16, 32, 64, 128)
  bool negate = false;  // !p or -x
  u64 value = 0;     // Int, or raw bits of a hexadecimal Float
  int float_bits = 0;  // Float: 32 or 64 if written 0f/0d, 0 if decimal (then `real`)
  double real = 0;
  std::string name;  // Special, Symbol, Label
  i64 offset = 0;    // Address, Symbol
  std::vector<Operand> parts;  // Vector; Address: base first, then TMA's coordinate vector
  int pair = -1;     // d|p: the predicate behind the bar (-1: none)
};

struct Statement {
  std::string opcode;               // without its modifiers
  std::vector<std::string> mods;    // modifiers in order, "::" kept inside one modifier
  std::vector<Operand> ops;
  int guard = -1;                   // predicate number
  bool guard_negate = false;
  int line = 0;                     // in the module's text
  int file = 0, source_line = 0;    // from .loc
  std::string text() const;         // opcode with modifiers
  bool has(std::string_view mod) const;
};

struct Param { std::string name; u32 offset, bytes; };
struct Variable { std::string name; u32 align; u64 bytes; std::vector<u8> init; u64 address = 0; };

struct Entry {
  std::string name;
  std::vector<Param> params;
  u32 param_bytes = 0;
  std::vector<Statement> code;
  std::unordered_map<std::string, Variable> shared, local;  // address: offset in the window
  u32 shared_bytes = 1024, local_bytes = 0;  // static shared (behind the reserved KiB), local depot
  bool dynamic_shared = false;
  int planes = 0, predicates = 0;
  int max_regs = 0, min_ctas = 0, required_threads = 0;
};

struct Module {
  std::string text;
  std::vector<std::string_view> lines;
  std::map<int, std::string> files;
  std::unordered_map<std::string, Variable> globals;
  std::vector<std::vector<u8>> storage;  // behind globals
  std::map<std::string, Entry> entries;
};

// Parses the module; only the body of `kernel` is kept. Throws Fatal("instruction").
std::unique_ptr<Module> parse(const std::string& text, const std::string& kernel);

}  // namespace emu
