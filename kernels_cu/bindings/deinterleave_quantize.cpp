#include "deinterleave.h"

namespace jitquant {

int deinterleave_amax_partials(const Matrix& fused);
cudaError_t launch_deinterleave_amax_partials(const Matrix& fused, int64_t run, bool activate,
                                              float* partials, int count, cudaStream_t stream);
cudaError_t launch_deinterleave_quantize_nvfp4_rows(const Matrix& fused, int64_t run, bool activate,
                                                    float divisor, float* gsa, Nvfp4Recipe recipe,
                                                    const Nvfp4Output& out, cudaStream_t stream);

namespace {

constexpr const char* kName = "deinterleave_amax_quantize_nvfp4";

void deinterleave_amax_quantize_out(const Tensor& fused, int64_t intermediate,
                                    int64_t granularity_cols, double divisor,
                                    std::optional<double> global_scale, const std::string& op,
                                    bool halves, const std::string& granularity,
                                    const std::string& recipe, const std::string& scale_layout,
                                    const Tensor& x_fp4, const Tensor& x_sf, const Tensor& gsa) {
  const Deinterleave in =
      Deinterleave::of(fused, intermediate, granularity_cols, halves, swizzled_of(scale_layout));
  const Matrix& m = in.matrix;
  const bool activate = activates(op);
  const Nvfp4Recipe r = recipe_of(recipe);
  const float d = divisor_of(divisor);
  const bool rows = by_row(granularity) && !global_scale;
  const Nvfp4Output out = in.shape.output(x_fp4, x_sf, fused);
  float* gsa_out = float_out(gsa, "gsa", rows ? m.rows : 1, fused);
  const DeviceGuard guard(fused.get_device_index());
  const cudaStream_t stream = current_stream(fused);
  if (rows) {
    check_launch(
        launch_deinterleave_quantize_nvfp4_rows(m, in.run, activate, d, gsa_out, r, out, stream),
        kName);
    return;
  }
  if (global_scale) {
    const GlobalScale scale = value_scale(*global_scale, gsa_out);
    check_launch(launch_deinterleave_quantize_nvfp4(m, in.run, activate, scale, r, out, stream),
                 kName);
    return;
  }
  const int count = deinterleave_amax_partials(m);
  const Tensor partials = empty_floats(count, fused);
  check_launch(
      launch_deinterleave_amax_partials(m, in.run, activate, floats(partials), count, stream),
      kName);
  const GlobalScale scale = partial_scale(partials, d, gsa_out);
  check_launch(launch_deinterleave_quantize_nvfp4(m, in.run, activate, scale, r, out, stream),
               kName);
}

std::tuple<Tensor, Tensor, Tensor> deinterleave_amax_quantize(
    const Tensor& fused, int64_t intermediate, int64_t granularity_cols, double divisor,
    std::optional<double> global_scale, const std::string& op, bool halves,
    const std::string& granularity, const std::string& recipe, const std::string& scale_layout) {
  const Deinterleave in =
      Deinterleave::of(fused, intermediate, granularity_cols, halves, swizzled_of(scale_layout));
  Tensor x_fp4 = in.shape.empty_codes(fused), x_sf = in.shape.empty_scales(fused);
  Tensor gsa = empty_floats(by_row(granularity) && !global_scale ? in.matrix.rows : 1, fused);
  deinterleave_amax_quantize_out(fused, intermediate, granularity_cols, divisor, global_scale, op,
                                 halves, granularity, recipe, scale_layout, x_fp4, x_sf, gsa);
  return {x_fp4, x_sf, gsa};
}

}  // namespace
}  // namespace jitquant

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def(
      "deinterleave_quantize_nvfp4(Tensor fused, int intermediate, int granularity, "
      "Tensor global_scale, *, str op='select', bool halves=False, str recipe='te', "
      "str scale_layout='linear') -> (Tensor x_fp4, Tensor x_sf)");
  m.def(
      "deinterleave_quantize_nvfp4.out(Tensor fused, int intermediate, int granularity, "
      "Tensor global_scale, *, str op='select', bool halves=False, str recipe='te', "
      "str scale_layout='linear', Tensor(a!) x_fp4, Tensor(b!) x_sf) -> ()");
  m.def(
      "deinterleave_amax_quantize_nvfp4(Tensor fused, int intermediate, int granularity_cols, "
      "float divisor=2688., *, float? global_scale=None, str op='select', bool halves=False, "
      "str granularity='tensor', str recipe='te', str scale_layout='linear') "
      "-> (Tensor x_fp4, Tensor x_sf, Tensor gsa)");
  m.def(
      "deinterleave_amax_quantize_nvfp4.out(Tensor fused, int intermediate, int granularity_cols, "
      "float divisor=2688., *, float? global_scale=None, str op='select', bool halves=False, "
      "str granularity='tensor', str recipe='te', str scale_layout='linear', "
      "Tensor(a!) x_fp4, Tensor(b!) x_sf, Tensor(c!) gsa) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) {
  m.impl("deinterleave_quantize_nvfp4",
         TORCH_BOX(&jitquant::deinterleave_given<jitquant::kGlobalScale>));
  m.impl("deinterleave_quantize_nvfp4.out",
         TORCH_BOX(&jitquant::deinterleave_given_out<jitquant::kGlobalScale>));
  m.impl("deinterleave_amax_quantize_nvfp4", TORCH_BOX(&jitquant::deinterleave_amax_quantize));
  m.impl("deinterleave_amax_quantize_nvfp4.out",
         TORCH_BOX(&jitquant::deinterleave_amax_quantize_out));
}
