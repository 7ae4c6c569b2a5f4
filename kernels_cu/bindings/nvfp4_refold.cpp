#include "declared/nvfp4_refold.h"

#include "product.h"

namespace jitquant {
namespace {

void nvfp4_refold(Call& call, const declared::Nvfp4Refold& args, Result& data, Result& scale_inv) {
  const View& codes = args.w_fp4;
  const Nvfp4Weight w = weight_of(codes, args.w_sf, args.w_gsa);
  auto* const values = static_cast<uint8_t*>(
      data.memory("data", ScalarType::Float8_e4m3fn, Shape::of(codes, 1, w.cols), codes));
  float* const factors = scale_inv.floats("scale_inv", w.rows, codes);
  const Launching at(call, codes);
  check_launch(launch_nvfp4_refold(w, values, factors, at.stream), "nvfp4_refold");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&nvfp4_refold>())
