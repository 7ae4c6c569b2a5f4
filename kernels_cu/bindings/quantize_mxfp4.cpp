#include "declared/quantize_mxfp4.h"
#include "rotate.h"

namespace jitquant {
namespace {

Mxfp4Scaling scaling_of(std::string_view scaling) {
  if (scaling == "floor") return Mxfp4Scaling::kFloor;
  if (scaling == "ceil") return Mxfp4Scaling::kCeil;
  if (scaling == "even") return Mxfp4Scaling::kEven;
  if (scaling == "gptoss_up") return Mxfp4Scaling::kGptOssUp;
  if (scaling == "gptoss_down") return Mxfp4Scaling::kGptOssDown;
  if (scaling == "static_6") return Mxfp4Scaling::kStatic6;
  if (scaling == "static_4") return Mxfp4Scaling::kStatic4;
  return Mxfp4Scaling::kRceil;
}

void quantize_mxfp4(Call& call, const declared::QuantizeMxfp4& args, Result& x_fp4, Result& x_sf) {
  const Matrix m = matrix_of(args.x, "x");
  Recipe recipe = {};
  recipe.rotation = rotation_of(args.rotate, args.signs);
  const Rope rope = rope_of(args.cos, args.sin, args.interleaved, m);
  recipe.rounding = rounding_of(args.rounding, args.rng_state, args.random_bytes);
  recipe.scaling = scaling_of(args.scaling);
  const bool swizzled = swizzled_of(args.scale_layout);
  const int64_t groups = (m.cols + 31) / 32, leading = args.x.dim() - 1;
  const Shape scales = swizzled ? Shape::of(swizzled_rows(m.rows), swizzled_blocks(groups))
                                : Shape::of(args.x, leading, groups);
  const Nvfp4Output out = {
      static_cast<uint8_t*>(x_fp4.memory("x_fp4", ScalarType::Float4_e2m1fn_x2,
                                         Shape::of(args.x, leading, 16 * groups), args.x)),
      static_cast<uint8_t*>(x_sf.memory("x_sf", ScalarType::Float8_e8m0fnu, scales, args.x)),
      m.rows, 2 * groups, swizzled};
  const Launching at(call, args.x);
  check_launch(launch_quantize_mxfp4(m, rope, recipe, out, at.stream), "quantize_mxfp4");
}

void dequantize_mxfp4(Call& call, const declared::DequantizeMxfp4& args, Result& out) {
  const int64_t leading = args.x_fp4.dim() - 1, size = args.x_fp4.size(leading);
  const Mxfp4Input in = {bytes_of(args.x_fp4, "x_fp4", 4), bytes_of(args.x_sf, "x_sf", 4),
                         args.x_fp4.numel() / size, size / 16, swizzled_of(args.scale_layout)};
  const int64_t width = args.cols.value_or(2 * size);
  const ScalarType type = args.dtype.value_or(ScalarType::BFloat16);
  const DType kind = dtype_of(type, "dtype");
  void* const to = out.memory("out", type, Shape::of(args.x_fp4, leading, width), args.x_fp4);
  const Launching at(call, args.x_fp4);
  check_launch(launch_dequantize_mxfp4(in, to, kind, width, at.stream), "dequantize_mxfp4");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_mxfp4>(), function<&dequantize_mxfp4>())
