// Arguments shared by the recipes for training and rotation.
#pragma once

#include "../recipes/launch.h"
#include "function.h"

namespace jitquant {

// Rotates groups of `cols` neighbors.
inline Rotation rotation_of(std::string_view rotate, const std::optional<View>& signs, int64_t cols,
                            const View& like) {
  struct Known {
    std::string_view name;
    int lanes;
    float factor;
  };
  constexpr Known kKnown[] = {
      {"none", 0, 0.0f}, {"te", 1, 0.25f},           {"16", 1, 0.25f},    {"32", 2, 0x1.6a09e6p-3f},
      {"64", 4, 0.125f}, {"128", 8, 0x1.6a09e6p-4f}, {"256", 16, 0.0625f}};
  for (const Known& known : kKnown) {
    if (known.name != rotate) continue;
    Rotation r = {known.lanes, rotate == "te", known.factor, nullptr};
    JITQUANT_CHECK(r.lanes == 0 || cols % (16 * r.lanes) == 0, "rotate: expected a multiple of ",
                   16 * r.lanes, " elements in the rotated dimension for '", rotate, "', got ",
                   cols, ". Pad it with zeros, or rotate fewer neighbors");
    if (signs) {
      check_cuda(*signs, "signs", &like);
      JITQUANT_CHECK(r.lanes > 0, "signs: expected None with rotate='none', got shape ",
                     shape_text(*signs));
      JITQUANT_CHECK(signs->dim() == 1 && signs->size(0) == 16 * r.lanes && signs->is_contiguous(),
                     "signs: expected shape (", 16 * r.lanes, ",), contiguous with rotate='",
                     rotate, "', got shape ", shape_text(*signs));
      r.signs = static_cast<const int8_t*>(signs->data);
    }
    return r;
  }
  fail("rotate: expected the size of a rotation, got '", rotate, "'");
}

inline Select select_of(std::string_view select) {
  Select s = {select == "none", false, false, Error::kAbsolute, 6.0f};
  if (s.none) return s;
  s.single = select == "static_6" || select == "static_4";
  if (select == "static_4") s.full = 4.0f;
  s.scaled = select == "4over6_mae_fast" || select == "4over6_mse_fast";
  if (select == "4over6_mse" || select == "4over6_mse_fast") s.error = Error::kSquared;
  if (select == "4over6_abs_max") s.error = Error::kLargest;
  JITQUANT_CHECK(s.single || s.scaled || s.error != Error::kAbsolute || select == "4over6_mae",
                 "select: expected the name of a selection, got '", select, "'");
  return s;
}

inline float largest_scale(int64_t e4m3_max) {
  JITQUANT_CHECK(e4m3_max == 448 || e4m3_max == 256, "e4m3_max: expected one of 448, 256, got ",
                 e4m3_max);
  return static_cast<float>(e4m3_max);
}

inline bool tile_of(std::string_view block, std::string_view rotate, const Rotation& rotation) {
  if (block == "1x16") return false;
  JITQUANT_CHECK(rotation.lanes <= 1,
                 "rotate: expected 'none', 'te' or '16' with block='16x16', got '", rotate,
                 "'. A wider rotation would mix blocks that have their own scales");
  return true;
}

inline const uint8_t* random_bytes_of(const View& given, const char* name, const View& like,
                                      const char* like_name) {
  check_cuda(given, name, &like);
  JITQUANT_CHECK(given.dtype == ScalarType::Byte && same_shape(given, like), name,
                 ": expected uint8 of shape ", shape_text(like), ", as ", like_name, ", got ",
                 dtype_text(given.dtype), " of shape ", shape_text(given));
  check_contiguous(given, name);
  return static_cast<const uint8_t*>(given.data);
}

inline Rounding rounding_of(std::string_view rounding, const std::optional<View>& rng_state,
                            const std::optional<View>& random_bytes, const View& like) {
  Rounding r = {rounding == "stochastic", nullptr, nullptr};
  JITQUANT_CHECK(static_cast<int>(rng_state.has_value()) + random_bytes.has_value() == r.stochastic,
                 "rng_state and random_bytes: expected one of them with rounding 'stochastic', "
                 "none with 'nearest', got ",
                 static_cast<int>(rng_state.has_value()) + random_bytes.has_value(), " with '",
                 rounding, "'");
  if (rng_state) {
    check_cuda(*rng_state, "rng_state", &like);
    JITQUANT_CHECK(
        rng_state->dtype == ScalarType::Long && rng_state->dim() == 1 && rng_state->size(0) == 2 &&
            rng_state->is_contiguous(),
        "rng_state: expected int64 of shape (2,) on the device of x: seed and offset, got ",
        dtype_text(rng_state->dtype), " of shape ", shape_text(*rng_state));
    r.rng_state = static_cast<const int64_t*>(rng_state->data);
  }
  if (random_bytes) r.random_bytes = random_bytes_of(*random_bytes, "random_bytes", like, "x");
  return r;
}

inline void check_selection(const Recipe& recipe, std::string_view select) {
  JITQUANT_CHECK(recipe.select.none || recipe.select.single || !recipe.rounding.stochastic,
                 "rounding: expected 'nearest' with select='", select,
                 "', got 'stochastic'. The choice would depend on the random numbers");
}

}  // namespace jitquant
