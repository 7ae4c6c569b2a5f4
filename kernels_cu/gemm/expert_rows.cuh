// The product of rows with the weights of their experts: of sorted rows, or of few tokens, among
// which blocks are divided.
#pragma once

#include "expert_plan.cuh"

namespace jitquant {

// How much of the second product's weights a block of the first one prefetches into L2.
constexpr int kAheadBytes = 131072;

// Where the results of bundles go. A row of `out` is a sorted row, or a pair.
struct BundleOutput {
  void* out;
  DType dtype;
  int cols;
  bool activate;  // silu(gate) * up, if tiles have both
  const float* x_gsa;
  int64_t x_gsa_stride;
  ExpertWeights next;  // the next launch's weights, to prefetch; without rows if unknown
};

// Maps the rows of a bundle to rows of x. Each lane finds one and keeps it: if each of the loads of
// x found its own, that would take thousands of cycles per bundle. Rows that the bundle does not
// have are its first one, because no other row of x is sure to be written.
class BundleRows {
 public:
  // `order` is null if the rows of x are sorted.
  __device__ __forceinline__ BundleRows(const uint16_t* order, Bundle bundle, int divisor) {
    const int lane = threadIdx.x & 31;
    const int i = bundle.first() + (lane < bundle.count() ? lane : 0);
    own_ = order == nullptr ? i : order[i] / divisor;
  }
  static __device__ __forceinline__ bool any() { return true; }
  __device__ __forceinline__ int operator()(int row) const { return __shfl_sync(~0u, own_, row); }

 private:
  int own_;
};

template <class Input, bool kOneToken>
struct BundleJob {
  // Whether the number of an expert's rows decides between two ways to multiply.
  static constexpr bool kEither =
      !kOneToken && std::is_same<typename LinearInput<Input>::Operand, Bf16>::value;

  const ExpertWeights& w;
  const TileLayout& layout;
  const BundleRouting& routing;
  const BundleOutput& to;
  const ExpertPlan& plan;
  const BundleTables& tables;
  float* sums;
  uint32_t token;  // of the block, if kOneToken

  // If kOneToken, the block's row of x.
  __device__ __forceinline__ Bundle bundle() const {
    return kOneToken ? Bundle{0, token << 5 | 1u << 1 | 1u} : tables.bundles[block_words().bundle];
  }
  __device__ __forceinline__ int unit(int pass) const {
    return pass * (blockDim.x >> 5) + (threadIdx.x >> 5);
  }
  __device__ __forceinline__ int column(int pass) const { return unit(pass) * kUnit; }
  __device__ __forceinline__ BundleRows rows(int) const {
    return {kOneToken || routing.ids == nullptr ? nullptr : tables.order, bundle(),
            routing.of_tokens ? routing.top_k : 1};
  }

  __device__ __forceinline__ float request_gsa() const {
    return kOneToken || w.gsa_row != 0 ? 0.0f : w.gsa[bundle().expert * w.gsa_expert];
  }
  __device__ __forceinline__ void keep_gsa(float gsa) const {
    if (!kOneToken && thread_index() == 0) block_words().gsa = gsa;
  }

  template <LinearWay kWay>
  __device__ __forceinline__ void keep(float (&acc)[4], float own_undo, int tile, int own) const {
    using Way = WayTraits<kWay>;
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float* const to_sums = sums + (tile * plan.units + own) * Way::kSums;
    if constexpr (Way::kAfter && kOneToken) {
      const float undo = __shfl_sync(~0u, own_undo, 0);
      const float one = sum_of_columns(acc[0]), two = sum_of_columns(acc[2]);
      if (t == 0 && own < plan.units) {
        to_sums[g] = mul_rn(one, undo);
        to_sums[g + 8] = mul_rn(two, undo);
      }
    } else if constexpr (Way::kAfter) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[i] = sum_of_columns(acc[i]);
      const float undo[2] = {__shfl_sync(~0u, own_undo, 0), __shfl_sync(~0u, own_undo, 4)};
      if (t < 2 && own < plan.units) {
        const float scale = t == 0 ? undo[0] : undo[1];
        to_sums[t * kPitch + g] = mul_rn(t == 0 ? acc[0] : acc[1], scale);
        to_sums[t * kPitch + g + 8] = mul_rn(t == 0 ? acc[2] : acc[3], scale);
      }
    } else if (own < plan.units) {
      float* const column = to_sums + 2 * t * kPitch + g;
      column[0] = acc[0], column[kPitch] = acc[1];
      column[8] = acc[2], column[kPitch + 8] = acc[3];
    }
  }

