// Quantization with a given gsa, which two libraries export with different argument names.
#pragma once

#include "declared/quantize_nvfp4.h"

namespace jitquant {

inline void quantize_given(Call& call, const declared::QuantizeNvfp4& args, Result& x_fp4,
                           Result& x_sf) {
  const Matrix m = matrix_of(args.x, "x");
  const GlobalScale scale = given_scale(args.gsa);
  const Nvfp4Recipe r = recipe_of(args.recipe);
  const PackedShape shape =
      PackedShape::of(args.x, args.x.dim() - 1, m.rows, m.cols, swizzled_of(args.scale_layout));
  const Nvfp4Output out = shape.output(x_fp4, x_sf, args.x);
  const Launching at(call, args.x);
  check_launch(launch_quantize_nvfp4(m, scale, r, out, at.stream), "quantize_nvfp4");
}

}  // namespace jitquant
