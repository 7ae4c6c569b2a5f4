// Row granularity of many short rows: a few lanes of a warp a row, or all of them, which hold it in
// registers, and no barrier. For rows of whole blocks that are aligned to 16 bytes.
#pragma once

#include "jitquant/nvfp4_kernels.cuh"

namespace jitquant {

// Blocks of values that a lane holds of a row, at most.
template <class T>
constexpr int kShortBlocks = sizeof(T) == 2 ? 4 : 2;

// Lanes of a row, as a power of two, where one holds `most` blocks of it: as few as hold it, and no
// fewer than the blocks that lie side by side in swizzled scales.
inline int short_row_lanes_log2(int most, int64_t width) {
  int log2 = 2;
  while ((int64_t{most} << log2) < width) ++log2;
  return log2;
}

constexpr int kShortThreads = 128;

// A lane that has made the codes of a block loads the same block of its next row in its place.
template <class T>
__global__ void __launch_bounds__(kShortThreads, sizeof(T) == 2 ? 7 : 6)
    short_rows_kernel(PlainSource<T> source, float divisor, float* gsa, Nvfp4Recipe recipe,
                      Nvfp4Output out, int lanes_log2) {
  constexpr int kMost = kShortBlocks<T>;
  const int width = static_cast<int>(out.blocks), row_count = static_cast<int>(out.rows);
  const int lanes = 1 << lanes_log2, rows_of_warp = 32 >> lanes_log2;
  const int lane = threadIdx.x & 31, mine = lane & (lanes - 1);
  const int step = gridDim.x * (kShortThreads / 32) * rows_of_warp;
  int first = (blockIdx.x * (kShortThreads / 32) + threadIdx.x / 32) * rows_of_warp;  // of the warp
  wait_for_previous();
  let_next_begin();

  // A multiple of four blocks is as far in any row, wherever it begins.
  const int place = static_cast<int>(scale_place(out, mine));
  const int place_step = static_cast<int>(scale_place(out, lanes));
  Block<T> x[kMost];
  int row = first + (lane >> lanes_log2);
  const T* p = row < row_count ? source.row(row) : nullptr;
  auto has = [&](int k) { return p != nullptr && mine + k * lanes < width; };
  auto fetch = [&](int k) {
    if (has(k)) x[k] = source.template fetch<true>(p, mine + k * lanes);
  };
#pragma unroll
  for (int k = 0; k < kMost; ++k) fetch(k);
#pragma unroll 1
  for (; first < row_count; first += step) {
    float block_max[kMost];
    uint32_t most = 0;  // an amax as bits; NaN is above infinity
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      block_max[k] = has(k) ? block_amax(x[k]) : 0.0f;
      most = max(most, float_bits(block_max[k]));
    }
#pragma unroll 1
    for (bool again = false;; again = true) {
#pragma unroll 1
      for (int offset = lanes >> 1; offset > 0; offset >>= 1) {
        most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
      }
      const bool has_nan = is_nan(bits_float(most));
      if (again || !is_nan(bits_float(__reduce_max_sync(0xffffffffu, most)))) break;
      // Once more without the NaN: the rest of the row is as if it were not there.
      if (!has_nan) continue;
      Amax<T> numbers;
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        if (has(k)) numbers.add(x[k]);
      }
      most = float_bits(numbers.result());
    }
    const float amax = bits_float(most);
    if (p != nullptr && mine == 0) gsa[row] = div_rn(amax, divisor);
    const Nvfp4Encoding encoding = nvfp4_encoding_from_amax(amax, divisor, recipe);
    const OutputRow to(out, row);
    const bool there = p != nullptr;
    row += step;
    p = row < row_count ? source.row(row) : nullptr;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const int b = mine + k * lanes;
      if (there && b < width) {
        to.store(b, place + k * place_step, nvfp4_quantize_block(x[k], block_max[k], encoding));
      }
      fetch(k);
    }
  }
  zero_padding(out);
}

}  // namespace jitquant
