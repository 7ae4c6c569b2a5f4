#include "declared/amax_gsa.h"

namespace jitquant {
namespace {

void compute_amax_gsa(Call& call, const declared::ComputeAmaxGsa& args, Result& gsa) {
  const Matrix m = matrix_of(args.x, "x");
  const float d = static_cast<float>(args.divisor);
  float* out = gsa.floats("gsa", 1, args.x);
  const Launching at(call, args.x);
  const int blocks = amax_gsa_blocks(m);
  const Workspace partials(blocks > 1 ? blocks : 0, args.x);
  check_launch(launch_amax_gsa(m, d, partials.floats(), blocks, out, at.stream),
               "compute_amax_gsa");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&compute_amax_gsa>())
