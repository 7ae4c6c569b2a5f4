// Kernels for a contiguous tensor of whole blocks and linear scales, which is counted through
// memory.
#pragma once

#include "common.cuh"

namespace jitquant {

template <class T>
constexpr int flat_blocks_per_sm() {
  return sizeof(T) == 2 ? 5 : 4;
}

// As quantize_kernel.
template <class T>
__global__ void __launch_bounds__(kThreads, flat_blocks_per_sm<T>())
    flat_quantize_kernel(FlatSource<T> source, GlobalScale scale, Nvfp4Recipe recipe,
                         Nvfp4Output out) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t block = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  Block<T> next;
  auto fetch = [&] {
    if (block < source.blocks) next = source.fetch(block);
  };
  begin_overlapped(fetch, [&] {
    if (prefetches_first(scale) && block < source.blocks) source.prefetch(block);
  });
  const Nvfp4Encoding encoding = tensor_encoding(scale, recipe, reduce);
#pragma unroll 1
  while (block < source.blocks) {
    const Block<T> x = next;
    const int64_t here = block;
    block += step;
    fetch();
    const Nvfp4Codes codes = nvfp4_quantize_block(x, block_amax(x), encoding);
    reinterpret_cast<uint2*>(out.codes)[here] = make_uint2(codes.low, codes.high);
    out.scales[here] = codes.scale;
  }
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

// The same as flat_quantize_kernel for many blocks. After an amax a block of threads has more to do
// before its first block of values.
template <class T>
constexpr int kOnceShare = sizeof(T) == 2 ? 2 : 1;  // blocks of a thread
template <bool kAfterAmax>
constexpr int kOnceThreads = kAfterAmax ? kThreads : kPieceThreads;
template <class T, bool kAfterAmax>
constexpr int once_blocks_per_sm() {
  return kAfterAmax ? flat_blocks_per_sm<T>() : pieces_per_sm(flat_blocks_per_sm<T>());
}
template <class T, bool kAfterAmax>
__global__ void __launch_bounds__(kOnceThreads<kAfterAmax>, once_blocks_per_sm<T, kAfterAmax>())
    flat_quantize_once_kernel(FlatSource<T> source, GlobalScale scale, Nvfp4Recipe recipe,
                              Nvfp4Output out) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  PieceBlocks<T, kOnceShare<T>, kOnceThreads<kAfterAmax>> blocks(source, kAfterAmax);
  begin_overlapped([&] { blocks.fetch(); },
                   [&] {
                     if (kAfterAmax && is_first()) blocks.prefetch();
                   });
  const Nvfp4Encoding encoding = tensor_encoding(scale, recipe, reduce);
  blocks.each([&](int64_t block, const Block<T>& x) {
    const Nvfp4Codes codes = nvfp4_quantize_block(x, block_amax(x), encoding);
    reinterpret_cast<uint2*>(out.codes)[block] = make_uint2(codes.low, codes.high);
    out.scales[block] = codes.scale;
  });
}

// Whether a matrix is whole blocks that follow each other without a gap.
inline bool is_flat(const Matrix& m) {
  return m.cols % 16 == 0 && m.vector && m.n2 == m.rows && (m.s2 == m.cols || m.rows < 2);
}
template <class T>
FlatSource<T> flat_source(const Matrix& m) {
  return {static_cast<const T*>(m.data), m.rows * (m.cols / 16)};
}

}  // namespace jitquant
