// What a launch has to do with a CUDA graph that is being captured.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "jitquant/driver.h"
#include "jitquant/previous.h"

// Whether a CUDA graph contains launches of this library. Such a graph keeps replaying this code
// even after an edit has replaced it. One per library. The loader reads it by name when another
// build replaces this one.
__attribute__((visibility("default"))) inline int jitquant_captured = 0;

namespace jitquant {

// Functions of the driver, because CUDA's runtime knows only the kernels of this library.
struct GraphKernels {
  decltype(&cuGraphKernelNodeGetParams) params;
  decltype(&cuFuncGetName) function_name;
  decltype(&cuKernelGetName) kernel_name;

  GraphKernels()
      : params(driver_function<decltype(params)>("cuGraphKernelNodeGetParams", 12000)),
        function_name(driver_function<decltype(function_name)>("cuFuncGetName", 12030)),
        kernel_name(driver_function<decltype(kernel_name)>("cuKernelGetName", 12030)) {}

  // The mangled name of a node's kernel, or null.
  const char* name_of(cudaGraphNode_t node) const {
    CUDA_KERNEL_NODE_PARAMS kernel;
    const char* name = nullptr;
    if (params == nullptr || function_name == nullptr || kernel_name == nullptr ||
        params(node, &kernel) != CUDA_SUCCESS) {
      return nullptr;
    }
    const CUresult result = kernel.func != nullptr ? function_name(&name, kernel.func)
                                                   : kernel_name(&name, kernel.kern);
    return result == CUDA_SUCCESS ? name : nullptr;
  }
};

// Whether the next launch on a stream that is being captured follows nothing but a kernel of this
// project, or one that has "jitquant" in its name.
inline bool follows_own_kernel(const cudaGraphNode_t* nodes, size_t count) {
  static const GraphKernels kernels;
  cudaGraphNodeType type;
  if (count != 1 || cudaGraphNodeGetType(nodes[0], &type) != cudaSuccess ||
      type != cudaGraphNodeTypeKernel) {
    return false;
  }
  const char* const name = kernels.name_of(nodes[0]);
  return name != nullptr && std::strstr(name, "jitquant") != nullptr;
}

// To be called before a launch: notes that it is captured, and what it follows.
inline void note_capture(cudaStream_t stream) {
  follows_other_kernel = false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  constexpr auto kInfo = &cudaStreamGetCaptureInfo;
#else
  constexpr auto kInfo = &cudaStreamGetCaptureInfo_v3;
#endif
  if (kInfo(stream, &status, nullptr, nullptr, &nodes, &edges, &count) != cudaSuccess) {
    cudaGetLastError();  // so that it is not reported as an error of the launch
  } else if (status == cudaStreamCaptureStatusActive) {
    jitquant_captured = 1;
    follows_other_kernel = !follows_own_kernel(nodes, count);
  }
}

}  // namespace jitquant
