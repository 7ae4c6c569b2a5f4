// Shared by all bindings: converts torch tensors to plain structs, with the checks that keep
// invalid arguments away from a kernel. What needs torch is in function.cpp.
#pragma once

#include <array>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "jitquant/launch.h"
#include "memory.h"
#include "stream.h"

namespace [[gnu::visibility("hidden")]] jitquant {

// The device on which torch creates new tensors. CUDA's current device may differ: torch remembers
// a device without a context, but does not switch back to it.
int32_t current_device();

// A shape: leading sizes of a tensor, which must outlive it, plus up to three more.
class Shape {
 public:
  Shape() = default;
  Shape(const View& t) : lead_(t.sizes), leading_(t.rank) {}  // NOLINT: a tensor has a shape
  // The first `count` sizes of a tensor.
  Shape(const View& t, int64_t count) : lead_(t.sizes), leading_(count) {}

  int64_t dim() const { return leading_ + trailing_; }
  int64_t size(int64_t i) const { return i < leading_ ? lead_[i] : tail_[i - leading_]; }
  bool empty() const {
    for (int64_t i = 0; i < dim(); ++i) {
      if (size(i) == 0) return true;
    }
    return false;
  }
  bool is_of(const View& t) const {
    bool same = t.rank == dim();
    for (int64_t i = 0; same && i < leading_; ++i) same = t.sizes[i] == lead_[i];
    for (int64_t i = 0; same && i < trailing_; ++i) same = t.sizes[leading_ + i] == tail_[i];
    return same;
  }
  int64_t count() const { return count(leading_, trailing_); }
  // Of all sizes but the last.
  int64_t row_count() const {
    return trailing_ > 0 ? count(leading_, trailing_ - 1) : count(leading_ - 1, 0);
  }
  // Its first `count` sizes.
  Shape first(int64_t count) const {
    return {lead_, count < leading_ ? count : leading_, tail_,
            count > leading_ ? count - leading_ : 0};
  }
  // Its sizes, and up to three more. An index that the compiler knows lets it leave out all copies.
  Shape and_then(int64_t a) const { return joined({a, 0, 0}, 1); }
  Shape and_then(int64_t a, int64_t b) const { return joined({a, b, 0}, 2); }
  Shape and_then(int64_t a, int64_t b, int64_t c) const { return joined({a, b, c}, 3); }
  // Its sizes, with another last one.
  Shape with_last(int64_t size) const {
    if (trailing_ == 0) return {lead_, leading_ - 1, {size, 0, 0}, 1};
    if (trailing_ == 1) return {lead_, leading_, {size, 0, 0}, 1};
    return {lead_, leading_, {tail_[0], trailing_ == 2 ? size : tail_[1], size}, trailing_};
  }

 private:
  Shape(const int64_t* lead, int64_t leading, std::array<int64_t, 3> tail, int64_t trailing)
      : lead_(lead), leading_(leading), tail_(tail), trailing_(trailing) {}

  int64_t count(int64_t leading, int64_t trailing) const {
    int64_t count = 1;
    for (int64_t i = 0; i < leading; ++i) count *= lead_[i];
    for (int64_t i = 0; i < trailing; ++i) count *= tail_[i];
    return count;
  }
  Shape joined(const std::array<int64_t, 3>& more, int64_t count) const {
    if (trailing_ == 0) return {lead_, leading_, more, count};
    if (trailing_ == 1) return {lead_, leading_, {tail_[0], more[0], more[1]}, 1 + count};
    return {lead_, leading_, {tail_[0], tail_[1], more[0]}, 2 + count};
  }

