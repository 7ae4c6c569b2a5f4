// y = x W^T for more than 16 rows of x and an NVFP4 weight, by warpgroup products (sm_90a).
//
//   block     one copying warpgroup and kAcross * kAlong multiplying ones: kAcross side by side,
//             with 64 rows of W each, and kAlong that split each stage of k
//   tile      64 * kAcross rows of W by kRows rows of x, over all of k
//   cluster   two blocks with neighboring rows of W; each copies half of x for both
//             (split: two blocks with the same rows of W and half of k each)
//   stage     kDepth of k: x and codes, both swizzled by TMA, and scales. Where many tiles read x,
//             a launch before this one puts it in the order of codes
//   grid      persistent: each of n clusters takes every n-th tile (split: one cluster per tile)
//
// W is operand A, decoded from shared memory into registers. A code times its scale is exact in
// bf16 and fp16. Sums are in fp32, along k in steps of 16. If warpgroups or blocks split k, each
// has its own sum, and these are added in a fixed order. So a row's result does not depend on the
// neighboring rows.
#pragma once

#include "linear_stages.cuh"
#include "ordered_rows.cuh"

namespace jitquant {

#if defined(JITQUANT_HAS_WARPGROUPS)

// The codes of two rows of W that a lane decodes, those of rows g and g + 8 of A: in each stage
// kPairs pairs of k-steps of 16.
template <class T, class Shape, int kPairs>
class LaneCodes {
  // A load takes, if x is in the order of codes, 16 neighbors with one scale, which make two pairs.
  // Otherwise it takes 32 codes for one pair, of which this lane has columns 2t, 2t + 1, 2t + 8 and
  // 2t + 9 of each half.
  static constexpr bool kOrdered = Shape::kOrder != XOrder::kPlain;
  static constexpr int kEach = kOrdered ? 2 : 1, kWords = kOrdered ? 2 : 4;
  static constexpr int kScaleWords = kPairs / 2;  // per stage and row

 public:
  // `rows`: of the stage. `scale_row`: the even one that has the scales of the first, before those
  // of the second. `along`: the first pair of a row is pair `along` * kPairs.
  __device__ __forceinline__ LaneCodes(uint32_t ring, const int (&rows)[2], int scale_row,
                                       int along)
      : ring_(ring), scale_row_(scale_row), scale_word_(along * kScaleWords) {
    const int t = threadIdx.x & 3, first = t, second = t + 4;
    select_ = exchanges_ ? second | (first << 4) : first | (second << 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < kPairs / kEach; ++i) {
        const int piece = along * kPairs + i * kEach + (kOrdered ? t / 2 : 0);
        const int row = exchanges_ ? rows[1 - h] : rows[h];
        codes_at_[h][i] = kept(ring + Shape::kCodesAt + row * (Shape::kDepth / 2) +
                               swizzled_piece<Shape>(row, piece) * 16 + (kOrdered ? t % 2 * 8 : 0));
      }
    }
  }

  // Loads pair p of the stage that is `stage` bytes into the ring.
  __device__ __forceinline__ void fetch(uint32_t stage, int p) {
    if (p == 0) load_scales<Shape>(ring_ + stage, scale_row_, scale_word_, scale_bytes_);
    if (p % kEach != 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t from = codes_at_[h][p / kEach] + stage;
      if constexpr (kOrdered) {
        load_shared_8(from, words_[p / 2 & 1][h]);
      } else {
        load_shared_16(from, words_[p & 1][h]);
      }
    }
  }
  // Decodes pair p. Call it for each p in turn.
  __device__ __forceinline__ void decode(int p, uint32_t (&a)[8]) {
    if constexpr (kOrdered) {
      if (p % 2 == 0) {
        scale_pairs<T>(byte_permute(scale_bytes_[0][p / 2], scale_bytes_[1][p / 2], select_),
                       scales_[0]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t pairs[4];
        const uint32_t scale =
            h == 0 ? half_twice<false>(scales_[0][0]) : half_twice<true>(scales_[0][0]);
        scale_codes<T>(words_[p / 2 & 1][h][p & 1], scale, pairs);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[2 * i + h] = pairs[i];
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (p % 2 == 0) scale_pairs<T>(scale_bytes_[h][p / 2], scales_[h]);
        // A byte has two neighboring codes. With the even ones moved up, the upper codes of a word
        // of two such bytes from each are pairs of neighbors.
        const uint32_t (&words)[kWords] = words_[p & 1][h];
        const uint32_t odd = byte_permute(byte_permute(words[0], words[1], select_),
                                          byte_permute(words[2], words[3], select_), 0x5410);
        const uint32_t even = shifted_left<4>(odd), scale = scales_[h][p & 1];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t own = half == 0 ? half_twice<false>(scale) : half_twice<true>(scale);
          uint32_t low, high;
          place_upper_codes<T>(byte_permute(even, odd, half == 0 ? 0x5410 : 0x7632), low, high);
          a[4 * half + h] = multiply_pairs<T>(low, own);
          a[4 * half + 2 + h] = multiply_pairs<T>(high, own);
        }
      }
    }
  }

