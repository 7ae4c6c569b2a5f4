#include "declared/amax.h"

#include "gate_and_up.h"

namespace jitquant {
namespace {

// `run`: 0, or the length of the alternating runs of gate and up columns.
template <class Args>
void amax_of(Call& call, const Args& args, const View& like, const Matrix& m, int64_t run,
             bool activate, Result& amax) {
  const bool rows = by_row(args.granularity);
  float* out = amax.floats("amax", rows ? m.rows : 1, like);
  const Launching at(call, like);
  const int blocks = rows ? 1 : amax_blocks(m, run);
  const Workspace partials(blocks > 1 ? blocks : 0, like);
  check_launch(
      launch_amax(m, run, activate, rows, args.keep_nan, partials.floats(), blocks, out, at.stream),
      Args::kName);
}

void amax_of_tensor(Call& call, const declared::Amax& args, Result& amax) {
  amax_of(call, args, args.x, matrix_of(args.x, "x"), 0, false, amax);
}

void amax_of_gate_and_up(Call& call, const declared::DeinterleaveAmax& args, Result& amax) {
  const GateAndUp in(args.fused, args.interleave);
  amax_of(call, args, args.fused, in.fused, in.run, activates(args.op), amax);
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&amax_of_tensor>(), function<&amax_of_gate_and_up>())
