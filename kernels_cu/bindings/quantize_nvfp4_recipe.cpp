#include "declared/quantize_nvfp4_recipe.h"
#include "rotate.h"

namespace jitquant {
namespace {

void rotated_amax(Call& call, const declared::RotatedAmax& args, Result& maxima) {
  const Matrix m = matrix_of(args.x, "x");
  const Rotation rotation = rotation_of(args.rotate, args.signs);
  const Rope rope = rope_of(args.cos, args.sin, args.interleaved, m);
  const bool rows = by_row(args.granularity);
  float* out = maxima.floats("maxima", rows ? m.rows : kMaxPartials, args.x);
  const Launching at(call, args.x);
  check_launch(launch_rotated_amax(m, rotation, rope, rows, out, at.stream), "rotated_amax");
}

void quantize_nvfp4_recipe(Call& call, const declared::QuantizeNvfp4Recipe& args, Result& x_fp4,
                           Result& x_sf, Result& gsa) {
  const Matrix m = matrix_of(args.x, "x");
  const bool rows = by_row(args.granularity);
  Recipe recipe = {};
  recipe.rotation = rotation_of(args.rotate, args.signs);
  const Rope rope = rope_of(args.cos, args.sin, args.interleaved, m);
  recipe.select = select_of(args.select);
  recipe.rounding = rounding_of(args.rounding, args.rng_state, args.random_bytes);
  recipe.tile = args.block == "16x16";
  const Nvfp4Recipe rule = recipe_of(args.recipe);
  const float divisor = recipe.select.full * static_cast<float>(args.e4m3_max);
  const int count = static_cast<int>(rows ? 0 : args.amax.numel());
  const PackedShape shape =
      PackedShape::of(args.x, args.x.dim() - 1, m.rows, m.cols, swizzled_of(args.scale_layout));
  const Nvfp4Output out = shape.output(x_fp4, x_sf, args.x);
  float* gsa_out = gsa.floats("gsa", rows ? m.rows : 1, args.x);
  const Launching at(call, args.x);
  check_launch(
      launch_quantize_nvfp4_recipe(m, rope, static_cast<const float*>(args.amax.data), count, rows,
                                   args.from_gsa, divisor, rule, gsa_out, recipe, out, at.stream),
      "quantize_nvfp4_recipe");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&rotated_amax>(), function<&quantize_nvfp4_recipe>())
