// Norms of many short rows: some or all lanes of a warp hold a row in registers, without barriers.
// For rows of whole blocks that are aligned to 16 bytes.
#pragma once

#include "lanes.cuh"
#include "norm.cuh"

namespace jitquant {

// Shared memory for the weights.
template <class T>
size_t lane_norm_bytes(int64_t width) {
  return HeldWeights<T, false>::bytes(static_cast<int>((width + 31) / 32 * 32), 1);
}

// A lane has up to kMost blocks of a row. It loads its next row after it has multiplied this one by
// the weights.
template <class T, int kMost>
__global__ void __launch_bounds__(kLaneThreads, kMost > 2 ? 7 - kMost : 5)
    lane_norm_kernel(PlainSource<T> source, Normalize<T> norm, RowScale scale, Nvfp4Recipe recipe,
                     Nvfp4Output out, int lanes_log2) {
  extern __shared__ __align__(128) uint4 row_storage[];
  const HeldWeights<T, false> weights(row_storage);
  __shared__ BlockReduce::Scratch scratch;
  const LaneReduce reduce({lanes_log2});
  const bool quantizes = scale.mode != RowMode::kTensorAmax;
  RowLane at(source, out, lanes_log2);
  const int blocks = (at.width - at.mine + at.lanes - 1) >> lanes_log2;  // blocks of this lane
  const uint32_t place = kept(weights.place(at.mine));
#pragma unroll
  for (int k = 0; k < kMost; ++k) {
    if (k >= blocks) break;
    if (at.row < at.rows) {
      source.prefetch(source.row(static_cast<uint32_t>(at.row)), at.block(k));
    }
    if (at.row == 0) norm.prefetch(at.block(k));
  }
  wait_for_previous();
  let_next_begin();

  Block<T> x[kMost];
  auto fetch = [&](int r) {
    if (r >= at.rows) return;
    const T* const p = source.row(static_cast<uint32_t>(r));
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      if (k < blocks) x[k] = source.template fetch<true>(p, at.block(k));
    }
  };
  fetch(at.row);
  for (int b = threadIdx.x; b < ((at.width + 31) & ~31); b += kLaneThreads) {
    weights.put(norm.weight, b, static_cast<int>(source.cols));
  }
  const RowFacts facts = row_facts<true>(scale, recipe, source.cols);
  float tensor_amax = 0.0f;  // of the rows that this lane leads
  __syncthreads();
#pragma unroll 1
  for (; at.first < at.rows; at.next()) {
    const int there = at.row < at.rows ? blocks : 0;
    HeldProduct held[kMost];
    float block_max[kMost];
    float squares[kMost];
    uint32_t most = 0;  // an amax as bits; NaN compares above infinity
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      block_max[k] = squares[k] = 0.0f;
      if (k >= there) continue;
      weights.weigh(x[k], place + weights.place(k * at.lanes), held[k], block_max[k], squares[k]);
      most = max(most, float_bits(block_max[k]));
    }
    fetch(at.row + at.step);
    float2 total = reduce.sum_and_max(squares, bits_float(most));
    if (__any_sync(0xffffffffu, is_nan(total.y))) {
      // Again with NaNs ignored.
      float numbers = 0.0f;
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        if (k < there) numbers = amax_ignore_nan(numbers, held[k].amax_of_numbers());
      }
      total.y = reduce.max(numbers);
    }
    const RowEncoding e = finish_row<true>(total.x, total.y, norm, scale, recipe,
                                           at.row < at.rows ? at.row : 0, facts);
    if (there > 0 && at.mine == 0) tell_row<true>(e, norm, scale, at.row, tensor_amax);
    if (quantizes && there > 0) {
      Nvfp4Codes codes[kMost];
      HeldProduct::quantize(held, block_max, there, e, codes);
      const OutputRow to(out, at.row);
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        if (k < there) at.store(to, k, codes[k]);
      }
    }
  }
  if (quantizes) {
    zero_padding(out);
  } else {
    tensor_amax = BlockReduce(scratch).max(tensor_amax);
    if (threadIdx.x == 0) put_partial(scale, blockIdx.x, gridDim.x, tensor_amax);
  }
}

}  // namespace jitquant
