// Decodes rows of NVFP4 x to bf16 for the tile kernels. A code times its block scale is exact in
// bf16.
#pragma once

#include "product.cuh"

namespace jitquant {

constexpr int kWordsEach = 2;  // words of codes per thread

// Decodes eight values, without gsa, in the order of their columns.
__device__ __forceinline__ void decode_word(uint32_t codes, uint32_t scale, uint32_t (&values)[4]) {
  // order_x8 gives them times 2^kExponent. Multiplying by kBack undoes that exactly.
  constexpr uint32_t kBack = (127 - ScaledCodes<Bf16>::kExponent) * 0x00800080u;
  uint32_t pairs[4] = {codes, scale};
  order_x8<CodeInput>(pairs);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t even = multiply_pairs<Bf16>(pairs[2 * i], kBack);
    const uint32_t odd = multiply_pairs<Bf16>(pairs[2 * i + 1], kBack);
    values[i] = byte_permute(even, odd, 0x5410);
    values[2 + i] = byte_permute(even, odd, 0x7632);
  }
}

// Word i of the codes, with scale i / 2, gives values 8 * i to 8 * i + 7. They stay in the L2 cache
// if they fit, because the next kernel reads them. A template, so that only libraries that launch
// it compile it.
template <class T>
__global__ void __launch_bounds__(kPieceThreads)
    decode_rows_kernel(const uint32_t* codes, const uint8_t* scales, T* values, int64_t words) {
  wait_for_previous();
  let_next_begin();
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * (kPieceThreads * kWordsEach) + threadIdx.x;
  uint32_t word[kWordsEach], scale[kWordsEach];
#pragma unroll
  for (int k = 0; k < kWordsEach; ++k) {
    const int64_t i = first + k * kPieceThreads;
    if (i < words) word[k] = codes[i], scale[k] = scales[i >> 1];
  }
#pragma unroll
  for (int k = 0; k < kWordsEach; ++k) {
    const int64_t i = first + k * kPieceThreads;
    if (i >= words) break;
    uint32_t decoded[4];
    decode_word(word[k], scale[k], decoded);
    store_words<4>(values + i * 8, decoded);
  }
}

#ifndef __CUDACC_RTC__
namespace {

// `values` has room for x.rows * x.cols elements and is aligned to 16 bytes.
template <class T>
cudaError_t launch_decode_rows(const LinearOperand& x, T* values, cudaStream_t stream) {
  constexpr int kWork = kPieceThreads * kWordsEach;
  const int64_t words = x.rows * (x.cols / 8);
  const LaunchShape shape = {(words + kWork - 1) / kWork, kPieceThreads, Start::kOverlapped};
  return launch<&decode_rows_kernel<T>>(shape, stream, static_cast<const uint32_t*>(x.data),
                                        x.scales, values, words);
}

}  // namespace
#endif

}  // namespace jitquant
