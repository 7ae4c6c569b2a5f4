// Shared by all bindings: converts torch tensors to plain structs, with the checks that keep
// invalid arguments away from a kernel. Uses only torch's stable ABI.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "captured.h"
#include "jitquant/launch.h"
#include "memory.h"

namespace jitquant {

using torch::stable::accelerator::DeviceGuard;

// The shape of a result: leading sizes of an input, which must outlive it, plus one or two more.
class Shape {
 public:
  static Shape of(const View& like, int64_t leading, int64_t last) {
    return {like.sizes, leading, {last, 0}, 1};
  }
  static Shape of(const View& like, int64_t leading, int64_t first, int64_t last) {
    return {like.sizes, leading, {first, last}, 2};
  }
  static Shape of(int64_t size) { return {nullptr, 0, {size, 0}, 1}; }
  static Shape of(int64_t first, int64_t second) { return {nullptr, 0, {first, second}, 2}; }

  int64_t dim() const { return leading_ + trailing_; }
  int64_t size(int64_t i) const { return i < leading_ ? lead_[i] : tail_[i - leading_]; }
  bool empty() const {
    for (int64_t i = 0; i < dim(); ++i) {
      if (size(i) == 0) return true;
    }
    return false;
  }

 private:
  Shape(const int64_t* lead, int64_t leading, std::array<int64_t, 2> tail, int64_t trailing)
      : lead_(lead), leading_(leading), tail_(tail), trailing_(trailing) {}

  const int64_t* lead_;
  int64_t leading_;
  std::array<int64_t, 2> tail_;
  int64_t trailing_;
};

inline bool has_shape(const View& t, const Shape& shape) {
  bool same = t.dim() == shape.dim();
  for (int64_t i = 0; same && i < t.dim(); ++i) same = t.size(i) == shape.size(i);
  return same;
}

// torch's current stream. The function is in libtorch_cuda.so, which a CPU build of torch lacks.
// This library must load there too, so it cannot link against it.
inline cudaStream_t current_stream(const View& t) {
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
  note_capture(static_cast<cudaStream_t>(stream));
  return static_cast<cudaStream_t>(stream);
}

// The device on which torch creates new tensors. CUDA's current device may differ: torch remembers
// a device without a context, but does not switch back to it.
inline int32_t current_device() {
  return torch::stable::accelerator::getCurrentDeviceIndex();
}

inline void check_launch(cudaError_t error, const char* what) {
  if (error != cudaSuccess) cudaGetLastError();  // otherwise torch's next kernel would report it
  JITQUANT_CHECK(error == cudaSuccess, what, ": CUDA error ", cudaGetErrorName(error), ": ",
                 cudaGetErrorString(error));
}

inline void check_cuda(const View& t, const char* name, const View* like = nullptr) {
  JITQUANT_CHECK(t.is_cuda(), name,
                 ": expected a tensor on cuda, got one on the CPU. Move it with ", name,
                 ".to('cuda')");
  JITQUANT_CHECK(like == nullptr || t.get_device_index() == like->get_device_index(), name,
                 ": expected a tensor on cuda:", like ? like->get_device_index() : -1,
                 ", as the input is, got one on cuda:", t.get_device_index(),
                 ". Move one of them with .to()");
}

inline DType dtype_of(ScalarType dtype, const char* name) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    default:
      fail(name, ": expected bfloat16, float16 or float32, got ", dtype_text(dtype));
  }
  return DType::kFloat32;
}

inline DType dtype_of(const View& t, const char* name) {
  return dtype_of(t.scalar_type(), name);
}

inline int64_t element_size(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}

inline bool aligned(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// The rows of a tensor. The last dimension holds the columns. The first `leading` dimensions form
// the rows, in place and with any strides. The caller handles the dimensions in between.
inline Matrix rows_of(const View& t, const char* name, int64_t leading, int64_t element_bytes) {
  Matrix m = {};
  m.data = t.const_data_ptr();
  m.cols = t.size(t.dim() - 1);
  JITQUANT_CHECK(m.cols >= 1, name, ": expected one column or more, got shape ", shape_text(t));
  JITQUANT_CHECK(m.cols == 1 || t.stride(t.dim() - 1) == 1, name,
                 ": expected a contiguous last dimension (stride 1), got strides ",
                 strides_text(t));
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
                   ": expected at most three leading dimensions of different strides, got shape ",
                   shape_text(t), " and strides ", strides_text(t), ". Call ", name,
                   ".contiguous() first");
    sizes[count] = size;
    strides[count++] = stride;
  }
  JITQUANT_CHECK(sizes[0] == m.rows || m.rows <= UINT32_MAX, name,
                 ": expected fewer than 2^32 rows that are not at one stride, got shape ",
                 shape_text(t), ". Call ", name, ".contiguous() first");
  m.n2 = sizes[0], m.n1 = sizes[1];
  m.s2 = strides[0], m.s1 = strides[1], m.s0 = strides[2];
  const int64_t bytes = element_bytes;
  m.vector = aligned(m.data, 16) && m.s0 * bytes % 16 == 0 && m.s1 * bytes % 16 == 0 &&
             m.s2 * bytes % 16 == 0;
  return m;
}

