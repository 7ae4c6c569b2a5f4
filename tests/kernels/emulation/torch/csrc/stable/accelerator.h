// Stands for torch's header of this name. Everything is on one stream.
#pragma once

#include <cstdint>

#include "machine.h"

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
