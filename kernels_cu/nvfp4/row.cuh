// One thread block or cluster per row, which the hardware starts in order: norms of x + residual
// with more than eight rows per SM, silu(gate) * up, and rows that are too long for one thread
// block. Loads the whole row, and a norm's weights, together and keeps it in registers. For rows of
// whole blocks that are aligned to 16 bytes.
#pragma once

#include "jitquant/cluster.cuh"
#include "norm.cuh"

namespace jitquant {

constexpr int kRowBlocks = 2;  // per thread, of one row

// Registers per thread: for 16 bits three rows of 7168 on an SM if two tensors are read. Four were
// slower, because the writes of a row compete with the reads of others.
template <class Source, bool kNorm>
constexpr int row_registers(bool sm_100) {
  if (sizeof(typename Source::Element) == 4) return 128;
  if (sizeof(typename Source::Fetched) > sizeof(Block<float>) / 2) return sm_100 ? 96 : 80;
  return kNorm ? 72 : 56;
}

// The value of a whole block from its fetched data. Zeros if nothing was fetched; then nothing is
// stored either.
template <class Source>
__device__ __forceinline__ typename Source::Value whole_value(
    const Source& source, const typename Source::Fetched& fetched, const typename Source::Row& row,
    int block, bool) {
  return source.template value<true>(fetched, row, block);
}
template <class T>
__device__ __forceinline__ Block<T> whole_value(const ResidualSource<T>& source,
                                                const typename ResidualSource<T>::Fetched& fetched,
                                                const typename ResidualSource<T>::Row& row,
                                                int block, bool there) {
  const Block<T> sum = source.sum(fetched);
  if (there) store_block<true>(row.residual + block * 16, 16, true, sum);
  return sum;
}

__device__ __forceinline__ float amax_of_numbers(const HeldProduct& x) {
  return x.amax_of_numbers();
}
template <class E>
__device__ __forceinline__ float amax_of_numbers(const Block<E>& x) {
  Amax<E> numbers;
  numbers.add(x);
  return numbers.result();
}

// Not for kTensorAmax. A row has `cluster` thread blocks, and `ahead` rows later comes that of the
// cluster that replaces this one.
template <class Source, bool kNorm, class Team>
__global__ void __maxnreg__((row_registers<Source, kNorm>(kSm100)))
    row_kernel(Source source, Normalize<typename Source::Element> norm, RowScale scale,
               Nvfp4Recipe recipe, Nvfp4Output out, int cluster, int ahead) {
  using T = typename Source::Element;
  using Value = typename Source::Value;
  using Kept = std::conditional_t<kNorm, HeldProduct, Value>;
  using Reduce = std::conditional_t<kNorm, TeamRowReduce<Team>, TeamReduce<Team>>;
  const Team team = [&] {
    if constexpr (Team::kCluster) {
      return Team(cluster);
    } else {
      return Team();
    }
  }();
  __shared__ typename Reduce::Scratch scratch;
  Reduce reduce = [&] {
    if constexpr (kNorm) {
      return Reduce::template of<kRowBlocks>(scratch, team);
    } else {
      return Reduce(scratch, team);
    }
  }();
  const int width = static_cast<int>(out.blocks);
  const uint32_t r = team.index();
  const typename Source::Row row = source.row(r);
  const auto at = [&](int k) { return team.thread() + k * team.threads(); };
  if (is_first()) {
#pragma unroll
    for (int k = 0; k < kRowBlocks; ++k) {
      if (at(k) < width) source.prefetch(row, at(k));
    }
  }
  wait_for_previous();
  let_next_begin();

  Kept held[kRowBlocks];
  float block_max[kRowBlocks], squares[kRowBlocks];
  const auto take = [&](auto of_weight) {
    using W = decltype(of_weight);
    typename Source::Fetched fetched[kRowBlocks];
    Block<W> weight[kNorm ? kRowBlocks : 1];
    // Missing blocks of a row are zero.
#pragma unroll
    for (int k = 0; k < kRowBlocks; ++k) {
      fetched[k] = {};
      if (at(k) < width) fetched[k] = source.template fetch<true>(row, at(k));
    }
    if constexpr (kNorm) {
#pragma unroll
      for (int k = 0; k < kRowBlocks; ++k) {
        weight[k] = {};
        if (at(k) < width) {
          const W* const p = static_cast<const W*>(norm.weight.data) + at(k) * 16;
          weight[k] = load_block<true>(p, 16, true);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kRowBlocks; ++k) {
      const Value x = whole_value(source, fetched[k], row, at(k), at(k) < width);
      if constexpr (kNorm) {
        held[k] = HeldProduct::of(x, weight[k], block_max[k], squares[k]);
      } else {
        held[k] = x;
        block_max[k] = block_amax(x);
      }
    }
  };
  kNorm&& norm.weight.fp32 ? take(float{}) : take(T{});
  if constexpr (Team::kCluster) {
    team.template prefetch<kRowBlocks>(source, r + static_cast<uint32_t>(ahead), width);
  }

  uint32_t most = 0;  // an amax as bits
#pragma unroll
  for (int k = 0; k < kRowBlocks; ++k) most = max(most, float_bits(block_max[k]));
  float2 total = {0.0f, bits_float(most)};
  if constexpr (kNorm) {
    total = reduce.sum_and_max(squares, bits_float(most));
  } else {
    total.y = reduce.max(bits_float(most));
  }
  if (is_nan(total.y)) {
    // Again with NaNs ignored.
    float numbers = 0.0f;
#pragma unroll
    for (int k = 0; k < kRowBlocks; ++k) numbers = fmaxf(numbers, amax_of_numbers(held[k]));
    total.y = reduce.max(numbers);
  }
  const RowFacts facts = row_facts<kNorm>(scale, recipe, source.cols);
  const RowEncoding e = finish_row<kNorm>(total.x, total.y, norm, scale, recipe, r, facts);
  Nvfp4Codes codes[kRowBlocks];
  if constexpr (kNorm) {
    HeldProduct::quantize(held, block_max, kRowBlocks, e, codes);
  } else {
#pragma unroll
    for (int k = 0; k < kRowBlocks; ++k) {
      codes[k] = nvfp4_quantize_block(held[k], block_max[k], e.encoding);
    }
  }
  const OutputRow to(out, r);
#pragma unroll
  for (int k = 0; k < kRowBlocks; ++k) {
    if (at(k) < width) to.store(at(k), scale_place(out, at(k)), codes[k]);
  }
  if (team.thread() == 0) {
    float unused = 0.0f;
    tell_row<kNorm>(e, norm, scale, r, unused);
  }
  zero_padding(out);
}

}  // namespace jitquant
