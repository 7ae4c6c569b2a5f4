// Reductions over the threads of a block, in a fixed order, so that a result never depends on
// timing.
#pragma once

#include <cuda_runtime.h>

namespace jitquant {

struct MaxOp {
  static __device__ __forceinline__ float combine(float a, float b) { return fmaxf(a, b); }
};
struct SumOp {
  static __device__ __forceinline__ float combine(float a, float b) { return a + b; }
};

// Every thread of the block calls it and gets the result. `scratch` has 33 floats; blockDim.x is a
// multiple of 32. Identity of both operations on the values used here is 0 (maxima of magnitudes).
template <class Op>
__device__ __forceinline__ float block_reduce(float value, float* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    value = Op::combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const int warps = blockDim.x >> 5;
  if (warps == 1) return value;
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  if (warp == 0) {
    value = lane < warps ? scratch[lane] : 0.0f;
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
      value = Op::combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
    }
    if (lane == 0) scratch[32] = value;
  }
  __syncthreads();
  value = scratch[32];
  __syncthreads();  // scratch may be used again at once
  return value;
}

}  // namespace jitquant
