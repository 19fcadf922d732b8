// Tensor cores fed by registers and by wgmma: ldmatrix, stmatrix, movmatrix, mma.sync, wgmma.
// PTX ISA: "Warp Level Matrix Instructions", "Asynchronous Warpgroup Level Matrix Instructions".
#include <algorithm>

#include "accumulate.h"
#include "lanes.h"
#include "numbers.h"
#include "strong.h"
#include "trace.h"

namespace emu {
namespace {

// ---- ldmatrix and stmatrix ----
// Element (row, column) of 8x8 matrices of 16 bits that half `h` of lane t's register holds.
inline void cell(u32 t, u32 h, bool trans, u32& row, u32& column) {
  row = t / 4, column = 2 * (t % 4) + h;
  if (trans) std::swap(row, column);
}

// n: matrices | transposed << 4; x->regs
template <bool STORE>
void matrix(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  u32 count = i.n & 15;
  bool trans = i.n >> 4;
  if (m != FULL) k.fatal("instruction", "ldmatrix/stmatrix with only part of the warp's threads");
  u64 a[LANES];
  Mask rows = count == 4 ? FULL : (1u << 8 * count) - 1;
  lane_addresses(w, i, i.a[1], 1, rows, a);
  track(w, a, 16, rows, STORE, 0);
  k.stats.traffic[STORE ? SHARED_WRITE : SHARED_READ] += 128ull * count;
  if (STORE) k.progress++;
  if (k.trace) k.trace->access(w, a, 16, rows, STORE, false);
  u8* p[LANES];
  FOR_LANES (l, rows) {
    if (a[l] % 16)
      k.fatal("bounds", format("matrix row at shared offset %u is not aligned to 16 bytes",
                               (u32)a[l] & OFFSET_MASK));
    p[l] = k.shared(w, (u32)a[l], 16, STORE ? "stmatrix" : "ldmatrix");
  }
  for (u32 q = 0; q < count; q++) {
    u32* reg = i.x->regs[q] == NONE ? nullptr : w.w(i.x->regs[q]);
    for (u32 t = 0; t < LANES && reg; t++) {
      u32 v = 0;
      for (u32 h = 0; h < 2; h++) {
        u32 row, column;
        cell(t, h, trans, row, column);
        u16* at = (u16*)(p[8 * q + row]) + column;
        if (STORE) *at = (u16)(reg[t] >> (16 * h));
        else v |= (u32)*at << (16 * h);
      }
      if (!STORE) reg[t] = v;
    }
  }
}

void decode_matrix(Decoder& d, bool is_store) {
  if (!d.has("m8n8") || !d.has("b16")) d.unknown();
  int count = d.has("x4") ? 4 : d.has("x2") ? 2 : 1;
  size_t mem = is_store ? 0 : 1;
  auto& x = d.extra();
  x.regs = d.list(1 - mem, B32, !is_store);
  d.ins.a[1] = d.address(mem);
  d.ins.bytes = d.address_is_64(mem) ? 0 : 0x80;
  d.ins.n = count | d.has("trans") << 4;
  d.ins.fn = is_store ? matrix<true> : matrix<false>;
}

void movmatrix(Warp& w, const Ins& i, Mask m) {
  const u32* s = w.r(i.a[1]);
  alignas(64) u32 r[LANES];
  for (u32 t = 0; t < LANES; t++) {
    r[t] = 0;
    for (u32 h = 0; h < 2; h++) {
      u32 row = 2 * (t % 4) + h, column = t / 4;  // of the source
      r[t] |= (s[row * 4 + column / 2] >> (16 * (column % 2)) & 0xffff) << (16 * h);
    }
  }
  write(w, i.a[0], r, m);
}

// ---- mma.sync ----
Number number_of(Type t, Decoder& d) {
  switch (t) {
    case F16: return Number::F16;
    case BF16: return Number::BF16;
    case TF32: return Number::TF32;
    case E4M3: return Number::E4M3;
    case E5M2: return Number::E5M2;
    case S8: return Number::S8;
    case U8: return Number::U8;
    default: d.unknown("operand type");
  }
}

// Elements of an A or B register of lane t as floats.
void unpack(Number n, u32 v, float* to) {
  u8 raw[4];
  std::memcpy(raw, &v, 4);
  widen(n, raw, to, 4 / number_bytes(n));
}

// 16 x K fragment: register r of lane t holds row t/4 + 8 (r & 1), k from per * (t % 4) + (r / 2) *
// 4 per.
void gather_a(const Warp& w, const u32* regs, size_t count, Number n,
              float* a /* [k * 16 + row] */) {
  u32 per = 4 / (u32)number_bytes(n);
  for (size_t r = 0; r < count; r++)
    for (u32 t = 0; t < LANES; t++) {
      float e[4];
      unpack(n, w.r(regs[r])[t], e);
      for (u32 q = 0; q < per; q++)
        a[(per * (t % 4) + q + (u32)(r / 2) * 4 * per) * 16 + t / 4 + 8 * (r & 1)] = e[q];
    }
}

// What an H200 makes of 8-bit mma.sync is, to the bit, two f16 ones from zero, of the lower and
// then of the upper halves of all registers, and C added in float.
void multiply_8bit(float* d, const float* a, const float* b, Number na, Number nb, int ks) {
  float sum[8 * 16] = {}, half_a[32 * 16], half_b[32 * 8];
  for (int upper = 0; upper < 2; upper++) {
    for (int q = 0; q < ks / 2; q++) {
      int k = q / 2 * 4 + q % 2 + 2 * upper;
      std::copy_n(a + k * 16, 16, half_a + q * 16);
      std::copy_n(b + k * 8, 8, half_b + q * 8);
    }
    fused16({na, nb, false, 25, 23}, sum, 16, half_a, 16, half_b, 8, 8, ks / 2);
  }
  for (int q = 0; q < 8 * 16; q++) {
    d[q] += sum[q];
    if (std::isnan(d[q])) d[q] = bits<float>(0x7fffffff);
  }
}

// n: A number | B number << 4 | K << 8; bytes: accumulator 0 f32, 1 f16, 2 s32
// x->regs: D; x->regs2: A, then B, then C; x->n: how many of A, B, C
void mma_sync(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  if (m != FULL) k.fatal("instruction", "mma.sync with only part of the warp's threads");
  Number na = (Number)(i.n & 15), nb = (Number)(i.n >> 4 & 15);
  int ks = i.n >> 8;
  const u32 *ra = i.x->regs2.data(), *rb = ra + i.x->n[0], *rc = rb + i.x->n[1];
  float a[64 * 16], b[64 * 8];
  gather_a(w, ra, (size_t)i.x->n[0], na, a);
  u32 per = 4 / (u32)number_bytes(nb);
  for (int r = 0; r < i.x->n[1]; r++)
    for (u32 t = 0; t < LANES; t++) {
      float e[4];
      unpack(nb, w.r(rb[r])[t], e);
      for (u32 q = 0; q < per; q++) b[(per * (t % 4) + q + (u32)r * 4 * per) * 8 + t / 4] = e[q];
    }
  auto row = [](u32 t, u32 c) { return t / 4 + 8 * (c / 2); };  // of D's c-th number of lane t
  auto column = [](u32 t, u32 c) { return 2 * (t % 4) + c % 2; };
  alignas(64) u32 out[4][LANES];
  if (i.bytes == 2) {
    for (u32 t = 0; t < LANES; t++)
      for (u32 c = 0; c < 4; c++) {
        i32 sum = (i32)w.r(rc[c])[t];
        for (int q = 0; q < ks; q++)
          sum += (i32)a[q * 16 + (int)row(t, c)] * (i32)b[q * 8 + (int)column(t, c)];
        out[c][t] = (u32)sum;
      }
  } else {
    float d[8 * 16];
    for (u32 t = 0; t < LANES; t++)
      for (u32 c = 0; c < 4; c++)
        d[column(t, c) * 16 + row(t, c)] =
            i.bytes == 0 ? bits<float>(w.r(rc[c])[t])
                         : half_to_float((u16)(w.r(rc[c / 2])[t] >> (16 * (c % 2))));
    if (number_bytes(na) == 1) multiply_8bit(d, a, b, na, nb, ks);
    else fused16({na, nb, i.bytes == 1, 25, 23}, d, 16, a, 16, b, 8, 8, ks);
    for (u32 t = 0; t < LANES; t++)
      for (u32 c = 0; c < 4; c++) {
        float x = d[column(t, c) * 16 + row(t, c)];
        out[c][t] = i.bytes == 0 ? bits<u32>(x) : half_near(x);
      }
  }
  if (i.bytes == 1)
    for (u32 c = 0; c < 2; c++)
      for (u32 t = 0; t < LANES; t++)
        w.w(i.x->regs[c])[t] = out[2 * c][t] | out[2 * c + 1][t] << 16;
  else
    for (u32 c = 0; c < 4; c++) std::memcpy(w.w(i.x->regs[c]), out[c], sizeof out[c]);
  k.stats.mma[i.x->text]++;
}

void decode_mma_sync(Decoder& d) {
  auto t = d.types();
  if (t.size() < 4 || d.has("sp") || d.has("block_scale") || !d.has("row") || !d.has("col"))
    d.unknown();
  int ks = 0;
  for (auto& s : d.st.mods)
    if (s.rfind("m16n8k", 0) == 0) ks = atoi(s.c_str() + 6);
  if (!ks || ks > 64) d.unknown("shape");
  Number a = number_of(t[1], d), b = number_of(t[2], d);
  if (t[0] != t[3] || (t[0] != F32 && t[0] != F16 && t[0] != S32)) d.unknown("accumulator type");
  auto& x = d.extra();
  x.regs = d.list(0, B32, true);
  for (size_t k = 1; k <= 3; k++) {
    auto r = d.list(k, B32, false);
    x.n[k - 1] = (int)r.size();
    x.regs2.insert(x.regs2.end(), r.begin(), r.end());
  }
  int es = number_bytes(a);
  if (x.n[0] != 16 * ks * es / 128 || x.n[1] != 8 * ks * es / 128 ||
      x.n[2] != (t[0] == F16 ? 2 : 4))
    d.unknown("registers");
  d.ins.n = (int)a | (int)b << 4 | ks << 8;
  d.ins.bytes = t[0] == F32 ? 0 : t[0] == F16 ? 1 : 2;
  d.ins.fn = mma_sync;
}

// ---- wgmma ----
// Each warp forms its own 16 of the 64 rows. Executed in order, at the latest when waited for.
struct Wgmma : Flight {
  Machine* k;
  const Ins* i;
  u64 a = 0, b = 0;
  bool accumulate = false;
  u32 number = 0;
  FlightShot shot;
  std::weak_ptr<Flight> before;
  void land() override {
    if (auto f = before.lock()) k->force(*f, 2);
    Warp& w = *warp;
    const int* x = i->x->n;  // [0] N, [1] A number, [2] B number, [3] flags, [4] K
    int n = x[0], ks = x[4];
    Number na = (Number)x[1], nb = (Number)x[2];
    Who y = async_who(w, shot, w.comp(WGMMA), number);
    Watch watch{k, w.cta, &y, warp, pc};
    alignas(64) static thread_local float af[64 * 16], bf[64 * 256], d[256 * 16];
    if (x[3] & 1) gather_a(w, i->x->regs2.data(), i->x->regs2.size(), na, af);
    else load_tile(watch, tile_of(a, x[3] & 2, true), na, 16, ks, af, 16, 16 * (w.index % 4));
    load_tile(watch, tile_of(b, x[3] & 4, true), nb, n, ks, bf, n);
    if (x[3] & 8)
      for (int q = 0; q < ks * 16; q++) af[q] = -af[q];
    if (x[3] & 16)
      for (int q = 0; q < ks * n; q++) bf[q] = -bf[q];
    bool half = x[3] & 32;
    auto each = [&](auto f) {  // (register, half, lane, element of d)
      for (int j = 0; j < n / 8; j++)
        for (u32 c = 0; c < 4; c++)
          for (u32 t = 0; t < LANES; t++) {
            float& e =
                d[(8 * j + 2 * (int)(t % 4) + (int)(c % 2)) * 16 + (int)(t / 4 + 8 * (c / 2))];
            u32 reg = half ? i->x->regs[(size_t)j * 2 + c / 2] : i->x->regs[(size_t)j * 4 + c];
            f(w.w(reg)[t], c % 2, e);
          }
    };
    each([&](u32& v, u32 h, float& e) {
      e = !accumulate ? 0 : half ? half_to_float((u16)(v >> (16 * h))) : bits<float>(v);
    });
    bool narrow = number_bytes(na) == 1;
    fused16({na, nb, half, narrow ? 13 : 25, narrow ? 13 : 23}, d, 16, af, 16, bf, n, n, ks);
    each([&](u32& v, u32 h, float& e) {
      if (half) v = (v & ~(0xffffu << (16 * h))) | (u32)half_near(e) << (16 * h);
      else v = bits<u32>(e);
    });
    k->stats.traffic[MMA_SHARED] += 32ull * (u64)(n + (x[3] & 1 ? 0 : 16));
    k->stats.mma[i->x->text]++;
  }
  void complete() override {}
  std::string describe() const override { return "wgmma"; }
};

// wgmma.fence orders register accesses of others before wgmma (ISA, wgmma.fence).
void check_fenced(Warp& w, const Ins& i) {
  bool ok = w.wgmma_fenced;
  for (auto* list : {&i.x->regs, &i.x->regs2})
    for (u32 p : *list) ok &= p == NONE || !w.unfenced[p];
  if (!ok)
    w.machine->report(
        "race", "wgmma uses registers that were written after the last wgmma.fence, or without any",
        &w, (int)w.at);
}

// a[1] A descriptor, a[2] B descriptor, a[3] scale-d predicate; n: predicate negated
void wgmma(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  if (m != FULL) k.fatal("instruction", "wgmma with only part of the warp's threads");
  if (k.race) check_fenced(w, i);
  auto f = std::make_shared<Wgmma>();
  f->k = &k, f->warp = &w, f->pc = (int)w.at, f->i = &i;
  f->shot = shoot(w);
  auto wide = [&](u32 plane) { return (u64)w.r(plane + 1)[0] << 32 | w.r(plane)[0]; };
  if (!(i.x->n[3] & 1)) f->a = wide(i.a[1]);
  f->b = wide(i.a[2]);
  f->accumulate = ((w.preds[i.a[3]] & 1) != 0) != (i.n != 0);
  f->number = ++w.wgmma_number;
  f->before = w.last_wgmma;
  w.last_wgmma = f;
  if (k.trace) {
    i32 bytes = number_bytes((Number)i.x->n[1]);
    i32 flags = MmaFlags::WARPGROUP | (i.x->n[3] & 1 ? MmaFlags::A_ELSEWHERE : 0) |
                (f->accumulate ? MmaFlags::ACCUMULATES : 0) |
                (bytes == 4 ? MmaFlags::TF32 : bytes == 1 ? MmaFlags::F8 : 0);
    k.trace->event(w, Traced::Mma, 64, i.x->n[0], i.x->n[4], flags);
  }
  w.wgmma.open.push_back(f);
  PendingLoad p;  // touching the accumulators before the wait is an error
  p.planes = i.x->regs;
  p.number = w.load_number;
  p.flight = f;
  p.perform = [&w, &k, f, pc = f->pc] {
    if (f->waited) return;
    k.report("race", "a register of a wgmma in flight is used before wgmma.wait_group", &w,
             (int)w.at);
    k.force(*f, 2);
    (void)pc;
  };
  for (u32 r : p.planes) w.pending_plane[r] = 1;
  w.loads.push_back(std::move(p));
  k.add_flight(*w.cluster, f);
}

void wgmma_commit(Warp& w, const Ins&, Mask) {
  w.wgmma.closed.push_back({w.wgmma_number, std::move(w.wgmma.open)});
  w.wgmma.open.clear();
}

void wgmma_wait(Warp& w, const Ins& i, Mask) {
  Machine& k = *w.machine;
  while ((int)w.wgmma.closed.size() > i.n) {
    for (auto& f : w.wgmma.closed.front().ops) {
      k.force(*f, 2);
      f->waited = true;
      for (size_t q = 0; q < w.loads.size(); q++)
        if (w.loads[q].flight == f) {
          w.loads.erase(w.loads.begin() + (long)q);
          break;
        }
    }
    if (k.race) {
      w.clock[w.comp(WGMMA)] = w.wgmma.closed.front().number;
      w.clock_changed = true;
    }
    w.wgmma.closed.pop_front();
  }
  std::fill(w.pending_plane.begin(), w.pending_plane.end(), 0);
  for (auto& p : w.loads)
    for (u32 r : p.planes) w.pending_plane[r] = 1;
}

void decode_wgmma(Decoder& d) {
  if (d.has("fence")) {
    d.ins.fn = [](Warp& w, const Ins&, Mask) {
      w.wgmma_fenced = true;
      std::fill(w.unfenced.begin(), w.unfenced.end(), 0);
    };
    return;
  }
  if (d.has("commit_group")) {
    d.ins.fn = wgmma_commit;
    return;
  }
  if (d.has("wait_group")) {
    d.ins.n = (i32)d.op(0).value;
    d.ins.fn = wgmma_wait;
    return;
  }
  auto t = d.types();
  if (!d.has("mma_async") || d.has("sp") || t.size() != 3) d.unknown();
  auto& x = d.extra();
  int n = 0, ks = 0;
  for (auto& s : d.st.mods) sscanf(s.c_str(), "m64n%dk%d", &n, &ks);
  Number a = number_of(t[1], d), b = number_of(t[2], d);
  if (n < 8 || n > 256 || n % 8 || ks != 32 / number_bytes(a) || (t[0] != F32 && t[0] != F16))
    d.unknown("shape");
  x.regs = d.list(0, B32, true);
  bool regs = d.op(1).kind == Operand::Vector;
  if (regs) x.regs2 = d.list(1, B32, false);
  else d.ins.a[1] = d.src(1, B64);
  d.ins.a[2] = d.src(2, B64);
  d.ins.a[3] = d.pred(3);
  d.ins.n = d.op(3).negate;
  auto imm = [&](size_t k) { return d.count() > k ? (i64)d.op(k).value : 0; };
  size_t tr = 6;
  bool ta = !regs && imm(tr) == 1, tb = imm(regs ? tr : tr + 1) == 1;
  x.n[0] = n, x.n[1] = (int)a, x.n[2] = (int)b, x.n[4] = ks;
  x.n[3] =
      regs | ta << 1 | tb << 2 | (imm(4) == -1) << 3 | (imm(5) == -1) << 4 | (t[0] == F16) << 5;
  if (x.regs.size() != (size_t)(t[0] == F16 ? n / 4 : n / 2) || (regs && x.regs2.size() != 4))
    d.unknown("registers");
  d.use->clear();  // accumulators may be handed from one wgmma to the next
  d.ins.fn = wgmma;
}

}  // namespace

void register_mma(Table& t) {
  t["ldmatrix"] = [](Decoder& d) { decode_matrix(d, false); };
  t["stmatrix"] = [](Decoder& d) { decode_matrix(d, true); };
  t["movmatrix"] = [](Decoder& d) {
    d.ins.a[0] = d.dst(0, B32), d.ins.a[1] = d.src(1, B32);
    d.ins.fn = movmatrix;
  };
  t["mma"] = decode_mma_sync;
  t["wgmma"] = decode_wgmma;
}

}  // namespace emu
