#include "deinterleave.h"
#include "quantize.h"

namespace jitquant {

int amax_partials(const Matrix& x);
cudaError_t launch_amax_partials(const Matrix& x, float* partials, int count, cudaStream_t stream);
cudaError_t launch_quantize_nvfp4_rows(const Matrix& x, float divisor, float* gsa,
                                       Nvfp4Recipe recipe, const Nvfp4Output& out,
                                       cudaStream_t stream);

namespace {

constexpr const char* kName = "amax_quantize_nvfp4";

void amax_quantize_nvfp4_out(const Tensor& x, double divisor, std::optional<double> global_scale,
                             const std::string& granularity, const std::string& recipe,
                             const std::string& scale_layout, const Tensor& x_fp4,
                             const Tensor& x_sf, const Tensor& gsa) {
  const Matrix m = matrix_of(x, "x");
  const PackedShape shape(leading_sizes(x, x.dim() - 1), m.rows, m.cols, swizzled_of(scale_layout));
  const Nvfp4Recipe r = recipe_of(recipe);
  const float d = divisor_of(divisor);
  const bool rows = by_row(granularity) && !global_scale;
  const Nvfp4Output out = shape.output(x_fp4, x_sf, x);
  float* gsa_out = float_out(gsa, "gsa", rows ? m.rows : 1, x);
  const DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  if (global_scale) {
    const GlobalScale scale = value_scale(*global_scale, gsa_out);
    check_launch(launch_quantize_nvfp4(m, scale, r, out, stream), kName);
  } else if (rows) {
    check_launch(launch_quantize_nvfp4_rows(m, d, gsa_out, r, out, stream), kName);
  } else {
    const int count = amax_partials(m);
    const Tensor partials = empty_floats(count, x);
    check_launch(launch_amax_partials(m, floats(partials), count, stream), kName);
    check_launch(launch_quantize_nvfp4(m, partial_scale(partials, d, gsa_out), r, out, stream),
                 kName);
  }
}

std::tuple<Tensor, Tensor, Tensor> amax_quantize_nvfp4(const Tensor& x, double divisor,
                                                       std::optional<double> global_scale,
                                                       const std::string& granularity,
                                                       const std::string& recipe,
                                                       const std::string& scale_layout) {
  const Matrix m = matrix_of(x, "x");
  const PackedShape shape(leading_sizes(x, x.dim() - 1), m.rows, m.cols, swizzled_of(scale_layout));
  Tensor x_fp4 = shape.empty_codes(x), x_sf = shape.empty_scales(x);
  Tensor gsa = empty_floats(by_row(granularity) && !global_scale ? m.rows : 1, x);
  amax_quantize_nvfp4_out(x, divisor, global_scale, granularity, recipe, scale_layout, x_fp4, x_sf,
                          gsa);
  return {x_fp4, x_sf, gsa};
}

}  // namespace
}  // namespace jitquant

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def(
      "amax_quantize_nvfp4(Tensor x, float divisor=2688., *, float? global_scale=None, "
      "str granularity='tensor', str recipe='te', str scale_layout='linear') "
      "-> (Tensor x_fp4, Tensor x_sf, Tensor gsa)");
  m.def(
      "amax_quantize_nvfp4.out(Tensor x, float divisor=2688., *, float? global_scale=None, "
      "str granularity='tensor', str recipe='te', str scale_layout='linear', "
      "Tensor(a!) x_fp4, Tensor(b!) x_sf, Tensor(c!) gsa) -> ()");
  m.def(
      "quantize_nvfp4_from_buffer(Tensor x, Tensor gsa, *, str recipe='te', "
      "str scale_layout='linear') -> (Tensor x_fp4, Tensor x_sf)");
  m.def(
      "quantize_nvfp4_from_buffer.out(Tensor x, Tensor gsa, *, str recipe='te', "
      "str scale_layout='linear', Tensor(a!) x_fp4, Tensor(b!) x_sf) -> ()");
  m.def(
      "deinterleave_quantize_from_buffer(Tensor fused, int intermediate, int granularity, "
      "Tensor gsa, *, str op='select', bool halves=False, str recipe='te', "
      "str scale_layout='linear') -> (Tensor x_fp4, Tensor x_sf)");
  m.def(
      "deinterleave_quantize_from_buffer.out(Tensor fused, int intermediate, int granularity, "
      "Tensor gsa, *, str op='select', bool halves=False, str recipe='te', "
      "str scale_layout='linear', Tensor(a!) x_fp4, Tensor(b!) x_sf) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) {
  m.impl("amax_quantize_nvfp4", TORCH_BOX(&jitquant::amax_quantize_nvfp4));
  m.impl("amax_quantize_nvfp4.out", TORCH_BOX(&jitquant::amax_quantize_nvfp4_out));
  m.impl("quantize_nvfp4_from_buffer", TORCH_BOX(&jitquant::quantize_given<jitquant::kGsa>));
  m.impl("quantize_nvfp4_from_buffer.out",
         TORCH_BOX(&jitquant::quantize_given_out<jitquant::kGsa>));
  m.impl("deinterleave_quantize_from_buffer",
         TORCH_BOX(&jitquant::deinterleave_given<jitquant::kGsa>));
  m.impl("deinterleave_quantize_from_buffer.out",
         TORCH_BOX(&jitquant::deinterleave_given_out<jitquant::kGsa>));
}