  // Puts a lane's sums in the order of its rows.
  template <int kSums>
  __device__ __forceinline__ void restore(float (&d)[kSums]) const {
    if constexpr (kExchanges) {
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
#pragma unroll
        for (int j = i; j < i + 2; ++j) {
          const float low = exchanges_ ? d[j + 2] : d[j], high = exchanges_ ? d[j] : d[j + 2];
          d[j] = low, d[j + 2] = high;
        }
      }
    }
  }

 private:
  // Two rows of 64 bytes use all banks. So that the lanes of a load do too, every second one takes
  // its two rows the other way round.
  static constexpr bool kExchanges = kOrdered && Shape::kDepth == 128;
  const bool exchanges_ = kExchanges && (threadIdx.x & 4) != 0;
  const uint32_t ring_;
  const int scale_row_, scale_word_;
  uint32_t select_;
  uint32_t codes_at_[2][kPairs / kEach];
  uint32_t words_[2][2][kWords], scale_bytes_[2][kScaleWords], scales_[2][2];
};

// Adds the products of the stages of a tile to d, of k from pair `along` * kPairs of each stage on.
// kLooksAhead: a warp loads and decodes the next stage's first pair while it multiplies this one's
// last.
template <class T, class Shape, bool kLooksAhead, int kSums, int kPairs>
__device__ __forceinline__ void multiply_stages(float (&d)[kSums], const StagesAt& at,
                                                Ring<Shape::kStages>& ring,
                                                LaneCodes<T, Shape, kPairs>& codes, int along,
                                                const StagesOfK& of_k) {
  int before = -1;
  uint32_t a[2][8];
  const auto begin = [&] {
    wait_for(at.full + 8 * ring.stage, ring.parity);
    codes.fetch(ring.stage * Shape::kStage, 0);
    codes.fetch(ring.stage * Shape::kStage, 1);
    codes.decode(0, a[0]);
  };
  if (kLooksAhead) begin();
#pragma unroll 1
  for (int s = of_k.first; s < of_k.end; ++s) {
    if (!kLooksAhead) begin();
    const int own_stage = ring.stage;
    const uint32_t stage = own_stage * Shape::kStage;
    const bool next = kLooksAhead && s + 1 < of_k.end;
    ring.next();
    // While the tensor cores multiply one pair, this warp decodes the next one and loads the
    // one after that.
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const int pair = along * kPairs + p;
      const uint64_t b =
          tile_descriptor(at.ring + stage + (pair / 2) * Shape::kRows * 128) + (pair % 2) * 4;
      begin_products();
      multiply_tiles<T>(d, a[p & 1], b);
      end_products();
      if (p + 2 < kPairs) {
        codes.fetch(stage, p + 2);
      } else if (next) {
        if (p + 2 == kPairs) wait_for(at.full + 8 * ring.stage, ring.parity);
        codes.fetch(ring.stage * Shape::kStage, p + 2 - kPairs);
      }
      wait_for_products<1>();
      if (p == 0 && before >= 0) release_stage<Shape>(at, before);
      if (p + 1 < kPairs) {
        codes.decode(p + 1, a[(p + 1) & 1]);
      } else if (next) {
        codes.decode(0, a[0]);
      }
    }
    before = own_stage;
  }
  wait_for_products<0>();
  release_stage<Shape>(at, before);
}

// Adds the sums of the two blocks of a cluster that split k. Block `rank` gets those of half
// `rank`. `theirs` is this thread's place in the ring, which is free once both blocks are here, as
// such a cluster has one tile.
template <int kSums>
__device__ __forceinline__ void exchange_sums(float* theirs, int rank, const float (&d)[kSums],
                                              float (&own)[kSums / 2]) {
  constexpr int kHalf = kSums / 2;
  meet_cluster();
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
    store_in_block(theirs + j * 128, rank ^ 1, rank == 0 ? d[kHalf + j] : d[j]);
  }
  meet_cluster();
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
    own[j] = add_rn(rank == 0 ? d[j] : d[kHalf + j], theirs[j * 128]);
  }
}

