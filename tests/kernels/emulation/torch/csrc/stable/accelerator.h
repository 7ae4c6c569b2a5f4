// Stands for torch's header of this name. Everything is on one stream.
#pragma once

#include <dlfcn.h>

#include <cstdint>

#include "machine.h"

using AOTITorchError = int32_t;
constexpr AOTITorchError AOTI_TORCH_SUCCESS = 0;

namespace emulation {
inline AOTITorchError current_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}
}  // namespace emulation

// A library of torch is looked for, and in it the function that gives the stream.
#define dlopen(name, flags) reinterpret_cast<void*>(&::emulation::current_stream)
#define dlsym(library, name) (library)

namespace torch::stable::accelerator {

class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) { emulation::make_current(device, device); }
  ~DeviceGuard() { emulation::make_current(cuda_, torch_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const int cuda_ = emulation::cuda_device(), torch_ = emulation::torch_device();
};

inline int32_t getCurrentDeviceIndex() {
  return emulation::torch_device();
}

}  // namespace torch::stable::accelerator
