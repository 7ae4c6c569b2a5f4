#include "declared/quantize_ragged_nvfp4.h"
#include "ragged.h"

namespace jitquant {
namespace {

void quantize_ragged_nvfp4(Call& call, const declared::QuantizeRaggedNvfp4& args, Result& x_fp4,
                           Result& x_sf, Result& gsa, Result& amax) {
  RaggedArguments a = RaggedArguments::of(args.x, "x", args.offsets, args.scale, args.sizes);
  const Nvfp4Recipe r = recipe_of(args.recipe);
  const int64_t blocks = (args.x.numel() + 15) / 16;
  void* codes = x_fp4.memory("x_fp4", ScalarType::Float4_e2m1fn_x2, Shape::of(blocks * 8), args.x);
  void* factors = x_sf.memory("x_sf", ScalarType::Float8_e4m3fn, Shape::of(blocks), args.x);
  a.results(gsa, "gsa", amax, args.x);
  const Launching at(call, args.x);
  const Workspace partials(kMaxPartials, args.x);
  a.scales.partials = partials.floats();
  check_launch(launch_quantize_ragged_nvfp4(a.input, a.scales, r, static_cast<uint8_t*>(codes),
                                            static_cast<uint8_t*>(factors), at.stream),
               "quantize_ragged_nvfp4");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_ragged_nvfp4>())
