// A kernel in one file: JITQUANT_EXPORT beside a host launcher makes it a torch operator.
//
//   cudaError_t launch_scale(const jitquant::TensorView& x, float s,
//                            const jitquant::TensorView& out, cudaStream_t stream);
//   JITQUANT_EXPORT(launch_scale, "scale(Tensor x, float s, *, Tensor(a!) out) -> ()")
//
// The loader reads the macro, generates the binding and compiles it with the .cu. The launcher's
// parameters are those of the schema, in the same order, followed by the stream:
//
//   Tensor, Tensor(a!)        const TensorView&, or T* to the elements of a contiguous tensor whose
//                             dtype is T's (const T* unless the schema has the "!")
//   Tensor?, Tensor(a!)?      the same pointers, or const TensorView*; null for None
//   int                       any signed integer type; a value that does not fit is refused
//   float                     double or float
//   bool                      bool
//   str, str?                 const char*; null for None
//   int?, float?, bool?       std::optional of the above
//
// Before the call of the launcher, all tensors have been checked to be on one CUDA device, and that
// device is current. The launcher checks everything else through the views, whose errors name the
// argument. It returns a cudaError_t, allocates nothing and never synchronizes. This file includes
// no torch header.
#pragma once

#include <cstdint>

#if defined(__CUDACC_RTC__)
#define JITQUANT_EXPORT(launcher, schema)
#else

#include <cuda_runtime_api.h>

#include <cstdarg>
#include <cstdio>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

struct __half;
struct __nv_bfloat16;
struct __nv_fp8_e4m3;
struct __nv_fp8_e5m2;
struct __nv_fp8_e8m0;

namespace jitquant {

// torch's dtypes, with torch's numbers.
enum class ElementType : int {
  kUInt8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kBool = 11,
  kBFloat16 = 15,
  kFloat8E5M2 = 23,
  kFloat8E4M3 = 24,
  kUInt16 = 27,
  kUInt32 = 28,
  kUInt64 = 29,
  kFloat8E8M0 = 44,
  kFloat4E2M1x2 = 45,
};

// Thrown by a launcher to refuse an argument; a RuntimeError in Python.
struct Refusal {
  char text[512];
};

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void refuse(const char* format, ...) {
  Refusal refusal;
  va_list parts;
  va_start(parts, format);
  std::vsnprintf(refusal.text, sizeof refusal.text, format, parts);
  va_end(parts);
  throw refusal;
}

inline const char* element_name(ElementType type) {
  switch (type) {
    case ElementType::kUInt8:
      return "uint8";
    case ElementType::kInt8:
      return "int8";
    case ElementType::kInt16:
      return "int16";
    case ElementType::kInt32:
      return "int32";
    case ElementType::kInt64:
      return "int64";
    case ElementType::kFloat16:
      return "float16";
    case ElementType::kFloat32:
      return "float32";
    case ElementType::kFloat64:
      return "float64";
    case ElementType::kBool:
      return "bool";
    case ElementType::kBFloat16:
      return "bfloat16";
    case ElementType::kFloat8E5M2:
      return "float8_e5m2";
    case ElementType::kFloat8E4M3:
      return "float8_e4m3fn";
    case ElementType::kUInt16:
      return "uint16";
    case ElementType::kUInt32:
      return "uint32";
    case ElementType::kUInt64:
      return "uint64";
    case ElementType::kFloat8E8M0:
      return "float8_e8m0fnu";
    case ElementType::kFloat4E2M1x2:
      return "float4_e2m1fn_x2";
  }
  return "another dtype";
}

// The dtype of a C++ type. You can specialize it for your own type.
template <class T>
struct ElementOf;
#define JITQUANT_ELEMENT(type, element)                        \
  template <>                                                  \
  struct ElementOf<type> {                                     \
    static constexpr ElementType value = ElementType::element; \
  };
JITQUANT_ELEMENT(uint8_t, kUInt8)
JITQUANT_ELEMENT(int8_t, kInt8)
JITQUANT_ELEMENT(int16_t, kInt16)
JITQUANT_ELEMENT(int32_t, kInt32)
JITQUANT_ELEMENT(int64_t, kInt64)
JITQUANT_ELEMENT(uint16_t, kUInt16)
JITQUANT_ELEMENT(uint32_t, kUInt32)
JITQUANT_ELEMENT(uint64_t, kUInt64)
JITQUANT_ELEMENT(bool, kBool)
JITQUANT_ELEMENT(float, kFloat32)
JITQUANT_ELEMENT(double, kFloat64)
JITQUANT_ELEMENT(__half, kFloat16)
JITQUANT_ELEMENT(__nv_bfloat16, kBFloat16)
JITQUANT_ELEMENT(__nv_fp8_e4m3, kFloat8E4M3)
JITQUANT_ELEMENT(__nv_fp8_e5m2, kFloat8E5M2)
JITQUANT_ELEMENT(__nv_fp8_e8m0, kFloat8E8M0)
#undef JITQUANT_ELEMENT

// A tensor as a launcher sees it. Sizes and strides count elements, and are valid during the call.
struct TensorView {
  const char* name;  // argument name, for errors
  void* address;
  ElementType dtype;
  bool writable;  // marked (a!) in the schema
  int device;
  int64_t rank;
  const int64_t* sizes;
  const int64_t* strides;

