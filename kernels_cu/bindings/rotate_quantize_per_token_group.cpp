#include "declared/rotate_quantize_per_token_group.h"
#include "groups.h"
#include "rotate.h"

namespace jitquant {
namespace {

void rotate_quantize_per_token_group(Call& call, const declared::RotateQuantizePerTokenGroup& args,
                                     Result& data, Result& scale_inv) {
  const Matrix m = matrix_of(args.x, "x");
  const Rotation rotation = rotation_of(args.rotate, args.signs);
  const Rope rope = rope_of(args.cos, args.sin, args.interleaved, m);
  const GroupNumerics numerics = group_numerics(args, args.eps);
  const RowsOfGroups rows =
      RowsOfGroups::of(args.x, m, m.cols, args.group_size, args.counts, args.zero_padding);
  const GroupOutput out =
      rows.results(data, scale_inv, args.dtype, numerics, args.scale_layout, args.x);
  const Launching at(call, args.x);
  check_launch(launch_rotate_per_token_group(m, rotation, rope, args.group_size, numerics, out,
                                             rows.counts, at.stream),
               "rotate_quantize_per_token_group");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&rotate_quantize_per_token_group>())
