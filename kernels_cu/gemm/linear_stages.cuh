// Shared by the warpgroup products (sm_90a): tile shapes, the walk over tiles, copies, the
// epilogue, and tensor maps.
#pragma once

#include "jitquant/cluster.cuh"
#include "jitquant/wgmma.cuh"
#include "product.cuh"

#if !defined(__CUDACC_RTC__)
#include <cuda.h>
#include "jitquant/driver.h"
#endif

namespace jitquant {

// The order of x within 64 of k in a stage, see ordered_rows.cuh.
//   kPlain    as in memory, copied by TMA
//   kOrdered  as W is decoded. TMA copies it from memory where it has that order
enum class XOrder : int { kPlain, kOrdered };

// kShares is how many blocks of a cluster split k. With 1, the two blocks of a cluster have
// neighboring rows of W, and each copies half of x for both. With 2, they have the same tile, and
// each takes half of k.
template <int kRowsOfX, int kSideBySide, int kSplits, int kOfK, int kRing, XOrder kOrderOfX,
          int kSharesOfK = 1>
struct TileShape {
  static constexpr int kRows = kRowsOfX, kAcross = kSideBySide, kAlong = kSplits;
  static constexpr int kDepth = kOfK, kStages = kRing;
  static constexpr int kWarpgroups = kAcross * kAlong;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kShares = kSharesOfK;
  static constexpr XOrder kOrder = kOrderOfX;
  static constexpr int kWeights = 64 * kAcross;                // rows of W per block
  static constexpr int kOfCluster = kWeights * (2 / kShares);  // and per cluster
  static constexpr int kX = kRows * kDepth * 2;                // bytes per stage
  static constexpr int kRowBytes = kDepth / 2;
  static constexpr int kCodes = kWeights * kRowBytes, kCodesAt = kX;
  static constexpr int kScales = kWeights * kDepth / 16;
  static constexpr int kScalesAt = kX + kCodes;
  static constexpr int kStage = kX + kCodes + (kScales + 1023) / 1024 * 1024;
  static constexpr int kSums = kRows / 2;  // per thread
  static constexpr int kParts = kAlong > 1 ? kWarpgroups / 2 * kSums * 128 * 4 : 0;
  static constexpr int kShared = kStages * kStage + kParts;
  // Registers per thread of the copying and of each multiplying warpgroup. Summed over warpgroups,
  // they are what a block has at launch: 3 * 168 = 504, 4 * 128 = 512 or 5 * 96 = 480.
  static constexpr int kFewRegisters = kWarpgroups == 4 ? 32 : 56;
  static constexpr int kManyRegisters = kWarpgroups == 4 ? 112 : kWarpgroups == 3 ? 152 : 224;
  static_assert(kWarpgroups >= 2 && kWarpgroups <= 4, "registers are for so many warpgroups");
};

// Whether this library can return a dtype. -DJITQUANT_LINEAR_OUT=<number> builds one for that dtype
// only, which compiles faster.
__host__ __device__ constexpr bool gives(DType dtype) {
#ifdef JITQUANT_LINEAR_OUT
  return dtype == static_cast<DType>(JITQUANT_LINEAR_OUT);
#else
  return true;
#endif
}

// Holds a CUtensorMap: NVRTC builds do not include cuda.h.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// The tiles of a launch, each of a cluster: all of x with those of W from `first_of_weights` on.
struct TilesPlan {
  int tiles_of_x, tiles_of_weights, first_of_weights;
};

#if defined(JITQUANT_HAS_WARPGROUPS)

// Where TMA's swizzle puts a 16-byte piece of a row of codes. A row is 32, 64 or 128 bytes long.
template <class Shape>
__device__ __forceinline__ int swizzled_piece(int row, int piece) {
  constexpr int kPieces = Shape::kDepth / 32;
  return piece ^ (row / (8 / kPieces) % kPieces);
}

// The current stage and the parity of its barriers, which flips whenever the ring wraps around.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <class Shape>
struct TileWalk {
  const TilesPlan& plan;
  int x_tile, w_tile;
  // A band of tiles of x with all of W, then the next band, so that what clusters read at the same
  // time stays in L2.
  __device__ __forceinline__ bool at(int index) {
    constexpr int kTogether = 4;
    const int per = kTogether * plan.tiles_of_weights;
    const int band = index / per, rest = index - band * per;
    const int first = band * kTogether, left = plan.tiles_of_x - first;
    const int height = left < kTogether ? left : kTogether;
    x_tile = first + rest % height, w_tile = plan.first_of_weights + rest / height;
    return index < plan.tiles_of_x * plan.tiles_of_weights;
  }
};

// `count` rows from `first` on, as they are copied. Where a matrix ends within them, the copy
// starts earlier: TMA takes up to 1.7 times as long for rows of zeros behind the end. What is
// copied, and so multiplied, twice is stored once.
struct CopiedRows {
  int first, copied;

