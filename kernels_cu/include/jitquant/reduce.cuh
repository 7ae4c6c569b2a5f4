// Reductions in a fixed order, so that results never depend on timing.
#pragma once

#include <cuda_runtime.h>

#include "jitquant/block.cuh"
#include "jitquant/memory.cuh"

namespace jitquant {

// The maximum over a warp of values that are neither negative nor NaN: these compare as integers.
__device__ __forceinline__ float warp_max(float x) {
  return bits_float(__reduce_max_sync(0xffffffffu, float_bits(x)));
}

// The sum and the maximum over the lanes up to this one.
__device__ __forceinline__ int sum_up_to(int value, int lane) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes <<= 1) {
    const int other = __shfl_up_sync(~0u, value, lanes);
    if (lane >= lanes) value += other;
  }
  return value;
}
__device__ __forceinline__ int max_up_to(int value, int lane) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes <<= 1) {
    const int other = __shfl_up_sync(~0u, value, lanes);
    if (lane >= lanes) value = max(value, other);
  }
  return value;
}

// max(b, that of the lane whose number differs by `offset`), NaN if either is.
__device__ __forceinline__ float amax_with_lane(float b, int offset, uint32_t mask = 0xffffffffu) {
  return amax_keep_nan(b, __shfl_xor_sync(mask, b, offset));
}
// The amax over `lanes` neighboring lanes, a power of two up to 16.
__device__ __forceinline__ float lanes_amax(float b, int lanes, uint32_t mask = 0xffffffffu) {
#pragma unroll
  for (int offset = 8; offset > 0; offset >>= 1) {
    if (offset < lanes) b = amax_with_lane(b, offset, mask);
  }
  return b;
}
// The same of both halves of a word, each a value of T with any sign.
template <class T>
__device__ __forceinline__ uint32_t lanes_amax_pair(uint32_t pair, int lanes) {
#pragma unroll
  for (int offset = 8; offset > 0; offset >>= 1) {
    if (offset < lanes) pair = pair_max<T, true>(pair, __shfl_xor_sync(0xffffffffu, pair, offset));
  }
  return pair;
}
// The amax over every kStep-th lane.
template <int kStep>
__device__ __forceinline__ float spread_lanes_amax(float b) {
#pragma unroll
  for (int offset = kStep; offset < 32; offset <<= 1) b = amax_with_lane(b, offset);
  return b;
}

// The larger of two numbers that are not negative, or NaN: they compare as integers.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
  return bits_float(max(float_bits(a), float_bits(b)));
}

// The threads that reduce together: those of a thread block. cluster.cuh has those of a cluster.
struct BlockTeam {
  static constexpr bool kCluster = false;
  static constexpr int kMostWarps = 32;
  struct Mail {};  // what put() and sync() need in shared memory

  // Called by all threads, at the start of a kernel.
  static __device__ __forceinline__ void open(Mail&) {}
  // Among the teams of the grid.
  static __device__ __forceinline__ uint32_t index() { return blockIdx.x; }
  static __device__ __forceinline__ int threads() { return blockDim.x; }
  static __device__ __forceinline__ int thread() { return threadIdx.x; }
  static __device__ __forceinline__ int warps() { return blockDim.x >> 5; }
  static __device__ __forceinline__ int warp() { return threadIdx.x >> 5; }
  // Before the first put(). Called by all threads.
  static __device__ __forceinline__ void begin() {}
  // Writes x to *to for the whole team. Called by some lanes of a warp, numbered from 0 on.
  static __device__ __forceinline__ void put(float* to, int lane, float x) {
    if (lane == 0) *to = x;
  }
  // Waits until all that was put since the last time, `count` floats, is there.
  static __device__ __forceinline__ void sync(int) { __syncthreads(); }
};

// Reductions over a team. All its threads call them together and get the result. They alternate
// between two buffers, so that one barrier each separates reads from later writes.
template <class Team>
class TeamReduce {
 public:
  struct Scratch : Team::Mail {
    float maxima[2][Team::kMostWarps];
  };

  __device__ __forceinline__ explicit TeamReduce(Scratch& scratch, const Team& team = {})
      : maxima_(scratch.maxima), team_(team) {
    team_.open(scratch);
  }

  __device__ __forceinline__ float max(float x) {
    x = warp_max(x);
    if (warps() == 1) return x;
    return warp_max(exchange(x));
  }

