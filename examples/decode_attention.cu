// Attention of one token of each sequence to what is in a cache, in one launch, which begins while
// the one before it ends and lets the next one begin. In bf16, with up to 8 heads of q for a group,
// one head of the cache.
#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include "jitquant/device.cuh"
#include "jitquant/export.h"
#include "jitquant/mma.cuh"

namespace jitquant_decode {

using Bf16 = __nv_bfloat16;

constexpr int kWarp = 32;
constexpr int kWarps = 8;      // of a thread block
constexpr int kTile = 16;      // positions that a warp takes at a time
constexpr int kMostHeads = 8;  // of a group: the columns of a product
constexpr int kBlocksPerSm = 2;
constexpr int kMostParts = 8;  // thread blocks of a cluster

struct Attend {
  const Bf16* q;            // (sequences, groups, heads, size)
  const Bf16* keys;         // (sequences, positions, groups, size)
  const Bf16* values;       // likewise
  const int64_t* position;  // (1,): the last that is in the cache
  Bf16* out;                // as q
  int heads, groups, positions;
  int parts;    // thread blocks that share the positions of a group of a sequence
  float scale;  // of scores, for powers of two
};

// What some positions give: the largest score of each head, and relative to it the sum of the
// weights and the weighted sum of the values.
template <int kSize>
struct Partial {
  float most[kMostHeads], sum[kMostHeads];
  float2 out[kMostHeads][kSize / 2 + 2];  // with padding against bank conflicts
};

// The same of the parts of a cluster, of the elements that one of them stores.
template <int kSize>
struct Received {
  float most[kMostParts][kMostHeads], sum[kMostParts][kMostHeads];
  float2 out[kMostHeads * kSize / 2];  // by part
};

__device__ float weight_of(float most, float of_all) {
  return most == -INFINITY ? 0.0f : exp2f(most - of_all);
}

// The sum of `kCount` results relative to the largest score, of which there are `count`.
struct Combined {
  float most = -INFINITY, sum = 0.0f;
  float2 out = {0.0f, 0.0f};

  template <int kCount, class Most, class Sum, class Out>
  __device__ static Combined of(int count, Most&& most_of, Sum&& sum_of, Out&& out_of) {
    Combined all;
    float most[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      most[i] = i < count ? most_of(i) : -INFINITY;
      all.most = fmaxf(all.most, most[i]);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i >= count) break;
      const float weight = weight_of(most[i], all.most);
      const float2 out = out_of(i);
      all.sum += weight * sum_of(i);
      all.out = {all.out.x + weight * out.x, all.out.y + weight * out.y};
    }
    return all;
  }
};

__device__ uint4 load(const Bf16* p) {
  return *reinterpret_cast<const uint4*>(p);
}

__device__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Transposes an 8x8 matrix of 16-bit values, of which a lane has two neighbors of row lane / 4.
__device__ uint32_t transposed(uint32_t x) {
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
  return x;
}

