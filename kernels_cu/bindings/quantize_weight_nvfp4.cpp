#include "declared/quantize_weight_nvfp4.h"

namespace jitquant {
namespace {

constexpr const char* kName = "quantize_weight_nvfp4";

struct Weight {
  Matrix matrix;
  bool columns, tile;
  PackedShape packed;

  static Weight of(const View& w, std::string_view block, int64_t dim, bool swizzled) {
    const Matrix m = matrix_of(w, "w");
    const bool tile = block == "16x16";
    if (dim == -1) {
      return {m, false, tile, PackedShape::of(w, 1, m.rows, m.cols, swizzled)};
    }
    const int64_t blocks = (m.rows + 15) / 16;
    const PackedShape packed = {Shape::of(blocks * 8, m.cols), Shape::of(blocks, m.cols), m.cols,
                                blocks, false};
    return {m, true, tile, packed};
  }
};

void launch_all(Call& call, const View& w, const Weight& in, const GlobalScale* given,
                float divisor, Nvfp4Recipe recipe, const Nvfp4Output& out, float* gsa_out) {
  const Launching at(call, w);
  if (given != nullptr) {
    check_launch(launch_quantize_weight_nvfp4(in.matrix, in.columns, in.tile, *given, recipe, out,
                                              at.stream),
                 kName);
    return;
  }
  const int count = weight_amax_partials(in.matrix, in.columns, in.tile);
  if (count == 0) {
    check_launch(launch_weight_in_cluster(in.matrix, divisor, gsa_out, recipe, out, at.stream),
                 kName);
    return;
  }
  const Workspace partials(count, w);
  check_launch(launch_weight_amax_partials(in.matrix, partials.floats(), count, at.stream), kName);
  const GlobalScale scale = partials_scale(partials.floats(), count, divisor, gsa_out);
  check_launch(
      launch_quantize_weight_nvfp4(in.matrix, in.columns, in.tile, scale, recipe, out, at.stream),
      kName);
}

void quantize_weight_nvfp4(Call& call, const declared::QuantizeWeightNvfp4& args, Result& x_fp4,
                           Result& x_sf, Result& gsa) {
  const Weight in = Weight::of(args.w, args.block, args.dim, swizzled_of(args.scale_layout));
  const Nvfp4Recipe r = recipe_of(args.recipe);
  const float d = static_cast<float>(args.divisor);
  const std::optional<float> value = in_fp32(args.gsa_value);
  const Nvfp4Output out = in.packed.output(x_fp4, x_sf, args.w);
  float* gsa_out = gsa.floats("gsa", 1, args.w);
  const GlobalScale scale = value_scale(value.value_or(0.0f), gsa_out);
  launch_all(call, args.w, in, value ? &scale : nullptr, d, r, out, gsa_out);
}

void from_gsa(Call& call, const declared::QuantizeWeightNvfp4FromGsa& args, Result& x_fp4,
              Result& x_sf) {
  const Weight in = Weight::of(args.w, args.block, args.dim, swizzled_of(args.scale_layout));
  const Nvfp4Recipe r = recipe_of(args.recipe);
  const GlobalScale given = given_scale(args.gsa);
  const Nvfp4Output out = in.packed.output(x_fp4, x_sf, args.w);
  launch_all(call, args.w, in, &given, 1.0f, r, out, nullptr);
}

void from_amax(Call& call, const declared::QuantizeWeightNvfp4FromAmax& args, Result& x_fp4,
               Result& x_sf, Result& gsa) {
  const Weight in = Weight::of(args.w, args.block, args.dim, swizzled_of(args.scale_layout));
  const Nvfp4Recipe r = recipe_of(args.recipe);
  const float d = static_cast<float>(args.divisor);
  const Nvfp4Output out = in.packed.output(x_fp4, x_sf, args.w);
  float* gsa_out = gsa.floats("gsa", 1, args.w);
  const GlobalScale scale = amax_scale(args.amax, d, gsa_out);
  launch_all(call, args.w, in, &scale, d, r, out, gsa_out);
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_weight_nvfp4>(), function<&from_amax>(),
                   function<&from_gsa>())
