// Kernels for swizzled scales of whole, aligned blocks, which are counted through the scales.
#pragma once

#include "flat.cuh"

namespace jitquant {

// A walk over swizzled scales by sectors, the 32 bytes that memory is written in: those of 4 blocks
// of the rows {r, r + 1} + {0, 32, 64, 96} for an even r. A warp takes one, a lane a byte of it,
// and the next warp the same rows of the next blocks. What all threads have in common is worked out
// on the host, divisions above all.
struct SectorWalk {
  Divisor tiles;   // of four blocks, in a row
  uint32_t pitch;  // from the scales of 128 rows to those of the next, less those of a tile
  uint32_t step_rows, step_tiles;

  // For as many warps.
  SectorWalk(uint32_t tiles, int64_t warps) : tiles(tiles), pitch((tiles - 1) * 512) {
    step_rows = this->tiles.quotient_of(static_cast<uint32_t>(warps));
    step_tiles = static_cast<uint32_t>(warps) - step_rows * tiles;
  }
};

// Where a lane of such a walk is.
struct SectorPlace {
  uint32_t rows, tile;  // eight rows and four blocks, counted

  __device__ __forceinline__ SectorPlace(const SectorWalk& walk, uint32_t sector) {
    rows = walk.tiles.quotient_of(sector);
    tile = sector - rows * walk.tiles.divisor;
  }
  __device__ __forceinline__ void next(const SectorWalk& walk) {
    tile += walk.step_tiles;
    const bool past = tile >= walk.tiles.divisor;
    tile -= past ? walk.tiles.divisor : 0;
    rows += walk.step_rows + (past ? 1 : 0);
  }
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x & 31; }
  __device__ __forceinline__ uint32_t row() const {
    return rows * 2 + (rows >> 4) * 96 + (lane() >> 4) + (lane() & 12) * 8;
  }
  __device__ __forceinline__ uint32_t block() const { return tile * 4 + (lane() & 3); }
  // swizzle_128x4 of the two.
  __device__ __forceinline__ uint32_t scale(const SectorWalk& walk) const {
    return rows * 32 + (rows >> 4) * walk.pitch + tile * 512 + lane();
  }
};

// The blocks of a FlatSource by row, of which there are less than 2^32.
template <class T>
struct FlatRows {
  using Value = Block<T>;
  using Fetched = Block<T>;
  using Row = uint32_t;  // its first block
  static constexpr bool kReadsOnlyInputs = true;
  FlatSource<T> source;
  uint32_t width;

  __device__ __forceinline__ Row row(uint32_t r) const { return r * width; }
  template <bool kWhole>
  __device__ __forceinline__ Fetched fetch(Row first, uint32_t block) const {
    return source.fetch(first + block);
  }
  __device__ __forceinline__ void prefetch(Row first, uint32_t block) const {
    source.prefetch(first + block);
  }
  template <bool kWhole>
  __device__ __forceinline__ Value value(const Fetched& x, Row, uint32_t) const {
    return x;
  }
};

// Blocks of quantize_tiles_kernel that a multiprocessor has to hold: as of quantize_kernel, but for
// a plain tensor as of flat_quantize_kernel.
template <class Source>
constexpr int tiles_blocks_per_sm = quantize_blocks_per_sm<Source>();
template <class T>
constexpr int tiles_blocks_per_sm<PlainSource<T>> = sizeof(T) == 2 ? 5 : 3;
template <class T>
constexpr int tiles_blocks_per_sm<FlatRows<T>> = flat_blocks_per_sm<T>();
template <>
inline constexpr int tiles_blocks_per_sm<NormalizedSource<PlainSource<float>>> = 2;

