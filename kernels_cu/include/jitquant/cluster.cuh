// Clusters of thread blocks (compute capability 9.0 and later): their barrier, writes to each
// other's shared memory, and a small tensor in one launch, with one block of values per thread.
#pragma once

#include "jitquant/device.cuh"
#include "jitquant/reduce.cuh"

namespace jitquant {

constexpr int kClusterThreads = 896;  // at most per thread block, one block of 16 values each
constexpr int kClusterBlocks = 8;     // every device with clusters supports this size

// For a grid of one cluster, or of one thread block; `blocks` counts blocks of values.
inline LaunchShape cluster_shape(int cluster, int64_t blocks) {
  const int threads = static_cast<int>(((blocks + cluster - 1) / cluster + 31) / 32 * 32);
  return {cluster, threads < 32 ? 32 : threads, Start::kOverlapped, cluster};
}

// The threads of a block whose cluster holds a row: several such blocks fit on an SM.
constexpr int kClusterRowThreads = 256, kFewestClusterRowThreads = 128;

#ifndef __CUDACC_RTC__
// Whether a cluster holds each row, of `threads` threads.
inline bool cluster_holds(int64_t rows, int64_t threads) {
  return rows > 0 && rows < 1 << 28 && threads > kClusterRowThreads &&
         threads <= kClusterBlocks * kClusterRowThreads && device_traits().major >= 9;
}
// For such rows: the clusters of which the most fit on the device, where an SM holds `warps` of
// their kernel. A size between two powers of two often fits better: 28672 columns fill seven blocks
// of 128 threads, eight of which fill an SM of 32 warps; of four blocks of 224 it holds four.
inline LaunchShape cluster_rows(int64_t rows, int64_t threads, int warps) {
  constexpr int kParts = 840;  // of a row; all sizes divide it
  LaunchShape shape = {rows, 0, Start::kOverlapped};
  int most = -1;
  for (int blocks = 2; blocks <= kClusterBlocks; ++blocks) {
    const int block = static_cast<int>((threads + 32 * blocks - 1) / (32 * blocks)) * 32;
    if (block < kFewestClusterRowThreads || block > kClusterRowThreads) continue;
    const int held = warps * 32 / block * (kParts / blocks);
    if (held <= most) continue;
    most = held;
    shape.grid = rows * blocks, shape.block = block, shape.cluster = blocks;
  }
  return shape;
}
// How a kernel is launched for a cluster per row.
struct ClusterRows {
  LaunchShape shape;
  int at_once;  // rows whose clusters fit on the device together
};
template <auto kKernel>
ClusterRows clusters_of(int64_t rows, int64_t threads) {
  const int warps = blocks_per_sm<kKernel>(128, 0) * 4;  // that fit on an SM
  const LaunchShape shape = cluster_rows(rows, threads, warps);
  return {shape, warps * 32 / shape.block * sm_count() / shape.cluster};
}
#endif

// Devices before 9.0 have no clusters, so their kernels for clusters are empty.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define JITQUANT_HAS_CLUSTERS 1
#endif

#if defined(JITQUANT_HAS_CLUSTERS)

// The cluster barrier. Relaxed: it does not make earlier writes of a thread visible to others.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if defined(__CUDA_ARCH__)
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
  __cluster_barrier_arrive_relaxed();
#endif
}
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__)
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#else
  __cluster_barrier_arrive();
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__)
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __cluster_barrier_wait();
#endif
}

// Writes x to *shared in block `rank` of the cluster; `shared` is the address in this block.
__device__ __forceinline__ void store_in_block(float* shared, uint32_t rank, float x) {
#if defined(__CUDA_ARCH__)
  const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
#else
  *static_cast<float*>(__cluster_map_shared_rank(shared, rank)) = x;
#endif
}

// Floats that another block of the cluster writes to this block's shared memory. An mbarrier counts
// their bytes when they arrive, so neither block needs a fence.
class Inbox {
 public:
  __device__ __forceinline__ explicit Inbox(uint64_t* barrier) : barrier_(barrier) {}

  // Called by one thread, before the first barrier of the cluster.
  __device__ __forceinline__ void open() const {
#if defined(__CUDA_ARCH__)
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\n"
        "fence.mbarrier_init.release.cluster;" ::"r"(address(barrier_))
        : "memory");
#endif
  }
  // Writes x, one float or four neighbors, to *shared in block `rank`; `shared` is the address in
  // this block.
  template <int kEach>
  __device__ __forceinline__ void send(void* shared, uint32_t rank, const float (&x)[kEach]) const {
    static_assert(kEach == 1 || kEach == 4, "what is stored at once");
#if defined(__CUDA_ARCH__)
    const auto in_block = [&](const void* p) {
      uint32_t there;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(p)), "r"(rank));
      return there;
    };
    if constexpr (kEach == 1) {
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
              in_block(shared)),
          "f"(x[0]), "r"(in_block(barrier_))
          : "memory");
    } else {
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
          "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(in_block(shared)),
          "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(in_block(barrier_))
          : "memory");
    }
#else
    for (int i = 0; i < kEach; ++i) store_in_block(static_cast<float*>(shared) + i, rank, x[i]);
