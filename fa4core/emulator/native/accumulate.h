// How the tensor cores of Hopper add, to the bit.
//
// The products of one instruction and the accumulator are aligned to the greatest of their
// exponents, cut off below `kept` fraction bits and summed exactly; the sum is cut off to `stored`
// fraction bits of a float, or rounded to nearest even for f16. NVIDIA documents none of this:
// Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021;
// Xie, Wang, Yang, Yang, "MMA-Sim", arXiv 2511.10909; Khattak, Mikaitis, "Accurate models of
// NVIDIA tensor cores", arXiv 2512.07004. Confirmed on an H200: docs/emulator-on-silicon.md.
#pragma once
#include "gemm.h"

namespace emu {

struct Adder {
  Number a, b;
  bool half;  // the accumulator is f16
  int kept, stored;
};

// D[c * ldd + r] += sum_k A[k * lda + r] * B[k * ldb + c] for 16 rows; k is one instruction's.
void fused16(const Adder& s, float* d, int ldd, const float* a, int lda, const float* b, int ldb,
             int columns, int ks);

}  // namespace emu
