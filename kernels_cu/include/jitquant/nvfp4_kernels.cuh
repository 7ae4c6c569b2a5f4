// The kernels that every NVFP4 pipeline is put together from, templates over where the values come
// from (sources.cuh):
//   amax_kernel       launch 1 of tensor granularity: each block's amax into partials
//   quantize_kernel   launch 2, or the only one where gsa is given
//   row_kernel        a block a row: row granularity, and the norms, in one launch; or, for a norm
//                     with tensor granularity, launch 1
// The amax goes from launch to launch as partial maxima in a workspace of the call's own, which
// every block of launch 2 reduces for itself: no counter, no memset, nothing that has to be put
// back, so concurrent calls, replayed graphs and launches that never ran cannot disturb each other.
#pragma once

#include "jitquant/device.cuh"
#include "jitquant/launch.h"
#include "jitquant/reduce.cuh"
#include "jitquant/sources.cuh"

namespace jitquant {

constexpr int kThreads = 256;

JITQUANT_HD int64_t blocks_of(int64_t cols) {
  return (cols + 15) / 16;
}

// (row, block) of a flat walk over rows * width blocks, without a division a step.
struct BlockWalk {
  int64_t row, block;
  int64_t step_rows, step_blocks, width;

  __device__ __forceinline__ BlockWalk(int64_t width) : width(width) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    row = first / width;
    block = first - row * width;
    step_rows = step / width;
    step_blocks = step - step_rows * width;
  }
  __device__ __forceinline__ void next() {
    row += step_rows;
    block += step_blocks;
    if (block >= width) {
      block -= width;
      ++row;
    }
  }
};

JITQUANT_HD int64_t padded_rows(const Nvfp4Output& out) {
  return out.swizzled ? (out.rows + 127) & ~int64_t{127} : out.rows;
}
JITQUANT_HD int64_t padded_blocks(const Nvfp4Output& out) {
  return out.swizzled ? (out.blocks + 3) & ~int64_t{3} : out.blocks;
}

__device__ __forceinline__ void store_scale(const Nvfp4Output& out, int64_t row, int64_t block,
                                            uint8_t scale) {
  const int64_t i =
      out.swizzled ? swizzle_128x4(row, block, padded_blocks(out)) : row * out.blocks + block;
  out.scales[i] = scale;
}

__device__ __forceinline__ void store_block(const Nvfp4Output& out, int64_t row, int64_t block,
                                            const Nvfp4Codes& codes) {
  *reinterpret_cast<uint2*>(out.codes + (row * out.blocks + block) * 8) =
      make_uint2(codes.low, codes.high);
  store_scale(out, row, block, codes.scale);
}

__device__ __forceinline__ float block_max_of_partials(const GlobalScale& scale, float* scratch) {
  float amax = 0.0f;
  for (int i = threadIdx.x; i < scale.count; i += blockDim.x) {
    amax = fmaxf(amax, scale.partials[i]);
  }
  return block_reduce<MaxOp>(amax, scratch);
}

// The encoding of the whole tensor; every thread of the block calls it. Not for kRows.
__device__ __forceinline__ Nvfp4Encoding tensor_encoding(const GlobalScale& scale, float* scratch) {
  const bool writes = scale.gsa_out != nullptr && blockIdx.x == 0 && threadIdx.x == 0;
  if (scale.kind == GlobalScale::kPartials) {
    const float amax = block_max_of_partials(scale, scratch);
    if (writes) *scale.gsa_out = div_rn(amax, scale.divisor);
    return nvfp4_encoding_from_amax(amax, scale.divisor);
  }
  const float gsa = scale.kind == GlobalScale::kValue ? scale.value : *scale.gsa;
  if (writes) *scale.gsa_out = gsa;
  return nvfp4_encoding_from_gsa(gsa);
}

// The amax of what this block's threads walk over; every thread of the block gets it.
template <class Source>
__device__ __forceinline__ float block_amax(const Source& source, float* scratch) {
  float amax = 0.0f;
  for (BlockWalk walk(blocks_of(source.cols)); walk.row < source.rows; walk.next()) {
    float v[16];
    source.load(walk.row, walk.block, v);
#pragma unroll
    for (int i = 0; i < 16; ++i) amax = amax_ignore_nan(amax, v[i]);
  }
  return block_reduce<MaxOp>(amax, scratch);
}

template <class Source>
__global__ void __launch_bounds__(kThreads, Source::kBlocksPerSm)
    amax_kernel(Source source, float* partials) {
  __shared__ float scratch[33];
  const float amax = block_amax(source, scratch);
  if (threadIdx.x == 0) partials[blockIdx.x] = amax;
}

