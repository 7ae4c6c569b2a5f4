// Makes a torch operator with its `out` overload, and a Python function that launches without
// torch's dispatcher (direct.h), from one C++ function:
//
//   void row_gsa(Call& call, const declared::RowGsa& args, Result& gsa);
//   JITQUANT_FUNCTIONS(function<&row_gsa>())
//
// declared/row_gsa.h is generated from the op's declaration: the schema's text, the arguments, and
// the checks of names and numbers. The function checks everything else, allocates the results, and
// only then creates a Launching and launches.
#pragma once

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "common.h"
#include "direct.h"

namespace jitquant {

// A result that is a new torch tensor.
class __attribute__((visibility("hidden"))) NewTensor : public Result {
 public:
  const Tensor& tensor() const { return *tensor_; }

 private:
  void* make(ScalarType dtype, const Shape& shape, const View& like) override {
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i < shape.dim(); ++i) sizes.push_back(shape.size(i));
    tensor_ = torch::stable::empty(
        {sizes.data(), sizes.size()}, dtype, std::nullopt,
        torch::stable::Device(torch::headeronly::DeviceType::CUDA, like.device));
    return tensor_->mutable_data_ptr();
  }

  std::optional<Tensor> tensor_;
};

class TorchCall : public Call {};

// Arguments from torch: an array whose values are moved out.
class __attribute__((visibility("hidden"))) TorchArguments final : public Arguments {
 public:
  TorchArguments(StableIValue* stack, const Invocation& function, bool has_buffers)
      : Arguments(has_buffers), stack_(stack), inputs_(function.inputs) {
    tensors_.reserve(function.inputs + function.results);  // views and strings point into these
    texts_.reserve(function.inputs);
    for (size_t i = 0; has_buffers && i < function.results; ++i) {
      results_[i].give(take<Tensor>(inputs_ + i, tensors_));
    }
  }

  NewTensor& result(size_t i) override { return results_[i]; }

  void get(size_t i, View& out) override { out = take<Tensor>(i, tensors_); }
  void get(size_t i, InPlace& out) override { out = InPlace(take<Tensor>(i, tensors_)); }
  void get(size_t i, double& out) override { out = value<double>(i); }
  void get(size_t i, int64_t& out) override { out = value<int64_t>(i); }
  void get(size_t i, bool& out) override { out = value<bool>(i); }
  void get(size_t i, std::string_view& out) override { out = take<std::string>(i, texts_); }
  void get(size_t i, ScalarType& out) override { out = value<ScalarType>(i); }
  void get(size_t i, std::optional<View>& out) override {
    if (const Tensor* t = take_optional(i)) out = View(*t);
  }
  void get(size_t i, std::optional<InPlace>& out) override {
    if (const Tensor* t = take_optional(i)) out = InPlace(*t);
  }
  void get(size_t i, std::optional<double>& out) override { out = value<std::optional<double>>(i); }
  void get(size_t i, std::optional<int64_t>& out) override {
    out = value<std::optional<int64_t>>(i);
  }
  void get(size_t i, std::optional<ScalarType>& out) override {
    out = value<std::optional<ScalarType>>(i);
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

inline void call_by_torch(const Invocation& function, StableIValue* stack, bool has_buffers) {
  TorchCall call;
  TorchArguments all(stack, function, has_buffers);
  function.invoke(call, all);
  for (size_t i = 0; !has_buffers && i < function.results; ++i) {
    stack[i] = torch::stable::detail::from<Tensor>(all.result(i).tensor());
  }
}

// The parameters of a binding's function: the arguments as a struct from declared/, then the
// results.
template <class D, class... R>
struct Signature<void (*)(Call&, const D&, R...)> {
  using Declared = D;
  using Inputs = typename D::Inputs;
  static constexpr size_t kInputs = std::tuple_size_v<Inputs>, kResults = sizeof...(R);
  static_assert(kResults <= kMostResults);
};

template <auto kFunction, class S = Signature<decltype(kFunction)>>
void invoke(Call& call, Arguments& all) {
  invoke<kFunction>(call, all, static_cast<typename S::Inputs*>(nullptr),
                    std::make_index_sequence<S::kInputs>(),
                    std::make_index_sequence<S::kResults>());
}
template <auto kFunction, class S = Signature<decltype(kFunction)>>
constexpr Invocation kInvocation = {&invoke<kFunction>, S::kInputs, S::kResults};

// A function with its schema's arguments and the names of its results.
struct Function {
  using Kernel = void (*)(StableIValue*, uint64_t, uint64_t);

  std::string name, functional_schema, out_schema;
  Kernel functional, out;
  DirectFunction direct;
};

// The argument names in a schema's text: "Tensor x, *, float eps=1e-6" gives x and eps.
inline std::vector<std::string> names_in(const std::string& arguments) {
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

inline Function function_of(const char* name, const std::string& arguments,
                            std::initializer_list<const char*> results, const Invocation& invoked,
                            std::vector<std::string>& names, Function::Kernel functional,
                            Function::Kernel out, DirectFunction direct) {
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

// An op's function, under its declared name or another one.
template <auto kFunction, class D = typename Signature<decltype(kFunction)>::Declared>
Function function(const char* name = D::kName) {
  constexpr const Invocation& kCalled = kInvocation<kFunction>;
  return function_of(
      name, D::kArguments, D::kResults, kCalled, names_of<kFunction>(),
      [](StableIValue* stack, uint64_t, uint64_t) { call_by_torch(kCalled, stack, false); },
      [](StableIValue* stack, uint64_t, uint64_t) { call_by_torch(kCalled, stack, true); },
      direct_function<kCalled>());
}

}  // namespace jitquant

#define JITQUANT_FUNCTIONS(...)                                 \
  namespace jitquant {                                          \
  static const std::vector<Function>& functions() {             \
    static const std::vector<Function> all = {__VA_ARGS__};     \
    return all;                                                 \
  }                                                             \
  } /* namespace jitquant */                                    \
  STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {               \
    for (const jitquant::Function& f : jitquant::functions()) { \
      m.def(f.functional_schema.c_str());                       \
      m.def(f.out_schema.c_str());                              \
    }                                                           \
  }                                                             \
  STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) {    \
    for (const jitquant::Function& f : jitquant::functions()) { \
      m.impl(f.name.c_str(), f.functional);                     \
      m.impl((f.name + ".out").c_str(), f.out);                 \
    }                                                           \
  }                                                             \
  JITQUANT_PYTHON_MODULE(TORCH_EXTENSION_NAME)
