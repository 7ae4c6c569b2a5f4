#include "groups.h"

namespace jitquant {

cudaError_t launch_quantize_both(const Matrix& x, int64_t group_size, const GroupNumerics& numerics,
                                 const GroupOutput& out, const GroupOutput& out_t,
                                 cudaStream_t stream);

namespace {

// The transpose of a matrix, as what the shapes of its results are made from.
struct Transposed {
  int64_t sizes[2];
  View view;

  explicit Transposed(const View& x) : sizes{x.size(1), x.size(0)}, view(x) { view.sizes = sizes; }
};

Matrix matrix_of_both(const View& x) {
  const Matrix m = matrix_of(x, "x");
  JITQUANT_CHECK(x.dim() == 2 && m.rows >= 1,
                 "x must have two dimensions, none of them empty; its shape is ", shape_text(x));
  constexpr int64_t kMost = 4294967040;  // the kernel counts rows and columns in 32 bits
  JITQUANT_CHECK(m.rows <= kMost && m.cols <= kMost, "x must have at most ", kMost,
                 " rows and columns; its shape is ", shape_text(x));
  return m;
}

Matrix transposed_data(Result& data_t, ScalarType dtype, const Matrix& m, const View& x) {
  Matrix to = {};
  to.data = data_t.memory("data_t", dtype, Shape::of(m.cols, m.rows), x);
  to.rows = m.cols;
  to.cols = m.rows;
  to.vector = aligned(to.data, 16) && to.cols % 16 == 0;
  return to;
}

void quantize_group_both(Call& call, const View& x, int64_t group_size, ScalarType dtype,
                         std::string_view scale_format, std::string_view scale_layout,
                         std::optional<double> eps, std::string_view recipe, Result& data,
                         Result& scale_inv, Result& data_t, Result& scale_inv_t) {
  const Matrix m = matrix_of_both(x);
  check_group_size(group_size);
  const GroupNumerics numerics = group_numerics(dtype, scale_format, recipe, eps);
  const Transposed t(x);
  const ScalesPlan plan = ScalesPlan::of(x, 1, 1, m.rows, ceil_div(m.cols, group_size),
                                         numerics.scale_format, scale_layout);
  const ScalesPlan plan_t = ScalesPlan::of(t.view, 1, 1, m.cols, ceil_div(m.rows, group_size),
                                           numerics.scale_format, scale_layout);
  const Matrix to = data.rows("data", dtype, Shape::of(m.rows, m.cols), x);
  const GroupScales scales = plan.store(scale_inv, "scale_inv", x);
  const Matrix to_t = transposed_data(data_t, dtype, m, x);
  const GroupScales scales_t = plan_t.store(scale_inv_t, "scale_inv_t", x);
  const Launching at(call, x);
  check_launch(
      launch_quantize_both(m, group_size, numerics, {to, scales}, {to_t, scales_t}, at.stream),
      "quantize_group_both");
}

void quantize_mxfp8_both(Call& call, const View& x, ScalarType dtype, std::string_view scale_layout,
                         Result& data, Result& scale_inv, Result& data_t, Result& scale_inv_t) {
  const Matrix m = matrix_of_both(x);
  const GroupNumerics numerics = mxfp8_numerics(dtype);
  const bool swizzled = swizzled_of(scale_layout);
  const Transposed t(x);
  const ScalesPlan plan = ScalesPlan::mxfp8(x, 1, m.rows, ceil_div(m.cols, kMxfp8Block), swizzled);
  const ScalesPlan plan_t =
      ScalesPlan::mxfp8(t.view, 1, m.cols, ceil_div(m.rows, kMxfp8Block), swizzled);
  const Matrix to = data.rows("data", dtype, Shape::of(m.rows, m.cols), x);
  const GroupScales scales = plan.store(scale_inv, "scale_inv", x);
  const Matrix to_t = transposed_data(data_t, dtype, m, x);
  const GroupScales scales_t = plan_t.store(scale_inv_t, "scale_inv_t", x);
  const Launching at(call, x);
  check_launch(
      launch_quantize_both(m, kMxfp8Block, numerics, {to, scales}, {to_t, scales_t}, at.stream),
      "quantize_mxfp8_both");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(
    function<&quantize_group_both>(
        "quantize_group_both",
        "Tensor x, int group_size, *, ScalarType dtype, str scale_format='float32', "
        "str scale_layout='column', float? eps=None, str recipe='te'",
        {"data", "scale_inv", "data_t", "scale_inv_t"}),
    function<&quantize_mxfp8_both>("quantize_mxfp8_both",
                                   "Tensor x, *, ScalarType dtype, str scale_layout='linear'",
                                   {"data", "scale_inv", "data_t", "scale_inv_t"}))
