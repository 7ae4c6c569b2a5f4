// Dequantizes NVFP4: e2m1 * block scale * gsa in fp32, rounded once to the output's type.
#include "jitquant/fp8.cuh"
#include "kernels.cuh"

namespace jitquant {

constexpr int kAcrossHalves = 31;  // per warp of dequant_kernel if rows may start between words

// Half a block of values: one word of codes.
template <class T>
struct Half {
  static constexpr int kWords = Block<T>::kWords / 2;
  uint32_t words[kWords];

  __device__ __forceinline__ Half(uint32_t codes, uint8_t scale, float gsa) {
    float v[8];
    nvfp4_dequantize8(codes, float_from_e4m3(scale), gsa, v);
    round_values<T>(v, words);
  }
};

// Stores eight two-byte elements per lane. Lanes hold consecutive pieces of a row: `place` of
// `places`. The first `count` elements of the piece go to p. Called by all lanes of the warp. If p
// is not aligned to 16 bytes, a lane stores the end of the previous lane's piece with the start of
// its own, so that only the ends of a row are stored element by element. Lane 0 only supplies its
// piece and stores nothing.
__device__ __forceinline__ void store_across(const uint32_t (&words)[4], uint16_t* p, int64_t count,
                                             int64_t place, int64_t places) {
  const int over = elements_over<16>(p);
  uint32_t both[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    both[i] = __shfl_up_sync(0xffffffffu, words[i], 1);
    both[4 + i] = words[i];
  }
  if ((threadIdx.x & 31) == 0) return;
  // Counted from the start of the previous piece.
  const int there = count >= 8 ? 16 : static_cast<int>(count) + 8, end = 16 - over;
  int first = place > 0 ? 8 - over : 8;
  const int last = place + 1 < places ? end : 16;
  if (first == 8 - over && end <= there) {
    uint32_t piece[8], whole[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) piece[i] = over == 0 && i < 4 ? words[i] : both[i];
    skip_elements<4>(piece, -over & 7, whole);
    store_words<4>(p - over, whole);
    first = end;
  }
  if (first >= last || first >= there) return;
#pragma unroll
  for (int i = 1; i < 16; ++i) {
    if (i >= first && i < last && i < there) {
      p[i - 8] = static_cast<uint16_t>(both[i / 2] >> (16 * (i % 2)));
    }
  }
}

// Neighboring threads store next to each other. Loads the next half block while it computes the
// current one. kAcross: rows may start between words.
template <class T, bool kAcross>
__global__ void __launch_bounds__(kThreads, kAcross ? 5 : 6)
    dequant_kernel(Nvfp4Input in, T* out, int64_t cols, bool vector) {
  wait_for_previous();
  let_next_begin();
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  BlockWalk walk =
      kAcross ? BlockWalk(2 * in.blocks, warp * kAcrossHalves + (threadIdx.x & 31) - 1,
                          static_cast<int64_t>(gridDim.x) * (kThreads / 32) * kAcrossHalves)
              : BlockWalk(2 * in.blocks);
  const auto is_there = [&] { return walk.row < in.rows && (!kAcross || walk.block >= 0); };
  uint32_t next_codes = 0;
  uint8_t next_scale = 0;
  float next_gsa = 0.0f;
  auto fetch = [&] {
    if (!is_there()) return;
    const int64_t block = walk.block >> 1;
    next_codes =
        *reinterpret_cast<const uint32_t*>(in.codes + walk.row * in.code_stride + walk.block * 4);
    next_scale = in.scales[scale_offset(in.swizzled, walk.row, block, in.blocks, in.scale_stride)];
    next_gsa = in.gsa[walk.row * in.gsa_stride];
  };
  fetch();
#pragma unroll 1
  while (kAcross ? __any_sync(0xffffffffu, walk.row < in.rows) != 0 : walk.row < in.rows) {
    const Half<T> half(next_codes, next_scale, next_gsa);
    T* const p = out + walk.row * cols + walk.block * 8;
    const int64_t left = is_there() ? cols - walk.block * 8 : -8, place = walk.block;
    walk.next();
    fetch();
    if constexpr (kAcross) {
      store_across(half.words, reinterpret_cast<uint16_t*>(p), left, place, walk.width);
    } else {
      store_elements<Half<T>::kWords>(p, left, vector, half.words);
    }
  }
}

// For eight values that all exist and are aligned. Marks the stores for early eviction from L2:
// they are four times as large as the loads.
template <class T>
__device__ __forceinline__ void store_values(const Half<T>& half, T* out) {
  const uint32_t* const w = half.words;
#pragma unroll
  for (int i = 0; i < Half<T>::kWords; i += 4) {
    __stcs(reinterpret_cast<uint4*>(out) + i / 4, make_uint4(w[i], w[i + 1], w[i + 2], w[i + 3]));
  }
}

constexpr int kWordsEach = 2;  // words of codes per thread in the next two kernels

// For contiguous codes and scales: word i of the codes and half of scale i / 2 give values 8 * i to
// 8 * i + 7. Small thread blocks that end quickly are faster here than a persistent grid: as fast
// as the same kernel without arithmetic. kByRow: each row of `row_words` words has a gsa; otherwise
// there is one.
template <class T, bool kByRow>
__global__ void __launch_bounds__(kPieceThreads)
    flat_dequant_kernel(Nvfp4Input in, Divisor row_words, T* out, int64_t words) {
  const uint32_t* const codes = reinterpret_cast<const uint32_t*>(in.codes);
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * (kPieceThreads * kWordsEach) + threadIdx.x;
  if (is_small_grid() && first < words) prefetch(codes + first);
  wait_for_previous();
  let_next_begin();
  uint32_t word[kWordsEach];
  uint8_t scale[kWordsEach];
  float gsa[kWordsEach];
#pragma unroll
  for (int k = 0; k < kWordsEach; ++k) {
    const int64_t i = first + k * kPieceThreads;
    if (i >= words) break;
    word[k] = codes[i], scale[k] = in.scales[i >> 1];
    gsa[k] = in.gsa[kByRow ? row_words.quotient_of(static_cast<uint32_t>(i)) * in.gsa_stride : 0];
  }
#pragma unroll
  for (int k = 0; k < kWordsEach; ++k) {
    const int64_t i = first + k * kPieceThreads;
    if (i >= words) break;
    store_values(Half<T>(word[k], scale[k], gsa[k]), out + i * 8);
  }
}

// For swizzled scales, with a gsa for the tensor or for each row. A warp takes the blocks of a
// sector. A lane takes a word of two neighboring rows, and eight lanes store 64 consecutive values.
template <class T>
__global__ void __launch_bounds__(kThreads)
    tile_dequant_kernel(Nvfp4Input in, Divisor tiles, int warps, T* out) {
  wait_for_previous();
  let_next_begin();
  const int warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x & 31;
  if (warp >= warps) return;
  const uint32_t rows = tiles.quotient_of(warp), tile = warp - rows * tiles.divisor;
  const int row = static_cast<int>(sector_row(rows, lane / 2));
  const int column = tile * 8 + lane % 8;  // in words
  const int width = static_cast<int>(2 * in.blocks);
  const int64_t at = static_cast<int64_t>(row) * width + column;
  const uint32_t* const codes = reinterpret_cast<const uint32_t*>(in.codes) + at;
  const uint8_t* const scales =
      in.scales + sector_offset(rows, tile, sector_pitch(tiles.divisor)) + lane / 2;
  const float* const gsas = in.gsa + row * in.gsa_stride;
  const int left = column < width ? static_cast<int>(in.rows) - row : 0;
  uint32_t word[kWordsEach];
  uint8_t scale[kWordsEach];
  float gsa[kWordsEach];
#pragma unroll
  for (int k = 0; k < kWordsEach; ++k) {
    if (k < left)
      word[k] = codes[k * width], scale[k] = scales[16 * k], gsa[k] = gsas[k * in.gsa_stride];
  }
#pragma unroll
  for (int k = 0; k < kWordsEach; ++k) {
    if (k >= left) break;
    store_values(Half<T>(word[k], scale[k], gsa[k]), out + (at + k * width) * 8);
  }
}

// The warps that have a row.
inline int64_t tile_dequant_warps(const Nvfp4Input& in) {
  const int64_t rest = in.rows % 128, eights = rest < 32 ? (rest + 1) / 2 : 16;
  return (in.rows / 128 * 16 + eights) * ((in.blocks + 3) / 4);
}

// Packed along the rows: neighboring threads take neighboring columns.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dequant_columns_kernel(Nvfp4Input in, T* out, int64_t out_rows, int64_t cols) {
  wait_for_previous();
  let_next_begin();
  const float gsa = *in.gsa;
  for (BlockWalk walk(cols); walk.row < in.blocks; walk.next()) {
    const int64_t column = walk.block;
    const float scale = float_from_e4m3(in.scales[walk.row * in.scale_stride + column]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t pair = in.codes[(walk.row * 8 + i) * in.code_stride + column];
      const int64_t k = walk.row * 16 + 2 * i;
      if (k < out_rows) {
        out[k * cols + column] = from_float<T>(nvfp4_dequantize(pair, scale, gsa));
      }
      if (k + 1 < out_rows) {
        out[(k + 1) * cols + column] = from_float<T>(nvfp4_dequantize(pair >> 4, scale, gsa));
      }
    }
  }
}

