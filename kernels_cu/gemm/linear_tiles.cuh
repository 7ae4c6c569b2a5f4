// y = x W^T for more than 16 rows of x and an NVFP4 weight, by warpgroup products (sm_90a).
//
//   block     one copying warpgroup and kAcross * kAlong multiplying ones: kAcross side by side,
//             with 64 rows of W each, and kAlong that split each stage of k
//   tile      64 * kAcross rows of W by kRows rows of x, over all of k
//   cluster   two blocks with neighboring rows of W; each copies half of x for both
//             (split: two blocks with the same rows of W and half of k each)
//   stage     kDepth of k: x and codes, both swizzled by TMA, and scales
//   grid      persistent: each of n clusters takes every n-th tile (split: one cluster per tile)
//
// W is operand A, decoded from shared memory into registers. A code times its scale is exact in
// bf16 and fp16. Sums are in fp32, along k in steps of 16. If warpgroups or blocks split k, each
// has its own sum, and these are added in a fixed order. So a row's result does not depend on the
// neighboring rows.
#pragma once

#include "linear_stages.cuh"

namespace jitquant {

#if defined(JITQUANT_HAS_WARPGROUPS)

// Decodes two k-steps of 16. words[h] has 32 codes of row g + 8 h of A, of which this lane takes
// columns 2t, 2t + 1, 2t + 8 and 2t + 9 of each half. scales[h] has that row's two scales.
template <class T>
__device__ __forceinline__ void decode(const uint32_t (&words)[2][4], const uint32_t (&scales)[2],
                                       uint32_t select, uint32_t (&a)[8]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // A byte has two neighboring codes. With the even ones moved up, the upper codes of a word of
    // two such bytes from each are pairs of neighbors.
    const uint32_t odd = byte_permute(byte_permute(words[h][0], words[h][1], select),
                                      byte_permute(words[h][2], words[h][3], select), 0x5410);
    const uint32_t even = shifted_left<4>(odd);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t scale = half == 0 ? half_twice<false>(scales[h]) : half_twice<true>(scales[h]);
      uint32_t low, high;
      place_upper_codes<T>(byte_permute(even, odd, half == 0 ? 0x5410 : 0x7632), low, high);
      a[4 * half + h] = multiply_pairs<T>(low, scale);
      a[4 * half + 2 + h] = multiply_pairs<T>(high, scale);
    }
  }
}

