#include "declared/quantize_ragged_mxfp8.h"
#include "groups.h"
#include "ragged.h"

namespace jitquant {
namespace {

void quantize_ragged_mxfp8(Call& call, const declared::QuantizeRaggedMxfp8& args, Result& data,
                           Result& block_scales) {
  const RaggedArguments a = RaggedArguments::of(args.x, "x", args.offsets, {}, args.sizes);
  const RaggedElements out = ragged_elements(data, args.dtype, eight_bit_of(args.dtype), args.x);
  void* scales = block_scales.memory("block_scales", ScalarType::Float8_e8m0fnu,
                                     Shape::of(ceil_div(a.input.numel, kMxfp8Block)), args.x);
  const Launching at(call, args.x);
  check_launch(launch_quantize_ragged_mxfp8(a.input, mxfp8_numerics(args.dtype), out,
                                            static_cast<uint8_t*>(scales), at.stream),
               "quantize_ragged_mxfp8");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_ragged_mxfp8>())
