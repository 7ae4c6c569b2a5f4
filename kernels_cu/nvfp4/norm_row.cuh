// Norms of x + residual with more than eight rows per SM: one thread block per row, which the
// hardware starts in order. Loads both tensors and the weights together and keeps the values in
// registers. For rows of whole blocks that are aligned to 16 bytes.
#pragma once

#include "norm.cuh"

namespace jitquant {

constexpr int kNormRowBlocks = 2;  // per thread, of one row

// Registers per thread: three rows of 7168 in 16 bits on an SM. Four were slower, because the
// writes of a row compete with the reads of others.
template <class T>
constexpr int norm_row_registers(bool sm_100) {
  return sizeof(T) == 4 ? 128 : (sm_100 ? 96 : 80);
}

template <class T>
__global__ void __maxnreg__(norm_row_registers<T>(kSm100))
    norm_row_kernel(ResidualSource<T> source, Normalize<T> norm, RowScale scale, Nvfp4Recipe recipe,
                    Nvfp4Output out) {
  __shared__ RowReduce::Scratch scratch;
  RowReduce reduce = RowReduce::of<kNormRowBlocks>(scratch);
  const int width = static_cast<int>(out.blocks), mine = static_cast<int>(threadIdx.x),
            threads = static_cast<int>(blockDim.x);
  const uint32_t r = blockIdx.x;
  const typename ResidualSource<T>::Row row = source.row(r);
  const auto at = [&](int k) { return mine + k * threads; };
  if (is_first()) {
#pragma unroll
    for (int k = 0; k < kNormRowBlocks; ++k) {
      if (at(k) < width) source.prefetch(row, at(k));
    }
  }
  wait_for_previous();
  let_next_begin();

  HeldProduct held[kNormRowBlocks];
  float block_max[kNormRowBlocks], squares[kNormRowBlocks];
  const auto take = [&](auto of_weight) {
    using W = decltype(of_weight);
    typename ResidualSource<T>::Fetched fetched[kNormRowBlocks];
    Block<W> weight[kNormRowBlocks];
    // Missing blocks of a row are zero.
#pragma unroll
    for (int k = 0; k < kNormRowBlocks; ++k) {
      fetched[k] = {};
      if (at(k) < width) fetched[k] = source.template fetch<true>(row, at(k));
    }
#pragma unroll
    for (int k = 0; k < kNormRowBlocks; ++k) {
      weight[k] = {};
      if (at(k) < width) {
        const W* const p = static_cast<const W*>(norm.weight.data) + at(k) * 16;
        weight[k] = load_block<true>(p, 16, true);
      }
    }
#pragma unroll
    for (int k = 0; k < kNormRowBlocks; ++k) {
      const Block<T> x = source.sum(fetched[k]);
      if (at(k) < width) store_block<true>(row.residual + at(k) * 16, 16, true, x);
      held[k] = HeldProduct::of(x, weight[k], block_max[k], squares[k]);
    }
  };
  norm.weight.fp32 ? take(float{}) : take(T{});

  uint32_t most = 0;  // an amax as bits
#pragma unroll
  for (int k = 0; k < kNormRowBlocks; ++k) most = max(most, float_bits(block_max[k]));
  float2 total = reduce.sum_and_max(squares, bits_float(most));
  if (is_nan(total.y)) {
    // Again with NaNs ignored.
    float numbers = 0.0f;
#pragma unroll
    for (int k = 0; k < kNormRowBlocks; ++k) numbers = fmaxf(numbers, held[k].amax_of_numbers());
    total.y = reduce.max(numbers);
  }
  const RowFacts facts = row_facts<true>(scale, recipe, source.cols);
  const RowEncoding e = finish_row<true>(total.x, total.y, norm, scale, recipe, r, facts);
  Nvfp4Codes codes[kNormRowBlocks];
  HeldProduct::quantize(held, block_max, kNormRowBlocks, e, codes);
  const OutputRow to(out, r);
#pragma unroll
  for (int k = 0; k < kNormRowBlocks; ++k) {
    if (at(k) < width) to.store(at(k), scale_place(out, at(k)), codes[k]);
  }
  if (mine == 0) {
    float unused = 0.0f;  // this kernel is not for kTensorAmax
    tell_row<true>(e, norm, scale, r, unused);
  }
  zero_padding(out);
}

}  // namespace jitquant
