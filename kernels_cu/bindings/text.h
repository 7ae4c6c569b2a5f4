// The messages of errors. Included once in a library: by common.cpp, or by a generated binding.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "view.h"

namespace jitquant {

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

inline const char* name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte:
      return "torch.uint8";
    case ScalarType::Char:
      return "torch.int8";
    case ScalarType::Short:
      return "torch.int16";
    case ScalarType::Int:
      return "torch.int32";
    case ScalarType::Long:
      return "torch.int64";
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::Double:
      return "torch.float64";
    case ScalarType::Bool:
      return "torch.bool";
    case ScalarType::BFloat16:
      return "torch.bfloat16";
    case ScalarType::Float8_e5m2:
      return "torch.float8_e5m2";
    case ScalarType::Float8_e4m3fn:
      return "torch.float8_e4m3fn";
    case ScalarType::Float8_e8m0fnu:
      return "torch.float8_e8m0fnu";
    case ScalarType::Float4_e2m1fn_x2:
      return "torch.float4_e2m1fn_x2";
    default:
      return nullptr;
  }
}

void TextPart::append_to(std::string& message) const {
  switch (kind_) {
    case Kind::kText:
      message.append(text_, size_);
      break;
    case Kind::kNumber:
      message += shortest(number_);
      break;
    case Kind::kInteger:
      message += std::to_string(integer_);
      break;
    case Kind::kDtype:
      if (const char* name = name_of(static_cast<ScalarType>(integer_))) {
        message += name;
      } else {
        message += "of dtype " + std::to_string(integer_);
      }
      break;
    case Kind::kTuple:
      message += '(';
      for (uint32_t i = 0; i < size_; ++i) {
        if (i > 0) message += ", ";
        message += std::to_string(numbers_[i]);
      }
      message += size_ == 1 ? ",)" : ")";
      break;
  }
}

std::string text_of(std::initializer_list<TextPart> parts) {
  std::string message;
  for (const TextPart& part : parts) part.append_to(message);
  return message;
}

// Avoids iostream: with a statically linked C++ library, a stream would mix two copies of it.
void fail_with(std::initializer_list<TextPart> parts) {
  throw std::runtime_error(text_of(parts));
}

}  // namespace jitquant