  // Without this, memory would be idle while the block adds up its last sums and the next launch
  // begins. Called by one thread of the block.
  __device__ __forceinline__ void prefetch_next() const {
    const ExpertWeights& next = to.next;
    if (next.rows == 0) return;
    const int tiles = (next.rows + kTile - 1) / kTile;
    const TileRange range = tiles_of_block<kEither>(tables, tiles);
    const int bundle = range.begin / tiles, row = (range.begin - bundle * tiles) * kTile;
    const int most = min(next.rows - row, kAheadBytes / (next.cols / 2));
    const int rows = min((range.end - range.begin) * kTile, most);
    if (rows > 0) prefetch_rows(next, tables.bundles[bundle].expert, row, rows);
  }

  template <LinearWay kWay>
  __device__ __forceinline__ void add_up(int from, int count) const {
    using Way = WayTraits<kWay>;
    const int lane = threadIdx.x & 31, n = lane & 15, warps = thread_count() >> 5;
    const Bundle bundle = this->bundle();
    if constexpr (!kOneToken) {
      // By the last warp, which has the least to add up.
      if (thread_index() == thread_count() - 1 && from + count == block_words().end) {
        prefetch_next();
      }
    }
    const int first = kOneToken ? 0 : block_words().bundle * layout.tiles;
    const int rows_here = bundle.count(), pairs = (rows_here + 1) / 2;  // at most 4
    const int inverse = pairs == 1 ? 1 << 16 : pairs == 2 ? 1 << 15 : pairs == 3 ? 21846 : 1 << 14;
    // Each warp adds up two rows of x of a tile.
#pragma unroll 2
    for (int i = thread_index() >> 5; i < count * pairs; i += warps) {
      const int which = i * inverse >> 16, row = (i - which * pairs) * 2 + (lane >> 4);
      const float* p = sums + which * plan.units * Way::kSums + row * kPitch + n;
      float sum = 0.0f;
#pragma unroll 4
      for (int unit = 0; unit < plan.units; ++unit, p += Way::kSums) {
        sum = unit == 0 ? *p : add_rn(sum, *p);
      }
      int tile = from + which - first, expert = bundle.expert, out_row = bundle.first() + row;
      if constexpr (kOneToken) {
        out_row = tile / layout.tiles;
        tile -= out_row * layout.tiles;
        expert = tables.bundles[out_row].expert;
        if (expert < 0) continue;
        out_row += static_cast<int>(token) * routing.count;
      }
      const bool there = row < rows_here;
      const int half = layout.tile_rows == kTile ? n : n & 7;
      const int column = tile * layout.tile_rows + half;
      const int w_row = column + (n == half ? 0 : w.rows / 2);
      if (there && w_row < w.rows) {
        const float gsa = kOneToken || w.gsa_row != 0
                              ? w.gsa[expert * w.gsa_expert + w_row * w.gsa_row]
                              : block_words().gsa;
        sum = mul_rn(mul_rn(sum, two_to_the(-kExponent<Input, kWay>)), gsa);
      }
      if (!kOneToken && there) {
        if (routing.ids != nullptr) out_row = tables.order[out_row];
        if (to.x_gsa != nullptr) sum = mul_rn(sum, to.x_gsa[out_row * to.x_gsa_stride]);
      }
      const float up = __shfl_xor_sync(~0u, sum, 8);
      if (to.activate) sum = swiglu(sum, up);
      if (there && n == half && w_row < w.rows) {
        store_element(to.out, to.dtype, static_cast<int64_t>(out_row) * to.cols + column, sum);
      }
    }
  }
};

