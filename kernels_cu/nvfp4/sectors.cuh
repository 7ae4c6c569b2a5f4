// Swizzled scales of whole, aligned blocks, which are counted through the scales.
#pragma once

#include "common.cuh"

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

// Sources of which quantize_kernel walks over sectors. Where a block of values is more to load, it
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
#endif

}  // namespace jitquant
