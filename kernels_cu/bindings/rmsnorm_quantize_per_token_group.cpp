#include "groups.h"
#include "norm.h"

namespace jitquant {

cudaError_t launch_rmsnorm_per_token_group(const Matrix& x, const Matrix* residual,
                                           const ColumnVector& weight, float eps, float* inv_rms,
                                           const GroupNumerics& numerics, const GroupOutput& out,
                                           int64_t group_size, cudaStream_t stream);

namespace {

void rmsnorm_quantize_per_token_group(Call& call, const View& x, const View& weight,
                                      int64_t group_size, double eps,
                                      std::optional<InPlace> residual, ScalarType dtype,
                                      std::string_view scale_format, std::string_view scale_layout,
                                      std::optional<double> amax_eps, std::string_view recipe,
                                      Result& data, Result& scale_inv, Result& inv_rms) {
  const NormInput in(x, weight, eps, residual);
  check_group_size(group_size);
  const GroupNumerics numerics = group_numerics(dtype, scale_format, recipe, amax_eps);
  const int64_t leading = x.dim() - 1;
  const int64_t rows = leading > 0 ? x.size(leading - 1) : 1;
  const ScalesPlan plan =
      ScalesPlan::of(x, leading, rows > 0 ? in.x.rows / rows : 0, rows,
                     ceil_div(in.x.cols, group_size), numerics.scale_format, scale_layout);
  GroupOutput out = {data.rows("data", dtype, Shape::of(x, leading, in.x.cols), x),
                     plan.store(scale_inv, "scale_inv", x)};
  if (out.scales.grid.order == ScaleOrder::kRow) {
    // Batches follow each other as rows do.
    out.scales.batches = 1;
    out.scales.rows = out.scales.grid.stored_rows = in.x.rows;
  }
  float* inverse = inv_rms.floats("inv_rms", in.x.rows, x);
  const Launching at(call, x);
  if (in.x.rows == 0) return;
  check_launch(launch_rmsnorm_per_token_group(in.x, in.residual_rows(), in.weight, in.eps, inverse,
                                              numerics, out, group_size, at.stream),
               "rmsnorm_quantize_per_token_group");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&rmsnorm_quantize_per_token_group>(
    "rmsnorm_quantize_per_token_group",
    "Tensor x, Tensor weight, int group_size, float eps=1e-6, *, Tensor(a!)? residual=None, "
    "ScalarType dtype, str scale_format='float32', str scale_layout='row', "
    "float? amax_eps=None, str recipe='te'",
    {"data", "scale_inv", "inv_rms"}))
