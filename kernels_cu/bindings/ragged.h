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

  static const int64_t* integers(const View& t, const char* name, const View& like, int64_t least) {
    check_cuda(t, name, &like);
    JITQUANT_CHECK(t.dim() == 1 && t.size(0) >= least, name, ": expected shape ",
                   least > 0 ? "(G + 1,)" : "(G,)", ", got shape ", shape_text(t));
    check_contiguous(t, name);
    return static_cast<const int64_t*>(t.const_data_ptr());
  }
  static SegmentOffsets of(const View& offsets, const std::optional<View>& sizes,
                           const View& like) {
    SegmentOffsets g = {integers(offsets, "offsets", like, 1), nullptr, offsets.numel() - 1};
    JITQUANT_CHECK(g.count < int64_t{1} << 30, "offsets: expected fewer than 2^30 segments, got ",
                   g.count);
    if (sizes) {
      g.sizes = integers(*sizes, "sizes", like, 0);
      JITQUANT_CHECK(sizes->numel() == g.count, "sizes: expected shape (", g.count,
                     ",), one element for each segment of offsets, got shape ", shape_text(*sizes));
    }
    return g;
  }
  SegmentTable table(int64_t numel, int64_t row) const {
    return {offsets, sizes, count, numel, row};
  }
  const float* floats(const View& t, const char* name, const View& like) const {
    check_cuda(t, name, &like);
    JITQUANT_CHECK(t.dim() == 1 && t.is_contiguous() && t.numel() == count, name,
                   ": expected shape (", count,
                   ",), contiguous, one element for each segment, got shape ", shape_text(t));
    return static_cast<const float*>(t.const_data_ptr());
  }
};

// The checked arguments that define the scales of segments, and where scale_inv and amax go.
struct RaggedArguments {
  RaggedInput input;
  RaggedScales scales;

  static RaggedArguments of(const View& x, const char* name, const View& offsets,
                            const std::optional<View>& given, const std::optional<View>& sizes) {
    check_cuda(x, name);
    const DType dtype = dtype_of(x, name);
    JITQUANT_CHECK(
        x.is_contiguous(), name,
        ": expected a contiguous buffer, got one that is not. Offsets count its rows. Call ", name,
        ".contiguous() first");
    JITQUANT_CHECK(x.dim() >= 1, name,
                   ": expected a tensor of one dimension or more, got shape ()");
    const SegmentOffsets segments = SegmentOffsets::of(offsets, sizes, x);
    return {{x.const_data_ptr(), dtype, segments.offsets, segments.sizes, segments.count, x.numel(),
             row_of(x)},
            {given ? segments.floats(*given, "scale", x) : nullptr, nullptr, nullptr, nullptr}};
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