// Adds the products of the stages of a tile to d. `codes_at`: where a stage has this warp's rows of
// W, of which `weight_row` is the first, and pairs of k-steps from `along` * kPairs on.
// kLooksAhead: a warp loads and decodes the next stage's first pair while it multiplies this one's
// last.
template <class T, class Shape, bool kLooksAhead, int kSums, int kPairs>
__device__ __forceinline__ void multiply_stages(float (&d)[kSums], const StagesAt& at,
                                                Ring<Shape::kStages>& ring,
                                                const uint32_t (&codes_at)[2][kPairs],
                                                int weight_row, int along, uint32_t select,
                                                const StagesOfK& of_k) {
  constexpr int kScaleWords = kPairs / 2;  // per stage and row
  int before = -1;
  uint32_t a[2][8], words[2][2][4], scale_bytes[2][kScaleWords], scales[2][2];
  const auto fetch = [&](uint32_t stage, int p) {
    if (p == 0) {
      load_scales<Shape>(at.ring + stage, weight_row, along * kScaleWords, scale_bytes);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) load_shared_16(codes_at[h][p] + stage, words[p & 1][h]);
  };
  const auto prepare = [&](int p) {
    uint32_t own_scales[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (p % 2 == 0) scale_pairs<T>(scale_bytes[h][p / 2], scales[h]);
      own_scales[h] = scales[h][p & 1];
    }
    decode<T>(words[p & 1], own_scales, select, a[p & 1]);
  };
  const auto begin = [&] {
    wait_for(at.full + 8 * ring.stage, ring.parity);
    fetch(ring.stage * Shape::kStage, 0);
    fetch(ring.stage * Shape::kStage, 1);
    prepare(0);
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
        fetch(stage, p + 2);
      } else if (next) {
        if (p + 2 == kPairs) wait_for(at.full + 8 * ring.stage, ring.parity);
        fetch(ring.stage * Shape::kStage, p + 2 - kPairs);
      }
      wait_for_products<1>();
      if (p == 0 && before >= 0) release_stage<Shape>(at, before);
      if (p + 1 < kPairs) {
        prepare(p + 1);
      } else if (next) {
        prepare(0);
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
  TileWalk<Shape> walk = {plan, 0, 0};
  prefetch_stages<Shape>(w, codes, x_map, walk, at, first, of_k);
  wait_for_previous();
  let_next_begin();

  Ring<Shape::kStages> ring;
  if (warpgroup == 0) {
    give_registers<Shape::kFewRegisters>();
    copy_stages(CopiedScales<Shape>(w), codes, x_map, walk, ring, at, first, step, of_k);
    if constexpr (Shape::kShares > 1) {
      meet_cluster();
      meet_cluster();
    }
  } else {
    take_registers<Shape::kManyRegisters>();
    const int own = warpgroup - 1, across = own / Shape::kAlong, along = own % Shape::kAlong;
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, g = lane >> 2, t = lane & 3;
    const uint32_t select = t | ((t + 4) << 4);
    constexpr int kPairs = Shape::kDepth / Shape::kAlong / 32;  // of k-steps of 16
    const int weight_row = across * 64 + warp * 16 + 2 * g;
    uint32_t codes_at[2][kPairs];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        codes_at[h][p] = kept(at.ring + Shape::kCodesAt + (weight_row + h) * (Shape::kDepth / 2) +
                              swizzled_piece<Shape>(weight_row + h, along * kPairs + p) * 16);
      }
    }
    constexpr bool kLooksAhead = kPairs > 2;  // with two pairs per stage that takes 5% longer
    for (int i = first; walk.at(i); i += step) {
      float d[Shape::kSums];
#pragma unroll
      for (int j = 0; j < Shape::kSums; ++j) d[j] = 0.0f;
      const int first_row = at.template first_weight<Shape>(walk) + weight_row;
      multiply_stages<T, Shape, kLooksAhead>(d, at, ring, codes_at, weight_row, along, select,
                                             of_k);
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
        const auto store = [&](auto& sums, int row0) {
#pragma unroll
          for (auto& sum : sums) sum = mul_rn(sum, two_to_the(-ScaledCodes<T>::kExponent));
          store_sums(to, sums, {gsa, gsa}, static_cast<int>(x.rows), row0, first_row);
        };
        const int row0 = walk.x_tile * Shape::kRows;
        if constexpr (Shape::kShares == 1) {
          store(d, row0);
        } else {
          // Each block finishes half of the rows of x, and gives its sums of the others away.
          float own[Shape::kSums / 2];
          exchange_sums(reinterpret_cast<float*>(tiles) + across * (Shape::kSums / 2) * 128 +
                            (threadIdx.x & 127),
                        at.rank, d, own);
          store(own, row0 + at.rank * (Shape::kRows / 2));
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

// -DJITQUANT_LINEAR_ROWS=2 builds a library for up to 2 rows, =16 for up to 16, =64 for 17 to 64,
// =128 for 65 to 128, and =0 for more than 64. Each compiles in a fraction of the time of all. With
// -DJITQUANT_LINEAR_TILES more than 16 rows have to be multiplied by tiles.
#ifdef JITQUANT_LINEAR_TILES
constexpr bool kTakesUntiled = false;
#else
constexpr bool kTakesUntiled = true;
#endif
#ifdef JITQUANT_LINEAR_ROWS
constexpr int kForRows = JITQUANT_LINEAR_ROWS;
constexpr bool kTakesFew = kForRows == 16, kTakesFewest = kTakesFew || kForRows == 2,
               kTakesSome = kForRows == 64, kTakesMost = kForRows == 0,
               kTakesMore = kTakesMost || kForRows == 128;
#else
constexpr bool kTakesFewest = true, kTakesFew = true, kTakesSome = true, kTakesMore = true,
               kTakesMost = true;
#endif

// Rows of x, warpgroups across W, warpgroups along k, depth of a stage, number of stages.
using Tall32 = TileShape<32, 1, 4, 256, 8>;
using Wide32 = TileShape<32, 4, 1, 128, 8>;
using Tall64 = TileShape<64, 1, 4, 256, 4>;
using Wide64 = TileShape<64, 4, 1, 128, 6>;
using Tall128 = TileShape<128, 1, 2, 128, 5>;
using Wide128 = TileShape<128, 2, 1, 128, 5>;
using Wide128By192 = TileShape<128, 3, 1, 128, 4>;  // 192 rows of W
using Wide256 = TileShape<256, 2, 1, 128, 3>;
// The same, but a cluster has one tile and each of its two blocks takes half of k.
template <class Shape>
using Split =
    TileShape<Shape::kRows, Shape::kAcross, Shape::kAlong, Shape::kDepth, Shape::kStages, 2>;

// TMA needs rows that are a multiple of 16 bytes apart. Scales are copied four at a time.
template <class T>
bool takes_tiles(const Nvfp4Weight& w, const LinearOperand& x) {
  const auto aligned = [](const void* p, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(p) % bytes == 0;
  };
  using Any = std::conditional_t<kTakesSome, Tall64, Tall128>;
  return w.cols % 64 == 0 && aligned(w.codes, 16) && aligned(w.scales, 4) && aligned(x.data, 16) &&
         x.stride % 8 == 0 && x.rows <= std::numeric_limits<int32_t>::max() / 2 &&
         has_warpgroups<&nvfp4_linear_tiles_kernel<T, Any>>();
}

// Picks the offered shape, or pair of shapes, with the least estimated time.
template <class T>
class TileChoice {
 public:
  TileChoice(const Nvfp4Weight& w, const LinearOperand& x) : w_(w), x_(x) {}

  // `us`: microseconds of a tile with 8192 columns on an H200, while every cluster runs one.
  template <class Shape>
  void offer(int64_t us) {
    const TilesPlan plan = plan_tiles<Shape>(x_.rows, w_.rows);
    if (takes<Shape>()) consider(rounds(plan) * us, {&launch_tiles<T, Shape>, plan}, {});
  }
  // Shape for as many rows of W as keep every cluster busy, then Rest for the others.
  template <class Shape, class Rest>
  void offer_both(int64_t us, int64_t us_of_rest) {
    static_assert(Shape::kRows == Rest::kRows && Shape::kOfCluster % Rest::kOfCluster == 0,
                  "the second launch begins where the first one ends");
    constexpr int64_t kLaunch = 4;  // in the unit of `us`
    TilesPlan plan = plan_tiles<Shape>(x_.rows, w_.rows);
    const int64_t whole_rounds = count_of(plan) / clusters_;
    const int tiles = static_cast<int>(whole_rounds * clusters_ / plan.tiles_of_x);
    if (tiles == 0 || tiles == plan.tiles_of_weights || !takes<Rest>()) return;
    plan.tiles_of_weights = tiles;
    TilesPlan rest = plan_tiles<Rest>(x_.rows, w_.rows);
    rest.first_of_weights = tiles * (Shape::kOfCluster / Rest::kOfCluster);
    rest.tiles_of_weights -= rest.first_of_weights;
    consider(rounds(plan) * us + rounds(rest) * us_of_rest + kLaunch,
             {&launch_tiles<T, Shape>, plan}, {&launch_tiles<T, Rest>, rest});
  }
  cudaError_t launch(const LinearEpilogue& to, cudaStream_t stream) const {
    for (const Part& part : parts_) {
      if (part.launch == nullptr) break;
      const cudaError_t error = part.launch(w_, x_, to, part.plan, stream);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

 private:
  struct Part {
    cudaError_t (*launch)(const Nvfp4Weight&, const LinearOperand&, const LinearEpilogue&,
                          const TilesPlan&, cudaStream_t) = nullptr;
    TilesPlan plan = {};
  };

  // Each block of a cluster that splits k needs a stage.
  template <class Shape>
  bool takes() const {
    return w_.cols > (Shape::kShares - 1) * Shape::kDepth;
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

template <class T>
cudaError_t launch_as_tiles(const Nvfp4Weight& w, const LinearOperand& x, const LinearEpilogue& to,
                            cudaStream_t stream) {
  TileChoice<T> choice(w, x);
  const bool some = x.rows <= 64;
  if constexpr (kTakesSome) {
    if (some) {
      choice.template offer<Tall32>(27);
      choice.template offer<Wide32>(82);
      choice.template offer<Split<Tall32>>(17);
      choice.template offer<Tall64>(31);
      choice.template offer<Wide64>(92);
      choice.template offer<Split<Tall64>>(19);
    }
  }
  if constexpr (kTakesMore) {
    if (!some) {
      choice.template offer<Tall128>(37);
      choice.template offer<Wide128>(65);
      choice.template offer<Split<Tall128>>(23);
      choice.template offer<Wide128By192>(76);
      choice.template offer<Split<Wide128By192>>(57);
    }
  }
  if constexpr (kTakesMost) {
    // Up to 128 rows, Wide128 and Split<Wide128By192> have no more tiles and take less.
    if (x.rows > 128) {
      choice.template offer<Wide256>(95);
      choice.template offer<Split<Wide256>>(60);
      choice.template offer_both<Wide256, Split<Wide256>>(95, 60);
    }
  }
  return choice.launch(to, stream);
}

}  // namespace
#endif

}  // namespace jitquant
