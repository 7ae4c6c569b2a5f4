// What the checks need of a tensor, and how they refuse it.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace jitquant {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string text(std::string_view s) {
  return std::string(s);
}
inline std::string text(double d) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%g", d);
  return buffer;
}
template <class Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
std::string text(Integer i) {
  return std::to_string(i);
}

// Throws what torch raises as a RuntimeError. No iostream: where the host compiler links its
// library statically, a stream would mix two copies of it.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error((text(parts) + ...));
}

#define JITQUANT_CHECK(condition, ...) \
  if (!(condition)) jitquant::fail(__VA_ARGS__)

// What the checks need of a tensor, whichever way it came. Sizes and strides are the tensor's
// own.
struct View {
  void* data = nullptr;
  ScalarType dtype = ScalarType::Undefined;
  bool cuda = false;
  int32_t device = -1;
  int64_t rank = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;

  View() = default;
  View(const Tensor& t)  // NOLINT: a tensor is good wherever a view is asked for
      : data(t.mutable_data_ptr()),
        dtype(t.scalar_type()),
        cuda(t.is_cuda()),
        device(t.get_device_index()),
        rank(t.dim()),
        sizes(t.sizes().data()),
        strides(t.strides().data()) {}

  bool is_cuda() const { return cuda; }
  int32_t get_device_index() const { return device; }
  ScalarType scalar_type() const { return dtype; }
  int64_t dim() const { return rank; }
  int64_t size(int64_t i) const { return sizes[i]; }
  int64_t stride(int64_t i) const { return strides[i]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t i = 0; i < rank; ++i) count *= sizes[i];
    return count;
  }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t i = rank - 1; i >= 0; --i) {
      if (sizes[i] != 1 && strides[i] != expected) return numel() == 0;
      expected *= sizes[i];
    }
    return true;
  }
  const void* const_data_ptr() const { return data; }
  void* mutable_data_ptr() const { return data; }
};

// A tensor that is written in place.
struct InPlace : View {
  using View::View;
};

// As Python shows it.
template <class F>
std::string tuple_text(int64_t count, F&& number) {
  std::string text = "(";
  for (int64_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(number(i));
  return text + (count == 1 ? ",)" : ")");
}

template <class Sized>
std::string shape_text(const Sized& t) {
  return tuple_text(t.dim(), [&](int64_t i) { return t.size(i); });
}

}  // namespace jitquant
