// What all bindings of NVFP4 products share.
#pragma once

#include "../gemm/linear.h"
#include "common.h"

namespace jitquant {

inline Nvfp4Weight weight_of(const View& codes, const View& scales, const View& gsa) {
  const int64_t cols = 2 * codes.size(1);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  JITQUANT_CHECK(codes.size(0) <= kMost && cols <= kMost,
                 "w_fp4: expected fewer than 2^30 rows and columns, got shape ", shape_text(codes));
  return {bytes_of(codes, "w_fp4", 8), static_cast<const uint8_t*>(scales.const_data_ptr()),
          given_scale(gsa).gsa, static_cast<int>(codes.size(0)), static_cast<int>(cols)};
}

}  // namespace jitquant
