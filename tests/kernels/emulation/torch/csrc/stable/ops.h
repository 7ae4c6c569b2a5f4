// Stands for torch's header of this name.
#pragma once

#include <optional>

#include "torch/csrc/stable/tensor.h"

namespace torch::stable {

struct Device {
  headeronly::DeviceType type;
  int32_t index;

  Device(headeronly::DeviceType type, int32_t index) : type(type), index(index) {}
};

// Only for workspace: results are written to buffers that are given.
inline Tensor empty(Sizes sizes, headeronly::ScalarType, std::nullopt_t, Device) {
  return Tensor::of_floats(sizes.count == 1 ? sizes.first[0] : 0);
}

}  // namespace torch::stable
