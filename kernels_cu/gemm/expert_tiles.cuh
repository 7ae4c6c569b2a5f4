// Products of many rows of each expert with its NVFP4 weights, by warpgroup products (sm_90a). The
// blocks, stages and products are those of linear_tiles.cuh. Here a tile belongs to one expert, and
// the rows of x are sorted by expert.
//
//   tile      kOfCluster rows of an expert's W by kRows of its rows of x, over all of k. With
//             kActivate, a block's half of the rows of W is gates, and the other half their ups
//   walk      expert by expert; up to kBand tiles of x with all of W, so that what clusters read at
//             the same time stays in L2
//
// A row's result does not depend on the neighboring rows, nor on its place among the sorted ones.
#pragma once

#include "experts.h"
#include "linear_tiles.cuh"

namespace jitquant {

// Rows of x sorted by expert.
struct SortedRows {
  const void* ends;  // (experts,): where the rows of each expert end, made ascending and clamped
  bool wide;         // int64, else int32
  const int* any;    // 0 if no expert has so many rows; null if unknown
  const int* order;  // (rows,): the row of y of each sorted row; null if it is the same
  int rows;
  int least;  // rows of an expert, if this launch multiplies them
};

// Where the products go: y in rows `cols` elements apart, in fp32 or in x's dtype.
struct TileOutput {
  void* out;
  bool fp32;
  bool clears;  // rows past the last end
  int cols;
  const float* x_gsa;
  int64_t x_gsa_stride;
};

constexpr int kBand = 16;
template <class Shape>
constexpr int kBoxRows = Shape::kRows / 4 < 32 ? 32 : Shape::kRows / 4;  // copied at once

// Kernels for: a layer of few rows that are not sorted; more rows, by bundles and by tiles, of
// which tall ones are for many rows per expert; what a layer has beside its products; and products
// of rows sorted by expert, by tiles with results in x's dtype and in fp32.
// -DJITQUANT_EXPERTS=<sum> builds a library with some of them, which compiles faster.
enum Has : int {
  kUnsorted = 1,
  kBundled = 2,
  kTiled = 4,
  kTall = 8,
  kLayer = 16,
  kToOwn = 32,
  kToFloat = 64
};
constexpr bool has(int kernels) {
#ifdef JITQUANT_EXPERTS
  return (JITQUANT_EXPERTS & kernels) == kernels;
#else
  return true;
#endif
}
constexpr bool kGrouped = has(kToOwn) || has(kToFloat);
// Results of tiles that are not activated.
constexpr bool kOwnResults = has(kToOwn), kFloatResults = has(kLayer) || has(kToFloat);

#if defined(JITQUANT_HAS_WARPGROUPS)

// Finds the tiles of a cluster.
template <class Shape>
struct ExpertWalk {
  const int* ends;    // in shared memory, (experts,)
  const int* before;  // (experts + 1,): tiles of x before each expert's
  int experts, tiles_of_weights;
  int expert, row, end, w_tile;  // of the tile: its expert, rows of x, and place in W

  __device__ __forceinline__ int rows() const { return end - row; }

