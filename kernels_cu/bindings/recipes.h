// Arguments shared by the recipes for training and rotation.
#pragma once

#include "../recipes/launch.h"
#include "function.h"

namespace jitquant {

// Rotates groups of neighbors.
inline Rotation rotation_of(std::string_view rotate, const std::optional<View>& signs) {
  constexpr float kFactors[] = {0.25f, 0x1.6a09e6p-3f, 0.125f, 0x1.6a09e6p-4f, 0.0625f};
  const int lanes = static_cast<int>(hadamard_size(rotate) / 16);
  if (lanes == 0) return {};
  return {lanes, rotate == "te", kFactors[__builtin_ctz(lanes)],
          signs ? static_cast<const int8_t*>(signs->data) : nullptr};
}

inline Select select_of(std::string_view select) {
  Select s = {select == "none", false, false, Error::kAbsolute, 6.0f};
  s.single = select == "static_6" || select == "static_4";
  if (select == "static_4") s.full = 4.0f;
  s.scaled = select == "4over6_mae_fast" || select == "4over6_mse_fast";
  if (select == "4over6_mse" || select == "4over6_mse_fast") s.error = Error::kSquared;
  if (select == "4over6_abs_max") s.error = Error::kLargest;
  return s;
}

inline Rounding rounding_of(std::string_view rounding, const std::optional<View>& rng_state,
                            const std::optional<View>& random_bytes) {
  return {rounding == "stochastic",
          rng_state ? static_cast<const int64_t*>(rng_state->data) : nullptr,
          random_bytes ? static_cast<const uint8_t*>(random_bytes->data) : nullptr};
}

}  // namespace jitquant
