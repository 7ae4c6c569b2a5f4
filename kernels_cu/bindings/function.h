// From one C++ function to what is called: a torch operator with its `out` overload, and a Python
// function that reaches the launch without torch's dispatcher (direct.h).
//
//   void row_gsa(Call& call, const View& x, double divisor, Result& gsa);
//   JITQUANT_FUNCTIONS(function<&row_gsa>("row_gsa", "Tensor x, float divisor=2688.", {"gsa"}))
//
// After the call come the schema's arguments in their order, then the results. It checks
// everything, asks the results for their memory, and only then makes a Launching and launches.
#pragma once

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "common.h"
#include "direct.h"

namespace jitquant {

// An argument as torch gives it, and as the function takes it.
template <class T>
struct Boxed {
  using Type = T;
  static const T& view(const T& value) { return value; }
};
template <>
struct Boxed<View> {
  using Type = Tensor;
  static View view(const Tensor& t) { return t; }
};
template <>
struct Boxed<std::optional<View>> {
  using Type = std::optional<Tensor>;
  static std::optional<View> view(const std::optional<Tensor>& t) {
    return t ? std::optional<View>(View(*t)) : std::nullopt;
  }
};
template <>
struct Boxed<std::optional<InPlace>> {
  using Type = std::optional<Tensor>;
  static std::optional<InPlace> view(const std::optional<Tensor>& t) {
    return t ? std::optional<InPlace>(InPlace(*t)) : std::nullopt;
  }
};
template <>
struct Boxed<std::string_view> {
  using Type = std::string;
  static std::string_view view(const std::string& s) { return s; }
};

// A result that is a new tensor of torch.
class __attribute__((visibility("hidden"))) NewTensor : public Result {
 public:
  static constexpr bool kGiven = false;

  Tensor tensor() const { return *tensor_; }

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

template <class Inputs, class Buffers>
struct Operator;

// The two kernels that torch's library takes: one returns tensors, the other writes to buffers.
template <class... Inputs, class... Buffers>
struct Operator<std::tuple<Inputs...>, std::tuple<Buffers...>> {
  static constexpr size_t kResults = sizeof...(Buffers);
  using Returned = std::conditional_t<kResults == 1, Tensor, std::tuple<Buffers...>>;

  template <auto kFunction>
  static Returned functional(const typename Boxed<Inputs>::Type&... inputs) {
    std::array<NewTensor, kResults> results;
    return std::apply(
        [&](auto&... result) -> Returned {
          TorchCall call;
          checked_call<kFunction>(call, Boxed<Inputs>::view(inputs)..., result...);
          return {result.tensor()...};
        },
        results);
  }
  template <auto kFunction>
  static void out(const typename Boxed<Inputs>::Type&... inputs, const Buffers&... buffers) {
    TorchCall call;
    checked_call<kFunction>(call, Boxed<Inputs>::view(inputs)..., Given(buffers)...);
  }

 private:
  struct Given : Result {
    static constexpr bool kGiven = true;
    explicit Given(const Tensor& t) : Result(View(t)) {}
  };
};

template <class... P>
struct Signature<void (*)(Call&, P...)> {
  static constexpr size_t kResults = (std::is_same_v<P, Result&> + ... + 0);
  static constexpr size_t kInputs = sizeof...(P) - kResults;
  using All = std::tuple<std::remove_cv_t<std::remove_reference_t<P>>...>;

  template <size_t... I>
  static std::tuple<std::tuple_element_t<I, All>...> first(std::index_sequence<I...>);
  template <size_t... I>
  static std::tuple<std::enable_if_t<(I >= 0), Tensor>...> tensors(std::index_sequence<I...>);

  using Inputs = decltype(first(std::make_index_sequence<kInputs>()));
  using Buffers = decltype(tensors(std::make_index_sequence<kResults>()));
};

// A function with its schema's arguments and the names of its results.
struct Function {
  using Kernel = void (*)(StableIValue*, uint64_t, uint64_t);

  std::string name, functional_schema, out_schema;
  Kernel functional, out;
  DirectFunction direct;
};

// The names in the text of a schema's arguments: "Tensor x, *, float eps=1e-6" has x and eps.
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

template <auto kFunction>
Function function(const char* name, const std::string& arguments,
                  std::initializer_list<const char*> results) {
  using S = Signature<decltype(kFunction)>;
  using O = Operator<typename S::Inputs, typename S::Buffers>;
  JITQUANT_CHECK(results.size() == S::kResults, name, ": wrong number of results");
  names_of<kFunction>() = names_in(arguments);
  for (const char* result : results) names_of<kFunction>().push_back(result);
  char letter = 'a';
  for (const char c : arguments) letter += c == '!';
  std::string returned, buffers = arguments.find('*') == std::string::npos ? ", *" : "";
  for (const char* result : results) {
    returned += (returned.empty() ? "Tensor " : ", Tensor ") + std::string(result);
    buffers += std::string(", Tensor(") + letter++ + "!) " + result;
  }
  const std::string call = "(" + arguments;
  return {name,
          name + call + ") -> " + (S::kResults == 1 ? "Tensor" : "(" + returned + ")"),
          name + (".out" + call) + buffers + ") -> ()",
          TORCH_BOX((&O::template functional<kFunction>)),
          TORCH_BOX((&O::template out<kFunction>)),
          direct_function<kFunction>()};
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
