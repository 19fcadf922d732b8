// The 128-byte tensor map and the box copy it describes: strides, bounds, zero fill, swizzles.
// PTX ISA: "Tensors", "Tensor access modes", "Swizzling modes". The bit layout is that which CuTe
// DSL's host code writes inline; it is not documented and was found by varying one parameter at a
// time.
#pragma once
#include <functional>

#include "common.h"

namespace emu {

struct TensorMap {
  u64 address;
  int rank, element_code, element_bytes, swizzle;  // swizzle: 0 none, 1 32B, 2 64B, 3 128B
  u64 stride[5];                                   // bytes
  u64 size[5];
  u32 box[5];
};

TensorMap decode_map(const u8* raw);

// XORs address bits 4.. with higher bits of the (absolute) shared address.
inline u32 swizzled(u32 a, int mode) {
  switch (mode) {
    case 3: return a ^ ((a >> 7 & 7) << 4);
    case 2: return a ^ ((a >> 7 & 3) << 4);
    case 1: return a ^ ((a >> 7 & 1) << 4);
    default: return a;
  }
}

// Calls run(global address, offset in the box, bytes in bounds, bytes of the row) for every row of
// the box at the coordinates; rows out of bounds have 0 bytes in bounds, `skip` those before them.
using RowFn = std::function<void(u64 address, u32 offset, u32 skip, u32 valid, u32 row_bytes)>;
void for_rows(const TensorMap& t, const i32* coords, const RowFn& run);
void for_gathered_rows(const TensorMap& t, const i32* coords, const RowFn& run);  // tile::gather4
u32 box_bytes(const TensorMap& t);
// Whether no element of the box lies in the tensor: allowed, but Hopper GPUs look at addresses then
// that may not be mapped.
bool outside(const TensorMap& t, const i32* coords);

}  // namespace emu
