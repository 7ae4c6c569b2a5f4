// Reductions, in a fixed order, so that a result never depends on timing.
#pragma once

#include <cuda_runtime.h>

#include "jitquant/numeric.cuh"

namespace jitquant {

// The maximum over a warp of values that are neither negative nor NaN: they order as integers.
__device__ __forceinline__ float warp_max(float x) {
  return bits_float(__reduce_max_sync(0xffffffffu, float_bits(x)));
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Over a block of threads, all of which call it together and get the result. One barrier each, with
// two buffers in turn: a barrier stands between a reading and the next writing of either.
class BlockReduce {
 public:
  using Scratch = float2[2][32];

  __device__ __forceinline__ explicit BlockReduce(Scratch& scratch) : scratch_(scratch) {}

  __device__ __forceinline__ float sum(float x) {
    x = warp_sum(x);
    if (warps() == 1) return x;
    return sum_of_warps(exchange([&](float2& mine) { mine.x = x; }).x);
  }

  __device__ __forceinline__ float max(float x) {
    x = warp_max(x);
    if (warps() == 1) return x;
    return warp_max(exchange([&](float2& mine) { mine.y = x; }).y);
  }

  // {the sum of `sum`, the maximum of `max`}
  __device__ __forceinline__ float2 sum_and_max(float sum, float max) {
    float2 both = {warp_sum(sum), warp_max(max)};
    if (warps() == 1) return both;
    both = exchange([&](float2& mine) { mine = both; });
    return {sum_of_warps(both.x), warp_max(both.y)};
  }

 private:
  static __device__ __forceinline__ int warps() { return blockDim.x >> 5; }
  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }

  // The lanes that are different warps' after an exchange: eight, which then repeat, are enough for
  // most blocks.
  static __device__ __forceinline__ int lanes() { return warps() <= 8 ? 8 : 32; }

  // Writes this warp's result, and gives each of the first lanes that of a warp, or zeros.
  template <class F>
  __device__ __forceinline__ float2 exchange(F&& write) {
    float2* const buffer = scratch_[turn_];
    turn_ ^= 1;
    if (lane() == 0) write(buffer[threadIdx.x >> 5]);
    __syncthreads();
    const int warp = lane() & (lanes() - 1);
    return warp < warps() ? buffer[warp] : float2{0.0f, 0.0f};
  }

  static __device__ __forceinline__ float sum_of_warps(float x) {
    if (lanes() > 8) {
      x += __shfl_xor_sync(0xffffffffu, x, 16);
      x += __shfl_xor_sync(0xffffffffu, x, 8);
    }
#pragma unroll
    for (int offset = 4; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
  }

  Scratch& scratch_;
  int turn_ = 0;
};

}  // namespace jitquant