#ifndef __CUDACC_RTC__
namespace {

cudaError_t launch_rows(const Nvfp4Input& in, void* out, DType dtype, int64_t cols,
                        cudaStream_t stream) {
  const int64_t items = (in.rows * in.blocks * 2 + kThreads - 1) / kThreads;
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    T* const p = static_cast<T*>(out);
    const bool aligned = reinterpret_cast<uintptr_t>(out) % 16 == 0;
    const bool whole = aligned && cols == in.blocks * 16 && in.code_stride == in.blocks * 8;
    const int64_t words = in.rows * in.blocks * 2;
    if (whole && !in.swizzled && in.scale_stride == in.blocks) {
      constexpr int kWork = kPieceThreads * kWordsEach;
      const LaunchShape shape = {words / kWork + 1, kPieceThreads, Start::kOverlapped};
      if (in.gsa_stride == 0) {
        return launch<&flat_dequant_kernel<T, false>>(shape, stream, in, Divisor(1), p, words);
      }
      if (words > 0 && words < (int64_t{1} << 31)) {
        return launch<&flat_dequant_kernel<T, true>>(
            shape, stream, in, Divisor(static_cast<uint32_t>(in.blocks * 2)), p, words);
      }
    }
    const int64_t warps = tile_dequant_warps(in);
    if (whole && in.swizzled && warps > 0 && swizzled_size(in.rows, in.blocks) <= UINT32_MAX) {
      return launch<&tile_dequant_kernel<T>>(
          {(warps + kThreads / 32 - 1) / (kThreads / 32), kThreads, Start::kOverlapped}, stream, in,
          Divisor(static_cast<uint32_t>((in.blocks + 3) / 4)), static_cast<int>(warps), p);
    }
    const bool vector = aligned && cols * sizeof(T) % 16 == 0;
    if constexpr (sizeof(T) == 2) {
      if (cols % 2 != 0 || reinterpret_cast<uintptr_t>(out) % 4 != 0) {
        constexpr int kHalves = kThreads / 32 * kAcrossHalves;
        const int64_t grid = persistent_grid((in.rows * in.blocks * 2 + kHalves - 1) / kHalves, 5);
        return launch<&dequant_kernel<T, true>>({grid, kThreads, Start::kOverlapped}, stream, in, p,
                                                cols, vector);
      }
    }
    return launch<&dequant_kernel<T, false>>(
        {persistent_grid(items, 6), kThreads, Start::kOverlapped}, stream, in, p, cols, vector);
  });
}

cudaError_t launch_columns(const Nvfp4Input& in, void* out, DType dtype, int64_t out_rows,
                           int64_t cols, cudaStream_t stream) {
  const int64_t grid = persistent_grid((in.blocks * cols + kThreads - 1) / kThreads, 8);
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    return launch<&dequant_columns_kernel<T>>({grid, kThreads, Start::kOverlapped}, stream, in,
                                              static_cast<T*>(out), out_rows, cols);
  });
}

}  // namespace

// `columns`: the packed dimension is the first one of two.
cudaError_t launch_dequant_nvfp4(const Nvfp4Input& in, bool columns, const Values& out,
                                 cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  return columns ? launch_columns(in, out.data, out.dtype, out.rows, in.rows, stream)
                 : launch_rows(in, out.data, out.dtype, out.cols, stream);
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
