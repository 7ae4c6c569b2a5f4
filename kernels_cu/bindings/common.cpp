#include "common.h"

#include <limits>
#include <numeric>

#include "text.h"

namespace jitquant {
namespace {

// Whether elements may share memory: some stride is within the reach of all smaller ones.
bool overlaps(const View& t) {
  if (t.numel() != 0 && t.is_contiguous()) return false;
  int64_t reach = 0;
  for (int64_t done = 0;;) {  // strides in ascending order
    int64_t next = std::numeric_limits<int64_t>::max();
    int64_t size = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < t.dim(); ++i) {
      if (t.size(i) <= 1 || t.stride(i) < done || t.stride(i) > next) continue;
      count = t.stride(i) == next ? count + 1 : 1;
      next = t.stride(i);
      size = t.size(i);
    }
    if (count == 0) return false;
    if (count > 1 || next <= reach) return true;
    reach += next * (size - 1);
    done = next + 1;
  }
}

int64_t bytes_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Long:
      return 8;
    case ScalarType::Int:
    case ScalarType::Float:
      return 4;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    default:
      return 1;
  }
}

// The bytes that an argument covers: runs of `run` bytes, a multiple of `step` apart. Empty for an
// empty tensor and for anything that is not a tensor.
struct Region {
  int64_t start = 0, stop = 0, run = 0, step = 0;

  Region() = default;
  explicit Region(const View& t) {
    if (t.numel() == 0) return;
    const int64_t size = bytes_of(t.dtype), last = t.dim() - 1;
    start = reinterpret_cast<int64_t>(t.data);
    stop = start + size;
    run = size;
    for (int64_t i = 0; i <= last; ++i) {
      const int64_t reach = (t.size(i) - 1) * t.stride(i) * size;
      stop += reach;
      if (i == last) run += reach;
      if (i < last && t.size(i) > 1) step = std::gcd(step, t.stride(i) * size);
    }
  }

  // Whether two regions may share a byte. Disjoint columns of one matrix do not.
  bool meets(const Region& other) const {
    if (stop <= other.start || other.stop <= start) return false;
    const int64_t both = std::gcd(step, other.step);
    if (both == 0) return true;
    const int64_t apart = ((other.start - start) % both + both) % both;
    return apart < run || apart + other.run > both;
  }
};

}  // namespace

std::string shape_text(const Shape& shape) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < shape.dim(); ++i) sizes.push_back(shape.size(i));
  View view;
  view.rank = shape.dim();
  view.sizes = sizes.data();
  return text_of({shape_text(view)});
}

void check_own_elements(const View& t, const char* name) {
  if (!overlaps(t)) return;
  fail_with({name, ": expected memory of its own for each element, as it is written, got strides ",
             strides_text(t), ". Pass ", name, ".contiguous() or a slice of a contiguous tensor"});
}

void check_own_memory(const Reached* all, const std::vector<std::string>& names) {
  std::vector<Region> regions(names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    if (all[i].tensor != nullptr) regions[i] = Region(*all[i].tensor);
  }
  for (size_t i = 0; i < names.size(); ++i) {
    if (!all[i].written) continue;
    for (size_t j = 0; j < names.size(); ++j) {
      if (i == j || (all[j].written && j > i) || !regions[i].meets(regions[j])) continue;
      fail_with({names[i],
                 ": expected memory of its own, as it is written, got memory that it shares with ",
                 names[j], ". Pass a copy, such as ", names[i], ".clone()"});
    }
  }
}

Shape scales_shape(const Shape& leading, int64_t groups, std::string_view scale_format,
                   std::string_view scale_layout) {
  if (is(scale_format, "ue8m0_packed")) groups = ceil_div(groups, 4);
  if (is(scale_layout, "row") || is(scale_layout, "linear")) return leading.and_then(groups);
  const int64_t padded = 4 * ceil_div(groups, 4), last = leading.dim() - 1;
  if (is(scale_layout, "row_padded")) return leading.and_then(padded);
  if (swizzled_of(scale_layout)) return Shape().and_then(swizzled_rows(count_of(leading)), padded);
  const int64_t rows = last < 0 ? 1 : leading.size(last);
  return leading.first(last < 0 ? 0 : last)
      .and_then(groups, is(scale_layout, "column") ? rows : 4 * ceil_div(rows, 4));
}

bool evenly_strided(const View& t) {
  std::optional<int64_t> next;
  for (int64_t i = t.dim() - 2; i >= 0; --i) {
    if (t.size(i) == 1) continue;
    if (next && t.stride(i) != *next) return false;
    next = t.size(i) * t.stride(i);
  }
  return true;
}

