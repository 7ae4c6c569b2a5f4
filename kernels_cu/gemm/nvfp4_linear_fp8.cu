// y = x W^T for x in E4M3 and an NVFP4 weight, by warpgroup products (sm_90a), in two launches. The
// first refolds W to E4M3 (refold.cuh) in scratch memory, a row per warp. The second multiplies:
//
//   block     one copying thread, and two multiplying warpgroups side by side, 64 rows of W each
//   tile      128 rows of W by kRows rows of x, over all of k
//   cluster   two blocks with neighboring rows of W; each copies half of x for both
//   stage     128 of k: x and W, both swizzled by TMA
//   grid      persistent: each of n clusters takes every n-th tile
//
// Refolding W in every tile instead, into registers as operand A, took 1.4 times as long with 4096
// rows of x.
//
// The tensor cores accumulate FP8 products with less than fp32 precision, so one product covers
// only 128 of k (and 128 rows of x) and is then added to sums in fp32. While one warpgroup adds,
// the other one multiplies. A row's result does not depend on the neighboring rows or on kRows.
#include "linear_fp8.h"
#include "linear_stages.cuh"
#include "refold.cuh"

namespace jitquant {

template <int kRows, int kStages>
using Fp8Shape = TileShape<kRows, 2, 1, 128, kStages, 1>;

constexpr int kColumns = 128;  // rows of x per product
constexpr int kRefoldThreads = 256;

// Where a row of W is stored: in each 16 rows, those of even number first. So a lane's sums, of
// rows r and r + 8 of a product, are of two neighboring rows of W, and stores fill whole sectors.
__host__ __device__ constexpr int64_t refolded_row(int64_t row) {
  return (row & ~15) | (row & 1) << 3 | (row & 15) >> 1;
}

// values[refolded_row(n)] = row n of W in E4M3, and gsas[n] is what its products are multiplied by.
// Both have a multiple of 16 rows; those that W lacks are zero.
__global__ void __launch_bounds__(kRefoldThreads)
    nvfp4_refold_kernel(const __grid_constant__ Nvfp4Weight w, uint8_t* values, float* gsas) {
  const int row = blockIdx.x * (kRefoldThreads / 32) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  const int blocks = row < w.rows ? w.cols / 16 : 0;
  const uint8_t* const scales = w.scales + static_cast<int64_t>(row) * (w.cols / 16);
  const uint2* const codes =
      reinterpret_cast<const uint2*>(w.codes + static_cast<int64_t>(row) * (w.cols / 2));
  wait_for_previous();
  let_next_begin();
  constexpr int kTogether = 8;  // blocks whose loads are in flight
  uint2 words[kTogether];
  uint32_t scale[kTogether];
  const auto load = [&](int first) {
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int i = first + 32 * j;
      words[j] = i < blocks ? __ldg(codes + i) : make_uint2(0, 0);
      scale[j] = i < blocks ? __ldg(scales + i) : 0u;
    }
  };
  load(lane);
  uint32_t most = 0;
#pragma unroll 4
  for (int i = lane; i < blocks / 4; i += 32) {
    const uint32_t bytes = __ldg(reinterpret_cast<const uint32_t*>(scales) + i);
    most = halves_max(most, bytes & 0x007f007fu);
    most = halves_max(most, (bytes >> 8) & 0x007f007fu);
  }
  most = max(most & 0xffffu, most >> 16);
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes <<= 1) most = max(most, __shfl_xor_sync(~0u, most, lanes));
  const int exponent = refold_exponent(most);
  const uint32_t factor = refold_factor(exponent);
  if (lane == 0) gsas[row] = mul_rn(w.gsa[0], power_of_two(-exponent));

  uint8_t* const to = values + refolded_row(row) * w.cols;
  for (int first = lane; first < w.cols / 16; first += 32 * kTogether) {
    if (first > lane) load(first);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int i = first + 32 * j;
      if (i >= w.cols / 16) break;
      uint32_t table[2], low[2], high[2];
      refold_table(refold_scales(scale[j], factor), table);
      refold_codes(words[j].x, table, low);
      refold_codes(words[j].y, table, high);
      const uint32_t e4m3[4] = {low[0], low[1], high[0], high[1]};
      store_words<4>(to + i * 16, e4m3);
    }
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    nvfp4_linear_fp8_kernel(const __grid_constant__ TensorMap w_map,
                            const __grid_constant__ TensorMap x_map, const float* gsas, int cols,
                            int rows, const __grid_constant__ LinearEpilogue to,
                            const __grid_constant__ TilesPlan plan) {
#if defined(JITQUANT_HAS_WARPGROUPS)
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ __align__(8) uint64_t barriers[2 * Shape::kStages];
  const StagesAt at = begin_stages<Shape>(tiles, barriers);
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0);  // the compiler sees that lanes agree
  const int first = blockIdx.x >> 1, step = gridDim.x >> 1;
  const StagesOfK of_k = stages_of_k<Shape>(cols, at.rank);
  TileWalk<Shape> walk = {plan, 0, 0};
  wait_for_previous();
  let_next_begin();

  Ring<Shape::kStages> ring;
  if (group == 0) {
    give_registers<Shape::kFewRegisters>();
    if (threadIdx.x == 0) copy_stages(NoScales(), w_map, x_map, walk, ring, at, first, step, of_k);
  } else {
    take_registers<Shape::kManyRegisters>();
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    constexpr int kSteps = Shape::kDepth / 32, kParts = Shape::kRows / kColumns;
    constexpr int kSums = kColumns / 2;  // per thread and part of x
    const uint32_t w_at = at.ring + Shape::kCodesAt + (group - 1) * 64 * Shape::kDepth;
    for (int i = first; walk.at(i); i += step) {
      float sums[kParts][kSums];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int j = 0; j < kSums; ++j) sums[part][j] = 0.0f;
      }
