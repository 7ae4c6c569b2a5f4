#include "../amax/launch.h"

#include "declared/amax.h"

namespace jitquant {
namespace {

void amax(Call& call, const declared::Amax& args, Result& amax) {
  const Matrix m = matrix_of(args.x, "x");
  JITQUANT_CHECK(args.run < int64_t{1} << 31, "run: expected fewer than 2^31 columns, got ",
                 args.run);
  const bool rows = by_row(args.granularity);
  float* out = amax.floats("amax", rows ? m.rows : 1, args.x);
  const Launching at(call, args.x);
  const int blocks = rows ? 1 : amax_blocks(m, args.run);
  const Workspace partials(blocks > 1 ? blocks : 0, args.x);
  check_launch(launch_amax(m, args.run, args.activate, rows, args.keep_nan, partials.floats(),
                           blocks, out, at.stream),
               "amax");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&amax>())
