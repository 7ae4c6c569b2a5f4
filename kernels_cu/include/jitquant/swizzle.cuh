// One-byte scales in cuBLASLt's layout: tiles of 128 rows by 4 blocks, 512 bytes each, in row-major
// order. Partial tiles are padded with zeros.
#pragma once

#include <type_traits>

#include "jitquant/numeric.cuh"

namespace jitquant {

// Including padding.
JITQUANT_HD int64_t swizzled_rows(int64_t rows) {
  return (rows + 127) & ~int64_t{127};
}
template <class Int = int64_t>
JITQUANT_HD Int swizzled_blocks(std::common_type_t<Int> blocks) {
  return (blocks + 3) & ~Int{3};
}
JITQUANT_HD int64_t swizzled_size(int64_t rows, int64_t blocks) {
  return swizzled_rows(rows) * swizzled_blocks(blocks);
}

// The offset of a tile, if there are `tiles` side by side. Fewer than 2^31 may be counted in
// uint32_t.
template <class Int>
JITQUANT_HD int64_t swizzled_tile(Int down, Int across, Int tiles) {
  return static_cast<int64_t>(down * tiles + across) * 512;
}
// The offset of a row's four scales within a tile: rows that are 32 apart are next to each other.
template <class Int>
JITQUANT_HD Int row_in_tile(Int row) {
  return (row & 31) * 16 + ((row >> 5) & 3) * 4;
}

// The offset of the scale of (row, block). `padded_blocks` is swizzled_blocks.
template <class Int = int64_t>
JITQUANT_HD int64_t swizzle_128x4(std::common_type_t<Int> row, std::common_type_t<Int> block,
                                  std::common_type_t<Int> padded_blocks) {
  return swizzled_tile<Int>(row >> 7, block >> 2, padded_blocks >> 2) + row_in_tile<Int>(row) +
         (block & 3);
}

// The same of `blocks` blocks in a row, or, if not swizzled, of rows of `step` scales.
JITQUANT_HD int64_t scale_offset(bool swizzled, int64_t row, int64_t block, int64_t blocks,
                                 int64_t step) {
  return swizzled ? swizzle_128x4(row, block, swizzled_blocks(blocks)) : row * step + block;
}

// A sector, the unit of memory writes, is 32 bytes: the scales of 4 blocks of the rows {r, r + 1} +
// {0, 32, 64, 96}, where r is even. `rows` counts these sets of eight rows, 16 in each tile, and
// `tile` the sets of four blocks.
//
// The row of byte i of a sector. Its block is number i % 4 of the set.
JITQUANT_HD uint32_t sector_row(uint32_t rows, uint32_t i) {
  return rows * 2 + (rows >> 4) * 96 + (i >> 4) + (i & 12) * 8;
}
// The offset of a sector, if the swizzled_size fits in 32 bits. `pitch` is the sector_pitch of
// `tiles` sets of four blocks in a row.
JITQUANT_HD uint32_t sector_offset(uint32_t rows, uint32_t tile, uint32_t pitch) {
  return rows * 32 + (rows >> 4) * pitch + tile * 512;
}
// From the scales of 128 rows to the next, minus one tile.
JITQUANT_HD uint32_t sector_pitch(uint32_t tiles) {
  return (tiles - 1) * 512;
}

}  // namespace jitquant
