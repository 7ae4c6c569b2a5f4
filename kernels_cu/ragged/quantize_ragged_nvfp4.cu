// NVFP4 of ragged tensors (many tensors in one buffer), each with its own scale. A block of sixteen
// belongs to the segment of its first element.
#include "kernels.cuh"

namespace jitquant {

struct RaggedNvfp4 {
  static constexpr bool kKeepsNan = false, kWholeBlocks = true;
  using Encoding = Nvfp4Encoding;
  using Codes = Nvfp4Codes;
  uint2* out;
  uint8_t* block_scales;
  Nvfp4Recipe recipe;

  __device__ __forceinline__ float of_amax(float amax, Nvfp4Encoding& encoding) const {
    constexpr float kDivisor = 6.0f * kE4m3Max;
    encoding = nvfp4_encoding_from_amax(amax, kDivisor, recipe);
    return div_rn(amax, kDivisor);
  }
  __device__ __forceinline__ float of_scale(float given, Nvfp4Encoding& encoding) const {
    encoding = nvfp4_encoding(nvfp4_bounded(given), recipe);
    return encoding.over_S;
  }
  template <class T>
  __device__ __forceinline__ Nvfp4Codes codes(const Block<T>& x,
                                              const Nvfp4Encoding& encoding) const {
    return nvfp4_quantize_block(x, block_amax(x), encoding);
  }
  // Zeros, including all masked elements, have code 0 with any scale.
  __device__ __forceinline__ void merge(Nvfp4Codes& all, const Nvfp4Codes& codes,
                                        const Part&) const {
    all = codes;
  }
  __device__ __forceinline__ void store(int64_t i, int64_t count, const Nvfp4Codes& codes) const {
    if (count <= 0) return;
    out[i >> 4] = make_uint2(codes.low, codes.high);
    block_scales[i >> 4] = codes.scale;
  }
};

#ifndef __CUDACC_RTC__
int64_t quantize_ragged_nvfp4_partials(const RaggedInput& x) {
  return partials_of(x);
}

cudaError_t launch_quantize_ragged_nvfp4(const RaggedInput& x, const RaggedScales& scales,
                                         float* partials, Nvfp4Recipe recipe, uint8_t* x_fp4,
                                         uint8_t* x_sf, cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    const RaggedNvfp4 op = {reinterpret_cast<uint2*>(x_fp4), x_sf, recipe};
    return launch_ragged(BufferSource<decltype(element)>(x), op, x, scales.with(partials), stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
