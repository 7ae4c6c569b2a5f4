#include "common.h"

namespace jitquant {

cudaError_t launch_quantize_nvfp4(const Matrix& x, const GlobalScale& scale, Nvfp4Recipe recipe,
                                  const Nvfp4Output& out, cudaStream_t stream);

namespace {

void quantize_nvfp4_out(const Tensor& x, const Tensor& global_scale, const std::string& recipe,
                        const std::string& scale_layout, const Tensor& x_fp4, const Tensor& x_sf) {
  const Matrix m = matrix_of(x, "x");
  const PackedShape shape(leading_sizes(x, x.dim() - 1), m.rows, m.cols, swizzled_of(scale_layout));
  const GlobalScale scale = given_scale(global_scale, "global_scale", m.rows, x);
  const Nvfp4Output out = shape.output(x_fp4, x_sf, x);
  const DeviceGuard guard(x.get_device_index());
  check_launch(launch_quantize_nvfp4(m, scale, recipe_of(recipe), out, current_stream(x)),
               "quantize_nvfp4");
}

std::tuple<Tensor, Tensor> quantize_nvfp4(const Tensor& x, const Tensor& global_scale,
                                          const std::string& recipe,
                                          const std::string& scale_layout) {
  const Matrix m = matrix_of(x, "x");
  const PackedShape shape(leading_sizes(x, x.dim() - 1), m.rows, m.cols, swizzled_of(scale_layout));
  Tensor x_fp4 = shape.empty_codes(x), x_sf = shape.empty_scales(x);
  quantize_nvfp4_out(x, global_scale, recipe, scale_layout, x_fp4, x_sf);
  return {x_fp4, x_sf};
}

}  // namespace
}  // namespace jitquant

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def(
      "quantize_nvfp4(Tensor x, Tensor global_scale, *, str recipe='te', "
      "str scale_layout='linear') -> (Tensor x_fp4, Tensor x_sf)");
  m.def(
      "quantize_nvfp4.out(Tensor x, Tensor global_scale, *, str recipe='te', "
      "str scale_layout='linear', Tensor(a!) x_fp4, Tensor(b!) x_sf) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) {
  m.impl("quantize_nvfp4", TORCH_BOX(&jitquant::quantize_nvfp4));
  m.impl("quantize_nvfp4.out", TORCH_BOX(&jitquant::quantize_nvfp4_out));
}
