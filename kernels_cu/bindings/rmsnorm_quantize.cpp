#include "declared/rmsnorm_quantize.h"
#include "fp8.h"
#include "norm.h"

namespace jitquant {
namespace {

void rmsnorm_quantize_fp8(Call& call, const declared::RmsnormQuantizeFp8& args, Result& data,
                          Result& scale_inv, Result& amax, Result& inv_rms) {
  const NormInput in(args.x, args.weight, args.eps, args.residual);
  Fp8Arguments a = Fp8Arguments::of(args.x, args);
  const ElementRows out =
      a.results(data, scale_inv, &amax, Shape::of(args.x, args.x.dim() - 1, in.x.cols), args.x);
  float* inverse = inv_rms.floats("inv_rms", in.x.rows, args.x);
  const Launching at(call, args.x);
  const Workspace partials(!a.scale.by_row && args.with_amax ? kMaxPartials : 0, args.x);
  a.scale.partials = partials.floats();
  check_launch(launch_rmsnorm_fp8(in.x, in.residual_rows(), in.weight, in.eps, inverse, a.scale,
                                  out, at.stream),
               "rmsnorm_quantize_fp8");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&rmsnorm_quantize_fp8>())