  __device__ __forceinline__ CopiedRows(int first, int count, int rows)
      : first(first), copied(max(0, min(first, rows - count))) {}
};

// Shared-memory addresses of a block's stages and barriers, and the block's rank in its cluster.
struct StagesAt {
  uint32_t ring, full, empty;
  int rank;

  // The rows of W of this block's tile.
  template <class Shape>
  __device__ __forceinline__ CopiedRows weights(const TileWalk<Shape>& walk, int rows) const {
    // An even first row, for words of y.
    return {walk.w_tile * Shape::kOfCluster + (Shape::kShares == 1 ? rank * Shape::kWeights : 0),
            Shape::kWeights, rows + rows % 2};
  }
};

// Half `h` of the rows of x of a tile.
template <class Shape>
__device__ __forceinline__ CopiedRows half_of_x(const TileWalk<Shape>& walk, int h, int rows) {
  return {walk.x_tile * Shape::kRows + h * (Shape::kRows / 2), Shape::kRows / 2, rows};
}

// The stages of k that a block multiplies: all of them, or half if two blocks split k.
struct StagesOfK {
  int first, end;
};
template <class Shape>
__device__ __forceinline__ StagesOfK stages_of_k(int cols, int rank) {
  const int all = (cols + Shape::kDepth - 1) / Shape::kDepth;
  if (Shape::kShares == 1) return {0, all};
  const int half = (all + 1) / 2;
  return rank == 0 ? StagesOfK{0, half} : StagesOfK{half, all};
}

// The words of scales of each row in a stage, which a thread copies.
template <class Shape>
class RowScales {
  static constexpr int kWords = Shape::kDepth / 64;

 public:
  __device__ __forceinline__ RowScales(const uint8_t* scales, int cols)
      : scales_(scales),
        words_(cols / 64),
        whole_(cols % Shape::kDepth == 0 &&
               (reinterpret_cast<uintptr_t>(scales) & (4 * kWords - 1)) == 0) {}

  // Copies those of row `row` of the weight in stage `s` to `to`, or zeros if there is no such row.
  __device__ __forceinline__ void copy(uint32_t to, int64_t row, int s, bool inside) const {
    const uint8_t* const from = scales_ + (row * words_ + s * kWords) * 4;
    if (whole_) {
      copy_words<kWords>(to, inside ? from : scales_, inside);
      return;
    }
    const int there = inside ? words_ - s * kWords : 0;
#pragma unroll
    for (int q = 0; q < kWords; ++q) {
      copy_words<1>(to + 4 * q, q < there ? from + 4 * q : scales_, q < there);
    }
  }

 private:
  const uint8_t* const scales_;
  const int words_;
  const bool whole_;  // at once
};

// Copies the scales of a block's rows of W unchanged, with 128 threads.
template <class Shape>
class CopiedScales {
 public:
  __device__ __forceinline__ CopiedScales(const Nvfp4Weight& w)
      : scales_(w.scales, w.cols), rows_(w.rows), row_(0) {}

  __device__ __forceinline__ void begin(int row) { row_ = row; }
  // Copies a stage's scales. The thread arrives at the barrier when its copies are complete.
  __device__ __forceinline__ void fill(uint32_t stage, int s, uint32_t full) {
#pragma unroll
    for (int i = 0; i < (Shape::kWeights + 127) / 128; ++i) {
      const int row = i * 128 + threadIdx.x;
      if (Shape::kWeights % 128 != 0 && row >= Shape::kWeights) break;
      scales_.copy(stage + Shape::kScalesAt + row * (Shape::kDepth / 16), row_ + row, s,
                   row_ + row < rows_);
    }
    arrive_after_copies(full);
  }