#endif

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    nvfp4_linear_tiles_kernel(const __grid_constant__ Nvfp4Weight w,
                              const __grid_constant__ LinearOperand x,
                              const __grid_constant__ TensorMap codes,
                              const __grid_constant__ TensorMap x_map,
                              const __grid_constant__ LinearEpilogue to,
                              const __grid_constant__ TilesPlan plan) {
#if defined(JITQUANT_HAS_WARPGROUPS)
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ __align__(8) uint64_t barriers[2 * Shape::kStages];
  const StagesAt at = begin_stages<Shape>(tiles, barriers);
  // By a shuffle, so that the compiler sees that lanes agree.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  const int first = blockIdx.x >> 1, step = gridDim.x >> 1;
  const StagesOfK of_k = stages_of_k<Shape>(w.cols, at.rank);
  const int rows_of_x = static_cast<int>(x.rows);
  TileWalk<Shape> walk = {plan, 0, 0};
  prefetch_stages<Shape>(w, codes, x_map, walk, at, first, of_k);
  wait_for_previous();
  let_next_begin();

  Ring<Shape::kStages> ring;
  if (warpgroup == 0) {
    give_registers<Shape::kFewRegisters>();
    copy_stages(CopiedScales<Shape>(w), codes, x_map, walk, ring, at, first, step, of_k, w.rows,
                rows_of_x);
    if constexpr (Shape::kShares > 1) {
      meet_cluster();
      meet_cluster();
    }
  } else {
    take_registers<Shape::kManyRegisters>();
    const int own = warpgroup - 1, across = own / Shape::kAlong, along = own % Shape::kAlong;
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, g = lane >> 2;
    constexpr int kPairs = Shape::kDepth / Shape::kAlong / 32;  // of k-steps of 16
    const int weight_row = across * 64 + warp * 16 + 2 * g;
    LaneCodes<T, Shape, kPairs> lane_codes(at.ring, {weight_row, weight_row + 1}, weight_row,
                                           along);
    constexpr bool kLooksAhead = kPairs > 2;  // with two pairs per stage that takes 5% longer
    for (int i = first; walk.at(i); i += step) {
      float d[Shape::kSums];
#pragma unroll
      for (int j = 0; j < Shape::kSums; ++j) d[j] = 0.0f;
      const CopiedRows weights = at.template weights<Shape>(walk, w.rows);
      multiply_stages<T, Shape, kLooksAhead>(d, at, ring, lane_codes, along, of_k);
      lane_codes.restore(d);
      if constexpr (Shape::kAlong > 1) {
        float* const parts = reinterpret_cast<float*>(tiles + Shape::kStages * Shape::kStage);
        const int thread = threadIdx.x & 127;
#pragma unroll
        for (int apart = 1; apart < Shape::kAlong; apart *= 2) {
          // One buffer for each pair of warpgroups that add their sums.
          float* const own_parts = parts + (own / (2 * apart)) * Shape::kSums * 128 + thread;
          meet<128 * Shape::kWarpgroups>();
          if (along % (2 * apart) == apart) {
#pragma unroll
            for (int j = 0; j < Shape::kSums; ++j) own_parts[j * 128] = d[j];
          }
          meet<128 * Shape::kWarpgroups>();
          if (along % (2 * apart) == 0) {
#pragma unroll
            for (int j = 0; j < Shape::kSums; ++j) d[j] = add_rn(d[j], own_parts[j * 128]);
          }
        }
      }
      if (along == 0) {
        const float gsa = w.gsa[0];
        const auto store = [&](auto& sums, const auto& x_rows) {
#pragma unroll
          for (auto& sum : sums) sum = mul_rn(sum, two_to_the(-ScaledCodes<T>::kExponent));
          const int row = weights.copied + weight_row;
          if (row < weights.first) return;
          store_sums(to, sums, {gsa, gsa}, x_rows, rows_of_x, row);
        };
        const auto half = [&](int h) { return half_of_x<Shape>(walk, h, rows_of_x); };
        if constexpr (Shape::kShares == 1) {
          const CopiedRows halves[] = {half(0), half(1)};
          store(d, halves);
        } else {
          // Each block finishes half of the rows of x, and gives its sums of the others away.
          float own[Shape::kSums / 2];
          exchange_sums(reinterpret_cast<float*>(tiles) + across * (Shape::kSums / 2) * 128 +
                            (threadIdx.x & 127),
                        at.rank, d, own);
          const CopiedRows one[] = {half(at.rank)};
          store(own, one);
        }
      } else if constexpr (Shape::kShares > 1) {
        meet_cluster();
        meet_cluster();
      }
    }
  }
  end_cluster();
#endif
}