inline Matrix matrix_of(const View& t, const char* name, int64_t leading) {
  const DType dtype = dtype_of(t, name);
  Matrix m = rows_of(t, name, leading, element_size(dtype));
  m.dtype = dtype;
  return m;
}

inline Matrix matrix_of(const View& t, const char* name) {
  check_cuda(t, name);
  return matrix_of(t, name, t.dim() - 1);
}

// Declared names and numbers, already checked.
inline Nvfp4Recipe recipe_of(std::string_view recipe) {
  return recipe == "te" ? Nvfp4Recipe::kTe : Nvfp4Recipe::kVllm;
}

inline bool swizzled_of(std::string_view scale_layout) {
  return scale_layout == "swizzled_128x4";
}

inline bool by_row(std::string_view granularity) {
  return granularity == "row";
}

inline bool activates(std::string_view op) {
  return op == "swiglu";
}

inline std::optional<float> in_fp32(std::optional<double> value) {
  return value ? std::optional<float>(static_cast<float>(*value)) : std::nullopt;
}

// Scratch memory for one call: floats, or null if none are needed. torch gives it to no other work
// on this stream until ours is done.
class __attribute__((visibility("hidden"))) Workspace {
 public:
  Workspace(int64_t count, const View& like) {
    if (count > 0) {
      memory_ = torch::stable::empty({&count, 1}, ScalarType::Float, std::nullopt,
                                     torch::stable::Device(torch::headeronly::DeviceType::CUDA,
                                                           static_cast<int32_t>(like.device)));
    }
  }
  float* floats() const {
    return memory_ ? static_cast<float*>(memory_->mutable_data_ptr()) : nullptr;
  }

 private:
  std::optional<Tensor> memory_;
};

inline bool holds_bytes(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Char:
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2:
    case ScalarType::Float8_e8m0fnu:
    case ScalarType::Float4_e2m1fn_x2:
      return true;
    default:
      return false;
  }
}

// A buffer for a result; its rows may be strided. Codes and scales may be passed as bytes.
inline void check_kind(const View& t, const char* name, ScalarType dtype, const Shape& shape,
                       const View& like) {
  JITQUANT_CHECK(t.dtype == dtype || (holds_bytes(dtype) && t.dtype == ScalarType::Byte), name,
                 ": expected ", dtype_text(dtype), " for this call, got ", dtype_text(t.dtype));
  check_cuda(t, name, &like);
  JITQUANT_CHECK(has_shape(t, shape), name, ": expected shape ", shape_text(shape),
                 " for this call, got shape ", shape_text(t));
}

inline void check_out(const View& t, const char* name, ScalarType dtype, const Shape& shape,
                      const View& like) {
  check_kind(t, name, dtype, shape, like);
  JITQUANT_CHECK(t.is_contiguous(), name, ": expected a contiguous buffer, got strides ",
                 strides_text(t));
  JITQUANT_CHECK(aligned(t.data, 8), name,
                 ": expected memory aligned to 8 bytes, got another address");
}

// A result of a call: the caller's buffer, or a tensor that is created once its shape is known. All
// arguments are checked before the first result is allocated.
class Result {
 public:
  Result() = default;
  Result(const Result&) = delete;
  Result& operator=(const Result&) = delete;

