#include "fp8.h"

namespace jitquant {

bool quantize_fp8_partials(const Matrix& x, const Fp8Scale& scale);
cudaError_t launch_quantize_fp8(const Matrix& x, const Fp8Scale& scale, const ElementRows& out,
                                cudaStream_t stream);

namespace {

void quantize_fp8(Call& call, const View& x, std::optional<View> scale, ScalarType dtype,
                  std::optional<double> scale_value, std::optional<double> scale_ub,
                  std::string_view granularity, bool with_amax, Result& data, Result& scale_inv,
                  Result& amax) {
  const Matrix m = matrix_of(x, "x");
  Fp8Arguments a = Fp8Arguments::of(x, m.rows, scale, dtype, scale_value, scale_ub, granularity,
                                    with_amax, true);
  const ElementRows out = a.results(data, scale_inv, amax, Shape::of(x, x.dim() - 1, m.cols), x);
  const Launching at(call, x);
  const Workspace partials(quantize_fp8_partials(m, a.scale) ? kMaxPartials : 0, x);
  a.scale.partials = partials.floats();
  check_launch(launch_quantize_fp8(m, a.scale, out, at.stream), "quantize_fp8");
}

void from_amax(Call& call, const View& x, const View& amax, ScalarType dtype,
               std::optional<double> scale_ub, std::string_view granularity, Result& data,
               Result& scale_inv) {
  const Matrix m = matrix_of(x, "x");
  Fp8FromAmax a = Fp8FromAmax::of(x, m.rows, amax, dtype, scale_ub, granularity);
  const ElementRows out = a.results(data, scale_inv, Shape::of(x, x.dim() - 1, m.cols), x);
  const Launching at(call, x);
  check_launch(launch_quantize_fp8(m, a.scale, out, at.stream), "quantize_fp8");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(
    function<&quantize_fp8>(
        "quantize_fp8",
        "Tensor x, Tensor? scale=None, *, ScalarType dtype, float? scale_value=None, "
        "float? scale_ub=None, str granularity='tensor', bool with_amax=True",
        {"data", "scale_inv", "amax"}),
    function<&from_amax>("quantize_fp8_from_amax",
                         "Tensor x, Tensor amax, *, ScalarType dtype, float? scale_ub=None, "
                         "str granularity='tensor'",
                         {"data", "scale_inv"}))
