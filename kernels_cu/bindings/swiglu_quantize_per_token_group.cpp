#include "gate_and_up.h"
#include "groups.h"

namespace jitquant {

cudaError_t launch_swiglu_per_token_group(const Matrix& fused, int64_t run, int64_t group_size,
                                          const GroupNumerics& numerics, const GroupOutput& out,
                                          const RowCounts& counts, cudaStream_t stream);

namespace {

void swiglu_quantize_per_token_group(Call& call, const View& fused, int64_t group_size,
                                     const std::optional<View>& counts, ScalarType dtype,
                                     int64_t interleave, std::string_view scale_format,
                                     std::string_view scale_layout, std::optional<double> eps,
                                     std::string_view recipe, bool zero_rest, Result& data,
                                     Result& scale_inv) {
  const GateAndUp in(fused, interleave);
  const GroupNumerics numerics = group_numerics(dtype, scale_format, recipe, eps);
  const RowsOfGroups rows =
      RowsOfGroups::of(fused, in.fused, in.cols, group_size, counts, zero_rest);
  const GroupOutput out = rows.results(data, scale_inv, dtype, numerics, scale_layout, fused);
  const Launching at(call, fused);
  check_launch(launch_swiglu_per_token_group(in.fused, in.run, group_size, numerics, out,
                                             rows.counts, at.stream),
               "swiglu_quantize_per_token_group");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&swiglu_quantize_per_token_group>(
    "swiglu_quantize_per_token_group",
    "Tensor fused, int group_size, Tensor? counts=None, *, ScalarType dtype, int interleave=0, "
    "str scale_format='float32', str scale_layout='row', float? eps=None, str recipe='te', "
    "bool zero_rest=True",
    {"data", "scale_inv"}))
