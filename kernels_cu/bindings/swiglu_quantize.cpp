#include "fp8.h"
#include "gate_and_up.h"

namespace jitquant {

bool swiglu_fp8_partials(const Matrix& fused, const Fp8Scale& scale);
cudaError_t launch_swiglu_fp8(const Matrix& fused, int64_t run, const Fp8Scale& scale,
                              const ElementRows& out, cudaStream_t stream);

namespace {

void swiglu_quantize_fp8(Call& call, const View& fused, std::optional<View> scale, ScalarType dtype,
                         std::optional<double> scale_value, std::optional<double> scale_ub,
                         std::string_view granularity, int64_t interleave, bool with_amax,
                         Result& data, Result& scale_inv, Result& amax) {
  const GateAndUp in(fused, interleave);
  Fp8Arguments a = Fp8Arguments::of(fused, in.fused.rows, scale, dtype, scale_value, scale_ub,
                                    granularity, with_amax, false);
  const ElementRows out =
      a.results(data, scale_inv, amax, Shape::of(fused, fused.dim() - 1, in.cols), fused);
  const Launching at(call, fused);
  const Workspace partials(swiglu_fp8_partials(in.fused, a.scale) ? kMaxPartials : 0, fused);
  a.scale.partials = partials.floats();
  check_launch(launch_swiglu_fp8(in.fused, in.run, a.scale, out, at.stream), "swiglu_quantize_fp8");
}

void from_amax(Call& call, const View& fused, const View& amax, ScalarType dtype,
               std::optional<double> scale_ub, std::string_view granularity, int64_t interleave,
               Result& data, Result& scale_inv) {
  const GateAndUp in(fused, interleave);
  Fp8FromAmax a = Fp8FromAmax::of(fused, in.fused.rows, amax, dtype, scale_ub, granularity);
  const ElementRows out =
      a.results(data, scale_inv, Shape::of(fused, fused.dim() - 1, in.cols), fused);
  const Launching at(call, fused);
  check_launch(launch_swiglu_fp8(in.fused, in.run, a.scale, out, at.stream), "swiglu_quantize_fp8");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(
    function<&swiglu_quantize_fp8>(
        "swiglu_quantize_fp8",
        "Tensor fused, Tensor? scale=None, *, ScalarType dtype, float? scale_value=None, "
        "float? scale_ub=None, str granularity='row', int interleave=0, bool with_amax=True",
        {"data", "scale_inv", "amax"}),
    function<&from_amax>("swiglu_quantize_fp8_from_amax",
                         "Tensor fused, Tensor amax, *, ScalarType dtype, float? scale_ub=None, "
                         "str granularity='row', int interleave=0",
                         {"data", "scale_inv"}))
