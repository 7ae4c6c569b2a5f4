// Functions of the CUDA driver, which nothing links to.
#pragma once

#include <cuda_runtime_api.h>

namespace jitquant {

// Function `name` of the driver as of CUDA `version`, such as 12030, or null if it is too old.
template <class F>
F driver_function(const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
  if (error != cudaSuccess) cudaGetLastError();  // so that no launch reports it
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<F>(found)
                                                                       : nullptr;
}

}  // namespace jitquant
