// What the bindings share: from a torch tensor to a plain struct, with the checks that keep a wrong
// argument away from a kernel. Built on torch's stable ABI alone.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "jitquant/launch.h"

namespace jitquant {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

inline std::string text(const std::string& s) {
  return s;
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

// The stream that torch works on. The function stands in libtorch_cuda.so, which a build of torch
// without CUDA does not have and which a library that loads there as well cannot be linked with.
inline cudaStream_t current_stream(const Tensor& t) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr
               ? nullptr
               : reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  JITQUANT_CHECK(function != nullptr, "this build of torch has no CUDA streams");
  void* stream = nullptr;
  JITQUANT_CHECK(function(t.get_device_index(), &stream) == AOTI_TORCH_SUCCESS,
                 "torch gives no current stream for device ", t.get_device_index());
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(cudaError_t error, const char* what) {
  JITQUANT_CHECK(error == cudaSuccess, what, ": CUDA error ", cudaGetErrorName(error), ": ",
                 cudaGetErrorString(error));
}

inline std::string shape_text(const Tensor& t) {
  std::string text = "(";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + ")";
}

inline void check_cuda(const Tensor& t, const char* name, const Tensor* like = nullptr) {
  JITQUANT_CHECK(t.is_cuda(), name, " must be a CUDA tensor");
  JITQUANT_CHECK(like == nullptr || t.get_device_index() == like->get_device_index(), name,
                 " is on cuda:", t.get_device_index(),
                 ", but the input is on cuda:", like ? like->get_device_index() : -1,
                 "; move one of them with .to()");
}

inline DType dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    default:
      JITQUANT_CHECK(false, name, " must be bfloat16, float16 or float32; convert it with .to()");
  }
  return DType::kFloat32;
}

inline int64_t element_size(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}

inline bool aligned(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// The last dimension is the columns; the `leading` first ones are the rows, in place, whatever
// their strides; dimensions between the two are for the caller.
inline Matrix matrix_of(const Tensor& t, const char* name, int64_t leading) {
  Matrix m = {};
  m.data = t.const_data_ptr();
  m.dtype = dtype_of(t, name);
  m.cols = t.size(t.dim() - 1);
  JITQUANT_CHECK(m.cols >= 1, name, " has no columns: its shape is ", shape_text(t));
  JITQUANT_CHECK(m.cols == 1 || t.stride(t.dim() - 1) == 1, name,
                 " must have a contiguous last dimension, but its stride is ",
                 t.stride(t.dim() - 1), "; pass ", name, ".contiguous()");
  m.rows = 1;
  int64_t sizes[3] = {1, 1, 1}, strides[3] = {0, 0, 0};  // innermost first
  int count = 0;
  for (int64_t i = leading - 1; i >= 0; --i) {
    const int64_t size = t.size(i), stride = t.stride(i);
    m.rows *= size;
    if (size == 1) continue;
    if (count > 0 && stride == strides[count - 1] * sizes[count - 1]) {
      sizes[count - 1] *= size;
      continue;
    }
    JITQUANT_CHECK(count < 3, name,
                   " has more than three leading dimensions that do not follow "
                   "each other in memory: its shape is ",
                   shape_text(t), "; pass ", name, ".contiguous()");
    sizes[count] = size;
    strides[count++] = stride;
  }
  m.n2 = sizes[0], m.n1 = sizes[1];
  m.s2 = strides[0], m.s1 = strides[1], m.s0 = strides[2];
  const int64_t bytes = element_size(m.dtype);
  m.vector = aligned(m.data, 16) && m.s0 * bytes % 16 == 0 && m.s1 * bytes % 16 == 0 &&
             m.s2 * bytes % 16 == 0;
  return m;
}

inline Matrix matrix_of(const Tensor& t, const char* name) {
  check_cuda(t, name);
  JITQUANT_CHECK(t.dim() >= 1, name, " must have at least one dimension");
  return matrix_of(t, name, t.dim() - 1);
}

inline Nvfp4Recipe recipe_of(const std::string& recipe) {
  if (recipe == "te") return Nvfp4Recipe::kTe;
  JITQUANT_CHECK(recipe == "vllm", "recipe must be 'te' or 'vllm', not '", recipe, "'");
  return Nvfp4Recipe::kVllm;
}

inline bool swizzled_of(const std::string& scale_layout) {
  if (scale_layout == "linear") return false;
  JITQUANT_CHECK(scale_layout == "swizzled_128x4",
                 "scale_layout must be 'linear' or 'swizzled_128x4', not '", scale_layout, "'");
  return true;
}

inline bool by_row(const std::string& granularity) {
  if (granularity == "tensor") return false;
  JITQUANT_CHECK(granularity == "row", "granularity must be 'tensor' or 'row', not '", granularity,
                 "'");
  return true;
}

inline bool activates(const std::string& op) {
  if (op == "select") return false;
  JITQUANT_CHECK(op == "swiglu", "op must be 'swiglu' or 'select', not '", op, "'");
  return true;
}

inline float divisor_of(double divisor) {
  const float d = static_cast<float>(divisor);
  JITQUANT_CHECK(std::isfinite(d) && d > 0, "divisor must be positive and finite in fp32, not ",
                 divisor);
  return d;
}

inline Tensor empty(const std::vector<int64_t>& sizes, ScalarType dtype, const Tensor& like) {
  return torch::stable::empty({sizes.data(), sizes.size()}, dtype, std::nullopt, like.device());
}

inline void check_out(const Tensor& t, const char* name, ScalarType dtype,
                      const std::vector<int64_t>& sizes, const Tensor& like) {
  check_cuda(t, name, &like);
  JITQUANT_CHECK(t.scalar_type() == dtype, name, " has the wrong dtype for an output");
  bool same = t.dim() == static_cast<int64_t>(sizes.size());
  std::string wanted;
  for (size_t i = 0; i < sizes.size(); ++i) {
    same = same && t.size(static_cast<int64_t>(i)) == sizes[i];
    wanted += (i ? ", " : "") + std::to_string(sizes[i]);
  }
  JITQUANT_CHECK(same, name, " must have shape (", wanted, "), not ", shape_text(t));
  JITQUANT_CHECK(t.is_contiguous() && aligned(t.const_data_ptr(), 8), name,
                 " must be contiguous and aligned to 8 bytes");
}

// The packed outputs of `rows` lines of `cols` elements with the leading dimensions of `lead`.
struct PackedShape {
  std::vector<int64_t> codes, scales;
  int64_t rows, blocks;
  bool swizzled;

  PackedShape(std::vector<int64_t> lead, int64_t rows, int64_t cols, bool swizzled)
      : codes(lead),
        scales(std::move(lead)),
        rows(rows),
        blocks((cols + 15) / 16),
        swizzled(swizzled) {
    codes.push_back(blocks * 8);
    scales.push_back(blocks);
    if (swizzled) scales = {(rows + 127) / 128 * 128, (blocks + 3) / 4 * 4};
  }

  Tensor empty_codes(const Tensor& like) const {
    return empty(codes, ScalarType::Float4_e2m1fn_x2, like);
  }
  Tensor empty_scales(const Tensor& like) const {
    return empty(scales, ScalarType::Float8_e4m3fn, like);
  }
  Nvfp4Output output(const Tensor& x_fp4, const Tensor& x_sf, const Tensor& like) const {
    check_out(x_fp4, "x_fp4", ScalarType::Float4_e2m1fn_x2, codes, like);
    check_out(x_sf, "x_sf", ScalarType::Float8_e4m3fn, scales, like);
    return {static_cast<uint8_t*>(x_fp4.mutable_data_ptr()),
            static_cast<uint8_t*>(x_sf.mutable_data_ptr()), rows, blocks, swizzled};
  }
};

inline std::vector<int64_t> leading_sizes(const Tensor& t, int64_t count) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < count; ++i) sizes.push_back(t.size(i));
  return sizes;
}