  void give(const View& buffer) { given_ = buffer; }
  // For a result that has no elements.
  void give_nothing() { nothing_ = true; }
  const View* given() const { return given_ ? &*given_ : nullptr; }
  void* memory(const char* name, ScalarType dtype, const Shape& shape, const View& like) {
    if (nothing_) {
      JITQUANT_CHECK(shape.empty(), name, ": expected a buffer for this call, got None");
      return nullptr;
    }
    if (!given_) return make(dtype, shape, like);
    check_out(*given_, name, dtype, shape, like);
    return given_->data;
  }
  float* floats(const char* name, int64_t count, const View& like) {
    return static_cast<float*>(memory(name, ScalarType::Float, Shape::of(count), like));
  }
  // One-byte elements; the rows of a buffer may be strided.
  Matrix rows(const char* name, ScalarType dtype, const Shape& shape, const View& like) {
    JITQUANT_CHECK(!nothing_, name, ": expected a buffer for this call, got None");
    if (given_) {
      check_kind(*given_, name, dtype, shape, like);
      const int64_t last = shape.dim() - 1;
      JITQUANT_CHECK(shape.size(last) == 1 || given_->stride(last) == 1, name,
                     ": expected a contiguous last dimension (stride 1), got strides ",
                     strides_text(*given_));
      check_own_elements(*given_, name);
      return rows_of(*given_, name, shape.dim() - 1, 1);
    }
    Matrix m = {};
    m.data = make(dtype, shape, like);
    m.rows = 1;
    for (int64_t i = 0; i < shape.dim() - 1; ++i) m.rows *= shape.size(i);
    m.cols = m.s2 = shape.size(shape.dim() - 1);
    m.n1 = 1;
    m.n2 = m.rows;
    m.vector = aligned(m.data, 16) && m.cols % 16 == 0;
    return m;
  }

 protected:
  ~Result() = default;
  virtual void* make(ScalarType dtype, const Shape& shape, const View& like) = 0;

 private:
  std::optional<View> given_;
  bool nothing_ = false;
};

// One call of a function, from torch or from Python.
class Call {
 public:
  virtual void begin() {}  // all checks have passed; the launch is next
  virtual void end() {}
  virtual int32_t device() { return current_device(); }

 protected:
  ~Call() = default;
};

// The arguments of one call by position in the schema, followed by the results, for both ways of
// calling. Virtual, because separate code for each way and function would be most of a binding.
class Arguments {
 public:
  explicit Arguments(bool has_buffers) : has_buffers_(has_buffers) {}
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  bool has_buffers() const { return has_buffers_; }  // the caller passed the result buffers
  virtual Result& result(size_t i) = 0;

  // Each argument is requested once, before the results.
  virtual void get(size_t i, View& out) = 0;
  virtual void get(size_t i, InPlace& out) = 0;
  virtual void get(size_t i, double& out) = 0;
  virtual void get(size_t i, int64_t& out) = 0;
  virtual void get(size_t i, bool& out) = 0;
  virtual void get(size_t i, std::string_view& out) = 0;
  virtual void get(size_t i, ScalarType& out) = 0;
  virtual void get(size_t i, std::optional<View>& out) = 0;
  virtual void get(size_t i, std::optional<InPlace>& out) = 0;
  virtual void get(size_t i, std::optional<double>& out) = 0;
  virtual void get(size_t i, std::optional<int64_t>& out) = 0;
  virtual void get(size_t i, std::optional<ScalarType>& out) = 0;

 protected:
  ~Arguments() = default;

 private:
  const bool has_buffers_;
};

constexpr size_t kMostResults = 8;

// How to call a binding's function, and the names of its arguments and results.
struct Invocation {
  void (*invoke)(Call&, Arguments&);
  size_t inputs, results;
};

template <auto kFunction>
std::vector<std::string>& names_of() {
  static std::vector<std::string> names;
  return names;
}

// Refuses a name with the same message as jitquant.formats.one_of.
inline void check_name(const char* name, std::string_view value,
                       std::initializer_list<std::string_view> accepted) {
  for (const std::string_view one : accepted) {
    if (value == one) return;
  }
  std::string names;
  for (const std::string_view one : accepted) {
    names = text_of({names, names.empty() ? "'" : ", '", one, "'"});
  }
  fail(name, accepted.size() > 1 ? ": expected one of " : ": expected ", names, ", got '", value,
       "'");
}

// Refuses a number with the same message as jitquant.ops.schema.Number.
inline void check_number(const char* name, std::optional<double> value, double least, double most,
                         const char* expected, const char* way_out) {
  JITQUANT_CHECK(!value || (*value >= least && *value <= most), name, ": expected ", expected,
                 ", got ", *value, way_out);
}

// Refuses a dtype with the same message as jitquant.ops.schema.Dtypes.
inline void check_dtype(const char* name, ScalarType dtype,
                        std::initializer_list<ScalarType> accepted, const char* expected,
                        const char* way_out) {
  for (const ScalarType one : accepted) {
    if (dtype == one) return;
  }
  fail(name, ": expected ", expected, ", got ", dtype_text(dtype), way_out);
}

inline void check_dtype(const char* name, const View& t, std::initializer_list<ScalarType> accepted,
                        const char* expected, const char* way_out) {
  check_dtype(name, t.dtype, accepted, expected, way_out);
}