// As quantize_kernel. Along a row swizzled scales are 4 bytes here and there, of which memory
// writes no less than 32: so a warp takes what shares a sector. Padding is
// what has no row or block, and is written with the rest.
template <class Source>
__global__ void __launch_bounds__(kThreads, tiles_blocks_per_sm<Source>)
    quantize_tiles_kernel(Source source, GlobalScale scale, Nvfp4Recipe recipe, Nvfp4Output out,
                          SectorWalk walk) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const uint32_t row_count = static_cast<uint32_t>(out.rows);
  const uint32_t width = static_cast<uint32_t>(out.blocks);
  SectorPlace place(walk, blockIdx.x * (kThreads / 32) + threadIdx.x / 32);
  typename Source::Fetched next;
  uint32_t row, block;  // of `next`
  bool exists;
  auto find = [&] {
    row = place.row(), block = place.block();
    exists = row < row_count && block < width;
  };
  auto fetch = [&] {
    if (exists) next = source.template fetch<true>(source.row(row), block);
  };
  find();
  begin_overlapped(fetch, [&] {
    if constexpr (Source::kReadsOnlyInputs) {
      if (prefetches_first(scale) && exists) source.prefetch(source.row(row), block);
    }
  });
  const Nvfp4Encoding encoding = tensor_encoding(scale, recipe, reduce);
#pragma unroll 1
  while (place.rows * 8 < ((row_count + 127) & ~127u)) {
    const typename Source::Fetched fetched = next;
    const uint32_t here = row, here_block = block;
    const bool existed = exists;
    const uint32_t to = place.scale(walk);
    place.next(walk);
    find();
    fetch();
    uint8_t stored = 0;
    if (existed) {
      const typename Source::Row p = source.row(here);
      const typename Source::Value v = source.template value<true>(fetched, p, here_block);
      const Nvfp4Codes codes = quantize_value(source, p, v, encoding);
      reinterpret_cast<uint2*>(out.codes)[here * width + here_block] =
          make_uint2(codes.low, codes.high);
      stored = codes.scale;
    }
    out.scales[to] = stored;
  }
}

// The same as flat_quantize_once_kernel, of as many sectors as a warp has in blocks there: those of
// a block of threads are of the same 128 rows.
template <class T, bool kAfterAmax>
__global__ void __launch_bounds__(kOnceThreads<kAfterAmax>, once_blocks_per_sm<T, kAfterAmax>())
    tiles_once_kernel(FlatSource<T> source, GlobalScale scale, Nvfp4Recipe recipe, Nvfp4Output out,
                      SectorWalk walk) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  constexpr int kShare = kOnceShare<T>, kOwnWarps = kOnceThreads<kAfterAmax> / 32;
  const uint32_t row_count = static_cast<uint32_t>(out.rows);
  const uint32_t width = static_cast<uint32_t>(out.blocks);
  const uint32_t turn = kAfterAmax ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t sector = turn * (kOwnWarps * kShare) + threadIdx.x / 32;
  Block<T> x[kShare];
  uint32_t at[kShare], to[kShare];
  constexpr uint32_t kNone = ~0u;  // what is no block
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

// Sources of which quantize_tiles_kernel is compiled. Where a block of values is more to load, it
// costs more than the stores of scales do.
template <class Source>
constexpr bool kByTiles = sizeof(typename Source::Fetched) <= 64;

#ifndef __CUDACC_RTC__
// Whether scales are those of the kernels that take sectors: swizzled, of one gsa, and so many that
// their places fit in 32 bits.
inline bool by_tiles(const GlobalScale& scale, const Nvfp4Output& out) {
  return out.swizzled && !is_by_row(scale) &&
         swizzled_rows(out.rows) <= UINT32_MAX / padded_blocks(out);
}

constexpr int kWarps = kThreads / 32;

// Of the scales, padding included, in tiles of 128 rows by 4 blocks.
constexpr int kSectorsOfTile = 512 / 32;
inline int64_t sectors(const Nvfp4Output& out) {
  return swizzled_rows(out.rows) / 128 * (padded_blocks(out) / 4) * kSectorsOfTile;
}
inline SectorWalk sector_walk(const Nvfp4Output& out, int64_t grid) {
  return SectorWalk(static_cast<uint32_t>(padded_blocks(out) / 4), grid * kWarps);
}

template <class Source>
cudaError_t launch_tiles(const Source& source, const GlobalScale& scale, Nvfp4Recipe recipe,
                         const Nvfp4Output& out, cudaStream_t stream) {
  const int64_t grid = persistent_grid(sectors(out) / kWarps, tiles_blocks_per_sm<Source>);
  return launch<&quantize_tiles_kernel<Source>>({grid, kThreads, Start::kOverlapped}, stream,
                                                source, scale, recipe, out, sector_walk(out, grid));
}
#endif

}  // namespace jitquant
