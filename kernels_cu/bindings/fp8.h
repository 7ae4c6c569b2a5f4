// Shared by the FP8 bindings with one scale per tensor or per row.
#pragma once

#include "../fp8/launch.h"
#include "function.h"

namespace jitquant {

inline EightBit eight_bit_of(ScalarType dtype) {
  if (dtype == ScalarType::Float8_e4m3fn) return EightBit::kE4m3;
  return dtype == ScalarType::Float8_e5m2 ? EightBit::kE5m2 : EightBit::kInt8;
}

// The bounds of an amax that a scale is computed from.
template <class Args>
void set_bounds(Fp8Scale& scale, const Args& args) {
  scale.least = static_cast<float>(args.amax_eps.value_or(0.0));
  scale.bound =
      args.scale_ub ? static_cast<float>(*args.scale_ub) : std::numeric_limits<float>::infinity();
}

// The checked arguments that define the scale, and the shape of scale_inv and amax.
struct Fp8Arguments {
  ScalarType dtype;
  EightBit format;
  Fp8Scale scale;
  Shape shape;  // of scale_inv, and of amax if requested
  bool with_amax;

  template <class Args>
  static Fp8Arguments of(const View& x, int64_t rows, const Args& args, bool dynamic_tensor) {
    Fp8Scale scale = {};
    scale.by_row = by_row(args.granularity);
    set_bounds(scale, args);
    if (args.scale) {
      JITQUANT_CHECK(!args.scale_value, "scale: expected a tensor or a number, got both");
      check_cuda(*args.scale, "scale", &x);
      const int64_t count = scale.by_row ? rows : 1;
      JITQUANT_CHECK(args.scale->numel() == count, "scale: expected ", count, " element",
                     count == 1 ? "" : "s", " with granularity '", args.granularity,
                     "', got shape ", shape_text(*args.scale));
      check_contiguous(*args.scale, "scale");
      scale.kind = scale.by_row ? Fp8Scale::kRows : Fp8Scale::kTensor;
      scale.given = static_cast<const float*>(args.scale->const_data_ptr());
    } else if (args.scale_value) {
      JITQUANT_CHECK(!scale.by_row,
                     "scale: expected a tensor with granularity 'row', got a number");
      scale.kind = Fp8Scale::kValue;
      scale.value = static_cast<float>(*args.scale_value);
    } else {
      JITQUANT_CHECK(
          scale.by_row || dynamic_tensor,
          "granularity: expected 'row' or a given scale, got 'tensor' without a scale. To compute "
          "one scale for the whole tensor quantize the result with quantize_fp8");
      scale.kind = Fp8Scale::kAmax;
    }
    const auto only_computed = [&](const char* name, std::optional<double> value) {
      JITQUANT_CHECK(!value || scale.kind == Fp8Scale::kAmax, name,
                     ": expected None beside a scale, got ", *value,
                     ". It bounds the amax that a scale is computed from");
    };
    only_computed("scale_ub", args.scale_ub);
    only_computed("amax_eps", args.amax_eps);
    return {args.dtype, eight_bit_of(args.dtype), scale,
            scale.by_row ? Shape::of(x, x.dim() - 1, 1) : Shape::of(1), args.with_amax};
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

  template <class Args>
  static Fp8FromAmax of(const View& x, int64_t rows, const Args& args) {
    Fp8Scale scale = {};
    scale.kind = Fp8Scale::kMaxima;
    scale.by_row = by_row(args.granularity);
    set_bounds(scale, args);
    check_cuda(args.amax, "amax", &x);
    const int64_t count = scale.by_row ? rows : 1;
    JITQUANT_CHECK(args.amax.numel() == count && args.amax.is_contiguous(), "amax: expected ",
                   count, " contiguous elements, got shape ", shape_text(args.amax),
                   " and strides ", strides_text(args.amax));
    scale.given = static_cast<const float*>(args.amax.const_data_ptr());
    return {args.dtype, eight_bit_of(args.dtype), scale,
            scale.by_row ? Shape::of(x, x.dim() - 1, 1) : Shape::of(1)};
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