  const int64_t* lead_ = nullptr;
  int64_t leading_ = 0;
  std::array<int64_t, 3> tail_ = {};
  int64_t trailing_ = 0;
};

std::string shape_text(const Shape& shape);

inline int64_t count_of(const Shape& shape) {
  return shape.count();
}

inline int64_t ceil_div(int64_t a, int64_t b) {
  return a / b + (a % b > 0);
}

// Whether a text is a name. Faster than ==, which does not use that the length is known.
template <size_t kSize>
bool is(std::string_view text, const char (&name)[kSize]) {
  return text.size() == kSize - 1 && __builtin_memcmp(text.data(), name, kSize - 1) == 0;
}

inline bool swizzled_of(std::string_view scale_layout) {
  return is(scale_layout, "swizzled_128x4");
}

// As in jitquant.formats: the shapes of packed codes and of scales in memory.
inline Shape fp4_scales_shape(const Shape& codes, std::string_view scale_layout, int64_t dim,
                              int64_t block) {
  const int64_t last = codes.dim() - 1, blocks = 2 * codes.size(dim == 0 ? 0 : last) / block;
  if (dim == 0) return Shape().and_then(blocks, codes.size(1));
  if (!swizzled_of(scale_layout)) return codes.with_last(blocks);
  return Shape().and_then(swizzled_rows(codes.row_count()), swizzled_blocks(blocks));
}

inline Shape codes_of_fp4(const Shape& shape, std::string_view, int64_t dim, int64_t block) {
  const int64_t last = shape.dim() - 1;
  const int64_t packed = ceil_div(shape.size(dim == 0 ? 0 : last), block) * (block / 2);
  if (dim == 0) return Shape().and_then(packed, shape.size(1));
  return shape.with_last(packed);
}
inline Shape scales_of_fp4(const Shape& shape, std::string_view scale_layout, int64_t dim,
                           int64_t block) {
  return fp4_scales_shape(codes_of_fp4(shape, scale_layout, dim, block), scale_layout, dim, block);
}

Shape scales_shape(const Shape& leading, int64_t groups, std::string_view scale_format,
                   std::string_view scale_layout);

// The neighbors that a rotation mixes.
inline int64_t hadamard_size(std::string_view rotate) {
  if (is(rotate, "none")) return 0;
  if (is(rotate, "te")) return 16;
  int64_t size = 0;
  for (const char digit : rotate) size = 10 * size + (digit - '0');
  return size;
}

// Whether the rows of a tensor are at one distance from each other.
bool evenly_strided(const View& t);

[[noreturn]] void fail_on_device(const View& t, const char* name, const View& like);

// A tensor, if there is one, is on the CUDA device of another one.
inline void check_device(const View* t, const char* name, const View& like) {
  if (t != nullptr && !(t->cuda && t->device == like.device)) fail_on_device(*t, name, like);
}

DType dtype_of(ScalarType dtype, const char* name);

inline DType dtype_of(const View& t, const char* name) {
  return dtype_of(t.scalar_type(), name);
}

inline int64_t element_size(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}

inline bool aligned(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// Codes or scales, which are read so many bytes at a time.
const uint8_t* bytes_of(const View& t, const char* name, int64_t alignment);

// The rows of a tensor. The last dimension holds the columns. The first `leading` dimensions form
// the rows, in place and with any strides. The caller handles the dimensions in between.
Matrix rows_of(const View& t, const char* name, int64_t leading, int64_t element_bytes);

Matrix matrix_of(const View& t, const char* name, int64_t leading);

Matrix matrix_of(const View& t, const char* name);

CountedMatrix counted_matrix(const View& t, const char* name);

// Converts an argument, or several, to what a launcher takes. Generated bindings call these
// functions by what they return, and by the names of their parameters if there are several: see
// scripts/harness/bindings.py.
inline Nvfp4Recipe recipe_of(std::string_view recipe) {
  if (is(recipe, "te")) return Nvfp4Recipe::kTe;
  return is(recipe, "vllm") ? Nvfp4Recipe::kVllm : Nvfp4Recipe::kTeFlush;
}

inline bool by_row_of(std::string_view granularity) {
  return is(granularity, "row");
}

inline bool activate_of(std::string_view op) {
  return is(op, "swiglu");
}

// Scratch memory for one call: floats, or null if none are needed. torch gives it to no other work
// on this stream until ours is done.
class Workspace {
 public:
  Workspace(int64_t count, const View& like);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  float* floats() const { return floats_; }

 private:
  void* tensor_ = nullptr;
  float* floats_ = nullptr;
};

bool holds_bytes(ScalarType dtype);

// A buffer for a result; its rows may be strided. Codes and scales may be passed as bytes.
void check_kind(const View& t, const char* name, ScalarType dtype, const Shape& shape,
                const View& like);

void check_out(const View& t, const char* name, ScalarType dtype, const Shape& shape,
               const View& like);

// What a plan says of a result.
struct Planned {
  ScalarType dtype;
  Shape shape;
};

// The memory of a result. `rows`: a buffer whose rows may be strided.
struct Memory {
  void* data;
  ScalarType dtype;
  const Shape& shape;
  const View* rows;

  float* floats() const { return static_cast<float*>(data); }
  // All sizes but the last, and the last.
  int64_t row_count() const { return shape.row_count(); }
  int64_t cols() const { return shape.size(shape.dim() - 1); }
};

// A result of a call: the caller's buffer, or a tensor that is created once its shape is known. All
// arguments are checked before the first result is allocated.
class Result {
 public:
  Result() = default;
  Result(const Result&) = delete;
  Result& operator=(const Result&) = delete;

  void give(const View& buffer) { given_ = buffer; }
  // For a result that has no elements.
  void give_nothing() { nothing_ = true; }
  const View* given() const { return given_ ? &*given_ : nullptr; }
  Memory memory(const char* name, const Planned& planned, const View& like);
  // One-byte elements; the rows of a buffer may be strided.
  Memory rows(const char* name, const Planned& planned, const View& like);

 protected:
  ~Result() = default;
  virtual void* make(ScalarType dtype, const Shape& shape, const View& like) = 0;

 private:
  std::optional<View> given_;
  bool nothing_ = false;
};

// One call of a function, from torch or from Python.
class Call {
 public:
  virtual void begin() {}  // all checks have passed; the launch is next
  virtual void end() {}
  virtual int32_t device() { return current_device(); }

 protected:
  ~Call() = default;
};

// The arguments of one call by position in the schema, followed by the results, for both ways of
// calling. Virtual, because separate code for each way and function would be most of a binding.
class Arguments {
 public:
  explicit Arguments(bool has_buffers) : has_buffers_(has_buffers) {}
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  bool has_buffers() const { return has_buffers_; }  // the caller passed the result buffers
  virtual Result& result(size_t i) = 0;

  // Each argument is requested once, before the results.
  virtual void get(size_t i, View& out) = 0;
  virtual void get(size_t i, InPlace& out) = 0;
  virtual void get(size_t i, double& out) = 0;
  virtual void get(size_t i, int64_t& out) = 0;
  virtual void get(size_t i, bool& out) = 0;
  virtual void get(size_t i, std::string_view& out) = 0;
  virtual void get(size_t i, ScalarType& out) = 0;
  virtual void get(size_t i, std::optional<View>& out) = 0;
  virtual void get(size_t i, std::optional<InPlace>& out) = 0;
  virtual void get(size_t i, std::optional<double>& out) = 0;
  virtual void get(size_t i, std::optional<int64_t>& out) = 0;
  virtual void get(size_t i, std::optional<ScalarType>& out) = 0;

 protected:
  ~Arguments() = default;

 private:
  const bool has_buffers_;
};

constexpr size_t kMostResults = 8;

// How to call a binding's function, and the names of its arguments and results.
struct Invocation {
  void (*invoke)(Call&, Arguments&);
  size_t inputs, results;
};

template <auto kFunction>
std::vector<std::string>& names_of() {
  static std::vector<std::string> names;
  return names;
}

// Refuses a name with the same message as jitquant.formats.one_of.
[[noreturn]] void fail_name(const char* name, std::string_view value,
                            std::initializer_list<std::string_view> accepted);

template <size_t... kSizes>
void check_name(const char* name, std::string_view value, const char (&... accepted)[kSizes]) {
  if (!(is(value, accepted) || ...)) fail_name(name, value, {accepted...});
}

// Refuses a number with the same message as jitquant.ops.schema.Number.
void check_number(const char* name, std::optional<double> value, double least, double most,
                  const char* expected, const char* way_out);

// Refuses a dtype with the same message as jitquant.ops.schema.Dtypes.
void check_dtype(const char* name, ScalarType dtype, std::initializer_list<ScalarType> accepted,
                 const char* expected, const char* way_out);

inline void check_dtype(const char* name, const View& t, std::initializer_list<ScalarType> accepted,
                        const char* expected, const char* way_out) {
  check_dtype(name, t.dtype, accepted, expected, way_out);
}

template <class T>
void check_dtype(const char* name, const std::optional<T>& given,
                 std::initializer_list<ScalarType> accepted, const char* expected,
                 const char* way_out) {
  if (given) check_dtype(name, *given, accepted, expected, way_out);
}

// The tensor behind an argument, and whether it is written.
inline const View* tensor_of(const View& t) {
  return &t;
}
template <class T>
const View* tensor_of(const std::optional<T>& t) {
  if constexpr (std::is_base_of_v<View, T>) {
    return t ? &*t : nullptr;
  } else {
    return nullptr;
  }
}
template <class T>
const View* tensor_of(const T&) {
  return nullptr;
}
template <class T>
constexpr bool kIsWritten = std::is_same_v<T, InPlace> || std::is_same_v<T, std::optional<InPlace>>;

template <class F>
struct Signature;

template <auto kFunction, class... Inputs, size_t... I, size_t... R>
void invoke(Call& call, Arguments& all, std::tuple<Inputs...>*, std::index_sequence<I...>,
            std::index_sequence<R...>) {
  std::tuple<Inputs...> inputs;
  (all.get(I, std::get<I>(inputs)), ...);
  constexpr bool kWrites = (kIsWritten<Inputs> || ...);
  if (kWrites || all.has_buffers()) {
    const Reached reached[] = {{tensor_of(std::get<I>(inputs)), kIsWritten<Inputs>}...,
                               {all.result(R).given(), true}...};
    check_own_memory(reached, names_of<kFunction>());
  }
  const typename Signature<decltype(kFunction)>::Declared arguments = {std::get<I>(inputs)...};
  arguments.check();
  kFunction(call, arguments, all.result(R)...);
}

// While it exists, the input's device is the current device of torch and CUDA. Launches go to
// `stream`.
class Launching {
 public:
  Launching(Call& call, const View& like);
  ~Launching();
  Launching(const Launching&) = delete;
  Launching& operator=(const Launching&) = delete;

 private:
  void leave();

  Call& call_;
  void* guard_ = nullptr;

 public:
  const cudaStream_t stream;
};

// The rows of one-byte elements that are a result.
Matrix rows_of(const Memory& data, const char* name);

template <class T>
const T* pointer_to(const std::optional<T>& value) {
  return value ? &*value : nullptr;
}

// The elements of a tensor, or null.
template <class T>
const T* data_of(const std::optional<View>& t) {
  return t ? static_cast<const T*>(t->data) : nullptr;
}

inline Values values(const Memory& out) {
  return {out.data, dtype_of(out.dtype, "dtype"), out.row_count(), out.cols()};
}

inline Codes codes_of(const View& x_fp4, const char* name) {
  return {bytes_of(x_fp4, name, 8)};
}

// Rows of blocks, packed along the last dimension or along the first one of two.
inline bool columns_of(int64_t dim) {
  return dim == 0;
}
inline bool tile_of(std::string_view block) {
  return is(block, "16x16");
}
Nvfp4Input nvfp4_input(const View& x_fp4, const View& x_sf, const View& gsa, int64_t dim,
                       std::string_view scale_layout);

// Packed along the last dimension, or along the first one of two.
inline Nvfp4Output packed_columns(const Memory& x_fp4, const Memory& x_sf,
                                  std::string_view scale_layout, int64_t dim) {
  const int64_t rows = dim == 0 ? x_fp4.cols() : x_fp4.row_count();
  const int64_t blocks = (dim == 0 ? x_fp4.row_count() : x_fp4.cols()) / 8;
  return {static_cast<uint8_t*>(x_fp4.data), static_cast<uint8_t*>(x_sf.data), rows, blocks,
          swizzled_of(scale_layout)};
}
inline Nvfp4Output packed(const Memory& x_fp4, const Memory& x_sf, std::string_view scale_layout) {
  return packed_columns(x_fp4, x_sf, scale_layout, -1);
}

// A gsa tensor with one element, or one per row.
GlobalScale given_scale(const View& gsa);

// The amax of a tensor, its partial maxima, or one per row.
GlobalScale amax_scale(const View& amax, double divisor, const Memory& gsa);

inline ComputedScale computed_scale(std::optional<double> gsa_value, double divisor,
                                    const Memory& gsa) {
  return {gsa_value.has_value(), false, static_cast<float>(gsa_value.value_or(0.0)),
          static_cast<float>(divisor), gsa.floats()};
}
inline ComputedScale computed_scale(std::optional<double> gsa_value, std::string_view granularity,
                                    double divisor, const Memory& gsa) {
  ComputedScale scale = computed_scale(gsa_value, divisor, gsa);
  scale.by_row = by_row_of(granularity) && !scale.given;
  return scale;
}

ColumnVector column_vector(const View& weight);

}  // namespace jitquant
