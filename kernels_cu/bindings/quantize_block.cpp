#include "groups.h"

namespace jitquant {

cudaError_t launch_quantize_block(const Matrix& w, int64_t matrix_rows, int64_t side,
                                  const GroupNumerics& numerics, const GroupOutput& out,
                                  cudaStream_t stream);

namespace {

void quantize_block(Call& call, const View& w, int64_t block_rows, int64_t block_cols,
                    ScalarType dtype, std::string_view scale_format, std::string_view scale_layout,
                    std::optional<double> eps, std::string_view recipe, Result& data,
                    Result& scale_inv) {
  const Matrix m = matrix_of(w, "w");
  JITQUANT_CHECK(w.dim() >= 2, "w must have two dimensions or more; its shape is ", shape_text(w));
  check_block(block_rows, block_cols);
  const GroupNumerics numerics = group_numerics(dtype, scale_format, recipe, eps, false);
  const bool padded = padded_of(scale_layout);
  const int64_t rank = w.dim(), rows = w.size(rank - 2);
  const int64_t tall = ceil_div(rows, block_rows), wide = ceil_div(m.cols, block_cols);
  const int64_t stored = padded ? ceil_div(wide, 4) * 4 : wide;
  const Shape shape = Shape::of(w, rank - 2, tall, stored);
  GroupOutput out = {data.rows("data", dtype, Shape::of(w, rank - 1, m.cols), w), {}};
  out.scales = {scale_inv.memory("scale_inv", ScalarType::Float, shape, w),
                numerics.scale_format,
                {ScaleOrder::kRow, tall, stored},
                false,
                rows > 0 ? m.rows / rows : 0,
                tall,
                wide};
  const Launching at(call, w);
  check_launch(launch_quantize_block(m, rows, block_rows, numerics, out, at.stream),
               "quantize_block");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_block>(
    "quantize_block",
    "Tensor w, int block_rows, int block_cols, *, ScalarType dtype, str scale_format='float32', "
    "str scale_layout='row', float? eps=None, str recipe='te'",
    {"data", "scale_inv"}))
