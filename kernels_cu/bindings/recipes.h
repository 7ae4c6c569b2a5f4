// Arguments of recipes for training and rotation.
#pragma once

#include "../recipes/launch.h"
#include "common.h"

namespace jitquant {

// Rotates groups of neighbors.
inline Rotation hadamard(std::string_view rotate, const std::optional<View>& signs) {
  constexpr float kFactors[] = {0.25f, 0x1.6a09e6p-3f, 0.125f, 0x1.6a09e6p-4f, 0.0625f};
  const int lanes = static_cast<int>(hadamard_size(rotate) / 16);
  if (lanes == 0) return {};
  return {lanes, is(rotate, "te"), kFactors[__builtin_ctz(lanes)],
          signs ? static_cast<const int8_t*>(signs->data) : nullptr};
}

inline Select select_of(std::string_view select) {
  Select s = {is(select, "none"), false, false, Error::kAbsolute, 6.0f};
  s.single = is(select, "static_6") || is(select, "static_4");
  if (is(select, "static_4")) s.full = 4.0f;
  s.scaled = is(select, "4over6_mae_fast") || is(select, "4over6_mse_fast");
  if (is(select, "4over6_mse") || is(select, "4over6_mse_fast")) s.error = Error::kSquared;
  if (is(select, "4over6_abs_max")) s.error = Error::kLargest;
  return s;
}

inline Rounding rounding_of(std::string_view rounding, const std::optional<View>& rng_state,
                            const std::optional<View>& random_bytes) {
  return {is(rounding, "stochastic"),
          rng_state ? static_cast<const int64_t*>(rng_state->data) : nullptr,
          random_bytes ? static_cast<const uint8_t*>(random_bytes->data) : nullptr};
}

inline Mxfp4Scaling scaling_of(std::string_view scaling) {
  if (is(scaling, "floor")) return Mxfp4Scaling::kFloor;
  if (is(scaling, "ceil")) return Mxfp4Scaling::kCeil;
  if (is(scaling, "even")) return Mxfp4Scaling::kEven;
  if (is(scaling, "gptoss_up")) return Mxfp4Scaling::kGptOssUp;
  if (is(scaling, "gptoss_down")) return Mxfp4Scaling::kGptOssDown;
  if (is(scaling, "static_6")) return Mxfp4Scaling::kStatic6;
  if (is(scaling, "static_4")) return Mxfp4Scaling::kStatic4;
  return Mxfp4Scaling::kRceil;
}

inline Recipe nvfp4_recipe(std::string_view rotate, const std::optional<View>& signs,
                           std::string_view select, std::string_view rounding,
                           const std::optional<View>& rng_state,
                           const std::optional<View>& random_bytes, std::string_view block) {
  Recipe recipe = {};
  recipe.rotation = hadamard(rotate, signs);
  recipe.select = select_of(select);
  recipe.rounding = rounding_of(rounding, rng_state, random_bytes);
  recipe.tile = is(block, "16x16");
  return recipe;
}
inline Recipe mxfp4_recipe(std::string_view rotate, const std::optional<View>& signs,
                           std::string_view scaling, std::string_view rounding,
                           const std::optional<View>& rng_state,
                           const std::optional<View>& random_bytes) {
  Recipe recipe = {};
  recipe.rotation = hadamard(rotate, signs);
  recipe.rounding = rounding_of(rounding, rng_state, random_bytes);
  recipe.scaling = scaling_of(scaling);
  return recipe;
}

// The gsa is amax / divisor.
inline float divisor_of(const Recipe& recipe, int64_t e4m3_max) {
  return recipe.select.full * static_cast<float>(e4m3_max);
}

// The maxima of a tensor; 0: one for each row.
inline int count_of(const View& amax, bool by_row) {
  return by_row ? 0 : static_cast<int>(amax.numel());
}

// Rotary position embedding of the rows of x, or none.
inline Rope rope_of(const std::optional<View>& cos, const std::optional<View>& sin,
                    bool interleaved, const Matrix& x) {
  if (!cos) return {nullptr, nullptr, 1, 0, interleaved, false};
  const float *c = static_cast<const float*>(cos->data), *s = static_cast<const float*>(sin->data);
  const int64_t positions = cos->size(0), size = 2 * cos->size(1);
  const int64_t each = x.rows > 0 ? x.rows / positions : 1;
  JITQUANT_CHECK(x.rows < (int64_t{1} << 31),
                 "x: expected fewer than 2^31 rows with cos and sin, got ", x.rows);
  return {c, s, each, static_cast<int32_t>(size), interleaved, aligned(c, 16) && aligned(s, 16)};
}

// 16x16 blocks have one gsa, as the transpose has the same codes.
inline BothScale both_scale(const View& amax, const std::optional<View>& from_gsa_t,
                            const Recipe& recipe, int64_t e4m3_max) {
  const float* const maxima = static_cast<const float*>(amax.data);
  const float divisor = divisor_of(recipe, e4m3_max);
  if (!from_gsa_t) return {{maxima, maxima + kBothPartials}, kBothPartials, false, divisor};
  return {{maxima, recipe.tile ? maxima : static_cast<const float*>(from_gsa_t->data)},
          1,
          true,
          divisor};
}

inline BothBytes both_bytes(const std::optional<View>& random_bytes,
                            const std::optional<View>& random_bytes_t) {
  return {{data_of<uint8_t>(random_bytes), data_of<uint8_t>(random_bytes_t)}};
}

inline Mxfp4Input mxfp4_input(const View& x_fp4, const View& x_sf, std::string_view scale_layout) {
  const int64_t size = x_fp4.size(x_fp4.dim() - 1);
  return {bytes_of(x_fp4, "x_fp4", 4), bytes_of(x_sf, "x_sf", 4), x_fp4.numel() / size, size / 16,
          swizzled_of(scale_layout)};
}

}  // namespace jitquant