#endif
  }
  // Called by one thread, once per phase: that many bytes will have been sent to this block.
  __device__ __forceinline__ void expect(uint32_t bytes) const {
#if defined(__CUDA_ARCH__)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier_)),
                 "r"(bytes)
                 : "memory");
#endif
  }
  // Called by all threads: waits for all bytes of a phase. `parity` is 0 for the first one. The
  // fence is for shared memory alone: one for all memory would drop what the L1 cache has.
  __device__ __forceinline__ void wait(uint32_t parity) const {
#if defined(__CUDA_ARCH__)
    asm volatile(
        "{\n"
        " .reg .pred done;\n"
        "again:\n"
        " mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 done, [%0], %1;\n"
        " @!done bra again;\n"
        " fence.acquire.sync_restrict::shared::cluster.cluster;\n"
        "}" ::"r"(address(barrier_)),
        "r"(parity)
        : "memory");
#else
    cluster_arrive();
    cluster_wait();
#endif
  }

 private:
#if defined(__CUDA_ARCH__)
  static __device__ __forceinline__ uint32_t address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
  }
#endif
  uint64_t* const barrier_;
};

// The threads of the thread blocks of a cluster, which reduce together (reduce.cuh), at most twice.
// `blocks` of them, in a grid of one dimension. By the time begin() waits for them, all other
// blocks have long started. There is no barrier after that: its fence would wait for all stores of
// a thread, and drop what the L1 cache has.
class ClusterTeam {
 public:
  static constexpr bool kCluster = true;
  static constexpr int kMostWarps = kClusterBlocks * kClusterRowThreads / 32;
  struct Mail {
    uint64_t barriers[2];
  };

  __device__ __forceinline__ explicit ClusterTeam(int blocks) : blocks_(blocks) {
#if defined(__CUDA_ARCH__)  // two divisions less
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(index_));
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank_));
#else
    index_ = blockIdx.x / static_cast<uint32_t>(blocks);
    rank_ = static_cast<int>(blockIdx.x % static_cast<uint32_t>(blocks));
#endif
  }
  __device__ __forceinline__ void open(Mail& mail) {
    mail_ = &mail;
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : mail.barriers) Inbox(&barrier).open();
    }
    __syncwarp();
    cluster_arrive_relaxed();
  }
  __device__ __forceinline__ uint32_t index() const { return index_; }
  // Prefetches what this thread block would hold of row r, of `width` blocks of values, `each` per
  // thread. While the cluster reduces, memory brings the row of the cluster that will replace it.
  template <int kEach, class Source>
  __device__ __forceinline__ void prefetch(const Source& source, uint32_t r, int width) const {
    if (threadIdx.x != 0 || r >= source.rows) return;
    const int first = kEach * thread(), share = kEach * static_cast<int>(blockDim.x);
    if (first < width) source.prefetch_part(source.row(r), first, min(share, width - first));
  }
  __device__ __forceinline__ int threads() const { return blocks_ * static_cast<int>(blockDim.x); }
  __device__ __forceinline__ int thread() const {
    return rank_ * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  }
  __device__ __forceinline__ int warps() const { return threads() >> 5; }
  __device__ __forceinline__ int warp() const { return thread() >> 5; }
  __device__ __forceinline__ void begin() {
    if (!all_started_) cluster_wait();
    all_started_ = true;
  }
  __device__ __forceinline__ void put(float* to, int lane, float x) const {
    const float alone[1] = {x};
    if (lane < blocks_) inbox().send(to, static_cast<uint32_t>(lane), alone);
  }
  __device__ __forceinline__ void sync(int count) {
    if (threadIdx.x == 0) inbox().expect(static_cast<uint32_t>(count) * sizeof(float));
    inbox().wait(0);
    ++turn_;
  }

 private:
  __device__ __forceinline__ Inbox inbox() const { return Inbox(mail_->barriers + turn_); }

  uint32_t index_;
  int blocks_, rank_, turn_ = 0;
  bool all_started_ = false;
  Mail* mail_;
};

// The maximum over such a grid, once, through the shared memory of its blocks. Constructed at the
// start of a kernel: by the time max() writes to other blocks' memory, all of them have long
// started.
class ClusterMax {
 public:
  using Scratch = float[kClusterBlocks];

  __device__ __forceinline__ explicit ClusterMax(Scratch& maxima)
      : maxima_(maxima), clustered_(gridDim.x > 1) {
    if (clustered_) cluster_arrive_relaxed();
  }

  // Every thread passes its block's maximum, a magnitude, and gets the maximum of all blocks.
  __device__ __forceinline__ float max(float x) {
    if (!clustered_) return x;
    cluster_wait();  // all blocks have started
    if (threadIdx.x < gridDim.x) store_in_block(maxima_ + blockIdx.x, threadIdx.x, x);
    cluster_arrive();
    cluster_wait();
    const int lane = threadIdx.x & 31;
    return warp_max(lane < gridDim.x ? maxima_[lane] : 0.0f);
  }

 private:
  Scratch& maxima_;
  const bool clustered_;
};
#else
// Never launched, but compiled.
struct ClusterTeam : BlockTeam {
  ClusterTeam() = default;
  __device__ explicit ClusterTeam(int) {}
};
#endif

}  // namespace jitquant
