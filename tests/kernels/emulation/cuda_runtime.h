// What jitquant's kernels use of CUDA, in plain C++ (machine.h): found before CUDA's own header.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cuda.h"
#include "machine.h"

// ---- the language ------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

// Dynamic shared memory, under the names that the kernels give it: as much as a block can have.
namespace jitquant {
inline constexpr int kDynamicShared = 227 << 10;
alignas(1024) inline thread_local uint4 row_storage[kDynamicShared / sizeof(uint4)];
alignas(1024) inline thread_local unsigned char tiles[kDynamicShared];
}  // namespace jitquant

// ---- functions of a device ---------------------------------------------------------------------

enum WarpCall : int { kShuffle, kShuffleXor, kShuffleUp, kReduceMax, kBallot, kMatch, kSyncWarp };

inline void __syncthreads() {
  emulation::block_barrier();
}
inline int __syncthreads_or(int value) {
  return emulation::block_barrier_or(value);
}

template <class T>
T exchanged(const uint64_t* values, unsigned lane) {
  T value;
  std::memcpy(&value, values + lane, sizeof value);
  return value;
}
template <class T>
uint64_t exchange_bits(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
// Lanes run one after the other here, as a GPU's may.
inline unsigned __activemask() {
  return 1u << emulation::lane();
}
template <class T>
T __shfl_sync(unsigned mask, T value, int from) {
  return exchanged<T>(emulation::exchange(mask, exchange_bits(value), kShuffle), from & 31);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  const uint64_t* values = emulation::exchange(mask, exchange_bits(value), kShuffleXor);
  return exchanged<T>(values, emulation::lane() ^ lanes);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes) {
  const uint64_t* values = emulation::exchange(mask, exchange_bits(value), kShuffleUp);
  const unsigned lane = emulation::lane();
  return exchanged<T>(values, lane < lanes ? lane : lane - lanes);
}
inline uint32_t __reduce_max_sync(unsigned mask, uint32_t value) {
  const uint64_t* values = emulation::exchange(mask, value, kReduceMax);
  uint64_t most = 0;
  for (int i = 0; i < 32; ++i) most = (mask >> i & 1) && values[i] > most ? values[i] : most;
  return static_cast<uint32_t>(most);
}
inline void cudaGridDependencySynchronize() {
  emulation::wait_for_previous();
}
inline void jitquant_previous_has_waited() {
  emulation::previous_has_waited();
}
inline void __prefetch_global_l2(const void* p) {
  emulation::prefetch(p);
}
inline int __any_sync(unsigned mask, int value) {
  return static_cast<int>(__reduce_max_sync(mask, value != 0));
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulation::exchange(mask, 0, kSyncWarp);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const uint64_t* values = emulation::exchange(mask, predicate != 0, kBallot);
  unsigned ballot = 0;
  for (int i = 0; i < 32; ++i) ballot |= (mask >> i & 1) && values[i] ? 1u << i : 0u;
  return ballot;
}

inline unsigned __match_any_sync(unsigned mask, int value) {
  const uint64_t* values = emulation::exchange(mask, exchange_bits(value), kMatch);
  unsigned alike = 0;
  for (int i = 0; i < 32; ++i) {
    alike |= (mask >> i & 1) && exchanged<int>(values, i) == value ? 1u << i : 0u;
  }
  return alike;
}

inline void __cluster_barrier_arrive() {
  emulation::gang_arrive();
}
inline void __cluster_barrier_arrive_relaxed() {
  emulation::gang_arrive();
}
inline void __cluster_barrier_wait() {
  emulation::gang_wait();
}
inline void* __cluster_map_shared_rank(const void* shared, unsigned rank) {
  return emulation::in_block(shared, rank);
}
inline size_t __cvta_generic_to_shared(const void* p) {
  return emulation::shared_address(p);
}
inline void* __cvta_shared_to_generic(size_t p) {
  return emulation::shared_pointer(static_cast<uint32_t>(p));
}

inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T value) {
  *p = value;
}
inline uint32_t atomicMax(uint32_t* p, uint32_t value) {
  const uint32_t before = *p;
  if (value > before) *p = value;
  return before;
}
inline uint32_t max(uint32_t a, uint32_t b) {
  return a > b ? a : b;
}
inline uint32_t min(uint32_t a, uint32_t b) {
  return a < b ? a : b;
}
inline int max(int a, int b) {
  return a > b ? a : b;
}
inline int min(int a, int b) {
  return a < b ? a : b;
}

