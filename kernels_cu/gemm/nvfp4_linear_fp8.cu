// y = x W^T for x in E4M3 and an NVFP4 weight, by warpgroup products (sm_90a). The weight becomes
// E4M3 on its way to the tensor cores (refold.cuh).
//
//   block     one copying warpgroup, and two multiplying ones side by side, 64 rows of W each
//   tile      128 rows of W by kRows rows of x, over all of k
//   cluster   two blocks with neighboring rows of W; each copies half of x for both
//   stage     128 of k: x and codes, both swizzled by TMA, and tables of scales
//   grid      persistent: each of n clusters takes every n-th tile
//
// W is operand A, refolded from shared memory into registers with tables that the copying warpgroup
// computes from the scales. 16 registers per thread hold a stage, and the next stage is refolded
// while this one is multiplied. The tensor cores accumulate FP8 products with less than fp32
// precision, so one product covers only 128 of k (and 128 rows of x) and is then added to sums in
// fp32. A row's result does not depend on the neighboring rows or on kRows.
#include "linear_fp8.h"
#include "linear_stages.cuh"
#include "refold.cuh"

namespace jitquant {

template <int kRows, int kStages>
using Fp8Shape = TileShape<kRows, 2, 1, 128, kStages, 1>;

constexpr int kColumns = 128;  // rows of x per product

#if defined(JITQUANT_HAS_WARPGROUPS)

// Turns the scales of a block's rows of W into tables (refold.cuh), with one row per thread of the
// copying warpgroup, and stores each row's factor.
template <class Shape>
class ScaleTables {
 public:
  static_assert(Shape::kWeights == 128 && Shape::kDepth == 128, "a thread has a row, and 8 scales");

  __device__ __forceinline__ ScaleTables(const Nvfp4Weight& w) : w_(w) {}

  __device__ __forceinline__ void begin(int first_row, int stage) {
    const int row = first_row + static_cast<int>(threadIdx.x), words = w_.cols / 64;
    from_ = reinterpret_cast<const uint32_t*>(w_.scales) + static_cast<int64_t>(row) * words;
    words_ = row < w_.rows ? words : 0;
    first_ = stage;
    uint32_t most = 0;
#pragma unroll 8
    for (int i = 0; i < words_; ++i) {
      const uint32_t bytes = __ldg(from_ + i);
      most = halves_max(most, bytes & 0x007f007fu);
      most = halves_max(most, (bytes >> 8) & 0x007f007fu);
    }
    factor_ = refold_factor(refold_exponent(max(most & 0xffffu, most >> 16)));
    load(stage);
  }
  __device__ __forceinline__ void fill(uint32_t stage, int s, uint32_t full) {
    const uint32_t to = stage + Shape::kScalesAt, row = threadIdx.x * 8;
    const uint32_t now[2] = {next_[0], next_[1]};
    load(s + 1);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const uint32_t pair = refold_scales(now[i / 4] >> (8 * (i % 4)), factor_);
      uint32_t table[2];
      refold_table<0>(pair, table);
      store_shared_8(to + i * kBlock + row, table);
      refold_table<1>(pair, table);
      store_shared_8(to + (i + 1) * kBlock + row, table);
    }
    if (s == first_) store_shared_4(to + kFactorsAt + threadIdx.x * 4, factor_);
    arrive(full);
  }

  // For rows `row` (even) and `row` + 1: their tables for 16 of k, and their factors.
  static __device__ __forceinline__ void tables(uint32_t stage, int row, int block,
                                                uint32_t (&of)[2][2]) {
    uint32_t words[4];
    load_shared_16(stage + Shape::kScalesAt + block * kBlock + row * 8, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) of[i / 2][i % 2] = words[i];
  }
  static __device__ __forceinline__ void factors(uint32_t stage, int row, uint32_t (&of)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      of[h] = load_shared_4(stage + Shape::kScalesAt + kFactorsAt + (row + h) * 4);
    }
  }

 private:
  static constexpr int kBlock = Shape::kWeights * 8, kFactorsAt = 8 * kBlock;

  // Runs one stage ahead, so that nothing waits for the loads.
  __device__ __forceinline__ void load(int stage) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int word = 2 * stage + q;
      next_[q] = word < words_ ? __ldg(from_ + word) : 0u;
    }
  }

  const Nvfp4Weight& w_;
  const uint32_t* from_ = nullptr;
  int words_ = 0, first_ = 0;
  uint32_t factor_ = 0, next_[2] = {};
};

