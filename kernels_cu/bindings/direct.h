// The direct path from Python to a launch, which bypasses the dispatcher. It reads tensors through
// DLPack's exchange API, which is C and stable, and creates results as Inductor does. On an H200
// this takes half the host time of an operator call.
//
// A direct function takes a flag that says whether it replaces the dispatcher, all arguments of the
// schema by position, then none or all of the result buffers, with None for a result without
// elements. It returns NotImplemented, without side effects, for anything that is not plain: a
// tensor subclass, a tensor on another device than the current one, or strides that torch may have
// to resolve. It does the same for anything the function refuses. The caller then calls the
// operator, which raises the error. A call that replaces the dispatcher is also not plain if the
// dispatcher would do more than launch: a mode or a transform is active, torch.jit is tracing, or a
// profiler has to see the operator's name.
//
// Without Python's headers there are no direct functions, and all calls go through the operator.
// Included by function.cpp alone.
#pragma once

#include "function.h"

#if __has_include(<Python.h>)
// Included through a macro: the loader gives a source that names this header the flags of torch's
// C++ API, which the bindings do without.
#define PY_SSIZE_T_CLEAN
#define JITQUANT_PYTHON_HEADER <Python.h>
#include JITQUANT_PYTHON_HEADER
#endif

namespace [[gnu::visibility("hidden")]] jitquant {

#ifdef PY_VERSION_HEX

// The part of DLPack 1.3 that is used here. Its layout is the same in every version 1.x.
struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t rank;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* sizes;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLPackExchange {
  uint32_t major, minor;
  void* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DLTensor* out);
  void* current_work_stream;
};
constexpr int32_t kDLPackCuda = 2;

struct DTypeRow {
  ScalarType dtype;
  uint8_t code, bits;
  uint16_t lanes;
  const char* name;
};
constexpr DTypeRow kDTypes[] = {
    {ScalarType::BFloat16, 4, 16, 1, "bfloat16"},
    {ScalarType::Half, 2, 16, 1, "float16"},
    {ScalarType::Float, 2, 32, 1, "float32"},
    {ScalarType::Byte, 1, 8, 1, "uint8"},
    {ScalarType::Char, 0, 8, 1, "int8"},
    {ScalarType::Int, 0, 32, 1, "int32"},
    {ScalarType::Long, 0, 64, 1, "int64"},
    {ScalarType::Float4_e2m1fn_x2, 17, 4, 2, "float4_e2m1fn_x2"},
    {ScalarType::Float8_e4m3fn, 10, 8, 1, "float8_e4m3fn"},
    {ScalarType::Float8_e5m2, 12, 8, 1, "float8_e5m2"},
    {ScalarType::Float8_e8m0fnu, 14, 8, 1, "float8_e8m0fnu"},
};

// What we use of torch's Python API. The references live as long as the process.
struct TorchPython {
  const DLPackExchange* exchange;
  PyObject *tensor, *parameter;    // types
  PyObject *empty, *bump_version;  // functions
  PyObject* watchers[4];           // functions that say whether a mode or a transform is active
  PyObject *profiler, *profiling;  // a module, and the name of its flag
  PyObject* requires_grad;         // the attribute's name
  PyObject* dtypes[std::size(kDTypes)];

