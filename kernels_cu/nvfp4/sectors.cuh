// Swizzled scales of whole, aligned blocks, indexed in the order of the scales.
#pragma once

#include "common.cuh"

namespace jitquant {

// A walk over swizzled scales by sectors (swizzle.cuh). A warp takes a sector, a lane one of its
// bytes, and the next warp the same rows of the next blocks. The host precomputes what all threads
// share, divisions above all.
struct SectorWalk {
  Divisor tiles;   // sets of four blocks in a row
  uint32_t pitch;  // sector_pitch
  uint32_t step_rows, step_tiles;

  // For a walk by `warps` warps.
  SectorWalk(uint32_t tiles, int64_t warps) : tiles(tiles), pitch(sector_pitch(tiles)) {
    step_rows = this->tiles.quotient_of(static_cast<uint32_t>(warps));
    step_tiles = static_cast<uint32_t>(warps) - step_rows * tiles;
  }
};

// The position of a lane in the walk.
struct SectorPlace {
  uint32_t rows, tile;  // indices of a set of eight rows and of a set of four blocks

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
  __device__ __forceinline__ uint32_t row() const { return sector_row(rows, lane()); }
  __device__ __forceinline__ uint32_t block() const { return tile * 4 + (lane() & 3); }
  // swizzle_128x4 of row() and block().
  __device__ __forceinline__ uint32_t scale(const SectorWalk& walk) const {
    return sector_offset(rows, tile, walk.pitch) + lane();
  }
};

// The blocks of a FlatSource by row; fewer than 2^32.
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

// Sources for which quantize_kernel walks over sectors. If a block of values needs more loads,
// these cost more than the stores of scales.
template <class Source>
constexpr bool kBySectors = sizeof(typename Source::Fetched) <= 64;

#ifndef __CUDACC_RTC__
// Whether the kernels that take sectors apply: swizzled scales, one gsa, and offsets that fit in 32
// bits.
inline bool by_sectors(const GlobalScale& scale, const Nvfp4Output& out) {
  return out.swizzled && !is_by_row(scale) && swizzled_size(out.rows, out.blocks) <= UINT32_MAX;
}

constexpr int kWarps = kThreads / 32;

// The sectors of the scales, including padding, in tiles of 128 rows by 4 blocks.
constexpr int kSectorsOfTile = 512 / 32;
inline int64_t sectors(const Nvfp4Output& out) {
  return swizzled_size(out.rows, out.blocks) / 32;
}
inline SectorWalk sector_walk(const Nvfp4Output& out, int64_t grid) {
  return SectorWalk(static_cast<uint32_t>(padded_blocks(out) / 4), grid * kWarps);
}
#endif

}  // namespace jitquant
