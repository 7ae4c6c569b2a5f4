// Row granularity for many short rows: some or all lanes of a warp hold a row in registers, without
// barriers. For rows of whole blocks that are aligned to 16 bytes.
#pragma once

#include "kernels.cuh"

namespace jitquant {

// log2 of the lanes per row, if a lane holds up to `most` blocks: as few lanes as can hold the row,
// but at least the number of blocks that are adjacent in swizzled scales.
inline int row_lanes_log2(int most, int64_t width) {
  int log2 = 2;
  while ((int64_t{most} << log2) < width) ++log2;
  return log2;
}

constexpr int kLaneThreads = 128;
// Rows of a thread block.
inline int lane_rows(int lanes_log2) {
  return kLaneThreads >> lanes_log2;
}

// The position of a lane in a grid whose warps take as many rows at a time as they have lanes for.
struct RowLane {
  int width, rows;        // blocks per row, and rows
  int lanes, mine;        // lanes per row, and the index of this one
  int first, row, step;   // the warp's first row, this lane's row, and the step to the next
  int place, place_step;  // offset of the scale of block `mine`, and from there to `mine` + `lanes`

  template <class Source>
  __device__ __forceinline__ RowLane(const Source& source, const Nvfp4Output& out, int lanes_log2)
      : width(static_cast<int>(blocks_of(source.cols))), rows(static_cast<int>(source.rows)) {
    const int lane = threadIdx.x & 31, rows_of_warp = 32 >> lanes_log2;
    lanes = 1 << lanes_log2,
    mine = static_cast<int>(kept(static_cast<uint32_t>(lane & (lanes - 1))));
    first = (blockIdx.x * (kLaneThreads / 32) + threadIdx.x / 32) * rows_of_warp;
    row = first + (lane >> lanes_log2);
    step = gridDim.x * (kLaneThreads / 32) * rows_of_warp;
    // The offset between every fourth block is the same in any row and from any start.
    place = static_cast<int>(scale_place(out, mine));
    place_step = static_cast<int>(scale_place(out, lanes));
  }
  __device__ __forceinline__ void next() {
    first += step;
    row += step;
  }
  __device__ __forceinline__ int block(int k) const { return mine + k * lanes; }
  __device__ __forceinline__ void store(const OutputRow& to, int k, const Nvfp4Codes& codes) const {
    to.store(block(k), place + k * place_step, codes);
  }
};

// A lane has up to kMost blocks of a row. When it has encoded one, it loads the same block of its
// next row in its place.
template <class T, int kMost>
__global__ void __launch_bounds__(kLaneThreads, sizeof(T) == 4 ? 6
                                                : kMost > 2    ? 7
                                                               : 8)
    lane_rows_kernel(PlainSource<T> source, float divisor, float* gsa, Nvfp4Recipe recipe,
                     Nvfp4Output out, int lanes_log2) {
  const LaneReduce reduce({lanes_log2});
  RowLane at(source, out, lanes_log2);
#pragma unroll
  for (int k = 0; k < kMost; ++k) {
    if (at.row < at.rows && at.block(k) < at.width) {
      source.prefetch(source.row(at.row), at.block(k));
    }
  }
  wait_for_previous();
  let_next_begin();

  Block<T> x[kMost];
  const T* p = at.row < at.rows ? source.row(at.row) : nullptr;
  auto has = [&](int k) { return p != nullptr && at.block(k) < at.width; };
  auto fetch = [&](int k) {
    if (has(k)) x[k] = source.template fetch<true>(p, at.block(k));
  };
#pragma unroll
  for (int k = 0; k < kMost; ++k) fetch(k);
#pragma unroll 1
  while (at.first < at.rows) {
    float block_max[kMost];
    uint32_t most = 0;  // an amax as bits; NaN compares above infinity
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      block_max[k] = has(k) ? block_amax(x[k]) : 0.0f;
      most = max(most, float_bits(block_max[k]));
    }
    float amax = reduce.max(bits_float(most));
    if (__any_sync(0xffffffffu, is_nan(amax))) {
      // Again with NaNs ignored.
      Amax<T> numbers;
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        if (has(k)) numbers.add(x[k]);
      }
      amax = reduce.max(numbers.result());
    }
    if (p != nullptr && at.mine == 0) gsa[at.row] = div_rn(amax, divisor);
    const Nvfp4Encoding encoding = nvfp4_encoding_from_amax(amax, divisor, recipe);
    const OutputRow to(out, at.row);
    const bool there = p != nullptr;
    at.next();
    p = at.row < at.rows ? source.row(at.row) : nullptr;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      if (there && at.block(k) < at.width) {
        at.store(to, k, nvfp4_quantize_block(x[k], block_max[k], encoding));
      }
      fetch(k);
    }
  }
  zero_padding(out);
}

}  // namespace jitquant