 protected:
  __device__ __forceinline__ int warps() const { return team_.warps(); }
  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }

  // How many lanes take the result of a warp each after an exchange. Eight, repeated across the
  // warp, are enough for most blocks.
  __device__ __forceinline__ int lanes() const { return warps() <= 8 ? 8 : 32; }

  // Writes this warp's result, a magnitude. Each of the first lanes gets the larger result of at
  // most two warps, or zero. `others` floats were put before.
  __device__ __forceinline__ float exchange(float x, int others = 0) {
    float* const buffer = maxima_[turn_];
    turn_ ^= 1;
    team_.begin();
    team_.put(buffer + team_.warp(), lane(), x);
    team_.sync(others + warps());
    const auto of = [&](int warp) { return warp < warps() ? buffer[warp] : 0.0f; };
    if constexpr (Team::kMostWarps > 32) return larger_magnitude(of(lane()), of(lane() + 32));
    return of(lane() & (lanes() - 1));
  }

  float (&maxima_)[2][Team::kMostWarps];
  Team team_;
  int turn_ = 0;
};
using BlockReduce = TeamReduce<BlockTeam>;

// The maximum of `count` amaxes in memory, by all threads of a block. kFresh: other thread blocks
// of this launch wrote them. kBlock: the number of threads, if it is known: then several loads are
// in flight.
template <bool kFresh = false, int kBlock = 0>
__device__ __forceinline__ float partials_amax(const float* partials, int count,
                                               BlockReduce& reduce) {
  float amax = 0.0f;
  for (int i = threadIdx.x; i < count; i += kBlock > 0 ? kBlock : blockDim.x) {
    amax = larger_magnitude(amax, kFresh ? __ldcg(partials + i) : partials[i]);
  }
  return reduce.max(amax);
}

// ---- the sum of a row's squares ----------------------------------------------------------------
//
// All kernels add in the same order, so that inv_rms has the same bits (docs/numerics.md):
//   within a block of 16 values: each 16 bytes of x sequentially, then these sums in pairs;
//   within a chunk of 32 blocks: the first half plus the second half, five times;
//   over the chunks: every 64th sequentially, then these 64 sums like those of a chunk.
// Missing values count as zero. That changes no bit, so they can be skipped.

// inv_rms of a row of `cols` columns whose squares sum to `squares`; `over_cols` is RN(1 / cols).
JITQUANT_HD float inverse_rms(float squares, float over_cols, float eps) {
  return reciprocal_of_root(fma_rn(squares, over_cols, eps));
}

// Sums the squares of one block. Its values come in order, or with its 16-byte parts in the order i
// ^ n.
template <class T>
class BlockSquares {
 public:
  __device__ __forceinline__ void add(int i, float v) {
    float& run = runs_[i / kLength];
    run = i % kLength == 0 ? mul_rn(v, v) : fma_rn(v, v, run);
  }
  __device__ __forceinline__ float sum() const {
    const float first = add_rn(runs_[0], runs_[1]);
    return kRuns == 2 ? first : add_rn(first, add_rn(runs_[kRuns - 2], runs_[kRuns - 1]));
  }

 private:
  static constexpr int kLength = 16 / sizeof(T), kRuns = 16 / kLength;
  float runs_[kRuns];
};

// The sum of a chunk, of which each lane holds a block. Every lane gets it.
__device__ __forceinline__ float chunk_sum(const float (&x)[1]) {
  float sum = x[0];
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    sum = add_rn(sum, __shfl_xor_sync(0xffffffffu, sum, offset));
  }
  return sum;
}
// The sums of a and of b over 2 * kHalf neighboring lanes: the second half of them gets that of b.
template <int kHalf>
__device__ __forceinline__ float sums_of_two(float a, float b) {
  const bool second = threadIdx.x & kHalf;
  const float mine = second ? b : a, other = second ? a : b;
  float sum = add_rn(mine, __shfl_xor_sync(0xffffffffu, other, kHalf));
#pragma unroll
  for (int offset = kHalf / 2; offset > 0; offset >>= 1) {
    sum = add_rn(sum, __shfl_xor_sync(0xffffffffu, sum, offset));
  }
  return sum;
}
// The sums of two chunks: lanes 16 to 31 get the second.
__device__ __forceinline__ float chunk_sum(const float (&x)[2]) {
  return sums_of_two<16>(x[0], x[1]);
}

constexpr int kChunkSums = 64;

