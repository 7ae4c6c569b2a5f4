// Eight bits with a scale for each group of a row: neighbouring threads take a block of 16 values
// each and share the group's amax through shuffles.
#pragma once

#include "jitquant/group_kernels.cuh"

namespace jitquant {

constexpr int kGroupThreads = 128;
constexpr int kHeldRows = 4;  // blocks of 16 values that a thread holds, one of a row

// How the lanes of a warp share out a tile: 2^log_lanes neighbours take neighbouring blocks of a
// row, and the next as many take the next row.
struct WarpShape {
  int log_lanes, log_rows;
  int group_lanes;  // of these, those that share a scale
  int held;         // rows of a thread
};

inline WarpShape warp_shape(const GroupOutput& out, int64_t group_blocks) {
  const int64_t blocks =
      (blocks_of(out.data.cols) + group_blocks - 1) / group_blocks * group_blocks;
  const GroupScales& s = out.scales;
  // Where the scales of neighbouring rows lie together, four rows store them together.
  int log_rows = s.swizzled || s.grid.order == ScaleOrder::kColumn ? 2 : 0;
  auto fits = [&](int log) { return (32 >> log) >= group_blocks; };
  while (!fits(log_rows)) --log_rows;
  while (log_rows < 5 && fits(log_rows + 1) && (32 >> (log_rows + 1)) >= blocks) ++log_rows;
  while (log_rows > 0 && (int64_t{1} << (log_rows - 1)) >= s.rows) --log_rows;
  // With few rows, which leave most of the device idle, a thread has one.
  const int64_t warps = s.batches * ((s.rows + (1 << log_rows) - 1) >> log_rows) *
                        ((blocks + (31 >> log_rows)) >> (5 - log_rows));
  const int held = warps > 32 * sm_count() ? kHeldRows : (warps > 16 * sm_count() ? 2 : 1);
  return {5 - log_rows, log_rows, static_cast<int>(group_blocks), held};
}

__device__ __forceinline__ int64_t rows_there(const RowCounts& c, int64_t batch, int64_t rows) {
  if (c.counts == nullptr) return rows;
  const int64_t count = c.wide ? static_cast<const int64_t*>(c.counts)[batch]
                               : static_cast<const int32_t*>(c.counts)[batch];
  return count < rows ? count : rows;
}

// A warp a tile of `held` times the rows of its shape. All that a thread has of a tile is loaded
// before any of it is computed: that many loads in flight cover the latency of the memory. kWhole:
// all blocks are whole and aligned to 16 bytes.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kGroupThreads, sizeof(T) == 2 ? 5 : 4)
    group_kernel(PlainSource<T> source, RowPointer<uint8_t> data, bool vector,
                 GroupNumerics numerics, GroupScales scales, RowCounts counts, WarpShape shape,
                 TileGrid grid, bool uneven) {
  const int lane = threadIdx.x & 31;
  const int lane_row = lane >> shape.log_lanes;
  const int lane_block = lane & ((1 << shape.log_lanes) - 1);
  const uint32_t blocks = static_cast<uint32_t>(blocks_of(source.cols));
  const int tile_rows = shape.held << shape.log_rows;
  const auto tiles_of = [&](uint32_t batch) {
    const int64_t there = rows_there(counts, batch, scales.rows);
    return static_cast<uint32_t>(there > 0 ? (there + tile_rows - 1) / tile_rows : 0);
  };
  // Four lanes of a group that have nothing else to do take the scale of one of its rows each.
  const bool shares = shape.group_lanes >= kHeldRows;
  const int quarter = lane & (kHeldRows - 1);
  const bool by_division = divides(numerics);
  const int scales_of_lane = shares ? 1 : kHeldRows;
  const int group_lane = lane_block & (shape.group_lanes - 1);
  let_next_begin();
  wait_for_previous();
  TileWalk walk(grid, blockIdx.x * (kGroupThreads / 32) + (threadIdx.x >> 5), uneven, tiles_of);
#pragma unroll 1
  for (; walk.batch < grid.batches; walk.next(grid, uneven, tiles_of)) {
    const uint32_t block = (walk.chunk << shape.log_lanes) + lane_block;
    const int64_t first = static_cast<int64_t>(walk.tile) * tile_rows + lane_row;
    const int64_t above = walk.batch * scales.rows;
    const int64_t there = rows_there(counts, walk.batch, scales.rows);
    Block<T> x[kHeldRows];
#pragma unroll
    for (int k = 0; k < kHeldRows; ++k) {
      const int64_t row = first + (k << shape.log_rows);
      x[k] = {};
      if (k < shape.held && row < there && block < blocks) {
        x[k] = source.template fetch<kWhole>(source.row(above + row), block);
      }
    }
    const uint32_t group = block / shape.group_lanes;
    const auto store = [&](int k, const GroupScale& g) {
      const int64_t row = first + (k << shape.log_rows);
      // The block of this lane may not exist; the first of its group does where the group does.
      if (k >= shape.held || row >= scales.rows || group >= scales.groups) return;
      const bool present = row < there;
      store_scale(scales, walk.batch, row, group, g, !present, present || counts.zero_rest);
    };
    float b[kHeldRows], factor[kHeldRows] = {}, scale_inv[kHeldRows] = {};
#pragma unroll
    for (int k = 0; k < kHeldRows; ++k) b[k] = lanes_amax(block_amax(x[k]), shape.group_lanes);
    if (shares) b[0] = quarter < 2 ? (quarter == 0 ? b[0] : b[1]) : (quarter == 2 ? b[2] : b[3]);
#pragma unroll 1
    for (int i = 0; i < scales_of_lane; ++i) {
      const GroupScale g = scale_of(numerics, b[0]);
      if (group_lane < kHeldRows / scales_of_lane) store(shares ? quarter : i, g);
#pragma unroll
      for (int k = 0; k + 1 < kHeldRows; ++k) {
        b[k] = b[k + 1], factor[k] = factor[k + 1], scale_inv[k] = scale_inv[k + 1];
      }
      factor[kHeldRows - 1] = by_division ? group_reciprocal(g.scale_inv) : g.factor;
      scale_inv[kHeldRows - 1] = g.scale_inv;
    }
    if (shares) {
      const float f = factor[kHeldRows - 1], s = scale_inv[kHeldRows - 1];
#pragma unroll
      for (int k = 0; k < kHeldRows; ++k) {
        const int from = (lane & ~(kHeldRows - 1)) | k;
        factor[k] = __shfl_sync(0xffffffffu, f, from);
        if (by_division) scale_inv[k] = __shfl_sync(0xffffffffu, s, from);
      }
    }
    with_format(numerics.format, [&](auto format) {
#pragma unroll
      for (int k = 0; k < kHeldRows; ++k) {
        const int64_t row = first + (k << shape.log_rows);
        if (k >= shape.held || row >= scales.rows || block >= blocks) break;
        uint4 codes = make_uint4(0, 0, 0, 0);
        if (row < there) {
          codes = encode_block<format>(x[k], by_division, factor[k], scale_inv[k]);
        } else if (!counts.zero_rest) {
          break;
        }
        store_bytes<kWhole>(data(above + row) + int64_t{16} * block,
                            source.cols - int64_t{16} * block, vector, codes);
      }
    });
  }
  zero_scale_padding(scales);
}

template <class T, bool kWhole>
cudaError_t launch_group_of(const Matrix& x, const GroupNumerics& numerics, const GroupOutput& out,
                            const RowCounts& counts, int64_t group_size, cudaStream_t stream) {
  const GroupScales& s = out.scales;
  const WarpShape shape = warp_shape(out, group_size / 16);
  // Rows that are left alone are passed over, where no padding follows them.
  const bool uneven = counts.counts != nullptr && !counts.zero_rest && s.grid.stored_rows == s.rows;
  TileGrid grid = {};
  grid.batches = static_cast<uint32_t>(s.batches);
  const int tile_rows = shape.held << shape.log_rows;
  grid.tiles = static_cast<uint32_t>((s.rows + tile_rows - 1) / tile_rows);
  grid.chunks =
      static_cast<uint32_t>((blocks_of(x.cols) + (1 << shape.log_lanes) - 1) >> shape.log_lanes);
  constexpr int kWarps = kGroupThreads / 32;
  const int per_sm = blocks_per_sm<&group_kernel<T, kWhole>>(kGroupThreads, 0);
  const int64_t ctas = persistent_grid((grid.items() + kWarps - 1) / kWarps, per_sm);
  grid.set_step(ctas * kWarps, uneven);
  return launch<&group_kernel<T, kWhole>>(
      {ctas, kGroupThreads, Start::kOverlapped}, stream, PlainSource<T>(x),
      RowPointer<uint8_t>(out.data), out.data.vector, numerics, s, counts, shape, grid, uneven);
}

inline cudaError_t launch_group(const Matrix& x, const GroupNumerics& numerics,
                                const GroupOutput& out, const RowCounts& counts, int64_t group_size,
                                cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    return is_whole(x, out.data)
               ? launch_group_of<T, true>(x, numerics, out, counts, group_size, stream)
               : launch_group_of<T, false>(x, numerics, out, counts, group_size, stream);
  });
}

}  // namespace jitquant