#ifndef __CUDACC_RTC__
namespace {

template <class T, class Shape>
cudaError_t launch_tiles(const Nvfp4Weight& w, const LinearOperand& x, const LinearEpilogue& to,
                         const TilesPlan& plan, cudaStream_t stream) {
  TensorMap codes, x_map;
  const CUtensorMapDataType type = std::is_same<T, Bf16>::value ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (!encode_map(codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, w.codes, w.cols / 2, w.rows, w.cols / 2,
                  Shape::kDepth / 2, Shape::kWeights, Shape::kDepth / 2) ||
      !encode_map(x_map, type, x.data, x.cols, x.rows, x.stride * 2, 64, Shape::kRows / 2, 128)) {
    return cudaErrorInvalidValue;
  }
  constexpr auto kKernel = &nvfp4_linear_tiles_kernel<T, Shape>;
  if (blocks_per_sm<kKernel>(Shape::kThreads, Shape::kShared) < 1) {
    return cudaErrorInvalidConfiguration;
  }
  const int64_t tiles = count_of(plan), clusters = sm_count() / 2;
  const bool persistent = Shape::kShares == 1 && tiles > clusters;
  LaunchShape shape = {2 * (persistent ? clusters : tiles), Shape::kThreads, Start::kOverlapped, 2};
  shape.shared = Shape::kShared;
  return launch<kKernel>(shape, stream, w, x, codes, x_map, to, plan);
}

// -DJITQUANT_LINEAR_ROWS=2 builds a library for up to 2 rows, =16 for up to 16, =32 for 17 to 32,
// =64 for 33 to 64, =96 for 65 to 96, =128 for 97 to 128, and =0 for more. Each compiles in a
// fraction of the time of all. With -DJITQUANT_LINEAR_TILES more than 16 rows have to be
// multiplied by tiles.
#ifdef JITQUANT_LINEAR_TILES
constexpr bool kTakesUntiled = false;
#else
constexpr bool kTakesUntiled = true;
#endif
#ifdef JITQUANT_LINEAR_ROWS
constexpr int kForRows = JITQUANT_LINEAR_ROWS;
constexpr bool kTakes16 = kForRows == 16, kTakes2 = kTakes16 || kForRows == 2,
               kTakes32 = kForRows == 32, kTakes64 = kForRows == 64, kTakes96 = kForRows == 96,
               kTakes128 = kForRows == 128, kTakesMore = kForRows == 0;
#else
constexpr bool kTakes2 = true, kTakes16 = true, kTakes32 = true, kTakes64 = true, kTakes96 = true,
               kTakes128 = true, kTakesMore = true;
#endif

// Rows of x, warpgroups across W, warpgroups along k, depth of a stage, number of stages.
using Tall32 = TileShape<32, 1, 4, 256, 8, XOrder::kPlain>;
using Tall64 = TileShape<64, 1, 4, 256, 4, XOrder::kPlain>;
using Wide32 = TileShape<32, 4, 1, 256, 4, XOrder::kOrdered>;
using Wide32By128 = TileShape<32, 2, 2, 256, 5, XOrder::kOrdered>;  // 128 rows of W
using Wide32By192 = TileShape<32, 3, 1, 256, 4, XOrder::kOrdered>;  // 192
using Wide64 = TileShape<64, 4, 1, 256, 3, XOrder::kOrdered>;
using Wide64By128 = TileShape<64, 2, 1, 256, 4, XOrder::kOrdered>;
using Wide64By192 = TileShape<64, 3, 1, 256, 3, XOrder::kOrdered>;
using Tall96 = TileShape<96, 1, 2, 128, 6, XOrder::kPlain>;
using Wide96 = TileShape<96, 4, 1, 128, 5, XOrder::kOrdered>;
using Wide96By128 = TileShape<96, 2, 1, 128, 6, XOrder::kOrdered>;
using Wide96By192 = TileShape<96, 3, 1, 128, 5, XOrder::kOrdered>;
using Tall128 = TileShape<128, 1, 2, 128, 5, XOrder::kPlain>;
using Wide128 = TileShape<128, 2, 1, 128, 5, XOrder::kOrdered>;
using Wide128By192 = TileShape<128, 3, 1, 128, 4, XOrder::kOrdered>;
using Wide160 = TileShape<160, 2, 1, 128, 4, XOrder::kOrdered>;
using Wide160By192 = TileShape<160, 3, 1, 128, 4, XOrder::kOrdered>;
using Wide192 = TileShape<192, 2, 1, 128, 3, XOrder::kOrdered>;
using Plain192 = TileShape<192, 2, 1, 128, 3, XOrder::kPlain>;
using Wide256 = TileShape<256, 2, 1, 128, 3, XOrder::kPlain>;
// The same, but a cluster has one tile and each of its two blocks takes half of k.
template <class Shape>
using Split = TileShape<Shape::kRows, Shape::kAcross, Shape::kAlong, Shape::kDepth, Shape::kStages,
                        Shape::kOrder, 2>;

// TMA needs rows that are a multiple of 16 bytes apart. Scales are copied four at a time.
template <class Input>
bool takes_tiles(const Nvfp4Weight& w, const LinearOperand& x) {
  using T = typename LinearInput<Input>::Operand;
  const auto aligned = [](const void* p, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(p) % bytes == 0;
  };
  using Any = std::conditional_t<
      kTakes32, Tall32,
      std::conditional_t<kTakes64, Tall64, std::conditional_t<kTakes96, Wide96, Tall128>>>;
  const bool x_fits = LinearInput<Input>::kCodes || (aligned(x.data, 16) && x.stride % 8 == 0);
  return w.cols % 64 == 0 && aligned(w.codes, 16) && aligned(w.scales, 4) && x_fits &&
         x.rows <= std::numeric_limits<int32_t>::max() / 2 &&
         has_warpgroups<&nvfp4_linear_tiles_kernel<T, Any>>();
}

// Picks the offered shape, or pair of shapes, with the least estimated time.
template <class Input>
class TileChoice {
 public:
  using T = typename LinearInput<Input>::Operand;

