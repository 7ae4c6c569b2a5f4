// Shared by the FP8 bindings with one scale per tensor or per row.
#pragma once

#include "../fp8/launch.h"
#include "function.h"

namespace jitquant {

inline EightBit fp8_format(ScalarType dtype) {
  return dtype == ScalarType::Float8_e4m3fn ? EightBit::kE4m3 : EightBit::kE5m2;
}

// The checked arguments that define the scale, and the shape of scale_inv and amax.
struct Fp8Arguments {
  ScalarType dtype;
  EightBit format;
  Fp8Scale scale;
  Shape shape;  // of scale_inv, and of amax if requested
  bool with_amax;

  static Fp8Arguments of(const View& x, int64_t rows, const std::optional<View>& given,
                         ScalarType dtype, std::optional<double> scale_value,
                         std::optional<double> scale_ub, std::string_view granularity,
                         bool with_amax, bool dynamic_tensor) {
    const EightBit format = fp8_format(dtype);
    Fp8Scale scale = {};
    scale.by_row = by_row(granularity);
    scale.bound = std::numeric_limits<float>::infinity();
    if (given) {
      JITQUANT_CHECK(!scale_value, "scale: expected a tensor or a number, got both");
      check_cuda(*given, "scale", &x);
      const int64_t count = scale.by_row ? rows : 1;
      JITQUANT_CHECK(given->numel() == count, "scale: expected ", count, " element",
                     count == 1 ? "" : "s", " with granularity '", granularity, "', got shape ",
                     shape_text(*given));
      check_contiguous(*given, "scale");
      scale.kind = scale.by_row ? Fp8Scale::kRows : Fp8Scale::kTensor;
      scale.given = static_cast<const float*>(given->const_data_ptr());
    } else if (scale_value) {
      JITQUANT_CHECK(!scale.by_row,
                     "scale: expected a tensor with granularity 'row', got a number");
      scale.kind = Fp8Scale::kValue;
      scale.value = static_cast<float>(*scale_value);
    } else {
      JITQUANT_CHECK(
          scale.by_row || dynamic_tensor,
          "granularity: expected 'row' or a given scale, got 'tensor' without a scale. To compute "
          "one scale for the whole tensor quantize the result with quantize_fp8");
      scale.kind = Fp8Scale::kAmax;
    }
    if (scale_ub) {
      JITQUANT_CHECK(scale.kind == Fp8Scale::kAmax, "scale_ub: expected None beside a scale, got ",
                     *scale_ub, ". It bounds the amax that a scale is computed from");
      scale.bound = static_cast<float>(*scale_ub);
    }
    return {dtype, format, scale, scale.by_row ? Shape::of(x, x.dim() - 1, 1) : Shape::of(1),
            with_amax};
  }

  // Allocates the results.
  ElementRows results(Result& data, Result& scale_inv, Result& amax, const Shape& elements,
                      const View& like) {
    const ElementRows out = {data.rows("data", dtype, elements, like), format};
    scale.scale_inv =
        static_cast<float*>(scale_inv.memory("scale_inv", ScalarType::Float, shape, like));
    void* to = amax.memory("amax", ScalarType::Float, with_amax ? shape : Shape::of(0), like);
    scale.amax = with_amax ? static_cast<float*>(to) : nullptr;
    return out;
  }
};

// A tensor with a given amax, for the tensor or for each row.
struct Fp8FromAmax {
  ScalarType dtype;
  EightBit format;
  Fp8Scale scale;
  Shape shape;

  static Fp8FromAmax of(const View& x, int64_t rows, const View& amax, ScalarType dtype,
                        std::optional<double> scale_ub, std::string_view granularity) {
    const EightBit format = fp8_format(dtype);
    Fp8Scale scale = {};
    scale.kind = Fp8Scale::kMaxima;
    scale.by_row = by_row(granularity);
    check_cuda(amax, "amax", &x);
    const int64_t count = scale.by_row ? rows : 1;
    JITQUANT_CHECK(amax.numel() == count && amax.is_contiguous(), "amax: expected ", count,
                   " contiguous elements, got shape ", shape_text(amax), " and strides ",
                   strides_text(amax));
    scale.given = static_cast<const float*>(amax.const_data_ptr());
    scale.bound = scale_ub ? static_cast<float>(*scale_ub) : std::numeric_limits<float>::infinity();
    return {dtype, format, scale, scale.by_row ? Shape::of(x, x.dim() - 1, 1) : Shape::of(1)};
  }

  // Allocates the results.
  ElementRows results(Result& data, Result& scale_inv, const Shape& elements, const View& like) {
    const ElementRows out = {data.rows("data", dtype, elements, like), format};
    scale.scale_inv =
        static_cast<float*>(scale_inv.memory("scale_inv", ScalarType::Float, shape, like));
    return out;
  }
};

}  // namespace jitquant