  int64_t size(int64_t dim) const { return sizes[index(dim)]; }
  int64_t stride(int64_t dim) const { return strides[index(dim)]; }

  int64_t numel() const {
    int64_t count = 1;
    for (int64_t i = 0; i < rank; ++i) count *= sizes[i];
    return count;
  }

  bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t i = rank - 1; i >= 0; --i) {
      if (sizes[i] == 0) return true;
      if (sizes[i] != 1 && strides[i] != expected) return false;
      expected *= sizes[i];
    }
    return true;
  }

  // The elements. Refused unless the dtype is T's and, if T is not const, the schema marks the
  // tensor as written. uint8_t also accepts the one-byte formats.
  template <class T>
  T* data() const {
    using Element = std::remove_const_t<T>;
    if (!std::is_const_v<T> && !writable)
      refuse(
          "%s: expected a tensor with (a!) in the schema, as the launcher writes to it, got one "
          "without. Write it as Tensor(a!)",
          name);
    if constexpr (!std::is_void_v<Element>) {
      constexpr ElementType wanted = ElementOf<Element>::value;
      const bool bytes = wanted == ElementType::kUInt8 &&
                         (dtype == ElementType::kFloat8E4M3 || dtype == ElementType::kFloat8E5M2 ||
                          dtype == ElementType::kFloat8E8M0 || dtype == ElementType::kFloat4E2M1x2);
      if (dtype != wanted && !bytes)
        refuse("%s: expected %s, got %s. Convert it with .to()", name, element_name(wanted),
               element_name(dtype));
    }
    return static_cast<T*>(address);
  }

  // These refuse the tensor if the condition does not hold. They return the view, for chaining.
  const TensorView& contiguous() const {
    if (!is_contiguous()) {
      char ours[160];
      write(strides, ours);
      refuse("%s: expected contiguous memory, got strides %s. Pass %s.contiguous()", name, ours,
             name);
    }
    return *this;
  }

  const TensorView& with_rank(int64_t wanted) const {
    if (rank != wanted)
      refuse("%s: expected %lld dimensions, got %lld", name, static_cast<long long>(wanted),
             static_cast<long long>(rank));
    return *this;
  }

  const TensorView& with_size(int64_t dim, int64_t wanted) const {
    if (size(dim) != wanted)
      refuse("%s: expected size %lld in dimension %lld, got %lld", name,
             static_cast<long long>(wanted), static_cast<long long>(dim),
             static_cast<long long>(size(dim)));
    return *this;
  }

  const TensorView& with_shape_of(const TensorView& other) const {
    bool same = rank == other.rank;
    for (int64_t i = 0; same && i < rank; ++i) same = sizes[i] == other.sizes[i];
    if (!same) {
      char ours[160], theirs[160];
      write(sizes, ours), other.write(other.sizes, theirs);
      refuse("%s: expected the shape of %s, %s, got %s", name, other.name, theirs, ours);
    }
    return *this;
  }

  const TensorView& aligned(int64_t bytes) const {
    const int64_t past = reinterpret_cast<uintptr_t>(address) % bytes;
    if (past != 0)
      refuse(
          "%s: expected memory that starts at a multiple of %lld bytes, got an address %lld past "
          "one. Pass %s.clone()",
          name, static_cast<long long>(bytes), static_cast<long long>(past), name);
    return *this;
  }

 private:
  int64_t index(int64_t dim) const {
    const int64_t i = dim < 0 ? dim + rank : dim;
    if (i < 0 || i >= rank)
      refuse("%s: expected %lld dimensions or more, as the launcher reads dimension %lld, got %lld",
             name, static_cast<long long>(dim < 0 ? -dim : dim + 1), static_cast<long long>(dim),
             static_cast<long long>(rank));
    return i;
  }

  // One number for each dimension, as Python writes a tuple.
  void write(const int64_t* numbers, char (&text)[160]) const {
    int used = std::snprintf(text, sizeof text, "(");
    for (int64_t i = 0; i < rank && used < 130; ++i)
      used += std::snprintf(text + used, sizeof text - used, "%s%lld", i ? ", " : "",
                            static_cast<long long>(numbers[i]));
    std::snprintf(text + used, sizeof text - used, rank == 1 ? ",)" : ")");
  }
};

