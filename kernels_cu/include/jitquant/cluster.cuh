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

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// The maximum over such a grid, once, through the blocks' shared memory. Made at a kernel's start,
// so that by the time of max(), which writes to the others' memory, all blocks have long begun.
class ClusterMax {
 public:
  using Scratch = float[kClusterBlocks];

  __device__ __forceinline__ explicit ClusterMax(Scratch& maxima)
      : maxima_(maxima), clustered_(gridDim.x > 1) {
    if (clustered_) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }

  // Every thread gives its block's maximum, a magnitude, and gets that of all blocks.
  __device__ __forceinline__ float max(float x) {
    if (!clustered_) return x;
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all blocks have begun
    if (threadIdx.x < gridDim.x) {
      const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(maxima_ + blockIdx.x));
      uint32_t there;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                   : "=r"(there)
                   : "r"(here), "r"(threadIdx.x));
      asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    const int lane = threadIdx.x & 31;
    return warp_max(lane < gridDim.x ? maxima_[lane] : 0.0f);
  }

 private:
  Scratch& maxima_;
  const bool clustered_;
};
#endif

}  // namespace jitquant
