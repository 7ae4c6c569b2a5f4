#include "declared/quantize_per_token_group.h"
#include "groups.h"

namespace jitquant {
namespace {

void quantize_per_token_group(Call& call, const declared::QuantizePerTokenGroup& args, Result& data,
                              Result& scale_inv) {
  const Matrix m = matrix_of(args.x, "x");
  const GroupNumerics numerics = group_numerics(args, args.eps);
  const RowsOfGroups rows =
      RowsOfGroups::of(args.x, m, m.cols, args.group_size, args.counts, args.zero_padding);
  const GroupOutput out =
      rows.results(data, scale_inv, args.dtype, numerics, args.scale_layout, args.x);
  const Launching at(call, args.x);
  check_launch(
      launch_quantize_per_token_group(m, args.group_size, numerics, out, rows.counts, at.stream),
      "quantize_per_token_group");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_per_token_group>())