void fail_on_device(const View& t, const char* name, const View& like) {
  JITQUANT_CHECK(t.is_cuda(), name,
                 ": expected a tensor on cuda, got one on the CPU. Move it with ", name,
                 ".to('cuda')");
  fail_with({name, ": expected a tensor on cuda:", like.get_device_index(),
             ", as the input is, got one on cuda:", t.get_device_index(),
             ". Move one of them with .to()"});
}

const uint8_t* bytes_of(const View& t, const char* name, int64_t alignment) {
  JITQUANT_CHECK(aligned(t.data, alignment), name, ": expected memory aligned to ", alignment,
                 " bytes, got another address. Pass ", name, ".clone()");
  return static_cast<const uint8_t*>(t.data);
}

DType dtype_of(ScalarType dtype, const char* name) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    default:
      fail_with({name, ": expected bfloat16, float16 or float32, got ", dtype_text(dtype)});
  }
  return DType::kFloat32;
}

Matrix rows_of(const View& t, const char* name, int64_t leading, int64_t element_bytes) {
  Matrix m = {};
  m.data = t.const_data_ptr();
  m.cols = t.size(t.dim() - 1);
  m.rows = 1;
  int64_t sizes[3] = {1, 1, 1}, strides[3] = {0, 0, 0};  // innermost first
  int count = 0;
  for (int64_t i = leading - 1; i >= 0; --i) {
    const int64_t size = t.size(i), stride = t.stride(i);
    m.rows *= size;
    if (size == 1) continue;
    if (count > 0 && stride == strides[count - 1] * sizes[count - 1]) {
      sizes[count - 1] *= size;
      continue;
    }
    JITQUANT_CHECK(count < 3, name,
                   ": expected at most three leading dimensions of different strides, got shape ",
                   shape_text(t), " and strides ", strides_text(t), ". Call ", name,
                   ".contiguous() first");
    sizes[count] = size;
    strides[count++] = stride;
  }
  JITQUANT_CHECK(sizes[0] == m.rows || m.rows <= UINT32_MAX, name,
                 ": expected fewer than 2^32 rows that are not at one stride, got shape ",
                 shape_text(t), ". Call ", name, ".contiguous() first");
  m.n2 = sizes[0], m.n1 = sizes[1];
  m.s2 = strides[0], m.s1 = strides[1], m.s0 = strides[2];
  const int64_t bytes = element_bytes;
  m.vector = aligned(m.data, 16) && m.s0 * bytes % 16 == 0 && m.s1 * bytes % 16 == 0 &&
             m.s2 * bytes % 16 == 0;
  return m;
}

Matrix matrix_of(const View& t, const char* name, int64_t leading) {
  const DType dtype = dtype_of(t, name);
  Matrix m = rows_of(t, name, leading, element_size(dtype));
  m.dtype = dtype;
  return m;
}

Matrix matrix_of(const View& t, const char* name) {
  return matrix_of(t, name, t.dim() - 1);
}

CountedMatrix counted_matrix(const View& t, const char* name) {
  const Matrix m = matrix_of(t, name);
  constexpr int64_t kMost = 2147483520;
  JITQUANT_CHECK(m.rows <= kMost && m.cols <= kMost, name, ": expected at most ", kMost,
                 " rows and columns, got shape ", shape_text(t));
  return {m};
}

bool holds_bytes(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Char:
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2:
    case ScalarType::Float8_e8m0fnu:
    case ScalarType::Float4_e2m1fn_x2:
      return true;
    default:
      return false;
  }
}

void check_kind(const View& t, const char* name, ScalarType dtype, const Shape& shape,
                const View& like) {
  JITQUANT_CHECK(t.dtype == dtype || (holds_bytes(dtype) && t.dtype == ScalarType::Byte), name,
                 ": expected ", dtype_text(dtype), " for this call, got ", dtype_text(t.dtype));
  check_device(&t, name, like);
  JITQUANT_CHECK(shape.is_of(t), name, ": expected shape ", shape_text(shape),
                 " for this call, got shape ", shape_text(t));
}

void check_out(const View& t, const char* name, ScalarType dtype, const Shape& shape,
               const View& like) {
  check_kind(t, name, dtype, shape, like);
  JITQUANT_CHECK(t.is_contiguous(), name, ": expected a contiguous buffer, got strides ",
                 strides_text(t));
  JITQUANT_CHECK(aligned(t.data, 8), name,
                 ": expected memory aligned to 8 bytes, got another address");
}