// Internal: used by JITQUANT_EXPORT and the generated binding.
namespace exported {

// One argument of a call. The schema determines which member is set.
struct Argument {
  const char* name;
  bool present;  // false: None
  bool boolean;
  int64_t integer;
  double number;
  const char* text;
  TensorView tensor;
};

enum class Kind { kNone, kTensor, kInt, kFloat, kBool, kStr, kOther };

struct Type {
  Kind kind = Kind::kNone;
  bool optional = false, written = false;
};

constexpr bool letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

constexpr bool starts(const char* text, const char* word) {
  while (*word != '\0')
    if (*text++ != *word++) return false;
  return !letter(*text);
}

// The type of argument `index` of a schema, kNone past the last. The loader checks the whole schema
// with torch's own parser; this only reads the types.
constexpr Type type_at(const char* schema, int index) {
  const char* at = schema;
  while (*at != '\0' && *at != '(') ++at;
  if (*at == '(') ++at;
  for (int current = 0;; ++current) {
    while (*at == ' ' || *at == '\n' || *at == ',') ++at;
    if (*at == '*') {
      ++at;
      while (*at == ' ' || *at == '\n' || *at == ',') ++at;
    }
    if (*at == '\0' || *at == ')') return {};
    if (current == index) break;
    int depth = 0;
    char quote = '\0';
    for (; *at != '\0'; ++at) {
      if (quote != '\0') {
        if (*at == quote) quote = '\0';
      } else if (*at == '\'' || *at == '"') {
        quote = *at;
      } else if (*at == '(' || *at == '[') {
        ++depth;
      } else if (*at == ')' || *at == ']') {
        if (depth-- == 0) return {};
      } else if (*at == ',' && depth == 0) {
        break;
      }
    }
  }
  Type type;
  type.kind = starts(at, "Tensor")  ? Kind::kTensor
              : starts(at, "int")   ? Kind::kInt
              : starts(at, "float") ? Kind::kFloat
              : starts(at, "bool")  ? Kind::kBool
              : starts(at, "str")   ? Kind::kStr
                                    : Kind::kOther;
  while (letter(*at)) ++at;
  if (*at == '(') {
    for (; *at != '\0' && *at != ')'; ++at) type.written = type.written || *at == '!';
    if (*at == ')') ++at;
  }
  if (*at == '[') type.kind = Kind::kOther;
  type.optional = *at == '?';
  return type;
}

// Converts an argument to a parameter of type P (without const and reference).
template <class P, class Enable = void>
struct Parameter {
  static constexpr bool fits(Type) { return false; }
  static P from(const Argument&);
};

template <>
struct Parameter<TensorView> {
  static constexpr bool fits(Type t) { return t.kind == Kind::kTensor && !t.optional; }
  static const TensorView& from(const Argument& a) { return a.tensor; }
};

template <>
struct Parameter<const TensorView*> {
  static constexpr bool fits(Type t) { return t.kind == Kind::kTensor && t.optional; }
  static const TensorView* from(const Argument& a) { return a.present ? &a.tensor : nullptr; }
};

template <class T>
struct Parameter<T*, std::void_t<decltype(ElementOf<std::remove_const_t<T>>::value)>> {
  static constexpr bool fits(Type t) {
    return t.kind == Kind::kTensor && (std::is_const_v<T> || t.written);
  }
  static T* from(const Argument& a) {
    return a.present ? a.tensor.contiguous().template data<T>() : nullptr;
  }
};

template <>
struct Parameter<const char*> {
  static constexpr bool fits(Type t) { return t.kind == Kind::kStr; }
  static const char* from(const Argument& a) { return a.present ? a.text : nullptr; }
};

template <>
struct Parameter<bool> {
  static constexpr bool fits(Type t) { return t.kind == Kind::kBool && !t.optional; }
  static bool from(const Argument& a) { return a.boolean; }
};

template <class P>
struct Parameter<P, std::enable_if_t<std::is_integral_v<P> && std::is_signed_v<P>>> {
  static constexpr bool fits(Type t) { return t.kind == Kind::kInt && !t.optional; }
  static P from(const Argument& a) {
    if (a.integer < std::numeric_limits<P>::min() || a.integer > std::numeric_limits<P>::max())
      refuse("%s: expected an integer of %d bits, as the launcher takes, got %lld", a.name,
             static_cast<int>(8 * sizeof(P)), static_cast<long long>(a.integer));
    return static_cast<P>(a.integer);
  }
};

template <class P>
struct Parameter<P, std::enable_if_t<std::is_floating_point_v<P>>> {
  static constexpr bool fits(Type t) { return t.kind == Kind::kFloat && !t.optional; }
  static P from(const Argument& a) { return static_cast<P>(a.number); }
};

template <class P>
struct Parameter<std::optional<P>, std::enable_if_t<std::is_arithmetic_v<P>>> {
  static constexpr bool fits(Type t) {
    return t.optional && Parameter<P>::fits({t.kind, false, false});
  }
  static std::optional<P> from(const Argument& a) {
    return a.present ? std::optional<P>(Parameter<P>::from(a)) : std::nullopt;
  }
};

template <class P>
using ParameterOf = Parameter<std::remove_cv_t<std::remove_reference_t<P>>>;

template <class Function>
struct Launcher {
  static constexpr bool returns_error = false, takes_stream = true;
  static constexpr bool counts(const char*) { return true; }
  template <int kIndex>
  static constexpr bool fits(const char*) {
    return true;
  }
};

template <class... P>
struct Launcher<cudaError_t (*)(P...)> {
  using Parameters = std::tuple<P...>;
  static constexpr int count = static_cast<int>(sizeof...(P)) - 1;
  static constexpr bool returns_error = true;
  static constexpr bool takes_stream =
      std::is_same_v <
      std::tuple_element_t<count<0 ? 0 : count, std::tuple<P..., int>>, cudaStream_t>;

