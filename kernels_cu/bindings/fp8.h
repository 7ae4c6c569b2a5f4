// Shared by the FP8 bindings with one scale per tensor or per row.
#pragma once

#include "../fp8/launch.h"
#include "function.h"

namespace [[gnu::visibility("hidden")]] jitquant {

inline EightBit eight_bit_of(ScalarType dtype) {
  if (dtype == ScalarType::Float8_e4m3fn) return EightBit::kE4m3;
  return dtype == ScalarType::Float8_e5m2 ? EightBit::kE5m2 : EightBit::kInt8;
}

// What defines the scale, and the shape of scale_inv, and of amax if requested.
struct Fp8Arguments {
  ScalarType dtype;
  EightBit format;
  Fp8Scale scale = {};
  Shape shape;
  bool with_amax = false;

  // The scale is given, or computed.
  template <class Args>
  static Fp8Arguments of(const View& x, const Args& args) {
    Fp8Arguments a(x, args);
    a.with_amax = args.with_amax;
    a.scale.kind = Fp8Scale::kAmax;
    if (args.scale) {
      a.scale.kind = a.scale.by_row ? Fp8Scale::kRows : Fp8Scale::kTensor;
      a.scale.given = static_cast<const float*>(args.scale->const_data_ptr());
    } else if (args.scale_value) {
      a.scale.kind = Fp8Scale::kValue;
      a.scale.value = static_cast<float>(*args.scale_value);
    }
    return a;
  }

  // The amax is given, for the tensor or for each row.
  template <class Args>
  static Fp8Arguments from_amax(const View& x, const Args& args) {
    Fp8Arguments a(x, args);
    a.scale.kind = Fp8Scale::kMaxima;
    a.scale.given = static_cast<const float*>(args.amax.const_data_ptr());
    return a;
  }

  // Allocates the results.
  ElementRows results(Result& data, Result& scale_inv, Result* amax, const Shape& elements,
                      const View& like) {
    const ElementRows out = {data.rows("data", dtype, elements, like), format};
    scale.scale_inv =
        static_cast<float*>(scale_inv.memory("scale_inv", ScalarType::Float, shape, like));
    if (amax == nullptr) return out;
    void* to = amax->memory("amax", ScalarType::Float, with_amax ? shape : Shape::of(0), like);
    scale.amax = with_amax ? static_cast<float*>(to) : nullptr;
    return out;
  }

 private:
  template <class Args>
  Fp8Arguments(const View& x, const Args& args)
      : dtype(args.dtype), format(eight_bit_of(args.dtype)) {
    scale.by_row = by_row(args.granularity);
    scale.least = static_cast<float>(args.amax_eps.value_or(0.0));
    scale.bound =
        args.scale_ub ? static_cast<float>(*args.scale_ub) : std::numeric_limits<float>::infinity();
    shape = scale.by_row ? Shape::of(x, x.dim() - 1, 1) : Shape::of(1);
  }
};

}  // namespace jitquant
