// The half of the bindings that needs torch, through its stable ABI, and Python: how a function is
// registered and called, and what its results are. See function.h.
#include "function.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <memory>

#include "direct.h"

namespace jitquant {
namespace {

using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;
using torch::stable::detail::StableLibrary;
using Theirs = torch::headeronly::ScalarType;

#define JITQUANT_SAME(name) \
  static_assert(static_cast<int>(ScalarType::name) == static_cast<int>(Theirs::name));
JITQUANT_SAME(Byte)
JITQUANT_SAME(Char)
JITQUANT_SAME(Short)
JITQUANT_SAME(Int)
JITQUANT_SAME(Long)
JITQUANT_SAME(Half)
JITQUANT_SAME(Float)
JITQUANT_SAME(Double)
JITQUANT_SAME(Bool)
JITQUANT_SAME(BFloat16)
JITQUANT_SAME(Float8_e5m2)
JITQUANT_SAME(Float8_e4m3fn)
JITQUANT_SAME(Float8_e8m0fnu)
JITQUANT_SAME(Float4_e2m1fn_x2)
#undef JITQUANT_SAME

ScalarType dtype_of(Theirs dtype) {
  return static_cast<ScalarType>(dtype);
}

View view_of(const Tensor& t) {
  View view;
  view.data = t.mutable_data_ptr();
  view.dtype = dtype_of(t.scalar_type());
  view.cuda = t.is_cuda();
  view.device = t.get_device_index();
  view.rank = t.dim();
  view.sizes = t.sizes().data();
  view.strides = t.strides().data();
  return view;
}

Tensor empty(const int64_t* sizes, size_t rank, ScalarType dtype, int32_t device) {
  return torch::stable::empty({sizes, rank}, static_cast<Theirs>(dtype), std::nullopt,
                              torch::stable::Device(torch::headeronly::DeviceType::CUDA, device));
}

// A result that is a new torch tensor.
class NewTensor : public Result {
 public:
  const Tensor& tensor() const { return *tensor_; }

 private:
  void* make(ScalarType dtype, const Shape& shape, const View& like) override {
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i < shape.dim(); ++i) sizes.push_back(shape.size(i));
    tensor_ = empty(sizes.data(), sizes.size(), dtype, like.device);
    return tensor_->mutable_data_ptr();
  }

  std::optional<Tensor> tensor_;
};

class TorchCall : public Call {};

// Arguments from torch: an array whose values are moved out.
class TorchArguments final : public Arguments {
 public:
  TorchArguments(StableIValue* stack, const Invocation& function, bool has_buffers)
      : Arguments(has_buffers), stack_(stack), inputs_(function.inputs) {
    tensors_.reserve(function.inputs + function.results);  // views and strings point into these
    texts_.reserve(function.inputs);
    for (size_t i = 0; has_buffers && i < function.results; ++i) {
      results_[i].give(view_of(take<Tensor>(inputs_ + i, tensors_)));
    }
  }

  NewTensor& result(size_t i) override { return results_[i]; }

  void get(size_t i, View& out) override { out = view_of(take<Tensor>(i, tensors_)); }
  void get(size_t i, InPlace& out) override { out = {view_of(take<Tensor>(i, tensors_))}; }
  void get(size_t i, double& out) override { out = value<double>(i); }
  void get(size_t i, int64_t& out) override { out = value<int64_t>(i); }
  void get(size_t i, bool& out) override { out = value<bool>(i); }
  void get(size_t i, std::string_view& out) override { out = take<std::string>(i, texts_); }
  void get(size_t i, ScalarType& out) override { out = dtype_of(value<Theirs>(i)); }
  void get(size_t i, std::optional<View>& out) override {
    if (const Tensor* t = take_optional(i)) out = view_of(*t);
  }
  void get(size_t i, std::optional<InPlace>& out) override {
    if (const Tensor* t = take_optional(i)) out = {view_of(*t)};
  }
  void get(size_t i, std::optional<double>& out) override { out = value<std::optional<double>>(i); }
  void get(size_t i, std::optional<int64_t>& out) override {
    out = value<std::optional<int64_t>>(i);
  }
  void get(size_t i, std::optional<ScalarType>& out) override {
    if (const std::optional<Theirs> dtype = value<std::optional<Theirs>>(i)) out = dtype_of(*dtype);
  }

 private:
  template <class T>
  T value(size_t i) {
    return torch::stable::detail::to<T>(stack_[i]);
  }
  template <class T>
  const T& take(size_t i, std::vector<T>& kept) {
    return kept.emplace_back(value<T>(i));
  }
  const Tensor* take_optional(size_t i) {
    std::optional<Tensor> t = value<std::optional<Tensor>>(i);
    return t ? &tensors_.emplace_back(*std::move(t)) : nullptr;
  }

  StableIValue* const stack_;
  const size_t inputs_;
  std::vector<Tensor> tensors_;
  std::vector<std::string> texts_;
  NewTensor results_[kMostResults];
};

// The argument names in a schema's text: "Tensor x, *, float eps=1e-6" gives x and eps.
std::vector<std::string> names_in(const std::string& arguments) {
  std::vector<std::string> names;
  for (size_t begin = 0; begin < arguments.size();) {
    const size_t end = std::min(arguments.find(", ", begin), arguments.size());
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
  return torch::stable::accelerator::getCurrentDeviceIndex();
}

Workspace::Workspace(int64_t count, const View& like) {
  if (count <= 0) return;
  auto tensor = std::make_unique<Tensor>(empty(&count, 1, ScalarType::Float, like.device));
  floats_ = static_cast<float*>(tensor->mutable_data_ptr());
  tensor_ = tensor.release();
}

Workspace::~Workspace() {
  delete static_cast<Tensor*>(tensor_);
}

Launching::Launching(Call& call, const View& like)
    : call_(call), stream(current_stream(like.device)) {
  std::unique_ptr<DeviceGuard> guard;
  int current = -1;
  if (cudaGetDevice(&current) != cudaSuccess || current != like.device ||
      call.device() != like.device) {
    guard = std::make_unique<DeviceGuard>(like.device);
  }
  call_.begin();
  guard_ = guard.release();
}

Launching::~Launching() {
  call_.end();
  delete static_cast<DeviceGuard*>(guard_);
}

void call_by_torch(const Invocation& function, void* values, bool has_buffers) {
  StableIValue* const stack = static_cast<StableIValue*>(values);
  TorchCall call;
  TorchArguments all(stack, function, has_buffers);
  function.invoke(call, all);
  for (size_t i = 0; !has_buffers && i < function.results; ++i) {
    stack[i] = torch::stable::detail::from<Tensor>(all.result(i).tensor());
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
  static StableLibrary definitions(StableLibrary::Kind::DEF, name, nullptr, __FILE__, __LINE__);
  for (const Function& f : functions) {
    definitions.def(f.functional_schema.c_str());
    definitions.def(f.out_schema.c_str());
  }
  static StableLibrary kernels(StableLibrary::Kind::IMPL, name, "CUDA", __FILE__, __LINE__);
  using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);
  for (const Function& f : functions) {
    kernels.impl(f.name.c_str(), reinterpret_cast<Boxed>(f.functional));
    kernels.impl((f.name + ".out").c_str(), reinterpret_cast<Boxed>(f.out));
  }
}

}  // namespace jitquant
