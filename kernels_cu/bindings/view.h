// What the checks need to know about a tensor, and how they raise errors. Without torch's headers,
// which take longer to compile than a binding.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
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

// Formatted as in Python: the shortest text that identifies the number.
inline std::string shortest(double d) {
  if (d != d) return "nan";
  if (d - d != 0) return d > 0 ? "inf" : "-inf";
  char buffer[40];
  int digits = 0;
  do std::snprintf(buffer, sizeof buffer, "%.*e", digits++, d);
  while (digits < 17 && std::strtod(buffer, nullptr) != d);
  const int exponent = std::atoi(std::strchr(buffer, 'e') + 1);
  if (exponent >= -4 && exponent < 16) {
    const int decimals = digits - 1 - exponent;
    std::snprintf(buffer, sizeof buffer, "%.*f", decimals > 1 ? decimals : 1, d);
  }
  return buffer;
}

// Part of a message. Messages are assembled at run time: code for each combination of types would
// be most of a binding.
class TextPart {
 public:
  TextPart(const char* s) : text_(s) {}         // NOLINT: what a message says is made of these
  TextPart(std::string_view s) : text_(s) {}    // NOLINT
  TextPart(const std::string& s) : text_(s) {}  // NOLINT
  TextPart(double d) : number_(d), kind_(kNumber) {}  // NOLINT
  template <class Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
  TextPart(Integer i) : integer_(static_cast<int64_t>(i)), kind_(kInteger) {}  // NOLINT

  void append_to(std::string& message) const {
    if (kind_ == kText) {
      message += text_;
      return;
    }
    message += kind_ == kNumber ? shortest(number_) : std::to_string(integer_);
  }

 private:
  std::string_view text_;
  double number_ = 0.0;
  int64_t integer_ = 0;
  enum { kText, kNumber, kInteger } kind_ = kText;
};

__attribute__((noinline)) inline std::string text_of(std::initializer_list<TextPart> parts) {
  std::string message;
  for (const TextPart& part : parts) part.append_to(message);
  return message;
}

// Throws what torch raises as a RuntimeError. Avoids iostream: with a statically linked C++
// library, a stream would mix two copies of it.
[[noreturn]] __attribute__((noinline, cold)) inline void fail_with(
    std::initializer_list<TextPart> parts) {
  throw std::runtime_error(text_of(parts));
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  fail_with({parts...});
}

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
inline std::string dtype_text(ScalarType dtype) {
  switch (static_cast<int>(dtype)) {
    case 0:
      return "torch.uint8";
    case 1:
      return "torch.int8";
    case 2:
      return "torch.int16";
    case 3:
      return "torch.int32";
    case 4:
      return "torch.int64";
    case 5:
      return "torch.float16";
    case 6:
      return "torch.float32";
    case 7:
      return "torch.float64";
    case 11:
      return "torch.bool";
    case 15:
      return "torch.bfloat16";
    case 23:
      return "torch.float8_e5m2";
    case 24:
      return "torch.float8_e4m3fn";
    case 44:
      return "torch.float8_e8m0fnu";
    case 45:
      return "torch.float4_e2m1fn_x2";
    default:
      return text_of({"of dtype ", static_cast<int>(dtype)});
  }
}

template <class F>
std::string tuple_text(int64_t count, F&& number) {
  std::string text = "(";
  for (int64_t i = 0; i < count; ++i) {
    if (i > 0) text += ", ";
    TextPart(number(i)).append_to(text);
  }
  text += count == 1 ? ",)" : ")";
  return text;
}

template <class Sized>
std::string shape_text(const Sized& t) {
  return tuple_text(t.dim(), [&](int64_t i) { return t.size(i); });
}

inline std::string strides_text(const View& t) {
  return tuple_text(t.dim(), [&](int64_t i) { return t.stride(i); });
}

}  // namespace jitquant
