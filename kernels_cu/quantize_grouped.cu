// FP8 of many tensors in one buffer, each with a scale of its own.
#include "jitquant/grouped_fp8.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
cudaError_t launch_quantize_grouped_fp8(const GroupedInput& x, const GroupedScales& scales,
                                        const GroupedElements& out, cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    return launch_grouped(BufferSource<decltype(element)>(x), GroupedFp8{out}, x, scales, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