  static constexpr bool counts(const char* schema) {
    return type_at(schema, count < 0 ? 0 : count).kind == Kind::kNone &&
           (count < 1 || type_at(schema, count - 1).kind != Kind::kNone);
  }

  template <int kIndex>
  static constexpr bool fits(const char* schema) {
    if constexpr (kIndex < count) {
      using At = std::tuple_element_t<kIndex, Parameters>;
      // References must be const: the launcher may not modify its arguments.
      return ParameterOf<At>::fits(type_at(schema, kIndex)) &&
             (!std::is_reference_v<At> || std::is_const_v<std::remove_reference_t<At>>);
    }
    return true;
  }

  template <size_t... kIndex>
  static cudaError_t call(cudaError_t (*launcher)(P...), const Argument* arguments,
                          cudaStream_t stream, std::index_sequence<kIndex...>) {
    return launcher(
        ParameterOf<std::tuple_element_t<kIndex, Parameters>>::from(arguments[kIndex])..., stream);
  }
};

template <class... P>
struct Launcher<cudaError_t (*)(P...) noexcept> : Launcher<cudaError_t (*)(P...)> {};

// Fills `refusal` if the launcher refuses an argument.
template <class Function>
cudaError_t call(Function launcher, const Argument* arguments, cudaStream_t stream,
                 Refusal* refusal) {
  using Of = Launcher<Function>;
  try {
    return Of::call(launcher, arguments, stream, std::make_index_sequence<Of::count>());
  } catch (const Refusal& thrown) {
    *refusal = thrown;
    return cudaErrorInvalidValue;
  }
}

}  // namespace exported
}  // namespace jitquant