template <class T>
void check_dtype(const char* name, const std::optional<T>& given,
                 std::initializer_list<ScalarType> accepted, const char* expected,
                 const char* way_out) {
  if (given) check_dtype(name, *given, accepted, expected, way_out);
}

// Refuses a tensor to quantize with the same message as jitquant.ops._checks.input_tensor.
inline void check_values(const char* name, const View& t, int64_t least_dim, const char* shape) {
  JITQUANT_CHECK(t.dtype == ScalarType::BFloat16 || t.dtype == ScalarType::Half ||
                     t.dtype == ScalarType::Float,
                 name, ": expected bfloat16, float16 or float32, got ", dtype_text(t.dtype),
                 ". Convert it with ", name, ".to(torch.bfloat16)");
  JITQUANT_CHECK(t.dim() >= least_dim, name, ": expected shape ", shape, ", got shape ",
                 shape_text(t), ". Add dimensions with ", name, ".reshape(...)");
  const int64_t last = t.dim() - 1;
  JITQUANT_CHECK(t.size(last) != 0, name, ": expected shape ", shape, " with N >= 1, got shape ",
                 shape_text(t), ". An empty tensor may have no rows, but needs columns");
  JITQUANT_CHECK(t.stride(last) == 1 || t.size(last) == 1, name,
                 ": expected a contiguous last dimension (stride 1), got strides ", strides_text(t),
                 ". Call ", name, ".contiguous() first");
}

// Refuses strides with the same message as jitquant.ops._checks.contiguous.
inline void check_contiguous(const View& t, const char* name) {
  JITQUANT_CHECK(t.is_contiguous(), name, ": expected a contiguous tensor, got strides ",
                 strides_text(t), ". Call ", name, ".contiguous() first");
}

// Refuses runs of columns with the same message as jitquant.ops._checks.turns.
inline void check_turns(int64_t interleave, int64_t cols) {
  JITQUANT_CHECK(interleave == 0 || (interleave > 0 && cols % interleave == 0),
                 "interleave: expected 0 for [gate | up], or a divisor of ", cols,
                 ", the columns of each, got ", interleave);
}

// Refuses codes or scales to read with the same message as jitquant.ops._checks.packed_tensor.
inline void check_packed_kind(const View& t, const char* name, ScalarType dtype) {
  JITQUANT_CHECK(t.dtype == dtype || t.dtype == ScalarType::Byte, name, ": expected ",
                 dtype_text(dtype), " or its bytes as torch.uint8, got ", dtype_text(t.dtype),
                 ". View it with ", name, ".view(torch.uint8)");
  JITQUANT_CHECK(t.is_contiguous(), name, ": expected a contiguous tensor, got strides ",
                 strides_text(t), ". Make a contiguous copy with ", name,
                 ".view(torch.uint8).contiguous()");
}

// The tensor behind an argument, and whether it is written.
inline const View* tensor_of(const View& t) {
  return &t;
}
template <class T>
const View* tensor_of(const std::optional<T>& t) {
  if constexpr (std::is_base_of_v<View, T>) {
    return t ? &*t : nullptr;
  } else {
    return nullptr;
  }
}
template <class T>
const View* tensor_of(const T&) {
  return nullptr;
}
template <class T>
constexpr bool kIsWritten = std::is_same_v<T, InPlace> || std::is_same_v<T, std::optional<InPlace>>;

template <class F>
struct Signature;

template <auto kFunction, class... Inputs, size_t... I, size_t... R>
void invoke(Call& call, Arguments& all, std::tuple<Inputs...>*, std::index_sequence<I...>,
            std::index_sequence<R...>) {
  std::tuple<Inputs...> inputs;
  (all.get(I, std::get<I>(inputs)), ...);
  constexpr bool kWrites = (kIsWritten<Inputs> || ...);
  if (kWrites || all.has_buffers()) {
    const Reached reached[] = {{tensor_of(std::get<I>(inputs)), kIsWritten<Inputs>}...,
                               {all.result(R).given(), true}...};
    check_own_memory(reached, names_of<kFunction>());
  }
  const typename Signature<decltype(kFunction)>::Declared arguments = {std::get<I>(inputs)...};
  arguments.check();
  kFunction(call, arguments, all.result(R)...);
}

// While it exists, the input's device is the current device of torch and CUDA. Launches go to
// `stream`.
class __attribute__((visibility("hidden"))) Launching {
 public:
  Launching(Call& call, const View& like) : call_(call), stream(current_stream(like)) {
    int current = -1;
    if (cudaGetDevice(&current) != cudaSuccess || current != like.device ||
        call.device() != like.device) {
      guard_.emplace(like.device);
    }
    call_.begin();
  }
  ~Launching() { call_.end(); }
  Launching(const Launching&) = delete;
  Launching& operator=(const Launching&) = delete;

