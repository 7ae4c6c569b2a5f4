#include "ragged.h"

namespace jitquant {

cudaError_t launch_quantize_ragged_fp8(const RaggedInput& x, const RaggedScales& scales,
                                       const RaggedElements& out, cudaStream_t stream);

namespace {

void quantize_ragged_fp8(Call& call, const View& x, const View& offsets, std::optional<View> scale,
                         std::optional<View> sizes, ScalarType dtype, Result& data,
                         Result& scale_inv, Result& amax) {
  RaggedArguments a = RaggedArguments::of(x, "x", offsets, scale, sizes);
  const RaggedElements out = ragged_elements(data, dtype, fp8_format(dtype), x);
  a.results(scale_inv, "scale_inv", amax, x);
  const Launching at(call, x);
  const Workspace partials(kMaxPartials, x);
  a.scales.partials = partials.floats();
  check_launch(launch_quantize_ragged_fp8(a.input, a.scales, out, at.stream),
               "quantize_ragged_fp8");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_ragged_fp8>(
    "quantize_ragged_fp8",
    "Tensor x, Tensor offsets, Tensor? scale=None, *, Tensor? sizes=None, ScalarType dtype",
    {"data", "scale_inv", "amax"}))
