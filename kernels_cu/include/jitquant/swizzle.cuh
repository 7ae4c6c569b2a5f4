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
JITQUANT_HD int64_t swizzled_blocks(int64_t blocks) {
  return (blocks + 3) & ~int64_t{3};
}

// The offset of the scale of (row, block). `padded_blocks` is swizzled_blocks. Fewer than 2^31
// tiles may be counted in uint32_t.
template <class Int = int64_t>
JITQUANT_HD int64_t swizzle_128x4(std::common_type_t<Int> row, std::common_type_t<Int> block,
                                  std::common_type_t<Int> padded_blocks) {
  const Int tile = (row >> 7) * (padded_blocks >> 2) + (block >> 2);
  return static_cast<int64_t>(tile) * 512 + (row & 31) * 16 + ((row >> 5) & 3) * 4 + (block & 3);
}

// The same of `blocks` blocks in a row, or, if not swizzled, of rows of `step` scales.
JITQUANT_HD int64_t scale_offset(bool swizzled, int64_t row, int64_t block, int64_t blocks,
                                 int64_t step) {
  return swizzled ? swizzle_128x4(row, block, swizzled_blocks(blocks)) : row * step + block;
}

}  // namespace jitquant
