// FP8 of ragged tensors (many tensors in one buffer), each with its own scale.
#include "fp8.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
cudaError_t launch_quantize_ragged_fp8(const RaggedInput& x, const RaggedScales& scales,
                                       const RaggedElements& out, cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    return launch_ragged(BufferSource<decltype(element)>(x), RaggedFp8{out}, x, scales, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
