#include "declared/swiglu_quantize.h"
#include "fp8.h"
#include "gate_and_up.h"

namespace jitquant {
namespace {

void swiglu_quantize_fp8(Call& call, const declared::SwigluQuantizeFp8& args, Result& data,
                         Result& scale_inv, Result& amax) {
  const GateAndUp in(args.fused, args.interleave);
  Fp8Arguments a = Fp8Arguments::of(args.fused, args);
  const ElementRows out = a.results(
      data, scale_inv, &amax, Shape::of(args.fused, args.fused.dim() - 1, in.cols), args.fused);
  const Launching at(call, args.fused);
  const Workspace partials(swiglu_fp8_partials(in.fused, a.scale) ? kMaxPartials : 0, args.fused);
  a.scale.partials = partials.floats();
  check_launch(launch_swiglu_fp8(in.fused, in.run, a.scale, out, at.stream), "swiglu_quantize_fp8");
}

void from_amax(Call& call, const declared::SwigluQuantizeFp8FromAmax& args, Result& data,
               Result& scale_inv) {
  const GateAndUp in(args.fused, args.interleave);
  Fp8Arguments a = Fp8Arguments::from_amax(args.fused, args);
  const ElementRows out = a.results(
      data, scale_inv, nullptr, Shape::of(args.fused, args.fused.dim() - 1, in.cols), args.fused);
  const Launching at(call, args.fused);
  check_launch(launch_swiglu_fp8(in.fused, in.run, a.scale, out, at.stream), "swiglu_quantize_fp8");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&swiglu_quantize_fp8>(), function<&from_amax>())
