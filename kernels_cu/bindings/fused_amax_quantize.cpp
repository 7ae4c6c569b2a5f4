#include "declared/fused_amax_quantize.h"
#include "deinterleave.h"
#include "quantize.h"

namespace jitquant {
namespace {

constexpr const char* kName = "amax_quantize_nvfp4";

void amax_quantize_nvfp4(Call& call, const declared::AmaxQuantizeNvfp4& args, Result& x_fp4,
                         Result& x_sf, Result& gsa) {
  const Matrix m = matrix_of(args.x, "x");
  const Nvfp4Recipe r = recipe_of(args.recipe);
  const float d = static_cast<float>(args.divisor);
  const std::optional<float> value = in_fp32(args.gsa_value);
  const bool rows = by_row(args.granularity) && !value;
  const PackedShape shape =
      PackedShape::of(args.x, args.x.dim() - 1, m.rows, m.cols, swizzled_of(args.scale_layout));
  const Nvfp4Output out = shape.output(x_fp4, x_sf, args.x);
  float* gsa_out = gsa.floats("gsa", rows ? m.rows : 1, args.x);
  const Launching at(call, args.x);
  if (value) {
    const GlobalScale scale = value_scale(*value, gsa_out);
    check_launch(launch_quantize_nvfp4(m, scale, r, out, at.stream), kName);
  } else if (rows) {
    check_launch(launch_quantize_nvfp4_rows(m, d, gsa_out, r, out, at.stream), kName);
  } else {
    const Workspace partials(amax_partials(m), args.x);
    check_launch(launch_amax_quantize_nvfp4(m, d, partials.floats(), gsa_out, r, out, at.stream),
                 kName);
  }
}

void from_amax(Call& call, const declared::QuantizeNvfp4FromAmax& args, Result& x_fp4, Result& x_sf,
               Result& gsa) {
  const Matrix m = matrix_of(args.x, "x");
  const Nvfp4Recipe r = recipe_of(args.recipe);
  const float d = static_cast<float>(args.divisor);
  const PackedShape shape =
      PackedShape::of(args.x, args.x.dim() - 1, m.rows, m.cols, swizzled_of(args.scale_layout));
  const Nvfp4Output out = shape.output(x_fp4, x_sf, args.x);
  const GlobalScale scale =
      amax_or_rows_scale(args.amax, d, gsa.floats("gsa", args.amax.numel(), args.x));
  const Launching at(call, args.x);
  check_launch(launch_quantize_nvfp4(m, scale, r, out, at.stream), kName);
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&amax_quantize_nvfp4>(), function<&from_amax>(),
                   function<&quantize_given>("quantize_nvfp4_from_buffer"),
                   function<&deinterleave_given>("deinterleave_quantize_from_buffer"))
