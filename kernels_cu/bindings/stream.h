// torch's current stream, and the result of a launch on it.
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "captured.h"
#include "view.h"

namespace jitquant {

// The function is in libtorch_cuda.so, which a CPU build of torch lacks. This library must load
// there too, so it cannot link against it.
inline cudaStream_t current_stream(int32_t device) {
  using Function = int32_t (*)(int32_t, void**);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr
               ? nullptr
               : reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  JITQUANT_CHECK(function != nullptr, "this build of torch has no CUDA streams");
  void* stream = nullptr;
  JITQUANT_CHECK(function(device, &stream) == 0, "torch gives no current stream for device ",
                 device);
  note_capture(static_cast<cudaStream_t>(stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(cudaError_t error, const char* what) {
  if (error != cudaSuccess) cudaGetLastError();  // otherwise torch's next kernel would report it
  JITQUANT_CHECK(error == cudaSuccess, what, ": CUDA error ", cudaGetErrorName(error), ": ",
                 cudaGetErrorString(error));
}

}  // namespace jitquant
