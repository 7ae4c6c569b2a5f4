// Eight bits with a scale for each group of a row: neighbouring threads take a block of 16 values
// each and share the group's amax through shuffles.
#pragma once

#include "jitquant/group_kernels.cuh"

namespace jitquant {

// How the lanes of a warp share out a tile: 2^log_lanes neighbours take neighbouring blocks of a
// row, and the next as many take the next row.
struct WarpShape {
  int log_lanes, log_rows;
  int group_lanes;  // of these, those that share a scale
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
  return {5 - log_rows, log_rows, static_cast<int>(group_blocks)};
}

__device__ __forceinline__ int64_t rows_there(const RowCounts& c, int64_t batch, int64_t rows) {
  if (c.counts == nullptr) return rows;
  const int64_t count = c.wide ? static_cast<const int64_t*>(c.counts)[batch]
                               : static_cast<const int32_t*>(c.counts)[batch];
  return count < rows ? count : rows;
}

// A warp a tile; the next block is loaded while one is computed. kWhole: all blocks are whole and
// aligned to 16 bytes.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads, 4)
    group_kernel(PlainSource<T> source, RowPointer<uint8_t> data, bool vector,
                 GroupNumerics numerics, GroupScales scales, RowCounts counts, WarpShape shape,
                 TileGrid grid, bool uneven) {
  const int lane = threadIdx.x & 31;
  const int lane_row = lane >> shape.log_lanes;
  const int lane_block = lane & ((1 << shape.log_lanes) - 1);
  const uint32_t blocks = static_cast<uint32_t>(blocks_of(source.cols));
  const auto tiles_of = [&](uint32_t batch) {
    const int64_t there = rows_there(counts, batch, scales.rows);
    return static_cast<uint32_t>(there > 0 ? (there + (1 << shape.log_rows) - 1) >> shape.log_rows
                                           : 0);
  };
  let_next_begin();
  wait_for_previous();
  TileWalk walk(grid, blockIdx.x * (kThreads / 32) + (threadIdx.x >> 5), uneven, tiles_of);
  Block<T> next;
  bool next_there = false;
  const auto fetch = [&] {
    if (walk.batch >= grid.batches) return;
    const int64_t row = (static_cast<int64_t>(walk.tile) << shape.log_rows) + lane_row;
    const uint32_t block = (walk.chunk << shape.log_lanes) + lane_block;
    next_there = row < rows_there(counts, walk.batch, scales.rows);
    if (next_there && block < blocks) {
      next = source.template fetch<kWhole>(source.row(walk.batch * scales.rows + row), block);
    } else {
      next = {};
    }
  };
  fetch();
#pragma unroll 1
  while (walk.batch < grid.batches) {
    const Block<T> x = next;
    const bool there = next_there;
    const uint32_t tile = walk.tile;
    const int64_t batch = walk.batch;
    const uint32_t block = (walk.chunk << shape.log_lanes) + lane_block;
    walk.next(grid, uneven, tiles_of);
    fetch();
    const GroupScale g = scale_of(numerics, lanes_amax(block_amax(x), shape.group_lanes));
    uint32_t words[4];
    encode_block(x, numerics, g, words);
    const int64_t row = (static_cast<int64_t>(tile) << shape.log_rows) + lane_row;
    if (row >= scales.rows || block >= blocks) continue;
    const bool write = there || counts.zero_rest;
    if (!there) words[0] = words[1] = words[2] = words[3] = 0;
    if (write) {
      store_bytes<kWhole>(data(batch * scales.rows + row) + int64_t{16} * block,
                          source.cols - int64_t{16} * block, vector, words);
    }
    if ((lane_block & (shape.group_lanes - 1)) == 0) {
      store_scale(scales, batch, row, block / shape.group_lanes, g, !there, write);
    }
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
  grid.tiles = static_cast<uint32_t>((s.rows + (1 << shape.log_rows) - 1) >> shape.log_rows);
  grid.chunks =
      static_cast<uint32_t>((blocks_of(x.cols) + (1 << shape.log_lanes) - 1) >> shape.log_lanes);
  constexpr int kWarps = kThreads / 32;
  const int per_sm = blocks_per_sm<&group_kernel<T, kWhole>>(kThreads, 0);
  const int64_t ctas = persistent_grid((grid.items() + kWarps - 1) / kWarps, per_sm);
  grid.set_step(ctas * kWarps, uneven);
  return launch<&group_kernel<T, kWhole>>(
      {ctas, kThreads, Start::kOverlapped}, stream, PlainSource<T>(x),
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
