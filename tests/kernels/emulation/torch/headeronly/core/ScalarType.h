// Stands for torch's header of this name. The numbers are torch's.
#pragma once

#include <cstdint>

namespace torch::headeronly {

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
enum class DeviceType : int8_t { CPU = 0, CUDA = 1 };

}  // namespace torch::headeronly
