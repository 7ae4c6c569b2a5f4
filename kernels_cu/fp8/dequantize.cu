// Dequantizes FP8, INT8 and MXFP8: element * scale_inv in fp32, rounded once to the output's type.
#include "jitquant/dispatch.cuh"
#include "jitquant/walk.cuh"
#include "launch.h"

namespace jitquant {

// Exact; v[0] is the lowest byte.
template <EightBit kFormat>
__device__ __forceinline__ void unpack4(uint32_t word, float* v) {
  if constexpr (kFormat == EightBit::kE4m3) {
    floats_from_e4m3(word, v);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = float_from_code<kFormat>(static_cast<uint8_t>(word >> 8 * i));
    }
  }
}

// Finds the scale of eight neighbors. `small`: all dividends are below 2^31.
struct ScaleLookup {
  StoredScales scales;
  Divisor width, matrix_rows, block_rows, halves_per_col;
  bool small;

  ScaleLookup(const StoredScales& s, int64_t rows, int64_t width)
      : scales(s),
        width(divisor(width)),
        matrix_rows(divisor(s.matrix_rows)),
        block_rows(divisor(s.block_rows)),
        halves_per_col(divisor(s.halves_per_col)),
        small(rows * width < (int64_t{1} << 30) && s.matrix_rows < (int64_t{1} << 30)) {}

  __device__ __forceinline__ int64_t divide(int64_t a, const Divisor& by, int64_t exact) const {
    return small ? by.quotient_of(static_cast<uint32_t>(a)) : a / exact;
  }
  __device__ __forceinline__ float at(int64_t row, uint32_t half) const {
    const StoredScales& s = scales;
    if (s.block_rows == 0) return *static_cast<const float*>(s.data);
    const uint32_t col = s.halves_per_col == 0 ? 0 : halves_per_col.quotient_of(half);
    int64_t batch = 0, line = row;
    if (s.per_matrix) {
      batch = divide(row, matrix_rows, s.matrix_rows);
      line = row - batch * s.matrix_rows;
      if (s.block_rows > 1) line = divide(line, block_rows, s.block_rows);
    }
    const bool packed = s.type == StoredScales::kPacked;
    const int64_t i =
        s.swizzled ? swizzle_128x4(batch * s.grid.stored_rows + line, col, s.grid.stored_cols)
                   : s.grid.offset(batch, line, packed ? col >> 2 : col);
    if (s.type == StoredScales::kFloat) return static_cast<const float*>(s.data)[i];
    return float_from_e8m0(static_cast<const uint8_t*>(s.data)[packed ? 4 * i + (col & 3) : i]);
  }

 private:
  // Divisors that do not fit are never used.
  static Divisor divisor(int64_t by) {
    return Divisor(by < 1 || by >= (int64_t{1} << 31) ? 1 : static_cast<uint32_t>(by));
  }
};

// Eight elements from p, of which the first `count` exist. kWhole: all exist, and p is aligned to 8
// bytes.
template <bool kWhole>
__device__ __forceinline__ uint2 load8(const uint8_t* p, int count) {
  if (kWhole) return *reinterpret_cast<const uint2*>(p);
  if (count >= 8 && reinterpret_cast<uintptr_t>(p) % 4 == 0) {
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(p);
    return make_uint2(words[0], words[1]);
  }
  uint2 codes = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) (i < 4 ? codes.x : codes.y) |= static_cast<uint32_t>(p[i]) << (8 * (i & 3));
  }
  return codes;
}

// kWhole: all exist, and p is aligned to 16 bytes.
template <EightBit kFormat, bool kWhole, class T>
__device__ __forceinline__ void write8(uint2 codes, float scale, T* p, int count) {
  float v[8];
  unpack4<kFormat>(codes.x, v);
  unpack4<kFormat>(codes.y, v + 4);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = dequantize_fp8(v[i], scale);
  constexpr int kWords = Block<T>::kWords / 2;
  uint32_t words[kWords];
  round_values<T>(v, words);
  if (kWhole) {
    store_words<kWords>(p, words);
  } else {
    store_elements<kWords>(p, count, false, words);
  }
}

// Each thread has eight values, so that neighboring threads store next to each other, and kAtOnce
// such loads in flight. One thread block per piece of work: the hardware starts thread blocks in
// order, so that concurrent reads and writes are close together.
template <class T, EightBit kFormat, int kAtOnce, bool kWhole>
__global__ void __launch_bounds__(kPieceThreads, pieces_per_sm(4))
    dequantize_kernel(RowPointer<const uint8_t> data, int64_t rows, int64_t cols,
                      ScaleLookup scales, T* out) {
  const int64_t width = (cols + 7) / 8;
  int64_t eighth = static_cast<int64_t>(blockIdx.x) * (kPieceThreads * kAtOnce) + threadIdx.x;
  int64_t row = scales.divide(eighth, scales.width, width);
  if (kAtOnce == 1 && row < rows) prefetch(data(row) + (eighth - row * width) * 8);
  wait_for_previous();
  let_next_begin();
  uint2 codes[kAtOnce];
  float scale[kAtOnce];
  T* to[kAtOnce];
  int count[kAtOnce];
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    if (k > 0) row = scales.divide(eighth, scales.width, width);
    const int64_t block = eighth - row * width;
    eighth += kPieceThreads;
    count[k] = 0;
    if (row < rows) {
      const int64_t first = block * 8, left = cols - first;
      count[k] = left < 8 ? static_cast<int>(left) : 8;
      to[k] = out + row * cols + first;
      codes[k] = load8<kWhole>(data(row) + first, count[k]);
      scale[k] = scales.at(row, static_cast<uint32_t>(block));
    }
  }
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    if (count[k] > 0) write8<kFormat, kWhole>(codes[k], scale[k], to[k], count[k]);
  }
}

#ifndef __CUDACC_RTC__
template <EightBit kFormat>
cudaError_t launch_format(const Matrix& data, const StoredScales& scales, void* out, DType dtype,
                          cudaStream_t stream) {
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t eighths = data.rows * ((data.cols + 7) / 8);
    const bool whole =
        data.vector && reinterpret_cast<uintptr_t>(out) % 16 == 0 && data.cols % 8 == 0;
    const auto start = [&](auto at_once, auto whole) {
      constexpr int kWork = kPieceThreads * at_once;
      return launch<&dequantize_kernel<T, kFormat, at_once, whole>>(
          {(eighths + kWork - 1) / kWork, kPieceThreads, Start::kOverlapped}, stream,
          RowPointer<const uint8_t>(data), data.rows, data.cols,
          ScaleLookup(scales, data.rows, (data.cols + 7) / 8), static_cast<T*>(out));
    };
    constexpr std::integral_constant<int, 1> one = {};
    if (!whole) return start(one, std::false_type());
    // With few values, instruction fetches take most of the time.
    return eighths <= int64_t{4} * kThreads * sm_count()
               ? start(one, std::true_type())
               : start(std::integral_constant<int, 4>(), std::true_type());
  });
}

// data.rows.vector: every row is aligned to 8 bytes.
cudaError_t launch_dequantize(const ElementRows& data, const StoredScales& scales,
                              const Values& out, cudaStream_t stream) {
  if (data.rows.rows == 0) return cudaSuccess;
  return dispatch_format(data.format, [&](auto format) {
    return launch_format<format>(data.rows, scales, out.data, out.dtype, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