// A warp multiplies 16 positions at a time, the rows of both products' results: keys times queries
// are scores, transposed values times weights are added to the output. Lane 4 * g + c has rows g
// and g + 8 and columns 2 * c and 2 * c + 1, which are heads. The order of what is summed is free,
// so a lane takes the elements of q and of keys in 16-byte pieces.
template <int kSize>
__global__ void __launch_bounds__(kWarps* kWarp, kBlocksPerSm) attend_kernel(Attend p) {
  constexpr int kPieces = kSize / 32;  // of a row of keys per lane
  constexpr int kRun = kSize / 8;      // neighboring elements of values per lane, and rows of out
  __shared__ Partial<kSize> of_warp[kWarps];
  __shared__ Received<kSize> received;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, c = lane % 4;
  const int part = blockIdx.x % p.parts, job = blockIdx.x / p.parts;
  const int64_t sequence = job / p.groups, group = job % p.groups;
  const int64_t step = static_cast<int64_t>(p.groups) * kSize;  // from a position to the next
  const int64_t cached = sequence * p.positions * step + group * kSize;
  const Bf16* const keys = p.keys + cached;
  const Bf16* const values = p.values + cached;

  int begin, end;
  const auto find = [&](int64_t last) {
    const int used = static_cast<int>(last < 0 ? 0 : last < p.positions ? last + 1 : p.positions);
    const int tiles = (used + kTile - 1) / kTile, each = (tiles + p.parts - 1) / p.parts * kTile;
    begin = part * each, end = min(used, begin + each);
  };
#if __CUDA_ARCH__ >= 900
  if (p.parts > 1) cooperative_groups::this_cluster().barrier_arrive();
#endif
  jitquant::let_next_begin();
  // Into the L2 cache, which sees later writes. A position that is written meanwhile only tells
  // what to prefetch.
  find(*p.position);
  for (int i = begin + warp; i < min(end, begin + 2 * kWarps * kTile); i += kWarps) {
    if (lane * 64 < kSize) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(keys + i * step + lane * 64));
      asm volatile("prefetch.global.L2 [%0];" ::"l"(values + i * step + lane * 64));
    }
  }
  jitquant::wait_for_previous();
  find(*static_cast<const volatile int64_t*>(p.position));

  const int64_t first_head = (sequence * p.groups + group) * p.heads;
  uint4 q[kPieces] = {};
  if (g < p.heads) {
    const Bf16* const row = p.q + (first_head + g) * kSize + 8 * c;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) q[j] = load(row + 32 * j);
  }
  float out[kRun / 2][4] = {};
  float most[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  // The next keys and values are on their way while the warp computes.
  uint4 k[2][kPieces], v[4][kRun / 8];
  const auto load_keys = [&](int at) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = at + g + 8 * i;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        k[i][j] = row < end ? load(keys + row * step + 32 * j + 8 * c) : uint4{};
      }
    }
  };
  const auto load_values = [&](int at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = at + 2 * c + (i & 1) + 4 * (i & 2);
#pragma unroll
      for (int j = 0; j < kRun / 8; ++j) {
        v[i][j] = row < end ? load(values + row * step + kRun * g + 8 * j) : uint4{};
      }
    }
  };
  constexpr int kStep = kWarps * kTile;
  load_keys(begin + warp * kTile);
  load_values(begin + warp * kTile);
  for (int at = begin + warp * kTile; at < end; at += kStep) {
    float scores[4] = {};
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      jitquant::mma_16x8x16<jitquant::Bf16>(scores, k[0][j].x, k[1][j].x, k[0][j].y, k[1][j].y,
                                            q[j].x, q[j].y, scores);
      jitquant::mma_16x8x16<jitquant::Bf16>(scores, k[0][j].z, k[1][j].z, k[0][j].w, k[1][j].w,
                                            q[j].z, q[j].w, scores);
    }
    load_keys(at + kStep);
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      float& low = scores[head];
      float& high = scores[head + 2];
      low = at + g < end ? low * p.scale : -INFINITY;
      high = at + g + 8 < end ? high * p.scale : -INFINITY;
      float now = fmaxf(fmaxf(low, high), most[head]);
#pragma unroll
      for (int lanes = 4; lanes < kWarp; lanes *= 2) {
        now = fmaxf(now, __shfl_xor_sync(~0u, now, lanes));
      }
      const float before = weight_of(most[head], now);
      most[head] = now;
      low = exp2f(low - now), high = exp2f(high - now);
      sum[head] = sum[head] * before + low + high;
#pragma unroll
      for (auto& row : out) row[head] *= before, row[head + 2] *= before;
    }
    const uint32_t weights[2] = {transposed(pack(scores[0], scores[1])),
                                 transposed(pack(scores[2], scores[3]))};
#pragma unroll
    for (int t = 0; t < kRun / 2; ++t) {
      const auto word = [&](int i) {
        const uint4& x = v[i][t / 4];
        return t % 4 == 0 ? x.x : t % 4 == 1 ? x.y : t % 4 == 2 ? x.z : x.w;
      };
      jitquant::mma_16x8x16<jitquant::Bf16>(
          out[t], __byte_perm(word(0), word(1), 0x5410), __byte_perm(word(0), word(1), 0x7632),
          __byte_perm(word(2), word(3), 0x5410), __byte_perm(word(2), word(3), 0x7632), weights[0],
          weights[1], out[t]);
    }
    load_values(at + kStep);
  }

  Partial<kSize>& mine = of_warp[warp];
