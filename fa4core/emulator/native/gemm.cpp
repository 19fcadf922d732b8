// See gemm.h. This file alone is compiled with -ffp-contract=fast: products of two tensor-core
// inputs are exact in float, so fusing them with the addition changes nothing but the speed.
#include "gemm.h"

#include "numbers.h"
#include "tensor_map.h"

namespace emu {

int number_bytes(Number n) {
  return n == Number::TF32 ? 4 : n == Number::F16 || n == Number::BF16 ? 2 : 1;
}

SmemTile tile_of(u64 d, bool mn_major, bool hopper) {
  SmemTile t;
  t.start = (u32)(d & 0x3fff) << 4;
  t.lbo = (u32)(d >> 16 & 0x3fff) << 4;
  t.sbo = (u32)(d >> 32 & 0x3fff) << 4;
  t.mn_major = mn_major;
  if (hopper) {
    int code = (int)(d >> 62 & 3);  // 0 none, 1 128B, 2 64B, 3 32B
    t.swizzle = code ? 4 - code : 0;
  } else {
    int code = (int)(d >> 61 & 7);  // 0 none, 1 128B with 32B atoms, 2 128B, 4 64B, 6 32B
    if (code == 1 || code == 3 || code == 5 || code == 7)
      throw Fatal("instruction",
                  format("not understood: swizzle mode %d of a matrix descriptor", code));
    t.swizzle = code == 0 ? 0 : 4 - code / 2;
    if (d >> 49 & 7)
      throw Fatal("instruction", "not understood: base offset of a matrix descriptor");
    if (d >> 52 & 1)
      throw Fatal("instruction",
                  "not understood: absolute leading dimension of a matrix descriptor");
  }
  return t;
}

static float tables[2][256];
static bool tables_ready = [] {
  for (int i = 0; i < 256; i++)
    tables[0][i] = e4m3_to_float((u8)i), tables[1][i] = e5m2_to_float((u8)i);
  return true;
}();

void widen(Number n, const u8* from, float* to, int count) {
  const u16* h = (const u16*)from;
  switch (n) {
    case Number::BF16:
      for (int i = 0; i < count; i++) to[i] = bfloat_to_float(h[i]);
      break;
    case Number::F16:
      for (int i = 0; i < count; i++) to[i] = half_to_float(h[i]);
      break;
    case Number::TF32:
      for (int i = 0; i < count; i++) to[i] = bits<float>(((const u32*)from)[i] & ~0x1fffu);
      break;
    case Number::E4M3:
      for (int i = 0; i < count; i++) to[i] = tables[0][from[i]];
      break;
    case Number::E5M2:
      for (int i = 0; i < count; i++) to[i] = tables[1][from[i]];
      break;
    case Number::S8:
      for (int i = 0; i < count; i++) to[i] = (float)(i8)from[i];
      break;
    case Number::U8:
      for (int i = 0; i < count; i++) to[i] = (float)from[i];
      break;
  }
}

namespace {

struct Chunks {  // checks and fetches 16-byte pieces of shared memory
  const Watch& w;
  Conflict c;
  bool race, init, reported = false;
  explicit Chunks(const Watch& watch) : w(watch), race(w.k->race), init(w.k->uninitialised) {}
  const u8* get(u32 a) {
    if ((u64)a + 16 > w.cta->shared.size())
      w.k->fatal("bounds",
                 format("a matrix descriptor reaches shared offset %u: the CTA has %zu bytes", a,
                        w.cta->shared.size()));
    if (race) w.cta->shared_shadow.read(a / 16, 1, 0xffff, *w.who, c);
    if (init && !reported && w.cta->shared_shadow.written[a / 16] != 0xffff) {
      reported = true;
      w.k->shared_read_check(*w.cta, a, 16, w.warp, w.pc);
    }
    return w.cta->shared.data() + a;
  }
  ~Chunks() {
    if (c.found)
      w.k->conflict("shared offset", c.granule * 16, false, c, w.warp, w.pc, *w.cta->cluster);
  }
};

}  // namespace

void load_tile(const Watch& watch, const SmemTile& t, Number n, int rows, int ks, float* out,
               int ld, int row0) {
  const int es = number_bytes(n), per = 16 / es;  // elements of a 16-byte chunk
  const u32 width = t.swizzle ? 16u << t.swizzle : 16;
  Chunks chunks(watch);
  if (!t.mn_major) {
    alignas(64) float rowbuf[16][64];
    for (int r0 = 0; r0 < rows; r0 += 16) {
      int count = std::min(16, rows - r0);
      for (int r = 0; r < count; r++) {
        u32 row = (u32)(row0 + r0 + r);
        u32 base = t.start + row / 8 * t.sbo + row % 8 * width;
        for (int k = 0; k < ks; k += per) {
          u32 a =
              t.swizzle ? swizzled(base + (u32)(k * es), t.swizzle) : base + (u32)(k / per) * t.lbo;
          widen(n, chunks.get(a), rowbuf[r] + k, per);
        }
      }
      for (int k = 0; k < ks; k++)
        for (int r = 0; r < count; r++) out[k * ld + r0 + r] = rowbuf[r][k];
    }
    return;
  }
  const int span = t.swizzle ? (int)width / es : per;  // rows that lie side by side
  for (int k = 0; k < ks; k++)
    for (int r = 0; r < rows; r += per) {
      u32 a = t.start;
      int q = row0 + r;
      if (t.swizzle)
        a = swizzled(a + (u32)(q / span) * t.lbo + (u32)(q % span * es) + (u32)(k / 8) * t.sbo +
                         (u32)(k % 8) * width,
                     t.swizzle);
      else a += (u32)(k / 8) * t.lbo + (u32)(k % 8) * 16 + (u32)(q / per) * t.sbo;
      const u8* p = chunks.get(a);
      if (r + per <= rows) widen(n, p, out + k * ld + r, per);
      else widen(n, p, out + k * ld + r, rows - r);
    }
}

void load_tile_raw(const Watch& watch, const SmemTile& t, int rows, int bytes, float* out) {
  const u32 width = t.swizzle ? 16u << t.swizzle : 16;
  Chunks chunks(watch);
  for (int r = 0; r < rows; r++)
    for (int b = 0; b < bytes; b += 16) {
      u32 base = t.start + (u32)r / 8 * t.sbo + (u32)r % 8 * width;
      u32 a = t.swizzle ? swizzled(base + (u32)b, t.swizzle) : base + (u32)b / 16 * t.lbo;
      std::memcpy((u8*)out + r * bytes + b, chunks.get(a), 16);
    }
}

typedef float V __attribute__((vector_size(64), aligned(4), may_alias));

void product64(float* d, int ldd, const float* a, int lda, const float* b, int ldb, int columns,
               int ks, bool accumulate) {
  constexpr int VECTORS = 4;
  for (int c = 0; c < columns; c += 4) {
    V acc[4][VECTORS];
    for (int j = 0; j < 4; j++)
      for (int v = 0; v < VECTORS; v++)
        acc[j][v] = accumulate ? *(const V*)(d + (c + j) * ldd + 16 * v) : V{};
    for (int k = 0; k < ks; k++) {
      const float *ak = a + k * lda, *bk = b + k * ldb + c;
      V av[VECTORS];
      for (int v = 0; v < VECTORS; v++) av[v] = *(const V*)(ak + 16 * v);
      for (int j = 0; j < 4; j++)
        for (int v = 0; v < VECTORS; v++) acc[j][v] += av[v] * bk[j];
    }
    for (int j = 0; j < 4; j++)
      for (int v = 0; v < VECTORS; v++) *(V*)(d + (c + j) * ldd + 16 * v) = acc[j][v];
  }
}

}  // namespace emu
