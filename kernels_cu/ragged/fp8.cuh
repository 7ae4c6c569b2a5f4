// FP8 of ragged tensors (many tensors in one buffer).
#pragma once

#include "../fp8/kernels.cuh"
#include "kernels.cuh"

namespace jitquant {

struct RaggedFp8 {
  static constexpr bool kKeepsNan = true, kWholeBlocks = false;
  using Encoding = float;
  using Codes = uint4;
  RaggedElements out;

  __device__ __forceinline__ float of_amax(float amax, float& scale) const {
    scale = fp8_scale_from_amax(amax, largest(out.format));
    return fp8_scale_inv(scale);
  }
  __device__ __forceinline__ float of_scale(float given, float& scale) const {
    scale = given;
    return fp8_scale_inv(scale);
  }
  template <class T>
  __device__ __forceinline__ uint4 codes(const Block<T>& x, float scale) const {
    return cast_block(x, scale, out.format);
  }
  __device__ __forceinline__ void merge(uint4& all, const uint4& codes, const Part& part) const {
    const auto word = [&](uint32_t old, uint32_t now, int first) {
      uint32_t mask = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) mask |= part.has(first + i) ? 0xffu << (8 * i) : 0u;
      return old | (now & mask);
    };
    all = make_uint4(word(all.x, codes.x, 0), word(all.y, codes.y, 4), word(all.z, codes.z, 8),
                     word(all.w, codes.w, 12));
  }
  __device__ __forceinline__ void store(int64_t i, int64_t count, const uint4& codes) const {
    store_bytes(out.data + i, count, out.vector, codes);
  }
};

}  // namespace jitquant
