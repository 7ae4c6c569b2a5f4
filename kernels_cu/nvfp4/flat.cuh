// Kernels for a contiguous tensor of whole blocks and linear scales, which is counted through
// memory.
#pragma once

#include "common.cuh"
#include "jitquant/flat.cuh"

namespace jitquant {

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

// The same as flat_quantize_kernel for many blocks. After an amax a block of threads has more to do
// before its first block of values.
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

}  // namespace jitquant
