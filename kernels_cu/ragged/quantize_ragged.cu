// FP8 of ragged tensors (many tensors in one buffer), each with its own scale.
// Perhaps after an activation.
#include "fp8.cuh"

namespace jitquant {

template <class T>
struct ActivatedSource : BufferSource<T> {
  using Value = Block<float>;
  using Fetched = Block<T>;
  static constexpr int kTileThreads = 64, kTileSteps = sizeof(T) == 2 ? 2 : 1, kMostBlocks = 2;
  Activation activation;

  ActivatedSource(const RaggedInput& x, Activation activation)
      : BufferSource<T>(x), activation(activation) {}

  __device__ __forceinline__ Value value(const Fetched& x) const {
    Value v;
    with_activation(activation, [&](auto act) {
#pragma unroll
      for (int i = 0; i < 16; ++i) v.words[i] = float_bits(act.value(value_of(x, i)));
    });
    return v;
  }
  __device__ __forceinline__ Value load(int64_t i) const { return value(BufferSource<T>::load(i)); }
};

#ifndef __CUDACC_RTC__
// -DJITQUANT_ACTIVATION=0 builds a library for no activation alone, =1 for all others.
#ifdef JITQUANT_ACTIVATION
constexpr bool kActivates = JITQUANT_ACTIVATION == 1, kKeeps = !kActivates;
#else
constexpr bool kActivates = true, kKeeps = true;
#endif

int64_t quantize_ragged_fp8_partials(const RaggedInput& x) {
  return partials_of(x);
}

cudaError_t launch_quantize_ragged_fp8(const RaggedInput& x, Activation activation,
                                       const RaggedScales& scales, float* partials,
                                       const RaggedElements& out, cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    const RaggedFp8 op = {out};
    if constexpr (kActivates) {
      if (activation != Activation::kNone) {
        return launch_ragged(ActivatedSource<T>(x, activation), op, x, scales.with(partials),
                             stream);
      }
    }
    if constexpr (kKeeps) {
      if (activation == Activation::kNone) {
        return launch_ragged(BufferSource<T>(x), op, x, scales.with(partials), stream);
      }
    }
    return cudaErrorInvalidValue;
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