// Sums `count` chunk sums in shared memory, followed by zeros. Called by a warp; every lane gets
// the sum.
__device__ __forceinline__ float sum_of_chunks(const float (&sums)[kChunkSums], int count) {
  if (count <= 16) {  // rows of up to 8192 values: no shuffles, for which other threads would wait
    const float4* const fours = reinterpret_cast<const float4*>(sums);
    const auto plus = [](const float4& a, const float4& b) -> float4 {
      return {add_rn(a.x, b.x), add_rn(a.y, b.y), add_rn(a.z, b.z), add_rn(a.w, b.w)};
    };
    const float4 sum = plus(plus(fours[0], fours[2]), plus(fours[1], fours[3]));
    return add_rn(add_rn(sum.x, sum.z), add_rn(sum.y, sum.w));
  }
  const int lane = kept(threadIdx.x) & 31;
  const float both[1] = {add_rn(sums[lane], sums[lane + 32])};
  return chunk_sum(both);
}

// The same of up to twice as many, which nothing follows.
__device__ __forceinline__ float sum_of_chunks(const float (&sums)[2 * kChunkSums], int count) {
  const auto of = [&](int chunk) { return chunk < count ? sums[chunk] : 0.0f; };
  const int lane = threadIdx.x & 31;
  const float all[1] = {add_rn(add_rn(of(lane), of(lane + kChunkSums)),
                               add_rn(of(lane + 32), of(lane + 32 + kChunkSums)))};
  return chunk_sum(all);
}

// That sum and maximum, over a team.
template <class Team>
class TeamRowReduce : public TeamReduce<Team> {
  static constexpr int kSums = 2 * Team::kMostWarps;

 public:
  struct Scratch : TeamReduce<Team>::Scratch {
    alignas(16) float sums[2][kSums];
  };

  // For threads with kBlocks blocks each, or with any number if kBlocks is 0.
  template <int kBlocks>
  static __device__ __forceinline__ TeamRowReduce of(Scratch& scratch, const Team& team = {}) {
    if (kBlocks > 0 && !Team::kCluster) {
      const int first = kBlocks * team.warps() + static_cast<int>(threadIdx.x);
      for (int i = first; i < kChunkSums; i += blockDim.x) {
        scratch.sums[0][i] = scratch.sums[1][i] = 0.0f;
      }
    }
    return TeamRowReduce(scratch, team);
  }

  // The sum, and the maximum of `max`. Each thread has the squares of blocks t, t + threads, ...
  template <int kBlocks>
  __device__ __forceinline__ float sum(const float (&squares)[kBlocks]) {
    const float mine = chunk_sum(squares);
    if (warps() == 1) return of_one_warp<kBlocks>(mine);
    put<kBlocks>(mine);
    return sum(kBlocks * warps());
  }
  template <int kBlocks>
  __device__ __forceinline__ float2 sum_and_max(const float (&squares)[kBlocks], float max) {
    const float mine = chunk_sum(squares);
    if (warps() == 1) return {of_one_warp<kBlocks>(mine), warp_max(max)};
    put<kBlocks>(mine);
    return sum_and_max(max, kBlocks * warps());
  }

  // The same for blocks that arrive one after another: begin() first, add() for each block, sum()
  // last. All lanes of a warp call them together; lanes without a block pass zero. The number of
  // warps is a power of two, or there are fewer chunks than kChunkSums, so that only one warp adds
  // to a sum.
  __device__ __forceinline__ void begin() {
    for (int i = (threadIdx.x >> 5) + lane() * warps(); i < kChunkSums; i += 32 * warps()) {
      sums_[turn_][i] = 0.0f;
    }
    __syncwarp();
  }
  __device__ __forceinline__ void add(int block, float squares) {
    const float alone[1] = {squares}, sum = chunk_sum(alone);
    float& to = sums_[turn_][(block >> 5) & (kChunkSums - 1)];
    if (lane() == 0) to = add_rn(to, sum);
  }
  __device__ __forceinline__ float sum(int count = kChunkSums) {
    const int turn = turn_;
    turn_ ^= 1;
    team_.sync(count);
    return sum_of_chunks(sums_[turn], count);
  }
  __device__ __forceinline__ float2 sum_and_max(float max, int count = kChunkSums) {
    const int turn = turn_;
    const float most = warp_max(exchange(warp_max(max), count));
    return {sum_of_chunks(sums_[turn], count), most};
  }

 private:
  using Base = TeamReduce<Team>;
  using Base::exchange;
  using Base::lane;
  using Base::team_;
  using Base::turn_;
  using Base::warps;

  __device__ __forceinline__ TeamRowReduce(Scratch& scratch, const Team& team)
      : Base(scratch, team), sums_(scratch.sums) {}