  __device__ __forceinline__ bool at(int index) {
    if (index >= before[experts] * tiles_of_weights) return false;
    const int x_tile = index / tiles_of_weights;
    int low = 0, high = experts - 1;  // the last expert with before[expert] <= x_tile
    while (low < high) {
      const int middle = (low + high + 1) >> 1;
      if (before[middle] <= x_tile) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int all = before[low + 1] - before[low], rest = index - before[low] * tiles_of_weights;
    const int per = kBand * tiles_of_weights, band = rest / per, own = rest - band * per;
    const int height = min(all - band * kBand, kBand);
    // Tiles of nearly equal rows: those of few are multiplied by fewer columns.
    const int begin = low == 0 ? 0 : ends[low - 1], last = ends[low];
    const int each = ((last - begin + all - 1) / all + 7) / 8 * 8;
    expert = low;
    row = begin + (band * kBand + own % height) * each;
    end = min(row + each, last);
    w_tile = own / height;
    return true;
  }
};

// Reads the ends of the experts' rows and counts their tiles. `ends` and `before` have room for
// experts + 1 numbers each. One warp calls it.
template <class Shape>
__device__ __forceinline__ void count_tiles(const SortedRows& rows, int experts, int* ends,
                                            int* before) {
  const int lane = threadIdx.x & 31;
  int end_before = 0, tiles_before = 0;
  for (int first = 0; first < experts; first += 32) {
    const int e = first + lane;
    int end = 0;
    if (e < experts) {
      const int64_t given = integer_at(rows.ends, rows.wide, e);
      end = given < 0 ? 0 : given > rows.rows ? rows.rows : static_cast<int>(given);
    }
    end = max_up_to(max(end, end_before), lane);
    int begin = __shfl_up_sync(~0u, end, 1);
    if (lane == 0) begin = end_before;
    const int count = end - begin;
    const int own = count < rows.least ? 0 : (count + Shape::kRows - 1) / Shape::kRows;
    const int tiles = sum_up_to(own, lane);
    if (e < experts) ends[e] = end, before[e] = tiles_before + tiles - own;
    end_before = __shfl_sync(~0u, end, 31);
    tiles_before += __shfl_sync(~0u, tiles, 31);
  }
  if (lane == 0) before[experts] = tiles_before;
}

// Row of an expert's W that is row i of a block's tile: neighbors, or a gate and its up.
template <bool kActivate>
__device__ __forceinline__ int weight_row(const ExpertWeights& w, int first, int i) {
  return kActivate ? first + (i >> 1) + (i & 1) * (w.rows / 2) : first + i;
}

// Copies all stages of a block's tiles, as copy_stages() does.
template <class Shape, bool kActivate>
__device__ __forceinline__ void copy_expert_stages(const ExpertWeights& w, const TensorMap& codes,
                                                   const TensorMap& x_map, ExpertWalk<Shape>& walk,
                                                   const StagesAt& at, int first, int step,
                                                   int stages) {
  constexpr int kBoxes = Shape::kRows / kBoxRows<Shape>;
  constexpr int kBlock = kActivate ? Shape::kWeights / 2 : Shape::kWeights;
  const int bound = kActivate ? w.rows / 2 : w.rows;
  const RowScales<Shape> scales(w.scales, w.cols);
  Ring<Shape::kStages> ring;
  for (int tile = first; walk.at(tile); tile += step) {
    const int first_row = (walk.w_tile * 2 + at.rank) * kBlock;
    const int64_t of_expert = static_cast<int64_t>(walk.expert) * w.rows;
    const int boxes = (walk.rows() + kBoxRows<Shape> - 1) / kBoxRows<Shape>;
#pragma unroll 1
    for (int s = 0; s < stages; ++s, ring.next()) {
      const uint32_t stage = at.ring + ring.stage * Shape::kStage, full = at.full + 8 * ring.stage;
      wait_for(at.empty + 8 * ring.stage, ring.parity ^ 1);
      if (threadIdx.x == 0) {
        const int column = s * (Shape::kDepth / 2), row = static_cast<int>(of_expert) + first_row;
        expect_bytes(full, boxes * (Shape::kX / kBoxes) + Shape::kCodes);
        copy_own_tile(stage + Shape::kCodesAt, &codes, column, row, full);
        if constexpr (kActivate) {
          copy_own_tile(stage + Shape::kCodesAt + Shape::kCodes / 2, &codes, column,
                        row + w.rows / 2, full);
        }
#pragma unroll
        for (int h = 0; h < Shape::kDepth / 64; ++h) {
          // Each block copies every second box for both.
          for (int box = at.rank; box < boxes; box += 2) {
            copy_tile(stage + (h * kBoxes + box) * kBoxRows<Shape> * 128, &x_map,
                      s * Shape::kDepth + h * 64, walk.row + box * kBoxRows<Shape>, full, 3);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < (Shape::kWeights + 127) / 128; ++i) {
        const int row = i * 128 + threadIdx.x;
        scales.copy(stage + Shape::kScalesAt + row * (Shape::kDepth / 16),
                    of_expert + weight_row<kActivate>(w, first_row, row), s,
                    first_row + (kActivate ? row >> 1 : row) < bound);
      }
      arrive_after_copies(full);
    }
  }
}

// Stores a warpgroup's sums. A lane's sums are those of two rows of W, n and n + 1 or a gate and
// its up, and of two neighboring rows of x out of every eight. Half of the sums have code, to save
// the compiler time, and the others move to where these were.
template <class Out, bool kActivate, int kSums>
__device__ __forceinline__ void store_expert_sums(const TileOutput& to, const SortedRows& rows,
                                                  float (&d)[kSums], float back,
                                                  const float (&gsa)[2], int row0, int end, int n) {
  if (n >= to.cols) return;
  const bool second = n + 1 < to.cols;
  const bool pairs =
      to.cols % 2 == 0 && reinterpret_cast<uintptr_t>(to.out) % (2 * sizeof(Out)) == 0;
#pragma unroll 1
  for (int half = 0;; ++half) {
#pragma unroll
    for (int j = 0; j < kSums / 8; ++j, row0 += 8) {
      if (row0 >= end) return;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = row0 + 2 * (threadIdx.x & 3) + i;
        if (row >= end) continue;
        const int out_row = rows.order == nullptr ? row : rows.order[row];
        float y[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) y[h] = mul_rn(mul_rn(d[4 * j + 2 * h + i], back), gsa[h]);
        Out* const out = static_cast<Out*>(to.out) + static_cast<int64_t>(out_row) * to.cols + n;
        if constexpr (kActivate) {
          out[0] = from_float<Out>(swiglu(y[0], y[1]));
        } else {
          if (to.x_gsa != nullptr) {
            const float x_gsa = to.x_gsa[row * to.x_gsa_stride];
            y[0] = mul_rn(y[0], x_gsa), y[1] = mul_rn(y[1], x_gsa);
          }
          if (pairs) {
            if constexpr (sizeof(Out) == 4) {
              *reinterpret_cast<float2*>(out) = make_float2(y[0], y[1]);
            } else {
              *reinterpret_cast<uint32_t*>(out) = pair_from_floats<Out>(y[0], y[1]);
            }
            continue;
          }
          out[0] = from_float<Out>(y[0]);
          if (second) out[1] = from_float<Out>(y[1]);
        }
      }
    }
    if (half == 1) return;
#pragma unroll
    for (int j = 0; j < kSums / 2; ++j) d[j] = d[kSums / 2 + j];
  }
}

#endif

template <class T, class Shape, bool kActivate>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    nvfp4_expert_tiles_kernel(const __grid_constant__ ExpertWeights w,
                              const __grid_constant__ SortedRows rows,
                              const __grid_constant__ TensorMap codes,
                              const __grid_constant__ TensorMap x_map,
                              const __grid_constant__ TileOutput to) {
#if defined(JITQUANT_HAS_WARPGROUPS)
  static_assert(Shape::kAlong == 1 && Shape::kShares == 1, "k is not split");
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ __align__(8) uint64_t barriers[2 * Shape::kStages];
  const StagesAt at = begin_stages<Shape>(tiles, barriers);
  // By a shuffle, so that the compiler sees that lanes agree.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  const int first = blockIdx.x >> 1, step = gridDim.x >> 1;
  const int stages = (w.cols + Shape::kDepth - 1) / Shape::kDepth;
  int* const ends = reinterpret_cast<int*>(tiles + Shape::kShared);
  int* const before = ends + w.experts + 1;
  if (threadIdx.x == 0) prefetch_map(&codes), prefetch_map(&x_map);
  wait_for_previous();
  let_next_begin();
  if (rows.any != nullptr && __ldcg(rows.any) == 0) return;
  if (threadIdx.x < 32) count_tiles<Shape>(rows, w.experts, ends, before);
  __syncthreads();
  if (to.clears) {
    const int64_t size = to.fp32 ? 4 : 2,
                  all = static_cast<int64_t>(rows.rows) * to.cols * size / 2;
    const int64_t first_none = static_cast<int64_t>(ends[w.experts - 1]) * to.cols * size / 2;
    for (int64_t i = first_none + static_cast<int64_t>(blockIdx.x) * Shape::kThreads + threadIdx.x;
         i < all; i += static_cast<int64_t>(gridDim.x) * Shape::kThreads) {
      static_cast<uint16_t*>(to.out)[i] = 0;
    }
  }
  constexpr int kOfCluster = kActivate ? Shape::kWeights : 2 * Shape::kWeights;
  const int bound = kActivate ? w.rows / 2 : w.rows;
  ExpertWalk<Shape> walk = {ends, before, w.experts, (bound + kOfCluster - 1) / kOfCluster,
                            0,    0,      0,         0};
  if (warpgroup == 0) {
    give_registers<Shape::kFewRegisters>();
    copy_expert_stages<Shape, kActivate>(w, codes, x_map, walk, at, first, step, stages);
  } else {
    take_registers<Shape::kManyRegisters>();
    const int across = warpgroup - 1;
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, g = lane >> 2;
    constexpr int kPairs = Shape::kDepth / 32;  // of k-steps of 16
    const int own_row = across * 64 + warp * 16 + 2 * g;
    const int gate = own_row / 2;
    const int rows_of_w[2] = {kActivate ? gate : own_row,
                              kActivate ? Shape::kWeights / 2 + gate : own_row + 1};
    LaneCodes<T, Shape, kPairs> lane_codes(at.ring, rows_of_w, own_row, 0);
    Ring<Shape::kStages> ring;
    for (int i = first; walk.at(i); i += step) {
      float d[Shape::kSums];
      // Multiplies a tile of at most this many rows of x. Only the products are compiled for each
      // such number, as storing takes the compiler longer.
      const auto multiply = [&](auto rows_of_x) {
        auto& sums = reinterpret_cast<float (&)[decltype(rows_of_x)::value / 2]>(d);
#pragma unroll
        for (float& sum : sums) sum = 0.0f;
        multiply_stages<T, Shape, true>(sums, at, ring, lane_codes, 0, {0, stages});
      };
      if constexpr (Shape::kRows < 256) {
        multiply(std::integral_constant<int, Shape::kRows>());
      } else if (walk.rows() <= 64) {
        multiply(std::integral_constant<int, 64>());
      } else if (walk.rows() <= 128) {
        multiply(std::integral_constant<int, 128>());
      } else if (walk.rows() <= 160) {
        multiply(std::integral_constant<int, 160>());
      } else if (walk.rows() <= 192) {
        multiply(std::integral_constant<int, 192>());
      } else {
        multiply(std::integral_constant<int, 256>());
      }
      const int block_first = (walk.w_tile * 2 + at.rank) * (kOfCluster / 2);
      const int n = block_first + (kActivate ? own_row / 2 : own_row);
      float gsa[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = min(kActivate ? n + h * bound : n + h, w.rows - 1);
        gsa[h] = w.gsa[walk.expert * w.gsa_expert + row * w.gsa_row];
      }
      const float back = two_to_the(-ScaledCodes<T>::kExponent);
      if constexpr (kActivate) {
        store_expert_sums<T, true>(to, rows, d, back, gsa, walk.row, walk.end, n);
      } else if (kFloatResults && (!kOwnResults || to.fp32)) {
        store_expert_sums<float, false>(to, rows, d, back, gsa, walk.row, walk.end, n);
      } else if constexpr (kOwnResults) {
        store_expert_sums<T, false>(to, rows, d, back, gsa, walk.row, walk.end, n);
      }
    }
  }
  meet_cluster();  // the other block may still arrive at this block's barriers
#endif
}

// ---- sorting pairs of a row and an expert -------------------------------------------------------

constexpr int kSortWarps = 16;

// Sorts the pairs by expert and copies the row of x of each pair to its place, unless its expert
// has fewer than `least` rows. Every block sorts all pairs, the same way, and copies its share of
// the places. The sort is stable.
struct SortedPairs {
  void* x;     // (pairs, cols)
  int* ends;   // (experts + 1,): where their rows end; the last one is 0 if none has `least` rows
  int* order;  // (pairs,)
  int least;
};

JITQUANT_HD int sort_bytes(int pairs, int experts, int blocks) {
  return ((kSortWarps + 2) * experts + (pairs + blocks - 1) / blocks) * 4;
}

// A template, so that only libraries that launch it compile it.
template <class T>
__global__ void __launch_bounds__(kSortWarps * 32)
    nvfp4_sort_pairs_kernel(const __grid_constant__ LinearOperand x, const void* ids,
                            const bool wide, const int pairs, const int experts, const int top_k,
                            const __grid_constant__ SortedPairs to) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  constexpr int kThreads = kSortWarps * 32;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  int* const counts = reinterpret_cast<int*>(tiles);  // (warps, experts)
  int* const begins = counts + kSortWarps * experts;  // (experts,)
  int* const totals = begins + experts;               // (experts,)
  int* const own = totals + experts;                  // pairs at the block's places; -1: no copy
  for (int i = thread; i < kSortWarps * experts; i += kThreads) counts[i] = 0;
  wait_for_previous();
  let_next_begin();
  __syncthreads();
  const auto expert_at = [&](int pair) {
    const int64_t id = integer_at(ids, wide, pair);
    return id >= 0 && id < experts ? static_cast<int>(id) : -1;
  };
  const int share = (pairs + kThreads - 1) / kThreads * 32, from = warp * share;
  const int past = min(from + share, pairs);
  int* const own_counts = counts + warp * experts;
  constexpr int kAtOnce = 4;  // ids that a lane loads before it needs the first
  const auto walk = [&](auto&& visit) {
    for (int first = from; first < past; first += 32 * kAtOnce) {
      int loaded[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int pair = first + 32 * i + lane;
        loaded[i] = pair < past ? expert_at(pair) : -1;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int expert = loaded[i];
        const uint32_t alike = __match_any_sync(~0u, expert);
        const int before = __popc(alike & ((1u << lane) - 1u));
        const int count = expert >= 0 ? own_counts[expert] : 0;
        __syncwarp();
        if (expert >= 0) {
          visit(first + 32 * i + lane, expert, count + before);
          if (before == 0) own_counts[expert] = count + __popc(alike);
        }
        __syncwarp();
      }
    }
  };
  walk([](int, int, int) {});
  __syncthreads();
  for (int e = thread; e < experts; e += kThreads) {
    int sum = 0;
    for (int w = 0; w < kSortWarps; ++w) {
      const int count = counts[w * experts + e];
      counts[w * experts + e] = sum;
      sum += count;
    }
    totals[e] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    int all = 0;
    for (int first = 0; first < experts; first += 32) {
      const int count = first + lane < experts ? totals[first + lane] : 0;
      const int sum = sum_up_to(count, lane);
      if (first + lane < experts) begins[first + lane] = all + sum - count;
      all += __shfl_sync(~0u, sum, 31);
    }
  }
  const int places = (pairs + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  const int first_place = static_cast<int>(blockIdx.x) * places;
  for (int i = thread; i < places; i += kThreads) own[i] = -1;
  __syncthreads();
  if (blockIdx.x == 0) {
    bool any = false;
    for (int e = thread; e < experts; e += kThreads) {
      to.ends[e] = begins[e] + totals[e];
      any |= totals[e] >= to.least;
    }
    any = __syncthreads_or(any) != 0;
    if (thread == 0) to.ends[experts] = any ? 1 : 0;
  }
  walk([&](int pair, int expert, int rank) {
    const int place = begins[expert] + rank;
    if (place < first_place || place - first_place >= places) return;
    to.order[place] = pair;
    if (totals[expert] >= to.least) own[place - first_place] = pair;
  });
  __syncthreads();
  const int pieces = x.cols / 8;
  for (int i = warp; i < places; i += kSortWarps) {
    if (own[i] < 0) continue;
    const uint4* const row = reinterpret_cast<const uint4*>(
        static_cast<const uint16_t*>(x.data) + static_cast<int64_t>(own[i] / top_k) * x.stride);
    uint4* const place = static_cast<uint4*>(to.x) + static_cast<int64_t>(first_place + i) * pieces;
#pragma unroll 4
    for (int piece = lane; piece < pieces; piece += 32) place[piece] = row[piece];
  }
}

#ifndef __CUDACC_RTC__
namespace {

template <class T, class Shape, bool kActivate>
cudaError_t launch_expert_tiles_as(const ExpertWeights& w, const LinearOperand& x,
                                   const SortedRows& rows, const TileOutput& to,
                                   cudaStream_t stream) {
  constexpr CUtensorMapDataType kType = std::is_same<T, Bf16>::value
                                            ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  constexpr int kBox = kActivate ? Shape::kWeights / 2 : Shape::kWeights;
  TensorMap codes, x_map;
  if (!encode_map(codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, w.codes, w.cols / 2,
                  static_cast<int64_t>(w.experts) * w.rows, w.cols / 2, Shape::kDepth / 2, kBox,
                  Shape::kDepth / 2) ||
      !encode_map(x_map, kType, x.data, x.cols, x.rows, x.stride * 2, 64, kBoxRows<Shape>, 128)) {
    return cudaErrorInvalidValue;
  }
  constexpr auto kKernel = &nvfp4_expert_tiles_kernel<T, Shape, kActivate>;
  const size_t shared = Shape::kShared + static_cast<size_t>(w.experts + 1) * 8;
  if (blocks_per_sm<kKernel>(Shape::kThreads, shared) < 1) return cudaErrorInvalidConfiguration;
  LaunchShape shape = {sm_count() / 2 * 2, Shape::kThreads, Start::kOverlapped, 2};
  shape.shared = shared;
  return launch<kKernel>(shape, stream, w, rows, codes, x_map, to);
}

// With many rows per expert, larger tiles decode the weights less often. Next to their stages there
// is room for the ends of so many experts.
constexpr int kMostOfTall = 768;

template <class T, bool kActivate>
cudaError_t launch_expert_tiles(const ExpertWeights& w, const LinearOperand& x,
                                const SortedRows& rows, const TileOutput& to, cudaStream_t stream) {
  const auto launch = [&](auto shape) {
    return launch_expert_tiles_as<T, decltype(shape), kActivate>(w, x, rows, to, stream);
  };
  const int64_t experts = w.experts;
  if (x.rows > 64 * experts && experts <= kMostOfTall) {
    if constexpr (has(kTall)) return launch(TileShape<256, 2, 1, 128, 3, XOrder::kPlain>());
    return kLacksKernels;
  }
  return launch(TileShape<64, 4, 1, 128, 6, XOrder::kPlain>());
}

// Whether the tile kernels take these weights on the current device: TMA needs rows that are a
// multiple of 16 bytes apart, and scales are copied four at a time.
template <class T>
bool has_expert_tiles(const ExpertWeights& w) {
  const auto aligned = [](const void* p, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(p) % bytes == 0;
  };
  return w.cols % 64 == 0 && aligned(w.codes, 16) && aligned(w.scales, 4) &&
         has_warpgroups<
             &nvfp4_expert_tiles_kernel<T, TileShape<64, 4, 1, 128, 6, XOrder::kPlain>, false>>();
}

template <class T>
cudaError_t launch_sort_pairs(const LinearOperand& x, const Routing& routing, int experts,
                              const SortedPairs& to, cudaStream_t stream) {
  const int pairs = static_cast<int>(x.rows) * routing.top_k;
  constexpr int kFewestPlaces = 4;
  const int wanted = (pairs + kFewestPlaces - 1) / kFewestPlaces, sms = sm_count();
  const int blocks = wanted < sms ? wanted : sms;
  constexpr auto kKernel = &nvfp4_sort_pairs_kernel<T>;
  const size_t shared = static_cast<size_t>(sort_bytes(pairs, experts, blocks));
  if (blocks_per_sm<kKernel>(kSortWarps * 32, shared) < 1) return cudaErrorInvalidConfiguration;
  LaunchShape shape = {blocks, kSortWarps * 32, Start::kOverlapped};
  shape.shared = shared;
  return launch<kKernel>(shape, stream, x, routing.ids, routing.wide, pairs, experts, routing.top_k,
                         to);
}

}  // namespace
#endif

}  // namespace jitquant
