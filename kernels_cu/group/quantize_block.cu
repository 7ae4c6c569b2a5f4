// FP8 and INT8 with one scale per square block of a matrix, or of each matrix in a stack.
#include "few.cuh"

namespace jitquant {

constexpr int kHeld = 4;  // blocks of 16 values per thread, from strided rows

// Divisors for spans: `chunks` of each of `tiles` of each matrix.
struct Spans {
  Divisor chunks, tiles;
};

// Minimum thread blocks per SM, which limits the registers.
template <class T, bool kWhole>
constexpr int spans_per_sm() {
  if (sizeof(T) == 4 || !kWhole) return 2;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return 2;  // nvcc needs more registers for this architecture
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return 3;
#endif
  return 4;
}

// One thread block per span of adjacent squares, 16384 values in total, held in registers. Thread t
// has the blocks of 16 values in column t % width of the span, in row t / width and every `threads
// / width` rows after it. kDivides: elements are divided by scales that are not powers of two.
template <class T, bool kWhole, bool kDivides>
__global__ void __launch_bounds__(kThreads, spans_per_sm<T, kWhole>())
    block_kernel(PlainSource<T> source, RowPointer<uint8_t> data, bool vector, int64_t matrix_rows,
                 int log_side, GroupNumerics numerics, GroupScales scales, Spans spans) {
  // Each warp's amax of each square that it covers, at most 32.
  __shared__ float maxima[kThreads / 32][32];
  const int side = 1 << log_side, log_width = 10 - log_side;  // 2^14 values, 16 of them per thread
  const int column = threadIdx.x & ((1 << log_width) - 1), first_row = threadIdx.x >> log_width;
  const int row_step = kThreads >> log_width;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int square_lanes = side >> 4;
  const uint32_t blocks = static_cast<uint32_t>(blocks_of(source.cols));
  const uint32_t all_tiles = spans.chunks.quotient_of(blockIdx.x);
  const uint32_t batch = spans.tiles.quotient_of(all_tiles);
  const uint32_t tile = all_tiles - batch * spans.tiles.divisor;
  const uint32_t chunk = blockIdx.x - all_tiles * spans.chunks.divisor;
  // The rows of a matrix are evenly strided.
  const int64_t top = static_cast<int64_t>(tile) << log_side;
  const int64_t first = static_cast<int64_t>(batch) * matrix_rows + top;
  const uint32_t block = (chunk << log_width) + column;
  const int64_t at = int64_t{16} * block;
  const bool inside =
      top + side <= matrix_rows && ((chunk + 1) << log_width) <= blocks;  // the whole span exists
  const auto is_there = [&](int k) {
    return top + first_row + k * row_step < matrix_rows && block < blocks;
  };
  const T* const from = source.row(first) + first_row * source.row.s2;
  const int64_t source_step = row_step * source.row.s2;
  if (is_first()) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (is_there(k)) source.prefetch(from + k * source_step, block);
    }
  }
  wait_for_previous();
  let_next_begin();

  Block<T> x[kHeld];
  if (kWhole && inside) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      x[k] = source.template fetch<kWhole>(from + k * source_step, block);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      x[k] = {};
      if (is_there(k)) x[k] = source.template fetch<kWhole>(from + k * source_step, block);
    }
  }
  Amax<T, true> amax;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) amax.add(x[k]);
  float b = lanes_amax(amax.result(), square_lanes);
  // Combines lanes of other rows.
  if (log_width < 5) b = amax_with_lane(b, 16);
  if (log_width < 4) b = amax_with_lane(b, 8);
  maxima[warp][lane] = b;
  __syncthreads();
  // Combines the warps that cover the same squares: all of them, or every other one, each counted
  // twice.
  const int others = log_width > 5 ? 2 : 1;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    const int other = (w * others + (warp & (others - 1))) & (kThreads / 32 - 1);
    b = amax_keep_nan(b, maxima[other][lane]);
  }
  const GroupScale g = group_scale(numerics, b);
  const uint32_t square = block / square_lanes;
  if (first_row == 0 && (column & (square_lanes - 1)) == 0 && square < scales.groups) {
    store_scale(scales, batch, tile, square, g, false, true);
  }
  uint8_t* const to = data(first) + first_row * data.s2 + at;
  const int64_t data_step = row_step * data.s2;
  const float factor = kDivides ? group_reciprocal(g.scale_inv) : g.factor;
  with_format(numerics.format, [&](auto format) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (!(kWhole && inside) && !is_there(k)) break;
      store_bytes<kWhole>(to + k * data_step, source.cols - at, vector,
                          encode_block<format>(x[k], numerics, kDivides, factor, g.scale_inv));
    }
  });
}

// ---- few rows ----------------------------------------------------------------------------------

constexpr int kFewRows = 128;  // one row of squares

