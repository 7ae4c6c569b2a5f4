// What the checks need to know about a tensor, and how they raise errors (text.h). Without torch's
// headers, which take longer to compile than a binding.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

namespace jitquant {

// Torch's dtypes, with its numbers.
enum class ScalarType : int8_t {
  Byte = 0,
  Char = 1,
  Short = 2,
  Int = 3,
  Long = 4,
  Half = 5,
  Float = 6,
  Double = 7,
  Bool = 11,
  BFloat16 = 15,
  Float8_e5m2 = 23,
  Float8_e4m3fn = 24,
  Float8_e8m0fnu = 44,
  Float4_e2m1fn_x2 = 45,
  Undefined = 46,
};

struct View;

// Part of a message: as it stands in a call, two words and nothing to destroy. So a check that
// fails takes little code.
class TextPart {
 public:
  TextPart(const char* s) : TextPart(std::string_view(s)) {}  // NOLINT: made from what it says
  TextPart(const std::string& s) : TextPart(std::string_view(s)) {}  // NOLINT
  TextPart(std::string_view s)                                       // NOLINT
      : text_(s.data()), size_(static_cast<uint32_t>(s.size())), kind_(Kind::kText) {}
  TextPart(double d) : number_(d), kind_(Kind::kNumber) {}  // NOLINT
  template <class Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
  TextPart(Integer i) : integer_(static_cast<int64_t>(i)), kind_(Kind::kInteger) {}  // NOLINT

  [[gnu::visibility("hidden")]] void append_to(std::string& message) const;

 private:
  friend TextPart dtype_text(ScalarType dtype);
  friend TextPart shape_text(const View& t);
  friend TextPart strides_text(const View& t);
  enum class Kind : uint32_t { kText, kNumber, kInteger, kDtype, kTuple };

  TextPart(int64_t integer, Kind kind) : integer_(integer), kind_(kind) {}
  TextPart(const int64_t* numbers, int64_t count)
      : numbers_(numbers), size_(static_cast<uint32_t>(count)), kind_(Kind::kTuple) {}

  union {
    const char* text_;
    const int64_t* numbers_;
    int64_t integer_;
    double number_;
  };
  uint32_t size_ = 0;
  Kind kind_;
};

[[gnu::visibility("hidden")]] std::string text_of(std::initializer_list<TextPart> parts);

// Throws what torch raises as a RuntimeError.
[[noreturn, gnu::cold, gnu::visibility("hidden")]] void fail_with(
    std::initializer_list<TextPart> parts);

#define JITQUANT_CHECK(condition, ...) \
  if (!(condition)) jitquant::fail_with({__VA_ARGS__})

// What the checks need to know about a tensor, from torch or from Python. Sizes and strides point
// into the tensor.
struct View {
  void* data = nullptr;
  ScalarType dtype = ScalarType::Undefined;
  bool cuda = false;
  int32_t device = -1;
  int64_t rank = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;

  bool is_cuda() const { return cuda; }
  int32_t get_device_index() const { return device; }
  ScalarType scalar_type() const { return dtype; }
  int64_t dim() const { return rank; }
  int64_t size(int64_t i) const { return sizes[i]; }
  int64_t stride(int64_t i) const { return strides[i]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t i = 0; i < rank; ++i) count *= sizes[i];
    return count;
  }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t i = rank - 1; i >= 0; --i) {
      if (sizes[i] != 1 && strides[i] != expected) return numel() == 0;
      expected *= sizes[i];
    }
    return true;
  }
  const void* const_data_ptr() const { return data; }
  void* mutable_data_ptr() const { return data; }
};

// A tensor that is updated in place.
struct InPlace : View {};

// Formatted as in Python.
inline TextPart dtype_text(ScalarType dtype) {
  return {static_cast<int64_t>(dtype), TextPart::Kind::kDtype};
}
inline TextPart shape_text(const View& t) {
  return {t.sizes, t.rank};
}
inline TextPart strides_text(const View& t) {
  return {t.strides, t.rank};
}

}  // namespace jitquant
