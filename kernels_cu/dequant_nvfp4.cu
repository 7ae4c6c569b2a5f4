// Values from NVFP4: e2m1 * block scale * gsa in fp32, rounded once to the output's type.
#include "jitquant/nvfp4_kernels.cuh"

namespace jitquant {

// Half a block of values: a word of codes, and neighbouring threads store next to each other.
template <class T>
struct Half {
  float v[8];

  __device__ __forceinline__ void store(T* p, int64_t count, bool vector) const {
    Block<T> block;  // its first half
#pragma unroll
    for (int i = 0; i < 8; ++i) set_value(block, i, v[i]);
    constexpr int kWords = Block<T>::kWords / 2;
    if (vector && count >= 8) {
      store_words<kWords>(p, block.words);
    } else if (count >= 8 && reinterpret_cast<uintptr_t>(p) % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) reinterpret_cast<uint32_t*>(p)[i] = block.words[i];
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < count) p[i] = from_float<T>(v[i]);
      }
    }
  }
};

// The next half is loaded while one is computed.
template <class T>
__global__ void __launch_bounds__(kThreads, 6)
    dequant_kernel(Nvfp4Input in, T* out, int64_t cols, bool vector) {
  let_next_begin();
  wait_for_previous();
  BlockWalk walk(2 * in.blocks);
  uint32_t next_codes = 0;
  uint8_t next_scale = 0;
  float next_gsa = 0.0f;
  auto fetch = [&] {
    if (walk.row >= in.rows) return;
    const int64_t block = walk.block >> 1;
    next_codes =
        *reinterpret_cast<const uint32_t*>(in.codes + walk.row * in.code_stride + walk.block * 4);
    next_scale =
        in.scales[in.swizzled ? swizzle_128x4(walk.row, block, (in.blocks + 3) & ~int64_t{3})
                              : walk.row * in.scale_stride + block];
    next_gsa = in.gsa[walk.row * in.gsa_stride];
  };
  fetch();
#pragma unroll 1
  while (walk.row < in.rows) {
    const uint32_t codes = next_codes;
    const float scale = float_from_e4m3(next_scale), gsa = next_gsa;
    T* p = out + walk.row * cols + walk.block * 8;
    const int64_t left = cols - walk.block * 8;
    walk.next();
    fetch();
    Half<T> half;
    nvfp4_dequantize8(codes, scale, gsa, half.v);
    half.store(p, left, vector);
  }
}

// The same where everything follows each other without a gap and there is one gsa: word i of the
// codes and half of scale i / 2 give values 8 * i to 8 * i + 7. Blocks of threads that do a little
// each and end are faster here than those that stay: a kernel of this shape without arithmetic
// takes as long. What is stored leaves the L2 first: it is four times what is loaded.
constexpr int kFlatWords = 2;  // of a thread

template <class T>
__global__ void __launch_bounds__(kThreads)
    flat_dequant_kernel(const uint32_t* codes, const uint8_t* scales, const float* gsa, T* out,
                        int64_t words) {
  let_next_begin();
  wait_for_previous();
  const float factor = *gsa;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kFlatWords) + threadIdx.x;
  uint32_t word[kFlatWords];
  uint8_t scale[kFlatWords];
#pragma unroll
  for (int k = 0; k < kFlatWords; ++k) {
    const int64_t i = first + k * kThreads;
    if (i < words) word[k] = codes[i], scale[k] = scales[i >> 1];
  }
#pragma unroll
  for (int k = 0; k < kFlatWords; ++k) {
    const int64_t i = first + k * kThreads;
    if (i >= words) break;
    float v[8];
    nvfp4_dequantize8(word[k], float_from_e4m3(scale[k]), factor, v);
    Block<T> block;  // its first half
#pragma unroll
    for (int j = 0; j < 8; ++j) set_value(block, j, v[j]);
#pragma unroll
    for (int j = 0; j < Block<T>::kWords / 2; j += 4) {
      __stcs(
          reinterpret_cast<uint4*>(out + i * 8) + j / 4,
          make_uint4(block.words[j], block.words[j + 1], block.words[j + 2], block.words[j + 3]));
    }
  }
}

// Packed along the rows: neighbouring threads take neighbouring columns.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dequant_columns_kernel(Nvfp4Input in, T* out, int64_t out_rows, int64_t cols) {
  let_next_begin();
  wait_for_previous();
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

cudaError_t launch_dequant_nvfp4(const Nvfp4Input& in, void* out, DType dtype, int64_t cols,
                                 cudaStream_t stream) {
  const int64_t items = (in.rows * in.blocks * 2 + kThreads - 1) / kThreads;
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    T* const p = static_cast<T*>(out);
    const bool aligned = reinterpret_cast<uintptr_t>(out) % 16 == 0;
    const bool flat = aligned && !in.swizzled && in.gsa_stride == 0 && cols == in.blocks * 16 &&
                      in.code_stride == in.blocks * 8 && in.scale_stride == in.blocks;
    if (flat) {
      return launch<&flat_dequant_kernel<T>>({items / kFlatWords + 1, kThreads, Start::kOverlapped},
                                             stream, reinterpret_cast<const uint32_t*>(in.codes),
                                             in.scales, in.gsa, p, in.rows * in.blocks * 2);
    }
    return launch<&dequant_kernel<T>>({persistent_grid(items, 6), kThreads, Start::kOverlapped},
                                      stream, in, p, cols, aligned && cols * sizeof(T) % 16 == 0);
  });
}

cudaError_t launch_dequant_nvfp4_columns(const Nvfp4Input& in, void* out, DType dtype,
                                         int64_t out_rows, int64_t cols, cudaStream_t stream) {
  const int64_t grid = persistent_grid((in.blocks * cols + kThreads - 1) / kThreads, 8);
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    return launch<&dequant_columns_kernel<T>>({grid, kThreads, Start::kOverlapped}, stream, in,
                                              static_cast<T*>(out), out_rows, cols);
  });
}

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
