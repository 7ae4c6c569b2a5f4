#include "declared/quantize_mxfp4.h"
#include "rotate.h"

namespace jitquant {

cudaError_t launch_quantize_mxfp4(const Matrix& x, const Rope& rope, const Recipe& recipe,
                                  const Nvfp4Output& out, cudaStream_t stream);
cudaError_t launch_dequantize_mxfp4(const Mxfp4Input& in, void* out, DType dtype, int64_t cols,
                                    cudaStream_t stream);

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
  recipe.rotation = rotation_of(args.rotate, args.signs, m.cols, args.x);
  const Rope rope = rope_of(args.cos, args.sin, args.interleaved, m, args.x);
  recipe.rounding = rounding_of(args.rounding, args.rng_state, args.random_bytes, args.x);
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

const uint8_t* bytes_of(const View& t, const char* name, ScalarType dtype, const View& like) {
  check_cuda(t, name, &like);
  check_packed_kind(t, name, dtype);
  JITQUANT_CHECK(aligned(t.data, 4), name,
                 ": expected memory aligned to 4 bytes, got another address. Pass ", name,
                 ".clone()");
  return static_cast<const uint8_t*>(t.data);
}

void dequantize_mxfp4(Call& call, const declared::DequantizeMxfp4& args, Result& out) {
  const int64_t leading = args.x_fp4.dim() - 1,
                size = args.x_fp4.dim() > 0 ? args.x_fp4.size(leading) : 0;
  JITQUANT_CHECK(
      size > 0 && size % 16 == 0,
      "x_fp4: expected shape (..., P) with P a multiple of 16 bytes (32 codes), got shape ",
      shape_text(args.x_fp4));
  Mxfp4Input in = {bytes_of(args.x_fp4, "x_fp4", ScalarType::Float4_e2m1fn_x2, args.x_fp4),
                   bytes_of(args.x_sf, "x_sf", ScalarType::Float8_e8m0fnu, args.x_fp4),
                   args.x_fp4.numel() / size, size / 16, swizzled_of(args.scale_layout)};
  const Shape scales = in.swizzled ? Shape::of(swizzled_rows(in.rows), swizzled_blocks(in.groups))
                                   : Shape::of(args.x_fp4, leading, in.groups);
  bool same = args.x_sf.dim() == scales.dim();
  for (int64_t i = 0; same && i < scales.dim(); ++i) same = args.x_sf.size(i) == scales.size(i);
  JITQUANT_CHECK(same, "x_sf: expected shape ", shape_text(scales), " for x_fp4 of shape ",
                 shape_text(args.x_fp4), " and scale_layout '", args.scale_layout, "', got shape ",
                 shape_text(args.x_sf));
  const int64_t width = args.cols.value_or(2 * size);
  JITQUANT_CHECK(width > 2 * size - 32 && width <= 2 * size, "cols: expected ", 2 * size - 31,
                 " to ", 2 * size, " for x_fp4 of shape ", shape_text(args.x_fp4), ", got ", width);
  const ScalarType type = args.dtype.value_or(ScalarType::BFloat16);
  const DType kind = dtype_of(type, "dtype");
  void* const to = out.memory("out", type, Shape::of(args.x_fp4, leading, width), args.x_fp4);
  const Launching at(call, args.x_fp4);
  check_launch(launch_dequantize_mxfp4(in, to, kind, width, at.stream), "dequantize_mxfp4");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_mxfp4>(), function<&dequantize_mxfp4>())
