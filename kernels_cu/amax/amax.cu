// The amax of a tensor, of each of its rows, or of silu(gate) * up: the first half of a
// quantization whose second half waits for the amaxes of other devices.
#include "kernels.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
namespace {

template <class F>
cudaError_t with_nan(bool keep_nan, F&& f) {
  return keep_nan ? f(std::true_type()) : f(std::false_type());
}

}  // namespace

int64_t amax_partials(const Matrix& x, bool by_row) {
  return by_row ? 0 : amax_partials(tensor_amax_blocks(x.rows, x.cols, 4));
}

cudaError_t launch_amax(const Matrix& x, bool by_row, bool keep_nan, float* partials, float* amax,
                        cudaStream_t stream) {
  return with_nan(keep_nan, [&](auto nan) {
    return dispatch(x.dtype, [&](auto element) {
      using T = decltype(element);
      if (by_row) return launch_row_amaxes<nan>(PlainSource<T>(x), amax, stream);
      const int blocks = tensor_amax_blocks(x.rows, x.cols, 4);
      return launch_tensor_amax_plain<T, nan>(x, 1.0f, partials, blocks, amax, stream);
    });
  });
}

int64_t deinterleave_amax_partials(const GateAndUp& in, bool by_row) {
  return by_row ? 0 : amax_partials(tensor_amax_blocks(in.fused.rows, in.fused.cols / 2, 2));
}

cudaError_t launch_deinterleave_amax(const GateAndUp& in, bool activate, bool by_row, bool keep_nan,
                                     float* partials, float* amax, cudaStream_t stream) {
  return with_nan(keep_nan, [&](auto nan) {
    return deinterleaved(in, activate, [&](const auto& source) {
      if (by_row) return launch_row_amaxes<nan>(source, amax, stream);
      const int blocks = tensor_amax_blocks(source.rows, source.cols, 2);
      return launch_tensor_amax<nan>(source, 1.0f, partials, blocks, amax, stream);
    });
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
