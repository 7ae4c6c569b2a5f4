// Launching: the number of SMs, residency, and the choice of a grid.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace jitquant {

inline int sm_count() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  int count = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
      return 1;
    }
    if (device < kDevices) known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

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

struct LaunchShape {
  int64_t grid;
  int block;
  size_t shared = 0;
  bool cooperative = false;
};

template <auto kKernel, class... Args>
cudaError_t launch(const LaunchShape& shape, cudaStream_t stream, const Args&... args) {
  (void)Listed<kKernel>::done;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.grid));
  config.blockDim = dim3(static_cast<unsigned>(shape.block));
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  config.attrs = &attribute;
  config.numAttrs = shape.cooperative ? 1 : 0;
  return cudaLaunchKernelEx(&config, kKernel, args...);
}

// Blocks of a persistent grid: enough for `items` work items of a block each, at most `per_sm` a
// multiprocessor.
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
