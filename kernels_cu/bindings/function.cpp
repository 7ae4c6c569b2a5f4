// The half of the bindings that needs torch and Python: how a function is registered and called,
// and what its results are. See function.h. Written against the C functions of torch's stable ABI,
// as its C++ classes take twice as long to compile.
#include "function.h"

#include <torch/csrc/stable/c/shim.h>

#include <array>
#include <cstring>

#include "direct.h"

namespace jitquant {
namespace {

[[noreturn]] __attribute__((noinline, cold)) void fail_in_torch(const char* call) {
  fail_with({"torch failed in ", call});
}
#define JITQUANT_TORCH(call) \
  if ((call) != 0) fail_in_torch(#call)

// Torch's dtypes, whose numbers may differ between releases.
struct TorchDtype {
  ScalarType dtype;
  int32_t number;
};

const std::array<TorchDtype, 14>& torch_dtypes() {
  static const std::array<TorchDtype, 14> all = {{
      {ScalarType::BFloat16, aoti_torch_dtype_bfloat16()},
      {ScalarType::Half, aoti_torch_dtype_float16()},
      {ScalarType::Float, aoti_torch_dtype_float32()},
      {ScalarType::Byte, aoti_torch_dtype_uint8()},
      {ScalarType::Char, aoti_torch_dtype_int8()},
      {ScalarType::Short, aoti_torch_dtype_int16()},
      {ScalarType::Int, aoti_torch_dtype_int32()},
      {ScalarType::Long, aoti_torch_dtype_int64()},
      {ScalarType::Double, aoti_torch_dtype_float64()},
      {ScalarType::Bool, aoti_torch_dtype_bool()},
      {ScalarType::Float8_e5m2, aoti_torch_dtype_float8_e5m2()},
      {ScalarType::Float8_e4m3fn, aoti_torch_dtype_float8_e4m3fn()},
      {ScalarType::Float8_e8m0fnu, torch_dtype_float8_e8m0fnu()},
      {ScalarType::Float4_e2m1fn_x2, torch_dtype_float4_e2m1fn_x2()},
  }};
  return all;
}

// Others keep their number, for messages.
ScalarType dtype_of(int32_t number) {
  for (const TorchDtype& known : torch_dtypes()) {
    if (known.number == number) return known.dtype;
  }
  return static_cast<ScalarType>(number);
}

int32_t number_of(ScalarType dtype) {
  for (const TorchDtype& known : torch_dtypes()) {
    if (known.dtype == dtype) return known.number;
  }
  fail_with({"not a dtype of results: ", static_cast<int>(dtype)});
}

void* memory_of(AtenTensorHandle t) {
  void* data = nullptr;
  JITQUANT_TORCH(torch_get_mutable_data_ptr(t, &data));
  return data;
}

View view_of(AtenTensorHandle t) {
  View view;
  view.data = memory_of(t);
  int32_t dtype = 0, device_type = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  JITQUANT_TORCH(aoti_torch_get_dtype(t, &dtype));
  JITQUANT_TORCH(aoti_torch_get_device_type(t, &device_type));
  JITQUANT_TORCH(aoti_torch_get_device_index(t, &view.device));
  JITQUANT_TORCH(aoti_torch_get_dim(t, &view.rank));
  JITQUANT_TORCH(aoti_torch_get_sizes(t, &sizes));
  JITQUANT_TORCH(aoti_torch_get_strides(t, &strides));
  view.dtype = dtype_of(dtype);
  view.cuda = device_type == aoti_torch_device_type_cuda();
  view.sizes = sizes;
  view.strides = strides;
  return view;
}

// A new contiguous tensor.
AtenTensorHandle empty(const Shape& shape, ScalarType dtype, int32_t device) {
  const int64_t rank = shape.dim();
  std::vector<int64_t> sizes(2 * rank);
  int64_t* const strides = sizes.data() + rank;
  int64_t stride = 1;
  for (int64_t i = rank - 1; i >= 0; --i) {
    sizes[i] = shape.size(i);
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  AtenTensorHandle made = nullptr;
  JITQUANT_TORCH(aoti_torch_empty_strided(rank, sizes.data(), strides, number_of(dtype),
                                          aoti_torch_device_type_cuda(), device, &made));
  return made;
}

// A result that is a new torch tensor.
class NewTensor : public Result {
 public:
  ~NewTensor() {
    if (tensor_ != nullptr) aoti_torch_delete_tensor_object(tensor_);
  }

  AtenTensorHandle release() { return std::exchange(tensor_, nullptr); }

 private:
  void* make(ScalarType dtype, const Shape& shape, const View& like) override {
    tensor_ = empty(shape, dtype, like.device);
    return memory_of(tensor_);
  }

  AtenTensorHandle tensor_ = nullptr;
};

class TorchCall : public Call {};

// What torch has handed over, to be given back.
struct Taken {
  std::vector<AtenTensorHandle> tensors;
  std::vector<StringHandle> texts;

  ~Taken() {
    for (AtenTensorHandle t : tensors) aoti_torch_delete_tensor_object(t);
    for (StringHandle text : texts) torch_delete_string(text);
  }
};

// Arguments from torch: an array whose values are moved out.
class TorchArguments final : public Arguments {
 public:
  TorchArguments(StableIValue* stack, const Invocation& function, bool has_buffers)
      : Arguments(has_buffers), stack_(stack), inputs_(function.inputs) {
    for (size_t i = 0; has_buffers && i < function.results; ++i) {
      results_[i].give(tensor_at(stack_[inputs_ + i]));
    }
  }

  NewTensor& result(size_t i) override { return results_[i]; }

  void get(size_t i, View& out) override { out = tensor_at(stack_[i]); }
  void get(size_t i, InPlace& out) override { out = {tensor_at(stack_[i])}; }
  void get(size_t i, double& out) override { read(stack_[i], out); }
  void get(size_t i, int64_t& out) override { read(stack_[i], out); }
  void get(size_t i, bool& out) override { read(stack_[i], out); }
  void get(size_t i, std::string_view& out) override {
    StringHandle text;
    read(stack_[i], text);
    taken_.texts.push_back(text);
    const char* data = nullptr;
    size_t length = 0;
    JITQUANT_TORCH(torch_string_c_str(text, &data));
    JITQUANT_TORCH(torch_string_length(text, &length));
    out = {data, length};
  }
  void get(size_t i, ScalarType& out) override { read(stack_[i], out); }
  void get(size_t i, std::optional<View>& out) override {
    if (StableIValue given; has(i, given)) out = tensor_at(given);
  }
  void get(size_t i, std::optional<InPlace>& out) override {
    if (StableIValue given; has(i, given)) out = {tensor_at(given)};
  }
  void get(size_t i, std::optional<double>& out) override { read_optional(i, out); }
  void get(size_t i, std::optional<int64_t>& out) override { read_optional(i, out); }
  void get(size_t i, std::optional<ScalarType>& out) override { read_optional(i, out); }

 private:
  template <class T>
  static void read(StableIValue given, T& out) {
    std::memcpy(&out, &given, sizeof out);  // the lowest bytes, on a little-endian machine
  }
  static void read(StableIValue given, ScalarType& out) {
    int32_t number;
    read(given, number);
    out = dtype_of(number);
  }
  // Moves an optional argument out, which is a pointer.
  bool has(size_t i, StableIValue& out) {
    StableIValue* given;
    read(stack_[i], given);
    if (given == nullptr) return false;
    out = *given;
    delete given;
    return true;
  }
  template <class T>
  void read_optional(size_t i, std::optional<T>& out) {
    if (StableIValue given; has(i, given)) read(given, out.emplace());
  }
  View tensor_at(StableIValue given) {
    AtenTensorHandle t;
    read(given, t);
    taken_.tensors.push_back(t);
    return view_of(t);
  }

  StableIValue* const stack_;
  const size_t inputs_;
  Taken taken_;
  NewTensor results_[kMostResults];
};

// The argument names in a schema's text: "Tensor x, *, float eps=1e-6" gives x and eps.
std::vector<std::string> names_in(const std::string& arguments) {
  std::vector<std::string> names;
  for (size_t begin = 0; begin < arguments.size();) {
    size_t end = arguments.find(", ", begin);
    if (end == std::string::npos) end = arguments.size();
    const std::string argument = arguments.substr(begin, end - begin);
    const size_t space = argument.find(' ');
    if (space != std::string::npos) {
      names.push_back(argument.substr(space + 1, argument.find('=') - space - 1));
    }
    begin = end + 2;
  }
  return names;
}

}  // namespace

int32_t current_device() {
  int32_t device = 0;
  JITQUANT_TORCH(aoti_torch_get_current_device_index(&device));
  return device;
}

Workspace::Workspace(int64_t count, const View& like) {
  if (count <= 0) return;
  const AtenTensorHandle tensor = empty(Shape().and_then(count), ScalarType::Float, like.device);
  tensor_ = tensor;
  floats_ = static_cast<float*>(memory_of(tensor));
}

Workspace::~Workspace() {
  if (tensor_ != nullptr) aoti_torch_delete_tensor_object(static_cast<AtenTensorHandle>(tensor_));
}

Launching::Launching(Call& call, const View& like)
    : call_(call), stream(current_stream(like.device)) {
  int current = -1;
  DeviceGuardHandle guard = nullptr;
  if (cudaGetDevice(&current) != cudaSuccess || current != like.device ||
      call.device() != like.device) {
    JITQUANT_TORCH(aoti_torch_create_device_guard(like.device, &guard));
  }
  guard_ = guard;
  try {
    call_.begin();
  } catch (...) {
    leave();
    throw;
  }
}

Launching::~Launching() {
  call_.end();
  leave();
}

void Launching::leave() {
  if (guard_ != nullptr) aoti_torch_delete_device_guard(static_cast<DeviceGuardHandle>(guard_));
}

void call_by_torch(const Invocation& function, void* values, bool has_buffers) {
  StableIValue* const stack = static_cast<StableIValue*>(values);
  TorchCall call;
  TorchArguments all(stack, function, has_buffers);
  function.invoke(call, all);
  for (size_t i = 0; !has_buffers && i < function.results; ++i) {
    stack[i] = reinterpret_cast<StableIValue>(all.result(i).release());
  }
}

Function function_of(const char* name, const std::string& arguments,
                     std::initializer_list<const char*> results, const Invocation& invoked,
                     std::vector<std::string>& names, Function::Kernel functional,
                     Function::Kernel out, Function::Direct direct) {
  names = names_in(arguments);
  JITQUANT_CHECK(names.size() == invoked.inputs && results.size() == invoked.results, name,
                 ": the schema is not that of the function");
  names.insert(names.end(), results.begin(), results.end());
  char next[] = "a";
  for (const char c : arguments) next[0] += c == '!';
  std::string returned, buffers = arguments.find('*') == std::string::npos ? ", *" : "";
  for (const char* result : results) {
    returned = text_of({returned, returned.empty() ? "Tensor " : ", Tensor ", result});
    buffers = text_of({buffers, ", Tensor(", next, "!) ", result});
    ++next[0];
  }
  if (results.size() == 1) returned = "Tensor";
  const char* const open = results.size() == 1 ? "" : "(";
  const char* const close = results.size() == 1 ? "" : ")";
  const std::string schema = text_of({name, "(", arguments, ") -> ", open, returned, close});
  const std::string out_schema = text_of({name, ".out(", arguments, buffers, ") -> ()"});
  return {name, schema, out_schema, functional, out, direct};
}

Registration::Registration(const char* name, const std::vector<Function>& functions) {
  // Until this library is unloaded.
  struct Library {
    TorchLibraryHandle handle = nullptr;
    ~Library() { aoti_torch_delete_library_object(handle); }
  };
  static Library definitions, kernels;
  JITQUANT_TORCH(aoti_torch_library_init_def(name, __FILE__, __LINE__, &definitions.handle));
  for (const Function& f : functions) {
    JITQUANT_TORCH(aoti_torch_library_def(definitions.handle, f.functional_schema.c_str()));
    JITQUANT_TORCH(aoti_torch_library_def(definitions.handle, f.out_schema.c_str()));
  }
  JITQUANT_TORCH(aoti_torch_library_init_impl(name, "CUDA", __FILE__, __LINE__, &kernels.handle));
  const auto implement = [](const std::string& function, Function::Kernel kernel) {
    using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);
    JITQUANT_TORCH(torch_library_impl(kernels.handle, function.c_str(),
                                      reinterpret_cast<Boxed>(kernel), TORCH_FEATURE_VERSION));
  };
  for (const Function& f : functions) {
    implement(f.name, f.functional);
    implement(f.name + ".out", f.out);
  }
}

}  // namespace jitquant
