#include "deinterleave.h"

namespace jitquant {

int deinterleave_amax_partials(const Matrix& fused);
cudaError_t launch_deinterleave_amax_quantize_nvfp4(const Matrix& fused, int64_t run, bool activate,
                                                    float divisor, float* partials, float* gsa,
                                                    Nvfp4Recipe recipe, const Nvfp4Output& out,
                                                    cudaStream_t stream);
cudaError_t launch_deinterleave_quantize_nvfp4_rows(const Matrix& fused, int64_t run, bool activate,
                                                    float divisor, float* gsa, Nvfp4Recipe recipe,
                                                    const Nvfp4Output& out, cudaStream_t stream);

namespace {

constexpr const char* kName = "deinterleave_amax_quantize_nvfp4";

void deinterleave_amax_quantize(Call& call, const View& fused, int64_t intermediate,
                                int64_t interleave, double divisor, std::optional<double> gsa_value,
                                std::string_view op, std::string_view granularity,
                                std::string_view recipe, std::string_view scale_layout,
                                Result& x_fp4, Result& x_sf, Result& gsa) {
  const Deinterleave in = Deinterleave::of(fused, intermediate, interleave, scale_layout);
  const Matrix& m = in.matrix;
  const bool activate = activates(op);
  const Nvfp4Recipe r = recipe_of(recipe);
  const float d = divisor_of(divisor);
  const std::optional<float> value = gsa_number(gsa_value);
  const bool rows = by_row(granularity) && !value;
  const Nvfp4Output out = in.shape.output(x_fp4, x_sf, fused);
  float* gsa_out = gsa.floats("gsa", rows ? m.rows : 1, fused);
  const Launching at(call, fused);
  if (rows) {
    check_launch(
        launch_deinterleave_quantize_nvfp4_rows(m, in.run, activate, d, gsa_out, r, out, at.stream),
        kName);
    return;
  }
  if (value) {
    const GlobalScale scale = value_scale(*value, gsa_out);
    check_launch(launch_deinterleave_quantize_nvfp4(m, in.run, activate, scale, r, out, at.stream),
                 kName);
    return;
  }
  const Workspace partials(deinterleave_amax_partials(m), fused);
  check_launch(launch_deinterleave_amax_quantize_nvfp4(m, in.run, activate, d, partials.floats(),
                                                       gsa_out, r, out, at.stream),
               kName);
}

void deinterleave_from_amax(Call& call, const View& fused, int64_t intermediate, int64_t interleave,
                            const View& amax, double divisor, std::string_view op,
                            std::string_view recipe, std::string_view scale_layout, Result& x_fp4,
                            Result& x_sf, Result& gsa) {
  const Deinterleave in = Deinterleave::of(fused, intermediate, interleave, scale_layout);
  const bool activate = activates(op);
  const Nvfp4Recipe r = recipe_of(recipe);
  const float d = divisor_of(divisor);
  const Nvfp4Output out = in.shape.output(x_fp4, x_sf, fused);
  const GlobalScale scale =
      amax_or_rows_scale(amax, in.matrix.rows, d, gsa.floats("gsa", amax.numel(), fused), fused);
  const Launching at(call, fused);
  check_launch(
      launch_deinterleave_quantize_nvfp4(in.matrix, in.run, activate, scale, r, out, at.stream),
      kName);
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&deinterleave_given<kGlobalScale>>(
                       "deinterleave_quantize_nvfp4",
                       "Tensor fused, int intermediate, int interleave, Tensor global_scale, *, "
                       "str op='select', str recipe='te', str scale_layout='linear'",
                       {"x_fp4", "x_sf"}),
                   function<&deinterleave_from_amax>(
                       "deinterleave_quantize_nvfp4_from_amax",
                       "Tensor fused, int intermediate, int interleave, Tensor amax, "
                       "float divisor=2688., *, str op='select', str recipe='te', "
                       "str scale_layout='linear'",
                       {"x_fp4", "x_sf", "gsa"}),
                   function<&deinterleave_amax_quantize>(
                       "deinterleave_amax_quantize_nvfp4",
                       "Tensor fused, int intermediate, int interleave, float divisor=2688., *, "
                       "float? gsa_value=None, str op='select', str granularity='tensor', "
                       "str recipe='te', str scale_layout='linear'",
                       {"x_fp4", "x_sf", "gsa"}))
