// A contiguous tensor of whole blocks, indexed linearly, and the blocks of each thread.
#pragma once

#include "jitquant/sources.cuh"
#include "jitquant/walk.cuh"

namespace jitquant {

// Whether a matrix consists of whole blocks without gaps.
inline bool is_flat(const Matrix& m) {
  return m.cols % 16 == 0 && m.vector && m.n2 == m.rows && (m.s2 == m.cols || m.rows < 2);
}
template <class T>
FlatSource<T> flat_source(const Matrix& m) {
  return {static_cast<const T*>(m.data), m.rows * (m.cols / 16)};
}

template <class T>
constexpr int flat_blocks_per_sm() {
  return sizeof(T) == 2 ? 5 : 4;
}

// The blocks of values of a thread if there is one thread block per piece of work. The hardware
// starts these in order, so that concurrent reads and writes are close together.
template <class T, int kShare, int kBlock>
struct PieceBlocks {
  const FlatSource<T>& source;
  int64_t first;
  Block<T> x[kShare];

  // `backwards`: starts at the end, which is still in the L2 cache after an amax.
  __device__ __forceinline__ PieceBlocks(const FlatSource<T>& source, bool backwards)
      : source(source) {
    const uint32_t turn = backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    first = static_cast<int64_t>(turn) * (kBlock * kShare) + threadIdx.x;
  }
  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      if (first + k * kBlock < source.blocks) x[k] = source.fetch(first + k * kBlock);
    }
  }
  __device__ __forceinline__ void prefetch() const {
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      if (first + k * kBlock < source.blocks) source.prefetch(first + k * kBlock);
    }
  }
  // Calls f(block, its values).
  template <class F>
  __device__ __forceinline__ void each(F&& f) const {
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      const int64_t block = first + k * kBlock;
      if (block >= source.blocks) break;
      f(block, x[k]);
    }
  }
};

// After an amax, a thread block has more to do before its first block of values.
template <class T>
constexpr int kBlocksPerThread = sizeof(T) == 2 ? 2 : 1;  // blocks per thread
template <bool kAfterAmax>
constexpr int kThreadsPerPiece = kAfterAmax ? kThreads : kPieceThreads;
template <class T, bool kAfterAmax>
constexpr int piece_blocks_per_sm() {
  return kAfterAmax ? flat_blocks_per_sm<T>() : pieces_per_sm(flat_blocks_per_sm<T>());
}

#ifndef __CUDACC_RTC__
// Sources with kernels only for whole, aligned blocks, whose values depend only on the loaded data.
template <class Source>
constexpr bool kHasWhole = false;
template <class T>
constexpr bool kHasWhole<DeinterleaveSource<T>> = true;

// Whether such a source has whole, aligned blocks, is not empty, and fits a grid with that many
// threads in 31 bits.
template <class Source>
bool takes_whole(const Source& source) {
  const int64_t blocks = source.rows * blocks_of(source.cols);
  return source.whole() && source.row.even && blocks > 0 && blocks <= (int64_t{1} << 31) - kThreads;
}
#endif

}  // namespace jitquant
