#include "declared/swiglu_quantize_per_token_group.h"
#include "gate_and_up.h"
#include "groups.h"

namespace jitquant {
namespace {

void swiglu_quantize_per_token_group(Call& call, const declared::SwigluQuantizePerTokenGroup& args,
                                     Result& data, Result& scale_inv) {
  const GateAndUp in(args.fused, args.interleave);
  const GroupNumerics numerics = group_numerics(args, args.eps);
  const RowsOfGroups rows = RowsOfGroups::of(args.fused, in.fused, in.cols, args.group_size,
                                             args.counts, args.zero_padding);
  const GroupOutput out =
      rows.results(data, scale_inv, args.dtype, numerics, args.scale_layout, args.fused);
  const Launching at(call, args.fused);
  check_launch(launch_swiglu_per_token_group(in.fused, in.run, args.group_size, numerics, out,
                                             rows.counts, at.stream),
               "swiglu_quantize_per_token_group");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&swiglu_quantize_per_token_group>())
