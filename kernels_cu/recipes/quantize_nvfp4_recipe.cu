// NVFP4 by a recipe for training or rotation, given the amax of the values; and that amax.
#include "kernels.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
cudaError_t launch_rotated_amax(const Matrix& x, const Rotation& rotation, const Rope& rope,
                                bool by_row, float* maxima, cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    if (rotation.lanes == 0 && rope.size == 0 && !by_row) {
      const int count = amax_grid(x.rows, x.cols);
      return launch_amax_plain<T, false, AllPartials>(x, maxima, count, stream);
    }
    return with_rotation(rotation, rope, [&](auto rotate) {
      const auto source = row_source<T, rotate>(x, rotation, rope);
      if (by_row) {
        return launch<&rotated_row_amax_kernel<T, rotate>>(
            {persistent_grid(x.rows, 4), kThreads, Start::kOverlapped}, stream, source, rotation,
            maxima);
      }
      if constexpr (rotate == Rotate::kNone) {
        return cudaErrorInvalidValue;
      } else {
        const auto shape = [&](int per_sm, int work) {
          const int64_t blocks = x.rows * blocks_of(x.cols);
          const int64_t most = persistent_grid((blocks + work - 1) / work, per_sm);
          return LaunchShape{most < kMaxPartials ? most : kMaxPartials, kThreads,
                             Start::kOverlapped};
        };
        if constexpr (rotate != Rotate::kRope) {
          if (has_flat_blocks(x)) {
            constexpr auto kKernel = &flat_rotated_amax_kernel<T, rotate>;
            return launch<kKernel>(
                shape(blocks_per_sm<kKernel>(kThreads, 0), kThreads * kFlatBlocks<T, rotate>),
                stream, flat_source<T>(x), rotation, maxima);
          }
        }
        return launch<&rotated_amax_kernel<T, rotate>>(shape(4, kThreads), stream, source, rotation,
                                                       maxima);
      }
    });
  });
}

cudaError_t launch_quantize_nvfp4_recipe(const Matrix& x, const Rope& rope, const float* amax,
                                         int count, bool by_row, bool from_gsa, float divisor,
                                         Nvfp4Recipe rule, float* gsa, const Recipe& recipe,
                                         const Nvfp4Output& out, cudaStream_t stream) {
  const RecipeScale scale = {amax, count, by_row, from_gsa, divisor, rule, gsa};
  return with_rule(recipe, [&](auto scaling, auto stochastic) {
    return launch_recipe<scaling, stochastic>(x, rope, scale, recipe, out, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
