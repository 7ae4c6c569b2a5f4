// Launching: traits of the device, overlap, residency, and the choice of a grid.
#pragma once

#include <cuda_runtime.h>

#ifndef __CUDACC_RTC__
#include <atomic>
#endif
#ifndef __CUDACC__
#include <cooperative_groups.h>  // of the emulation
#endif
#include <cstdint>

namespace jitquant {

#ifndef __CUDACC_RTC__
struct DeviceTraits {
  int sms;
  int major;  // of the compute capability
};

// An error that is handled here; it must not be left to whoever asks CUDA for the last one.
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

// Bytes of dynamic shared memory that a block can have; 0 if CUDA does not say.
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

// Programmatic dependent launch (compute capability 9.0 on; nothing before): the blocks of a kernel
// are put on the multiprocessors while the kernel before it ends. A kernel that is launched so
// reads and writes nothing that an earlier one touches before it has called wait_for_previous().
__device__ __forceinline__ void wait_for_previous() {
#if !defined(__CUDA_ARCH__)
  cudaGridDependencySynchronize();
#elif __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// From here on the next kernel may be put on the multiprocessors. This may come before the wait: it
// says when the next kernel may begin, not what that sees. By the memory model of PTX the next
// kernel's own wait returns when this grid is complete and its memory operations are visible; every
// thread of this grid waits too, so by then the kernel before it is complete and visible to this
// grid, and causality order is transitive.
__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The barrier of a grid that is launched with Start::kCooperative, as cooperative_groups'
// this_grid().sync() is compiled: its header alone takes the compilers 3 s of each module.
__device__ __forceinline__ void sync_grid() {
#if !defined(__CUDACC__)
  cooperative_groups::this_grid().sync();
#else
  uint32_t low, high;  // of the address of the driver's memory for this launch; 0 if it has none
  asm("mov.u32 %0, %%envreg2;" : "=r"(low));
  asm("mov.u32 %0, %%envreg1;" : "=r"(high));
  char* const workspace = reinterpret_cast<char*>((uint64_t{high} << 32) | low);
  if (workspace == nullptr) __trap();
  uint32_t* const barrier = reinterpret_cast<uint32_t*>(workspace + 4);
  constexpr uint32_t kFlip = 0x80000000;  // changes when all blocks have arrived
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

// Brings the 32 bytes at p into the L2 cache, where all writes of the device go. The kernel reads
// none of them, so this may come before wait_for_previous(), and is all that may: then the latency
// of the memory passes while the kernel before ends.
__device__ __forceinline__ void prefetch(const void* p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#elif !defined(__CUDACC__)
  __prefetch_global_l2(p);
#endif
}
// Which threads prefetch: about 1240 and 990 for each of the 132 multiprocessors that the kernels
// were measured on.
constexpr uint32_t kFirstThreads = 640 * 256, kFewThreads = 512 * 256;
// Of a grid that does not stay those that are on the multiprocessors when the kernel before ends;
// others would load what they ask for at once.
__device__ __forceinline__ bool is_first() {
  return blockIdx.x * blockDim.x < kFirstThreads;
}
// All of a grid of few, whose time is mostly latency: in kernels that are slower where the first of
// many prefetch.
__device__ __forceinline__ bool is_short() {
  return gridDim.x * blockDim.x <= kFewThreads;
}

// How a kernel that is launched overlapped begins: it prefetches before the wait, and loads its
// first values after it. PTX shows a thread what earlier kernels have written only after its own
// griddepcontrol.wait, the kernel before the last one too: that the last one has waited says
// nothing of this thread.
template <class F, class G>
__device__ __forceinline__ void begin_overlapped(F&& fetch, G&& prefetch) {
  prefetch();
  wait_for_previous();
  let_next_begin();
  fetch();
}

#ifndef __CUDACC_RTC__
// The kernels of this library. A kernel joins the list when the library is loaded, by being named
// in a call of launch() that is compiled, so nothing has to be listed by hand.
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
  kAlone,        // when the kernel before it is done
  kOverlapped,   // programmatic dependent launch: the kernel calls wait_for_previous()
  kCooperative,  // alone, and all blocks at once: grid.sync() works
};

struct LaunchShape {
  int64_t grid;
  int block;
  Start start = Start::kAlone;
  int cluster = 1;  // blocks; more than one from compute capability 9.0 on
  size_t shared = 0;
  int block_y = 1;  // of the block's threads, of which x has `block`
};

#ifndef __CUDACC_RTC__
// Code that is the same for all kernels stands in functions of its own, which are compiled once.
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
    if (shape.start == Start::kCooperative) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeCooperative;
      attribute.val.cooperative = 1;
    } else if (shape.start == Start::kOverlapped && device_traits().major >= 9) {
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
  std::atomic<uint64_t>& answer = answers[(question * 0x9e3779b97f4a7c15u) >> 58];  // of 64
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
  // Grids were tuned with at most 1536 threads a multiprocessor, also where 2048 fit.
  if (count > 1536 / threads) count = 1536 / threads;
  answer.store(question | (static_cast<uint64_t>(count) << kCountShift), std::memory_order_release);
  return count;
}

// Blocks of `threads` threads with `shared` bytes that a multiprocessor of the current device holds
// at once; 0 if one is too large for it. Allows the kernel as much shared memory as the device has
// for a block. CUDA's answers are kept, each in a word that is read and written as a whole.
template <auto kKernel>
int blocks_per_sm(int threads, size_t shared) {
  static OccupancyAnswers answers;
  return blocks_per_sm(reinterpret_cast<const void*>(kKernel), answers, threads, shared);
}

// Blocks of a grid whose blocks are all at work at once: enough for `items` work items of a block
// each.
inline int64_t persistent_grid(int64_t items, int per_sm) {
  const int64_t limit = static_cast<int64_t>(sm_count()) * per_sm;
  const int64_t blocks = items < limit ? items : limit;
  return blocks < 1 ? 1 : blocks;
}
#endif

}  // namespace jitquant

// CUDA loads a kernel at its first launch, which a stream that is being captured does not allow.
// This loads every kernel of the library on the current device. Each .cu has it once.
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