#pragma unroll
  for (int head = 0; head < 2; ++head) {
#pragma unroll
    for (int lanes = 4; lanes < kWarp; lanes *= 2) {
      sum[head] += __shfl_xor_sync(~0u, sum[head], lanes);
    }
    if (g == 0) mine.most[2 * c + head] = most[head], mine.sum[2 * c + head] = sum[head];
#pragma unroll
    for (int t = 0; t < kRun / 2; ++t) {
      mine.out[2 * c + head][kRun / 2 * g + t] = {out[t][head], out[t][head + 2]};
    }
  }
  __syncthreads();
  const auto store = [&](int i, const Combined& x) {
    reinterpret_cast<uint32_t*>(p.out)[first_head * (kSize / 2) + i] =
        pack(x.out.x / x.sum, x.out.y / x.sum);
  };
  const int pairs = p.heads * (kSize / 2);  // of elements
#if __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  if (p.parts > 1) cluster.barrier_wait();  // all have begun
#endif
  for (int i = threadIdx.x; i < pairs; i += kWarps * kWarp) {
    const int head = i / (kSize / 2), pair = i % (kSize / 2);
    const Combined all = Combined::of<kWarps>(
        kWarps, [&](int w) { return of_warp[w].most[head]; },
        [&](int w) { return of_warp[w].sum[head]; },
        [&](int w) { return of_warp[w].out[head][pair]; });
    if (p.parts == 1) {
      store(i, all);
      continue;
    }
#if __CUDA_ARCH__ >= 900
    Received<kSize>* const there = cluster.map_shared_rank(&received, i % p.parts);
    there->out[part * (pairs / p.parts) + i / p.parts] = all.out;
    // Each part is sent these by the threads that send it elements of the head.
    there->most[part][head] = all.most, there->sum[part][head] = all.sum;
#endif
  }
#if __CUDA_ARCH__ >= 900
  if (p.parts == 1) return;
  cluster.sync();
  for (int i = threadIdx.x; i < pairs / p.parts; i += kWarps * kWarp) {
    const int head = (i * p.parts + part) / (kSize / 2);
    store(i * p.parts + part,
          Combined::of<kMostParts>(
              p.parts, [&](int of) { return received.most[of][head]; },
              [&](int of) { return received.sum[of][head]; },
              [&](int of) { return received.out[of * (pairs / p.parts) + i]; }));
  }
#endif
}

}  // namespace jitquant_decode

#ifndef __CUDACC_RTC__
using jitquant::TensorView;
using namespace jitquant_decode;

cudaError_t launch_attend(const TensorView& q, const TensorView& keys, const TensorView& values,
                          const int64_t* position, const TensorView& out, cudaStream_t stream) {
  const int64_t sequences = keys.with_rank(4).size(0), positions = keys.size(1);
  const int64_t groups = keys.size(2), size = keys.size(3);
  values.with_shape_of(keys);
  const int64_t all = q.with_rank(3).with_size(0, sequences).with_size(2, size).size(1);
  out.with_shape_of(q);
  if ((size != 64 && size != 128) || groups == 0 || all % groups != 0 ||
      all / groups > kMostHeads) {
    jitquant::refuse("q: expected heads of 64 or 128, up to 8 for one of keys, got %lld of %lld",
                     static_cast<long long>(all), static_cast<long long>(size));
  }
  if (sequences * all == 0) return cudaSuccess;
  const auto read = [](const TensorView& t) {
    return t.contiguous().aligned(16).data<const Bf16>();
  };
  // A thread block for most SMs, if each has a tile per warp or more. Beyond that, the barriers of
  // a cluster take longer than they save.
  const int64_t jobs = sequences * groups;
  int parts = 1;
  while (jitquant::device_traits().major >= 9 && parts < kMostParts &&
         2 * jobs * parts <= jitquant::sm_count() && positions > parts * kWarps * kTile) {
    parts *= 2;
  }
  const Attend p = {read(q),
                    read(keys),
                    read(values),
                    position,
                    out.contiguous().aligned(16).data<Bf16>(),
                    static_cast<int>(all / groups),
                    static_cast<int>(groups),
                    static_cast<int>(positions),
                    parts,
                    1.44269504f / sqrtf(static_cast<float>(size))};
  const jitquant::LaunchShape shape = {jobs * parts, kWarps * kWarp, jitquant::Start::kOverlapped,
                                       parts};
  return size == 64 ? jitquant::launch<&attend_kernel<64>>(shape, stream, p)
                    : jitquant::launch<&attend_kernel<128>>(shape, stream, p);
}

JITQUANT_EXPORT(launch_attend,
                "attend(Tensor q, Tensor keys, Tensor values, Tensor position, *, Tensor(a!) out)"
                " -> ()")
JITQUANT_EXPORT_RESIDENT()
#endif
