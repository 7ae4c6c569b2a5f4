#include "groups.h"

namespace jitquant {

cudaError_t launch_quantize_group(const Matrix& x, int64_t group_size,
                                  const GroupNumerics& numerics, const GroupOutput& out,
                                  const RowCounts& counts, cudaStream_t stream);

namespace {

RowCounts row_counts(const std::optional<View>& counts, int64_t batches, bool zero_rest,
                     const View& x) {
  if (!counts) return {nullptr, false, true};
  check_cuda(*counts, "counts", &x);
  const bool wide = counts->scalar_type() == ScalarType::Long;
  JITQUANT_CHECK(wide || counts->scalar_type() == ScalarType::Int, "counts must be int32 or int64");
  JITQUANT_CHECK(x.dim() >= 2 && counts->numel() == batches && counts->is_contiguous(),
                 "counts must have ", batches,
                 " elements, contiguous, one for each batch of rows; its shape is ",
                 shape_text(*counts));
  return {counts->const_data_ptr(), wide, zero_rest};
}

void quantize_group(Call& call, const View& x, int64_t group_size,
                    const std::optional<View>& counts, ScalarType dtype,
                    std::string_view scale_format, std::string_view scale_layout,
                    std::optional<double> eps, std::string_view recipe, bool zero_rest,
                    Result& data, Result& scale_inv) {
  const Matrix m = matrix_of(x, "x");
  check_group_size(group_size);
  const GroupNumerics numerics = group_numerics(dtype, scale_format, recipe, eps);
  const int64_t leading = x.dim() - 1;
  int64_t rows = leading > 0 ? x.size(leading - 1) : 1;
  int64_t batches = rows > 0 ? m.rows / rows : 0;
  if (counts && rows == 0) {
    batches = 1;
    for (int64_t i = 0; i + 1 < leading; ++i) batches *= x.size(i);
  }
  const RowCounts there = row_counts(counts, batches, zero_rest, x);
  const ScalesPlan plan = ScalesPlan::of(x, leading, batches, rows, ceil_div(m.cols, group_size),
                                         numerics.scale_format, scale_layout);
  GroupOutput out = {data.rows("data", dtype, Shape::of(x, leading, m.cols), x),
                     plan.store(scale_inv, "scale_inv", x)};
  if (!counts && out.scales.grid.order == ScaleOrder::kRow) {
    // Batches follow each other as rows do.
    out.scales.batches = 1;
    out.scales.rows = out.scales.grid.stored_rows = m.rows;
  }
  const Launching at(call, x);
  check_launch(launch_quantize_group(m, group_size, numerics, out, there, at.stream),
               "quantize_group");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_group>(
    "quantize_group",
    "Tensor x, int group_size, Tensor? counts=None, *, ScalarType dtype, "
    "str scale_format='float32', str scale_layout='row', float? eps=None, str recipe='te', "
    "bool zero_rest=True",
    {"data", "scale_inv"}))