// ---- the runtime -------------------------------------------------------------------------------

enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
};
using cudaStream_t = struct EmulatedStream*;

inline const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorInvalidDeviceFunction ? "cudaErrorInvalidDeviceFunction" : "cudaError";
}
inline const char* cudaGetErrorString(cudaError_t) {
  return "see emulation_error()";
}
inline cudaError_t cudaGetLastError() {
  return static_cast<cudaError_t>(std::exchange(emulation::last_error(), 0));
}
inline cudaError_t failed(cudaError_t error) {
  emulation::last_error() = error;
  return error;
}

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
using cudaGraph_t = struct EmulatedGraph*;
using cudaGraphNode_t = CUgraphNode;
struct cudaGraphEdgeData {};
enum cudaGraphNodeType { cudaGraphNodeTypeKernel };
inline cudaError_t cudaGraphNodeGetType(cudaGraphNode_t, cudaGraphNodeType*) {
  return cudaErrorInvalidValue;
}
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                            unsigned long long*, cudaGraph_t*,
                                            const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                            size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = emulation::cuda_device();
  return cudaSuccess;
}
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
};
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const emulation::Device& d = emulation::device_of(device);
  *value = attribute == cudaDevAttrMultiProcessorCount      ? d.multiprocessors
           : attribute == cudaDevAttrComputeCapabilityMajor ? d.major
                                                            : emulation::most_shared(d);
  return cudaSuccess;
}

struct cudaFuncAttributes {
  size_t sharedSizeBytes;
  int numRegs;
};
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel kernel) {
  emulation::know(reinterpret_cast<const void*>(kernel));
  *attributes = {emulation::kStaticShared, emulation::kRegisters};
  return cudaSuccess;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel kernel, cudaFuncAttribute, int value) {
  const bool allowed = emulation::allow_shared(reinterpret_cast<const void*>(kernel), value);
  return allowed ? cudaSuccess : failed(cudaErrorInvalidValue);
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel kernel, int threads,
                                                          size_t shared) {
  emulation::know(reinterpret_cast<const void*>(kernel));
  const emulation::Device& device = emulation::device_of(emulation::cuda_device());
  *blocks = emulation::resident(device, threads, emulation::kStaticShared + shared);
  return cudaSuccess;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum cudaDriverEntryPointFlags { cudaEnableDefault };
#define CUDART_VERSION 13000
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                    cudaDriverEntryPointFlags,
                                                    cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeCooperative,
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension,
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int cooperative, programmaticStreamSerializationAllowed;
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...),
                               const A&... arguments) {
  if (emulation::refuses()) return failed(cudaErrorNoKernelImageForDevice);
  emulation::Launch launch = {config->gridDim.x,
                              config->blockDim.x,
                              config->blockDim.y,
                              1,
                              false,
                              false,
                              config->dynamicSmemBytes,
                              reinterpret_cast<const void*>(kernel),
                              jitquant::tiles};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeCooperative) launch.cooperative = true;
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      launch.overlapped = true;
    }
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      launch.cluster = attribute.val.clusterDim.x;
    }
  }
  const std::tuple<P...> copies(arguments...);
  const bool ran = emulation::run(launch, [&] { std::apply(kernel, copies); });
  return ran ? cudaSuccess : failed(cudaErrorLaunchFailure);
}
