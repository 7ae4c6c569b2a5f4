// Deinterleaving quantization with a given gsa, which two libraries export.
#pragma once

#include "declared/deinterleave_quantize.h"
#include "gate_and_up.h"
#include "quantize.h"

namespace [[gnu::visibility("hidden")]] jitquant {

// The fused projection, the shape of its output, and the run length that DeinterleaveSource takes.
struct Deinterleave {
  Matrix matrix;
  PackedShape shape;
  int64_t run;

  static Deinterleave of(const View& fused, int64_t intermediate, int64_t interleave,
                         std::string_view scale_layout) {
    const GateAndUp in(fused, interleave);
    return {in.fused,
            PackedShape::of(fused, fused.dim() - 1, in.fused.rows, intermediate,
                            swizzled_of(scale_layout)),
            in.run};
  }
};

inline void deinterleave_given(Call& call, const declared::DeinterleaveQuantizeNvfp4& args,
                               Result& x_fp4, Result& x_sf) {
  const Deinterleave in =
      Deinterleave::of(args.fused, args.intermediate, args.interleave, args.scale_layout);
  const GlobalScale scale = given_scale(args.gsa);
  const bool activate = activates(args.op);
  const Nvfp4Recipe r = recipe_of(args.recipe);
  const Nvfp4Output out = in.shape.output(x_fp4, x_sf, args.fused);
  const Launching at(call, args.fused);
  check_launch(
      launch_deinterleave_quantize_nvfp4(in.matrix, in.run, activate, scale, r, out, at.stream),
      "deinterleave_quantize_nvfp4");
}

}  // namespace jitquant
