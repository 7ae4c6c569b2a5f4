// Makes a torch operator with its `out` overload, and a Python function that launches without
// torch's dispatcher (direct.h), from one C++ function:
//
//   void row_gsa(Call& call, const declared::RowGsa& args, Result& gsa);
//   JITQUANT_FUNCTIONS(function<&row_gsa>())
//
// declared/row_gsa.h is generated from the op's declaration: the schema's text, the arguments,
// their checks, and the shapes of the results. So is the function, unless it is written by hand. It
// converts the arguments, which checks what only a kernel limits, allocates the results, and only
// then creates a Launching and launches.
//
// The loader links function.cpp to every module whose binding includes this header, and common.cpp
// and declared/checks.cpp likewise. It compiles them once. So a binding compiles without torch's
// headers.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common.h"

namespace [[gnu::visibility("hidden")]] jitquant {

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
  using Kernel = void (*)(void* stack, uint64_t, uint64_t);             // of torch's StableIValue
  using Direct = void* (*)(void*, void* const* args, ptrdiff_t count);  // a PyCFunctionFast

  std::string name, functional_schema, out_schema;
  Kernel functional, out;
  Direct direct;
};

void call_by_torch(const Invocation& function, void* stack, bool has_buffers);
void* call_directly(const Invocation& function, void* const* args, ptrdiff_t count);

Function function_of(const char* name, const std::string& arguments,
                     std::initializer_list<const char*> results, const Invocation& invoked,
                     std::vector<std::string>& names, Function::Kernel functional,
                     Function::Kernel out, Function::Direct direct);

// An op's function, under its declared name or another one.
template <auto kFunction, class D = typename Signature<decltype(kFunction)>::Declared>
Function function(const char* name = D::kName) {
  constexpr const Invocation& kCalled = kInvocation<kFunction>;
  return function_of(
      name, D::kArguments, D::kResults, kCalled, names_of<kFunction>(),
      [](void* stack, uint64_t, uint64_t) { call_by_torch(kCalled, stack, false); },
      [](void* stack, uint64_t, uint64_t) { call_by_torch(kCalled, stack, true); },
      [](void*, void* const* args, ptrdiff_t count) {
        return call_directly(kCalled, args, count);
      });
}

// Defines the operators in torch's library `name`. One per shared library.
struct Registration {
  Registration(const char* name, const std::vector<Function>& functions);
};

// The Python module of a shared library.
void* python_module(const char* name, const std::vector<Function>& functions);

}  // namespace jitquant

#define JITQUANT_FUNCTIONS(...)                             \
  namespace jitquant {                                      \
  static const std::vector<Function>& functions() {         \
    static const std::vector<Function> all = {__VA_ARGS__}; \
    return all;                                             \
  }                                                         \
  } /* namespace jitquant */                                \
  JITQUANT_LIBRARY(TORCH_EXTENSION_NAME)
#define JITQUANT_LIBRARY(name) JITQUANT_LIBRARY_(name)
#define JITQUANT_LIBRARY_(name)                                                            \
  static const jitquant::Registration jitquant_registration(#name, jitquant::functions()); \
  JITQUANT_PYTHON_MODULE(name)

#if __has_include(<Python.h>)
#define JITQUANT_PYTHON_MODULE(name)                                        \
  extern "C" __attribute__((visibility("default"))) void* PyInit_##name() { \
    return jitquant::python_module(#name, jitquant::functions());           \
  }
#else
#define JITQUANT_PYTHON_MODULE(name)
#endif
