// What a decoder does between its products, a launch each: rotary positions with the store to the
// cache, an RMSNorm and SwiGLU that leave bf16. Each kernel is launched while the one before it
// ends.
#include <cuda_bf16.h>

#include "jitquant/device.cuh"
#include "jitquant/export.h"

// With this name in theirs, kernels are known to let the next one begin early.
namespace jitquant_decode {

constexpr int kWarp = 32;
constexpr int kVector = 8;  // bf16 values in 16 bytes

struct alignas(16) Values {
  __nv_bfloat162 pairs[kVector / 2];
};

__device__ float warp_sum(float v) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) v += __shfl_xor_sync(~0u, v, lane);
  return v;
}

// A warp for each head of a token: heads of q, then of k, then of v. Element i of a head is rotated
// with element i + size / 2; a lane has elements 2 * lane and the next one of both halves.
struct Rope {
  const __nv_bfloat16* qkv;  // (tokens, heads + 2 * groups, size)
  const float* angles;       // (positions, size): cosines, then sines
  const int64_t* position;   // (1,): of the first token of each sequence
  const __nv_bfloat16*
      q_norm;  // (size,) or null: weights of an RMSNorm of each head of q, and of k
  const __nv_bfloat16* k_norm;
  float eps;
  __nv_bfloat16* q;       // (tokens, heads, size)
  __nv_bfloat16* keys;    // (sequences, positions, groups, size)
  __nv_bfloat16* values;  // likewise
  int heads, groups, size, length, positions;
};

__global__ void rope_cache_kernel(Rope p) {
  const int all = p.heads + 2 * p.groups;
  const int64_t job = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t token = job / all;
  const int head = static_cast<int>(job - token * all), half = p.size / 2;
  const bool of_q = head < p.heads, of_v = head >= p.heads + p.groups;
  const __nv_bfloat16* const norm = of_q ? p.q_norm : of_v ? nullptr : p.k_norm;
  jitquant::let_next_begin();
  jitquant::wait_for_previous();
  const int64_t sequence = token / p.length;
  const int64_t at = *p.position + token % p.length;
  if (at >= p.positions) return;
  const int64_t stored = (sequence * p.positions + at) * p.groups;
  const __nv_bfloat16* const from = p.qkv + job * p.size;
  __nv_bfloat16* const to = of_q   ? p.q + (token * p.heads + head) * p.size
                            : of_v ? p.values + (stored + head - p.heads - p.groups) * p.size
                                   : p.keys + (stored + head - p.heads) * p.size;
  float factor = 1.0f;
  if (norm != nullptr) {
    float squares = 0.0f;
    for (int i = 2 * threadIdx.x; i < p.size; i += 2 * kWarp) {
      const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from + i));
      squares += v.x * v.x + v.y * v.y;
    }
    factor = rsqrtf(warp_sum(squares) / static_cast<float>(p.size) + p.eps);
  }
  for (int i = 2 * threadIdx.x; i < half; i += 2 * kWarp) {
    float2 a = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from + i));
    float2 b = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from + i + half));
    if (norm != nullptr) {
      const float2 w = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(norm + i));
      const float2 u =
          __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(norm + i + half));
      a = {a.x * factor * w.x, a.y * factor * w.y};
      b = {b.x * factor * u.x, b.y * factor * u.y};
    }
    if (!of_v) {
      const float* const angles = p.angles + at * p.size + i;
      const float2 c = *reinterpret_cast<const float2*>(angles);
      const float2 s = *reinterpret_cast<const float2*>(angles + half);
      const float2 first = {a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y};
      b = {b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y};
      a = first;
    }
    *reinterpret_cast<__nv_bfloat162*>(to + i) = __float22bfloat162_rn(a);
    *reinterpret_cast<__nv_bfloat162*>(to + i + half) = __float22bfloat162_rn(b);
  }
}

// A block for each row; a thread holds kVector values for every `blockDim.x * kVector` columns.
constexpr int kHeld = 2;

__global__ void __launch_bounds__(1024)
    rms_norm_kernel(const __nv_bfloat16* x, const __nv_bfloat16* weight, float eps,
                    __nv_bfloat16* out, int cols) {
  __shared__ float sums[kWarp];
  const int first = threadIdx.x * kVector, step = blockDim.x * kVector;
  Values w[kHeld], v[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * step < cols) w[i] = *reinterpret_cast<const Values*>(weight + first + i * step);
  }
  jitquant::let_next_begin();
  jitquant::wait_for_previous();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * cols;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * step >= cols) continue;
    v[i] = *reinterpret_cast<const Values*>(x + row + first + i * step);
    for (const __nv_bfloat162 pair : v[i].pairs) {
      const float2 f = __bfloat1622float2(pair);
      squares += f.x * f.x + f.y * f.y;
    }
  }
  squares = warp_sum(squares);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = squares;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  squares = warp_sum(lane < blockDim.x / kWarp ? sums[lane] : 0.0f);
  const float factor = rsqrtf(squares / static_cast<float>(cols) + eps);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * step >= cols) continue;
#pragma unroll
    for (int j = 0; j < kVector / 2; ++j) {
      const float2 f = __bfloat1622float2(v[i].pairs[j]), u = __bfloat1622float2(w[i].pairs[j]);
      v[i].pairs[j] = __float22bfloat162_rn({f.x * factor * u.x, f.y * factor * u.y});
    }
    *reinterpret_cast<Values*>(out + row + first + i * step) = v[i];
  }
}

__device__ float silu(float x) {
  return x / (1.0f + __expf(-x));
}

