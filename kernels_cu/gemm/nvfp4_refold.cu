// Refolds an NVFP4 weight to E4M3 for FP8 products (refold.cuh), a row per warp.
#include "product.cuh"
#include "refold.cuh"

namespace jitquant {

constexpr int kRefoldThreads = 256, kRowsEach = kRefoldThreads / 32;

// values (rows, cols) = W in E4M3, and scale_inv[n] is what the products of row n are multiplied
// by. kAligned: scales are read four at a time, and values stored sixteen at a time.
template <bool kAligned>
__global__ void __launch_bounds__(kRefoldThreads)
    nvfp4_refold_kernel(const __grid_constant__ Nvfp4Weight w, uint8_t* data, float* scale_inv) {
  const int row = blockIdx.x * kRowsEach + (threadIdx.x >> 5), lane = threadIdx.x & 31;
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
  if constexpr (kAligned) {
#pragma unroll 4
    for (int i = lane; i < blocks / 4; i += 32) {
      const uint32_t bytes = __ldg(reinterpret_cast<const uint32_t*>(scales) + i);
      most = halves_max(most, bytes & 0x007f007fu);
      most = halves_max(most, (bytes >> 8) & 0x007f007fu);
    }
    most = max(most & 0xffffu, most >> 16);
  } else {
    for (int i = lane; i < blocks; i += 32) most = max(most, __ldg(scales + i) & 0x7fu);
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes <<= 1) most = max(most, __shfl_xor_sync(~0u, most, lanes));
  if (row >= w.rows) return;
  const int exponent = refold_exponent(most);
  const uint32_t factor = refold_factor(exponent);
  if (lane == 0) scale_inv[row] = mul_rn(w.gsa[0], two_to_the(-exponent));

  uint8_t* const to = data + static_cast<int64_t>(row) * w.cols;
  for (int first = lane; first < blocks; first += 32 * kTogether) {
    if (first > lane) load(first);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int i = first + 32 * j;
      if (i >= blocks) break;
      uint32_t table[2], low[2], high[2];
      refold_table(refold_scales(scale[j], factor), table);
      refold_codes(words[j].x, table, low);
      refold_codes(words[j].y, table, high);
      const uint32_t e4m3[4] = {low[0], low[1], high[0], high[1]};
      if constexpr (kAligned) {
        store_words<4>(to + i * 16, e4m3);
      } else {
#pragma unroll
        for (int b = 0; b < 16; ++b) {
          to[i * 16 + b] = static_cast<uint8_t>(e4m3[b / 4] >> (8 * (b % 4)));
        }
      }
    }
  }
}

#ifndef __CUDACC_RTC__
cudaError_t launch_nvfp4_refold(const Nvfp4Weight& w, uint8_t* data, float* scale_inv,
                                cudaStream_t stream) {
  if (w.rows == 0) return cudaSuccess;
  const LaunchShape shape = {(w.rows + kRowsEach - 1) / kRowsEach, kRefoldThreads,
                             Start::kOverlapped};
  const auto aligned = [](const void* p, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(p) % bytes == 0;
  };
  constexpr auto kWhole = &nvfp4_refold_kernel<true>, kAny = &nvfp4_refold_kernel<false>;
  return w.cols % 64 == 0 && aligned(w.scales, 4) && aligned(data, 16)
             ? launch<kWhole>(shape, stream, w, data, scale_inv)
             : launch<kAny>(shape, stream, w, data, scale_inv);
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
