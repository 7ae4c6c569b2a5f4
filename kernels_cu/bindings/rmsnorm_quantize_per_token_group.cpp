#include "declared/rmsnorm_quantize_per_token_group.h"
#include "groups.h"
#include "norm.h"

namespace jitquant {
namespace {

void rmsnorm_quantize_per_token_group(Call& call,
                                      const declared::RmsnormQuantizePerTokenGroup& args,
                                      Result& data, Result& scale_inv, Result& inv_rms) {
  const NormInput in(args.x, args.weight, args.eps, args.residual);
  const GroupNumerics numerics = group_numerics(args, args.amax_eps);
  const int64_t leading = args.x.dim() - 1;
  const int64_t rows = leading > 0 ? args.x.size(leading - 1) : 1;
  const ScalesPlan plan = ScalesPlan::of(args.x, leading, rows > 0 ? in.x.rows / rows : 0, rows,
                                         ceil_div(in.x.cols, args.group_size),
                                         numerics.scale_format, args.scale_layout);
  GroupOutput out = {data.rows("data", args.dtype, Shape::of(args.x, leading, in.x.cols), args.x),
                     plan.store(scale_inv, "scale_inv", args.x)};
  if (out.scales.grid.order == ScaleOrder::kRow) {
    // One batch: the rows of all batches are contiguous.
    out.scales.batches = 1;
    out.scales.rows = out.scales.grid.stored_rows = in.x.rows;
  }
  float* inverse = inv_rms.floats("inv_rms", in.x.rows, args.x);
  const Launching at(call, args.x);
  if (in.x.rows == 0) return;
  check_launch(launch_rmsnorm_per_token_group(in.x, in.residual_rows(), in.weight, in.eps, inverse,
                                              numerics, out, args.group_size, at.stream),
               "rmsnorm_quantize_per_token_group");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&rmsnorm_quantize_per_token_group>())
