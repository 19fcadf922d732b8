// Operand tiles of tensor-core instructions as floats, and the product of two of them.
// PTX ISA: "tcgen05: matrix descriptors, canonical layouts", "wgmma: matrix descriptor".
#pragma once
#include "machine.h"

namespace emu {

enum class Number : u8 { F16, BF16, TF32, E4M3, E5M2, S8, U8 };
int number_bytes(Number n);

// A matrix descriptor of shared memory, either generation's.
struct SmemTile {
  u32 start, lbo, sbo;
  int swizzle;    // 0 none, 1 32B, 2 64B, 3 128B
  bool mn_major;  // rows are contiguous instead of k
};
SmemTile tile_of(u64 descriptor, bool mn_major, bool hopper);

// What to tell the detectors while reading.
struct Watch {
  Machine* k = nullptr;
  Cta* cta = nullptr;
  const Who* who = nullptr;
  Warp* warp = nullptr;
  int pc = 0;
};

// out[k * ld + r] for `rows` rows from row0 (a multiple of 16) and the `ks` values of k that one
// instruction takes.
void load_tile(const Watch& w, const SmemTile& t, Number n, int rows, int ks, float* out, int ld,
               int row0 = 0);

// The same without conversion: 32-bit words, row by row of `bytes` (tcgen05.cp).
void load_tile_raw(const Watch& w, const SmemTile& t, int rows, int bytes, float* out);

// D[c * ldd + r] (+)= sum_k A[k * lda + r] * B[k * ldb + c], 64 rows, `columns` columns; k
// ascending, one rounding per step.
void product64(float* d, int ldd, const float* a, int lda, const float* b, int ldb, int columns,
               int ks, bool accumulate);

void widen(Number n, const u8* from, float* to, int count);

}  // namespace emu
