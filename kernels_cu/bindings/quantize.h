// Quantization with a given gsa, which two libraries export under different names of the argument.
#pragma once

#include "common.h"

namespace jitquant {

inline constexpr char kGsa[] = "gsa";
inline constexpr char kGlobalScale[] = "global_scale";

cudaError_t launch_quantize_nvfp4(const Matrix& x, const GlobalScale& scale, Nvfp4Recipe recipe,
                                  const Nvfp4Output& out, cudaStream_t stream);

template <const char* kName>
void quantize_given_out(const Tensor& x, const Tensor& gsa, const std::string& recipe,
                        const std::string& scale_layout, const Tensor& x_fp4, const Tensor& x_sf) {
  const Matrix m = matrix_of(x, "x");
  const PackedShape shape(leading_sizes(x, x.dim() - 1), m.rows, m.cols, swizzled_of(scale_layout));
  const GlobalScale scale = given_scale(gsa, kName, m.rows, x);
  const Nvfp4Output out = shape.output(x_fp4, x_sf, x);
  const DeviceGuard guard(x.get_device_index());
  check_launch(launch_quantize_nvfp4(m, scale, recipe_of(recipe), out, current_stream(x)),
               "quantize_nvfp4");
}

template <const char* kName>
std::tuple<Tensor, Tensor> quantize_given(const Tensor& x, const Tensor& gsa,
                                          const std::string& recipe,
                                          const std::string& scale_layout) {
  const Matrix m = matrix_of(x, "x");
  const PackedShape shape(leading_sizes(x, x.dim() - 1), m.rows, m.cols, swizzled_of(scale_layout));
  Tensor x_fp4 = shape.empty_codes(x), x_sf = shape.empty_scales(x);
  quantize_given_out<kName>(x, gsa, recipe, scale_layout, x_fp4, x_sf);
  return {x_fp4, x_sf};
}

}  // namespace jitquant
