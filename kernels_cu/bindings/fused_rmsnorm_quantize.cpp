#include "norm.h"

namespace jitquant {

int rmsnorm_amax_partials(const Matrix& x);
cudaError_t launch_rmsnorm_rows(const Matrix& x, const Matrix* residual, const ColumnVector& weight,
                                float eps, float* inv_rms, const RowScale& scale, int partials,
                                Nvfp4Recipe recipe, const Nvfp4Output& out, cudaStream_t stream);
cudaError_t launch_rmsnorm_quantize(const Matrix& x, const Matrix* residual,
                                    const ColumnVector& weight, float* inv_rms,
                                    const GlobalScale& scale, Nvfp4Recipe recipe,
                                    const Nvfp4Output& out, cudaStream_t stream);

namespace {

PackedShape shape_of(const Tensor& x, const Matrix& m, const std::string& scale_layout) {
  return PackedShape(leading_sizes(x, x.dim() - 1), m.rows, m.cols, swizzled_of(scale_layout));
}

void run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& residual,
         const NormArguments& a, const Tensor* given, const std::string& scale_layout,
         const Tensor& x_fp4, const Tensor& x_sf, const Tensor* gsa, const Tensor& inv_rms) {
  const Matrix m = matrix_of(x, "x");
  const ColumnVector w = column_vector(weight, m, x);
  Matrix r = {};
  if (residual) {
    check_cuda(*residual, "residual", &x);
    bool same = residual->dim() == x.dim() && residual->scalar_type() == x.scalar_type();
    for (int64_t i = 0; same && i < x.dim(); ++i) same = residual->size(i) == x.size(i);
    JITQUANT_CHECK(same, "residual must have x's shape ", shape_text(x),
                   " and dtype; its shape is ", shape_text(*residual));
    r = matrix_of(*residual, "residual");
  }
  const Matrix* residual_rows = residual ? &r : nullptr;
  const Nvfp4Output out = shape_of(x, m, scale_layout).output(x_fp4, x_sf, x);
  float* inv = float_out(inv_rms, "inv_rms", m.rows, x);
  float* gsa_out =
      gsa == nullptr ? nullptr : float_out(*gsa, "gsa", a.rows && !a.global_scale ? m.rows : 1, x);
  const DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  launch_norm(
      a, given, m.rows, gsa_out, x, "rmsnorm_quantize_nvfp4",
      [&](const RowScale& scale, int partials) {
        return launch_rmsnorm_rows(m, residual_rows, w, a.eps, inv, scale, partials, a.recipe, out,
                                   stream);
      },
      [&](const GlobalScale& scale) {
        return launch_rmsnorm_quantize(m, residual_rows, w, inv, scale, a.recipe, out, stream);
      },
      [&] { return rmsnorm_amax_partials(m); });
}

void rmsnorm_quantize_nvfp4_out(const Tensor& x, const Tensor& weight, double eps, double divisor,
                                std::optional<Tensor> residual, std::optional<double> global_scale,
                                const std::string& granularity, const std::string& recipe,
                                const std::string& scale_layout, const Tensor& x_fp4,
                                const Tensor& x_sf, const Tensor& gsa, const Tensor& inv_rms) {
  const NormArguments a = {eps_of(eps), global_scale, divisor_of(divisor), by_row(granularity),
                           recipe_of(recipe)};
  run(x, weight, residual, a, nullptr, scale_layout, x_fp4, x_sf, &gsa, inv_rms);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> rmsnorm_quantize_nvfp4(
    const Tensor& x, const Tensor& weight, double eps, double divisor,
    std::optional<Tensor> residual, std::optional<double> global_scale,
    const std::string& granularity, const std::string& recipe, const std::string& scale_layout) {
  const Matrix m = matrix_of(x, "x");
  const PackedShape shape = shape_of(x, m, scale_layout);
  Tensor x_fp4 = shape.empty_codes(x), x_sf = shape.empty_scales(x);
  Tensor gsa = empty_floats(gsa_count(granularity, global_scale, m.rows), x);
  Tensor inv_rms = empty_floats(m.rows, x);
  rmsnorm_quantize_nvfp4_out(x, weight, eps, divisor, residual, global_scale, granularity, recipe,
                             scale_layout, x_fp4, x_sf, gsa, inv_rms);
  return {x_fp4, x_sf, gsa, inv_rms};
}

void rmsnorm_from_buffer_out(const Tensor& x, const Tensor& weight, const Tensor& gsa, double eps,
                             std::optional<Tensor> residual, const std::string& recipe,
                             const std::string& scale_layout, const Tensor& x_fp4,
                             const Tensor& x_sf, const Tensor& inv_rms) {
  NormArguments a = {eps_of(eps)};
  a.recipe = recipe_of(recipe);
  run(x, weight, residual, a, &gsa, scale_layout, x_fp4, x_sf, nullptr, inv_rms);
}

std::tuple<Tensor, Tensor, Tensor> rmsnorm_from_buffer(const Tensor& x, const Tensor& weight,
                                                       const Tensor& gsa, double eps,
                                                       std::optional<Tensor> residual,
                                                       const std::string& recipe,
                                                       const std::string& scale_layout) {
  const Matrix m = matrix_of(x, "x");
  const PackedShape shape = shape_of(x, m, scale_layout);
  Tensor x_fp4 = shape.empty_codes(x), x_sf = shape.empty_scales(x);
  Tensor inv_rms = empty_floats(m.rows, x);
  rmsnorm_from_buffer_out(x, weight, gsa, eps, residual, recipe, scale_layout, x_fp4, x_sf,
                          inv_rms);
  return {x_fp4, x_sf, inv_rms};
}

}  // namespace
}  // namespace jitquant

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def(
      "rmsnorm_quantize_nvfp4(Tensor x, Tensor weight, float eps=1e-6, float divisor=2688., *, "
      "Tensor(a!)? residual=None, float? global_scale=None, str granularity='row', "
      "str recipe='te', str scale_layout='linear') "
      "-> (Tensor x_fp4, Tensor x_sf, Tensor gsa, Tensor inv_rms)");
  m.def(
      "rmsnorm_quantize_nvfp4.out(Tensor x, Tensor weight, float eps=1e-6, float divisor=2688., *, "
      "Tensor(a!)? residual=None, float? global_scale=None, str granularity='row', "
      "str recipe='te', str scale_layout='linear', Tensor(b!) x_fp4, Tensor(c!) x_sf, "
      "Tensor(d!) gsa, Tensor(e!) inv_rms) -> ()");
  m.def(
      "rmsnorm_quantize_nvfp4_from_buffer(Tensor x, Tensor weight, Tensor gsa, float eps=1e-6, *, "
      "Tensor(a!)? residual=None, str recipe='te', str scale_layout='linear') "
      "-> (Tensor x_fp4, Tensor x_sf, Tensor inv_rms)");
  m.def(
      "rmsnorm_quantize_nvfp4_from_buffer.out(Tensor x, Tensor weight, Tensor gsa, "
      "float eps=1e-6, *, Tensor(a!)? residual=None, str recipe='te', "
      "str scale_layout='linear', Tensor(b!) x_fp4, Tensor(c!) x_sf, Tensor(d!) inv_rms) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) {
  m.impl("rmsnorm_quantize_nvfp4", TORCH_BOX(&jitquant::rmsnorm_quantize_nvfp4));
  m.impl("rmsnorm_quantize_nvfp4.out", TORCH_BOX(&jitquant::rmsnorm_quantize_nvfp4_out));
  m.impl("rmsnorm_quantize_nvfp4_from_buffer", TORCH_BOX(&jitquant::rmsnorm_from_buffer));
  m.impl("rmsnorm_quantize_nvfp4_from_buffer.out", TORCH_BOX(&jitquant::rmsnorm_from_buffer_out));
}
