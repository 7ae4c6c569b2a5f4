#include "declared/quantize_mxfp8.h"
#include "groups.h"

namespace jitquant {
namespace {

void quantize_mxfp8(Call& call, const declared::QuantizeMxfp8& args, Result& data,
                    Result& scale_inv) {
  const Matrix m = matrix_of(args.x, "x");
  const GroupNumerics numerics = mxfp8_numerics(args.dtype);
  const int64_t leading = args.x.dim() - 1;
  const ScalesPlan plan = ScalesPlan::mxfp8(args.x, leading, m.rows, ceil_div(m.cols, kMxfp8Block),
                                            swizzled_of(args.scale_layout));
  const GroupOutput out = {
      data.rows("data", args.dtype, Shape::of(args.x, leading, m.cols), args.x),
      plan.store(scale_inv, "scale_inv", args.x)};
  const Launching at(call, args.x);
  check_launch(launch_quantize_mxfp8(m, numerics, out, at.stream), "quantize_mxfp8");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_mxfp8>())