  // Sets a Python error and returns false if torch lacks one of these.
  bool find() {
    const auto at = [](const char* module, const char* name) -> PyObject* {
      PyObject* m = PyImport_ImportModule(module);
      PyObject* found = m == nullptr ? nullptr : PyObject_GetAttrString(m, name);
      Py_XDECREF(m);
      return found;
    };
    if ((tensor = at("torch", "Tensor")) == nullptr) return false;
    if ((parameter = at("torch.nn", "Parameter")) == nullptr) return false;
    if ((empty = at("torch._C._dynamo.guards", "_empty_strided_cuda")) == nullptr) return false;
    if ((bump_version = at("torch._C", "_increment_version")) == nullptr) return false;
    const char* names[] = {"_len_torch_dispatch_stack", "_len_torch_function_stack",
                           "_are_functorch_transforms_active", "_is_tracing"};
    for (size_t i = 0; i < std::size(names); ++i) {
      if ((watchers[i] = at("torch._C", names[i])) == nullptr) return false;
    }
    if ((profiler = PyImport_ImportModule("torch.autograd.profiler")) == nullptr) return false;
    if ((profiling = PyUnicode_InternFromString("_is_profiler_enabled")) == nullptr) return false;
    if (!PyObject_HasAttr(profiler, profiling)) return false;
    if ((requires_grad = PyUnicode_InternFromString("requires_grad")) == nullptr) return false;
    for (size_t i = 0; i < std::size(kDTypes); ++i) {
      if ((dtypes[i] = at("torch", kDTypes[i].name)) == nullptr) return false;
    }
    PyObject* capsule = PyObject_GetAttrString(tensor, "__dlpack_c_exchange_api__");
    if (capsule == nullptr) return false;
    exchange =
        static_cast<const DLPackExchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
    return exchange != nullptr && exchange->major == 1 && exchange->tensor_from_object != nullptr;
  }
};

inline TorchPython& torch_python() {
  static TorchPython found = {};
  return found;
}

struct NotPlain {};     // the operator must be called instead
struct PythonError {};  // a Python error is set

// One direct call. Releases the GIL while it launches, because a launch may have to wait for the
// GPU.
class DirectCall : public Call {
 public:
  ~DirectCall() { Py_XDECREF(written_); }

  bool begun() const { return begun_; }

  View view(PyObject* object) {
    const TorchPython& torch = torch_python();
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (type != torch.tensor && type != torch.parameter) throw NotPlain();
    DLTensor t;
    if (torch.exchange->tensor_from_object(object, &t) != 0) {
      PyErr_Clear();
      throw NotPlain();
    }
    if (t.device_type != kDLPackCuda || t.device_id != device()) throw NotPlain();
    View view;
    view.data = t.data;
    view.cuda = true;
    view.device = t.device_id;
    view.rank = t.rank;
    view.sizes = t.sizes;
    view.strides = t.strides;
    for (const DTypeRow& row : kDTypes) {
      if (row.code == t.code && row.bits == t.bits && row.lanes == t.lanes) view.dtype = row.dtype;
    }
    // A view into complex numbers may be lazily negated, and tensors without memory have to be
    // filled by torch.
    const bool resolved = t.rank == 0 || t.strides[t.rank - 1] == 1;
    if (!resolved || (t.data == nullptr && view.numel() != 0)) throw NotPlain();
    return view;
  }

  // A tensor that requires grad goes to the operator, which refuses it unless grad is off.
  View written(PyObject* object) {
    const View given = view(object);
    if (given.dtype == ScalarType::BFloat16 || given.dtype == ScalarType::Half ||
        given.dtype == ScalarType::Float) {
      PyObject* grad = PyObject_GetAttr(object, torch_python().requires_grad);
      if (grad == nullptr) throw PythonError();
      Py_DECREF(grad);
      if (grad != Py_False) throw NotPlain();
    }
    if (written_ == nullptr && (written_ = PyList_New(0)) == nullptr) throw PythonError();
    if (PyList_Append(written_, object) != 0) throw PythonError();
    return given;
  }

  // Whether the dispatcher would do nothing but launch.
  bool unwatched() {
    const TorchPython& torch = torch_python();
    PyObject* seen = PyObject_GetAttr(torch.profiler, torch.profiling);
    for (size_t i = 0; !truth(seen) && i < std::size(torch.watchers); ++i) {
      Py_DECREF(seen);
      seen = PyObject_CallNoArgs(torch.watchers[i]);
    }
    const bool watched = truth(seen);
    Py_DECREF(seen);
    return !watched;
  }

