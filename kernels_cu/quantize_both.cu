// Groups along the rows of a matrix and, of its transpose, along its columns, from one reading: a
// tile goes through shared memory. Groups of neighbours, and MXFP8.
#include "jitquant/group_kernels.cuh"

namespace jitquant {

constexpr int kSide = 128;  // of a tile
constexpr int kWarps = kThreads / 32;
constexpr int kPadded = kSide / 16 * 20;  // 16 columns, then 4 floats that spread them over banks

// What is written of the transpose.
struct TransposedOutput {
  uint8_t* data;  // (K, M), contiguous
  bool vector;    // every row of it starts on a multiple of 16 bytes
  GroupScales scales;
};

// Largest magnitudes of four blocks, value by value.
template <class T>
__device__ __forceinline__ Block<T> columns_amax(const Block<T> (&x)[4]) {
  Block<T> m;
#pragma unroll
  for (int i = 0; i < Block<T>::kWords; ++i) {
    m.words[i] = pair_max<T, true>(pair_max<T, true>(x[0].words[i], x[1].words[i]),
                                   pair_max<T, true>(x[2].words[i], x[3].words[i]));
  }
#pragma unroll
  for (int i = 0; i < Block<T>::kWords; ++i) {
    const uint32_t w = pair_max<T, true>(m.words[i], __shfl_xor_sync(0xffffffffu, m.words[i], 8));
    m.words[i] = pair_max<T, true>(w, __shfl_xor_sync(0xffffffffu, w, 16));
  }
  return m;
}
__device__ __forceinline__ Block<float> columns_amax(const Block<float> (&x)[4]) {
  Block<float> m;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float b = amax_keep_nan(abs_of(value_of(x[0], i)), value_of(x[1], i));
    b = amax_keep_nan(amax_keep_nan(b, value_of(x[2], i)), value_of(x[3], i));
    b = amax_keep_nan(b, __shfl_xor_sync(0xffffffffu, b, 8));
    b = amax_keep_nan(b, __shfl_xor_sync(0xffffffffu, b, 16));
    m.words[i] = float_bits(b);
  }
  return m;
}

// A block of threads a tile of 128x128, or, for groups of 256, a square of four tiles, which is
// read twice: for the amaxes, then to be cast. A thread has 16 columns of four neighbouring rows,
// so that four rows of a column are one word of the transpose.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2)
    both_kernel(PlainSource<T> source, RowPointer<uint8_t> data, bool vector,
                GroupNumerics numerics, GroupScales scales, TransposedOutput transposed,
                int log_group, uint32_t items, uint32_t wide) {
  __shared__ float column_maxima[2][kWarps][2 * kSide];   // of the 16 rows of a warp
  __shared__ float row_maxima[2][2 * kSide];              // of half a group of 256
  __shared__ float4 factors[2][kSide / 16][kPadded / 4];  // factor, scale_inv of a column's group
  __shared__ uint4 tile[kSide * kSide / 16];
  const int tx = threadIdx.x & 7, ty = threadIdx.x >> 3;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int span = log_group > 7 ? 2 : 1;
  const int group_lanes = span > 1 ? 8 : 1 << (log_group - 4);
  const int log_inner = span > 1 ? 7 : log_group;  // of the part of a group that a tile has
  const bool by_division = divides(numerics);
  const uint32_t rows = static_cast<uint32_t>(source.rows);
  const uint32_t cols = static_cast<uint32_t>(source.cols), blocks = (cols + 15) / 16;

  let_next_begin();
  wait_for_previous();
#pragma unroll 1
  for (uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
    const uint32_t down_tiles = item / wide, across = item - down_tiles * wide;
    Block<T> x[4];
    float row_amax[4];
    const uint32_t top = down_tiles * (kSide * span);
    const uint32_t left = across * (kSide / 16 * span);
    const auto load = [&](int down, int right) {
      const uint32_t block = left + right * (kSide / 16) + tx;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t row = top + down * kSide + 4 * ty + k;
        if (row < rows && block < blocks) {
          x[k] = source.template fetch<kWhole>(source.row(row), block);
        } else {
          x[k] = {};
        }
      }
    };
#pragma unroll 1
    for (int part = 0; part < span * span; ++part) {
      const int down = part >> 1, right = part & 1;
      load(down, right);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        row_amax[k] = lanes_amax(block_amax(x[k]), group_lanes);
        if (span > 1 && tx == 0) row_maxima[right][down * kSide + 4 * ty + k] = row_amax[k];
      }
      const Block<T> m = columns_amax(x);
      const auto four = [&](int i) {
        return make_float4(magnitude_of(m, i), magnitude_of(m, i + 1), magnitude_of(m, i + 2),
                           magnitude_of(m, i + 3));
      };
      const int q = lane >> 3;  // all four have the same
      *reinterpret_cast<float4*>(&column_maxima[down][warp][right * kSide + 16 * tx + 4 * q]) =
          q < 2 ? (q == 0 ? four(0) : four(4)) : (q == 2 ? four(8) : four(12));
    }
    __syncthreads();

#pragma unroll 1
    for (int part = 0; part < span * span; ++part) {
      const int down = part >> 1, right = part & 1;
      const uint32_t first_row = top + down * kSide;
      const uint32_t first_block = left + right * (kSide / 16);
      if (span > 1) {
        load(down, right);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int r = down * kSide + 4 * ty + k;
          row_amax[k] = amax_keep_nan(row_maxima[0][r], row_maxima[1][r]);
        }
      }
      // The scales of columns.
      const int warps = 1 << (log_inner - 4);
