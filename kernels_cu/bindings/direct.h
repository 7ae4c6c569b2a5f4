// The direct way from Python to a launch, beside the dispatcher: tensors are read through DLPack's
// exchange API, which is C and stable, and results are made as Inductor makes them. On an H200 this
// takes half the time of an operator's call.
//
// A direct function takes whether it stands for the dispatcher, all arguments of the schema by
// position, then none or all of the buffers. It returns NotImplemented, having done nothing, for
// whatever is not plain: a tensor of a subclass, on another device than the current one, or with a
// stride that torch may have to resolve; and for whatever the function refuses. The operator is
// called then, and says what is wrong. A call that stands for the dispatcher is not plain either
// where the dispatcher would do more than to launch: a mode or a transform is active, torch.jit
// traces, or a profiler is to see the operator's name.
//
// Without Python's headers there are no direct functions, and all calls are the operator's.
#pragma once

#include "common.h"

#if __has_include(<Python.h>)
// Not by its name: the loader gives a source that includes it the flags of torch's C++ API, which
// the bindings do without.
#define PY_SSIZE_T_CLEAN
#define JITQUANT_PYTHON_HEADER <Python.h>
#include JITQUANT_PYTHON_HEADER
#endif

namespace jitquant {

template <class F>
struct Signature;

#ifdef PY_VERSION_HEX

// The part of DLPack 1.3 that is used here; the layout is the same in every version 1.x.
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

// What is used of torch's Python side; references that are held for the life of the process.
struct TorchPython {
  const DLPackExchange* exchange;
  PyObject *tensor, *parameter;    // types
  PyObject *empty, *bump_version;  // functions
  PyObject* watchers[4];           // functions that say whether something looks on
  PyObject *profiler, *profiling;  // a module, and the name of its flag
  PyObject* requires_grad;         // the attribute's name
  PyObject* dtypes[std::size(kDTypes)];

  // Sets a Python error and returns false where torch has no such thing.
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

struct NotPlain {};     // the operator has to be called
struct PythonError {};  // a Python error is set

// One direct call. The GIL is released while it launches: that may have to wait for the GPU.
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
    // A view into complex numbers may be a lazily negated one, and tensors without memory are for
    // torch to fill.
    const bool resolved = t.rank == 0 || t.strides[t.rank - 1] == 1;
    if (!resolved || (t.data == nullptr && view.numel() != 0)) throw NotPlain();
    return view;
  }

  View written(PyObject* object) {
    const View given = view(object);
    if (written_ == nullptr && (written_ = PyList_New(0)) == nullptr) throw PythonError();
    if (PyList_Append(written_, object) != 0) throw PythonError();
    return given;
  }

  // Whether the dispatcher would do no more than to launch.
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

  // Tells autograd of the writes, which torch does not see.
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

// A result that is a new tensor of Python. The direct call has the current device.
class NewObject : public Result {
 public:
  static constexpr bool kGiven = false;

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

struct GivenObject : Result {
  static constexpr bool kGiven = true;
  GivenObject(DirectCall& call, PyObject* object) : Result(call.written(object)) {}
};

// From a Python object to an argument; what is not exactly of its type is for the operator.
template <class T>
struct FromPython;

template <>
struct FromPython<View> {
  static View get(DirectCall& call, PyObject* o) { return call.view(o); }
};
template <>
struct FromPython<InPlace> {
  static InPlace get(DirectCall& call, PyObject* o) {
    const View view = call.written(o);
    PyObject* grad = PyObject_GetAttr(o, torch_python().requires_grad);
    if (grad == nullptr) throw PythonError();
    Py_DECREF(grad);
    if (grad != Py_False) throw NotPlain();
    InPlace in_place;
    static_cast<View&>(in_place) = view;
    return in_place;
  }
};
template <>
struct FromPython<double> {
  static double get(DirectCall&, PyObject* o) {
    if (PyFloat_CheckExact(o)) return PyFloat_AS_DOUBLE(o);
    const double value = PyLong_CheckExact(o) ? PyLong_AsDouble(o) : -1.0;
    if (value >= 0.0) return value;
    PyErr_Clear();
    throw NotPlain();
  }
};
template <>
struct FromPython<int64_t> {
  static int64_t get(DirectCall&, PyObject* o) {
    int overflow = 1;
    const long long value = PyLong_CheckExact(o) ? PyLong_AsLongLongAndOverflow(o, &overflow) : 0;
    if (overflow != 0) throw NotPlain();
    return value;
  }
};
template <>
struct FromPython<bool> {
  static bool get(DirectCall&, PyObject* o) {
    if (o != Py_True && o != Py_False) throw NotPlain();
    return o == Py_True;
  }
};
template <>
struct FromPython<std::string_view> {
  static std::string_view get(DirectCall&, PyObject* o) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_CheckExact(o) ? PyUnicode_AsUTF8AndSize(o, &size) : nullptr;
    if (text == nullptr) {
      PyErr_Clear();
      throw NotPlain();
    }
    return {text, static_cast<size_t>(size)};
  }
};
template <>
struct FromPython<ScalarType> {
  static ScalarType get(DirectCall&, PyObject* o) {
    for (size_t i = 0; i < std::size(kDTypes); ++i) {
      if (torch_python().dtypes[i] == o) return kDTypes[i].dtype;
    }
    throw NotPlain();
  }
};
template <class T>
struct FromPython<std::optional<T>> {
  static std::optional<T> get(DirectCall& call, PyObject* o) {
    if (o == Py_None) return std::nullopt;
    return FromPython<T>::get(call, o);
  }
};

template <auto kFunction>
class Direct {
  using S = Signature<decltype(kFunction)>;
  using Inputs = typename S::Inputs;
  using InputIndices = std::make_index_sequence<S::kInputs>;
  using ResultIndices = std::make_index_sequence<S::kResults>;

