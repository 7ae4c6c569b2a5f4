#include "recipes.h"

namespace jitquant {

cudaError_t launch_quantize_mxfp4(const Matrix& x, const Recipe& recipe, const Nvfp4Output& out,
                                  cudaStream_t stream);
cudaError_t launch_dequantize_mxfp4(const Mxfp4Input& in, void* out, DType dtype, int64_t cols,
                                    cudaStream_t stream);

namespace {

Mxfp4Scaling scaling_of(std::string_view scaling) {
  if (scaling == "floor") return Mxfp4Scaling::kFloor;
  if (scaling == "ceil") return Mxfp4Scaling::kCeil;
  if (scaling == "even") return Mxfp4Scaling::kEven;
  JITQUANT_CHECK(scaling == "rceil", "scaling must be 'floor', 'ceil', 'even' or 'rceil', not '",
                 scaling, "'");
  return Mxfp4Scaling::kRceil;
}

void quantize_mxfp4(Call& call, const View& x, std::string_view scaling, std::string_view rotate,
                    const std::optional<View>& signs, std::string_view rounding,
                    const std::optional<View>& rng_state, const std::optional<View>& random_bytes,
                    std::string_view scale_layout, Result& x_fp4, Result& x_sf) {
  const Matrix m = matrix_of(x, "x");
  Recipe recipe = {};
  recipe.rotation = rotation_of(rotate, signs, m.cols, x);
  recipe.rounding = rounding_of(rounding, rng_state, random_bytes, x);
  recipe.scaling = scaling_of(scaling);
  const bool swizzled = swizzled_of(scale_layout);
  const int64_t groups = (m.cols + 31) / 32, leading = x.dim() - 1;
  const Shape scales = swizzled ? Shape::of((m.rows + 127) / 128 * 128, (groups + 3) / 4 * 4)
                                : Shape::of(x, leading, groups);
  const Nvfp4Output out = {
      static_cast<uint8_t*>(x_fp4.memory("x_fp4", ScalarType::Float4_e2m1fn_x2,
                                         Shape::of(x, leading, 16 * groups), x)),
      static_cast<uint8_t*>(x_sf.memory("x_sf", ScalarType::Float8_e8m0fnu, scales, x)), m.rows,
      2 * groups, swizzled};
  const Launching at(call, x);
  check_launch(launch_quantize_mxfp4(m, recipe, out, at.stream), "quantize_mxfp4");
}

const uint8_t* bytes_of(const View& t, const char* name, ScalarType dtype, const View& like) {
  check_cuda(t, name, &like);
  JITQUANT_CHECK(t.scalar_type() == dtype || t.scalar_type() == ScalarType::Byte, name,
                 " has the wrong dtype");
  JITQUANT_CHECK(t.is_contiguous() && aligned(t.data, 4), name,
                 " must be contiguous and aligned to 4 bytes");
  return static_cast<const uint8_t*>(t.data);
}

void dequantize_mxfp4(Call& call, const View& x_fp4, const View& x_sf, std::optional<int64_t> cols,
                      std::string_view scale_layout, std::optional<ScalarType> dtype, Result& out) {
  const int64_t leading = x_fp4.dim() - 1, size = x_fp4.dim() > 0 ? x_fp4.size(leading) : 0;
  JITQUANT_CHECK(size > 0 && size % 16 == 0, "x_fp4 must have shape (..., P), P a multiple of 16");
  Mxfp4Input in = {bytes_of(x_fp4, "x_fp4", ScalarType::Float4_e2m1fn_x2, x_fp4),
                   bytes_of(x_sf, "x_sf", ScalarType::Float8_e8m0fnu, x_fp4), x_fp4.numel() / size,
                   size / 16, swizzled_of(scale_layout)};
  const int64_t scales =
      in.swizzled ? (in.rows + 127) / 128 * 128 * ((in.groups + 3) / 4 * 4) : in.rows * in.groups;
  JITQUANT_CHECK(x_sf.numel() == scales, "x_sf must have ", scales, " elements; its shape is ",
                 shape_text(x_sf));
  const int64_t width = cols.value_or(2 * size);
  JITQUANT_CHECK(width > 2 * size - 32 && width <= 2 * size, "cols must be ", 2 * size - 31, " to ",
                 2 * size, ", not ", width);
  const ScalarType type = dtype.value_or(ScalarType::BFloat16);
  const DType kind = dtype_of(type, "dtype");
  void* const to = out.memory("out", type, Shape::of(x_fp4, leading, width), x_fp4);
  const Launching at(call, x_fp4);
  check_launch(launch_dequantize_mxfp4(in, to, kind, width, at.stream), "dequantize_mxfp4");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&quantize_mxfp4>(
                       "quantize_mxfp4",
                       "Tensor x, *, str scaling='rceil', str rotate='none', Tensor? signs=None, "
                       "str rounding='nearest', Tensor? rng_state=None, Tensor? random_bytes=None, "
                       "str scale_layout='linear'",
                       {"x_fp4", "x_sf"}),
                   function<&dequantize_mxfp4>("dequantize_mxfp4",
                                               "Tensor x_fp4, Tensor x_sf, *, int? cols=None, "
                                               "str scale_layout='linear', ScalarType? dtype=None",
                                               {"out"}))
