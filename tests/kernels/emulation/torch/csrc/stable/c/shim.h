// Stands for torch's header of this name: tensors whose memory the caller of the library has, and
// which say that they are on the emulated device; and the functions of a library, which the tests
// call by name with an array of arguments. Everything is on one stream.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <string>

#include "machine.h"

#define TORCH_FEATURE_VERSION 0

using StableIValue = uint64_t;
using AOTITorchError = int32_t;

struct AtenTensorOpaque {
  void* data;
  int32_t dtype;
  int64_t rank;
  int64_t* sizes;
  int64_t* strides;
};
using AtenTensorHandle = AtenTensorOpaque*;
using StringHandle = std::string*;
struct TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
struct DeviceGuardOpaque {
  int cuda, torch;
};
using DeviceGuardHandle = DeviceGuardOpaque*;

// The numbers are torch's.
inline int32_t aoti_torch_device_type_cuda() {
  return 1;
}
inline int32_t aoti_torch_dtype_uint8() {
  return 0;
}
inline int32_t aoti_torch_dtype_int8() {
  return 1;
}
inline int32_t aoti_torch_dtype_int16() {
  return 2;
}
inline int32_t aoti_torch_dtype_int32() {
  return 3;
}
inline int32_t aoti_torch_dtype_int64() {
  return 4;
}
inline int32_t aoti_torch_dtype_float16() {
  return 5;
}
inline int32_t aoti_torch_dtype_float32() {
  return 6;
}
inline int32_t aoti_torch_dtype_float64() {
  return 7;
}
inline int32_t aoti_torch_dtype_bool() {
  return 11;
}
inline int32_t aoti_torch_dtype_bfloat16() {
  return 15;
}
inline int32_t aoti_torch_dtype_float8_e5m2() {
  return 23;
}
inline int32_t aoti_torch_dtype_float8_e4m3fn() {
  return 24;
}
inline int32_t torch_dtype_float8_e8m0fnu() {
  return 44;
}
inline int32_t torch_dtype_float4_e2m1fn_x2() {
  return 45;
}

inline AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle t, void** data) {
  *data = t->data;
  return 0;
}
inline AOTITorchError aoti_torch_get_dtype(AtenTensorHandle t, int32_t* dtype) {
  *dtype = t->dtype;
  return 0;
}
inline AOTITorchError aoti_torch_get_device_type(AtenTensorHandle, int32_t* type) {
  *type = aoti_torch_device_type_cuda();
  return 0;
}
inline AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t* index) {
  *index = emulation::tensor_device();
  return 0;
}
inline AOTITorchError aoti_torch_get_dim(AtenTensorHandle t, int64_t* rank) {
  *rank = t->rank;
  return 0;
}
inline AOTITorchError aoti_torch_get_sizes(AtenTensorHandle t, int64_t** sizes) {
  *sizes = t->sizes;
  return 0;
}
inline AOTITorchError aoti_torch_get_strides(AtenTensorHandle t, int64_t** strides) {
  *strides = t->strides;
  return 0;
}
inline AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle t) {
  delete t;
  return 0;
}

// Only for workspace, full of garbage: results are written to buffers that are given.
inline AOTITorchError aoti_torch_empty_strided(int64_t rank, const int64_t* sizes, const int64_t*,
                                               int32_t dtype, int32_t, int32_t,
                                               AtenTensorHandle* made) {
  const int64_t count = rank == 1 ? sizes[0] : 0;
  float* const floats = reinterpret_cast<float*>(emulation::allocate(4 * count, 0));
  for (int64_t i = 0; i < count; ++i) floats[i] = __builtin_nanf("");
  *made = new AtenTensorOpaque{floats, dtype, 0, nullptr, nullptr};
  return 0;
}

inline AOTITorchError torch_string_length(StringHandle text, size_t* length) {
  *length = text->size();
  return 0;
}
inline AOTITorchError torch_string_c_str(StringHandle text, const char** data) {
  *data = text->c_str();
  return 0;
}
inline AOTITorchError torch_delete_string(StringHandle text) {
  delete text;
  return 0;
}

inline AOTITorchError aoti_torch_get_current_device_index(int32_t* device) {
  *device = emulation::torch_device();
  return 0;
}
inline AOTITorchError aoti_torch_create_device_guard(int32_t device, DeviceGuardHandle* guard) {
  *guard = new DeviceGuardOpaque{emulation::cuda_device(), emulation::torch_device()};
  emulation::make_current(device, device);
  return 0;
}
inline AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard) {
  emulation::make_current(guard->cuda, guard->torch);
  delete guard;
  return 0;
}

namespace emulation {

using Kernel = void (*)(StableIValue*, uint64_t, uint64_t);

struct Library {
  std::map<std::string, std::string> schemas;
  std::map<std::string, Kernel> kernels;

  static Library& instance() {
    static Library library;
    return library;
  }
};

// One argument. The flags come from the schema.
struct Value {
  bool present;  // false: None
  bool is_optional, is_number;
  int64_t integer;  // of a tensor: its dtype
  double number;
  const char* text;
  void* data;  // of a tensor, as what follows
  int64_t rank;
  int64_t* sizes;
  int64_t* strides;
};

inline StableIValue inner(const Value& v) {
  if (v.sizes != nullptr) {
    return reinterpret_cast<StableIValue>(
        new AtenTensorOpaque{v.data, static_cast<int32_t>(v.integer), v.rank, v.sizes, v.strides});
  }
  if (v.text != nullptr) return reinterpret_cast<StableIValue>(new std::string(v.text));
  StableIValue bits = static_cast<StableIValue>(v.integer);
  if (v.is_number) std::memcpy(&bits, &v.number, sizeof bits);
  return bits;
}
inline StableIValue boxed(const Value& v) {
  if (!v.is_optional) return inner(v);
  return v.present ? reinterpret_cast<StableIValue>(new StableIValue(inner(v))) : 0;
}

}  // namespace emulation

inline AOTITorchError aoti_torch_library_init_def(const char*, const char*, uint32_t,
                                                  TorchLibraryHandle*) {
  return 0;
}
inline AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t,
                                                   TorchLibraryHandle*) {
  return 0;
}
inline AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle) {
  return 0;
}
inline AOTITorchError aoti_torch_library_def(TorchLibraryHandle, const char* schema) {
  const std::string text = schema;
  emulation::Library::instance().schemas[text.substr(0, text.find('('))] = text;
  return 0;
}
inline AOTITorchError torch_library_impl(TorchLibraryHandle, const char* name,
                                         emulation::Kernel kernel, uint64_t) {
  emulation::Library::instance().kernels[name] = kernel;
  return 0;
}

extern "C" {

__attribute__((used, visibility("default"))) inline const char* emulation_schema(const char* name) {
  const auto& schemas = emulation::Library::instance().schemas;
  const auto found = schemas.find(name);
  return found == schemas.end() ? nullptr : found->second.c_str();
}

// False with a text where the call was refused.
__attribute__((used, visibility("default"))) inline bool emulation_call(
    const char* name, const emulation::Value* arguments, size_t count, char* text, size_t bytes) {
  try {
    StableIValue stack[64];
    for (size_t i = 0; i < count; ++i) stack[i] = emulation::boxed(arguments[i]);
    emulation::Library::instance().kernels.at(name)(stack, 0, 0);
    return true;
  } catch (const std::exception& error) {
    std::snprintf(text, bytes, "%s", error.what());
    return false;
  }
}
}
