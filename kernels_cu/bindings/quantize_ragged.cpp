#include "declared/quantize_ragged.h"
#include "ragged.h"

namespace jitquant {
namespace {

void quantize_ragged_fp8(Call& call, const declared::QuantizeRaggedFp8& args, Result& data,
                         Result& scale_inv, Result& amax) {
  RaggedArguments a = RaggedArguments::of(args.x, "x", args.offsets, args.scale, args.sizes);
  const RaggedElements out = ragged_elements(data, args.dtype, eight_bit_of(args.dtype), args.x);
  a.results(scale_inv, "scale_inv", amax, args.x);
  const Launching at(call, args.x);
  const Workspace partials(kMaxPartials, args.x);
  a.scales.partials = partials.floats();
  check_launch(
      launch_quantize_ragged_fp8(a.input, activation_of(args.activation), a.scales, out, at.stream),
      "quantize_ragged_fp8");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_ragged_fp8>())
