#include "declared/deinterleave_quantize.h"
#include "deinterleave.h"

namespace jitquant {
namespace {

constexpr const char* kName = "deinterleave_amax_quantize_nvfp4";

void deinterleave_amax_quantize(Call& call, const declared::DeinterleaveAmaxQuantizeNvfp4& args,
                                Result& x_fp4, Result& x_sf, Result& gsa) {
  const Deinterleave in =
      Deinterleave::of(args.fused, args.intermediate, args.interleave, args.scale_layout);
  const Matrix& m = in.matrix;
  const bool activate = activates(args.op);
  const Nvfp4Recipe r = recipe_of(args.recipe);
  const float d = static_cast<float>(args.divisor);
  const std::optional<float> value = in_fp32(args.gsa_value);
  const bool rows = by_row(args.granularity) && !value;
  const Nvfp4Output out = in.shape.output(x_fp4, x_sf, args.fused);
  float* gsa_out = gsa.floats("gsa", rows ? m.rows : 1, args.fused);
  const Launching at(call, args.fused);
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
  const Workspace partials(deinterleave_amax_partials(m), args.fused);
  check_launch(launch_deinterleave_amax_quantize_nvfp4(m, in.run, activate, d, partials.floats(),
                                                       gsa_out, r, out, at.stream),
               kName);
}

void deinterleave_from_amax(Call& call, const declared::DeinterleaveQuantizeNvfp4FromAmax& args,
                            Result& x_fp4, Result& x_sf, Result& gsa) {
  const Deinterleave in =
      Deinterleave::of(args.fused, args.intermediate, args.interleave, args.scale_layout);
  const bool activate = activates(args.op);
  const Nvfp4Recipe r = recipe_of(args.recipe);
  const float d = static_cast<float>(args.divisor);
  const Nvfp4Output out = in.shape.output(x_fp4, x_sf, args.fused);
  const GlobalScale scale =
      amax_or_rows_scale(args.amax, d, gsa.floats("gsa", args.amax.numel(), args.fused));
  const Launching at(call, args.fused);
  check_launch(
      launch_deinterleave_quantize_nvfp4(in.matrix, in.run, activate, scale, r, out, at.stream),
      kName);
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&deinterleave_given>(), function<&deinterleave_from_amax>(),
                   function<&deinterleave_amax_quantize>())
