#include "declared/fused_rmsnorm_quantize.h"
#include "norm.h"

namespace jitquant {
namespace {

// Either `given` (gsa as a tensor) or `gsa` (where a computed one goes) is null.
void run(Call& call, const View& x, const View& weight, const std::optional<InPlace>& residual,
         const NormArguments& a, const View* given, std::string_view scale_layout, Result& x_fp4,
         Result& x_sf, Result* gsa, Result& inv_rms) {
  const Matrix m = matrix_of(x, "x");
  const ColumnVector w = column_vector(weight);
  const std::optional<Matrix> r = residual_of(residual);
  const Matrix* residual_rows = r ? &*r : nullptr;
  GlobalScale scale = {};
  if (given != nullptr) scale = given_scale(*given);
  const PackedShape shape =
      PackedShape::of(x, x.dim() - 1, m.rows, m.cols, swizzled_of(scale_layout));
  const Nvfp4Output out = shape.output(x_fp4, x_sf, x);
  float* gsa_out = gsa == nullptr ? nullptr : gsa->floats("gsa", a.rows && !a.gsa ? m.rows : 1, x);
  float* inv = inv_rms.floats("inv_rms", m.rows, x);
  const Launching at(call, x);
  launch_norm(
      a, given != nullptr ? &scale : nullptr, gsa_out, m.rows, x, "rmsnorm_quantize_nvfp4",
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

void rmsnorm_quantize_nvfp4(Call& call, const declared::RmsnormQuantizeNvfp4& args, Result& x_fp4,
                            Result& x_sf, Result& gsa, Result& inv_rms) {
  const NormArguments a = {static_cast<float>(args.eps), in_fp32(args.gsa_value),
                           static_cast<float>(args.divisor), by_row(args.granularity),
                           recipe_of(args.recipe)};
  run(call, args.x, args.weight, args.residual, a, nullptr, args.scale_layout, x_fp4, x_sf, &gsa,
      inv_rms);
}

void rmsnorm_from_gsa(Call& call, const declared::RmsnormQuantizeNvfp4FromGsa& args, Result& x_fp4,
                      Result& x_sf, Result& inv_rms) {
  NormArguments a = {static_cast<float>(args.eps)};
  a.recipe = recipe_of(args.recipe);
  run(call, args.x, args.weight, args.residual, a, &args.gsa, args.scale_layout, x_fp4, x_sf,
      nullptr, inv_rms);
}

void rmsnorm_amax(Call& call, const declared::RmsnormAmax& args, Result& amax, Result& inv_rms) {
  const Matrix m = matrix_of(args.x, "x");
  const ColumnVector w = column_vector(args.weight);
  const std::optional<Matrix> r = residual_of(args.residual);
  const float e = static_cast<float>(args.eps);
  float* maxima = amax.floats("amax", kMaxPartials, args.x);
  float* inv = inv_rms.floats("inv_rms", m.rows, args.x);
  const Launching at(call, args.x);
  launch_norm_amax(maxima, "rmsnorm_amax", [&](const RowScale& scale) {
    return launch_rmsnorm_rows(m, r ? &*r : nullptr, w, e, inv, scale, Nvfp4Recipe::kTe, {},
                               at.stream);
  });
}

void rmsnorm_from_amax(Call& call, const declared::RmsnormQuantizeNvfp4FromAmax& args,
                       Result& x_fp4, Result& x_sf, Result& gsa) {
  const Matrix m = matrix_of(args.x, "x");
  const ColumnVector w = column_vector(args.weight);
  float* inv = given_inv_rms(args.inv_rms);
  const Nvfp4Recipe r = recipe_of(args.recipe);
  const float d = static_cast<float>(args.divisor);
  const PackedShape shape =
      PackedShape::of(args.x, args.x.dim() - 1, m.rows, m.cols, swizzled_of(args.scale_layout));
  const Nvfp4Output out = shape.output(x_fp4, x_sf, args.x);
  const GlobalScale scale = amax_scale(args.amax, d, gsa.floats("gsa", 1, args.x));
  const Launching at(call, args.x);
  check_launch(launch_rmsnorm_quantize(m, w, inv, scale, r, out, at.stream),
               "rmsnorm_quantize_nvfp4");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&rmsnorm_quantize_nvfp4>(), function<&rmsnorm_amax>(),
                   function<&rmsnorm_from_amax>(), function<&rmsnorm_from_gsa>())
