// Building blocks of the 8-bit kernels for groups, blocks and both orientations: the elements of a
// group, the place of its scale, and a walk over tiles. The format and layout of scales are
// run-time arguments, and the element format is a switch outside of the arithmetic, so that there
// are few kernels to compile.
#pragma once

#include "jitquant/device.cuh"
#include "jitquant/dispatch.cuh"
#include "jitquant/reduce.cuh"
#include "jitquant/walk.cuh"
#include "launch.h"

namespace jitquant {

// -DJITQUANT_GROUP_DIVIDED=1 builds a library for elements that are divided by their scales alone,
// =0 one for the others.
#ifdef JITQUANT_GROUP_DIVIDED
constexpr bool kTakesDivided = JITQUANT_GROUP_DIVIDED == 1, kTakesOthers = !kTakesDivided;
#else
constexpr bool kTakesDivided = true, kTakesOthers = true;
#endif

// ---- one group ---------------------------------------------------------------------------------

// Calls f with the format as a compile-time constant.
template <class F>
__device__ __forceinline__ void with_format(EightBit format, F&& f) {
  if (format == EightBit::kE4m3) {
    f(std::integral_constant<EightBit, EightBit::kE4m3>());
  } else if (format == EightBit::kE5m2) {
    f(std::integral_constant<EightBit, EightBit::kE5m2>());
  } else {
    f(std::integral_constant<EightBit, EightBit::kInt8>());
  }
}

// A largest magnitude as a word: either two halves, of which the larger counts, or one fp32. NaN is
// the largest.
template <class T>
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
  if constexpr (sizeof(T) == 2) return pair_max<T, true>(a, b);
  return float_bits(amax_keep_nan(abs_of(bits_float(a)), bits_float(b)));
}
template <class T>
__device__ __forceinline__ float amax_of_word(uint32_t m) {
  if constexpr (sizeof(T) == 4) return abs_of(bits_float(m));
  const Block<T> both = {{m}};
  return amax_keep_nan(magnitude_of(both, 0), value_of(both, 1));
}