  int32_t device() override {
    if (device_ < 0) device_ = current_device();
    return device_;
  }

  // Bumps the version counters, so that autograd knows of the writes.
  void begin() override {
    if (written_ != nullptr) {
      PyObject* done = PyObject_CallOneArg(torch_python().bump_version, written_);
      if (done == nullptr) throw PythonError();
      Py_DECREF(done);
    }
    begun_ = true;
    thread_ = PyEval_SaveThread();
  }
  void end() override { PyEval_RestoreThread(thread_); }

 private:
  static bool truth(PyObject* o) {
    const int is = o == nullptr ? -1 : PyObject_IsTrue(o);
    if (is < 0) throw PythonError();
    return is != 0;
  }

  PyObject* written_ = nullptr;
  PyThreadState* thread_ = nullptr;
  int32_t device_ = -1;
  bool begun_ = false;
};

// A result that is a new Python tensor. A direct call is on the current device.
class NewObject : public Result {
 public:
  ~NewObject() { Py_XDECREF(object_); }

  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  void* make(ScalarType dtype, const Shape& shape, const View&) override {
    const TorchPython& torch = torch_python();
    const Py_ssize_t rank = shape.dim();
    PyObject* arguments[3] = {PyTuple_New(rank), PyTuple_New(rank), nullptr};
    int64_t stride = 1;
    for (Py_ssize_t i = rank - 1; i >= 0; --i) {
      PyTuple_SET_ITEM(arguments[0], i, PyLong_FromLongLong(shape.size(i)));
      PyTuple_SET_ITEM(arguments[1], i, PyLong_FromLongLong(stride));
      stride *= shape.size(i) > 1 ? shape.size(i) : 1;
    }
    for (size_t i = 0; i < std::size(kDTypes); ++i) {
      if (kDTypes[i].dtype == dtype) arguments[2] = torch.dtypes[i];
    }
    object_ = PyObject_Vectorcall(torch.empty, arguments, 3, nullptr);
    Py_DECREF(arguments[0]);
    Py_DECREF(arguments[1]);
    DLTensor t;
    if (object_ == nullptr || torch.exchange->tensor_from_object(object_, &t) != 0) {
      throw PythonError();
    }
    return t.data;
  }

  PyObject* object_ = nullptr;
};

// Arguments from Python. Anything that is not exactly of the expected type goes to the operator.
class PythonArguments final : public Arguments {
 public:
  PythonArguments(DirectCall& call, PyObject* const* objects, const Invocation& function,
                  bool has_buffers)
      : Arguments(has_buffers), call_(call), objects_(objects) {
    for (size_t i = 0; has_buffers && i < function.results; ++i) {
      PyObject* const buffer = objects[function.inputs + i];
      if (buffer == Py_None) {
        results_[i].give_nothing();
      } else {
        results_[i].give(call.written(buffer));
      }
    }
  }

  NewObject& result(size_t i) override { return results_[i]; }

