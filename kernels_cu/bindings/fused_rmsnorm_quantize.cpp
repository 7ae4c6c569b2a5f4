#include "norm.h"

namespace jitquant {

int rmsnorm_amax_partials(const Matrix& x, const Matrix* residual, const ColumnVector& weight);
cudaError_t launch_rmsnorm_rows(const Matrix& x, const Matrix* residual, const ColumnVector& weight,
                                float eps, float* inv_rms, const RowScale& scale,
                                Nvfp4Recipe recipe, const Nvfp4Output& out, cudaStream_t stream);
cudaError_t launch_rmsnorm_quantize(const Matrix& x, const ColumnVector& weight, float* inv_rms,
                                    const GlobalScale& scale, Nvfp4Recipe recipe,
                                    const Nvfp4Output& out, cudaStream_t stream);

namespace {

// `given` is gsa as a tensor, `gsa` where a computed one goes; one of the two is null.
void run(Call& call, const View& x, const View& weight, const std::optional<InPlace>& residual,
         const NormArguments& a, const View* given, std::string_view scale_layout, Result& x_fp4,
         Result& x_sf, Result* gsa, Result& inv_rms) {
  const Matrix m = matrix_of(x, "x");
  const ColumnVector w = column_vector(weight, m, x);
  const std::optional<Matrix> r = residual_of(residual, x);
  const Matrix* residual_rows = r ? &*r : nullptr;
  GlobalScale scale = {};
  if (given != nullptr) scale = given_scale(*given, "gsa", m.rows, x);
  const PackedShape shape =
      PackedShape::of(x, x.dim() - 1, m.rows, m.cols, swizzled_of(scale_layout));
  const Nvfp4Output out = shape.output(x_fp4, x_sf, x);
  float* gsa_out = gsa == nullptr ? nullptr : gsa->floats("gsa", a.rows && !a.gsa ? m.rows : 1, x);
  float* inv = inv_rms.floats("inv_rms", m.rows, x);
  const Launching at(call, x);
  launch_norm(
      a, given != nullptr ? &scale : nullptr, gsa_out, x, "rmsnorm_quantize_nvfp4",
      [&](const RowScale& row_scale) {
        return launch_rmsnorm_rows(m, residual_rows, w, a.eps, inv, row_scale, a.recipe, out,
                                   at.stream);
      },
      [&](const GlobalScale& second) {
        const Matrix& normalized = residual_rows != nullptr ? *residual_rows : m;
        return launch_rmsnorm_quantize(normalized, w, inv, second, a.recipe, out, at.stream);
      },
      [&] { return rmsnorm_amax_partials(m, residual_rows, w); });
}

void rmsnorm_quantize_nvfp4(Call& call, const View& x, const View& weight, double eps,
                            double divisor, std::optional<InPlace> residual,
                            std::optional<double> gsa_value, std::string_view granularity,
                            std::string_view recipe, std::string_view scale_layout, Result& x_fp4,
                            Result& x_sf, Result& gsa, Result& inv_rms) {
  const NormArguments a = {eps_of(eps), gsa_number(gsa_value), divisor_of(divisor),
                           by_row(granularity), recipe_of(recipe)};
  run(call, x, weight, residual, a, nullptr, scale_layout, x_fp4, x_sf, &gsa, inv_rms);
}

void rmsnorm_from_buffer(Call& call, const View& x, const View& weight, const View& gsa, double eps,
                         std::optional<InPlace> residual, std::string_view recipe,
                         std::string_view scale_layout, Result& x_fp4, Result& x_sf,
                         Result& inv_rms) {
  NormArguments a = {eps_of(eps)};
  a.recipe = recipe_of(recipe);
  run(call, x, weight, residual, a, &gsa, scale_layout, x_fp4, x_sf, nullptr, inv_rms);
}

void rmsnorm_amax(Call& call, const View& x, const View& weight, double eps,
                  std::optional<InPlace> residual, Result& amax, Result& inv_rms) {
  const Matrix m = matrix_of(x, "x");
  const ColumnVector w = column_vector(weight, m, x);
  const std::optional<Matrix> r = residual_of(residual, x);
  const float e = eps_of(eps);
  float* maxima = amax.floats("amax", kMaxPartials, x);
  float* inv = inv_rms.floats("inv_rms", m.rows, x);
  const Launching at(call, x);
  launch_norm_amax(maxima, "rmsnorm_amax", [&](const RowScale& scale) {
    return launch_rmsnorm_rows(m, r ? &*r : nullptr, w, e, inv, scale, Nvfp4Recipe::kTe, {},
                               at.stream);
  });
}

void rmsnorm_from_amax(Call& call, const View& x, const View& weight, const View& inv_rms,
                       const View& amax, double divisor, std::string_view recipe,
                       std::string_view scale_layout, Result& x_fp4, Result& x_sf, Result& gsa) {
  const Matrix m = matrix_of(x, "x");
  const ColumnVector w = column_vector(weight, m, x);
  float* inv = given_inv_rms(inv_rms, m.rows, x);
  const Nvfp4Recipe r = recipe_of(recipe);
  const float d = divisor_of(divisor);
  const PackedShape shape =
      PackedShape::of(x, x.dim() - 1, m.rows, m.cols, swizzled_of(scale_layout));
  const Nvfp4Output out = shape.output(x_fp4, x_sf, x);
  const GlobalScale scale = amax_scale(amax, d, gsa.floats("gsa", 1, x), x);
  const Launching at(call, x);
  check_launch(launch_rmsnorm_quantize(m, w, inv, scale, r, out, at.stream),
               "rmsnorm_quantize_nvfp4");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(
    function<&rmsnorm_quantize_nvfp4>(
        "rmsnorm_quantize_nvfp4",
        "Tensor x, Tensor weight, float eps=1e-6, float divisor=2688., *, "
        "Tensor(a!)? residual=None, float? gsa_value=None, str granularity='row', "
        "str recipe='te', str scale_layout='linear'",
        {"x_fp4", "x_sf", "gsa", "inv_rms"}),
    function<&rmsnorm_amax>("rmsnorm_amax",
                            "Tensor x, Tensor weight, float eps=1e-6, *, "
                            "Tensor(a!)? residual=None",
                            {"amax", "inv_rms"}),
    function<&rmsnorm_from_amax>(
        "rmsnorm_quantize_nvfp4_from_amax",
        "Tensor x, Tensor weight, Tensor inv_rms, Tensor amax, float divisor=2688., *, "
        "str recipe='te', str scale_layout='linear'",
        {"x_fp4", "x_sf", "gsa"}),
    function<&rmsnorm_from_buffer>(
        "rmsnorm_quantize_nvfp4_from_gsa",
        "Tensor x, Tensor weight, Tensor gsa, float eps=1e-6, *, Tensor(a!)? residual=None, "
        "str recipe='te', str scale_layout='linear'",
        {"x_fp4", "x_sf", "inv_rms"}))
