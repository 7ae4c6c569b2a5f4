// Walks over a matrix by all threads of a grid: over its blocks of 16 values, and over the padding
// of its swizzled scales.
#pragma once

#include <cuda_runtime.h>

#include "jitquant/numeric.cuh"
#include "jitquant/swizzle.cuh"

namespace jitquant {

constexpr int kThreads = 256;
// Threads per block in grids with little to do before the first block of values. Small thread
// blocks end at different times, which spreads the load on memory (docs/experiments.md).
constexpr int kPieceThreads = 128;
// The number of such thread blocks that equals `blocks` of kThreads.
constexpr int pieces_per_sm(int blocks) {
  return blocks * (kThreads / kPieceThreads);
}

JITQUANT_HD int64_t blocks_of(int64_t cols) {
  return (cols + 15) / 16;
}

// (row, block) of a flat walk over rows * width blocks, without a division per step.
struct BlockWalk {
  int64_t row, block;
  int64_t step_rows, step_blocks, width;

  __device__ __forceinline__ explicit BlockWalk(int64_t width)
      : BlockWalk(width, static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
                  static_cast<int64_t>(gridDim.x) * blockDim.x) {}
  // Starts at `first`, which may be -1: block -1 of row 0.
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

// Minimum thread blocks per SM, from what a thread loads at a time: limits the registers.
template <class Source>
constexpr int quantize_blocks_per_sm() {
  constexpr size_t kFetched = sizeof(typename Source::Fetched);
  return kFetched <= 32 ? 4 : (kFetched <= 64 ? 3 : 1);
}

// Zeroes the padding of swizzled scales to whole tiles. Called by all threads of the grid.
__device__ __forceinline__ void zero_swizzle_padding(uint8_t* scales, int64_t rows,
                                                     int64_t blocks) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t width = swizzled_blocks(blocks), tiles = width >> 2;
  if (rows & 127) {
    // Sixteen bytes of a tile belong to four rows that are 32 apart.
    const int64_t tile_row = rows >> 7;
    for (int64_t i = first; i < tiles * 32; i += step) {
      uint8_t* const p = scales + swizzled_tile(tile_row, i >> 5, tiles) + row_in_tile(i & 31);
      const int64_t row = (tile_row << 7) + (i & 31);
      if (row >= rows) {
        reinterpret_cast<uint2*>(p)[0] = reinterpret_cast<uint2*>(p)[1] = make_uint2(0, 0);
      } else {
        for (int quarter = 1; quarter < 4; ++quarter) {
          if (row + 32 * quarter >= rows) reinterpret_cast<uint32_t*>(p)[quarter] = 0;
        }
      }
    }
  }
  if (blocks & 3) {
    for (int64_t row = first; row < rows; row += step) {
      uint8_t* const to = scales + swizzle_128x4(row, 0, width);
      for (int64_t b = blocks; b < width; ++b) to[swizzle_128x4(0, b, 0)] = 0;
    }
  }
}

}  // namespace jitquant