template <class Source>
__global__ void __launch_bounds__(kThreads, Source::kBlocksPerSm)
    quantize_kernel(Source source, GlobalScale scale, Nvfp4Recipe recipe, Nvfp4Output out) {
  __shared__ float scratch[33];
  const bool by_row = scale.kind == GlobalScale::kRows;
  Nvfp4Encoding encoding = by_row ? Nvfp4Encoding{} : tensor_encoding(scale, scratch);
  const int64_t rows = padded_rows(out);
#pragma unroll 1
  for (BlockWalk walk(padded_blocks(out)); walk.row < rows; walk.next()) {
    if (walk.row >= out.rows || walk.block >= out.blocks) {
      store_scale(out, walk.row, walk.block, 0);
      continue;
    }
    float v[16];
    source.load(walk.row, walk.block, v);
    if (by_row) encoding = nvfp4_encoding_from_gsa(scale.gsa[walk.row * scale.stride]);
    store_block(out, walk.row, walk.block,
                nvfp4_quantize_block(v, nvfp4_block_amax(v), encoding, recipe));
  }
}

// A row between its passes: in shared memory where it fits there, read again where not. Rows of
// float4 are `width` apart, so that neighbouring threads touch neighbouring banks.
struct RowCache {
  float4* data;  // null: not kept
  int64_t width;

  __device__ __forceinline__ void put(int64_t block, const float (&v)[16]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      data[j * width + block] = make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
    }
  }
  __device__ __forceinline__ void get(int64_t block, float (&v)[16]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 q = data[j * width + block];
      v[4 * j] = q.x, v[4 * j + 1] = q.y, v[4 * j + 2] = q.z, v[4 * j + 3] = q.w;
    }
  }
};

// Threads own the same blocks in every pass, so the cache needs no barrier of its own.
template <class Source, bool kNorm>
__global__ void __launch_bounds__(kThreads, Source::kBlocksPerSm)
    row_kernel(Source source, Normalize<typename Source::Element> norm, RowScale scale,
               Nvfp4Recipe recipe, Nvfp4Output out, bool cached) {
  extern __shared__ float4 row_storage[];
  __shared__ float scratch[33];
  const int64_t width = blocks_of(source.cols);
  const RowCache cache = {cached ? row_storage : nullptr, width};
  Nvfp4Encoding encoding = {};
  if (scale.mode == RowMode::kGiven && scale.given.kind != GlobalScale::kRows) {
    encoding = tensor_encoding(scale.given, scratch);
  }
  const bool quantizes = scale.mode != RowMode::kTensorAmax;
  const int64_t rows = quantizes ? padded_rows(out) : source.rows;
  float tensor_amax = 0.0f;

  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    if (row >= source.rows) {
#pragma unroll 1
      for (int64_t b = threadIdx.x; b < padded_blocks(out); b += blockDim.x) {
        store_scale(out, row, b, 0);
      }
      continue;
    }

    float amax = 0.0f;
    float inverse = 0.0f;
    if constexpr (kNorm) {
      float squares = 0.0f;
#pragma unroll 1
      for (int64_t b = threadIdx.x; b < width; b += blockDim.x) {
        float v[16];
        source.load(row, b, v);
        if (cached) cache.put(b, v);
#pragma unroll
        for (int i = 0; i < 16; ++i) squares = fma_rn(v[i], v[i], squares);
      }
      const float sum = block_reduce<SumOp>(squares, scratch);
      const float mean = div_rn(sum, static_cast<float>(source.cols));
      inverse = reciprocal_rn(sqrt_rn(add_rn(mean, norm.eps)));
      if (threadIdx.x == 0) norm.inv_rms[row] = inverse;
    }
    if (scale.mode != RowMode::kGiven) {
#pragma unroll 1
      for (int64_t b = threadIdx.x; b < width; b += blockDim.x) {
        float v[16];
        if constexpr (kNorm) {
          if (cached) {
            cache.get(b, v);
          } else {
            source.reload(row, b, v);
          }
          norm.apply(inverse, b, source.cols, v);
        } else {
          source.load(row, b, v);
        }
        if (cached && quantizes) cache.put(b, v);
#pragma unroll
        for (int i = 0; i < 16; ++i) amax = amax_ignore_nan(amax, v[i]);
      }
    }
    if (!quantizes) {
      tensor_amax = fmaxf(tensor_amax, amax);
      continue;
    }

    if (scale.mode == RowMode::kRowAmax) {
      amax = block_reduce<MaxOp>(amax, scratch);
      if (threadIdx.x == 0) scale.gsa_out[row] = div_rn(amax, scale.divisor);
      encoding = nvfp4_encoding_from_amax(amax, scale.divisor);
    } else if (scale.given.kind == GlobalScale::kRows) {
      encoding = nvfp4_encoding_from_gsa(scale.given.gsa[row * scale.given.stride]);
    }
#pragma unroll 1
    for (int64_t b = threadIdx.x; b < padded_blocks(out); b += blockDim.x) {
      if (b >= width) {
        store_scale(out, row, b, 0);
        continue;
      }
      float v[16];
      if (cached) {
        cache.get(b, v);
      } else {
        source.reload(row, b, v);
      }
      if constexpr (kNorm) {
        const bool normalized = cached && scale.mode == RowMode::kRowAmax;
        if (!normalized) norm.apply(inverse, b, source.cols, v);
      }
      store_block(out, row, b, nvfp4_quantize_block(v, nvfp4_block_amax(v), encoding, recipe));
    }
  }

  if (!quantizes) {
    tensor_amax = block_reduce<MaxOp>(tensor_amax, scratch);
    if (threadIdx.x == 0) scale.partials[blockIdx.x] = tensor_amax;
  }
}

