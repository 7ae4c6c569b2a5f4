#include "common.h"

namespace jitquant {

int weight_amax_partials(const Matrix& w);
cudaError_t launch_weight_amax_partials(const Matrix& w, float* partials, int count,
                                        cudaStream_t stream);
cudaError_t launch_quantize_weight_nvfp4(const Matrix& w, const WeightShape& shape,
                                         const GlobalScale& scale, Nvfp4Recipe recipe,
                                         const Nvfp4Output& out, cudaStream_t stream);

namespace {

constexpr const char* kName = "quantize_weight_nvfp4";

struct Weight {
  Matrix matrix;
  WeightShape shape;
  PackedShape packed;

  static Weight of(const Tensor& w, const std::string& block, int64_t dim, bool swizzled) {
    check_cuda(w, "w");
    JITQUANT_CHECK(w.dim() == 2, "w must have two dimensions; its shape is ", shape_text(w));
    JITQUANT_CHECK(block == "1x16" || block == "16x16", "block must be '1x16' or '16x16', not '",
                   block, "'");
    JITQUANT_CHECK(dim >= -2 && dim <= 1, "dim must be -1 or 0, not ", dim);
    const bool columns = dim == 0 || dim == -2;
    JITQUANT_CHECK(!(columns && swizzled), "scale_layout must be 'linear' where dim is 0");
    const Matrix m = matrix_of(w, "w");
    const int64_t stride = w.stride(0);
    const bool tile = block == "16x16";
    if (!columns) {
      return {m, {m.cols, stride, 1, false, tile}, PackedShape({m.rows}, m.rows, m.cols, swizzled)};
    }
    PackedShape packed({}, m.cols, m.rows, false);
    packed.codes = {packed.blocks * 8, m.cols};
    packed.scales = {packed.blocks, m.cols};
    return {m, {m.rows, 1, stride, true, tile}, packed};
  }
};

void launch_all(const Tensor& w, const Weight& in, const GlobalScale* given, double divisor,
                const Nvfp4Output& out, float* gsa_out, const std::string& recipe) {
  const Nvfp4Recipe r = recipe_of(recipe);
  const float d = divisor_of(divisor);
  const DeviceGuard guard(w.get_device_index());
  const cudaStream_t stream = current_stream(w);
  if (given != nullptr) {
    check_launch(launch_quantize_weight_nvfp4(in.matrix, in.shape, *given, r, out, stream), kName);
    return;
  }
  const int count = weight_amax_partials(in.matrix);
  const Tensor partials = empty_floats(count, w);
  check_launch(launch_weight_amax_partials(in.matrix, floats(partials), count, stream), kName);
  const GlobalScale scale = partial_scale(partials, d, gsa_out);
  check_launch(launch_quantize_weight_nvfp4(in.matrix, in.shape, scale, r, out, stream), kName);
}

void quantize_weight_nvfp4_out(const Tensor& w, double divisor, std::optional<double> global_scale,
                               const std::string& block, int64_t dim, const std::string& recipe,
                               const std::string& scale_layout, const Tensor& x_fp4,
                               const Tensor& x_sf, const Tensor& gsa) {
  const Weight in = Weight::of(w, block, dim, swizzled_of(scale_layout));
  const Nvfp4Output out = in.packed.output(x_fp4, x_sf, w);
  float* gsa_out = float_out(gsa, "gsa", 1, w);
  const GlobalScale value = value_scale(global_scale.value_or(0.0), gsa_out);
  launch_all(w, in, global_scale ? &value : nullptr, divisor, out, gsa_out, recipe);
}

std::tuple<Tensor, Tensor, Tensor> quantize_weight_nvfp4(const Tensor& w, double divisor,
                                                         std::optional<double> global_scale,
                                                         const std::string& block, int64_t dim,
                                                         const std::string& recipe,
                                                         const std::string& scale_layout) {
  const Weight in = Weight::of(w, block, dim, swizzled_of(scale_layout));
  Tensor x_fp4 = in.packed.empty_codes(w), x_sf = in.packed.empty_scales(w);
  Tensor gsa = empty_floats(1, w);
  quantize_weight_nvfp4_out(w, divisor, global_scale, block, dim, recipe, scale_layout, x_fp4, x_sf,
                            gsa);
  return {x_fp4, x_sf, gsa};
}

void from_buffer_out(const Tensor& w, const Tensor& gsa, const std::string& block, int64_t dim,
                     const std::string& recipe, const std::string& scale_layout,
                     const Tensor& x_fp4, const Tensor& x_sf) {
  const Weight in = Weight::of(w, block, dim, swizzled_of(scale_layout));
  const Nvfp4Output out = in.packed.output(x_fp4, x_sf, w);
  const GlobalScale given = given_scale(gsa, "gsa", 1, w);
  launch_all(w, in, &given, 1.0, out, nullptr, recipe);
}

std::tuple<Tensor, Tensor> from_buffer(const Tensor& w, const Tensor& gsa, const std::string& block,
                                       int64_t dim, const std::string& recipe,
                                       const std::string& scale_layout) {
  const Weight in = Weight::of(w, block, dim, swizzled_of(scale_layout));
  Tensor x_fp4 = in.packed.empty_codes(w), x_sf = in.packed.empty_scales(w);
  from_buffer_out(w, gsa, block, dim, recipe, scale_layout, x_fp4, x_sf);
  return {x_fp4, x_sf};
}

}  // namespace
}  // namespace jitquant

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def(
      "quantize_weight_nvfp4(Tensor w, float divisor=2688., *, float? global_scale=None, "
      "str block='1x16', int dim=-1, str recipe='te', str scale_layout='linear') "
      "-> (Tensor x_fp4, Tensor x_sf, Tensor gsa)");
  m.def(
      "quantize_weight_nvfp4.out(Tensor w, float divisor=2688., *, float? global_scale=None, "
      "str block='1x16', int dim=-1, str recipe='te', str scale_layout='linear', "
      "Tensor(a!) x_fp4, Tensor(b!) x_sf, Tensor(c!) gsa) -> ()");
  m.def(
      "quantize_weight_nvfp4_from_buffer(Tensor w, Tensor gsa, *, str block='1x16', int dim=-1, "
      "str recipe='te', str scale_layout='linear') -> (Tensor x_fp4, Tensor x_sf)");
  m.def(
      "quantize_weight_nvfp4_from_buffer.out(Tensor w, Tensor gsa, *, str block='1x16', "
      "int dim=-1, str recipe='te', str scale_layout='linear', Tensor(a!) x_fp4, "
      "Tensor(b!) x_sf) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) {
  m.impl("quantize_weight_nvfp4", TORCH_BOX(&jitquant::quantize_weight_nvfp4));
  m.impl("quantize_weight_nvfp4.out", TORCH_BOX(&jitquant::quantize_weight_nvfp4_out));
  m.impl("quantize_weight_nvfp4_from_buffer", TORCH_BOX(&jitquant::from_buffer));
  m.impl("quantize_weight_nvfp4_from_buffer.out", TORCH_BOX(&jitquant::from_buffer_out));
}
