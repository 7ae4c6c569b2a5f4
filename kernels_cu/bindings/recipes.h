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
    JITQUANT_CHECK(r.lanes == 0 || cols % (16 * r.lanes) == 0, "rotate is '", rotate,
                   "' and the dimension that it mixes has ", cols,
                   " elements; accepted are multiples of ", 16 * r.lanes,
                   ". Pad it with zeros, or rotate fewer neighbors");
    if (signs) {
      check_cuda(*signs, "signs", &like);
      JITQUANT_CHECK(r.lanes > 0, "signs has shape ", shape_text(*signs),
                     "; accepted with rotate='none' is None: nothing is rotated");
      JITQUANT_CHECK(signs->dim() == 1 && signs->size(0) == 16 * r.lanes && signs->is_contiguous(),
                     "signs has shape ", shape_text(*signs), "; accepted with rotate='", rotate,
                     "' is (", 16 * r.lanes, ",), contiguous, of +1 and -1");
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

inline float largest_scale(int64_t e4m3_max) {
  JITQUANT_CHECK(e4m3_max == 448 || e4m3_max == 256, "e4m3_max is ", e4m3_max,
                 "; accepted are 448, 256");
  return static_cast<float>(e4m3_max);
}

inline bool tile_of(std::string_view block, std::string_view rotate, const Rotation& rotation) {
  if (block == "1x16") return false;
  JITQUANT_CHECK(rotation.lanes <= 1, "rotate is '", rotate,
                 "' with block='16x16'; accepted are 'none', 'te' and '16'. A wider rotation would "
                 "mix blocks that have scales of their own");
  return true;
}

inline Rounding rounding_of(std::string_view rounding, const std::optional<View>& rng_state,
                            const std::optional<View>& random_bytes, const View& like) {
  Rounding r = {rounding == "stochastic", nullptr, nullptr};
  JITQUANT_CHECK(
      static_cast<int>(rng_state.has_value()) + random_bytes.has_value() == r.stochastic,
      "rounding is '", rounding, "' with ",
      static_cast<int>(rng_state.has_value()) + random_bytes.has_value(),
      " of rng_state and random_bytes; accepted is one of the two with 'stochastic', and "
      "none with 'nearest'");
  if (rng_state) {
    check_cuda(*rng_state, "rng_state", &like);
    JITQUANT_CHECK(rng_state->dtype == ScalarType::Long && rng_state->dim() == 1 &&
                       rng_state->size(0) == 2 && rng_state->is_contiguous(),
                   "rng_state is ", dtype_text(rng_state->dtype), " ", shape_text(*rng_state),
                   "; accepted is int64 (2,): seed and offset, on the device of x");
    r.rng_state = static_cast<const int64_t*>(rng_state->data);
  }
  if (random_bytes) {
    check_cuda(*random_bytes, "random_bytes", &like);
    JITQUANT_CHECK(random_bytes->dtype == ScalarType::Byte && same_shape(*random_bytes, like),
                   "random_bytes is ", dtype_text(random_bytes->dtype), " ",
                   shape_text(*random_bytes), "; accepted is uint8 ", shape_text(like),
                   ", the shape of x");
    check_contiguous(*random_bytes, "random_bytes");
    r.random_bytes = static_cast<const uint8_t*>(random_bytes->data);
  }
  return r;
}

}  // namespace jitquant