 private:
  Call& call_;
  std::optional<DeviceGuard> guard_;

 public:
  const cudaStream_t stream;
};

// The packed results of `rows` lines of `cols` elements; the leading sizes are those of `like`.
struct PackedShape {
  Shape codes, scales;
  int64_t rows, blocks;
  bool swizzled;

  static PackedShape of(const View& like, int64_t leading, int64_t rows, int64_t cols,
                        bool swizzled) {
    const int64_t blocks = (cols + 15) / 16;
    return {Shape::of(like, leading, blocks * 8),
            swizzled ? Shape::of(swizzled_rows(rows), swizzled_blocks(blocks))
                     : Shape::of(like, leading, blocks),
            rows, blocks, swizzled};
  }

  Nvfp4Output output(Result& x_fp4, Result& x_sf, const View& like) const {
    void* codes_to = x_fp4.memory("x_fp4", ScalarType::Float4_e2m1fn_x2, codes, like);
    void* scales_to = x_sf.memory("x_sf", ScalarType::Float8_e4m3fn, scales, like);
    return {static_cast<uint8_t*>(codes_to), static_cast<uint8_t*>(scales_to), rows, blocks,
            swizzled};
  }
};

// A gsa tensor with one element, or one per row.
inline GlobalScale given_scale(const View& gsa, const char* name, int64_t rows, const View& like,
                               const char* like_name) {
  check_cuda(gsa, name, &like);
  GlobalScale scale = {};
  scale.gsa = static_cast<const float*>(gsa.const_data_ptr());
  if (gsa.numel() == 1) {
    scale.kind = GlobalScale::kTensor;
    return scale;
  }
  JITQUANT_CHECK(gsa.dim() == 1 && gsa.size(0) == rows, name, ": expected one element or shape (",
                 rows, ",), one for each row of ", like_name, ", got shape ", shape_text(gsa),
                 ". Flatten it with ", name, ".reshape(-1)");
  scale.kind = GlobalScale::kRows;
  scale.stride = gsa.stride(0);
  return scale;
}

inline GlobalScale value_scale(float value, float* gsa_out) {
  GlobalScale scale = {};
  scale.kind = GlobalScale::kValue;
  scale.value = value;
  scale.gsa_out = gsa_out;
  return scale;
}

// Partial maxima; the largest is the amax of the tensor.
inline GlobalScale amax_scale(const View& amax, float divisor, float* gsa_out, const View& like) {
  check_cuda(amax, "amax", &like);
  JITQUANT_CHECK(amax.numel() >= 1 && amax.numel() <= kMaxPartials && amax.is_contiguous(),
                 "amax: expected 1 to ", kMaxPartials, " contiguous elements, got shape ",
                 shape_text(amax), " and strides ", strides_text(amax));
  GlobalScale scale = partials_scale(static_cast<const float*>(amax.const_data_ptr()),
                                     static_cast<int>(amax.numel()), divisor, gsa_out);
  scale.kind = GlobalScale::kAmax;
  return scale;
}

// The amax of a tensor, or one per row.
inline GlobalScale amax_or_rows_scale(const View& amax, int64_t rows, float divisor, float* gsa_out,
                                      const View& like) {
  if (amax.numel() == 1) return amax_scale(amax, divisor, gsa_out, like);
  GlobalScale scale = given_scale(amax, "amax", rows, like, "input");
  scale.kind = GlobalScale::kRowAmax;
  scale.divisor = divisor;
  scale.gsa_out = gsa_out;
  return scale;
}

inline ColumnVector column_vector(const View& weight, const Matrix& x, const View& like,
                                  const char* like_name = "x") {
  check_cuda(weight, "weight", &like);
  JITQUANT_CHECK(weight.dtype == like.dtype || weight.dtype == ScalarType::Float,
                 "weight: expected ", like_name, "'s dtype ", dtype_text(like.dtype),
                 " or float32, got ", dtype_text(weight.dtype), ". Convert it with weight.to(",
                 like_name, ".dtype)");
  JITQUANT_CHECK(weight.dim() == 1 && weight.size(0) == x.cols, "weight: expected shape (", x.cols,
                 ",), one element for each column of ", like_name, ", got shape ",
                 shape_text(weight));
  check_contiguous(weight, "weight");
  const DType dtype = dtype_of(weight, "weight");
  const void* data = weight.const_data_ptr();
  return {data, dtype == DType::kFloat32, aligned(data, 16)};
}

}  // namespace jitquant
