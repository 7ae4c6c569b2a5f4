#include "declared/quantize_ragged_grad.h"
#include "ragged.h"

namespace jitquant {
namespace {

void quantize_ragged_grad_fp8(Call& call, const declared::QuantizeRaggedGradFp8& args, Result& data,
                              Result& scale_inv, Result& amax, Result& dbias) {
  RaggedArguments a = RaggedArguments::of(args.grad, "grad", args.offsets, args.scale, args.sizes);
  const EightBit format = eight_bit_of(args.dtype);
  const int64_t cols = args.grad.size(args.grad.dim() - 1);
  JITQUANT_CHECK(!args.with_dbias || cols <= int64_t{1} << 30,
                 "grad: expected at most 2^30 columns with dbias, got ", cols);
  RaggedGradient gradient = {nullptr, activation_of(args.activation), cols, nullptr, nullptr};
  if (args.act_input) gradient.act_input = args.act_input->const_data_ptr();
  const RaggedElements out = ragged_elements(data, args.dtype, format, args.grad);
  a.results(scale_inv, "scale_inv", amax, args.grad);
  void* sums = dbias.memory("dbias", ScalarType::Float,
                            Shape::of(args.with_dbias ? a.input.count : 0, cols), args.grad);
  const bool adds = args.with_dbias && a.input.count > 0;
  if (adds) gradient.dbias = static_cast<float*>(sums);
  const Launching at(call, args.grad);
  const Workspace partials(kMaxPartials, args.grad);
  const RowCut cut = quantize_ragged_grad_cut(a.input.dtype, args.grad.numel(), cols, adds);
  const Workspace pieces(adds ? cut.ranges * cols : 0, args.grad);
  a.scales.partials = partials.floats();
  gradient.sums = pieces.floats();
  check_launch(launch_quantize_ragged_grad_fp8(a.input, a.scales, gradient, out, at.stream),
               "quantize_ragged_grad_fp8");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_ragged_grad_fp8>())