// One assertion per kind of mistake, reported on the line of the macro.
#define JITQUANT_EXPORT_FITS(launcher, schema, index)                                     \
  static_assert(::jitquant::exported::Launcher<decltype(&launcher)>::fits<index>(schema), \
                "JITQUANT_EXPORT: parameter " #index " (from 0) of " #launcher            \
                " does not fit the schema's argument; jitquant/export.h lists what does");
#define JITQUANT_EXPORT(launcher, schema)                                                  \
  static_assert(::jitquant::exported::Launcher<decltype(&launcher)>::returns_error,        \
                "JITQUANT_EXPORT: expected " #launcher " to return cudaError_t");          \
  static_assert(::jitquant::exported::Launcher<decltype(&launcher)>::takes_stream,         \
                "JITQUANT_EXPORT: expected " #launcher " to take a cudaStream_t last");    \
  static_assert(::jitquant::exported::Launcher<decltype(&launcher)>::counts(schema),       \
                "JITQUANT_EXPORT: expected " #launcher                                     \
                " to take a parameter for each argument of the schema, and the stream");   \
  JITQUANT_EXPORT_FITS(launcher, schema, 0)                                                \
  JITQUANT_EXPORT_FITS(launcher, schema, 1)                                                \
  JITQUANT_EXPORT_FITS(launcher, schema, 2)                                                \
  JITQUANT_EXPORT_FITS(launcher, schema, 3)                                                \
  JITQUANT_EXPORT_FITS(launcher, schema, 4)                                                \
  JITQUANT_EXPORT_FITS(launcher, schema, 5)                                                \
  JITQUANT_EXPORT_FITS(launcher, schema, 6)                                                \
  JITQUANT_EXPORT_FITS(launcher, schema, 7)                                                \
  JITQUANT_EXPORT_FITS(launcher, schema, 8)                                                \
  JITQUANT_EXPORT_FITS(launcher, schema, 9)                                                \
  JITQUANT_EXPORT_FITS(launcher, schema, 10)                                               \
  JITQUANT_EXPORT_FITS(launcher, schema, 11)                                               \
  JITQUANT_EXPORT_FITS(launcher, schema, 12)                                               \
  JITQUANT_EXPORT_FITS(launcher, schema, 13)                                               \
  JITQUANT_EXPORT_FITS(launcher, schema, 14)                                               \
  JITQUANT_EXPORT_FITS(launcher, schema, 15)                                               \
  JITQUANT_EXPORT_FITS(launcher, schema, 16)                                               \
  JITQUANT_EXPORT_FITS(launcher, schema, 17)                                               \
  JITQUANT_EXPORT_FITS(launcher, schema, 18)                                               \
  JITQUANT_EXPORT_FITS(launcher, schema, 19)                                               \
  JITQUANT_EXPORT_FITS(launcher, schema, 20)                                               \
  JITQUANT_EXPORT_FITS(launcher, schema, 21)                                               \
  JITQUANT_EXPORT_FITS(launcher, schema, 22)                                               \
  JITQUANT_EXPORT_FITS(launcher, schema, 23)                                               \
  extern "C" __attribute__((visibility("hidden"))) cudaError_t jitquant_export_##launcher( \
      const ::jitquant::exported::Argument* arguments, cudaStream_t stream,                \
      ::jitquant::Refusal* refusal) {                                                      \
    return ::jitquant::exported::call(&launcher, arguments, stream, refusal);              \
  }

#endif