inline float* float_out(const Tensor& t, const char* name, int64_t count, const Tensor& like) {
  check_out(t, name, ScalarType::Float, {count}, like);
  return static_cast<float*>(t.mutable_data_ptr());
}

inline Tensor empty_floats(int64_t count, const Tensor& like) {
  return empty({count}, ScalarType::Float, like);
}

// A gsa tensor of one element, or of one for each row.
inline GlobalScale given_scale(const Tensor& gsa, const char* name, int64_t rows,
                               const Tensor& like) {
  check_cuda(gsa, name, &like);
  JITQUANT_CHECK(gsa.scalar_type() == ScalarType::Float, name, " must be float32");
  GlobalScale scale = {};
  scale.gsa = static_cast<const float*>(gsa.const_data_ptr());
  if (gsa.numel() == 1) {
    scale.kind = GlobalScale::kTensor;
    return scale;
  }
  JITQUANT_CHECK(gsa.dim() == 1 && gsa.size(0) == rows, name,
                 " must have one element, or one for each of the ", rows,
                 " rows in shape (rows,); its shape is ", shape_text(gsa));
  scale.kind = GlobalScale::kRows;
  scale.stride = gsa.stride(0);
  return scale;
}

inline GlobalScale value_scale(double value, float* gsa_out) {
  GlobalScale scale = {};
  scale.kind = GlobalScale::kValue;
  scale.value = static_cast<float>(value);
  scale.gsa_out = gsa_out;
  return scale;
}

inline GlobalScale partial_scale(const Tensor& partials, float divisor, float* gsa_out) {
  GlobalScale scale = {};
  scale.kind = GlobalScale::kPartials;
  scale.partials = static_cast<const float*>(partials.const_data_ptr());
  scale.count = static_cast<int>(partials.size(0));
  scale.divisor = divisor;
  scale.gsa_out = gsa_out;
  return scale;
}

inline float* floats(const Tensor& t) {
  return static_cast<float*>(t.mutable_data_ptr());
}

inline ColumnVector column_vector(const Tensor& weight, const Matrix& x, const Tensor& like) {
  check_cuda(weight, "weight", &like);
  JITQUANT_CHECK(weight.dim() == 1 && weight.size(0) == x.cols, "weight must have shape (", x.cols,
                 ",), not ", shape_text(weight));
  JITQUANT_CHECK(weight.is_contiguous(), "weight must be contiguous; pass weight.contiguous()");
  const DType dtype = dtype_of(weight, "weight");
  JITQUANT_CHECK(dtype == x.dtype || dtype == DType::kFloat32,
                 "weight must have the input's dtype, or float32");
  const void* data = weight.const_data_ptr();
  return {data, dtype == DType::kFloat32, aligned(data, 16)};
}

}  // namespace jitquant