 private:
  const RowScales<Shape> scales_;
  const int rows_;
  int row_;
};

// Copies all stages of a block's tiles. Runs in the first warpgroup: every thread copies scales,
// and thread 0 issues the TMA copies of the block's codes and of half of x for both blocks (of all
// of x for this block only, if the blocks split k).
template <class Shape>
__device__ __forceinline__ void copy_stages(CopiedScales<Shape> scales, const TensorMap& codes,
                                            const TensorMap& x_map, TileWalk<Shape>& walk,
                                            Ring<Shape::kStages>& ring, const StagesAt& at,
                                            int first, int step, const StagesOfK& of_k,
                                            int rows_of_w, int rows_of_x) {
  constexpr int kHalf = Shape::kRows / 2, kAcrossX = 64;
  for (int tile = first; walk.at(tile); tile += step) {
    const int first_row = at.template weights<Shape>(walk, rows_of_w).copied;
    const int x_row = half_of_x<Shape>(walk, Shape::kShares == 1 ? at.rank : 0, rows_of_x).copied;
    const int second_x = half_of_x<Shape>(walk, 1, rows_of_x).copied;
    scales.begin(first_row);
#pragma unroll 1
    for (int s = of_k.first; s < of_k.end; ++s, ring.next()) {
      const uint32_t stage = at.ring + ring.stage * Shape::kStage, full = at.full + 8 * ring.stage;
      wait_for(at.empty + 8 * ring.stage, ring.parity ^ 1);
      if (threadIdx.x == 0) {
        expect_bytes(full, Shape::kX + Shape::kCodes);
        copy_own_tile(stage + Shape::kCodesAt, &codes, s * Shape::kRowBytes, first_row, full);
#pragma unroll
        for (int h = 0; h < Shape::kDepth / kAcrossX; ++h) {
          const uint32_t to = stage + h * Shape::kRows * 128;
          const int column = s * Shape::kDepth + h * kAcrossX;
          if constexpr (Shape::kShares == 1) {
            copy_tile(to + at.rank * kHalf * 128, &x_map, column, x_row, full, 3);
          } else {
            copy_own_tile(to, &x_map, column, x_row, full);
            copy_own_tile(to + kHalf * 128, &x_map, column, second_x, full);
          }
        }
      }
      scales.fill(stage, s, full);
    }
  }
}

// Initializes a block's barriers. A stage may be refilled once all warps that read it have arrived,
// in both blocks of the cluster if they share x.
template <class Shape>
__device__ __forceinline__ StagesAt begin_stages(unsigned char* ring, uint64_t* barriers) {
  const uint32_t full = kept(shared_address(barriers));
  const StagesAt at = {shared_address(ring), full, full + 8 * Shape::kStages,
                       static_cast<int>(blockIdx.x & 1)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      // Thread 0's copies, and all threads' scales.
      init_barrier(at.full + 8 * i, 1 + 128);
      init_barrier(at.empty + 8 * i, (2 / Shape::kShares) * 4 * Shape::kWarpgroups);
    }
    publish_barriers();
  }
  cluster_arrive_relaxed();  // publish_barriers() has released them
  cluster_wait();
  return at;
}
// Prefetches what a block needs first, before the wait for earlier kernels: the tensor maps, and
// into L2 the codes of its first stages and the start of its rows of scales. This is safe even if
// an earlier kernel is still writing them, because L2 always has the latest write.
template <class Shape>
__device__ __forceinline__ void prefetch_stages(const Nvfp4Weight& w, const TensorMap& codes,
                                                const TensorMap& x_map, TileWalk<Shape> walk,
                                                const StagesAt& at, int first,
                                                const StagesOfK& of_k) {
  // Not in the copying warpgroup, which should reach the wait as early as it can.
  const int thread = static_cast<int>(threadIdx.x) - 128;
  if (thread < 0 || !walk.at(first)) return;
  const int row0 = at.template weights<Shape>(walk, w.rows).copied;
  if (thread == 0) {
    prefetch_map(&codes);
    prefetch_map(&x_map);
    const int end = of_k.first + Shape::kStages;
    for (int s = of_k.first; s < (end < of_k.end ? end : of_k.end); ++s) {
      prefetch_tile(&codes, s * (Shape::kDepth / 2), row0);
    }
  }
  if (thread < Shape::kWeights && row0 + thread < w.rows) {
    prefetch(w.scales + static_cast<int64_t>(row0 + thread) * (w.cols / 16) +
             of_k.first * (Shape::kDepth / 16));
  }
}
// Loads the scale words of rows `row` (even) and `row` + 1, from word `word` of a stage on.
template <class Shape, int kWords>
__device__ __forceinline__ void load_scales(uint32_t stage, int row, int word,
                                            uint32_t (&scales)[2][kWords]) {
  constexpr int kPitch = Shape::kDepth / 64;
  const uint32_t from = stage + Shape::kScalesAt + (row * kPitch + word) * 4;
  if constexpr (kWords == 2 && kPitch == 2) {
    uint32_t words[4];
    load_shared_16(from, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) scales[i / 2][i % 2] = words[i];
  } else {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t at = from + h * kPitch * 4;
      if constexpr (kWords == 4) {
        load_shared_16(at, scales[h]);
      } else if constexpr (kWords == 2) {
        load_shared_8(at, scales[h]);
      } else {
        scales[h][0] = load_shared_4(at);
      }
    }
  }
}
// Tells the blocks that copy into a stage that this warp is done with it.
template <class Shape>
__device__ __forceinline__ void release_stage(const StagesAt& at, int stage) {
  __syncwarp();  // lane 0 arrives for all lanes that have read the stage
  if ((threadIdx.x & 31) == 0) {
    arrive(at.empty + 8 * stage);
    if constexpr (Shape::kShares == 1) arrive_at(at.empty + 8 * stage, at.rank ^ 1);
  }
}

