// tcgen05.mma, .cp and .commit: an in-order pipe for each issuing warp, run when the scheduler lets
// it or a barrier needs it. PTX ISA: "tcgen05.mma", "Instruction descriptor", "Matrix descriptor",
// "Data path layout organization", "tcgen05.cp", "tcgen05.commit", "Pipelined tcgen05
// instructions".
#include <algorithm>

#include "gemm.h"
#include "lanes.h"
#include "numbers.h"
#include "tensor.h"

namespace emu {
namespace {

enum MmaKind { K_F16, K_TF32, K_F8 };

struct TensorOp {
  enum Kind { Mma, Copy, Commit } kind;
  int pc = 0;
  u32 number = 0;
  FlightShot shot;
  // mma
  u32 d = 0, idesc = 0, a_tmem = 0;
  u64 a = 0, b = 0;
  bool a_in_tmem = false, accumulate = false;
  int group = 1, mma_kind = K_F16, scale_d = 0;
  u32 disabled[8] = {};
  bool masks = false;
  // cp: d, a (descriptor), shape
  int shape = 0;
  // commit
  u32 bar = 0, mask = 0;
};

struct Format {
  int m, n, ks;
  Number a, b;
  bool a_mn, b_mn, f32, neg_a, neg_b;
};

Format format_of(const TensorOp& o) {
  u32 i = o.idesc;
  Format f;
  f.n = (int)(i >> 17 & 63) * 8;
  f.m = (int)(i >> 24 & 31) * 16;
  f.neg_a = i >> 13 & 1, f.neg_b = i >> 14 & 1;
  f.a_mn = i >> 15 & 1, f.b_mn = i >> 16 & 1;
  f.f32 = (i >> 4 & 3) == 1;
  u32 ta = i >> 7 & 7, tb = i >> 10 & 7;
  auto pick = [&](u32 t) {
    if (o.mma_kind == K_TF32) {
      if (t == 2) return Number::TF32;
    } else if (o.mma_kind == K_F16) {
      if (t < 2) return t ? Number::BF16 : Number::F16;
    } else if (t < 2) return t ? Number::E5M2 : Number::E4M3;
    throw Fatal("instruction",
                format("not understood: operand type %u in an instruction descriptor", t));
  };
  f.a = pick(ta), f.b = pick(tb);
  f.ks = 32 / number_bytes(f.a);
  if ((i & 7) || (i >> 4 & 3) > 1)
    throw Fatal("instruction",
                format("not understood: instruction descriptor 0x%x (sparsity or D type)", i));
  bool m_ok = o.group == 1 ? f.m == 64 || f.m == 128 : f.m == 128 || f.m == 256;
  int step = o.group == 2 ? 16 : f.m == 64 ? 8 : 16;
  if (!m_ok || f.n % step || f.n < step || f.n > 256)
    throw Fatal("tmem", format("tcgen05.mma.cta_group::%d with M = %d, N = %d is not allowed",
                               o.group, f.m, f.n));
  return f;
}

struct Pipe : Flight {
  Machine* k;
  std::deque<TensorOp> ops;
  bool listed = false;
  Pipe() { queued = true; }
  void land() override {
    while (!ops.empty()) next();
  }
  void complete() override {}
  bool advance(bool) override {
    if (!ops.empty()) next();
    return ops.empty();
  }
  std::string describe() const override { return "tensor core work of " + warp->name(); }
  void next();
  void mma(const TensorOp* batch, size_t count);
  void one_cta(Cta& t, const TensorOp* batch, size_t count, const Format& f, const float* b,
               int kk);
  void load_a(Cta& t, const TensorOp& o, const Format& f, int rows, float* out, int ld,
              const Who& x);
  void copy(const TensorOp& o);
  void commit(const TensorOp& o);
  Who who(const TensorOp& o) {
    Who x = async_who(*warp, o.shot, warp->comp(TENSOR), o.number);
    x.own = x.comp;
    return x;
  }
  Cta& peer(u32 rank) {
    if (rank >= warp->cluster->ctas.size())
      k->fatal("tmem", "cta_group::2 in a cluster without a peer CTA");
    return *warp->cluster->ctas[rank];
  }
};

constexpr int MAX_K = 256;  // of a batch

void Pipe::next() {
  TensorOp& o = ops.front();
  if (o.kind == TensorOp::Commit) {
    TensorOp c = o;
    ops.pop_front();
    commit(c);
    return;
  }
  if (o.kind == TensorOp::Copy) {
    copy(o);
    ops.pop_front();
    return;
  }
  size_t n = 1;
  int ks = 32 / (o.mma_kind == K_TF32 ? 4 : o.mma_kind == K_F16 ? 2 : 1);
  while (n < ops.size() &&
         (int)(n + 1) * ks <= MAX_K) {  // a chain that accumulates in one place is one product
    const TensorOp& q = ops[n];
    if (q.kind != TensorOp::Mma || q.d != o.d || q.idesc != o.idesc || q.group != o.group ||
        !q.accumulate || q.mma_kind != o.mma_kind || q.scale_d || q.masks || o.masks ||
        q.a_in_tmem != o.a_in_tmem)
      break;
    n++;
  }
  std::vector<TensorOp> batch(ops.begin(), ops.begin() + (long)n);
  ops.erase(ops.begin(), ops.begin() + (long)n);
  mma(batch.data(), n);
}

// A as floats, k-major: out[k * ld + r].
void Pipe::load_a(Cta& t, const TensorOp& o, const Format& f, int rows, float* out, int ld,
                  const Who& x) {
  if (!o.a_in_tmem) {
    Watch w{k, &t, &x, warp, o.pc};
    load_tile(w, tile_of(o.a, f.a_mn, false), f.a, rows, f.ks, out, ld);
  } else {
    u32 column = o.a_tmem & 0xffff, lane0 = o.a_tmem >> 16;
    int per = 4 / number_bytes(f.a), columns = f.ks / per;
    check_columns(*k, t, column, (u32)columns, "tcgen05.mma read", warp, o.pc);
    if (k->race)
      k->tensor_race(t, false, 0, rows == 64 ? 128 : (u32)rows, column, (u32)columns, x, warp,
                     o.pc);
    if (k->uninitialised) {
      if (rows == 64)
        for (u32 q = 0; q < 4; q++)
          tmem_read_check(*k, t, q * 32, 16, column, (u32)columns, warp, o.pc);
      else tmem_read_check(*k, t, 0, (u32)rows, column, (u32)columns, warp, o.pc);
    }
    for (int c = 0; c < columns; c++) {
      const u32* p = &t.tmem[(column + (u32)c) * 128];
      for (int r = 0; r < rows; r++) {
        u32 lane = rows == 64 ? (u32)(r / 16 * 32 + r % 16) : (u32)r, v = p[lane + lane0];
        for (int e = 0; e < per; e++) {
          float y;
          switch (f.a) {
            case Number::BF16: y = bfloat_to_float((u16)(v >> (16 * e))); break;
            case Number::F16: y = half_to_float((u16)(v >> (16 * e))); break;
            case Number::TF32: y = bits<float>(v & ~0x1fffu); break;
            case Number::E4M3: y = e4m3_to_float((u8)(v >> (8 * e))); break;
            default: y = e5m2_to_float((u8)(v >> (8 * e)));
          }
          out[(c * per + e) * ld + r] = y;
        }
      }
    }
  }
  if (f.neg_a)
    for (int q = 0; q < f.ks; q++)
      for (int r = 0; r < rows; r++) out[q * ld + r] = -out[q * ld + r];
}

// The rows of D that lie in one CTA.
void Pipe::one_cta(Cta& t, const TensorOp* batch, size_t count, const Format& f, const float* b,
                   int kk) {
  const TensorOp &first = batch[0], &last = batch[count - 1];
  int rows = f.m / first.group, n = f.n;
  bool halves = first.group == 2 && f.m == 128;  // N is split over the lane halves
  int columns = halves ? n / 2 : n;
  u32 column = first.d & 0xffff;
  Who x = who(last);
  check_columns(*k, t, column, (u32)columns, "tcgen05.mma write", warp, first.pc);
  bool quarter = rows == 64 && !halves;
  if (k->race) {
    if (quarter)
      for (u32 q = 0; q < 4; q++)
        k->tensor_race(t, true, q * 32, 16, column, (u32)columns, x, warp, first.pc);
    else k->tensor_race(t, true, 0, 128, column, (u32)columns, x, warp, first.pc);
  }
  if (k->uninitialised) {
    for (u32 q = 0; q < (quarter ? 4u : 1u); q++) {
      if (first.accumulate)
        tmem_read_check(*k, t, quarter ? q * 32 : 0, quarter ? 16 : 128, column, (u32)columns, warp,
                        first.pc);
      tmem_mark(t, quarter ? q * 32 : 0, quarter ? 16 : 128, column, (u32)columns);
    }
  }
  static thread_local std::vector<float> abuf(MAX_K * 128), dbuf(256 * 128);
  for (size_t q = 0; q < count; q++) {
    Who y = who(batch[q]);
    load_a(t, batch[q], f, rows, abuf.data() + q * (size_t)(f.ks * 128), 128, y);
  }
  float* d = (float*)&t.tmem[column * 128];
  bool direct = !quarter && f.f32 && !first.masks && !first.scale_d;
  float* to = direct ? d : dbuf.data();
  auto lane_of = [&](int r) { return quarter ? r / 16 * 32 + r % 16 : r; };
  int all_rows = quarter ? 64 : 128;
  if (!direct && first.accumulate)
    for (int c = 0; c < columns; c++)
      for (int r = 0; r < all_rows; r++) {
        u32 v = bits<u32>(d[c * 128 + lane_of(r)]);
        float y = f.f32 ? bits<float>(v) : half_to_float((u16)v);
        to[c * 128 + r] = std::ldexp(y, -first.scale_d);
      }
  if (halves) {
    product64(to, 128, abuf.data(), 128, b, f.n, columns, kk, first.accumulate);
    product64(to + 64, 128, abuf.data(), 128, b + columns, f.n, columns, kk, first.accumulate);
  } else
    for (int r = 0; r < rows; r += 64)
      product64(to + r, 128, abuf.data() + r, 128, b, f.n, columns, kk, first.accumulate);
  if (direct) return;
  for (int c = 0; c < columns; c++)
    for (int r = 0; r < all_rows; r++) {
      int lane = lane_of(r);
      if (first.masks && (first.disabled[lane / 32] >> (lane % 32) & 1)) continue;
      u32 v = f.f32 ? bits<u32>(to[c * 128 + r]) : half_near(to[c * 128 + r]);
      ((u32*)d)[c * 128 + lane] = v;
    }
}

void Pipe::mma(const TensorOp* batch, size_t count) {
  const TensorOp& o = batch[0];
  Format f = format_of(o);
  int kk = f.ks * (int)count;
  static thread_local std::vector<float> bbuf(MAX_K * 256);
  u32 rank = warp->cta->rank, groups = (u32)o.group;
  int part = f.n / o.group;
  for (size_t q = 0; q < count; q++)
    for (u32 g = 0; g < groups; g++) {
      Cta& t = groups == 2 ? peer((rank & ~1u) + g) : *warp->cta;
      Who x = who(batch[q]);
      Watch w{k, &t, &x, warp, batch[q].pc};
      load_tile(w, tile_of(batch[q].b, f.b_mn, false), f.b, part, f.ks,
                bbuf.data() + q * (size_t)(f.ks * f.n) + (size_t)((int)g * part), f.n);
    }
  if (f.neg_b)
    for (int q = 0; q < kk * f.n; q++) bbuf[(size_t)q] = -bbuf[(size_t)q];
  for (u32 g = 0; g < groups; g++) {
    Cta& t = groups == 2 ? peer((rank & ~1u) + g) : *warp->cta;
    one_cta(t, batch, count, f, bbuf.data(), kk);
  }
  k->stats.traffic[MMA_SHARED] += count * 32u * (u64)(f.n + (o.a_in_tmem ? 0 : f.m));
  static const char* kinds[] = {"f16", "tf32", "f8f6f4"};
  k->stats.mma[format("tcgen05.%s.cg%d.m%dn%dk%d %s", kinds[o.mma_kind], o.group, f.m, f.n, f.ks,
                      o.a_in_tmem ? "TS" : "SS")] += count;
  if (k->timeline)
    k->stats.timeline.push_back({(u32)(warp->cluster->number * warp->cluster->ctas.size() + rank),
                                 "mma", "mma", k->time, k->time + 8 * count,
                                 warp->program->entry->code[(size_t)o.pc].line});
}

// Shared memory -> TMEM, rows of 16-byte chunks in 8-row blocks. shape: rows | columns << 8 |
// copies << 16
void Pipe::copy(const TensorOp& o) {
  u32 rows = o.shape & 255, columns = o.shape >> 8 & 255, spread = (u32)o.shape >> 16;
  Who x = who(o);
  for (int g = 0; g < o.group; g++) {
    Cta& t = o.group == 2 ? peer((warp->cta->rank & ~1u) + (u32)g) : *warp->cta;
    SmemTile s = tile_of(o.a, false, false);
    static thread_local std::vector<float> buf(128 * 32);
    Watch w{k, &t, &x, warp, o.pc};
    load_tile_raw(w, s, (int)rows, (int)columns * 4, buf.data());
    u32 column = o.d & 0xffff, lane0 = o.d >> 16;
    check_columns(*k, t, column, columns, "tcgen05.cp write", warp, o.pc);
    for (u32 c = 0; c < columns; c++)
      for (u32 r = 0; r < rows; r++) {
        u32 v = bits<u32>(buf[r * columns + c]);
        auto put = [&](u32 lane) { t.tmem[(column + c) * 128 + lane] = v; };
        if (spread == 4)
          for (u32 q = 0; q < 4; q++) put(q * 32 + r);
        else if (spread == 2) put(r), put(r + 64);  // warpx2::02_13
        else if (spread == 3) put(r / 32 * 64 + r % 32), put(r / 32 * 64 + 32 + r % 32);  // 01_23
        else put(lane0 + r);
      }
    u32 first = spread ? 0 : lane0, lanes = spread ? 128 : std::max(rows, 16u);
    if (k->race) k->tensor_race(t, true, first, lanes, column, columns, x, warp, o.pc);
    if (k->uninitialised) tmem_mark(t, first, lanes, column, columns);
  }
}

void Pipe::commit(const TensorOp& o) {
  for (u32 c = 0; c < warp->cluster->ctas.size(); c++) {
    if (!(o.mask >> c & 1)) continue;
    Cta& t = *warp->cluster->ctas[c];
    Mbarrier* b = k->barrier(warp, t, o.bar, o.pc);
    if (k->race) {
      if (o.shot.knows) join(b->gathered, *o.shot.knows);
      u32& n = b->gathered[warp->comp(TENSOR)];
      n = std::max(n, o.number);
    }
    k->arrive(*b, t, 1, "tcgen05.commit");
  }
}

Pipe& pipe_of(Warp& w) {
  if (!w.pipe) {
    auto p = std::make_shared<Pipe>();
    p->k = w.machine;
    p->warp = &w;
    w.pipe = p;
  }
  return static_cast<Pipe&>(*w.pipe);
}

void issue(Warp& w, TensorOp&& o) {
  Machine& k = *w.machine;
  Pipe& p = pipe_of(w);
  bool was_empty = p.ops.empty();
  p.ops.push_back(std::move(o));
  bool now = k.policy == Machine::Eager   ? k.random.below(8) != 0
             : k.policy == Machine::Mixed ? k.random.below(32) == 0
                                          : false;
  if (was_empty) {
    p.stage = 0;
    k.flights++;
    auto& list = w.cluster->flight;
    if (std::find(list.begin(), list.end(), w.pipe) == list.end()) list.push_back(w.pipe);
  }
  if (now) {
    while (!p.ops.empty()) p.next();
    p.stage = 2;
    k.flights--;
    k.progress++;
  }
}

u64 wide(Warp& w, u32 plane, u32 lane) {
  return (u64)w.r(plane + 1)[lane] << 32 | w.r(plane)[lane];
}

i32 flags_of(const TensorOp& o) {
  return (o.group == 2 ? MmaFlags::PAIR : 0) | (o.a_in_tmem ? MmaFlags::A_ELSEWHERE : 0) |
         (o.accumulate ? MmaFlags::ACCUMULATES : 0) | (o.mma_kind == K_TF32 ? MmaFlags::TF32 : 0) |
         (o.mma_kind == K_F8 ? MmaFlags::F8 : 0);
}

// a[0] D, a[1] A (TMEM or descriptor), a[2] B, a[3] idesc, a[4] enable-d predicate; n: group | kind
// << 4 | A in TMEM << 8 | enable negated << 9 | scale-d << 10; x->regs: disabled lanes
void mma(Warp& w, const Ins& i, Mask m) {
  FOR_LANES (l, m) {
    TensorOp o;
    o.kind = TensorOp::Mma;
    o.pc = (int)w.at;
    o.number = ++w.tensor_number;
    o.shot = shoot(w);
    o.group = i.n & 15, o.mma_kind = i.n >> 4 & 15, o.a_in_tmem = i.n >> 8 & 1;
    o.scale_d = i.n >> 10;
    o.d = w.r(i.a[0])[l] + (u32)i.x->n[0];
    if (o.a_in_tmem) o.a_tmem = w.r(i.a[1])[l] + (u32)i.x->n[1];
    else o.a = wide(w, i.a[1], l);
    o.b = wide(w, i.a[2], l);
    o.idesc = w.r(i.a[3])[l];
    o.accumulate = ((w.preds[i.a[4]] >> l & 1) != 0) != ((i.n >> 9 & 1) != 0);
    if (!o.accumulate) o.scale_d = 0;
    for (size_t q = 0; q < i.x->regs.size(); q++) {
      o.disabled[q] = w.r(i.x->regs[q])[l];
      if (o.disabled[q]) o.masks = true;
    }
    if (o.group == 2 && w.cluster->ctas.size() % 2)
      w.machine->fatal("tmem", "cta_group::2 in a cluster of odd size");
    Format f = format_of(o);
    if (Tracer* trace = w.machine->trace.get())
      trace->event(w, Traced::Mma, f.m, f.n, f.ks, flags_of(o), (i32)(o.d & 0xffff));
    issue(w, std::move(o));
  }
}

void decode_mma(Decoder& d) {
  auto& x = d.extra();
  if (d.has("sp") || d.has("ws") || d.has("block_scale") || d.has("kind::i8") ||
      d.has("kind::mxf8f6f4") || d.has("kind::mxf4") || d.has("kind::mxf4nvf4"))
    d.unknown();
  int kind = d.has("kind::f16")      ? K_F16
             : d.has("kind::tf32")   ? K_TF32
             : d.has("kind::f8f6f4") ? K_F8
                                     : -1;
  if (kind < 0) d.unknown("kind");
  d.ins.a[0] = d.address(0), x.n[0] = d.ins.offset;
  bool tmem = d.op(1).kind == Operand::Address;
  if (tmem) d.ins.a[1] = d.address(1), x.n[1] = d.ins.offset;
  else d.ins.a[1] = d.src(1, B64);
  d.ins.a[2] = d.src(2, B64);
  d.ins.a[3] = d.src(3, B32);
  size_t k = 4;
  if (d.op(k).kind == Operand::Vector) x.regs = d.list(k++, B32, false);
  d.ins.a[4] = d.pred(k);
  int scale = d.count() > k + 1 ? (int)d.op(k + 1).value : 0;
  d.ins.n =
      (d.has("cta_group::2") ? 2 : 1) | kind << 4 | tmem << 8 | d.op(k).negate << 9 | scale << 10;
  d.ins.fn = mma;
}

void commit(Warp& w, const Ins& i, Mask m) {  // a[1] barrier, a[2] mask or NONE
  FOR_LANES (l, m) {
    TensorOp o;
    o.kind = TensorOp::Commit;
    o.pc = (int)w.at;
    o.number = w.tensor_number;
    o.shot = shoot(w);
    u32 a = (u32)w.addr(i, i.a[1], l);
    o.bar = a & OFFSET_MASK;
    o.mask = i.a[2] == NONE ? 1u << (a >> RANK_SHIFT) : w.r(i.a[2])[l] & 0xffff;
    if (o.mask >> w.cluster->ctas.size())
      w.machine->fatal("bounds", format("tcgen05.commit to CTAs 0x%x of a cluster of %zu", o.mask,
                                        w.cluster->ctas.size()));
    if (Tracer* trace = w.machine->trace.get())
      trace->event(w, Traced::Commit, (i32)o.mask, (i32)o.bar);
    issue(w, std::move(o));
  }
}

void copy(Warp& w, const Ins& i, Mask m) {
  FOR_LANES (l, m) {
    TensorOp o;
    o.kind = TensorOp::Copy;
    o.pc = (int)w.at;
    o.number = ++w.tensor_number;
    o.shot = shoot(w);
    o.group = i.n >> 24, o.shape = i.n & 0xffffff;
    o.d = w.r(i.a[1])[l] + (u32)i.offset;
    o.a = wide(w, i.a[2], l);
    if (Tracer* trace = w.machine->trace.get())
      trace->event(w, Traced::TensorCopy, o.shape & 255, o.shape >> 8 & 255);
    issue(w, std::move(o));
  }
}

void decode_copy(Decoder& d) {
  if (d.has("b8x16")) d.unknown("decompression");
  int shape = d.has("128x256b")   ? 128 | 8 << 8
              : d.has("4x256b")   ? 4 | 8 << 8
              : d.has("128x128b") ? 128 | 4 << 8
              : d.has("64x128b")  ? 64 | 4 << 8 | (d.has("warpx2::02_13") ? 2 : 3) << 16
              : d.has("32x128b")  ? 32 | 4 << 8 | 4 << 16
                                  : 0;
  if (!shape) d.unknown();
  d.ins.a[1] = d.address(0);
  d.ins.a[2] = d.src(1, B64);
  d.ins.n = shape | (d.has("cta_group::2") ? 2 : 1) << 24;
  d.ins.fn = copy;
}

void decode_tcgen05(Decoder& d) {
  auto& op = d.st.mods.at(0);
  if (op == "mma") return decode_mma(d);
  if (op == "cp") return decode_copy(d);
  if (op == "commit") {
    d.ins.a[1] = d.address(0);
    d.ins.bytes = d.address_is_64(0) ? 0 : 0x80;
    if (d.has("multicast::cluster")) d.ins.a[2] = d.src(1, U16);
    d.ins.fn = commit;
    return;
  }
  decode_tmem(d);
}

}  // namespace

void register_tensor(Table& t) { t["tcgen05"] = decode_tcgen05; }

}  // namespace emu
