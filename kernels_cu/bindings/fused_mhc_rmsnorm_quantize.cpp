#include "norm.h"

namespace jitquant {

int mhc_amax_partials(const HyperConnection& mix);
cudaError_t launch_mhc_rows(const HyperConnection& mix, const ColumnVector& weight, float eps,
                            float* inv_rms, const RowScale& scale, int partials, Nvfp4Recipe recipe,
                            const Nvfp4Output& out, cudaStream_t stream);
cudaError_t launch_mhc_quantize(const HyperConnection& mix, const ColumnVector& weight,
                                float* inv_rms, const GlobalScale& scale, Nvfp4Recipe recipe,
                                const Nvfp4Output& out, cudaStream_t stream);

namespace {

constexpr int64_t kMaxStreams = 8;

// X is (..., H, N), A (..., H).
HyperConnection mix_of(const Tensor& X, const Tensor& A) {
  check_cuda(X, "X");
  check_cuda(A, "A", &X);
  JITQUANT_CHECK(X.dim() >= 2, "X must have shape (..., n_hc, N), not ", shape_text(X));
  const int64_t leading = X.dim() - 2;
  HyperConnection mix = {};
  mix.x = matrix_of(X, "X", leading);
  const int64_t streams = X.size(leading);
  JITQUANT_CHECK(streams >= 1 && streams <= kMaxStreams, "n_hc must be from 1 to ", kMaxStreams,
                 ", not ", streams);
  mix.streams = static_cast<int>(streams);
  mix.stream_stride = X.stride(leading);
  mix.x.vector = mix.x.vector && mix.stream_stride * element_size(mix.x.dtype) % 16 == 0;

  bool same = A.dim() == leading + 1;
  for (int64_t i = 0; same && i <= leading; ++i) same = A.size(i) == X.size(i);
  JITQUANT_CHECK(same, "A must have X's shape without its last dimension, but X is ", shape_text(X),
                 " and A ", shape_text(A));
  const DType dtype = dtype_of(A, "A");
  JITQUANT_CHECK(dtype == mix.x.dtype || dtype == DType::kFloat32,
                 "A must have X's dtype, or float32");
  JITQUANT_CHECK(A.is_contiguous(), "A must be contiguous; pass A.contiguous()");
  mix.weights = A.const_data_ptr();
  mix.weights_fp32 = dtype == DType::kFloat32;
  mix.weight_row_stride = streams;
  mix.weight_stride = 1;
  return mix;
}

PackedShape shape_of(const Tensor& X, const HyperConnection& mix, const std::string& scale_layout) {
  return PackedShape(leading_sizes(X, X.dim() - 2), mix.x.rows, mix.x.cols,
                     swizzled_of(scale_layout));
}

void run(const Tensor& X, const Tensor& A, const Tensor& weight, const NormArguments& a,
         const Tensor* given, const std::string& scale_layout, const Tensor& x_fp4,
         const Tensor& x_sf, const Tensor* gsa, const Tensor& inv_rms) {
  const HyperConnection mix = mix_of(X, A);
  const ColumnVector w = column_vector(weight, mix.x, X);
  const int64_t rows = mix.x.rows;
  const Nvfp4Output out = shape_of(X, mix, scale_layout).output(x_fp4, x_sf, X);
  float* inv = float_out(inv_rms, "inv_rms", rows, X);
  float* gsa_out =
      gsa == nullptr ? nullptr : float_out(*gsa, "gsa", a.rows && !a.global_scale ? rows : 1, X);
  const DeviceGuard guard(X.get_device_index());
  const cudaStream_t stream = current_stream(X);
  launch_norm(
      a, given, rows, gsa_out, X, "mhc_rmsnorm_quantize_nvfp4",
      [&](const RowScale& scale, int partials) {
        return launch_mhc_rows(mix, w, a.eps, inv, scale, partials, a.recipe, out, stream);
      },
      [&](const GlobalScale& scale) {
        return launch_mhc_quantize(mix, w, inv, scale, a.recipe, out, stream);
      },
      [&] { return mhc_amax_partials(mix); });
}

void mhc_rmsnorm_quantize_nvfp4_out(const Tensor& X, const Tensor& A, const Tensor& weight,
                                    double eps, double divisor, std::optional<double> global_scale,
                                    const std::string& granularity, const std::string& recipe,
                                    const std::string& scale_layout, const Tensor& x_fp4,
                                    const Tensor& x_sf, const Tensor& gsa, const Tensor& inv_rms) {
  const NormArguments a = {eps_of(eps), global_scale, divisor_of(divisor), by_row(granularity),
                           recipe_of(recipe)};
  run(X, A, weight, a, nullptr, scale_layout, x_fp4, x_sf, &gsa, inv_rms);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> mhc_rmsnorm_quantize_nvfp4(
    const Tensor& X, const Tensor& A, const Tensor& weight, double eps, double divisor,
    std::optional<double> global_scale, const std::string& granularity, const std::string& recipe,
    const std::string& scale_layout) {
  const HyperConnection mix = mix_of(X, A);
  const PackedShape shape = shape_of(X, mix, scale_layout);
  Tensor x_fp4 = shape.empty_codes(X), x_sf = shape.empty_scales(X);
  Tensor gsa = empty_floats(gsa_count(granularity, global_scale, mix.x.rows), X);
  Tensor inv_rms = empty_floats(mix.x.rows, X);
  mhc_rmsnorm_quantize_nvfp4_out(X, A, weight, eps, divisor, global_scale, granularity, recipe,
                                 scale_layout, x_fp4, x_sf, gsa, inv_rms);
  return {x_fp4, x_sf, gsa, inv_rms};
}

void mhc_from_buffer_out(const Tensor& X, const Tensor& A, const Tensor& weight, const Tensor& gsa,
                         double eps, const std::string& recipe, const std::string& scale_layout,
                         const Tensor& x_fp4, const Tensor& x_sf, const Tensor& inv_rms) {
  NormArguments a = {eps_of(eps)};
  a.recipe = recipe_of(recipe);
  run(X, A, weight, a, &gsa, scale_layout, x_fp4, x_sf, nullptr, inv_rms);
}

std::tuple<Tensor, Tensor, Tensor> mhc_from_buffer(const Tensor& X, const Tensor& A,
                                                   const Tensor& weight, const Tensor& gsa,
                                                   double eps, const std::string& recipe,
                                                   const std::string& scale_layout) {
  const HyperConnection mix = mix_of(X, A);
  const PackedShape shape = shape_of(X, mix, scale_layout);
  Tensor x_fp4 = shape.empty_codes(X), x_sf = shape.empty_scales(X);
  Tensor inv_rms = empty_floats(mix.x.rows, X);
  mhc_from_buffer_out(X, A, weight, gsa, eps, recipe, scale_layout, x_fp4, x_sf, inv_rms);
  return {x_fp4, x_sf, inv_rms};
}

}  // namespace
}  // namespace jitquant

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def(
      "mhc_rmsnorm_quantize_nvfp4(Tensor X, Tensor A, Tensor weight, float eps=1e-6, "
      "float divisor=2688., *, float? global_scale=None, str granularity='row', "
      "str recipe='te', str scale_layout='linear') "
      "-> (Tensor x_fp4, Tensor x_sf, Tensor gsa, Tensor inv_rms)");
  m.def(
      "mhc_rmsnorm_quantize_nvfp4.out(Tensor X, Tensor A, Tensor weight, float eps=1e-6, "
      "float divisor=2688., *, float? global_scale=None, str granularity='row', "
      "str recipe='te', str scale_layout='linear', Tensor(a!) x_fp4, Tensor(b!) x_sf, "
      "Tensor(c!) gsa, Tensor(d!) inv_rms) -> ()");
  m.def(
      "mhc_rmsnorm_quantize_nvfp4_from_buffer(Tensor X, Tensor A, Tensor weight, Tensor gsa, "
      "float eps=1e-6, *, str recipe='te', str scale_layout='linear') "
      "-> (Tensor x_fp4, Tensor x_sf, Tensor inv_rms)");
  m.def(
      "mhc_rmsnorm_quantize_nvfp4_from_buffer.out(Tensor X, Tensor A, Tensor weight, Tensor gsa, "
      "float eps=1e-6, *, str recipe='te', str scale_layout='linear', Tensor(a!) x_fp4, "
      "Tensor(b!) x_sf, Tensor(c!) inv_rms) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) {
  m.impl("mhc_rmsnorm_quantize_nvfp4", TORCH_BOX(&jitquant::mhc_rmsnorm_quantize_nvfp4));
  m.impl("mhc_rmsnorm_quantize_nvfp4.out", TORCH_BOX(&jitquant::mhc_rmsnorm_quantize_nvfp4_out));
  m.impl("mhc_rmsnorm_quantize_nvfp4_from_buffer", TORCH_BOX(&jitquant::mhc_from_buffer));
  m.impl("mhc_rmsnorm_quantize_nvfp4_from_buffer.out", TORCH_BOX(&jitquant::mhc_from_buffer_out));
}
