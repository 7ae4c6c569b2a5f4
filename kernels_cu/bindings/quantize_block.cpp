#include "declared/quantize_block.h"
#include "groups.h"

namespace jitquant {
namespace {

void quantize_block(Call& call, const declared::QuantizeBlock& args, Result& data,
                    Result& scale_inv) {
  const Matrix m = matrix_of(args.w, "w");
  const GroupNumerics numerics = group_numerics(args, args.eps);
  const bool padded = padded_of(args.scale_layout);
  const int64_t rank = args.w.dim(), rows = args.w.size(rank - 2);
  const int64_t tall = ceil_div(rows, args.block_rows), wide = ceil_div(m.cols, args.block_cols);
  const int64_t stored = padded ? ceil_div(wide, 4) * 4 : wide;
  const Shape shape = Shape::of(args.w, rank - 2, tall, stored);
  GroupOutput out = {data.rows("data", args.dtype, Shape::of(args.w, rank - 1, m.cols), args.w),
                     {}};
  out.scales = {scale_inv.memory("scale_inv", ScalarType::Float, shape, args.w),
                numerics.scale_format,
                {ScaleOrder::kRow, tall, stored},
                false,
                rows > 0 ? m.rows / rows : 0,
                tall,
                wide};
  const Launching at(call, args.w);
  check_launch(launch_quantize_block(m, rows, args.block_rows, numerics, out, at.stream),
               "quantize_block");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_block>())
