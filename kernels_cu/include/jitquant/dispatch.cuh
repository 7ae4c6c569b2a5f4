// From a tensor's dtype to a C++ type, and to a source of values; from a format to a constant.
#pragma once

#include "jitquant/fp8.cuh"
#include "jitquant/sources.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
// Calls f(Element{}) with the element type of `dtype`. -DJITQUANT_DTYPE=<number> builds a library
// for that dtype alone, which compiles faster.
template <class F>
cudaError_t dispatch(DType dtype, F&& f) {
#ifdef JITQUANT_DTYPE
  constexpr DType kOnly = static_cast<DType>(JITQUANT_DTYPE);
  using Only = std::conditional_t<kOnly == DType::kFloat32, float,
                                  std::conditional_t<kOnly == DType::kFloat16, Fp16, Bf16>>;
  return dtype == kOnly ? f(Only{}) : cudaErrorInvalidValue;
#else
  switch (dtype) {
    case DType::kBFloat16:
      return f(Bf16{});
    case DType::kFloat16:
      return f(Fp16{});
    case DType::kFloat32:
      return f(float{});
  }
  return cudaErrorInvalidValue;
#endif
}

// Calls f(std::integral_constant<EightBit, format>()).
template <class F>
cudaError_t dispatch_format(EightBit format, F&& f) {
  switch (format) {
    case EightBit::kE4m3:
      return f(std::integral_constant<EightBit, EightBit::kE4m3>());
    case EightBit::kE5m2:
      return f(std::integral_constant<EightBit, EightBit::kE5m2>());
    case EightBit::kInt8:
      return f(std::integral_constant<EightBit, EightBit::kInt8>());
  }
  return cudaErrorInvalidValue;
}

// -DJITQUANT_HELD builds a library of norms for aligned rows that a thread block holds, without the
// kernels for longer and for unaligned ones.
#ifdef JITQUANT_HELD
constexpr bool kTakesLong = false;
#else
constexpr bool kTakesLong = true;
#endif

// Calls f(source) with the source of a norm's rows: x, or its sum with a residual.
// -DJITQUANT_RESIDUAL=0 builds a library for calls without a residual alone, =1 for those with one.
template <class F>
cudaError_t with_residual(const Matrix& x, const Matrix* residual, F&& f) {
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
#ifdef JITQUANT_RESIDUAL
    constexpr bool kAdds = JITQUANT_RESIDUAL == 1;
    if ((residual != nullptr) != kAdds) return cudaErrorInvalidValue;
    if constexpr (kAdds) {
      return f(ResidualSource<T>(x, *residual));
    } else {
      return f(PlainSource<T>(x));
    }
#else
    return residual != nullptr ? f(ResidualSource<T>(x, *residual)) : f(PlainSource<T>(x));
#endif
  });
}

// Calls f(source) with the source of a gate-and-up projection.
template <class F>
cudaError_t deinterleaved(const GateAndUp& in, bool activate, F&& f) {
  return dispatch(in.fused.dtype, [&](auto element) {
    using T = decltype(element);
    return f(DeinterleaveSource<T>(in.fused, in.run, activate));
  });
}
#endif

}  // namespace jitquant
