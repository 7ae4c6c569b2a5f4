// The kernels for contiguous tensors of many whole blocks, and for the second launch of a norm. One
// thread block per piece of work: the hardware starts them in order, so that concurrent reads and
// writes are close together.
#pragma once

#include "jitquant/flat.cuh"
#include "sectors.cuh"

namespace jitquant {

// Linear scales: indexed linearly.
template <class T, bool kAfterAmax>
__global__ void __launch_bounds__(kThreadsPerPiece<kAfterAmax>,
                                  piece_blocks_per_sm<T, kAfterAmax>())
    flat_piece_kernel(FlatSource<T> source, GlobalScale scale, Nvfp4Recipe recipe,
                      Nvfp4Output out) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  PieceBlocks<T, kBlocksPerThread<T>, kThreadsPerPiece<kAfterAmax>> blocks(source, kAfterAmax);
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

// Normalized rows, evenly strided, of whole, aligned blocks with linear scales. Starts at the end,
// as above. All indices have 32 bits.
template <class T>
__global__ void __launch_bounds__(kThreads, piece_blocks_per_sm<T, true>() - 1)
    norm_piece_kernel(NormalizedSource<PlainSource<T>> source, GlobalScale scale,
                      Nvfp4Recipe recipe, Nvfp4Output out, uint32_t count, Divisor width) {
  using Source = NormalizedSource<PlainSource<T>>;
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  constexpr int kShare = kBlocksPerThread<T>;
  const uint32_t first = (gridDim.x - 1 - blockIdx.x) * (blockDim.x * kShare) + threadIdx.x;
  uint32_t row[kShare], block[kShare];
  Block<T> x[kShare];
  float inverse[kShare];
  begin_overlapped(
      [&] {
#pragma unroll
        for (int k = 0; k < kShare; ++k) {
          const uint32_t i = first + k * blockDim.x;
          row[k] = width.quotient_of(i), block[k] = i - row[k] * width.divisor;
          if (i < count) {
            const PlainSource<T>& plain = source.source;
            x[k] = plain.template fetch<true>(plain.row.even_row(row[k]), block[k]);
            inverse[k] = source.norm.inv_rms[row[k]];
          }
        }
      },
      [] {});
  const bool by_row = is_by_row(scale);
  Nvfp4Encoding encoding = by_row ? Nvfp4Encoding{} : tensor_encoding(scale, recipe, reduce);
#pragma unroll
  for (int k = 0; k < kShare; ++k) {
    const uint32_t i = first + k * blockDim.x;
    if (i >= count) break;
    if (by_row) encoding = row_encoding(scale, row[k], block[k], recipe);
    const typename Source::Row p = {nullptr, inverse[k]};
    const Block<float> v = source.template value<true>(x[k], p, block[k]);
    const Nvfp4Codes codes = quantize_value(source, p, v, encoding);
    reinterpret_cast<uint2*>(out.codes)[i] = make_uint2(codes.low, codes.high);
    out.scales[i] = codes.scale;
  }
}

// Swizzled scales: a warp takes as many sectors as it would have blocks above. The sectors of a
// thread block belong to the same 128 rows.
template <class T, bool kAfterAmax>
__global__ void __launch_bounds__(kThreadsPerPiece<kAfterAmax>,
                                  piece_blocks_per_sm<T, kAfterAmax>())
    sector_piece_kernel(FlatSource<T> source, GlobalScale scale, Nvfp4Recipe recipe,
                        Nvfp4Output out, SectorWalk walk) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  constexpr int kShare = kBlocksPerThread<T>, kOwnWarps = kThreadsPerPiece<kAfterAmax> / 32;
  const uint32_t row_count = static_cast<uint32_t>(out.rows);
  const uint32_t width = static_cast<uint32_t>(out.blocks);
  const uint32_t turn = kAfterAmax ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t sector = turn * (kOwnWarps * kShare) + threadIdx.x / 32;
  Block<T> x[kShare];
  uint32_t at[kShare], to[kShare];
  constexpr uint32_t kNone = ~0u;  // marks a missing block
#pragma unroll
  for (int k = 0; k < kShare; ++k) {
    const SectorPlace place(walk, sector + k * kOwnWarps);
    const uint32_t row = place.row(), block = place.block();
    at[k] = row < row_count && block < width ? row * width + block : kNone;
    to[k] = place.scale(walk);
  }
  auto fetch = [&] {
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      if (at[k] != kNone) x[k] = source.fetch(at[k]);
    }
  };
  begin_overlapped(fetch, [&] {
    if constexpr (kAfterAmax) {
      if (!is_first()) return;
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        if (at[k] != kNone) source.prefetch(at[k]);
      }
    }
  });
  const Nvfp4Encoding encoding = tensor_encoding(scale, recipe, reduce);
#pragma unroll
  for (int k = 0; k < kShare; ++k) {
    uint8_t stored = 0;
    if (at[k] != kNone) {
      const Nvfp4Codes codes = nvfp4_quantize_block(x[k], block_amax(x[k]), encoding);
      reinterpret_cast<uint2*>(out.codes)[at[k]] = make_uint2(codes.low, codes.high);
      stored = codes.scale;
    }
    out.scales[to[k]] = stored;
  }
}

}  // namespace jitquant