#pragma unroll 1
      for (int s = of_k.first; s < of_k.end; ++s, ring.next()) {
        const uint32_t stage = ring.stage * Shape::kStage;
        wait_for(at.full + 8 * ring.stage, ring.parity);
        const uint64_t a = tile_descriptor(w_at + stage);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const uint64_t b = tile_descriptor(at.ring + stage + part * kColumns * Shape::kDepth);
          float d[kSums];
          begin_products();
#pragma unroll
          for (int p = 0; p < kSteps; ++p) multiply_tiles(d, a + 2 * p, b + 2 * p, p > 0);
          end_products();
          wait_for_products<0>();
          if (part + 1 == kParts) release_stage<Shape>(at, ring.stage);
#pragma unroll
          for (int j = 0; j < kSums; ++j) sums[part][j] = add_rn(sums[part][j], d[j]);
        }
      }
      const int n =
          at.template first_weight<Shape>(walk) + (group - 1) * 64 + warp * 16 + 2 * (lane >> 2);
      if (n < to.cols) {
        const float gsa[2] = {gsas[n], gsas[n + 1]};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          store_sums(to, sums[part], gsa, rows, walk.x_tile * Shape::kRows + part * kColumns, n);
        }
      }
    }
  }
  end_cluster();
#endif
}

#ifndef __CUDACC_RTC__
namespace {

// Rows in scratch memory.
int64_t refolded_rows(const Nvfp4Weight& w) {
  return (w.rows + int64_t{15}) / 16 * 16;
}

template <class Shape>
cudaError_t launch_shape(const Nvfp4Weight& w, const Fp8Operand& x, const LinearEpilogue& to,
                         uint8_t* scratch, cudaStream_t stream) {
  TensorMap w_map, x_map;
  constexpr CUtensorMapDataType kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const int64_t w_rows = refolded_rows(w);
  if (!encode_map(w_map, kBytes, scratch, w.cols, w_rows, w.cols, Shape::kDepth, Shape::kWeights,
                  128) ||
      !encode_map(x_map, kBytes, x.data, x.cols, x.rows, x.stride, Shape::kDepth, Shape::kRows / 2,
                  128)) {
    return cudaErrorInvalidValue;
  }
  constexpr auto kKernel = &nvfp4_linear_fp8_kernel<Shape>;
  if (blocks_per_sm<kKernel>(Shape::kThreads, Shape::kShared) < 1) {
    return cudaErrorInvalidConfiguration;
  }
  float* const gsas = reinterpret_cast<float*>(scratch + w_rows * w.cols);
  constexpr int kRowsEach = kRefoldThreads / 32;
  const LaunchShape refold = {w_rows / kRowsEach, kRefoldThreads, Start::kOverlapped};
  const cudaError_t error = launch<&nvfp4_refold_kernel>(refold, stream, w, scratch, gsas);
  if (error != cudaSuccess) return error;

  const TilesPlan plan = plan_tiles<Shape>(x.rows, w.rows);
  const int64_t tiles = count_of(plan), clusters = sm_count() / 2;
  LaunchShape shape = {2 * (tiles < clusters ? tiles : clusters), Shape::kThreads,
                       Start::kOverlapped, 2};
  shape.shared = Shape::kShared;
  return launch<kKernel>(shape, stream, w_map, x_map, static_cast<const float*>(gsas), w.cols,
                         static_cast<int>(x.rows), to, plan);
}

using FewFp8 = Fp8Shape<128, 6>;
using ManyFp8 = Fp8Shape<256, 4>;

}  // namespace

int64_t nvfp4_linear_fp8_scratch(const Nvfp4Weight& w) {
  return refolded_rows(w) * (w.cols + static_cast<int64_t>(sizeof(float)));
}

cudaError_t launch_nvfp4_linear_fp8(const Nvfp4Weight& w, const Fp8Operand& x,
                                    const LinearEpilogue& to, void* scratch, cudaStream_t stream) {
  if (w.rows == 0 || x.rows == 0) return cudaSuccess;
  if (!gives(to.dtype)) return cudaErrorInvalidValue;
  if (!has_warpgroups<&nvfp4_linear_fp8_kernel<ManyFp8>>()) return cudaErrorNotSupported;
  // Estimated time: rounds over the device's clusters times the time of a tile. A model, not
  // measured.
  constexpr int64_t kFewTime = 5, kManyTime = 9;
  const int64_t clusters = sm_count() / 2;
  const auto rounds = [&](const TilesPlan& plan) {
    return (count_of(plan) + clusters - 1) / clusters;
  };
  const bool many = rounds(plan_tiles<ManyFp8>(x.rows, w.rows)) * kManyTime <=
                    rounds(plan_tiles<FewFp8>(x.rows, w.rows)) * kFewTime;
  const auto go = many ? &launch_shape<ManyFp8> : &launch_shape<FewFp8>;
  return go(w, x, to, static_cast<uint8_t*>(scratch), stream);
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
