// What the bindings of NVFP4 products check alike.
#pragma once

#include "common.h"

namespace jitquant {

// Codes and linear scales, packed along the last dimension; returns the logical columns.
inline int64_t check_packed(const View& codes, const View& scales, const char* name,
                            const char* scales_name) {
  check_cuda(codes, name);
  check_cuda(scales, scales_name, &codes);
  JITQUANT_CHECK(codes.scalar_type() == ScalarType::Float4_e2m1fn_x2 ||
                     codes.scalar_type() == ScalarType::Byte,
                 name, " must be float4_e2m1fn_x2, or its bytes as uint8");
  JITQUANT_CHECK(
      scales.scalar_type() == ScalarType::Float8_e4m3fn || scales.scalar_type() == ScalarType::Byte,
      scales_name, " must be float8_e4m3fn, or its bytes as uint8");
  JITQUANT_CHECK(codes.dim() >= 1, name, " must have at least one dimension");
  const int64_t bytes = codes.size(codes.dim() - 1);
  JITQUANT_CHECK(bytes > 0 && bytes % 8 == 0, "the last dimension of ", name,
                 " must be a multiple of 8 bytes, not ", bytes);
  JITQUANT_CHECK(codes.is_contiguous() && aligned(codes.const_data_ptr(), 8), name,
                 " must be contiguous and aligned to 8 bytes; pass ", name, ".contiguous()");
  JITQUANT_CHECK(scales.is_contiguous(), scales_name, " must be contiguous; pass ", scales_name,
                 ".contiguous()");
  const Shape expected = Shape::of(codes, codes.dim() - 1, bytes / 8);
  bool same = scales.dim() == expected.dim();
  for (int64_t i = 0; same && i < scales.dim(); ++i) same = scales.size(i) == expected.size(i);
  JITQUANT_CHECK(same, scales_name, " must have shape ", shape_text(expected), ", not ",
                 shape_text(scales));
  return 2 * bytes;
}

}  // namespace jitquant
