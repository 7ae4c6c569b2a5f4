// The given-gsa half of the deinterleaving pipelines, which two libraries export.
#pragma once

#include "quantize.h"

namespace jitquant {

cudaError_t launch_deinterleave_quantize_nvfp4(const Matrix& fused, int64_t run, bool activate,
                                               const GlobalScale& scale, Nvfp4Recipe recipe,
                                               const Nvfp4Output& out, cudaStream_t stream);

// The fused projection, its output's shape, and the run that DeinterleaveSource takes.
struct Deinterleave {
  Matrix matrix;
  PackedShape shape;
  int64_t run;

  static Deinterleave of(const Tensor& fused, int64_t intermediate, int64_t granularity,
                         bool halves, bool swizzled) {
    const Matrix m = matrix_of(fused, "fused");
    JITQUANT_CHECK(
        intermediate >= 1 && intermediate < (int64_t{1} << 31) && m.cols == 2 * intermediate,
        "fused must have 2 * intermediate = ", 2 * intermediate, " columns, not ", m.cols);
    JITQUANT_CHECK(halves || (granularity >= 1 && intermediate % granularity == 0),
                   "granularity_cols must divide intermediate = ", intermediate, ", but is ",
                   granularity, "; for the layout [gate | up] pass halves");
    return {m, PackedShape(leading_sizes(fused, fused.dim() - 1), m.rows, intermediate, swizzled),
            halves ? intermediate : granularity};
  }
};

template <const char* kName>
void deinterleave_given_out(const Tensor& fused, int64_t intermediate, int64_t granularity,
                            const Tensor& gsa, const std::string& op, bool halves,
                            const std::string& recipe, const std::string& scale_layout,
                            const Tensor& x_fp4, const Tensor& x_sf) {
  const Deinterleave d =
      Deinterleave::of(fused, intermediate, granularity, halves, swizzled_of(scale_layout));
  const GlobalScale scale = given_scale(gsa, kName, d.matrix.rows, fused);
  const Nvfp4Output out = d.shape.output(x_fp4, x_sf, fused);
  const DeviceGuard guard(fused.get_device_index());
  check_launch(launch_deinterleave_quantize_nvfp4(d.matrix, d.run, activates(op), scale,
                                                  recipe_of(recipe), out, current_stream(fused)),
               "deinterleave_quantize_nvfp4");
}

template <const char* kName>
std::tuple<Tensor, Tensor> deinterleave_given(const Tensor& fused, int64_t intermediate,
                                              int64_t granularity, const Tensor& gsa,
                                              const std::string& op, bool halves,
                                              const std::string& recipe,
                                              const std::string& scale_layout) {
  const Deinterleave d =
      Deinterleave::of(fused, intermediate, granularity, halves, swizzled_of(scale_layout));
  Tensor x_fp4 = d.shape.empty_codes(fused), x_sf = d.shape.empty_scales(fused);
  deinterleave_given_out<kName>(fused, intermediate, granularity, gsa, op, halves, recipe,
                                scale_layout, x_fp4, x_sf);
  return {x_fp4, x_sf};
}

}  // namespace jitquant
