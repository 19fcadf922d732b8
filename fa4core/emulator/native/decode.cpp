// Statements -> instructions. Opcode families register their decode functions; what none of them
// knows becomes an instruction that reports itself when (and only when) it is executed.
#include "machine.h"
#include "program.h"

namespace emu {

static const std::unordered_map<std::string_view, Type>& type_names() {
  static const std::unordered_map<std::string_view, Type> names = {
      {"b8", B8}, {"u8", U8}, {"s8", S8}, {"b16", B16}, {"u16", U16}, {"s16", S16}, {"f16", F16},
      {"bf16", BF16}, {"b32", B32}, {"u32", U32}, {"s32", S32}, {"f32", F32}, {"tf32", TF32},
      {"f16x2", F16X2}, {"bf16x2", BF16X2}, {"b64", B64}, {"u64", U64}, {"s64", S64}, {"f64", F64},
      {"f32x2", F32X2}, {"b128", B128}, {"e4m3", E4M3}, {"e5m2", E5M2}, {"e4m3x2", E4M3X2},
      {"e5m2x2", E5M2X2}, {"e2m1x2", E2M1X2}, {"ue8m0x2", E8M0X2}, {"pred", PRED}};
  return names;
}

Type type_of(std::string_view mod) {
  auto f = type_names().find(mod);
  return f == type_names().end() ? NOTYPE : f->second;
}

int type_bits(Type t) {
  switch (t) {
    case B8: case U8: case S8: case E4M3: case E5M2: return 8;
    case B16: case U16: case S16: case F16: case BF16: case E4M3X2: case E5M2X2: case E8M0X2: return 16;
    case E2M1X2: return 8;
    case B64: case U64: case S64: case F64: case F32X2: return 64;
    case B128: return 128;
    case PRED: return 1;
    default: return 32;
  }
}
bool is_signed(Type t) { return t == S8 || t == S16 || t == S32 || t == S64; }
bool is_float(Type t) {
  return t == F16 || t == BF16 || t == F32 || t == F64 || t == F16X2 || t == BF16X2 || t == F32X2 || t == TF32;
}

u32 Program::constant(u32 v) {
  auto [f, fresh] = constant_planes.try_emplace(v, planes);
  if (fresh) { constants.push_back({planes, v}); planes++; }
  return f->second;
}

u32 Program::constant64(u64 v) {
  auto [f, fresh] = constant_planes64.try_emplace(v, planes);
  if (fresh) {
    constants.push_back({planes, (u32)v});
    constants.push_back({planes + 1, (u32)(v >> 32)});
    planes += 2;
  }
  return f->second;
}

u32 Program::special(const std::string& name) {
  for (auto& [n, plane] : specials)
    if (n == name) return plane;
  specials.push_back({name, planes});
  planes += 2;  // some are 64 bits wide
  return planes - 2;
}

const Operand& Decoder::op(size_t i) const {
  if (i >= st.ops.size()) unknown("too few operands");
  return st.ops[i];
}

void Decoder::unknown(const std::string& why) const {
  throw Fatal("instruction", "not understood: " + st.text() + (why.empty() ? "" : " (" + why + ")"), st.line);
}

void Decoder::used(u32 plane, int width) {
  for (int b = 0; b < (width <= 32 ? 32 : width); b += 32) use->push_back(plane + b / 32);
}

u32 Decoder::src(const Operand& o, Type t) {
  int width = type_bits(t);
  switch (o.kind) {
    case Operand::Reg:
      if (o.negate) unknown("negated register");
      used((u32)o.slot, width > o.width ? o.width : width);
      if (width > 32 && o.width <= 32) unknown("register narrower than the type");
      return (u32)o.slot;
    case Operand::Int:
    case Operand::Float: {
      u64 v = o.value;
      if (o.kind == Operand::Float && !o.float_bits) {
        if (t == F64) v = bits<u64>(o.real); else v = bits<u32>((float)o.real);
      } else if (o.kind == Operand::Float && o.float_bits == 64 && width == 32) {
        v = bits<u32>((float)bits<double>(o.value));
      } else if (o.kind == Operand::Int && (t == F32 || t == F64)) {
        v = t == F64 ? bits<u64>((double)(i64)o.value) : (u64)bits<u32>((float)(i64)o.value);
      }
      if (width == 64) return p.constant64(v);
      if (width == 16) v &= 0xffff;
      if (width == 8) v &= 0xff;
      return p.constant((u32)v);
    }
    case Operand::Special: return p.special(o.name);
    case Operand::Symbol: {
      u64 v = 0;
      const Entry& e = *p.entry;
      bool found = false;
      for (auto& q : e.params)
        if (q.name == o.name) v = PARAM_WINDOW + q.offset, found = true;
      if (auto f = e.shared.find(o.name); f != e.shared.end())  // the CTA's rank is part of it
        return p.special("shared+" + std::to_string(f->second.address + (u64)o.offset));
      if (auto g = e.local.find(o.name); g != e.local.end()) v = g->second.address, found = true;
      else if (auto h = p.module->globals.find(o.name); h != p.module->globals.end())
        v = h->second.address, found = true;
      if (!found) unknown("no such name: " + o.name);
      v += (u64)o.offset;
      return width == 64 ? p.constant64(v) : p.constant((u32)v);
    }
    default: unknown("operand of the wrong kind");
  }
}

u32 Decoder::dst(const Operand& o, Type t) {
  if (o.kind == Operand::Sink) return NONE;
  if (o.kind != Operand::Reg) unknown("destination is no register");
  used((u32)o.slot, std::min(type_bits(t), o.width));
  return (u32)o.slot;
}

u32 Decoder::pred(const Operand& o) {
  if (o.kind == Operand::Int) return o.value ? p.predicates - 2 : p.predicates - 1;
  if (o.kind == Operand::Sink) return NONE;
  if (o.kind != Operand::Pred) unknown("a predicate expected");
  return (u32)o.slot;
}

bool Decoder::address_is_64(size_t i) const {
  const Operand& b = op(i).parts.at(0);
  return b.kind != Operand::Reg || b.width == 64;
}

u32 Decoder::address(size_t i) {  // always two planes: a 32-bit base gets a zero high plane via a[5]
  const Operand& o = op(i);
  if (o.kind != Operand::Address) unknown("an address expected");
  ins.offset = (i32)o.offset;
  const Operand& b = o.parts[0];
  if (b.kind == Operand::Reg && b.width == 32) return src(b, B32);
  return src(b, B64);
}

std::vector<u32> Decoder::list(size_t i, Type t, bool write) {
  std::vector<u32> r;
  const Operand& o = op(i);
  if (o.kind != Operand::Vector) {
    r.push_back(write ? dst(o, t) : src(o, t));
    return r;
  }
  for (auto& q : o.parts) r.push_back(write ? dst(q, t) : src(q, t));
  return r;
}

Extra& Decoder::extra() {
  if (!ins.x) { p.extras.emplace_back(); ins.x = &p.extras.back(); ins.x->text = st.text(); }
  return *ins.x;
}

std::vector<Type> Decoder::types() const {
  std::vector<Type> r;
  for (auto& m : st.mods)
    if (Type t = type_of(m); t != NOTYPE) r.push_back(t);
  return r;
}

Type Decoder::type(int from_end) const {
  auto t = types();
  if ((int)t.size() <= from_end) unknown("type missing");
  return t[t.size() - 1 - (size_t)from_end];
}

static void refuse(Warp&, const Ins& i, Mask) { throw Fatal("instruction", i.x->text); }

std::unique_ptr<Program> decode(std::unique_ptr<Module> m, const std::string& kernel) {
  static const Table table = [] {
    Table t;
    register_integer(t); register_logic(t); register_float(t); register_half(t);
    register_convert(t); register_memory(t); register_warp(t); register_barrier(t);
    register_bulk(t); register_tensor(t); register_mma(t); register_atomic(t); register_cluster(t);
    return t;
  }();
  auto p = std::make_unique<Program>();
  p->module = std::move(m);
  const Entry& e = p->module->entries.at(kernel);
  p->entry = &e;
  p->planes = (u32)e.planes;
  p->predicates = (u32)e.predicates + 2;
  p->local_bytes = e.local_bytes;
  std::unordered_map<std::string, u32> kinds;
  p->code.resize(e.code.size() + 1);
  p->uses.resize(e.code.size() + 1);
  Statement end;
  end.opcode = "exit";
  for (size_t k = 0; k <= e.code.size(); k++) {
    const Statement& st = k < e.code.size() ? e.code[k] : end;
    Ins& ins = p->code[k];
    ins.guard = st.guard;
    ins.guard_negate = st.guard_negate;
    std::string text = st.text();
    auto [f, fresh] = kinds.try_emplace(text, (u32)p->kinds.size());
    if (fresh) p->kinds.push_back(text);
    ins.kind = f->second;
    Decoder d{*p, st, ins, &p->uses[k]};
    if (st.opcode == "tcgen05") p->uses_tensor_memory = true;
    if (st.opcode == "wgmma") p->uses_wgmma = true;
    try {
      auto g = table.find(st.opcode);
      if (g == table.end()) d.unknown();
      g->second(d);
    } catch (Fatal& err) {
      d.extra().text = err.what();
      ins.fn = refuse;
    }
  }
  return p;
}

}  // namespace emu
