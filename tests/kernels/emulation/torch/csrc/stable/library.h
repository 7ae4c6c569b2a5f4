// Stands for torch's header of this name: the functions of a library, which the tests call by name
// with an array of arguments.
#pragma once

#include <cstdio>
#include <exception>
#include <map>
#include <optional>
#include <string>

#include "torch/csrc/stable/tensor.h"

// One argument. Which member holds it is the schema's to say.
struct StableIValue {
  bool present;  // false: None
  int64_t integer;
  double number;
  const char* text;
  void* data;  // of a tensor, as what follows
  int64_t rank;
  const int64_t* sizes;
  const int64_t* strides;
};

namespace emulation {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void unbox(const StableIValue& v, Tensor& out) {
  out = Tensor(v.data, static_cast<ScalarType>(v.integer), v.rank, v.sizes, v.strides);
}
inline void unbox(const StableIValue& v, double& out) {
  out = v.number;
}
inline void unbox(const StableIValue& v, int64_t& out) {
  out = v.integer;
}
inline void unbox(const StableIValue& v, bool& out) {
  out = v.integer != 0;
}
inline void unbox(const StableIValue& v, std::string& out) {
  out = v.text;
}
inline void unbox(const StableIValue& v, ScalarType& out) {
  out = static_cast<ScalarType>(v.integer);
}
template <class T>
void unbox(const StableIValue& v, std::optional<T>& out) {
  if (v.present) unbox(v, out.emplace());
}

struct Library {
  using Kernel = void (*)(StableIValue*, uint64_t, uint64_t);
  std::map<std::string, std::string> schemas;
  std::map<std::string, Kernel> kernels;

  static Library& instance() {
    static Library library;
    return library;
  }
};

}  // namespace emulation

namespace torch::stable::detail {

class StableLibrary {
 public:
  enum class Kind { DEF, IMPL };

  StableLibrary(Kind, const char*, const char*, const char*, uint32_t) {}

  void def(const char* schema) {
    const std::string text = schema;
    emulation::Library::instance().schemas[text.substr(0, text.find('('))] = text;
  }
  void impl(const char* name, emulation::Library::Kernel kernel) {
    emulation::Library::instance().kernels[name] = kernel;
  }
};

template <class T>
T to(const StableIValue& value) {
  T out;
  emulation::unbox(value, out);
  return out;
}
// Functions that make their results are not called.
template <class T>
StableIValue from(const T&) {
  return {};
}

}  // namespace torch::stable::detail

extern "C" {

__attribute__((used, visibility("default"))) inline const char* emulation_schema(const char* name) {
  const auto& schemas = emulation::Library::instance().schemas;
  const auto found = schemas.find(name);
  return found == schemas.end() ? nullptr : found->second.c_str();
}

// False with a text where the call was refused.
__attribute__((used, visibility("default"))) inline bool emulation_call(const char* name,
                                                                        StableIValue* arguments,
                                                                        char* text, size_t bytes) {
  try {
    emulation::Library::instance().kernels.at(name)(arguments, 0, 0);
    return true;
  } catch (const std::exception& error) {
    std::snprintf(text, bytes, "%s", error.what());
    return false;
  }
}
}