// Calls f(Element{}) with the element type of `dtype`.
template <class F>
cudaError_t dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBFloat16:
      return f(Bf16{});
    case DType::kFloat16:
      return f(Fp16{});
    case DType::kFloat32:
      return f(float{});
  }
  return cudaErrorInvalidValue;
}

// A matrix whose rows follow each other without a gap is one long row, which saves the padding of
// each; only where the output does not need to know the rows.
inline Matrix flattened(const Matrix& m) {
  if (m.cols % 16 != 0 || m.n2 != m.rows || m.s2 != m.cols || m.rows < 2) return m;
  Matrix flat = m;
  flat.rows = flat.n1 = flat.n2 = 1;
  flat.cols = m.rows * m.cols;
  flat.s0 = flat.s1 = flat.s2 = flat.cols;
  return flat;
}

// How many partials amax_kernel and row_kernel write for a matrix.
inline int amax_grid(int64_t rows, int64_t cols) {
  const int64_t items = (rows * blocks_of(cols) + 2 * kThreads - 1) / (2 * kThreads);
  const int64_t grid = persistent_grid(items, 8);
  return static_cast<int>(grid < kMaxPartials ? grid : kMaxPartials);
}

template <class Source>
cudaError_t launch_amax(const Source& source, float* partials, int count, cudaStream_t stream) {
  return launch<&amax_kernel<Source>>({count, kThreads}, stream, source, partials);
}

template <class Source>
cudaError_t launch_quantize(const Source& source, const GlobalScale& scale, Nvfp4Recipe recipe,
                            const Nvfp4Output& out, cudaStream_t stream) {
  const int64_t items = (padded_rows(out) * padded_blocks(out) + kThreads - 1) / kThreads;
  const int64_t grid = persistent_grid(items, 8);
  return launch<&quantize_kernel<Source>>({grid, kThreads}, stream, source, scale, recipe, out);
}

template <class T>
cudaError_t launch_quantize_plain(const Matrix& x, const GlobalScale& scale, Nvfp4Recipe recipe,
                                  const Nvfp4Output& out, cudaStream_t stream) {
  if (out.swizzled || scale.kind == GlobalScale::kRows) {
    return launch_quantize(PlainSource<T>(x), scale, recipe, out, stream);
  }
  const Matrix flat = flattened(x);
  Nvfp4Output flat_out = out;
  flat_out.rows = flat.rows;
  flat_out.blocks = blocks_of(flat.cols);
  return launch_quantize(PlainSource<T>(flat), scale, recipe, flat_out, stream);
}

struct RowLaunch {
  int block;
  int64_t grid;
  size_t shared;
};

// A block of up to 256 threads a row, about two blocks of 16 a thread, and the row in shared memory
// where at least two such blocks fit on a multiprocessor of any supported device (sm_86 has 100
// KiB).
inline RowLaunch row_launch(int64_t rows, int64_t cols) {
  const int64_t width = blocks_of(cols);
  int64_t threads = ((width + 1) / 2 + 31) / 32 * 32;
  threads = threads < kThreads ? threads : kThreads;
  const size_t bytes = static_cast<size_t>(width) * 64;
  return {static_cast<int>(threads), persistent_grid(rows, 1 << 16),
          bytes <= 46 * 1024 ? bytes : 0};
}

template <class Source, bool kNorm>
cudaError_t launch_rows(const Source& source, const Normalize<typename Source::Element>& norm,
                        RowScale scale, Nvfp4Recipe recipe, const Nvfp4Output& out, int partials,
                        cudaStream_t stream) {
  const bool quantizes = scale.mode != RowMode::kTensorAmax;
  const int64_t rows = quantizes ? padded_rows(out) : source.rows;
  const RowLaunch shape = row_launch(rows, source.cols);
  const int64_t grid = quantizes ? shape.grid : partials;
  const bool cached = shape.shared > 0 && (kNorm || scale.mode == RowMode::kRowAmax);
  return launch<&row_kernel<Source, kNorm>>({grid, shape.block, cached ? shape.shared : 0}, stream,
                                            source, norm, scale, recipe, out, cached);
}

// Row granularity of a source that is quantized as it is.
template <class Source>
cudaError_t launch_row_amax(const Source& source, float divisor, float* gsa, Nvfp4Recipe recipe,
                            const Nvfp4Output& out, cudaStream_t stream) {
  const RowScale scale = {RowMode::kRowAmax, divisor, gsa, nullptr, {}};
  return launch_rows<Source, false>(source, {}, scale, recipe, out, 0, stream);
}

// Blocks, and so partials, of row_kernel where it is the first of two launches.
inline int norm_grid(int64_t rows) {
  const int64_t grid = persistent_grid(rows, 8);
  return static_cast<int>(grid < kMaxPartials ? grid : kMaxPartials);
}

}  // namespace jitquant
