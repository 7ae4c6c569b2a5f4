#include "declared/fused_mhc_rmsnorm_quantize.h"
#include "norm.h"

namespace jitquant {
namespace {

// X is (..., H, N), A (..., H).
HyperConnection mix_of(const View& X, const View& A) {
  const int64_t leading = X.dim() - 2;
  HyperConnection mix = {};
  mix.x = matrix_of(X, "X", leading);
  mix.streams = static_cast<int>(X.size(leading));
  mix.stream_stride = X.stride(leading);
  mix.x.vector = mix.x.vector && mix.stream_stride * element_size(mix.x.dtype) % 16 == 0;
  mix.weights = A.const_data_ptr();
  mix.weights_fp32 = A.dtype == ScalarType::Float;
  mix.weight_row_stride = mix.streams;
  mix.weight_stride = 1;
  return mix;
}

// Either `given` (gsa as a tensor) or `gsa` (where a computed one goes) is null.
void run(Call& call, const View& X, const View& A, const View& weight, const NormArguments& a,
         const View* given, std::string_view scale_layout, Result& x_fp4, Result& x_sf, Result* gsa,
         Result& inv_rms) {
  const HyperConnection mix = mix_of(X, A);
  const ColumnVector w = column_vector(weight);
  const int64_t rows = mix.x.rows;
  GlobalScale scale = {};
  if (given != nullptr) scale = given_scale(*given);
  const PackedShape shape =
      PackedShape::of(X, X.dim() - 2, rows, mix.x.cols, swizzled_of(scale_layout));
  const Nvfp4Output out = shape.output(x_fp4, x_sf, X);
  float* gsa_out = gsa == nullptr ? nullptr : gsa->floats("gsa", a.rows && !a.gsa ? rows : 1, X);
  float* inv = inv_rms.floats("inv_rms", rows, X);
  const Launching at(call, X);
  launch_norm(
      a, given != nullptr ? &scale : nullptr, gsa_out, rows, X, "mhc_rmsnorm_quantize_nvfp4",
      [&](const RowScale& row_scale) {
        return launch_mhc_rows(mix, w, a.eps, inv, row_scale, a.recipe, out, at.stream);
      },
      [&](const GlobalScale& second) {
        return launch_mhc_quantize(mix, w, inv, second, a.recipe, out, at.stream);
      },
      [&] { return mhc_amax_partials(mix, w); });
}

void mhc_rmsnorm_quantize_nvfp4(Call& call, const declared::MhcRmsnormQuantizeNvfp4& args,
                                Result& x_fp4, Result& x_sf, Result& gsa, Result& inv_rms) {
  const NormArguments a = {static_cast<float>(args.eps), in_fp32(args.gsa_value),
                           static_cast<float>(args.divisor), by_row(args.granularity),
                           recipe_of(args.recipe)};
  run(call, args.X, args.A, args.weight, a, nullptr, args.scale_layout, x_fp4, x_sf, &gsa, inv_rms);
}

void mhc_from_gsa(Call& call, const declared::MhcRmsnormQuantizeNvfp4FromGsa& args, Result& x_fp4,
                  Result& x_sf, Result& inv_rms) {
  NormArguments a = {static_cast<float>(args.eps)};
  a.recipe = recipe_of(args.recipe);
  run(call, args.X, args.A, args.weight, a, &args.gsa, args.scale_layout, x_fp4, x_sf, nullptr,
      inv_rms);
}

void mhc_rmsnorm_amax(Call& call, const declared::MhcRmsnormAmax& args, Result& amax,
                      Result& inv_rms) {
  const HyperConnection mix = mix_of(args.X, args.A);
  const ColumnVector w = column_vector(args.weight);
  const float e = static_cast<float>(args.eps);
  float* maxima = amax.floats("amax", kMaxPartials, args.X);
  float* inv = inv_rms.floats("inv_rms", mix.x.rows, args.X);
  const Launching at(call, args.X);
  launch_norm_amax(maxima, "mhc_rmsnorm_amax", [&](const RowScale& scale) {
    return launch_mhc_rows(mix, w, e, inv, scale, Nvfp4Recipe::kTe, {}, at.stream);
  });
}

void mhc_from_amax(Call& call, const declared::MhcRmsnormQuantizeNvfp4FromAmax& args, Result& x_fp4,
                   Result& x_sf, Result& gsa) {
  const HyperConnection mix = mix_of(args.X, args.A);
  const ColumnVector w = column_vector(args.weight);
  float* inv = given_inv_rms(args.inv_rms);
  const Nvfp4Recipe r = recipe_of(args.recipe);
  const float d = static_cast<float>(args.divisor);
  const PackedShape shape = PackedShape::of(args.X, args.X.dim() - 2, mix.x.rows, mix.x.cols,
                                            swizzled_of(args.scale_layout));
  const Nvfp4Output out = shape.output(x_fp4, x_sf, args.X);
  const GlobalScale scale = amax_scale(args.amax, d, gsa.floats("gsa", 1, args.X));
  const Launching at(call, args.X);
  check_launch(launch_mhc_quantize(mix, w, inv, scale, r, out, at.stream),
               "mhc_rmsnorm_quantize_nvfp4");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&mhc_rmsnorm_quantize_nvfp4>(), function<&mhc_rmsnorm_amax>(),
                   function<&mhc_from_amax>(), function<&mhc_from_gsa>())
