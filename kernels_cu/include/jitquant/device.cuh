// Launching: device properties, overlap, residency and grid sizes.
#pragma once

#include <cuda_runtime.h>

#ifndef __CUDACC_RTC__
#include <atomic>
#include <utility>

#include "previous.h"
#endif
#ifndef __CUDACC__
#include <cooperative_groups.h>  // of the emulation
#endif
#include <cstdint>

namespace jitquant {

#ifndef __CUDACC_RTC__
// What a launcher returns if its library was built without the kernels that a call needs. The
// caller then takes a wider part of the module (Op.part in jitquant/ops/schema.py).
constexpr cudaError_t kLacksKernels = cudaErrorInvalidDeviceFunction;

struct DeviceTraits {
  int sms;
  int major;  // of the compute capability
};

// Clears an error that is handled here, so that no later cudaGetLastError() returns it.
inline bool succeeded(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess;
}

inline DeviceTraits device_traits() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int device = 0;
  if (!succeeded(cudaGetDevice(&device))) return {1, 0};
  int packed = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (packed == 0) {
    int sms = 0, major = 0;
    if (!succeeded(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) ||
        !succeeded(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device))) {
      return {1, 0};
    }
    packed = sms | (major << 16);
    if (device < kDevices) known[device].store(packed, std::memory_order_relaxed);
  }
  return {packed & 0xffff, packed >> 16};
}

// The dynamic shared memory that a block can have, in bytes; 0 if CUDA does not say.
inline int most_shared_bytes() {
  int device = 0, most = 0;
  if (!succeeded(cudaGetDevice(&device)) ||
      !succeeded(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device))) {
    return 0;
  }
  return most;
}

inline int sm_count() {
  return device_traits().sms;
}
#endif

// Programmatic dependent launch (compute capability 9.0 and later; a no-op before): the blocks of a
// kernel are scheduled while the previous kernel ends. A kernel launched this way must call
// wait_for_previous() before it reads or writes anything that an earlier kernel uses.
__device__ __forceinline__ void wait_for_previous() {
#if !defined(__CUDA_ARCH__)
  cudaGridDependencySynchronize();
#elif __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Says that the kernel before always lets this one begin after its own wait. Then everything that
// was written before that kernel can be read now, and wait_for_previous() is for what it writes.
__device__ __forceinline__ void previous_has_waited() {
#ifndef __CUDACC__
  jitquant_previous_has_waited();
#endif
}
// From here on the next kernel may be scheduled. This may come before the wait: it defines when the
// next kernel may start, not what it sees. By the memory model of PTX, the next kernel's wait
// returns when this grid is complete and its memory operations are visible. Every thread of this
// grid waits too, so by then the previous kernel is complete and visible to this grid, and
// causality order is transitive.
__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The barrier of a grid launched with Start::kCooperative, as this_grid().sync() of
// cooperative_groups compiles to. Including that header would cost 3 s of compile time per module.
__device__ __forceinline__ void sync_grid() {
#if !defined(__CUDACC__)
  cooperative_groups::this_grid().sync();
#else
  uint32_t low, high;  // address of the driver's memory for this launch; 0 if it has none
  asm("mov.u32 %0, %%envreg2;" : "=r"(low));
  asm("mov.u32 %0, %%envreg1;" : "=r"(high));
  char* const workspace = reinterpret_cast<char*>((uint64_t{high} << 32) | low);
  if (workspace == nullptr) __trap();
  uint32_t* const barrier = reinterpret_cast<uint32_t*>(workspace + 4);
  constexpr uint32_t kFlip = 0x80000000;  // flips when all blocks have arrived
  __barrier_sync(0);
  if (threadIdx.x + threadIdx.y + threadIdx.z == 0) {
    const uint32_t blocks = gridDim.x * gridDim.y * gridDim.z;
    const bool first = blockIdx.x + blockIdx.y + blockIdx.z == 0;
    uint32_t before, now;
    asm volatile("atom.add.release.gpu.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(barrier), "r"(first ? kFlip - (blocks - 1) : 1)
                 : "memory");
    do {
      asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(barrier) : "memory");
    } while (((before ^ now) & kFlip) == 0);
  }
  __barrier_sync(0);
#endif
}