#pragma unroll 1
      for (int i = threadIdx.x; i < kSide << (7 - log_inner); i += kThreads) {
        const int column = i & (kSide - 1), inner = i >> 7;
        float b = 0.0f;
#pragma unroll 1
        for (int w = inner * warps; w < (inner + 1) * warps; ++w) {
          b = amax_keep_nan(b, column_maxima[down][w][right * kSide + column]);
          if (span > 1) b = amax_keep_nan(b, column_maxima[1 - down][w][right * kSide + column]);
        }
        const GroupScale g = scale_of(numerics, b);
        const int at = column + 4 * (column >> 4);
        reinterpret_cast<float*>(factors[0][inner])[at] =
            by_division ? group_reciprocal(g.scale_inv) : g.factor;
        reinterpret_cast<float*>(factors[1][inner])[at] = g.scale_inv;
        const uint32_t c = 16 * first_block + column;
        const uint32_t group = (first_row >> log_group) + inner;
        if (c < cols && group < transposed.scales.groups && (span == 1 || down == 0)) {
          store_scale(transposed.scales, 0, c, group, g, false, true);
        }
      }
      // Rows: their scales one after the other, which is less to compile.
      const uint32_t block = first_block + tx;
      const uint32_t at = 16 * block;
      float row_factor[4] = {}, row_scale[4] = {};
#pragma unroll 1
      for (int k = 0; k < 4; ++k) {
        const GroupScale g = scale_of(numerics, row_amax[0]);
        const uint32_t row = first_row + 4 * ty + k;
        if (row < rows && block < blocks && (tx & (group_lanes - 1)) == 0 &&
            (span == 1 || right == 0)) {
          store_scale(scales, 0, row, at >> log_group, g, false, true);
        }
#pragma unroll
        for (int j = 0; j < 3; ++j) {
          row_amax[j] = row_amax[j + 1];
          row_factor[j] = row_factor[j + 1], row_scale[j] = row_scale[j + 1];
        }
        row_factor[3] = by_division ? group_reciprocal(g.scale_inv) : g.factor;
        row_scale[3] = g.scale_inv;
      }
      with_format(numerics.format, [&](auto format) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint32_t row = first_row + 4 * ty + k;
          if (row >= rows || block >= blocks) continue;
          store_bytes<kWhole>(data(row) + at, cols - at, vector,
                              encode_block<format>(x[k], by_division, row_factor[k], row_scale[k]));
        }
      });
      __syncthreads();
      const int inner = (4 * ty) >> log_inner;

      with_format(numerics.format, [&](auto format) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const float4 f = factors[0][inner][5 * tx + q], s = factors[1][inner][5 * tx + q];
          const float factor[4] = {f.x, f.y, f.z, f.w}, scale_inv[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int i = 4 * q + j;
            float v[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) v[k] = value_of(x[k], i);
            if (!by_division) {
#pragma unroll
              for (int k = 0; k < 4; ++k) v[k] = mul_rn(v[k], factor[j]);
            } else {
              const GroupDivisor d = group_divisor(scale_inv[j], factor[j]);
#pragma unroll
              for (int k = 0; k < 4; ++k) v[k] = divide(v[k], d);
            }
            // Which words of a column lie where differs from 16 columns to the next, so that those
            // of a warp are in all the banks.
            reinterpret_cast<uint32_t*>(tile)[(16 * tx + i) * (kSide / 4) + (ty ^ (4 * tx))] =
                pack4<format>(v);
          }
        }
      });
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < kSide * kSide / 16; i += kThreads) {
        const int column = i >> 3, q = i & 7;
        const uint32_t c = 16 * first_block + column, row = first_row + 16 * q;
        if (c >= cols || row >= rows) continue;
        store_bytes<false>(transposed.data + int64_t{c} * rows + row, rows - row, transposed.vector,
                           tile[column * 8 + (q ^ (column >> 4))]);
      }
    }
  }
  zero_scale_padding(scales);
  zero_scale_padding(transposed.scales);
}

namespace {

template <class T, bool kWhole>
cudaError_t launch_both(const Matrix& x, int log_group, const GroupNumerics& numerics,
                        const GroupOutput& out, const GroupOutput& out_t, cudaStream_t stream) {
  const int64_t side = log_group > 7 ? 2 * kSide : kSide;
  const int64_t wide = (x.cols + side - 1) / side, items = (x.rows + side - 1) / side * wide;
  const int per_sm = blocks_per_sm<&both_kernel<T, kWhole>>(kThreads, 0);
  const int64_t ctas = persistent_grid(items, per_sm);
  const TransposedOutput transposed = {static_cast<uint8_t*>(const_cast<void*>(out_t.data.data)),
                                       out_t.data.vector, out_t.scales};
  return launch<&both_kernel<T, kWhole>>(
      {ctas, kThreads, Start::kOverlapped}, stream, PlainSource<T>(x),
      RowPointer<uint8_t>(out.data), out.data.vector, numerics, out.scales, transposed, log_group,
      static_cast<uint32_t>(items), static_cast<uint32_t>(wide));
}

}  // namespace

cudaError_t launch_quantize_both(const Matrix& x, int64_t group_size, const GroupNumerics& numerics,
                                 const GroupOutput& out, const GroupOutput& out_t,
                                 cudaStream_t stream) {
  int log_group = 4;
  while ((int64_t{1} << log_group) < group_size) ++log_group;
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    return is_whole(x, out.data)
               ? launch_both<T, true>(x, log_group, numerics, out, out_t, stream)
               : launch_both<T, false>(x, log_group, numerics, out, out_t, stream);
  });
}

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
