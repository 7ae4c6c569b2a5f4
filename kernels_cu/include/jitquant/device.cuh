// Launching: traits of the device, overlap, residency, and the choice of a grid.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace jitquant {

struct DeviceTraits {
  int sms;
  int major;  // of the compute capability
};

inline DeviceTraits device_traits() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return {1, 0};
  int packed = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (packed == 0) {
    int sms = 0, major = 0;
    if (cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
      return {1, 0};
    }
    packed = sms | (major << 16);
    if (device < kDevices) known[device].store(packed, std::memory_order_relaxed);
  }
  return {packed & 0xffff, packed >> 16};
}

inline int sm_count() {
  return device_traits().sms;
}

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
// From here on the next kernel may be put on the multiprocessors.
__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Asks for the 32 bytes at p to be brought into the L2 cache. Nothing of them is read by the
// kernel, and what an earlier one still writes it writes in that cache, so this may come before
// wait_for_previous(): then the latency of the memory passes while the kernel before ends.
__device__ __forceinline__ void prefetch(const void* p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#elif !defined(__CUDA_ARCH__)
  *static_cast<const volatile char*>(p);  // emulated: it has to be there
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

// How a kernel that is launched overlapped begins: fetch() loads its first values, before the wait
// where they are there `early`, as no kernel before writes them. Otherwise prefetch() comes before.
template <class F, class G>
__device__ __forceinline__ void begin_overlapped(bool early, F&& fetch, G&& prefetch) {
  if (early) {
    fetch();
  } else {
    prefetch();
  }
  wait_for_previous();
  let_next_begin();
  if (!early) fetch();
}

#if !defined(__CUDACC_RTC__)
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

template <auto kKernel, class... Args>
cudaError_t launch(const LaunchShape& shape, cudaStream_t stream, const Args&... args) {
  (void)Listed<kKernel>::done;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.grid));
  config.blockDim = dim3(static_cast<unsigned>(shape.block), static_cast<unsigned>(shape.block_y));
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
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
  return cudaLaunchKernelEx(&config, kKernel, args...);
}

// Blocks of `threads` threads with `shared` bytes that a multiprocessor holds at once; 0 where such
// a block is too large for it. Lets the kernel have as much shared memory as the device gives a
// block.
template <auto kKernel>
int blocks_per_sm(int threads, size_t shared) {
  constexpr int kDevices = 64;
  static std::atomic<int> most_shared[kDevices];
  static std::atomic<int> registers{0};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return 0;
  int most = most_shared[device].load(std::memory_order_relaxed);
  if (most == 0) {
    cudaFuncAttributes attributes;
    if (cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
            cudaSuccess ||
        cudaFuncGetAttributes(&attributes, kKernel) != cudaSuccess) {
      return 0;
    }
    most -= static_cast<int>(attributes.sharedSizeBytes);
    if (cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most) !=
        cudaSuccess) {
      return 0;
    }
    registers.store(attributes.numRegs, std::memory_order_relaxed);
    most_shared[device].store(most, std::memory_order_release);
  }
  if (shared > static_cast<size_t>(most)) return 0;
  // The limits of every device from compute capability 8.0 on: four register files, each for whole
  // warps, which take registers in steps of 8 a thread, and 1 KiB of shared memory that the system
  // takes of each block.
  const int per_thread = (registers.load(std::memory_order_relaxed) + 7) / 8 * 8;
  const int by_registers = 4 * (16384 / (32 * per_thread)) / ((threads + 31) / 32);
  const int by_shared = (most + 1024) / static_cast<int>(shared + 1024);
  const int by_threads = 1536 / threads;
  int count = by_registers < by_shared ? by_registers : by_shared;
  count = count < by_threads ? count : by_threads;
  return count < 1 ? 1 : (count < 32 ? count : 32);
}

// Blocks of a grid whose blocks are all at work at once: enough for `items` work items of a block
// each.
inline int64_t persistent_grid(int64_t items, int per_sm) {
  const int64_t limit = static_cast<int64_t>(sm_count()) * per_sm;
  return items < 1 ? 1 : (items < limit ? items : limit);
}

}  // namespace jitquant

// CUDA loads a kernel at its first launch, which a stream that is being captured does not allow.
// This loads every kernel of the library on the current device. Each .cu has it once.
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
