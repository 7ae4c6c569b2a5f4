#include "declared/quantize_both.h"
#include "groups.h"

namespace jitquant {
namespace {

// The transpose of a matrix, from which the shapes of its results are derived.
struct Transposed {
  int64_t sizes[2];
  View view;

  explicit Transposed(const View& x) : sizes{x.size(1), x.size(0)}, view(x) { view.sizes = sizes; }
};

Matrix matrix_of_both(const View& x, const char* name) {
  const Matrix m = matrix_of(x, name);
  constexpr int64_t kMost = 4294967040;  // the kernel counts rows and columns in 32 bits
  JITQUANT_CHECK(m.rows <= kMost && m.cols <= kMost, name, ": expected at most ", kMost,
                 " rows and columns, got shape ", shape_text(x));
  return m;
}

Matrix transposed_data(Result& data_t, ScalarType dtype, const Matrix& m, const View& x) {
  Matrix to = {};
  to.data = data_t.memory("data_t", dtype, Shape::of(m.cols, m.rows), x);
  to.rows = m.cols;
  to.cols = to.s2 = m.rows;
  to.n1 = 1;
  to.n2 = to.rows;
  to.vector = aligned(to.data, 16) && to.cols % 16 == 0;
  return to;
}

void quantize_per_token_group_both(Call& call, const declared::QuantizePerTokenGroupBoth& args,
                                   Result& data, Result& scale_inv, Result& data_t,
                                   Result& scale_inv_t) {
  const Matrix m = matrix_of_both(args.x, "x");
  const GroupNumerics numerics = group_numerics(args, args.eps);
  const Transposed t(args.x);
  const ScalesPlan plan = ScalesPlan::of(args.x, 1, 1, m.rows, ceil_div(m.cols, args.group_size),
                                         numerics.scale_format, args.scale_layout);
  const ScalesPlan plan_t = ScalesPlan::of(t.view, 1, 1, m.cols, ceil_div(m.rows, args.group_size),
                                           numerics.scale_format, args.scale_layout);
  const Matrix to = data.rows("data", args.dtype, Shape::of(m.rows, m.cols), args.x);
  const GroupScales scales = plan.store(scale_inv, "scale_inv", args.x);
  const Matrix to_t = transposed_data(data_t, args.dtype, m, args.x);
  const GroupScales scales_t = plan_t.store(scale_inv_t, "scale_inv_t", args.x);
  const Launching at(call, args.x);
  check_launch(launch_quantize_both(m, args.group_size, false, numerics, {to, scales},
                                    {to_t, scales_t}, at.stream),
               "quantize_per_token_group_both");
}

// One scale per block of `side` x `side`.
GroupScales block_scales(Result& scale_inv, const char* name, ScaleFormat format, int64_t side,
                         int64_t rows, int64_t cols, bool padded, const View& like) {
  const int64_t tall = ceil_div(rows, side), wide = ceil_div(cols, side);
  const int64_t stored = padded ? ceil_div(wide, 4) * 4 : wide;
  return {scale_inv.memory(name, ScalarType::Float, Shape::of(tall, stored), like),
          format,
          {ScaleOrder::kRow, tall, stored},
          false,
          1,
          tall,
          wide};
}

void quantize_block_both(Call& call, const declared::QuantizeBlockBoth& args, Result& data,
                         Result& scale_inv, Result& data_t, Result& scale_inv_t) {
  const Matrix m = matrix_of_both(args.w, "w");
  const GroupNumerics numerics = group_numerics(args, args.eps);
  const bool padded = padded_of(args.scale_layout);
  const Matrix to = data.rows("data", args.dtype, Shape::of(m.rows, m.cols), args.w);
  const GroupScales scales = block_scales(scale_inv, "scale_inv", numerics.scale_format,
                                          args.block_rows, m.rows, m.cols, padded, args.w);
  const Matrix to_t = transposed_data(data_t, args.dtype, m, args.w);
  const GroupScales scales_t = block_scales(scale_inv_t, "scale_inv_t", numerics.scale_format,
                                            args.block_rows, m.cols, m.rows, padded, args.w);
  const Launching at(call, args.w);
  check_launch(launch_quantize_both(m, args.block_rows, true, numerics, {to, scales},
                                    {to_t, scales_t}, at.stream),
               "quantize_block_both");
}

void quantize_mxfp8_both(Call& call, const declared::QuantizeMxfp8Both& args, Result& data,
                         Result& scale_inv, Result& data_t, Result& scale_inv_t) {
  const Matrix m = matrix_of_both(args.x, "x");
  const GroupNumerics numerics = mxfp8_numerics(args.dtype);
  const bool swizzled = swizzled_of(args.scale_layout);
  const Transposed t(args.x);
  const ScalesPlan plan =
      ScalesPlan::mxfp8(args.x, 1, m.rows, ceil_div(m.cols, kMxfp8Block), swizzled);
  const ScalesPlan plan_t =
      ScalesPlan::mxfp8(t.view, 1, m.cols, ceil_div(m.rows, kMxfp8Block), swizzled);
  const Matrix to = data.rows("data", args.dtype, Shape::of(m.rows, m.cols), args.x);
  const GroupScales scales = plan.store(scale_inv, "scale_inv", args.x);
  const Matrix to_t = transposed_data(data_t, args.dtype, m, args.x);
  const GroupScales scales_t = plan_t.store(scale_inv_t, "scale_inv_t", args.x);
  const Launching at(call, args.x);
  check_launch(launch_quantize_both(m, kMxfp8Block, false, numerics, {to, scales}, {to_t, scales_t},
                                    at.stream),
               "quantize_mxfp8_both");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_per_token_group_both>(), function<&quantize_block_both>(),
                   function<&quantize_mxfp8_both>())