  template <int kBlocks>
  static __device__ __forceinline__ float of_one_warp(float sum) {
    const float other = __shfl_xor_sync(0xffffffffu, sum, 16);
    return kBlocks == 1 ? sum : add_rn(sum, other);
  }
  template <int kBlocks>
  __device__ __forceinline__ void put(float sum) {
    const int part = lane() >> 4;
    team_.begin();
    if (part < kBlocks) {
      team_.put(sums_[turn_] + team_.warp() + part * warps(), lane() & 15, sum);
    }
  }

  float (&sums_)[2][kSums];
};
using RowReduce = TeamRowReduce<BlockTeam>;

// Some neighboring lanes of a warp, 2^log2 of them, which hold a row: up to three blocks each.
struct LaneTeam {
  static constexpr bool kCluster = false;
  int log2;

  // Among the teams of a grid with kThreads threads per block.
  template <int kThreads>
  __device__ __forceinline__ uint32_t index() const {
    return (blockIdx.x * kThreads + threadIdx.x) >> log2;
  }
  __device__ __forceinline__ int threads() const { return 1 << log2; }
  __device__ __forceinline__ int thread() const { return threadIdx.x & (threads() - 1); }
};

// The sum of a row's squares and the maximum of its values over such lanes. All lanes of a warp
// call this together.
class LaneReduce {
 public:
  using Scratch = char;

  __device__ __forceinline__ explicit LaneReduce(const LaneTeam& team) : team_(team) {}

  __device__ __forceinline__ float max(float x) const {
    uint32_t most = float_bits(x);
    if (team_.log2 == 5) return bits_float(__reduce_max_sync(0xffffffffu, most));
#pragma unroll 1
    for (int offset = team_.threads() >> 1; offset > 0; offset >>= 1) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, most, offset);
      most = other > most ? other : most;
    }
    return bits_float(most);
  }
  // Each lane has the squares of blocks t, t + threads, ...
  template <int kBlocks>
  __device__ __forceinline__ float sum(const float (&squares)[kBlocks]) const {
    static_assert(kBlocks <= 4, "more are in another order");
    constexpr int kSecond = kBlocks > 1 ? 1 : 0, kThird = kBlocks > 2 ? 2 : 0;
    if (kBlocks > 1 && team_.log2 == 5) {  // up to four chunks
      float half = sums_of_two<16>(squares[0], squares[kSecond]);
      if (kBlocks > 2) {
        const float fourth = kBlocks > 3 ? squares[kBlocks > 3 ? 3 : 0] : 0.0f;
        half = add_rn(half, sums_of_two<16>(squares[kThird], fourth));
      }
      return add_rn(half, __shfl_xor_sync(0xffffffffu, half, 16));
    }
    if (kBlocks > 2 && team_.log2 == 4) {  // a chunk and a half
      const float half = sums_of_two<8>(add_rn(squares[0], squares[kSecond]), squares[kThird]);
      return add_rn(half, __shfl_xor_sync(0xffffffffu, half, 8));
    }
    float sum = own(squares);
#pragma unroll 1
    for (int offset = team_.threads() >> 1; offset > 0; offset >>= 1) {
      sum = add_rn(sum, __shfl_xor_sync(0xffffffffu, sum, offset));
    }
    return sum;
  }
  template <int kBlocks>
  __device__ __forceinline__ float2 sum_and_max(const float (&squares)[kBlocks], float max) const {
    if (team_.log2 >= 5 - (kBlocks > 2)) return {sum(squares), this->max(max)};
    // In one loop, so that the steps overlap.
    float2 all = {own(squares), max};
#pragma unroll 1
    for (int offset = team_.threads() >> 1; offset > 0; offset >>= 1) {
      const float sum = __shfl_xor_sync(0xffffffffu, all.x, offset);
      const uint32_t other = __shfl_xor_sync(0xffffffffu, float_bits(all.y), offset);
      all.x = add_rn(all.x, sum);
      if (other > float_bits(all.y)) all.y = bits_float(other);
    }
    return all;
  }

 private:
  // The blocks of a row shorter than a chunk are added like those of a chunk, as far as there are
  // any.
  template <int kBlocks>
  static __device__ __forceinline__ float own(const float (&squares)[kBlocks]) {
    float sum = squares[0];
    if (kBlocks > 2) sum = add_rn(sum, squares[kBlocks > 2 ? 2 : 0]);
    if (kBlocks > 1) sum = add_rn(sum, squares[kBlocks > 1 ? 1 : 0]);
    return sum;
  }

  LaneTeam team_;
};

}  // namespace jitquant