// One thread block per square of `rows` by 128. Sixteen threads have a row, and kHeld of these
// `blockDim.x / 16` rows apart. `width` is a row in eights. As few_groups_kernel: little code and
// few arguments, without division by scales or bounds of the elements, and with scales in fp32.
template <class T, EightBit kFormat, int kHeld>
__global__ void __launch_bounds__(512 * kHeld)
    few_rows_kernel(PlainEights<T> source, uint8_t* data, float* scales, uint32_t rows,
                    uint32_t width, GroupNumerics numerics) {
  __shared__ BlockReduce::Scratch scratch;
  numerics.format = kFormat;
  numerics.bounded = false;
  const uint32_t row = threadIdx.x >> 4, column = 16 * blockIdx.x + (threadIdx.x & 15);
  // Threads without values have those of others.
  const auto place = [&](int k) {
    return min(row + k * (blockDim.x >> 4), rows - 1) * width + min(column, width - 1);
  };
#pragma unroll
  for (int k = 0; k < kHeld; ++k) source.prefetch_at(place(k));
  wait_for_previous();
  let_next_begin();
  Eight<T> x[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) x[k] = source.fetch(place(k));
  uint32_t m = amax_word(x[0]);
#pragma unroll
  for (int k = 1; k < kHeld; ++k) m = larger<T>(m, amax_word(x[k]));
  // NaN is the largest as an integer too.
  const float b = BlockReduce(scratch).max(amax_of_word<T>(m));
  const GroupScale g = group_scale(numerics, b);
  if (threadIdx.x == 0) scales[blockIdx.x] = g.scale_inv;
  if (column >= width) return;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (row + k * (blockDim.x >> 4) >= rows) break;
    reinterpret_cast<uint2*>(data)[place(k)] = encode_eight<kFormat>(x[k], g.factor);
  }
}

// ---- launching ---------------------------------------------------------------------------------

namespace {

template <class T, bool kWhole, bool kDivides>
cudaError_t launch_spans(const Matrix& w, int64_t matrix_rows, int log_side,
                         const GroupNumerics& numerics, const GroupOutput& out,
                         cudaStream_t stream) {
  const int log_width = 10 - log_side;
  const int64_t chunks = (blocks_of(w.cols) + (1 << log_width) - 1) >> log_width;
  const GroupScales& s = out.scales;
  const Spans spans = {Divisor(static_cast<uint32_t>(chunks)),
                       Divisor(static_cast<uint32_t>(s.rows))};
  return launch<&block_kernel<T, kWhole, kDivides>>(
      {s.batches * s.rows * chunks, kThreads, Start::kOverlapped}, stream, PlainSource<T>(w),
      RowPointer<uint8_t>(out.data), out.data.vector, matrix_rows, log_side, numerics, s, spans);
}

#ifndef __CUDACC_RTC__
template <class T>
cudaError_t launch_few_rows(const Matrix& w, const GroupNumerics& numerics, const GroupOutput& out,
                            cudaStream_t stream) {
  return dispatch_format(numerics.format, [&](auto format) {
    const auto launch_held = [&](auto held) {
      constexpr int kHeld = held;
      // Whole warps.
      const int threads = static_cast<int>((w.rows + 2 * kHeld - 1) / (2 * kHeld)) * 32;
      return launch<&few_rows_kernel<T, format, kHeld>>(
          {out.scales.groups, threads, Start::kOverlapped}, stream,
          PlainEights<T>{static_cast<const T*>(w.data)},
          static_cast<uint8_t*>(const_cast<void*>(out.data.data)),
          static_cast<float*>(out.scales.data), static_cast<uint32_t>(w.rows),
          static_cast<uint32_t>(w.cols / 8), numerics);
    };
    if (w.rows <= kFewRows / 4) return launch_held(std::integral_constant<int, 1>());
    return launch_held(std::integral_constant<int, 2>());
  });
}
#endif

}  // namespace

#ifndef __CUDACC_RTC__
// The rows of `out.scales` are rows of blocks.
cudaError_t launch_quantize_block(const Matrix& w, int64_t block_rows,
                                  const GroupNumerics& numerics, const GroupOutput& out,
                                  cudaStream_t stream) {
  if (w.rows == 0 || w.cols == 0) return cudaSuccess;
  const int64_t matrix_rows = w.rows / out.scales.batches;
  int log_side = 4;
  while ((int64_t{1} << log_side) < block_rows) ++log_side;
  const bool whole = is_whole(w, out.data);
  const GroupScales& s = out.scales;
  const bool few = whole && w.rows <= kFewRows && log_side == 7 && s.batches == 1 &&
                   w.rows * w.cols <= 8 * kFewEights * sm_count() &&
                   (w.rows == 1 || (w.s2 == w.cols && out.data.s2 == w.cols)) &&
                   s.format <= ScaleFormat::kPowerOfTwo && s.grid.stored_rows == 1 &&
                   s.grid.stored_cols == s.groups && !divides(numerics) && !numerics.bounded;
  return dispatch(w.dtype, [&](auto element) {
    using T = decltype(element);
    const auto launch = [&](auto is_whole, auto by_division) {
      return launch_spans<T, is_whole, by_division>(w, matrix_rows, log_side, numerics, out,
                                                    stream);
    };
    constexpr std::true_type yes = {};
    constexpr std::false_type no = {};
    if constexpr (kTakesDivided) {
      if (divides(numerics)) return whole ? launch(yes, yes) : launch(no, yes);
    }
    if constexpr (kTakesOthers) {
      if (few) return launch_few_rows<T>(w, numerics, out, stream);
      if (!divides(numerics)) return whole ? launch(yes, no) : launch(no, no);
    }
    return kLacksKernels;
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