// Prefetches the 32 bytes at p into the L2 cache, where all writes of the device go. The kernel
// reads none of them yet, so this may come before wait_for_previous(); nothing else may. It hides
// memory latency behind the end of the previous kernel.
__device__ __forceinline__ void prefetch(const void* p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#elif !defined(__CUDACC__)
  __prefetch_global_l2(p);
#endif
}
// The same for `bytes` from p on. Both are multiples of 16.
__device__ __forceinline__ void prefetch_bulk(const void* p, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes));
#elif !defined(__CUDACC__)
  __prefetch_global_l2(p);
  __prefetch_global_l2(static_cast<const uint8_t*>(p) + bytes - 1);
#endif
}
// Which threads prefetch: about 1240 and 990 per SM on the device with 132 SMs where this was
// measured.
constexpr uint32_t kFirstThreads = 640 * 256, kFewThreads = 512 * 256;
// In a grid with one thread block per piece of work: those that are resident when the previous
// kernel ends. Later ones would load the data right away anyway.
__device__ __forceinline__ bool is_first() {
  return blockIdx.x * blockDim.x < kFirstThreads;
}
// All threads of a small grid, where most of the time is latency. For kernels that get slower if
// the first thread blocks of a large grid prefetch.
__device__ __forceinline__ bool is_small_grid() {
  return gridDim.x * blockDim.x <= kFewThreads;
}

// How an overlapped kernel begins: prefetch before the wait, load its first values after it. In
// PTX, a thread sees the writes of earlier kernels only after its own griddepcontrol.wait. That
// also holds for the kernel before the previous one, although the previous one has waited for it.
template <class F, class G>
__device__ __forceinline__ void begin_overlapped(F&& fetch, G&& prefetch) {
  prefetch();
  wait_for_previous();
  let_next_begin();
  fetch();
}

#ifndef __CUDACC_RTC__
// The kernels of this library. A kernel is added when the library is loaded, because a compiled
// call of launch() names it. Nothing has to be listed by hand.
struct KernelList {
  static constexpr int kCapacity = 128;
  const void* kernels[kCapacity];
  int count = 0;
  static KernelList& instance() {
    static KernelList list;
    return list;
  }
};

template <auto kKernel>
struct Listed {
  static bool add() {
    KernelList& list = KernelList::instance();
    if (list.count < KernelList::kCapacity) {
      list.kernels[list.count++] = reinterpret_cast<const void*>(kKernel);
    }
    return true;
  }
  static inline const bool done = add();
};
#endif

enum class Start {
  kAlone,             // after the previous kernel has finished
  kOverlapped,        // programmatic dependent launch, unless the previous kernel allows none: the
                      // kernel calls wait_for_previous()
  kAlwaysOverlapped,  // programmatic dependent launch in any case
  kCooperative,       // not overlapped, all blocks resident: grid.sync() works
};

struct LaunchShape {
  int64_t grid;
  int block;
  Start start = Start::kAlone;
  int cluster = 1;  // blocks per cluster; more than one needs compute capability 9.0
  size_t shared = 0;
  int block_y = 1;  // threads in y; `block` is the number in x
};

#ifndef __CUDACC_RTC__
// Code that all kernels share is kept out of templates, so that it is compiled once.
struct LaunchConfig {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2] = {};

  __attribute__((noinline)) LaunchConfig(const LaunchShape& shape, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned>(shape.grid));
    config.blockDim =
        dim3(static_cast<unsigned>(shape.block), static_cast<unsigned>(shape.block_y));
    config.dynamicSmemBytes = shape.shared;
    config.stream = stream;
    config.attrs = attributes;
    const bool follows_other = std::exchange(follows_other_kernel, false);
    if (shape.start == Start::kCooperative) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeCooperative;
      attribute.val.cooperative = 1;
    } else if ((shape.start == Start::kAlwaysOverlapped ||
                (shape.start == Start::kOverlapped && !follows_other)) &&
               device_traits().major >= 9) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (shape.cluster > 1) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
  }
};