  TileChoice(const Nvfp4Weight& w, const LinearOperand& x) : w_(w), x_(x) {}

  // `us`: microseconds of a tile with 8192 columns on an H200, while every cluster runs one.
  template <class Shape>
  void offer(int64_t us) {
    const TilesPlan plan = plan_tiles<Shape>(x_.rows, w_.rows);
    if (takes<Shape>()) consider(rounds(plan) * us + us_to_order<Shape>(), part<Shape>(plan), {});
  }
  // Shape for as many rows of W as keep every cluster busy, then Rest for the others.
  template <class Shape, class Rest>
  void offer_both(int64_t us, int64_t us_of_rest) {
    static_assert(Shape::kOrder == Rest::kOrder, "both launches read the same x");
    const int64_t launch = 6 * 8192 / w_.cols;  // in the unit of `us`
    TilesPlan plan = plan_tiles<Shape>(x_.rows, w_.rows);
    const int64_t whole_rounds = count_of(plan) / clusters_;
    const int tiles = static_cast<int>(whole_rounds * clusters_ / plan.tiles_of_x);
    const int end = tiles * Shape::kOfCluster;  // where the second launch begins
    if (tiles == 0 || tiles == plan.tiles_of_weights || end % Rest::kOfCluster != 0 ||
        !takes<Rest>()) {
      return;
    }
    plan.tiles_of_weights = tiles;
    TilesPlan rest = plan_tiles<Rest>(x_.rows, w_.rows);
    rest.first_of_weights = end / Rest::kOfCluster;
    rest.tiles_of_weights -= rest.first_of_weights;
    consider(rounds(plan) * us + rounds(rest) * us_of_rest + launch, part<Shape>(plan),
             part<Rest>(rest));
  }
  // Whether a first launch writes x to memory, in the order that the products take.
  bool rewrites() const { return kCodes || parts_[0].order == XOrder::kOrdered; }
  // `values`: memory for x if it is rewritten.
  cudaError_t launch(T* values, const LinearEpilogue& to, cudaStream_t stream) const {
    LinearOperand x = x_;
    if (rewrites()) {
      // Values in plain order are never rewritten: with them the second kernel is the first again,
      // so that no other one is compiled.
      const cudaError_t error =
          parts_[0].order == XOrder::kOrdered
              ? launch_order_rows<Input, true>(x_, values, w_.cols, stream)
              : launch_order_rows<Input, !kCodes>(x_, values, w_.cols, stream);
      if (error != cudaSuccess) return error;
      x = {values, nullptr, x_.dtype, w_.cols, x_.rows, w_.cols};
    }
    for (const Part& part : parts_) {
      if (part.launch == nullptr) break;
      const cudaError_t error = part.launch(w_, x, to, part.plan, stream);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

 private:
  static constexpr bool kCodes = LinearInput<Input>::kCodes;
  struct Part {
    cudaError_t (*launch)(const Nvfp4Weight&, const LinearOperand&, const LinearEpilogue&,
                          const TilesPlan&, cudaStream_t) = nullptr;
    TilesPlan plan = {};
    XOrder order = XOrder::kPlain;
  };
  template <class Shape>
  static Part part(const TilesPlan& plan) {
    return {&launch_tiles<T, Shape>, plan, Shape::kOrder};
  }

  // Each block of a cluster that splits k needs a stage.
  template <class Shape>
  bool takes() const {
    return w_.cols > (Shape::kShares - 1) * Shape::kDepth;
  }
  // Of ordering x, in the unit of `us`. Also for x in NVFP4, which any shape has to rewrite, so
  // that its products are those of its values in bf16.
  template <class Shape>
  int64_t us_to_order() const {
    return Shape::kOrder == XOrder::kPlain ? 0 : 2 * 8192 / w_.cols + x_.rows / 96;
  }
  int64_t rounds(const TilesPlan& plan) const {
    return (count_of(plan) + clusters_ - 1) / clusters_;
  }
  void consider(int64_t us, const Part& first, const Part& second) {
    if (us < us_) us_ = us, parts_[0] = first, parts_[1] = second;
  }

  const Nvfp4Weight& w_;
  const LinearOperand& x_;
  const int64_t clusters_ = sm_count() / 2;
  int64_t us_ = std::numeric_limits<int64_t>::max();
  Part parts_[2];
};

template <class Input>
TileChoice<Input> choose_tiles(const Nvfp4Weight& w, const LinearOperand& x) {
  TileChoice<Input> choice(w, x);
  if constexpr (kTakes32) {
    if (x.rows <= 32) {
      choice.template offer<Tall32>(22);
      choice.template offer<Split<Tall32>>(15);
      choice.template offer<Wide32>(57);
      choice.template offer<Wide32By128>(29);
      choice.template offer<Wide32By192>(43);
      choice.template offer<Split<Wide32By192>>(25);
    }
  }
  if constexpr (kTakes64) {
    if (x.rows > 32 && x.rows <= 64) {
      choice.template offer<Tall64>(27);
      choice.template offer<Split<Tall64>>(17);
      choice.template offer<Wide64>(69);
      choice.template offer<Wide64By128>(36);
      choice.template offer<Wide64By192>(51);
      choice.template offer<Split<Wide64By192>>(29);
    }
  }
  if constexpr (kTakes96) {
    if (x.rows > 64 && x.rows <= 96) {
      choice.template offer<Split<Tall96>>(20);
      choice.template offer<Split<Wide96By128>>(29);
      choice.template offer<Split<Wide96By192>>(39);
      choice.template offer<Wide96By128>(46);
      choice.template offer<Wide96By192>(58);
      choice.template offer<Wide96>(83);
    }
  }
  if constexpr (kTakes128 || kTakesMore) {
    if (x.rows > 96) {
      choice.template offer<Tall128>(43);
      choice.template offer<Wide128>(57);
      choice.template offer<Split<Tall128>>(24);
      choice.template offer<Wide128By192>(79);
    }
  }
  if constexpr (kTakes128) {
    if (x.rows > 96 && x.rows <= 128) {
      choice.template offer<Split<Wide128>>(34);
      choice.template offer<Split<Wide128By192>>(51);
    }
  }
  if constexpr (kTakesMore) {
    if (x.rows > 128) {
      choice.template offer<Wide160>(60);
      choice.template offer<Split<Wide160>>(40);
      choice.template offer<Wide160By192>(87);
      choice.template offer<Split<Wide160By192>>(55);
      choice.template offer<Wide192>(76);
      choice.template offer<Split<Plain192>>(46);
      choice.template offer<Wide256>(94);
      choice.template offer<Split<Wide256>>(60);
      choice.template offer_both<Wide256, Split<Wide256>>(94, 60);
      choice.template offer_both<Wide256, Tall128>(94, 43);
      choice.template offer_both<Wide256, Split<Tall128>>(94, 24);
    }
  }
  return choice;
}

}  // namespace
#endif

}  // namespace jitquant