 public:
  static PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) {
    DirectCall call;
    try {
      if (count < 1 || (args[0] != Py_False && !call.unwatched())) throw NotPlain();
      ++args, --count;
      if (count == S::kInputs) return functional(call, args, InputIndices(), ResultIndices());
      if (count == S::kInputs + S::kResults) {
        return out(call, args, InputIndices(), ResultIndices());
      }
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

 private:
  template <size_t... I, size_t... R>
  static PyObject* functional(DirectCall& call, PyObject* const* args, std::index_sequence<I...>,
                              std::index_sequence<R...>) {
    std::array<NewObject, S::kResults> results;
    checked_call<kFunction>(
        call, FromPython<std::tuple_element_t<I, Inputs>>::get(call, args[I])..., results[R]...);
    PyObject* tuple = PyTuple_New(S::kResults);
    if (tuple == nullptr) throw PythonError();
    (PyTuple_SET_ITEM(tuple, R, results[R].release()), ...);
    return tuple;
  }
  template <size_t... I, size_t... R>
  static PyObject* out(DirectCall& call, PyObject* const* args, std::index_sequence<I...>,
                       std::index_sequence<R...>) {
    checked_call<kFunction>(call,
                            FromPython<std::tuple_element_t<I, Inputs>>::get(call, args[I])...,
                            GivenObject(call, args[S::kInputs + R])...);
    Py_RETURN_NONE;
  }
};

using DirectFunction = PyCFunction;

template <auto kFunction>
DirectFunction direct_function() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&Direct<kFunction>::call));
}

// Named direct_<function>; none where torch lacks what a direct call needs.
template <class Functions>
std::vector<PyMethodDef> direct_methods(const Functions& functions) {
  static std::vector<std::string> names;
  if (torch_python().find()) {
    for (const auto& f : functions) names.push_back("direct_" + f.name);
  }
  PyErr_Clear();
  std::vector<PyMethodDef> methods;
  for (size_t i = 0; i < names.size(); ++i) {
    methods.push_back({names[i].c_str(), functions[i].direct, METH_FASTCALL, nullptr});
  }
  methods.push_back({nullptr, nullptr, 0, nullptr});
  return methods;
}

// The Python module of a library. Its functions point into what is made once.
template <class Functions>
PyObject* python_module(const char* name, const Functions& functions) {
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

#define JITQUANT_PYTHON_MODULE(name) JITQUANT_PYTHON_MODULE_(name)
#define JITQUANT_PYTHON_MODULE_(name)                             \
  PyMODINIT_FUNC PyInit_##name() {                                \
    return jitquant::python_module(#name, jitquant::functions()); \
  }

#else

using DirectFunction = void*;

template <auto kFunction>
DirectFunction direct_function() {
  return nullptr;
}

#define JITQUANT_PYTHON_MODULE(name)

#endif

}  // namespace jitquant