#endif

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    nvfp4_linear_fp8_kernel(const __grid_constant__ Nvfp4Weight w, const __grid_constant__ int rows,
                            const __grid_constant__ TensorMap codes,
                            const __grid_constant__ TensorMap x_map,
                            const __grid_constant__ LinearEpilogue to,
                            const __grid_constant__ TilesPlan plan) {
#if defined(JITQUANT_HAS_WARPGROUPS)
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ __align__(8) uint64_t barriers[2 * Shape::kStages];
  const StagesAt at = begin_stages<Shape>(tiles, barriers);
  const int group = threadIdx.x >> 7;
  const int first = blockIdx.x >> 1, step = gridDim.x >> 1;
  const StagesOfK of_k = stages_of_k<Shape>(w.cols, at.rank);
  TileWalk<Shape> walk = {plan, 0, 0};
  prefetch_stages<Shape>(w, codes, x_map, walk, at, first, of_k);
  wait_for_previous();
  let_next_begin();

  Ring<Shape::kStages> ring;
  using Scales = ScaleTables<Shape>;
  if (group == 0) {
    give_registers<Shape::kFewRegisters>();
    copy_stages(Scales(w), codes, x_map, walk, ring, at, first, step, of_k);
  } else {
    take_registers<Shape::kManyRegisters>();
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, g = lane >> 2, t = lane & 3;
    const uint32_t select = 2 * t | ((2 * t + 1) << 4);
    constexpr int kSteps = Shape::kDepth / 32, kParts = Shape::kRows / kColumns;
    constexpr int kSums = kColumns / 2;  // per thread and part of x
    const int weight_row = (group - 1) * 64 + warp * 16 + 2 * g;
    const uint32_t codes_at = at.ring + Shape::kCodesAt + weight_row * (Shape::kDepth / 2);
    for (int i = first; walk.at(i); i += step) {
      float sums[kParts][kSums];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int j = 0; j < kSums; ++j) sums[part][j] = 0.0f;
      }
      const int first_row = at.template first_weight<Shape>(walk) + weight_row;
      uint32_t a[kSteps][4], next[kSteps][4];
      // Refolds one part of a stage's k-steps.
      const auto refold = [&](uint32_t stage, int part, uint32_t (&to)[kSteps][4]) {
#pragma unroll
        for (int q = 0; q < kSteps / kParts; ++q) {
          const int p = part * (kSteps / kParts) + q;
          uint32_t first_half[2][2], second_half[2][2];
          Scales::tables(at.ring + stage, weight_row, 2 * p, first_half);
          Scales::tables(at.ring + stage, weight_row, 2 * p + 1, second_half);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            uint32_t words[4], e4m3[2];
            load_shared_16(codes_at + h * (Shape::kDepth / 2) + stage +
                               swizzled_piece<Shape>(weight_row + h, p) * 16,
                           words);
            const uint32_t own = byte_permute(byte_permute(words[0], words[1], select),
                                              byte_permute(words[2], words[3], select), 0x5410);
            refold_codes(own, first_half[h], second_half[h], e4m3);
            to[p][h] = e4m3[0], to[p][2 + h] = e4m3[1];
          }
        }
      };
      wait_for(at.full + 8 * ring.stage, ring.parity);
      uint32_t factors[2];
      Scales::factors(at.ring + ring.stage * Shape::kStage, weight_row, factors);
#pragma unroll
      for (int part = 0; part < kParts; ++part) refold(ring.stage * Shape::kStage, part, a);