void fail_name(const char* name, std::string_view value,
               std::initializer_list<std::string_view> accepted) {
  std::string names;
  for (const std::string_view one : accepted) {
    names = text_of({names, names.empty() ? "'" : ", '", one, "'"});
  }
  fail_with({name, accepted.size() > 1 ? ": expected one of " : ": expected ", names, ", got '",
             value, "'"});
}

void check_number(const char* name, std::optional<double> value, double least, double most,
                  const char* expected, const char* way_out) {
  JITQUANT_CHECK(!value || (*value >= least && *value <= most), name, ": expected ", expected,
                 ", got ", *value, way_out);
}

void check_dtype(const char* name, ScalarType dtype, std::initializer_list<ScalarType> accepted,
                 const char* expected, const char* way_out) {
  for (const ScalarType one : accepted) {
    if (dtype == one) return;
  }
  fail_with({name, ": expected ", expected, ", got ", dtype_text(dtype), way_out});
}

GlobalScale given_scale(const View& gsa) {
  GlobalScale scale = {};
  scale.gsa = static_cast<const float*>(gsa.const_data_ptr());
  scale.kind = gsa.numel() == 1 ? GlobalScale::kTensor : GlobalScale::kRows;
  if (scale.kind == GlobalScale::kRows) scale.stride = gsa.stride(0);
  return scale;
}

GlobalScale amax_scale(const View& amax, double divisor, const Memory& gsa) {
  const float d = static_cast<float>(divisor);
  if (count_of(gsa.shape) == 1) {
    GlobalScale scale = partials_scale(static_cast<const float*>(amax.const_data_ptr()),
                                       static_cast<int>(amax.numel()), d, gsa.floats());
    scale.kind = GlobalScale::kAmax;
    return scale;
  }
  GlobalScale scale = given_scale(amax);
  scale.kind = GlobalScale::kRowAmax;
  scale.divisor = d;
  scale.gsa_out = gsa.floats();
  return scale;
}

Nvfp4Input nvfp4_input(const View& x_fp4, const View& x_sf, const View& gsa, int64_t dim,
                       std::string_view scale_layout) {
  const bool columns = columns_of(dim);
  const int64_t bytes = x_fp4.size(columns ? 0 : x_fp4.dim() - 1);
  Nvfp4Input in = {};
  in.codes = bytes_of(x_fp4, "x_fp4", 8);
  in.scales = static_cast<const uint8_t*>(x_sf.data);
  in.blocks = bytes / 8;
  in.rows = columns ? x_fp4.size(1) : x_fp4.numel() / bytes;
  in.code_stride = columns ? in.rows : bytes;
  in.scale_stride = columns ? in.rows : in.blocks;
  in.swizzled = swizzled_of(scale_layout);
  const GlobalScale scale = given_scale(gsa);
  in.gsa = scale.gsa;
  in.gsa_stride = scale.stride;
  return in;
}

ColumnVector column_vector(const View& weight) {
  const void* data = weight.const_data_ptr();
  return {data, weight.dtype == ScalarType::Float, aligned(data, 16)};
}

Memory Result::memory(const char* name, const Planned& planned, const View& like) {
  const auto& [dtype, shape] = planned;
  if (nothing_) {
    JITQUANT_CHECK(shape.empty(), name, ": expected a buffer for this call, got None");
    return {nullptr, dtype, shape, nullptr};
  }
  if (!given_) return {make(dtype, shape, like), dtype, shape, nullptr};
  check_out(*given_, name, dtype, shape, like);
  return {given_->data, dtype, shape, nullptr};
}

Memory Result::rows(const char* name, const Planned& planned, const View& like) {
  const auto& [dtype, shape] = planned;
  JITQUANT_CHECK(!nothing_, name, ": expected a buffer for this call, got None");
  if (!given_) return {make(dtype, shape, like), dtype, shape, nullptr};
  check_kind(*given_, name, dtype, shape, like);
  const int64_t last = shape.dim() - 1;
  JITQUANT_CHECK(shape.size(last) == 1 || given_->stride(last) == 1, name,
                 ": expected a contiguous last dimension (stride 1), got strides ",
                 strides_text(*given_));
  check_own_elements(*given_, name);
  return {given_->data, dtype, shape, &*given_};
}

Matrix rows_of(const Memory& data, const char* name) {
  if (data.rows != nullptr) return rows_of(*data.rows, name, data.shape.dim() - 1, 1);
  Matrix m = {};
  m.data = data.data;
  m.rows = data.row_count();
  m.cols = m.s2 = data.cols();
  m.n1 = 1;
  m.n2 = m.rows;
  m.vector = aligned(m.data, 16) && m.cols % 16 == 0;
  return m;
}

}  // namespace jitquant
