#include "recipes.h"

namespace jitquant {

cudaError_t launch_rotated_amax(const Matrix& x, const Rotation& rotation, bool by_row,
                                float* maxima, cudaStream_t stream);
cudaError_t launch_quantize_nvfp4_recipe(const Matrix& x, const float* maxima, int count,
                                         bool by_row, float divisor, float* gsa,
                                         const Recipe& recipe, const Nvfp4Output& out,
                                         cudaStream_t stream);

namespace {

void rotated_amax(Call& call, const View& x, std::string_view rotate,
                  const std::optional<View>& signs, std::string_view granularity, Result& maxima) {
  const Matrix m = matrix_of(x, "x");
  const Rotation rotation = rotation_of(rotate, signs, m.cols, x);
  const bool rows = by_row(granularity);
  float* out = maxima.floats("maxima", rows ? m.rows : kMaxPartials, x);
  const Launching at(call, x);
  check_launch(launch_rotated_amax(m, rotation, rows, out, at.stream), "rotated_amax");
}

void quantize_nvfp4_recipe(Call& call, const View& x, const View& amax,
                           std::string_view granularity, std::string_view block,
                           std::string_view rotate, const std::optional<View>& signs,
                           std::string_view select, int64_t top, std::string_view rounding,
                           const std::optional<View>& rng_state,
                           const std::optional<View>& random_bytes, std::string_view scale_layout,
                           Result& x_fp4, Result& x_sf, Result& gsa) {
  const Matrix m = matrix_of(x, "x");
  const bool rows = by_row(granularity);
  Recipe recipe = {};
  recipe.rotation = rotation_of(rotate, signs, m.cols, x);
  recipe.select = select_of(select);
  recipe.rounding = rounding_of(rounding, rng_state, random_bytes, x);
  recipe.tile = tile_of(block, recipe.rotation);
  JITQUANT_CHECK(!rows || !recipe.tile, "granularity='row' goes with block='1x16' alone");
  JITQUANT_CHECK(recipe.select.none || !recipe.rounding.stochastic,
                 "rounding='stochastic' goes with select='none' alone");
  const float divisor = recipe.select.full * top_of(top);
  check_cuda(amax, "amax", &x);
  const int64_t count = amax.numel();
  JITQUANT_CHECK(amax.scalar_type() == ScalarType::Float && amax.is_contiguous() &&
                     (rows ? count == m.rows : count >= 1 && count <= kMaxPartials),
                 "amax must be float32, contiguous, of 1 to ", kMaxPartials,
                 " elements, or with granularity='row' of one for each row; its shape is ",
                 shape_text(amax));
  const PackedShape shape =
      PackedShape::of(x, x.dim() - 1, m.rows, m.cols, swizzled_of(scale_layout));
  const Nvfp4Output out = shape.output(x_fp4, x_sf, x);
  float* gsa_out = gsa.floats("gsa", rows ? m.rows : 1, x);
  const Launching at(call, x);
  check_launch(launch_quantize_nvfp4_recipe(m, static_cast<const float*>(amax.data),
                                            static_cast<int>(rows ? 0 : count), rows, divisor,
                                            gsa_out, recipe, out, at.stream),
               "quantize_nvfp4_recipe");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(
    function<&rotated_amax>("rotated_amax",
                            "Tensor x, *, str rotate='none', Tensor? signs=None, "
                            "str granularity='tensor'",
                            {"maxima"}),
    function<&quantize_nvfp4_recipe>(
        "quantize_nvfp4_recipe",
        "Tensor x, Tensor amax, *, str granularity='tensor', str block='1x16', str rotate='none', "
        "Tensor? signs=None, str select='none', int top=448, str rounding='nearest', "
        "Tensor? rng_state=None, Tensor? random_bytes=None, str scale_layout='linear'",
        {"x_fp4", "x_sf", "gsa"}))
