// FP8 and INT8 with a scale for each square block of a matrix, or of each matrix of a stack.
#include "jitquant/group_kernels.cuh"

namespace jitquant {

constexpr int kHeld = 4;  // blocks of 16 values that a thread holds, of rows that lie apart

// A block of threads a span of blocks side by side, 16384 values in all, held in registers.
// Thread t has blocks of 16 values in column t % width of the span, in rows t / width and those
// `threads / width` apart.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2)
    block_kernel(PlainSource<T> source, RowPointer<uint8_t> data, bool vector, int64_t matrix_rows,
                 int log_side, GroupNumerics numerics, GroupScales scales, TileGrid grid) {
  // Each warp's amax of each of the at most 32 squares that it has a part of.
  __shared__ float maxima[2][kThreads / 32][32];
  const int side = 1 << log_side, log_width = 10 - log_side;  // 2^14 values, 16 of them a thread
  const int column = threadIdx.x & ((1 << log_width) - 1), first_row = threadIdx.x >> log_width;
  const int row_step = kThreads >> log_width;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int square_lanes = side >> 4;
  // Warps that have parts of the same squares: every one of them, or every other one.
  const int others = log_width > 5 ? 2 : 1;
  const uint32_t blocks = static_cast<uint32_t>(blocks_of(source.cols));
  int turn = 0;
  const auto none = [](uint32_t) { return 0u; };
  let_next_begin();
  wait_for_previous();
  TileWalk walk(grid, blockIdx.x, false, none);
#pragma unroll 1
  for (; walk.batch < grid.batches; walk.next(grid, false, none)) {
    const int64_t row = (static_cast<int64_t>(walk.tile) << log_side) + first_row;
    const int64_t above = static_cast<int64_t>(walk.batch) * matrix_rows;
    const uint32_t block = (walk.chunk << log_width) + column;
    const int64_t at = int64_t{16} * block;
    Block<T> x[kHeld];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int64_t r = row + k * row_step;
      if (r < matrix_rows && block < blocks) {
        x[k] = source.template fetch<kWhole>(source.row(above + r), block);
      } else {
        x[k] = {};
      }
    }
    float b = 0.0f;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) b = amax_keep_nan(b, block_amax(x[k]));
    b = lanes_amax(b, square_lanes);
    // Lanes of other rows.
    if (log_width < 5) b = amax_keep_nan(b, __shfl_xor_sync(0xffffffffu, b, 16));
    if (log_width < 4) b = amax_keep_nan(b, __shfl_xor_sync(0xffffffffu, b, 8));
    maxima[turn][warp][lane] = b;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      if (((w ^ warp) & (others - 1)) == 0) b = amax_keep_nan(b, maxima[turn][w][lane]);
    }
    turn ^= 1;  // a barrier stands between a reading and the next writing of either
    const GroupScale g = scale_of(numerics, b);
    const uint32_t square = block / square_lanes;
    if (first_row == 0 && (column & (square_lanes - 1)) == 0 && square < scales.groups) {
      store_scale(scales, walk.batch, walk.tile, square, g, false, true);
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int64_t r = row + k * row_step;
      if (r >= matrix_rows || block >= blocks) continue;
      store_bytes<kWhole>(data(above + r) + at, source.cols - at, vector,
                          encode_block(x[k], numerics, g));
    }
  }
}

namespace {

template <class T, bool kWhole>
cudaError_t launch_blocks(const Matrix& w, int64_t matrix_rows, int log_side,
                          const GroupNumerics& numerics, const GroupOutput& out,
                          cudaStream_t stream) {
  TileGrid grid = {};
  grid.batches = static_cast<uint32_t>(out.scales.batches);
  grid.tiles = static_cast<uint32_t>(out.scales.rows);
  const int log_width = 10 - log_side;
  grid.chunks = static_cast<uint32_t>((blocks_of(w.cols) + (1 << log_width) - 1) >> log_width);
  const int per_sm = blocks_per_sm<&block_kernel<T, kWhole>>(kThreads, 0);
  const int64_t ctas = persistent_grid(grid.items(), per_sm);
  grid.set_step(ctas, false);
  return launch<&block_kernel<T, kWhole>>({ctas, kThreads, Start::kOverlapped}, stream,
                                          PlainSource<T>(w), RowPointer<uint8_t>(out.data),
                                          out.data.vector, matrix_rows, log_side, numerics,
                                          out.scales, grid);
}

}  // namespace

// The rows of `out.scales` are rows of blocks.
cudaError_t launch_quantize_block(const Matrix& w, int64_t matrix_rows, int64_t side,
                                  const GroupNumerics& numerics, const GroupOutput& out,
                                  cudaStream_t stream) {
  if (w.rows == 0) return cudaSuccess;
  int log_side = 4;
  while ((int64_t{1} << log_side) < side) ++log_side;
  return dispatch(w.dtype, [&](auto element) {
    using T = decltype(element);
    return is_whole(w, out.data)
               ? launch_blocks<T, true>(w, matrix_rows, log_side, numerics, out, stream)
               : launch_blocks<T, false>(w, matrix_rows, log_side, numerics, out, stream);
  });
}

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
