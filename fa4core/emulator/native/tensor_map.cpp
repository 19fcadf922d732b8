// See tensor_map.h.
#include "tensor_map.h"

namespace emu {

TensorMap decode_map(const u8* raw) {
  u64 w[8];
  std::memcpy(w, raw, sizeof w);
  TensorMap t{};
  t.address = w[0];
  t.rank = (int)(w[1] >> 4 & 7) + 1;
  t.element_code = (int)(w[1] >> 7 & 15);
  static const int bytes[16] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4, 0, 0, 0};
  t.element_bytes = bytes[t.element_code];
  t.swizzle = (int)(w[1] >> 13 & 3);
  if (t.rank > 5 || !t.element_bytes || (w[1] & 15) != 2)
    throw Fatal("bounds", format("this is no tiled tensor map (second word 0x%llx)",
                                 (unsigned long long)w[1]));
  u32 low[4] = {(u32)(w[1] >> 32), (u32)w[2], (u32)(w[2] >> 32), (u32)w[3]};
  t.stride[0] = (u64)t.element_bytes;
  for (int d = 1; d < 5; d++)
    t.stride[d] = ((u64)low[d - 1] | (w[3] >> (32 + 4 * (d - 1)) & 15) << 32) * 16;
  u32 size[5] = {(u32)w[4], (u32)(w[4] >> 32), (u32)w[5], (u32)(w[5] >> 32), (u32)w[6]};
  for (int d = 0; d < 5; d++) t.size[d] = (u64)size[d] + 1;
  t.box[0] = (u32)(w[6] >> 56) + 1;
  for (int d = 1; d < 5; d++) t.box[d] = (u32)(w[7] >> (8 * (d - 1)) & 255) + 1;
  for (int d = t.rank; d < 5; d++) t.box[d] = 1, t.size[d] = 1;
  return t;
}

u32 box_bytes(const TensorMap& t) {
  u32 n = (u32)t.element_bytes;
  for (int d = 0; d < t.rank; d++) n *= t.box[d];
  return n;
}

// Part of a row of box[0] elements from coordinate c that lies in [0, size[0]).
static void clip(const TensorMap& t, i64 c, u32& skip, u32& valid) {
  i64 first = std::max<i64>(c, 0), last = std::min<i64>(c + t.box[0], (i64)t.size[0]);
  skip = (u32)((first - c) * t.element_bytes);
  valid = last > first ? (u32)((last - first) * t.element_bytes) : 0;
}

void for_rows(const TensorMap& t, const i32* coords, const RowFn& run) {
  u32 row = t.box[0] * (u32)t.element_bytes, offset = 0, skip, valid;
  clip(t, coords[0], skip, valid);
  u32 i[5] = {};
  for (;;) {
    bool inside = true;
    i64 a = (i64)t.address + (i64)coords[0] * t.element_bytes + skip;
    for (int d = 1; d < t.rank; d++) {
      i64 c = (i64)coords[d] + i[d];
      inside &= c >= 0 && c < (i64)t.size[d];
      a += c * (i64)t.stride[d];
    }
    run((u64)a, offset, skip, inside ? valid : 0, row);
    offset += row;
    int d = 1;
    while (d < t.rank && ++i[d] == t.box[d]) i[d++] = 0;
    if (d >= t.rank) return;
  }
}

bool outside(const TensorMap& t, const i32* coords) {
  for (int d = 0; d < t.rank; d++)
    if (coords[d] >= (i64)t.size[d] || (i64)coords[d] + t.box[d] <= 0) return true;
  return false;
}

void for_gathered_rows(const TensorMap& t, const i32* coords, const RowFn& run) {
  u32 row = t.box[0] * (u32)t.element_bytes, skip, valid;
  clip(t, coords[0], skip, valid);
  for (u32 r = 0; r < 4; r++) {
    i64 c = coords[1 + r];
    bool inside = c >= 0 && c < (i64)t.size[1];
    u64 a = (u64)((i64)t.address + (i64)coords[0] * t.element_bytes + skip + c * (i64)t.stride[1]);
    run(a, r * row, skip, inside ? valid : 0, row);
  }
}

}  // namespace emu