#pragma unroll 1
      for (int s = of_k.first; s < of_k.end; ++s) {
        const int own_stage = ring.stage;
        const bool more = s + 1 < of_k.end;
        ring.next();
        // While the tensor cores multiply one part, this warp refolds that part of the next stage.
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const uint64_t b =
              tile_descriptor(at.ring + own_stage * Shape::kStage + part * kColumns * 128);
          float d[kSums];
          begin_products();
#pragma unroll
          for (int p = 0; p < kSteps; ++p) {
            multiply_tiles<E4m3>(d, a[p][0], a[p][1], a[p][2], a[p][3], b + 2 * p, p > 0);
          }
          end_products();
          if (more) {
            if (part == 0) wait_for(at.full + 8 * ring.stage, ring.parity);
            refold(ring.stage * Shape::kStage, part, next);
          }
          wait_for_products<0>();
          if (part + 1 == kParts) release_stage<Shape>(at, own_stage);
#pragma unroll
          for (int j = 0; j < kSums; ++j) sums[part][j] = add_rn(sums[part][j], d[j]);
        }
#pragma unroll
        for (int p = 0; p < kSteps; ++p) {
#pragma unroll
          for (int j = 0; j < 4; ++j) a[p][j] = next[p][j];
        }
      }
      const float stored_gsa = w.gsa[0];
      float gsa[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // 2^-exponent, from the exponent bits of the fp16 factor.
        gsa[h] = mul_rn(stored_gsa, power_of_two(15 - static_cast<int>(factors[h] >> 26)));
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        store_sums(to, sums[part], gsa, rows, walk.x_tile * Shape::kRows + part * kColumns,
                   first_row);
      }
    }
  }
  meet_cluster();  // the other block may still arrive at this block's barriers
#endif
}

#ifndef __CUDACC_RTC__
namespace {

template <class Shape>
cudaError_t launch_shape(const Nvfp4Weight& w, const Fp8Operand& x, const LinearEpilogue& to,
                         cudaStream_t stream) {
  TensorMap codes, x_map;
  constexpr CUtensorMapDataType kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if (!encode_map(codes, kBytes, w.codes, w.cols / 2, w.rows, w.cols / 2, Shape::kDepth / 2,
                  Shape::kWeights, Shape::kDepth / 2) ||
      !encode_map(x_map, kBytes, x.data, x.cols, x.rows, x.stride, Shape::kDepth, Shape::kRows / 2,
                  128)) {
    return cudaErrorInvalidValue;
  }
  constexpr auto kKernel = &nvfp4_linear_fp8_kernel<Shape>;
  if (blocks_per_sm<kKernel>(Shape::kThreads, Shape::kShared) < 1) {
    return cudaErrorInvalidConfiguration;
  }
  const TilesPlan plan = plan_tiles<Shape>(x.rows, w.rows);
  const int64_t tiles = count_of(plan), clusters = sm_count() / 2;
  LaunchShape shape = {2 * (tiles < clusters ? tiles : clusters), Shape::kThreads,
                       Start::kOverlapped, 2};
  shape.shared = Shape::kShared;
  return launch<kKernel>(shape, stream, w, static_cast<int>(x.rows), codes, x_map, to, plan);
}

using FewFp8 = Fp8Shape<128, 6>;
using ManyFp8 = Fp8Shape<256, 4>;

}  // namespace

cudaError_t launch_nvfp4_linear_fp8(const Nvfp4Weight& w, const Fp8Operand& x,
                                    const LinearEpilogue& to, cudaStream_t stream) {
  if (w.rows == 0 || x.rows == 0) return cudaSuccess;
  if (!gives(to.dtype)) return cudaErrorInvalidValue;
  if (!has_warpgroups<&nvfp4_linear_fp8_kernel<ManyFp8>>()) return cudaErrorNotSupported;
  // Estimated time: rounds over the device's clusters times the time of a tile. A tile of 256 rows
  // of x takes less than twice as long as one of 128, because it refolds W only once. A model, not
  // measured.
  constexpr int64_t kFewTime = 5, kManyTime = 8;
  const int64_t clusters = sm_count() / 2;
  const auto rounds = [&](const TilesPlan& plan) {
    return (count_of(plan) + clusters - 1) / clusters;
  };
  const bool many = rounds(plan_tiles<ManyFp8>(x.rows, w.rows)) * kManyTime <=
                    rounds(plan_tiles<FewFp8>(x.rows, w.rows)) * kFewTime;
  return many ? launch_shape<ManyFp8>(w, x, to, stream) : launch_shape<FewFp8>(w, x, to, stream);
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