// Cluster barrier for a warp whose lanes may have diverged.
__device__ __forceinline__ void meet_cluster() {
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}

// A block may end only when the other one arrives at its barriers no more. Makes no writes visible,
// which would wait for all stores of y.
__device__ __forceinline__ void end_cluster() {
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();
}

// Applies the epilogue to a warpgroup's sums and stores them. A lane's sums belong to rows n and
// n + 1 of W, each with its own gsa, and to two neighboring rows of x out of every eight. If
// kPairs, n and n + 1 form one word of y. Absent operands become a factor of 1 or an addend of -0,
// which change no bit, so only loads and stores need a condition. `x`: the rows, in as many equal
// parts. Moves the sums.
template <class Out, bool kPairs, int kSums, int kParts>
__device__ __forceinline__ void store_as(const LinearEpilogue& to, float (&d)[kSums],
                                         const float (&gsa)[2], const CopiedRows (&x)[kParts],
                                         int rows, int64_t n) {
  const bool second = n + 1 < to.cols;
  float bias[2] = {-0.0f, -0.0f};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (to.bias != nullptr && (h == 0 || second)) bias[h] = float_at(to.bias, to.bias_dtype, n + h);
  }
  // A store may change what a later load reads, for all that the compiler knows. So the factors and
  // the residual of these many rows are loaded together, and not each behind the store before it.
  constexpr int kRows = kSums / 2;
  constexpr int kTogether = kSums <= 48 || kRows / kParts % 8 != 0 ? 4 : 8;
  // Rows that have code of their own; for the next ones, their sums move to where these were. This
  // saves the compiler most of its time, and costs a move for each sum of the second half. Results
  // of two bytes that form no words are rare.
  constexpr bool kRare = sizeof(Out) == 2 && !kPairs;
  constexpr int kUnrolled = kRare || kRows % (2 * kTogether) != 0 ? kTogether : kRows / 2;
  static_assert(kRows / kParts % kUnrolled == 0, "a part begins where sums move");
  int row, first;
  int64_t at;
  const auto begin = [&](const CopiedRows& part) {
    // Kept, so that addresses are computed here and not held in registers until then.
    row = part.copied + 2 * (kept(threadIdx.x) & 3), first = part.first;
    at = row * to.cols + n;
  };
  begin(x[0]);
  const auto stores = [&] { return row >= first && row < rows; };
  const auto next = [&](int r) {
    row += r % 2 == 0 ? 1 : 7;
    at += r % 2 == 0 ? to.cols : 7 * to.cols;
  };
#pragma unroll 1
  for (int end = kUnrolled;; end += kUnrolled) {
#pragma unroll
    for (int done = 0; done < kUnrolled; done += kTogether) {
      const int first_row = row;
      const int64_t first_at = at;
      float x_gsa[kTogether];
      Out more[kTogether][2] = {};
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        const bool there = stores();
        x_gsa[r] = to.x_gsa != nullptr ? to.x_gsa[(there ? row : 0) * to.x_gsa_stride] : 1.0f;
        if (there && to.residual != nullptr) {
          const Out* const residual = static_cast<const Out*>(to.residual) + at;
          if constexpr (kPairs) {
            const uint32_t word = *reinterpret_cast<const uint32_t*>(residual);
            more[r][0] = Out{static_cast<uint16_t>(word)};
            more[r][1] = Out{static_cast<uint16_t>(word >> 16)};
          } else {
            more[r][0] = residual[0];
            if (second) more[r][1] = residual[1];
          }
        }
        next(r);
      }
      row = first_row, at = first_at;
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        float y[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float sum = d[(done + r) / 2 * 4 + 2 * h + r % 2];
          y[h] = add_rn(mul_rn(mul_rn(sum, gsa[h]), x_gsa[r]), bias[h]);
          if (to.residual != nullptr) y[h] = add_rn(y[h], to_float(more[r][h]));
        }
        if (stores()) {
          Out* const out = static_cast<Out*>(to.out) + at;
          if constexpr (kPairs) {
            *reinterpret_cast<uint32_t*>(out) = pair_from_floats<Out>(y[0], y[1]);
          } else {
            out[0] = from_float<Out>(y[0]);
            if (second) out[1] = from_float<Out>(y[1]);
          }
        }
        next(r);
      }
    }
    if (end == kRows) return;
    if (kParts == 2 && end == kRows / 2) begin(x[kParts - 1]);
