#include "groups.h"

namespace jitquant {

cudaError_t launch_quantize_mxfp8(const Matrix& x, const GroupNumerics& numerics,
                                  const GroupOutput& out, cudaStream_t stream);

namespace {

void quantize_mxfp8(Call& call, const View& x, ScalarType dtype, std::string_view scale_layout,
                    Result& data, Result& scale_inv) {
  const Matrix m = matrix_of(x, "x");
  const GroupNumerics numerics = mxfp8_numerics(dtype);
  const int64_t leading = x.dim() - 1;
  const ScalesPlan plan = ScalesPlan::mxfp8(x, leading, m.rows, ceil_div(m.cols, kMxfp8Block),
                                            swizzled_of(scale_layout));
  const GroupOutput out = {data.rows("data", dtype, Shape::of(x, leading, m.cols), x),
                           plan.store(scale_inv, "scale_inv", x)};
  const Launching at(call, x);
  check_launch(launch_quantize_mxfp8(m, numerics, out, at.stream), "quantize_mxfp8");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_mxfp8>("quantize_mxfp8",
                                             "Tensor x, *, ScalarType dtype, "
                                             "str scale_layout='linear'",
                                             {"data", "scale_inv"}))
