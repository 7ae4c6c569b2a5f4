// Element types as bits, conversions, and loads and stores of eight neighbours. Own types instead
// of cuda_bf16.h and cuda_fp16.h, which take longer to compile than a kernel does.
#pragma once

#include <cuda_runtime.h>

#include "jitquant/numeric.cuh"

namespace jitquant {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

__device__ __forceinline__ float to_float(Bf16 x) {
  return bits_float(static_cast<uint32_t>(x.bits) << 16);
}
__device__ __forceinline__ float to_float(Fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ float to_float(float x) {
  return x;
}

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ Bf16 from_float<Bf16>(float x) {
  Bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
__device__ __forceinline__ Fp16 from_float<Fp16>(float x) {
  Fp16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}

// Eight elements; p is aligned to 16 bytes.
template <class T>
__device__ __forceinline__ void load8(const T* p, float* v) {
  static_assert(sizeof(T) == 2);
  const uint4 raw = *reinterpret_cast<const uint4*>(p);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = to_float(T{static_cast<uint16_t>(words[i] & 0xffffu)});
    v[2 * i + 1] = to_float(T{static_cast<uint16_t>(words[i] >> 16)});
  }
}
template <>
__device__ __forceinline__ void load8<float>(const float* p, float* v) {
  const float4 a = reinterpret_cast<const float4*>(p)[0];
  const float4 b = reinterpret_cast<const float4*>(p)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

template <class T>
__device__ __forceinline__ void store8(T* p, const float* v) {
  static_assert(sizeof(T) == 2);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = static_cast<uint32_t>(from_float<T>(v[2 * i]).bits) |
               (static_cast<uint32_t>(from_float<T>(v[2 * i + 1]).bits) << 16);
  }
  *reinterpret_cast<uint4*>(p) = make_uint4(words[0], words[1], words[2], words[3]);
}
template <>
__device__ __forceinline__ void store8<float>(float* p, const float* v) {
  reinterpret_cast<float4*>(p)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

// Sixteen elements from p, of which the first `count` are there; the others become zero. `vector`
// says that p is aligned to 16 bytes.
template <class T>
__device__ __forceinline__ void load16(const T* p, int64_t count, bool vector, float (&v)[16]) {
  if (vector && count >= 16) {
    load8(p, v);
    load8(p + 8, v + 8);
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = i < count ? to_float(p[i]) : 0.0f;
  }
}

template <class T>
__device__ __forceinline__ void store16(T* p, int64_t count, bool vector, const float (&v)[16]) {
  if (vector && count >= 16) {
    store8(p, v);
    store8(p + 8, v + 8);
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i < count) p[i] = from_float<T>(v[i]);
    }
  }
}

}  // namespace jitquant