__global__ void swiglu_kernel(const __nv_bfloat16* both, __nv_bfloat16* out, int64_t rows,
                              int cols) {
  jitquant::let_next_begin();
  jitquant::wait_for_previous();
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVector;
  if (i >= rows * cols) return;
  const int64_t row = i / cols;
  const __nv_bfloat16* const gate = both + row * 2 * cols + (i - row * cols);
  Values g = *reinterpret_cast<const Values*>(gate);
  const Values u = *reinterpret_cast<const Values*>(gate + cols);
#pragma unroll
  for (int j = 0; j < kVector / 2; ++j) {
    const float2 a = __bfloat1622float2(g.pairs[j]), b = __bfloat1622float2(u.pairs[j]);
    g.pairs[j] = __float22bfloat162_rn({silu(a.x) * b.x, silu(a.y) * b.y});
  }
  *reinterpret_cast<Values*>(out + i) = g;
}

}  // namespace jitquant_decode

#ifndef __CUDACC_RTC__
using jitquant::Start;
using jitquant::TensorView;
using namespace jitquant_decode;

namespace {

using Bf16 = __nv_bfloat16;

const Bf16* read(const TensorView& t) {
  return t.contiguous().aligned(16).data<const Bf16>();
}
Bf16* written(const TensorView& t) {
  return t.contiguous().aligned(16).data<Bf16>();
}

}  // namespace

cudaError_t launch_rope_cache(const TensorView& qkv, const TensorView& angles,
                              const int64_t* position, const TensorView* q_norm,
                              const TensorView* k_norm, float eps, const TensorView& q,
                              const TensorView& keys, const TensorView& values,
                              cudaStream_t stream) {
  const int64_t tokens = q.with_rank(3).size(0), heads = q.size(1), size = q.size(2);
  const int64_t sequences = keys.with_rank(4).size(0), positions = keys.size(1);
  const int64_t groups = keys.size(2), all = heads + 2 * groups;
  keys.with_size(3, size);
  values.with_shape_of(keys);
  qkv.with_rank(2).with_size(0, tokens).with_size(1, all * size);
  angles.with_rank(2).with_size(0, positions).with_size(1, size);
  for (const TensorView* norm : {q_norm, k_norm}) {
    if (norm != nullptr) norm->with_rank(1).with_size(0, size);
  }
  if (size % 16 != 0 || sequences == 0 || tokens % sequences != 0) {
    jitquant::refuse("q: expected a multiple of %lld tokens, and heads of a multiple of 16",
                     static_cast<long long>(sequences));
  }
  if (tokens == 0) return cudaSuccess;
  const Rope p = {read(qkv),
                  angles.contiguous().data<const float>(),
                  position,
                  q_norm == nullptr ? nullptr : read(*q_norm),
                  k_norm == nullptr ? nullptr : read(*k_norm),
                  eps,
                  written(q),
                  written(keys),
                  written(values),
                  static_cast<int>(heads),
                  static_cast<int>(groups),
                  static_cast<int>(size),
                  static_cast<int>(tokens / sequences),
                  static_cast<int>(positions)};
  // As many warps a block as divide all heads: none is left over.
  int warps = 8;
  while (tokens * all % warps != 0) warps /= 2;
  jitquant::LaunchShape shape = {tokens * all / warps, kWarp, Start::kOverlapped};
  shape.block_y = warps;
  return jitquant::launch<&rope_cache_kernel>(shape, stream, p);
}

cudaError_t launch_rms_norm(const TensorView& x, const TensorView& weight, float eps,
                            const TensorView& out, cudaStream_t stream) {
  const int64_t rows = x.with_rank(2).size(0), cols = x.size(1);
  weight.with_rank(1).with_size(0, cols);
  out.with_shape_of(x);
  if (cols == 0 || cols % kVector != 0 || cols > 1024 * kVector * kHeld) {
    jitquant::refuse("x: expected a multiple of 8 columns, up to 16384, got %lld",
                     static_cast<long long>(cols));
  }
  if (rows == 0) return cudaSuccess;
  const int64_t vectors = (cols + kVector - 1) / kVector;
  const int64_t threads = vectors <= 1024 ? (vectors + kWarp - 1) / kWarp * kWarp : 1024;
  return jitquant::launch<&rms_norm_kernel>({rows, static_cast<int>(threads), Start::kOverlapped},
                                            stream, read(x), read(weight), eps, written(out),
                                            static_cast<int>(cols));
}

cudaError_t launch_swiglu(const TensorView& both, const TensorView& out, cudaStream_t stream) {
  const int64_t rows = out.with_rank(2).size(0), cols = out.size(1);
  both.with_rank(2).with_size(0, rows).with_size(1, 2 * cols);
  if (cols % kVector != 0) {
    jitquant::refuse("out: expected a multiple of 8 columns, got %lld",
                     static_cast<long long>(cols));
  }
  if (rows * cols == 0) return cudaSuccess;
  constexpr int kThreads = 128;
  const int64_t blocks = (rows * cols / kVector + kThreads - 1) / kThreads;
  return jitquant::launch<&swiglu_kernel>({blocks, kThreads, Start::kOverlapped}, stream,
                                          read(both), written(out), rows, static_cast<int>(cols));
}

JITQUANT_EXPORT(launch_rope_cache,
                "rope_cache(Tensor qkv, Tensor angles, Tensor position, Tensor? q_norm, "
                "Tensor? k_norm, float eps, *, Tensor(a!) q, Tensor(b!) keys, Tensor(c!) values)"
                " -> ()")
JITQUANT_EXPORT(launch_rms_norm,
                "rms_norm(Tensor x, Tensor weight, float eps, *, Tensor(a!) out) -> ()")
JITQUANT_EXPORT(launch_swiglu, "swiglu(Tensor both, *, Tensor(a!) out) -> ()")
JITQUANT_EXPORT_RESIDENT()
#endif
