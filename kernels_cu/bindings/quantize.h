// Quantization with a given gsa, which two libraries export under different names of the argument.
#pragma once

#include "function.h"

namespace jitquant {

inline constexpr char kGsa[] = "gsa";
inline constexpr char kGlobalScale[] = "global_scale";

cudaError_t launch_quantize_nvfp4(const Matrix& x, const GlobalScale& scale, Nvfp4Recipe recipe,
                                  const Nvfp4Output& out, cudaStream_t stream);

template <const char* kName>
void quantize_given(Call& call, const View& x, const View& gsa, std::string_view recipe,
                    std::string_view scale_layout, Result& x_fp4, Result& x_sf) {
  const Matrix m = matrix_of(x, "x");
  const GlobalScale scale = given_scale(gsa, kName, m.rows, x);
  const Nvfp4Recipe r = recipe_of(recipe);
  const PackedShape shape =
      PackedShape::of(x, x.dim() - 1, m.rows, m.cols, swizzled_of(scale_layout));
  const Nvfp4Output out = shape.output(x_fp4, x_sf, x);
  const Launching at(call, x);
  check_launch(launch_quantize_nvfp4(m, scale, r, out, at.stream), "quantize_nvfp4");
}

}  // namespace jitquant