template <class Input, bool kAligned, bool kOneToken>
__global__ void __launch_bounds__(kMostWarps * 32, 1)
    nvfp4_bundles_kernel(const __grid_constant__ ExpertWeights w,
                         const __grid_constant__ TileLayout layout,
                         const __grid_constant__ LinearOperand x,
                         const __grid_constant__ BundleRouting routing,
                         const __grid_constant__ BundleOutput to,
                         const __grid_constant__ ExpertPlan plan) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  const int warp = thread_index() >> 5, warps = thread_count() >> 5;
  WarpRing ring(tiles, warp, plan.stages);
  unsigned char* const after_rings = tiles + warps * (plan.stages * kStage + kHeldX);
  const BundleTables tables = tables_at(after_rings + plan.tables_at, routing);
  float* const sums = reinterpret_cast<float*>(after_rings + plan.sums_at);

  using Job = BundleJob<Input, kOneToken>;
  const BlockToken token(kOneToken ? routing.tokens : 1);
  TileRange own = {};
  if constexpr (kOneToken) own = token.share(routing.count * layout.tiles);
  wait_for_previous();
  let_next_begin();
  if constexpr (kOneToken) {
    for (int i = thread_index(); i < routing.count; i += thread_count()) {
      const int expert = expert_of(routing, static_cast<int>(token.token) * routing.count + i);
      tables.bundles[i] = {expert, 1u << 1 | 1u};
    }
  } else {
    route(routing, tables, tiles);  // the rings are not in use yet
    own = tiles_of_block<Job::kEither>(tables, layout.tiles);
  }
  if (thread_index() == 0) begin_block(own);
  __syncthreads();
  const int begin = own.begin;
  volatile BlockWords& block = block_words();

  using Places = BundlePlaces<kOneToken>;
  const OwnWords words(after_rings + plan.words_at);
  TileStream<Places, kAligned> weights(Places(w, layout, plan, tables.bundles, begin, words), words,
                                       w.cols, plan, begin);
  weights.template next<0>(ring.at);

  constexpr bool kAfter = std::is_same<typename LinearInput<Input>::Operand, Bf16>::value;
  const Job job = {w, layout, routing, to, plan, tables, sums, token.token};
  if constexpr (kOneToken) {
    constexpr LinearWay kWay = kAfter ? LinearWay::kTwoRows : LinearWay::kEightRows;
    multiply_own_tiles<Input, kWay, kAligned>(weights, ring, words, x, plan, after_rings, job);
  } else {
    if (routing.offsets != nullptr) {
      // Rows without an expert are zero.
      const int64_t first = static_cast<int64_t>(tables.total[1]) * to.cols;
      const int64_t none = static_cast<int64_t>(routing.count) * to.cols - first;
      for (int64_t i = static_cast<int64_t>(blockIdx.x) * thread_count() + thread_index(); i < none;
           i += static_cast<int64_t>(gridDim.x) * thread_count()) {
        store_element(to.out, to.dtype, first + i, 0.0f);
      }
    }
    // Bundles of experts with at most two rows come first.
    int bundle = begin / layout.tiles;
    const auto multiply_bundles = [&](auto way, int bundles) {
      for (; bundle < bundles && block.from < block.end; ++bundle) {
        __syncthreads();
        if (thread_index() == 0) {
          block.bundle = bundle;
          block.stop = min(block.end, (bundle + 1) * layout.tiles);
        }
        __syncthreads();
        multiply_own_tiles<Input, decltype(way)::value, kAligned>(weights, ring, words, x, plan,
                                                                  after_rings, job);
      }
    };
    if constexpr (Job::kEither) {
      multiply_bundles(std::integral_constant<LinearWay, LinearWay::kTwoRows>(), tables.total[2]);
    }
    multiply_bundles(std::integral_constant<LinearWay, LinearWay::kEightRows>(), tables.total[0]);
  }
}

#ifndef __CUDACC_RTC__
namespace {

template <class Input, bool kOneToken>
cudaError_t launch_bundles(const ExpertWeights& w, const LinearOperand& x,
                           const BundleRouting& routing, const BundleOutput& to,
                           cudaStream_t stream) {
  TileLayout layout = {};
  layout.tile_rows = to.activate ? 8 : kTile;
  const int tiled = to.activate ? w.rows / 2 : w.rows;
  layout.tiles = (tiled + layout.tile_rows - 1) / layout.tile_rows;
  const int64_t second = to.activate ? w.rows / 2 : 8;
  layout.second_codes = second * (w.cols / 2);
  layout.second_scales = second * (w.cols / 16);

  using Two = WayTraits<LinearWay::kTwoRows>;
  using Eight = WayTraits<LinearWay::kEightRows>;
  constexpr bool kAfter = std::is_same<typename LinearInput<Input>::Operand, Bf16>::value;
  const bool aligned = is_aligned<Input>(w, x);
  const int units = (w.cols + kUnit - 1) / kUnit;
  const SumBytes sums = {4 * (kAfter ? Two::kSums : Eight::kSums),
                         4 * (kOneToken && kAfter ? Two::kSums : Eight::kSums)};
  const bool turned = aligned && !LinearInput<Input>::kCodes;
  BlockShape shape = {};
  const int64_t tiles = kOneToken ? static_cast<int64_t>(routing.count) * layout.tiles : 0;
  if (!plan_shape(shape, routing.tokens, units, tiles, sums, turned,
                  table_bytes(routing.count, routing.experts))) {
    return cudaErrorInvalidConfiguration;
  }
  plan_steps(shape, w, layout.tile_rows);
  if (aligned) {
    return launch_shape<&nvfp4_bundles_kernel<Input, true, kOneToken>>(shape, stream, w, layout, x,
                                                                       routing, to, shape.plan);
  }
  if constexpr (kTakesUnaligned) {
    return launch_shape<&nvfp4_bundles_kernel<Input, false, kOneToken>>(shape, stream, w, layout, x,
                                                                        routing, to, shape.plan);
  }
  return kLacksKernels;
}

}  // namespace
#endif

}  // namespace jitquant
