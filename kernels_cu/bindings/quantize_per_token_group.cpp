#include "groups.h"

namespace jitquant {

cudaError_t launch_quantize_per_token_group(const Matrix& x, int64_t group_size,
                                            const GroupNumerics& numerics, const GroupOutput& out,
                                            const RowCounts& counts, cudaStream_t stream);

namespace {

void quantize_per_token_group(Call& call, const View& x, int64_t group_size,
                              const std::optional<View>& counts, ScalarType dtype,
                              std::string_view scale_format, std::string_view scale_layout,
                              std::optional<double> eps, std::string_view recipe, bool zero_rest,
                              Result& data, Result& scale_inv) {
  const Matrix m = matrix_of(x, "x");
  const GroupNumerics numerics = group_numerics(dtype, scale_format, recipe, eps);
  const RowsOfGroups rows = RowsOfGroups::of(x, m, m.cols, group_size, counts, zero_rest);
  const GroupOutput out = rows.results(data, scale_inv, dtype, numerics, scale_layout, x);
  const Launching at(call, x);
  check_launch(
      launch_quantize_per_token_group(m, group_size, numerics, out, rows.counts, at.stream),
      "quantize_per_token_group");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_per_token_group>(
    "quantize_per_token_group",
    "Tensor x, int group_size, Tensor? counts=None, *, ScalarType dtype, "
    "str scale_format='float32', str scale_layout='row', float? eps=None, str recipe='te', "
    "bool zero_rest=True",
    {"data", "scale_inv"}))
