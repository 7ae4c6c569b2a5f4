// Used by the code that the loader generates from JITQUANT_EXPORT: converts torch's arguments to
// those that jitquant/export.h passes to a launcher.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>

#include "jitquant/export.h"
#include "stream.h"
#include "text.h"

namespace jitquant::exported {

using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

#define JITQUANT_SAME(ours, theirs)                    \
  static_assert(static_cast<int>(ElementType::ours) == \
                static_cast<int>(torch::headeronly::ScalarType::theirs));
JITQUANT_SAME(kUInt8, Byte)
JITQUANT_SAME(kInt8, Char)
JITQUANT_SAME(kInt16, Short)
JITQUANT_SAME(kInt32, Int)
JITQUANT_SAME(kInt64, Long)
JITQUANT_SAME(kFloat16, Half)
JITQUANT_SAME(kFloat32, Float)
JITQUANT_SAME(kFloat64, Double)
JITQUANT_SAME(kBool, Bool)
JITQUANT_SAME(kBFloat16, BFloat16)
JITQUANT_SAME(kFloat8E5M2, Float8_e5m2)
JITQUANT_SAME(kFloat8E4M3, Float8_e4m3fn)
JITQUANT_SAME(kUInt16, UInt16)
JITQUANT_SAME(kUInt32, UInt32)
JITQUANT_SAME(kUInt64, UInt64)
JITQUANT_SAME(kFloat8E8M0, Float8_e8m0fnu)
JITQUANT_SAME(kFloat4E2M1x2, Float4_e2m1fn_x2)
#undef JITQUANT_SAME

using Thunk = cudaError_t (*)(const Argument*, cudaStream_t, Refusal*);

// The arguments of one call, in the schema's order.
template <int kCount>
class __attribute__((visibility("hidden"))) Call {
 public:
  explicit Call(const char* op) : op_(op) {}

  void add(const char* name, const Tensor& t, bool written) {
    JITQUANT_CHECK(t.is_cuda(), op_, ": ", name,
                   ": expected a tensor on cuda, got one on the CPU. Move it with ", name,
                   ".to('cuda')");
    JITQUANT_CHECK(first_ == nullptr || t.get_device_index() == first_->get_device_index(), op_,
                   ": ", name,
                   ": expected a tensor on cuda:", first_ ? first_->get_device_index() : -1,
                   ", as ", first_name_, " is, got one on cuda:", t.get_device_index(),
                   ". Move one of them with .to()");
    if (first_ == nullptr) first_ = &t, first_name_ = name;
    Argument& argument = next(name);
    TensorView& view = argument.tensor;
    view.name = name;
    view.address = const_cast<void*>(t.const_data_ptr());
    view.dtype = static_cast<ElementType>(t.scalar_type());
    view.writable = written;
    view.device = t.get_device_index();
    view.rank = t.dim();
    view.sizes = t.sizes().data();
    view.strides = t.strides().data();
  }
  void add(const char* name, const std::optional<Tensor>& t, bool written) {
    if (t) {
      add(name, *t, written);
    } else {
      next(name).present = false;
    }
  }
  void add(const char* name, int64_t value) { next(name).integer = value; }
  void add(const char* name, double value) { next(name).number = value; }
  void add(const char* name, bool value) { next(name).boolean = value; }
  void add(const char* name, const std::string& value) { next(name).text = value.c_str(); }
  template <class T>
  void add(const char* name, const std::optional<T>& value) {
    if (value) {
      add(name, *value);
    } else {
      next(name).present = false;
    }
  }

  void run(Thunk thunk) const {
    JITQUANT_CHECK(first_ != nullptr, op_,
                   ": expected one tensor or more, got none. The launch uses the first one's "
                   "device and current stream");
    const DeviceGuard guard(first_->get_device_index());
    Refusal refusal;
    refusal.text[0] = '\0';
    const cudaError_t error =
        thunk(arguments_, current_stream(first_->get_device_index()), &refusal);
    JITQUANT_CHECK(refusal.text[0] == '\0', op_, ": ", std::string(refusal.text));
    check_launch(error, op_);
  }

 private:
  Argument& next(const char* name) {
    Argument& argument = arguments_[count_++];
    argument.name = name;
    argument.present = true;
    return argument;
  }

  const char* op_;
  const Tensor* first_ = nullptr;
  const char* first_name_ = "";
  Argument arguments_[kCount] = {};
  int count_ = 0;
};

}  // namespace jitquant::exported
