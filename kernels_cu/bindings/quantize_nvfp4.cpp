#include "quantize.h"

JITQUANT_FUNCTIONS(function<&quantize_given>())
