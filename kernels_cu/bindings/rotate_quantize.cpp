#include "declared/rotate_quantize.h"
#include "fp8.h"
#include "rotate.h"

namespace jitquant {
namespace {

void rotate_quantize_fp8(Call& call, const declared::RotateQuantizeFp8& args, Result& data,
                         Result& scale_inv, Result& amax) {
  const Matrix m = matrix_of(args.x, "x");
  const Rotation rotation = rotation_of(args.rotate, args.signs);
  const Rope rope = rope_of(args.cos, args.sin, args.interleaved, m);
  Fp8Arguments a = Fp8Arguments::of(args.x, args);
  const ElementRows out =
      a.results(data, scale_inv, &amax, Shape::of(args.x, args.x.dim() - 1, m.cols), args.x);
  const Launching at(call, args.x);
  const Workspace partials(rotate_fp8_partials(m, a.scale) ? kMaxPartials : 0, args.x);
  a.scale.partials = partials.floats();
  check_launch(launch_rotate_fp8(m, rotation, rope, a.scale, out, at.stream),
               "rotate_quantize_fp8");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&rotate_quantize_fp8>())
