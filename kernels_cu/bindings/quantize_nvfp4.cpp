#include "quantize.h"

JITQUANT_FUNCTIONS(function<&quantize_given<kGlobalScale>>(
    "quantize_nvfp4",
    "Tensor x, Tensor global_scale, *, str recipe='te', str scale_layout='linear'",
    {"x_fp4", "x_sf"}))
