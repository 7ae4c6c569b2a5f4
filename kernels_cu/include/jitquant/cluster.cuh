// A small tensor in one launch: a cluster of thread blocks, one block of values a thread (compute
// capability 9.0 on).
#pragma once

#include "jitquant/device.cuh"
#include "jitquant/reduce.cuh"

namespace jitquant {

constexpr int kClusterThreads = 512;  // of a block, one block of 16 values each
constexpr int kClusterBlocks = 8;     // every device with clusters has them of this size

// For a grid that is one cluster, or one block: `blocks` are the blocks of values.
inline LaunchShape cluster_shape(int cluster, int64_t blocks) {
  const int threads = static_cast<int>(((blocks + cluster - 1) / cluster + 31) / 32 * 32);
  return {cluster, threads < 32 ? 32 : threads, Start::kOverlapped, cluster};
}

// A device before 9.0 launches no clusters, so that its kernels for them are empty.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define JITQUANT_HAS_CLUSTERS 1
#endif

#if defined(JITQUANT_HAS_CLUSTERS)

// The barrier of a cluster: relaxed, what a thread wrote before need not be seen by others after.
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

// *shared = x in block `rank` of the cluster, where `shared` is this block's.
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

// The maximum over such a grid, once, through the blocks' shared memory. Made at a kernel's start,
// so that by the time of max(), which writes to the others' memory, all blocks have long begun.
class ClusterMax {
 public:
  using Scratch = float[kClusterBlocks];

  __device__ __forceinline__ explicit ClusterMax(Scratch& maxima)
      : maxima_(maxima), clustered_(gridDim.x > 1) {
    if (clustered_) cluster_arrive_relaxed();
  }

  // Every thread gives its block's maximum, a magnitude, and gets that of all blocks.
  __device__ __forceinline__ float max(float x) {
    if (!clustered_) return x;
    cluster_wait();  // all blocks have begun
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
#endif

}  // namespace jitquant
