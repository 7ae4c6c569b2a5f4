// One thread block, cluster or some lanes of a warp per row, which the hardware starts in order:
// norms of x + residual with more than eight rows per SM, silu(gate) * up, and rows that are too
// long for one thread block. Loads the whole row, and a norm's weights, together and keeps it in
// registers. For rows of whole blocks that are aligned to 16 bytes.
#pragma once

#include "jitquant/cluster.cuh"
#include "lanes.cuh"
#include "norm.cuh"

namespace jitquant {

// Blocks per thread, and per lane, of one row. Lanes with three fit rows of 3 * 2^n blocks too.
constexpr int kRowBlocks = 2;
template <class T>
constexpr int kLaneRowBlocks = sizeof(T) == 2 ? 3 : 2;

// Registers per thread: for 16 bits three rows of 7168 on an SM if two tensors are read. Four were
// slower, because the writes of a row compete with the reads of others.
template <class Source, bool kNorm, class Team>
constexpr int row_registers(bool sm_100) {
  if (sizeof(typename Source::Element) == 4) return 128;
  if (std::is_same<Team, LaneTeam>::value) return (kNorm ? 128 : 96) + (sm_100 ? 16 : 0);
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

// Not for kTensorAmax. A row has `split` thread blocks of a cluster, and `ahead` rows later comes
// that of the cluster that replaces this one; or a row has 2^split lanes.
template <class Source, bool kNorm, class Team>
__global__ void __maxnreg__((row_registers<Source, kNorm, Team>(kSm100)))
    row_kernel(Source source, Normalize<typename Source::Element> norm, RowScale scale,
               Nvfp4Recipe recipe, Nvfp4Output out, int split, int ahead) {
  using T = typename Source::Element;
  using Value = typename Source::Value;
  using Kept = std::conditional_t<kNorm, HeldProduct, Value>;
  constexpr bool kLanes = std::is_same<Team, LaneTeam>::value;
  constexpr int kBlocks = kLanes ? kLaneRowBlocks<T> : kRowBlocks;
  using Reduce =
      std::conditional_t<kLanes, LaneReduce,
                         std::conditional_t<kNorm, TeamRowReduce<Team>, TeamReduce<Team>>>;
  const Team team = [&] {
    if constexpr (kLanes) {
      return Team{split};
    } else if constexpr (Team::kCluster) {
      return Team(split);
    } else {
      return Team();
    }
  }();
  __shared__ typename Reduce::Scratch scratch;
  Reduce reduce = [&] {
    if constexpr (kLanes) {
      return Reduce(team);
    } else if constexpr (kNorm) {
      return Reduce::template of<kBlocks>(scratch, team);
    } else {
      return Reduce(scratch, team);
    }
  }();
  int width = static_cast<int>(out.blocks);
  uint32_t r;
  if constexpr (kLanes) {
    r = team.template index<kLaneThreads>();
    if (r >= source.rows) r = 0, width = 0;  // this lane has no row
  } else {
    r = team.index();
  }
  const typename Source::Row row = source.row(r);
  const auto at = [&](int k) { return team.thread() + k * team.threads(); };
  if (is_first()) {
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      if (at(k) < width) source.prefetch(row, at(k));
    }
  }
  wait_for_previous();
  let_next_begin();

  Kept held[kBlocks];
  float block_max[kBlocks], squares[kBlocks];
  const auto take = [&](auto of_weight) {
    using W = decltype(of_weight);
    typename Source::Fetched fetched[kBlocks];
    Block<W> weight[kNorm ? kBlocks : 1];
    // Missing blocks of a row are zero.
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      fetched[k] = {};
      if (at(k) < width) fetched[k] = source.template fetch<true>(row, at(k));
    }
    if constexpr (kNorm) {
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
        weight[k] = {};
        if (at(k) < width) {
          const W* const p = static_cast<const W*>(norm.weight.data) + at(k) * 16;
          weight[k] = load_block<true>(p, 16, true);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
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
  for (int k = 0; k < kBlocks; ++k) most = max(most, float_bits(block_max[k]));
  float2 total = {0.0f, bits_float(most)};
  if constexpr (kNorm) {
    total = reduce.sum_and_max(squares, bits_float(most));
  } else {
    total.y = reduce.max(bits_float(most));
  }
  if (__any_sync(0xffffffffu, is_nan(total.y))) {
    // Again with NaNs ignored.
    float numbers = 0.0f;
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) numbers = fmaxf(numbers, amax_of_numbers(held[k]));
    total.y = reduce.max(numbers);
  }
  const RowFacts facts = row_facts<kNorm>(scale, recipe, source.cols);
  const RowEncoding e = finish_row<kNorm>(total.x, total.y, norm, scale, recipe, r, facts);
  Nvfp4Codes codes[kBlocks];
  if constexpr (kNorm) {
    HeldProduct::quantize(held, block_max, kBlocks, e, codes);
  } else {
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      codes[k] = nvfp4_quantize_block(held[k], block_max[k], e.encoding);
    }
  }
  const OutputRow to(out, r);
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    if (at(k) < width) to.store(at(k), scale_place(out, at(k)), codes[k]);
  }
  if (team.thread() == 0 && (!kLanes || width > 0)) {
    float unused = 0.0f;
    tell_row<kNorm>(e, norm, scale, r, unused);
  }
  zero_padding(out);
}

}  // namespace jitquant
