// Arguments of ragged tensors (many tensors in one buffer).
#pragma once

#include "../ragged/launch.h"
#include "fp8.h"

namespace jitquant {

inline Activation activation_of(std::string_view name) {
  if (is(name, "none")) return Activation::kNone;
  if (is(name, "relu")) return Activation::kRelu;
  if (is(name, "silu")) return Activation::kSilu;
  if (is(name, "gelu")) return Activation::kGelu;
  if (is(name, "qgelu")) return Activation::kQgelu;
  return Activation::kSrelu;
}

// The number of segments of a buffer.
inline int64_t segments_of(const View& offsets) {
  const int64_t count = offsets.numel() - 1;
  JITQUANT_CHECK(count < int64_t{1} << 30, "offsets: expected fewer than 2^30 segments, got ",
                 count);
  return count;
}

// Offsets count rows of so many elements: of one in a buffer of one dimension.
inline int64_t row_of(const View& x) {
  return x.dim() == 1 ? 1 : x.size(x.dim() - 1);
}

inline RaggedInput ragged_input(const View& x, const View& offsets,
                                const std::optional<View>& sizes) {
  return {x.data,
          dtype_of(x, "x"),
          static_cast<const int64_t*>(offsets.data),
          data_of<int64_t>(sizes),
          segments_of(offsets),
          x.numel(),
          row_of(x)};
}

// A gradient, and whether the sums of its columns are requested.
inline RaggedInput gradient_input(const View& grad, const View& offsets,
                                  const std::optional<View>& sizes, bool with_dbias) {
  const int64_t cols = grad.size(grad.dim() - 1);
  JITQUANT_CHECK(!with_dbias || cols <= int64_t{1} << 30,
                 "grad: expected at most 2^30 columns with dbias, got ", cols);
  return ragged_input(grad, offsets, sizes);
}

inline RaggedGradient ragged_gradient(const View& grad, const std::optional<View>& act_input,
                                      std::string_view activation, const Memory& dbias) {
  return {data_of<void>(act_input), activation_of(activation), grad.size(grad.dim() - 1),
          dbias.shape.size(0) > 0 ? dbias.floats() : nullptr, nullptr};
}

inline RaggedScales ragged_scales(const std::optional<View>& scale, const Memory& scale_inv,
                                  const Memory& amax) {
  return {data_of<float>(scale), amax.floats(), scale_inv.floats(), nullptr};
}
inline RaggedScales ragged_gsas(const std::optional<View>& scale, const Memory& gsa,
                                const Memory& amax) {
  return {data_of<float>(scale), amax.floats(), gsa.floats(), nullptr};
}

inline RaggedElements ragged_elements(const Memory& data) {
  return {static_cast<uint8_t*>(data.data), eight_bit_of(data.dtype), aligned(data.data, 16)};
}

inline SegmentTable segment_table(const View& data, const View& offsets,
                                  const std::optional<View>& sizes) {
  return {static_cast<const int64_t*>(offsets.data), data_of<int64_t>(sizes), segments_of(offsets),
          data.numel(), row_of(data)};
}
inline SegmentTable packed_segments(int64_t numel, int64_t row_size, const View& offsets,
                                    const std::optional<View>& sizes) {
  return {static_cast<const int64_t*>(offsets.data), data_of<int64_t>(sizes), segments_of(offsets),
          numel, row_size};
}

inline EightBit format_of(const View& data) {
  return eight_bit_of(data.dtype);
}

}  // namespace jitquant
