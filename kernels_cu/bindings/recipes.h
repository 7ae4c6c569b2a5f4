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
    JITQUANT_CHECK(r.lanes == 0 || cols % (16 * r.lanes) == 0, "rotate='", rotate, "' mixes ",
                   16 * r.lanes, " neighbors; their dimension must be a multiple of that, not ",
                   cols);
    if (signs) {
      check_cuda(*signs, "signs", &like);
      JITQUANT_CHECK(signs->scalar_type() == ScalarType::Char && signs->dim() == 1 &&
                         signs->size(0) == 16 * r.lanes && signs->is_contiguous() && r.lanes > 0,
                     "signs must be int8 with shape (", 16 * r.lanes,
                     ",), contiguous; its shape is ", shape_text(*signs));
      r.signs = static_cast<const int8_t*>(signs->data);
    }
    return r;
  }
  fail("rotate is '", rotate, "', which is not known");
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
                 "select is '", select, "', which is not known");
  return s;
}

inline float top_of(int64_t top) {
  JITQUANT_CHECK(top == 448 || top == 256, "top must be 448 or 256, not ", top);
  return static_cast<float>(top);
}

inline bool tile_of(std::string_view block, const Rotation& rotation) {
  if (block == "1x16") return false;
  JITQUANT_CHECK(rotation.lanes <= 1, "block='16x16' goes with rotations of 16 neighbors alone");
  return true;
}

inline Rounding rounding_of(std::string_view rounding, const std::optional<View>& rng_state,
                            const std::optional<View>& random_bytes, const View& like) {
  Rounding r = {rounding == "stochastic", nullptr, nullptr};
  JITQUANT_CHECK(static_cast<int>(rng_state.has_value()) + random_bytes.has_value() == r.stochastic,
                 "rounding='stochastic' takes one of rng_state and random_bytes, and 'nearest' "
                 "neither");
  if (rng_state) {
    check_cuda(*rng_state, "rng_state", &like);
    JITQUANT_CHECK(rng_state->scalar_type() == ScalarType::Long && rng_state->dim() == 1 &&
                       rng_state->size(0) == 2 && rng_state->is_contiguous(),
                   "rng_state must be int64 with shape (2,), contiguous; its shape is ",
                   shape_text(*rng_state));
    r.rng_state = static_cast<const int64_t*>(rng_state->data);
  }
  if (random_bytes) {
    check_cuda(*random_bytes, "random_bytes", &like);
    bool same = random_bytes->dim() == like.dim();
    for (int64_t i = 0; same && i < like.dim(); ++i) same = random_bytes->size(i) == like.size(i);
    JITQUANT_CHECK(
        random_bytes->scalar_type() == ScalarType::Byte && same && random_bytes->is_contiguous(),
        "random_bytes must be uint8, contiguous and of the input's shape; its shape is ",
        shape_text(*random_bytes));
    r.random_bytes = static_cast<const uint8_t*>(random_bytes->data);
  }
  return r;
}

}  // namespace jitquant