  void get(size_t i, View& out) override { out = call_.view(objects_[i]); }
  void get(size_t i, InPlace& out) override {
    static_cast<View&>(out) = call_.written(objects_[i]);
  }
  void get(size_t i, double& out) override {
    PyObject* const o = objects_[i];
    if (PyFloat_CheckExact(o)) {
      out = PyFloat_AS_DOUBLE(o);
      return;
    }
    out = PyLong_CheckExact(o) ? PyLong_AsDouble(o) : -1.0;
    if (out >= 0.0) return;
    PyErr_Clear();
    throw NotPlain();
  }
  void get(size_t i, int64_t& out) override {
    int overflow = 1;
    PyObject* const o = objects_[i];
    out = PyLong_CheckExact(o) ? PyLong_AsLongLongAndOverflow(o, &overflow) : 0;
    if (overflow != 0) throw NotPlain();
  }
  void get(size_t i, bool& out) override {
    out = objects_[i] == Py_True;
    if (!out && objects_[i] != Py_False) throw NotPlain();
  }
  void get(size_t i, std::string_view& out) override {
    Py_ssize_t size = 0;
    PyObject* const o = objects_[i];
    const char* text = PyUnicode_CheckExact(o) ? PyUnicode_AsUTF8AndSize(o, &size) : nullptr;
    if (text == nullptr) {
      PyErr_Clear();
      throw NotPlain();
    }
    out = {text, static_cast<size_t>(size)};
  }
  void get(size_t i, ScalarType& out) override {
    for (size_t j = 0; j < std::size(kDTypes); ++j) {
      if (torch_python().dtypes[j] != objects_[i]) continue;
      out = kDTypes[j].dtype;
      return;
    }
    throw NotPlain();
  }
  void get(size_t i, std::optional<View>& out) override { get_optional(i, out); }
  void get(size_t i, std::optional<InPlace>& out) override { get_optional(i, out); }
  void get(size_t i, std::optional<double>& out) override { get_optional(i, out); }
  void get(size_t i, std::optional<int64_t>& out) override { get_optional(i, out); }
  void get(size_t i, std::optional<ScalarType>& out) override { get_optional(i, out); }

 private:
  template <class T>
  void get_optional(size_t i, std::optional<T>& out) {
    if (objects_[i] != Py_None) get(i, out.emplace());
  }

  DirectCall& call_;
  PyObject* const* const objects_;
  NewObject results_[kMostResults];
};

void* call_directly(const Invocation& function, void* const* given_args, ptrdiff_t count) {
  PyObject* const* args = reinterpret_cast<PyObject* const*>(given_args);
  DirectCall call;
  try {
    if (count < 1 || (args[0] != Py_False && !call.unwatched())) throw NotPlain();
    const size_t given = static_cast<size_t>(count) - 1;
    const bool has_buffers = given == function.inputs + function.results;
    if (given != function.inputs && !has_buffers) throw NotPlain();
    PythonArguments all(call, args + 1, function, has_buffers);
    function.invoke(call, all);
    if (has_buffers) Py_RETURN_NONE;
    PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(function.results));
    if (tuple == nullptr) throw PythonError();
    for (size_t i = 0; i < function.results; ++i) {
      PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), all.result(i).release());
    }
    return tuple;
  } catch (const NotPlain&) {
  } catch (const PythonError&) {
    return nullptr;
  } catch (const std::exception& error) {
    if (call.begun()) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return nullptr;
    }
  }
  Py_RETURN_NOTIMPLEMENTED;
}

// Named direct_<function>. Empty if torch lacks what a direct call needs.
inline std::vector<PyMethodDef> direct_methods(const std::vector<Function>& functions) {
  static std::vector<std::string> names;
  if (torch_python().find()) {
    for (const Function& f : functions) names.push_back("direct_" + f.name);
  }
  PyErr_Clear();
  std::vector<PyMethodDef> methods;
  for (size_t i = 0; i < names.size(); ++i) {
    const auto method = reinterpret_cast<PyCFunction>(functions[i].direct);
    methods.push_back({names[i].c_str(), method, METH_FASTCALL, nullptr});
  }
  methods.push_back({nullptr, nullptr, 0, nullptr});
  return methods;
}

// The module's functions point into data that is created once.
void* python_module(const char* name, const std::vector<Function>& functions) {
  static std::vector<PyMethodDef> methods = direct_methods(functions);
  static PyModuleDef definition = [&] {
    PyModuleDef made = {};
    made.m_base = PyModuleDef_Base PyModuleDef_HEAD_INIT;
    made.m_name = name;
    made.m_size = -1;
    made.m_methods = methods.data();
    return made;
  }();
  PyObject* module = PyModule_Create(&definition);
#ifdef Py_GIL_DISABLED
  if (module != nullptr) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
  return module;
}

#else

void* call_directly(const Invocation&, void* const*, ptrdiff_t) {
  return nullptr;
}

#endif

}  // namespace jitquant
