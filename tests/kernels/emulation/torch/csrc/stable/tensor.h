// Stands for torch's header of this name: tensors whose memory the caller of the library has, and
// which say that they are on the emulated device.
#pragma once

#include <cstddef>

#include "machine.h"
#include "torch/headeronly/core/ScalarType.h"

namespace torch::stable {

struct Sizes {
  const int64_t* first;
  size_t count;

  const int64_t* data() const { return first; }
};

class Tensor {
 public:
  Tensor() = default;
  Tensor(void* data, headeronly::ScalarType dtype, int64_t rank, const int64_t* sizes,
         const int64_t* strides)
      : data_(data), dtype_(dtype), rank_(rank), sizes_(sizes), strides_(strides) {}

  // Workspace, full of garbage.
  static Tensor of_floats(int64_t count) {
    Tensor t;
    float* const floats = reinterpret_cast<float*>(emulation::allocate(4 * count, 0));
    for (int64_t i = 0; i < count; ++i) floats[i] = __builtin_nanf("");
    t.data_ = floats;
    return t;
  }

  void* mutable_data_ptr() const { return data_; }
  headeronly::ScalarType scalar_type() const { return dtype_; }
  bool is_cuda() const { return true; }
  int32_t get_device_index() const { return emulation::tensor_device(); }
  int64_t dim() const { return rank_; }
  Sizes sizes() const { return {sizes_, static_cast<size_t>(rank_)}; }
  Sizes strides() const { return {strides_, static_cast<size_t>(rank_)}; }

 private:
  void* data_ = nullptr;
  headeronly::ScalarType dtype_ = headeronly::ScalarType::Undefined;
  int64_t rank_ = 0;
  const int64_t* sizes_ = nullptr;
  const int64_t* strides_ = nullptr;
};

}  // namespace torch::stable
