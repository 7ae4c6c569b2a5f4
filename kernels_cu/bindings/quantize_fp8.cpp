#include "declared/quantize_fp8.h"
#include "fp8.h"

namespace jitquant {
namespace {

void quantize_fp8(Call& call, const declared::QuantizeFp8& args, Result& data, Result& scale_inv,
                  Result& amax) {
  const Matrix m = matrix_of(args.x, "x");
  Fp8Arguments a = Fp8Arguments::of(args.x, args);
  const ElementRows out =
      a.results(data, scale_inv, &amax, Shape::of(args.x, args.x.dim() - 1, m.cols), args.x);
  const Launching at(call, args.x);
  const Workspace partials(quantize_fp8_partials(m, a.scale) ? kMaxPartials : 0, args.x);
  a.scale.partials = partials.floats();
  check_launch(launch_quantize_fp8(m, a.scale, out, at.stream), "quantize_fp8");
}

void from_amax(Call& call, const declared::QuantizeFp8FromAmax& args, Result& data,
               Result& scale_inv) {
  const Matrix m = matrix_of(args.x, "x");
  Fp8Arguments a = Fp8Arguments::from_amax(args.x, args);
  const ElementRows out =
      a.results(data, scale_inv, nullptr, Shape::of(args.x, args.x.dim() - 1, m.cols), args.x);
  const Launching at(call, args.x);
  check_launch(launch_quantize_fp8(m, a.scale, out, at.stream), "quantize_fp8");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_fp8>(), function<&from_amax>())
