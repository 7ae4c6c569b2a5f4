#include "declared/quantize_nvfp4_both.h"
#include "recipes.h"

namespace jitquant {
namespace {

Matrix matrix_of_both(const View& x) {
  const Matrix m = matrix_of(x, "x");
  constexpr int64_t kMost = 2147483520;  // the kernel counts rows and columns in 32 bits
  JITQUANT_CHECK(m.rows <= kMost && m.cols <= kMost, "x: expected at most ", kMost,
                 " rows and columns, got shape ", shape_text(x));
  return m;
}

void nvfp4_both_amax(Call& call, const declared::Nvfp4BothAmax& args, Result& maxima) {
  const Matrix m = matrix_of_both(args.x);
  const Rotation rotation = rotation_of(args.rotate, args.signs);
  void* const out = maxima.memory("maxima", ScalarType::Float, Shape::of(2, kBothPartials), args.x);
  const Launching at(call, args.x);
  check_launch(launch_nvfp4_both_amax(m, rotation, static_cast<float*>(out), at.stream),
               "nvfp4_both_amax");
}

void quantize_nvfp4_both(Call& call, const declared::QuantizeNvfp4Both& args, Result& x_fp4,
                         Result& x_sf, Result& gsa, Result& x_fp4_t, Result& x_sf_t,
                         Result& gsa_t) {
  const Matrix m = matrix_of_both(args.x);
  Recipe recipe = {};
  recipe.rotation = rotation_of(args.rotate, args.signs);
  recipe.select = select_of(args.select);
  recipe.rounding = rounding_of(args.rounding, args.rng_state, args.random_bytes);
  const int64_t sizes[2] = {args.x.size(1), args.x.size(0)};
  View transposed = args.x;
  transposed.sizes = sizes;
  BothBytes given = {{recipe.rounding.random_bytes, nullptr}};
  if (args.random_bytes_t) {
    given.side[1] = static_cast<const uint8_t*>(args.random_bytes_t->data);
  }
  recipe.tile = args.block == "16x16";
  const float divisor = recipe.select.full * static_cast<float>(args.e4m3_max);
  const bool from_gsa = args.from_gsa_t.has_value();
  const float* const maxima = static_cast<const float*>(args.amax.data);
  // 16x16 blocks have one gsa, as the transpose has the same codes.
  const float* const second =
      from_gsa && !recipe.tile ? static_cast<const float*>(args.from_gsa_t->data) : maxima;
  const BothScale scale = {{maxima, from_gsa ? second : maxima + kBothPartials},
                           from_gsa ? 1 : kBothPartials,
                           from_gsa,
                           divisor};
  const bool swizzled = swizzled_of(args.scale_layout);
  const PackedShape shape = PackedShape::of(args.x, 1, m.rows, m.cols, swizzled);
  const PackedShape shape_t = PackedShape::of(transposed, 1, m.cols, m.rows, swizzled);
  const Nvfp4Output out = shape.output(x_fp4, x_sf, args.x);
  float* const gsa_out = gsa.floats("gsa", 1, args.x);
  const Nvfp4Output out_t = {static_cast<uint8_t*>(x_fp4_t.memory(
                                 "x_fp4_t", ScalarType::Float4_e2m1fn_x2, shape_t.codes, args.x)),
                             static_cast<uint8_t*>(x_sf_t.memory(
                                 "x_sf_t", ScalarType::Float8_e4m3fn, shape_t.scales, args.x)),
                             shape_t.rows, shape_t.blocks, swizzled};
  float* const gsa_t_out = gsa_t.floats("gsa_t", 1, args.x);
  const Launching at(call, args.x);
  check_launch(launch_quantize_nvfp4_both(m, scale, recipe, given, out, gsa_out, out_t, gsa_t_out,
                                          at.stream),
               "quantize_nvfp4_both");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&nvfp4_both_amax>(), function<&quantize_nvfp4_both>())
