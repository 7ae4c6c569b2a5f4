// Launch 1 of a whole tensor's scale: each thread block writes its amax to `partials`, a workspace
// that belongs to the call. Every thread block of launch 2 reduces the partials for itself. There
// is no counter, no memset and no state to reset, so concurrent calls, replayed graphs and failed
// launches cannot disturb each other.
#pragma once

#include "jitquant/cluster.cuh"
#include "jitquant/dispatch.cuh"
#include "jitquant/flat.cuh"
#include "jitquant/reduce.cuh"

namespace jitquant {

// The amax of the values that this thread block walks over. All its threads get it.
template <bool kNan = false, class Source>
__device__ __forceinline__ float walked_amax(const Source& source, BlockReduce& reduce) {
  constexpr int kAtOnce = sizeof(typename Source::Fetched) <= 32 ? 2 : 1;
  Amax<typename Source::Value::Element, kNan> amax;
  BlockWalk walk(blocks_of(source.cols));
#pragma unroll 1
  while (walk.row < source.rows) {
    typename Source::Fetched fetched[kAtOnce];
    int64_t rows[kAtOnce], blocks[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      rows[i] = walk.row, blocks[i] = walk.block;
      if (walk.row < source.rows) {
        fetched[i] = source.template fetch<false>(source.row(walk.row), walk.block);
      }
      walk.next();
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (rows[i] < source.rows) {
        amax.add(source.template value<false>(fetched[i], source.row(rows[i]), blocks[i]));
      }
    }
  }
  return reduce.max(amax.result());
}
template <bool kNan = false, class T>
__device__ __forceinline__ float walked_amax(const FlatSource<T>& source, BlockReduce& reduce) {
  constexpr int kAtOnce = sizeof(T) == 2 ? 2 : 1;
  Amax<T, kNan> amax;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t block = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
#pragma unroll 1
  for (; block + (kAtOnce - 1) * step < source.blocks; block += kAtOnce * step) {
    Block<T> x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = source.fetch(block + i * step);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) amax.add(x[i]);
  }
  if (block < source.blocks) amax.add(source.fetch(block));
  return reduce.max(amax.result());
}

// Prefetches what walked_amax loads first.
template <class Source>
__device__ __forceinline__ void prefetch_walked(const Source& source) {
  const BlockWalk walk(blocks_of(source.cols));
  if (walk.row < source.rows) source.prefetch(source.row(walk.row), walk.block);
}
template <class T>
__device__ __forceinline__ void prefetch_walked(const FlatSource<T>& source) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (block + i * step < source.blocks) source.prefetch(block + i * step);
  }
}

// Calls write(amax) in one thread of a grid, which has one block or is cooperative, with the
// largest `amax` of its blocks. The grid barrier lets block 0 see those of the others, so no
// counter has to be zero at launch. kBlock: the threads of a block, if known.
template <int kBlock = 0, class F>
__device__ __forceinline__ void with_grid_amax(float amax, float* partials, BlockReduce& reduce,
                                               F&& write) {
  if (gridDim.x > 1) {
    if (threadIdx.x == 0) partials[blockIdx.x] = amax;
    sync_grid();
    if (blockIdx.x != 0) return;
    amax = partials_amax<true, kBlock>(partials, gridDim.x, reduce);
  }
  if (threadIdx.x == 0) write(amax);
}

template <class Source>
constexpr int amax_blocks_per_sm() {
  return sizeof(typename Source::Element) == 2 ? 2 : 1;
}

// How many partials a reader expects: as many as there are thread blocks.
struct EachPartial {
  static __device__ __forceinline__ void put(float* partials, float amax) {
    if (threadIdx.x == 0) partials[blockIdx.x] = amax;
  }
};

template <class Source, bool kNan, class Partials = EachPartial>
__global__ void __launch_bounds__(2 * kThreads, amax_blocks_per_sm<Source>())
    amax_kernel(Source source, float* partials) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  prefetch_walked(source);
  wait_for_previous();
  let_next_begin();
  Partials::put(partials, walked_amax<kNan>(source, reduce));
}

#ifndef __CUDACC_RTC__
// How a tensor of rows x cols values gets its own gsa. Depends on its size and the device alone:
//   one launch    compute capability 9.0 and later, up to 8 x 896 blocks of 16 values: a cluster of
//                 thread blocks, one block of values per thread
//   two launches  anything else, with a workspace of `partials` floats
// On an H200 the cluster takes 1.5 to 2.5 us for NVFP4, two launches take 2.6; with 1024 threads
// 18 rows of 7168 take 2.7. A cluster of 16 thread blocks may not fit. A cooperative launch that
// keeps up to 29 MB on the chip was slower than two overlapped launches at every size
// (docs/experiments.md).
struct AmaxPlan {
  int cluster;   // thread blocks of the single launch; 0: two launches
  int partials;  // floats of workspace for two launches
};

inline int amax_grid(int64_t rows, int64_t cols) {
  // Launch 1 leaves room on each SM for the thread blocks of launch 2.
  const int64_t items = (rows * blocks_of(cols) + 4 * kThreads - 1) / (4 * kThreads);
  const int64_t grid = persistent_grid(items, 2);
  return static_cast<int>(grid < kMaxPartials ? grid : kMaxPartials);
}

inline AmaxPlan amax_plan(int64_t rows, int64_t cols) {
  const int64_t blocks = rows * blocks_of(cols);
  const DeviceTraits device = device_traits();
  if (device.major >= 9 && blocks <= kClusterBlocks * kClusterThreads) {
    int cluster = 1;  // as many as give each 512 threads
    while (cluster < kClusterBlocks && cluster * 512 < blocks) cluster *= 2;
    return {cluster, 0};
  }
  return {0, amax_grid(rows, cols)};
}

template <bool kNan = false, class Partials = EachPartial, class Source>
cudaError_t launch_amax(const Source& source, float* partials, int count, cudaStream_t stream) {
  return launch<&amax_kernel<Source, kNan, Partials>>(
      {count, 2 * kThreads, Start::kAlwaysOverlapped}, stream, source, partials);
}

// launch_amax on a plain tensor.
template <class T, bool kNan = false, class Partials = EachPartial>
cudaError_t launch_amax_plain(const Matrix& x, float* partials, int count, cudaStream_t stream) {
  return is_flat(x) ? launch_amax<kNan, Partials>(flat_source<T>(x), partials, count, stream)
                    : launch_amax<kNan, Partials>(PlainSource<T>(x), partials, count, stream);
}
#endif

}  // namespace jitquant