#pragma unroll
    for (int j = 0; j + 2 * kUnrolled < kSums; ++j) d[j] = d[j + 2 * kUnrolled];
  }
}

// Compiles no code for dtypes that gives() excludes.
template <int kSums, int kParts>
__device__ __forceinline__ void store_sums(const LinearEpilogue& to, float (&d)[kSums],
                                           const float (&gsa)[2], const CopiedRows (&x)[kParts],
                                           int rows, int64_t n) {
  if (n >= to.cols) return;
  const bool pairs =
      to.cols % 2 == 0 &&
      (reinterpret_cast<uintptr_t>(to.out) | reinterpret_cast<uintptr_t>(to.residual)) % 4 == 0;
  const auto as = [&](auto out) {
    using Out = decltype(out);
    if (pairs) {
      store_as<Out, true>(to, d, gsa, x, rows, n);
    } else {
      store_as<Out, false>(to, d, gsa, x, rows, n);
    }
  };
  if (gives(DType::kBFloat16) && to.dtype == DType::kBFloat16) {
    as(Bf16());
  } else if (gives(DType::kFloat16) && to.dtype == DType::kFloat16) {
    as(Fp16());
  } else if (gives(DType::kFloat32)) {
    store_as<float, false>(to, d, gsa, x, rows, n);
  }
}

#endif

#ifndef __CUDACC_RTC__
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Null if the driver is too old.
EncodeTiled tensor_map_encoder() {
  static const EncodeTiled encoder = driver_function<EncodeTiled>("cuTensorMapEncodeTiled", 12000);
  return encoder;
}

// Describes a matrix with rows `pitch` bytes apart. TMA copies it in boxes, swizzled by the row
// within a box. Out of range elements are zero.
bool encode_map(TensorMap& map, CUtensorMapDataType type, const void* data, int64_t cols,
                int64_t rows, int64_t pitch, int box_cols, int box_rows, int box_row_bytes) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(pitch)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_cols), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t ones[2] = {1, 1};
  const CUtensorMapSwizzle swizzle = box_row_bytes == 32   ? CU_TENSOR_MAP_SWIZZLE_32B
                                     : box_row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                           : CU_TENSOR_MAP_SWIZZLE_128B;
  CUtensorMap encoded;
  static_assert(sizeof encoded == sizeof map, "as the driver has it");
  if (tensor_map_encoder()(&encoded, type, 2, const_cast<void*>(data), sizes, strides, box, ones,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    return false;
  }
  std::memcpy(&map, &encoded, sizeof map);
  return true;
}

// Whether the current device and the build of this module can run warpgroup products. Kernels that
// are not compiled for sm_90a are empty, which shows in their static shared memory.
template <auto kKernel>
bool has_warpgroups() {
  static std::atomic<int> known{0};  // 1: no, 2: yes
  const DeviceTraits device = device_traits();
  if (device.major != 9 || device.sms < 2) return false;
  if (known.load(std::memory_order_relaxed) == 0) {
    cudaFuncAttributes attributes;
    const bool there = tensor_map_encoder() != nullptr &&
                       succeeded(cudaFuncGetAttributes(&attributes, kKernel)) &&
                       attributes.sharedSizeBytes > 0;
    known.store(there ? 2 : 1, std::memory_order_relaxed);
  }
  return known.load(std::memory_order_relaxed) == 2;
}

// How many tiles of a cluster cover y.
template <class Shape>
TilesPlan plan_tiles(int64_t rows_of_x, int64_t rows_of_w) {
  return {static_cast<int>((rows_of_x + Shape::kRows - 1) / Shape::kRows),
          static_cast<int>((rows_of_w + Shape::kOfCluster - 1) / Shape::kOfCluster), 0};
}
inline int64_t count_of(const TilesPlan& plan) {
  return static_cast<int64_t>(plan.tiles_of_x) * plan.tiles_of_weights;
}

}  // namespace
#endif

}  // namespace jitquant
