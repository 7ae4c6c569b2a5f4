#include "quantize.h"

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def(
      "quantize_nvfp4(Tensor x, Tensor global_scale, *, str recipe='te', "
      "str scale_layout='linear') -> (Tensor x_fp4, Tensor x_sf)");
  m.def(
      "quantize_nvfp4.out(Tensor x, Tensor global_scale, *, str recipe='te', "
      "str scale_layout='linear', Tensor(a!) x_fp4, Tensor(b!) x_sf) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) {
  m.impl("quantize_nvfp4", TORCH_BOX(&jitquant::quantize_given<jitquant::kGlobalScale>));
  m.impl("quantize_nvfp4.out", TORCH_BOX(&jitquant::quantize_given_out<jitquant::kGlobalScale>));
}
