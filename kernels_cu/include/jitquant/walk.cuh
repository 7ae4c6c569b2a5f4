// A walk over the blocks of a matrix by all threads of a grid.
#pragma once

#include <cuda_runtime.h>

#include "jitquant/numeric.cuh"

namespace jitquant {

constexpr int kThreads = 256;
// Of a block of threads with little to do before its first block of values: as fewer end together,
// memory is more evenly at work (docs/performance.md).
constexpr int kPieceThreads = 128;
// As many as `blocks` of kThreads.
constexpr int pieces_per_sm(int blocks) {
  return blocks * (kThreads / kPieceThreads);
}

JITQUANT_HD int64_t blocks_of(int64_t cols) {
  return (cols + 15) / 16;
}

// (row, block) of a flat walk over rows * width blocks, without a division a step.
struct BlockWalk {
  int64_t row, block;
  int64_t step_rows, step_blocks, width;

  __device__ __forceinline__ explicit BlockWalk(int64_t width)
      : BlockWalk(width, static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
                  static_cast<int64_t>(gridDim.x) * blockDim.x) {}
  // From `first` on, which may be -1: block -1 of row 0.
  __device__ __forceinline__ BlockWalk(int64_t width, int64_t first, int64_t step) : width(width) {
    row = first / width;
    block = first - row * width;
    step_rows = step / width;
    step_blocks = step - step_rows * width;
  }
  __device__ __forceinline__ void next() {
    row += step_rows;
    block += step_blocks;
    if (block >= width) {
      block -= width;
      ++row;
    }
  }
};

}  // namespace jitquant
