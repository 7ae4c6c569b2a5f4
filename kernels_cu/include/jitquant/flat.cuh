// A contiguous tensor of whole blocks, which is counted through memory: which blocks a thread has.
#pragma once

#include "jitquant/sources.cuh"
#include "jitquant/walk.cuh"

namespace jitquant {

// Whether a matrix is whole blocks that follow each other without a gap.
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

// The blocks of values of a thread where there is a block of threads for each piece of work: the
// hardware starts these in order, so that what is read and written at a time lies together.
template <class T, int kShare, int kBlock>
struct PieceBlocks {
  const FlatSource<T>& source;
  int64_t first;
  Block<T> x[kShare];

  // `backwards`: from the end to the beginning, which after an amax is in the L2 cache still.
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

// After an amax a block of threads has more to do before its first block of values.
template <class T>
constexpr int kOnceShare = sizeof(T) == 2 ? 2 : 1;  // blocks of a thread
template <bool kAfterAmax>
constexpr int kOnceThreads = kAfterAmax ? kThreads : kPieceThreads;
template <class T, bool kAfterAmax>
constexpr int once_blocks_per_sm() {
  return kAfterAmax ? flat_blocks_per_sm<T>() : pieces_per_sm(flat_blocks_per_sm<T>());
}

#ifndef __CUDACC_RTC__
// Sources with kernels for whole, aligned blocks alone, whose values are what is loaded alone.
template <class Source>
constexpr bool kHasWhole = false;
template <class T>
constexpr bool kHasWhole<DeinterleaveSource<T>> = true;

// Whether such a source is of whole, aligned blocks, there are any, and a grid of as many threads
// counts them in 31 bits.
template <class Source>
bool takes_whole(const Source& source) {
  const int64_t blocks = source.rows * blocks_of(source.cols);
  return source.whole() && source.row.even && blocks > 0 && blocks <= (int64_t{1} << 31) - kThreads;
}
#endif

}  // namespace jitquant
