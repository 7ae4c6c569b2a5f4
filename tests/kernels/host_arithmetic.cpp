// The device arithmetic, compiled by the host compiler, behind functions that ctypes can call.
#include "jitquant/nvfp4.cuh"

using namespace jitquant;

extern "C" {

void encode_e2m1(const float* x, uint8_t* code, int64_t n) {
  for (int64_t i = 0; i < n; ++i) code[i] = static_cast<uint8_t>(e2m1_from_float(x[i]));
}

void decode_e2m1(const uint8_t* code, float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = float_from_e2m1(code[i]);
}

void encode_e4m3(const float* x, uint8_t* code, int64_t n) {
  for (int64_t i = 0; i < n; ++i) code[i] = e4m3_from_float(x[i]);
}

void decode_e4m3(const uint8_t* code, float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = float_from_e4m3(code[i]);
}

// Every fp32 whose bits are in [first, last]: how many codes differ from the nearest E2M1, ties to
// even, found in double precision.
int64_t count_wrong_e2m1(uint32_t first, uint32_t last) {
  const double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  int64_t wrong = 0;
  for (uint64_t bits = first; bits <= last; ++bits) {
    const float x = bits_float(static_cast<uint32_t>(bits));
    // Beyond 8 the nearest is 6, and a difference of doubles would no longer tell the values apart.
    const double a = std::isnan(x) ? x : std::fmin(std::fabs(static_cast<double>(x)), 8.0);
    uint32_t best = 0;
    for (uint32_t c = 1; c < 8; ++c) {
      const double was = std::fabs(a - values[best]), is = std::fabs(a - values[c]);
      if (is < was || (is == was && c % 2 == 0)) best = c;
    }
    if (std::isnan(a)) best = 0;
    wrong += e2m1_from_float(x) != (best | ((bits >> 31) << 3));
  }
  return wrong;
}

// blocks x 16 values; gsa given (mode 0), or the amax of the tensor and a divisor (mode 1).
void quantize_blocks(const float* x, int64_t blocks, int mode, float value, float divisor,
                     int recipe, uint8_t* codes, uint8_t* scales) {
  const Nvfp4Encoding e =
      mode == 0 ? nvfp4_encoding_from_gsa(value) : nvfp4_encoding_from_amax(value, divisor);
  for (int64_t i = 0; i < blocks; ++i) {
    float v[16];
    for (int j = 0; j < 16; ++j) v[j] = x[16 * i + j];
    const Nvfp4Codes out =
        nvfp4_quantize_block(v, nvfp4_block_amax(v), e, static_cast<Nvfp4Recipe>(recipe));
    for (int j = 0; j < 4; ++j) {
      codes[8 * i + j] = static_cast<uint8_t>(out.low >> (8 * j));
      codes[8 * i + 4 + j] = static_cast<uint8_t>(out.high >> (8 * j));
    }
    scales[i] = out.scale;
  }
}

float amax_ignoring_nan(const float* x, int64_t n) {
  float a = 0.0f;
  for (int64_t i = 0; i < n; ++i) a = amax_ignore_nan(a, x[i]);
  return a;
}

int64_t swizzled_offset(int64_t row, int64_t block, int64_t padded_blocks) {
  return swizzle_128x4(row, block, padded_blocks);
}

}  // extern "C"