// A block within one group, as its sixteen bytes (encode_group_block).
template <EightBit kFormat, class T>
__device__ __forceinline__ uint4 encode_block(const Block<T>& x, const GroupNumerics& n,
                                              bool by_division, float factor, float scale_inv) {
  uint32_t words[4];
  encode_group_block<kFormat>(x, n, by_division, factor, scale_inv, words);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <class T>
__device__ __forceinline__ uint4 encode_block(const Block<T>& x, const GroupNumerics& n,
                                              const GroupScale& g) {
  const bool by_division = divides(n);
  const float factor = by_division ? group_reciprocal(g.scale_inv) : g.factor;
  if (n.format == EightBit::kE4m3) {
    return encode_block<EightBit::kE4m3>(x, n, by_division, factor, g.scale_inv);
  }
  if (n.format == EightBit::kE5m2) {
    return encode_block<EightBit::kE5m2>(x, n, by_division, factor, g.scale_inv);
  }
  return encode_block<EightBit::kInt8>(x, n, by_division, factor, g.scale_inv);
}

// Stores one scale, or zero in its place.
__device__ __forceinline__ void put_scale(const GroupScales& s, int64_t batch, int64_t row,
                                          int64_t group, const GroupScale& g, bool zero) {
  if (s.format == ScaleFormat::kE8m0) {
    const int64_t at = s.swizzled ? swizzle_128x4(row, group, swizzled_blocks(s.groups))
                                  : s.grid.offset(batch, row, group);
    static_cast<uint8_t*>(s.data)[at] = static_cast<uint8_t>(zero ? 0u : g.exponent);
  } else if (s.format == ScaleFormat::kPacked) {
    const int64_t at = s.grid.offset(batch, row, group >> 2) * 4 + (group & 3);
    static_cast<uint8_t*>(s.data)[at] = static_cast<uint8_t>(zero ? 0u : g.exponent);
  } else {
    static_cast<float*>(s.data)[s.grid.offset(batch, row, group)] = zero ? 0.0f : g.scale_inv;
  }
}

// Stores the scale of a group and the padding that follows it in the row.
__device__ __forceinline__ void put_scale_and_rest(const GroupScales& s, int64_t batch, int64_t row,
                                                   int64_t group, const GroupScale& g, bool zero) {
  put_scale(s, batch, row, group, g, zero);
  if (group + 1 != s.groups || s.swizzled || s.format == ScaleFormat::kE8m0) return;
  const int64_t stored =
      s.format == ScaleFormat::kPacked ? 4 * s.grid.stored_cols : s.grid.stored_cols;
  for (int64_t h = group + 1; h < stored; ++h) put_scale(s, batch, row, h, g, true);
}

// The same, plus the padding rows after the last row. `write`: otherwise only the padding.
__device__ __forceinline__ void store_scale(const GroupScales& s, int64_t batch, int64_t row,
                                            int64_t group, const GroupScale& g, bool zero,
                                            bool write) {
  if (write) put_scale_and_rest(s, batch, row, group, g, zero);
  if (row + 1 != s.rows || s.grid.order == ScaleOrder::kRow || s.swizzled) return;
  for (int64_t r = s.rows; r < s.grid.stored_rows; ++r) {
    put_scale_and_rest(s, batch, r, group, g, true);
  }
}

// Zeroes the padding of the swizzled layout. Called by all threads of the grid.
__device__ __forceinline__ void zero_scale_padding(const GroupScales& s) {
  if (s.swizzled) {
    zero_swizzle_padding(static_cast<uint8_t*>(s.data), s.rows, s.groups);
  }
}

// ScaleGrid::offset with divisors that the host prepared, for fewer than 2^31 rows.
struct ScalePlaces {
  Divisor batch_rows;
  bool batched;
  uint32_t row_step, col_step;
  int64_t batch_step;

  explicit ScalePlaces(const GroupScales& s)
      : batch_rows(s.rows > 0 && s.rows < (int64_t{1} << 31) ? static_cast<uint32_t>(s.rows) : 1),
        batched(s.batches > 1),
        row_step(s.grid.order == ScaleOrder::kRow ? static_cast<uint32_t>(s.grid.stored_cols) : 1),
        col_step(s.grid.order == ScaleOrder::kRow ? 1 : static_cast<uint32_t>(s.grid.stored_rows)),
        batch_step(s.grid.stored_rows * s.grid.stored_cols) {}
};

// Stores one scale; rows are counted through all batches. kE8m0: for MXFP8, which has no batches.
enum class ScaleKind : int { kE8m0, kOther };
template <ScaleKind kKind>
__device__ __forceinline__ void place_scale(const GroupScales& s, const ScalePlaces& places,
                                            uint32_t row, uint32_t group, const GroupScale& g) {
  if (kKind == ScaleKind::kE8m0) {
    const uint32_t padded = swizzled_blocks<uint32_t>(static_cast<uint32_t>(s.groups));
    const int64_t at = s.swizzled ? swizzle_128x4<uint32_t>(row, group, padded)
                                  : static_cast<int64_t>(row) * places.row_step + group;
    static_cast<uint8_t*>(s.data)[at] = static_cast<uint8_t>(g.exponent);
    return;
  }
  int64_t at = 0;
  if (places.batched) {
    const uint32_t batch = places.batch_rows.quotient_of(row);
    row -= batch * places.batch_rows.divisor;
    at = batch * places.batch_step;
  }
  at += static_cast<uint64_t>(row) * places.row_step;
  if (s.format == ScaleFormat::kPacked) {
    at += static_cast<uint64_t>(group >> 2) * places.col_step;
    static_cast<uint8_t*>(s.data)[4 * at + (group & 3)] = static_cast<uint8_t>(g.exponent);
  } else {
    at += static_cast<uint64_t>(group) * places.col_step;
    static_cast<float*>(s.data)[at] = g.scale_inv;
  }
}

// Whether all blocks are whole and aligned to 16 bytes, in input and output.
inline bool is_whole(const Matrix& x, const Matrix& data) {
  return x.vector && data.vector && x.cols % 16 == 0;
}

// ---- a walk over tiles -------------------------------------------------------------------------

// Work items: `chunks` of each of `tiles` of each of `batches`, and a grid step in these units. A
// tensor of 2^32 tiles does not fit into the memory of a GPU.
struct TileGrid {
  uint32_t batches, tiles, chunks;
  uint32_t step_batches, step_tiles, step_chunks;

  int64_t items() const { return static_cast<int64_t>(batches) * tiles * chunks; }
  // A step over the items of `workers`. If batches have different numbers of tiles (`uneven`), a
  // step counts no batches.
  void set_step(int64_t workers, bool uneven) {
    const uint32_t step = static_cast<uint32_t>(workers);
    step_chunks = step % chunks;
    step_tiles = step / chunks;
    step_batches = 0;
    if (!uneven) {
      step_batches = step_tiles / tiles;
      step_tiles -= step_batches * tiles;
    }
  }
};

// The position of a worker. tiles_of(batch) is the number of tiles of a batch, if they differ.
struct TileWalk {
  uint32_t batch = 0, tile = 0, chunk = 0;

  template <class F>
  __device__ __forceinline__ TileWalk(const TileGrid& grid, uint32_t worker, bool uneven,
                                      F&& tiles_of) {
    const uint32_t q = worker / grid.chunks;
    chunk = worker - q * grid.chunks;
    tile = q;
    if (uneven) {
      settle(grid, tiles_of);
    } else if (q >= grid.tiles) {
      batch = q / grid.tiles;
      tile = q - batch * grid.tiles;
    }
  }
  template <class F>
  __device__ __forceinline__ void next(const TileGrid& grid, bool uneven, F&& tiles_of) {
    chunk += grid.step_chunks;
    tile += grid.step_tiles;
    batch += grid.step_batches;
    if (chunk >= grid.chunks) {
      chunk -= grid.chunks;
      ++tile;
    }
    if (uneven) {
      settle(grid, tiles_of);
    } else if (tile >= grid.tiles) {
      tile -= grid.tiles;
      ++batch;
    }
  }

 private:
  template <class F>
  __device__ __forceinline__ void settle(const TileGrid& grid, F&& tiles_of) {
#pragma unroll 1
    for (; batch < grid.batches; ++batch) {
      const uint32_t tiles = tiles_of(batch);
      if (tile < tiles) return;
      tile -= tiles;
    }
  }
};

}  // namespace jitquant
