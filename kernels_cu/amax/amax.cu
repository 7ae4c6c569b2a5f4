// The amax of a tensor, of each of its rows, or of silu(gate) * up: the first half of a
// quantization whose second half waits for the amaxes of other devices.
#include "kernels.cuh"

namespace jitquant {

namespace {

template <bool kNan>
cudaError_t launch_amax_of(const Matrix& x, int64_t run, bool activate, bool by_row,
                           float* partials, int blocks, float* out, cudaStream_t stream) {
  if (run > 0) {
    return deinterleaved(x, run, activate, [&](const auto& source) {
      return by_row ? launch_row_amaxes<kNan>(source, out, stream)
                    : launch_tensor_amax<kNan>(source, 1.0f, partials, blocks, out, stream);
    });
  }
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    return by_row ? launch_row_amaxes<kNan>(PlainSource<T>(x), out, stream)
                  : launch_tensor_amax_plain<T, kNan>(x, 1.0f, partials, blocks, out, stream);
  });
}

}  // namespace

#ifndef __CUDACC_RTC__
int amax_blocks(const Matrix& x, int64_t run) {
  return run > 0 ? tensor_amax_blocks(x.rows, x.cols / 2, 2)
                 : tensor_amax_blocks(x.rows, x.cols, 4);
}

// `run`: 0, or the length of the alternating runs of gate and up columns.
cudaError_t launch_amax(const Matrix& x, int64_t run, bool activate, bool by_row, bool keep_nan,
                        float* partials, int blocks, float* out, cudaStream_t stream) {
  return keep_nan ? launch_amax_of<true>(x, run, activate, by_row, partials, blocks, out, stream)
                  : launch_amax_of<false>(x, run, activate, by_row, partials, blocks, out, stream);
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