template <auto kKernel, class... Args>
cudaError_t launch(const LaunchShape& shape, cudaStream_t stream, const Args&... args) {
  (void)Listed<kKernel>::done;
  const LaunchConfig made(shape, stream);
  return cudaLaunchKernelEx(&made.config, kKernel, args...);
}

using OccupancyAnswers = std::atomic<uint64_t>[64];

__attribute__((noinline)) inline int blocks_per_sm(const void* kernel, OccupancyAnswers& answers,
                                                   int threads, size_t shared) {
  constexpr int kCountShift = 56;
  int device = 0;
  if (!succeeded(cudaGetDevice(&device))) return 0;
  const uint64_t question = (uint64_t{1} << 55) | (static_cast<uint64_t>(device) << 40) |
                            (static_cast<uint64_t>(threads) << 24) | shared;
  std::atomic<uint64_t>& answer = answers[(question * 0x9e3779b97f4a7c15u) >> 58];  // 64 entries
  const uint64_t known = answer.load(std::memory_order_acquire);
  constexpr uint64_t kQuestion = (uint64_t{1} << kCountShift) - 1;
  if ((known & kQuestion) == question) return static_cast<int>(known >> kCountShift);

  int most = 0, count = 0;
  cudaFuncAttributes attributes;
  if (!succeeded(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) ||
      !succeeded(cudaFuncGetAttributes(&attributes, kernel))) {
    return 0;
  }
  most -= static_cast<int>(attributes.sharedSizeBytes);
  if (!succeeded(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most))) {
    return 0;
  }
  if (shared <= static_cast<size_t>(most) &&
      !succeeded(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads, shared))) {
    return 0;
  }
  // Grids were tuned with at most 1536 threads per SM, even where 2048 fit.
  if (count > 1536 / threads) count = 1536 / threads;
  answer.store(question | (static_cast<uint64_t>(count) << kCountShift), std::memory_order_release);
  return count;
}

// The number of blocks of `threads` threads with `shared` bytes that fit on an SM of the current
// device; 0 if one is too large. Raises the kernel's shared memory limit to the device's. Caches
// CUDA's answers, each in one word that is read and written atomically.
template <auto kKernel>
int blocks_per_sm(int threads, size_t shared) {
  static OccupancyAnswers answers;
  return blocks_per_sm(reinterpret_cast<const void*>(kKernel), answers, threads, shared);
}

// The size of a grid whose blocks are all resident: enough for `items` work items, one per block.
inline int64_t persistent_grid(int64_t items, int per_sm) {
  const int64_t limit = static_cast<int64_t>(sm_count()) * per_sm;
  const int64_t blocks = items < limit ? items : limit;
  return blocks < 1 ? 1 : blocks;
}
#endif

}  // namespace jitquant

// CUDA loads a kernel at its first launch, which is not allowed during stream capture. This loads
// all kernels of the library on the current device. Each .cu file contains it once.
#ifdef __CUDACC_RTC__
#define JITQUANT_EXPORT_RESIDENT()
#else
#define JITQUANT_EXPORT_RESIDENT()                                                   \
  extern "C" __attribute__((visibility("default"))) int jitquant_make_resident() {   \
    const jitquant::KernelList& list = jitquant::KernelList::instance();             \
    for (int i = 0; i < list.count; ++i) {                                           \
      cudaFuncAttributes attributes;                                                 \
      const cudaError_t error = cudaFuncGetAttributes(&attributes, list.kernels[i]); \
      if (error != cudaSuccess) return static_cast<int>(error);                      \
    }                                                                                \
    return 0;                                                                        \
  }
#endif
