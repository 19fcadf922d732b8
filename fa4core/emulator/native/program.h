// The decoded form of a kernel: one `Ins` per PTX statement, with a handler and its operands resolved
// to planes. A plane is one 32-bit register of all 32 lanes (128 bytes); a 64-bit register is two
// planes (low, high), a predicate is one Mask. Constants and special registers are planes too, filled
// in when a warp starts, so a handler never asks what kind of operand it has.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <unordered_map>

#include "common.h"
#include "ptx.h"

namespace emu {

struct Warp;
struct Ins;
using Handler = void (*)(Warp&, const Ins&, Mask);

constexpr u32 NONE = 0xffffffffu;  // no operand

struct Extra {  // what only the rarer instructions need
  std::vector<u32> regs;            // planes of a vector operand
  std::vector<u32> regs2;
  i64 offset = 0;                   // of the address
  int n[12] = {};                   // meaning is the decoder's and its handler's
  std::string text;
};

struct Ins {
  Handler fn = nullptr;
  u32 a[6] = {NONE, NONE, NONE, NONE, NONE, NONE};
  int guard = -1;
  bool guard_negate = false;
  u8 bytes = 0;                     // memory width and the like
  i32 n = 0;                        // small parameter of the handler
  i32 offset = 0;                   // of an address
  Extra* x = nullptr;
  u32 kind = 0;                     // index into Program::kinds, for statistics
};

enum Type : u8 { B8, U8, S8, B16, U16, S16, F16, BF16, B32, U32, S32, F32, TF32, F16X2, BF16X2, B64, U64,
                 S64, F64, F32X2, B128, E4M3, E5M2, E4M3X2, E5M2X2, E2M1X2, E8M0X2, PRED, NOTYPE };
Type type_of(std::string_view mod);  // NOTYPE if it is no type
int type_bits(Type t);
bool is_signed(Type t);
bool is_float(Type t);

struct Program {
  std::unique_ptr<Module> module;
  const Entry* entry = nullptr;
  std::vector<Ins> code;
  std::vector<std::vector<u32>> uses;  // per instruction: planes read or written, for pending loads
  std::deque<Extra> extras;
  std::vector<std::string> kinds;
  std::vector<std::pair<u32, u32>> constants;          // plane, value
  std::vector<std::pair<std::string, u32>> specials;   // name, plane
  std::unordered_map<u64, u32> constant_planes, constant_planes64;
  u32 planes = 0, predicates = 0;   // predicates: two more than the entry's: always true, false
  u32 local_bytes = 0;
  bool uses_tensor_memory = false, uses_wgmma = false;
  u32 constant(u32 v);
  u32 constant64(u64 v);
  u32 special(const std::string& name);
};

// What a decode function works with: one statement and helpers that turn operands into planes.
struct Decoder {
  Program& p;
  const Statement& st;
  Ins& ins;
  std::vector<u32>* use;

  size_t count() const { return st.ops.size(); }
  const Operand& op(size_t i) const;
  [[noreturn]] void unknown(const std::string& why = "") const;
  void used(u32 plane, int width);
  u32 src(size_t i, Type t) { return src(op(i), t); }
  u32 src(const Operand& o, Type t);
  u32 dst(size_t i, Type t) { return dst(op(i), t); }
  u32 dst(const Operand& o, Type t);       // NONE for '_'
  u32 pred(size_t i) { return pred(op(i)); }
  u32 pred(const Operand& o);              // predicate number; negation is not allowed here
  u32 address(size_t i);                   // plane (pair) of the base; sets ins.offset
  bool address_is_64(size_t i) const;
  std::vector<u32> list(size_t i, Type t, bool write);
  Extra& extra();
  bool has(std::string_view m) const { return st.has(m); }
  Type type(int from_end = 0) const;       // the nth type modifier counted from the end
  std::vector<Type> types() const;
};

using Decode = void (*)(Decoder&);
using Table = std::unordered_map<std::string, Decode>;
void register_integer(Table&);
void register_logic(Table&);
void register_float(Table&);
void register_half(Table&);
void register_convert(Table&);
void register_memory(Table&);
void register_warp(Table&);
void register_barrier(Table&);
void register_bulk(Table&);
void register_tensor(Table&);
void register_mma(Table&);
void register_atomic(Table&);
void register_cluster(Table&);

// Opcodes that several families share (add, min, setp, ...) ask these first.
bool decode_float(Decoder&);
bool decode_half(Decoder&);

std::unique_ptr<Program> decode(std::unique_ptr<Module> m, const std::string& kernel);

}  // namespace emu
