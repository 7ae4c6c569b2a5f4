#include "deinterleave.h"
#include "quantize.h"

namespace jitquant {

int amax_partials(const Matrix& x);
cudaError_t launch_amax_quantize_nvfp4(const Matrix& x, float divisor, float* partials, float* gsa,
                                       Nvfp4Recipe recipe, const Nvfp4Output& out,
                                       cudaStream_t stream);
cudaError_t launch_quantize_nvfp4_rows(const Matrix& x, float divisor, float* gsa,
                                       Nvfp4Recipe recipe, const Nvfp4Output& out,
                                       cudaStream_t stream);

namespace {

constexpr const char* kName = "amax_quantize_nvfp4";

void amax_quantize_nvfp4(Call& call, const View& x, double divisor, std::optional<double> gsa_value,
                         std::string_view granularity, std::string_view recipe,
                         std::string_view scale_layout, Result& x_fp4, Result& x_sf, Result& gsa) {
  const Matrix m = matrix_of(x, "x");
  const Nvfp4Recipe r = recipe_of(recipe);
  const float d = divisor_of(divisor);
  const std::optional<float> value = gsa_number(gsa_value);
  const bool rows = by_row(granularity) && !value;
  const PackedShape shape =
      PackedShape::of(x, x.dim() - 1, m.rows, m.cols, swizzled_of(scale_layout));
  const Nvfp4Output out = shape.output(x_fp4, x_sf, x);
  float* gsa_out = gsa.floats("gsa", rows ? m.rows : 1, x);
  const Launching at(call, x);
  if (value) {
    const GlobalScale scale = value_scale(*value, gsa_out);
    check_launch(launch_quantize_nvfp4(m, scale, r, out, at.stream), kName);
  } else if (rows) {
    check_launch(launch_quantize_nvfp4_rows(m, d, gsa_out, r, out, at.stream), kName);
  } else {
    const Workspace partials(amax_partials(m), x);
    check_launch(launch_amax_quantize_nvfp4(m, d, partials.floats(), gsa_out, r, out, at.stream),
                 kName);
  }
}

void from_amax(Call& call, const View& x, const View& amax, double divisor, std::string_view recipe,
               std::string_view scale_layout, Result& x_fp4, Result& x_sf, Result& gsa) {
  const Matrix m = matrix_of(x, "x");
  const Nvfp4Recipe r = recipe_of(recipe);
  const float d = divisor_of(divisor);
  const PackedShape shape =
      PackedShape::of(x, x.dim() - 1, m.rows, m.cols, swizzled_of(scale_layout));
  const Nvfp4Output out = shape.output(x_fp4, x_sf, x);
  const GlobalScale scale =
      amax_or_rows_scale(amax, m.rows, d, gsa.floats("gsa", amax.numel(), x), x);
  const Launching at(call, x);
  check_launch(launch_quantize_nvfp4(m, scale, r, out, at.stream), kName);
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(
    function<&amax_quantize_nvfp4>(
        "amax_quantize_nvfp4",
        "Tensor x, float divisor=2688., *, float? gsa_value=None, str granularity='tensor', "
        "str recipe='te', str scale_layout='linear'",
        {"x_fp4", "x_sf", "gsa"}),
    function<&from_amax>("quantize_nvfp4_from_amax",
                         "Tensor x, Tensor amax, float divisor=2688., *, str recipe='te', "
                         "str scale_layout='linear'",
                         {"x_fp4", "x_sf", "gsa"}),
    function<&quantize_given<kGsa>>(
        "quantize_nvfp4_from_buffer",
        "Tensor x, Tensor gsa, *, str recipe='te', str scale_layout='linear'", {"x_fp4", "x_sf"}),
    function<&deinterleave_given<kGsa>>(
        "deinterleave_quantize_from_buffer",
        "Tensor fused, int intermediate, int interleave, Tensor gsa, *, str op='select', "
        "str recipe='te', str scale_layout='linear'",
        {"x_fp4", "x_sf"}))
