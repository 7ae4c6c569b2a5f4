// Warp-wide matrix products of 16x16 by 16x8 with fp32 accumulators, and NVFP4 codes as operands.
//
// A lane (g = lane / 4, t = lane % 4) holds, of A (16 rows), a[0] = row g and a[1] = row g + 8,
// both columns 2t and 2t + 1, and a[2], a[3] = the same rows, columns 2t + 8 and 2t + 9; of B (8
// columns), the rows with those numbers in column g; of the sums, rows g (d[0], d[1]) and g + 8
// (d[2], d[3]) in columns 2t and 2t + 1. A sum over k is independent of the order of k, so both
// operands may use the same permutation: here the order in which codes are stored.
#pragma once

#include <cuda_runtime.h>

#include "jitquant/memory.cuh"

namespace jitquant {

// d = a b + c, where each product of two elements is exact.
template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                            uint32_t a3, uint32_t b0, uint32_t b1,
                                            const float (&c)[4]) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same<T, Bf16>::value) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
  }
#else
  const auto pair = [](uint32_t low, uint32_t high) {
    return static_cast<uint64_t>(high) << 32 | low;
  };
  const auto half = [](uint64_t words, int i) {
    return to_float(T{static_cast<uint16_t>(words >> (16 * i))});
  };
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  double sums[4] = {c[0], c[1], c[2], c[3]};
  for (int from = 0; from < 4; ++from) {
    const uint64_t low = __shfl_sync(~0u, pair(a0, a2), 4 * g + from);   // row g
    const uint64_t high = __shfl_sync(~0u, pair(a1, a3), 4 * g + from);  // row g + 8
    const uint64_t left = __shfl_sync(~0u, pair(b0, b1), 4 * (2 * t) + from);
    const uint64_t right = __shfl_sync(~0u, pair(b0, b1), 4 * (2 * t + 1) + from);
    for (int i = 0; i < 4; ++i) {
      sums[0] += static_cast<double>(half(low, i)) * half(left, i);
      sums[1] += static_cast<double>(half(low, i)) * half(right, i);
      sums[2] += static_cast<double>(half(high, i)) * half(left, i);
      sums[3] += static_cast<double>(half(high, i)) * half(right, i);
    }
  }
  for (int i = 0; i < 4; ++i) d[i] = static_cast<float>(sums[i]);
#endif
}

// Products of two pairs, each rounded to T.
template <class T>
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t product;
  if constexpr (std::is_same<T, Bf16>::value) {
    // mul.bf16x2 needs sm_90. Adding -0 changes nothing.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  }
  return product;
#else
  const auto half = [](uint32_t x, int i) {
    return to_float(T{static_cast<uint16_t>(x >> (16 * i))});
  };
  return pair_from_floats<T>(half(a, 0) * half(b, 0), half(a, 1) * half(b, 1));
#endif
}

// The lower or upper half of a pair, twice. The multiplication that takes the result selects the
// half itself, which the compiler does not see in a byte permutation.
template <bool kUpper>
__device__ __forceinline__ uint32_t half_twice(uint32_t pair) {
#if defined(__CUDA_ARCH__)
  uint32_t both;
  if constexpr (kUpper) {
    asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n mov.b32 %0, {high, high};\n}"
        : "=r"(both)
        : "r"(pair));
  } else {
    asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n mov.b32 %0, {low, low};\n}"
        : "=r"(both)
        : "r"(pair));
  }
  return both;
#else
  return (kUpper ? pair >> 16 : pair & 0xffffu) * 0x00010001u;
#endif
}

// NVFP4 values without gsa, as pairs of T, times 2^kScaled. A code times its scale is exact in both
// types.
template <class T>
struct ScaledCodes;
template <>
struct ScaledCodes<Bf16> {
  static constexpr int kExponent = -7;
  static constexpr uint32_t kUp = 0x7b007b00u;  // 2^119 twice: 448 times this is 1.75 * 2^127
};
template <>
struct ScaledCodes<Fp16> {
  static constexpr int kExponent = PlacedCodes<Fp16>::kExponent;
  static constexpr uint32_t kUp = 0x3c003c00u;  // 1
};

// Four E4M3 scales as two pairs of neighbors.
template <class T>
__device__ __forceinline__ void scale_pairs(uint32_t bytes, uint32_t (&pairs)[2]) {
  float scales[4];
  floats_from_e4m3(bytes, scales);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pairs[i] = multiply_pairs<T>(pair_from_floats<T>(scales[2 * i], scales[2 * i + 1]),
                                 ScaledCodes<T>::kUp);
  }
}

// `scale` has the block's scale twice.
template <class T>
__device__ __forceinline__ void scale_codes(uint32_t codes, uint32_t scale, uint32_t (&pairs)[4]) {
  place_codes<T>(codes, pairs);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = multiply_pairs<T>(pairs[i], scale);
}

// Eight neighbors of T in the order of a word of codes: (0, 4), (1, 5), (2, 6), (3, 7).
__device__ __forceinline__ void order_as_codes(const uint32_t (&words)[4], uint32_t (&pairs)[4]) {
  pairs[0] = byte_permute(words[0], words[2], 0x5410);
  pairs[1] = byte_permute(words[0], words[2], 0x7632);
  pairs[2] = byte_permute(words[1], words[3], 0x5410);
  pairs[3] = byte_permute(words[1], words[3], 0x7632);
}

}  // namespace jitquant
