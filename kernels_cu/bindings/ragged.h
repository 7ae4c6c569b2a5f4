// Shared by the bindings of ragged tensors (many tensors in one buffer).
#pragma once

#include "../ragged/launch.h"
#include "fp8.h"

namespace jitquant {

inline Activation activation_of(std::string_view name) {
  if (name == "none") return Activation::kNone;
  if (name == "relu") return Activation::kRelu;
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "qgelu") return Activation::kQgelu;
  return Activation::kSrelu;
}

// The elements of a row, which offsets count: one in a buffer of one dimension.
inline int64_t row_of(const View& x) {
  return x.dim() == 1 ? 1 : x.size(x.dim() - 1);
}

// The offsets of a buffer's segments, and their number.
struct SegmentOffsets {
  const int64_t *offsets, *sizes;
  int64_t count;

  static SegmentOffsets of(const View& offsets, const std::optional<View>& sizes) {
    const int64_t count = offsets.numel() - 1;
    JITQUANT_CHECK(count < int64_t{1} << 30, "offsets: expected fewer than 2^30 segments, got ",
                   count);
    return {static_cast<const int64_t*>(offsets.data),
            sizes ? static_cast<const int64_t*>(sizes->data) : nullptr, count};
  }
  SegmentTable table(int64_t numel, int64_t row) const {
    return {offsets, sizes, count, numel, row};
  }
};

// The checked arguments that define the scales of segments, and where scale_inv and amax go.
struct RaggedArguments {
  RaggedInput input;
  RaggedScales scales;

  static RaggedArguments of(const View& x, const char* name, const View& offsets,
                            const std::optional<View>& given, const std::optional<View>& sizes) {
    const SegmentOffsets segments = SegmentOffsets::of(offsets, sizes);
    return {{x.const_data_ptr(), dtype_of(x, name), segments.offsets, segments.sizes,
             segments.count, x.numel(), row_of(x)},
            {given ? static_cast<const float*>(given->data) : nullptr, nullptr, nullptr, nullptr}};
  }

  // Allocates the results.
  void results(Result& inverse, const char* name, Result& amax, const View& like) {
    scales.inverse = inverse.floats(name, input.count, like);
    scales.amax = amax.floats("amax", input.count, like);
  }
};

// The contiguous elements of an FP8 result with the shape of `like`.
inline RaggedElements ragged_elements(Result& data, ScalarType dtype, EightBit format,
                                      const View& like) {
  const int64_t last = like.dim() - 1;
  void* to = data.memory("data", dtype, Shape::of(like, last, like.size(last)), like);
  return {static_cast<uint8_t*>(to), format, aligned(to, 16)};
}

}  // namespace jitquant
