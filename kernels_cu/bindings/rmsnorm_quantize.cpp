#include "fp8.h"
#include "norm.h"

namespace jitquant {

cudaError_t launch_rmsnorm_fp8(const Matrix& x, const Matrix* residual, const ColumnVector& weight,
                               float eps, float* inv_rms, const Fp8Scale& scale,
                               const ElementRows& out, cudaStream_t stream);

namespace {

void rmsnorm_quantize_fp8(Call& call, const View& x, const View& weight, std::optional<View> scale,
                          double eps, std::optional<InPlace> residual, ScalarType dtype,
                          std::optional<double> scale_value, std::optional<double> scale_ub,
                          std::string_view granularity, bool with_amax, Result& data,
                          Result& scale_inv, Result& amax, Result& inv_rms) {
  const NormInput in(x, weight, eps, residual);
  Fp8Arguments a = Fp8Arguments::of(x, in.x.rows, scale, dtype, scale_value, scale_ub, granularity,
                                    with_amax, false);
  const ElementRows out = a.results(data, scale_inv, amax, Shape::of(x, x.dim() - 1, in.x.cols), x);
  float* inverse = inv_rms.floats("inv_rms", in.x.rows, x);
  const Launching at(call, x);
  const Workspace partials(!a.scale.by_row && with_amax ? kMaxPartials : 0, x);
  a.scale.partials = partials.floats();
  check_launch(launch_rmsnorm_fp8(in.x, in.residual_rows(), in.weight, in.eps, inverse, a.scale,
                                  out, at.stream),
               "rmsnorm_quantize_fp8");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&rmsnorm_quantize_fp8>(
    "rmsnorm_quantize_fp8",
    "Tensor x, Tensor weight, Tensor? scale=None, float eps=1e-6, *, "
    "Tensor(a!)? residual=None, ScalarType dtype, float? scale_value=None, "
    "float? scale_ub=None, str granularity='row', bool with_amax=True",
    {"data", "scale_inv", "amax", "inv_rms"}))
