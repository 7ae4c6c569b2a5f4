// y = x W^T for up to 16 rows of x and a weight in NVFP4, which is read once, as it is stored.
//
//   block            kWarps warps, as (warps along k, row tiles of W side by side)
//   tile             16 rows of W by all of k; a block takes every gridDim.x-th of them
//   segment          256 of k: what a stage of a warp's ring of asynchronous copies holds, 16 rows
//                    by 128 bytes of codes and 16 scales
//   of x             what a warp multiplies with stays in its registers: 512 of k for up to 8 rows,
//                    256 for 16
//   pass             as much of k as the warps of a block have in registers
//
// Three ways to multiply: with up to two rows of x (not in fp16) a column of the matrix product is
// a block of 16 codes and the block's scale comes after it, in fp32; with up to 8 or 16 rows a
// column is a row of x, and codes are multiplied by their scales before, which is exact in bf16 and
// fp16.
//
// Sums are in fp32, in an order that depends on k, the way and the device's shared memory alone:
// pairs of segments by the tensor core (16 rows: segment by segment), pairs of a span (at most 4096
// of k), spans. So a row's result does not depend on how many rows there are beside it, within a
// way.
#include "jitquant/mma.cuh"
#include "jitquant/nvfp4_common.cuh"
#include "jitquant/nvfp4_linear.h"

namespace jitquant {

constexpr int kSegment = 256, kTile = 16, kStage = kTile * (kSegment / 2 + kSegment / 16);
constexpr int kScalesAt = kTile * kSegment / 2;
constexpr int kMostWarps = 16;
constexpr int kFewStages = 3, kManyStages = 5;  // odd, as segments take turns
constexpr int kStaged = 8 * kSegment * 2;       // bytes of x that a warp turns round at once
constexpr int kNoRow = 1 << 30;
constexpr int kPitch = 20;  // floats from a column of a warp's sums to the next

enum class LinearWay : int { kTwoRows, kEightRows, kSixteenRows };

template <LinearWay kWay>
struct WayTraits {
  static constexpr bool kAfter = kWay == LinearWay::kTwoRows;  // scales come after the product
  static constexpr int kColumns = kWay == LinearWay::kSixteenRows ? 2 : 1;  // of 8 rows of x
  static constexpr int kSegments = kWay == LinearWay::kSixteenRows ? 1 : 2;
  static constexpr int kRows = kAfter ? 2 : 8 * kColumns;
  static constexpr int kSums = kRows * kPitch;  // floats of a warp and a tile
};

// Elements of T; or codes with scales, whose values are exact in bf16.
template <class T>
struct LinearInput {
  using Operand = T;
  static constexpr bool kCodes = false;
};
struct CodeInput;
template <>
struct LinearInput<CodeInput> {
  using Operand = Bf16;
  static constexpr bool kCodes = true;
};

struct LinearPlan {
  int passes, span_pairs, spans;  // pairs of segments in a span, spans in a pass
  int stages;
  int flush, hold;  // tiles whose sums a block has before it adds them up, and from pass to pass
  int kept_at;      // floats from the sums to those kept from pass to pass
};

// An address in shared memory, as a number of 32 bits: what pointers would be worked out from again
// at each use.
#if defined(__CUDA_ARCH__)
using Shared = uint32_t;
__device__ __forceinline__ Shared shared_at(void* p) {
  return kept(static_cast<uint32_t>(__cvta_generic_to_shared(p)));
}
__device__ __forceinline__ void copy_16(Shared to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}
__device__ __forceinline__ void load_16(Shared from, uint32_t* words) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ uint32_t load_4(Shared from) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}
__device__ __forceinline__ void store_16(Shared to, const uint32_t* words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}
__device__ __forceinline__ void store_4(Shared to, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
#else
using Shared = uint8_t*;
__device__ __forceinline__ Shared shared_at(void* p) {
  return static_cast<Shared>(p);
}
__device__ __forceinline__ void copy_16(Shared to, const void* from) {
  __pipeline_memcpy_async(to, from, 16);
}
__device__ __forceinline__ void load_16(Shared from, uint32_t* words) {
  load_words<4>(from, words);
}
__device__ __forceinline__ uint32_t load_4(Shared from) {
  return *reinterpret_cast<const uint32_t*>(from);
}
__device__ __forceinline__ void store_16(Shared to, const uint32_t* words) {
  store_words<4>(to, words);
}
__device__ __forceinline__ void store_4(Shared to, uint32_t word) {
  *reinterpret_cast<uint32_t*>(to) = word;
}
#endif

// Which piece of 16 bytes of a row of codes lies where, so that the 8 lanes of a quarter of a load
// are in different banks.
__device__ __forceinline__ int code_piece(int row, int piece) {
  return piece ^ (row & 1);
}
// The same of a row of x, 512 bytes.
__device__ __forceinline__ int x_piece(int row, int piece) {
  return piece ^ ((row + 2 * (piece >> 3)) & 7);
}

// Rows of W from a tile of a block to its next one.
__device__ __forceinline__ int row_step() {
  return gridDim.x * blockDim.y * kTile;
}
template <class Way>
__device__ __forceinline__ int first_column() {
  return (threadIdx.x >> 5) * Way::kSegments * kSegment;
}
template <class Way>
__device__ __forceinline__ int column_step() {
  return (blockDim.x >> 5) * Way::kSegments * kSegment;
}

// The stages of a warp in the order in which it multiplies: `hold` tiles by a pass of k, by its
// segments, the same by the next pass, then the next tiles.
template <class Way, bool kAligned>
class WeightStream {
 public:
  __device__ __forceinline__ WeightStream(const Nvfp4Weight& w, int hold)
      : w_(w), hold_(hold), k_(first_column<Way>()) {
    move_to((blockIdx.x * blockDim.y + threadIdx.y) * kTile);
    end_ = row_ + hold_ * row_step();
  }

  // Begins to copy what comes next, segment kWhich of its tile, to `stage`; the group of
  // copies may be empty.
  template <int kWhich>
  __device__ __forceinline__ void next(Shared stage) {
    const int begin = k_ + kWhich * kSegment;
    if (row_ < w_.rows && begin < w_.cols) {
      if constexpr (kAligned) {
        const uint8_t* from = codes_ + kWhich * (kSegment / 2);
        const Shared to = stage + lane_row() * 128 + code_piece(lane_row(), lane_piece()) * 16;
        const bool whole = row_ + kTile <= w_.rows;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (whole || row_ + 4 * i + lane_row() < w_.rows) copy_16(to + i * 512, from);
          from += static_cast<int64_t>(w_.cols) * 2;  // four rows on
        }
        if (lane() < kTile && (whole || row_ + lane() < w_.rows)) {
          copy_16(stage + kScalesAt + lane() * 16, scales_ + kWhich * (kSegment / 16));
        }
      } else {
        load_parts(stage, begin);
      }
    }
    __pipeline_commit();
    if constexpr (kWhich + 1 == Way::kSegments) advance();
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
  static __device__ __forceinline__ int lane_row() { return lane() >> 3; }
  static __device__ __forceinline__ int lane_piece() { return lane() & 7; }
  __device__ __forceinline__ const uint8_t* codes_at(int row, int k) const {
    return w_.codes + static_cast<int64_t>(row) * (w_.cols / 2) + k / 2;
  }
  __device__ __forceinline__ const uint8_t* scales_at(int row, int k) const {
    return w_.scales + static_cast<int64_t>(row) * (w_.cols / 16) + k / 16;
  }

  __device__ __forceinline__ void move_to(int row) {
    row_ = row;
    codes_ = codes_at(row + lane_row(), k_) + lane_piece() * 16;
    scales_ = scales_at(row + (lane() & 15), k_);
  }
  __device__ __forceinline__ void advance() {
    const int step = row_step(), next = row_ + step;
    if (next < end_ && next < w_.rows) {
      row_ = next;
      codes_ += static_cast<int64_t>(step) * (w_.cols / 2);
      scales_ += static_cast<int64_t>(step) * (w_.cols / 16);
      return;
    }
    k_ += column_step<Way>();
    int first = end_ - hold_ * step;
    if (k_ - first_column<Way>() >= w_.cols) {
      k_ = first_column<Way>();
      first = end_;
      end_ += hold_ * step;
    }
    move_to(first);
  }
  // Rows that no piece of 16 bytes fits into. What is beyond k is zero.
  __device__ __forceinline__ void load_parts(Shared stage, int begin) {
#pragma unroll 1
    for (int i = lane(); i < kTile * 8; i += 32) {
      const int row = i >> 3, piece = i & 7;
      if (row_ + row >= w_.rows) continue;
      const uint2* const from =
          reinterpret_cast<const uint2*>(codes_at(row_ + row, begin) + piece * 16);
      const int there = w_.cols - begin - piece * 32;
      const uint2 low = there > 0 ? from[0] : make_uint2(0, 0);
      const uint2 high = there > 16 ? from[1] : make_uint2(0, 0);
      const uint32_t words[4] = {low.x, low.y, high.x, high.y};
      store_16(stage + row * 128 + code_piece(row, piece) * 16, words);
    }
#pragma unroll 1
    for (int i = lane(); i < kTile * 4; i += 32) {
      const int row = i >> 2, block = i % 4 * 4;
      if (row_ + row >= w_.rows) continue;
      uint32_t scales = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (begin + (block + j) * 16 < w_.cols) {
          scales |= static_cast<uint32_t>(scales_at(row_ + row, begin)[block + j]) << (8 * j);
        }
      }
      store_4(stage + kScalesAt + row * 16 + block, scales);
    }
  }

  const Nvfp4Weight& w_;
  const int hold_;
  int k_, row_, end_;
  const uint8_t* codes_;
  const uint8_t* scales_;
};

// Eight neighbours of a row of x from column k on as they are in memory, zeros where they are not
// there. Nothing waits for them yet.
template <class Input, bool kAligned>
__device__ __forceinline__ void load_x8(const LinearOperand& x, int row, int k, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = 0;
  // Aligned, a segment is there or is not.
  const bool there = row < x.rows && (kAligned ? k & ~(kSegment - 1) : k) < x.cols;
  if constexpr (LinearInput<Input>::kCodes) {
    const int64_t blocks = (x.cols + 15) / 16;
    if (there) {
      words[0] = *reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(x.data) +
                                                    row * blocks * 8 + k / 2);
      words[1] = x.scales[row * blocks + k / 16];
    }
  } else {
    const uint16_t* const p =
        static_cast<const uint16_t*>(x.data) + static_cast<int64_t>(row) * x.stride + k;
    if constexpr (kAligned) {
      if (there) load_words<4>(p, words);
    } else if (there) {
#pragma unroll 1
      for (int i = 0; i < 8 && k + i < x.cols; ++i) {
        const uint32_t bits = static_cast<uint32_t>(p[i]) << (16 * (i & 1));
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] |= j == i / 2 ? bits : 0u;
      }
    }
  }
}
// The same as pairs in the order of codes.
template <class Input>
__device__ __forceinline__ void order_x8(uint32_t* words) {
  using T = typename LinearInput<Input>::Operand;
  uint32_t pairs[4];
  if constexpr (LinearInput<Input>::kCodes) {
    uint32_t scales[4];
    scale_pairs<T>(words[1], scales);
    scale_codes<T>(words[0], scales[0], pairs);
  } else {
    order_as_codes({words[0], words[1], words[2], words[3]}, pairs);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = pairs[i];
}

// What a warp holds of x for a pass.
template <class Input, LinearWay kWay, bool kAligned>
struct HeldX {
  using Way = WayTraits<kWay>;
  using T = typename LinearInput<Input>::Operand;
  uint32_t pairs[Way::kSegments][Way::kColumns][32];
  float undo;  // what the sums of row `lane / 4 % 2` are to be multiplied with; scales after alone

  // Whether it is loaded as rows lie, and turned round in shared memory.
  static constexpr bool kTurned = !Way::kAfter && !LinearInput<Input>::kCodes && kAligned;

  // Begins to load the columns from k on.
  __device__ __forceinline__ void request(const LinearOperand& x, int k) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int s = 0; s < Way::kSegments; ++s) {
#pragma unroll
      for (int c = 0; c < Way::kColumns; ++c) {
#pragma unroll
        for (int q = 0; q < 8; ++q) {
          // With scales after, column g of the product is block t = g / 2 of row g % 2.
          const int row = kTurned         ? c * 8 + q
                          : !Way::kAfter  ? c * 8 + g
                          : t == (g >> 1) ? g & 1
                                          : kNoRow;
          const int column = k + s * kSegment + (kTurned ? lane * 8 : t * 64 + q * 8);
          load_x8<Input, kAligned>(x, row, column, pairs[s][c] + q * 4);
        }
      }
    }
  }

  // `staging` is kStaged bytes of the warp's own.
  __device__ __forceinline__ void arrange(Shared staging) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int s = 0; s < Way::kSegments; ++s) {
#pragma unroll
      for (int c = 0; c < Way::kColumns; ++c) {
        uint32_t (&p)[32] = pairs[s][c];
        if constexpr (kTurned) {
          __syncwarp();
#pragma unroll
          for (int r = 0; r < 8; ++r) {
            store_16(staging + r * 512 + x_piece(r, lane) * 16, p + r * 4);
          }
          __syncwarp();
#pragma unroll
          for (int q = 0; q < 8; ++q) {
            load_16(staging + g * 512 + x_piece(g, t * 8 + q) * 16, p + q * 4);
          }
        }
#pragma unroll
        for (int q = 0; q < 8; ++q) order_x8<Input>(p + q * 4);
      }
    }
    if constexpr (Way::kAfter) scale_up();
  }

 private:
  // Placed codes of bf16 are tiny: a power of two for each row brings its largest element near
  // 2^126, or up by 2^127, which is exact; `undo` takes it back, with the codes' own power.
  __device__ __forceinline__ void scale_up() {
    uint32_t pair = 0;
#pragma unroll
    for (int s = 0; s < Way::kSegments; ++s) {
#pragma unroll
      for (int i = 0; i < 32; ++i) pair = halves_max(pair, pairs[s][0][i] & 0x7fff7fffu);
    }
    uint32_t most = max(pair & 0xffffu, pair >> 16);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) {
      if (lanes != 4) most = max(most, __shfl_xor_sync(~0u, most, lanes));
    }
    const int exponent = static_cast<int>(most >> 7);
    // Inf and NaN stay, whatever is beside them.
    const int up = exponent == 255 ? 0 : min(253 - max(exponent, 1), 127);
    const uint32_t factor = static_cast<uint32_t>(up + 127) * 0x00800080u;
#pragma unroll
    for (int s = 0; s < Way::kSegments; ++s) {
#pragma unroll
      for (int i = 0; i < 32; ++i) pairs[s][0][i] = multiply_pairs<T>(pairs[s][0][i], factor);
    }
    undo = bits_float(static_cast<uint32_t>(253 - up) << 23);  // 2^(126 - up)
  }
};

// Sums are the products times this power of two.
template <class Input, LinearWay kWay>
constexpr int kExponent = [] {
  using T = typename LinearInput<Input>::Operand;
  const int of_x = LinearInput<Input>::kCodes ? ScaledCodes<T>::kExponent : 0;
  return of_x + (WayTraits<kWay>::kAfter ? 0 : ScaledCodes<T>::kExponent);  // or `undo` has it
}();

__device__ __forceinline__ float power_of_two(int exponent) {
  return bits_float(static_cast<uint32_t>(127 + exponent) << 23);
}

// The sums of 16 rows of W and all columns over a segment: `add`ed to acc.
template <class Input, LinearWay kWay>
__device__ __forceinline__ void multiply_segment(Shared stage,
                                                 const uint32_t (&x)[WayTraits<kWay>::kColumns][32],
                                                 float (&acc)[WayTraits<kWay>::kColumns][4]) {
  using Way = WayTraits<kWay>;
  using T = typename LinearInput<Input>::Operand;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  constexpr float kZero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  uint32_t codes[2][8], scale_bytes[2];  // by row g and g + 8
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = g + 8 * h;
    scale_bytes[h] = load_4(stage + kScalesAt + row * 16 + t * 4);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      load_16(stage + row * 128 + code_piece(row, 2 * t + j) * 16, codes[h] + 4 * j);
    }
  }
  if constexpr (Way::kAfter) {
    float scales[2][4];
    scales_of(scale_bytes[0], scales[0]);
    scales_of(scale_bytes[1], scales[1]);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      float d[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t low[4], high[4];
        place_codes<T>(codes[0][2 * b + i], low);
        place_codes<T>(codes[1][2 * b + i], high);
        const uint32_t* const p = x[0] + (2 * b + i) * 4;
        if (i == 0) {
          mma_16x8x16<T>(d, low[0], high[0], low[1], high[1], p[0], p[1], kZero);
        } else {
          mma_16x8x16<T>(d, low[0], high[0], low[1], high[1], p[0], p[1], d);
        }
        mma_16x8x16<T>(d, low[2], high[2], low[3], high[3], p[2], p[3], d);
      }
      acc[0][0] = fma_rn(d[0], scales[0][b], acc[0][0]);
      acc[0][1] = fma_rn(d[1], scales[0][b], acc[0][1]);
      acc[0][2] = fma_rn(d[2], scales[1][b], acc[0][2]);
      acc[0][3] = fma_rn(d[3], scales[1][b], acc[0][3]);
    }
  } else {
    uint32_t scales[2][4];
    scale_pairs<T>(scale_bytes[0], scales[0]);
    scale_pairs<T>(scale_bytes[1], scales[1]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t low[4], high[4];
      scale_codes<T>(codes[0][i], scales[0][i / 2], low);
      scale_codes<T>(codes[1][i], scales[1][i / 2], high);
#pragma unroll
      for (int c = 0; c < Way::kColumns; ++c) {
        const uint32_t* const p = x[c] + i * 4;
        mma_16x8x16<T>(acc[c], low[0], high[0], low[1], high[1], p[0], p[1], acc[c]);
        mma_16x8x16<T>(acc[c], low[2], high[2], low[3], high[3], p[2], p[3], acc[c]);
      }
    }
  }
}

__device__ __forceinline__ float float_at(const void* p, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kBFloat16:
      return to_float(static_cast<const Bf16*>(p)[i]);
    case DType::kFloat16:
      return to_float(static_cast<const Fp16*>(p)[i]);
    default:
      return static_cast<const float*>(p)[i];
  }
}

// One element of y, from the sum without gsas.
__device__ __forceinline__ void finish(const LinearEpilogue& to, float sum, float gsa, int row,
                                       int64_t n) {
  float y = mul_rn(sum, gsa);
  if (to.x_gsa != nullptr) y = mul_rn(y, to.x_gsa[row * to.x_gsa_stride]);
  if (to.bias != nullptr) y = add_rn(y, float_at(to.bias, to.bias_dtype, n));
  const int64_t i = row * to.cols + n;
  if (to.residual != nullptr) y = add_rn(y, float_at(to.residual, to.dtype, i));
  switch (to.dtype) {
    case DType::kBFloat16:
      static_cast<Bf16*>(to.out)[i] = from_float<Bf16>(y);
      break;
    case DType::kFloat16:
      static_cast<Fp16*>(to.out)[i] = from_float<Fp16>(y);
      break;
    default:
      static_cast<float*>(to.out)[i] = y;
  }
}

__device__ __forceinline__ void wait_for_stage(bool many) {
  if (many) {
    __pipeline_wait_prior(kManyStages - 2);
  } else {
    __pipeline_wait_prior(kFewStages - 2);
  }
}

template <class Input, LinearWay kWay, bool kAligned>
__global__ void __launch_bounds__(kMostWarps * 32, 1)
    nvfp4_linear_kernel(const __grid_constant__ Nvfp4Weight w,
                        const __grid_constant__ LinearOperand x,
                        const __grid_constant__ LinearEpilogue to,
                        const __grid_constant__ LinearPlan plan) {
  using Way = WayTraits<kWay>;
  extern __shared__ __align__(1024) unsigned char tiles[];
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int along = blockDim.x >> 5, beside = blockDim.y;
  const int warp_k = threadIdx.x >> 5, warp = threadIdx.y * along + warp_k;
  const int warps = along * beside, stages = plan.stages;

  const Shared ring = shared_at(tiles) + warp * stages * kStage;
  unsigned char* const after_rings = tiles + warps * stages * kStage;
  float* const sums = reinterpret_cast<float*>(after_rings);
  // From pass to pass: (tile, 16 rows by two columns).
  float* const kept_sums = sums + plan.kept_at;

  const int step = row_step();
  WeightStream<Way, kAligned> weights(w, plan.hold);

  // No kernel before this one writes a weight.
  let_next_begin();
  weights.template next<0>(ring);
  wait_for_previous();

  HeldX<Input, kWay, kAligned> held;
  const bool many = stages == kManyStages;
  const int last = (stages - 1) * kStage;
  int read = 0, written = last;
  const int pairs_of_columns = (x.rows + 1) / 2;
  const int first_hold = blockIdx.x * beside * kTile;

  for (int hold_row = first_hold; hold_row < w.rows; hold_row += plan.hold * step) {
    for (int pass = 0; pass < plan.passes; ++pass) {
      const int k = pass * column_step<Way>() + first_column<Way>();
      const bool begins = hold_row == first_hold && pass == 0;
      if (begins || plan.passes > 1) {
        held.request(x, k);
        __syncwarp();  // or the compiler puts some of these loads behind the copies, where they
                       // queue
        if (begins) {
#pragma unroll 1
          for (int stage = 1; stage < stages - 1; stage += 2) {
            if (stage > 1) weights.template next<0>(ring + (stage - 1) * kStage);
            weights.template next<Way::kSegments - 1>(ring + stage * kStage);
          }
        }
        held.arrange(shared_at(after_rings) + warp * kStaged);
        if constexpr (held.kTurned) __syncthreads();  // the sums lie where x was turned round
      }
      const float stored_gsa = w.gsa[0];  // used when the sums are there: nothing waits for it
      const int present = min(max((w.cols - k + kSegment - 1) / kSegment, 0), Way::kSegments);
      for (int tile = 0; tile < plan.hold && hold_row + tile * step < w.rows;) {
        int count = 0;
        for (; count < plan.flush && tile + count < plan.hold &&
               hold_row + (tile + count) * step < w.rows;
             ++count) {
          float acc[Way::kColumns][4] = {};
#pragma unroll
          for (int s = 0; s < Way::kSegments; ++s) {
            wait_for_stage(many);
            __syncwarp();
            // An even number of stages ahead: the same segment of its tile.
            if (s == 0) {
              weights.template next<0>(ring + written);
            } else {
              weights.template next<Way::kSegments - 1>(ring + written);
            }
            written = written == last ? 0 : written + kStage;
            if (s < present) {
              multiply_segment<Input, kWay>(ring + read, held.pairs[s], acc);
            }
            read = read == last ? 0 : read + kStage;
          }
          float* const own = sums + (count * warps + warp) * Way::kSums;
          if constexpr (Way::kAfter) {
            float (&v)[4] = acc[0];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              v[i] = add_rn(v[i], __shfl_xor_sync(~0u, v[i], 1));
              v[i] = add_rn(v[i], __shfl_xor_sync(~0u, v[i], 2));
            }
            const float undo[2] = {__shfl_sync(~0u, held.undo, 0), __shfl_sync(~0u, held.undo, 4)};
            if (t < 2) {
              const float scale = t == 0 ? undo[0] : undo[1];
              own[t * kPitch + g] = mul_rn(t == 0 ? v[0] : v[1], scale);
              own[t * kPitch + g + 8] = mul_rn(t == 0 ? v[2] : v[3], scale);
            }
          } else {
#pragma unroll
            for (int c = 0; c < Way::kColumns; ++c) {
              float* const column = own + (c * 8 + 2 * t) * kPitch + g;
              column[0] = acc[c][0], column[kPitch] = acc[c][1];
              column[8] = acc[c][2], column[kPitch + 8] = acc[c][3];
            }
          }
        }
        __syncthreads();
        // A warp takes two columns of a tile.
        const int units = count * beside * pairs_of_columns;
        for (int unit = warp; unit < units; unit += warps) {
          const int which = unit / pairs_of_columns;  // tile * beside + the one of those beside
          const int row = (unit - which * pairs_of_columns) * 2 + (lane >> 4);
          const float* p = sums + which * along * Way::kSums + row * kPitch + (lane & 15);
          float sum = 0.0f;
          for (int span = 0; span < plan.spans; ++span) {
            float part = 0.0f;
#pragma unroll 4
            for (int i = 0; i < plan.span_pairs; ++i) {
              float pair = p[0];
              if constexpr (Way::kSegments == 1) pair = add_rn(pair, p[Way::kSums]);
              p += 2 / Way::kSegments * Way::kSums;
              part = i == 0 ? pair : add_rn(part, pair);
            }
            sum = span == 0 ? part : add_rn(sum, part);
          }
          const int at = tile * beside * pairs_of_columns + unit;
          if (plan.passes > 1) {
            if (pass > 0) sum = add_rn(kept_sums[at * 32 + lane], sum);
            kept_sums[at * 32 + lane] = sum;
          }
          const int n =
              hold_row + (tile + which / beside) * step + which % beside * kTile + (lane & 15);
          if (pass + 1 == plan.passes && n < w.rows && row < x.rows)
            finish(to, sum, mul_rn(stored_gsa, power_of_two(-kExponent<Input, kWay>)), row, n);
        }
        __syncthreads();
        tile += count;
      }
    }
  }
}

#ifndef __CUDACC_RTC__
namespace {

template <class Input, LinearWay kWay, bool kAligned>
cudaError_t launch_way(const Nvfp4Weight& w, const LinearOperand& x, const LinearEpilogue& to,
                       cudaStream_t stream) {
  using Way = WayTraits<kWay>;
  const int64_t tiles = (w.rows + kTile - 1) / kTile;
  const int sms = sm_count(), shared_bytes = most_shared_bytes();
  LinearPlan plan = {};
  int along = 0, beside = 0;
  int64_t grid = 0, shared = 0;
  // Half as many warps where a block has less shared memory than those of compute capability 9.0.
  const auto fits = [&](int most_warps, int stages) {
    // Spans of nearly the same length, and of few enough pairs for the warps of a block.
    constexpr int kPairWarps = 2 / Way::kSegments;
    const int pairs = (w.cols + 2 * kSegment - 1) / (2 * kSegment);
    const int most_pairs = most_warps / kPairWarps < 8 ? most_warps / kPairWarps : 8;
    const int spans = (pairs + most_pairs - 1) / most_pairs;
    plan.span_pairs = (pairs + spans - 1) / spans;
    plan.spans = spans % 2 == 0 && 2 * plan.span_pairs * kPairWarps <= most_warps ? 2 : 1;
    plan.passes = (spans + plan.spans - 1) / plan.spans;
    along = plan.spans * plan.span_pairs * kPairWarps;

    // Side by side as many tiles as take no longer than one after the other.
    const auto rounds = [&](int64_t tiles_beside) {
      return ((tiles + tiles_beside - 1) / tiles_beside + sms - 1) / sms * tiles_beside;
    };
    beside = 1;
    for (int more = 2; more * along <= most_warps && more <= tiles; ++more) {
      if (rounds(more) <= rounds(beside)) beside = more;
    }
    const int warps = along * beside;
    plan.stages = stages;
    if (stages == kManyStages && warps > 8) return false;

    const int64_t steps = (tiles + beside - 1) / beside;
    grid = steps < sms ? steps : sms;
    const int64_t own = (steps + grid - 1) / grid;
    const int64_t keep =
        plan.passes > 1 ? (static_cast<int64_t>(x.rows) + 1) / 2 * beside * 32 * 4 : 0;
    const int64_t step_sums = warps * Way::kSums * 4, staged = Way::kAfter ? 0 : warps * kStaged;
    const int64_t ring = static_cast<int64_t>(warps) * stages * kStage;
    const int64_t left = (shared_bytes - ring) / 1024 * 1024;
    if (left * 3 / 4 < staged || left * 3 / 4 < step_sums || left / 4 < keep) return false;
    const int64_t hold = keep > 0 && own * keep > left / 4 ? left / 4 / keep : own;
    const int64_t flushed = (left - hold * keep) / step_sums,
                  flush = flushed < hold ? flushed : hold;
    const int64_t before = flush * step_sums > staged ? flush * step_sums : staged;
    if (before + hold * keep > left) return false;
    plan.hold = static_cast<int>(hold);
    plan.flush = static_cast<int>(flush);
    plan.kept_at = static_cast<int>(before / 4);
    shared = ring + before + hold * keep;
    return true;
  };
  if (!fits(kMostWarps, kManyStages) && !fits(kMostWarps, kFewStages) &&
      !fits(kMostWarps / 2, kFewStages)) {
    return cudaErrorInvalidConfiguration;
  }

  constexpr auto kKernel = &nvfp4_linear_kernel<Input, kWay, kAligned>;
  if (blocks_per_sm<kKernel>(along * beside * 32, static_cast<size_t>(shared)) < 1) {
    return cudaErrorInvalidConfiguration;
  }
  LaunchShape shape = {grid, along * 32, Start::kOverlapped};
  shape.block_y = beside;
  shape.shared = static_cast<size_t>(shared);
  return launch<kKernel>(shape, stream, w, x, to, plan);
}

template <class Input>
cudaError_t launch_rows(const Nvfp4Weight& w, LinearOperand x, LinearEpilogue to,
                        cudaStream_t stream) {
  const auto apart = [](const void* p, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0 && bytes % 16 == 0;
  };
  const bool aligned = w.cols % kSegment == 0 && x.cols == w.cols && apart(w.codes, 0) &&
                       apart(w.scales, 0) &&
                       (LinearInput<Input>::kCodes || apart(x.data, x.stride * 2));
  constexpr int kMost = 16;
  const int64_t rows = x.rows;
  const int64_t row_bytes = LinearInput<Input>::kCodes ? (x.cols + 15) / 16 * 8 : x.stride * 2;
  const int64_t out_bytes = to.cols * (to.dtype == DType::kFloat32 ? 4 : 2);
  for (int64_t first = 0; first < rows; first += kMost) {
    LinearOperand part = x;
    part.rows = static_cast<int>(rows - first < kMost ? rows - first : kMost);
    part.data = static_cast<const uint8_t*>(x.data) + first * row_bytes;
    if (x.scales != nullptr) part.scales = x.scales + first * ((x.cols + 15) / 16);
    LinearEpilogue end = to;
    end.out = static_cast<uint8_t*>(to.out) + first * out_bytes;
    if (to.residual != nullptr) {
      end.residual = static_cast<const uint8_t*>(to.residual) + first * out_bytes;
    }
    if (to.x_gsa != nullptr) end.x_gsa = to.x_gsa + first * to.x_gsa_stride;
    const auto go = [&](auto way) {
      constexpr LinearWay kWay = decltype(way)::value;
      return aligned ? launch_way<Input, kWay, true>(w, part, end, stream)
                     : launch_way<Input, kWay, false>(w, part, end, stream);
    };
    // In fp16 scales after the product would take more registers than a thread has.
    constexpr bool kAfter = std::is_same<typename LinearInput<Input>::Operand, Bf16>::value;
    constexpr LinearWay kFewest = kAfter ? LinearWay::kTwoRows : LinearWay::kEightRows;
    const cudaError_t error =
        rows <= 2   ? go(std::integral_constant<LinearWay, kFewest>())
        : rows <= 8 ? go(std::integral_constant<LinearWay, LinearWay::kEightRows>())
                    : go(std::integral_constant<LinearWay, LinearWay::kSixteenRows>());
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t launch_nvfp4_linear(const Nvfp4Weight& w, const LinearOperand& x,
                                const LinearEpilogue& to, cudaStream_t stream) {
  if (w.rows == 0 || x.rows == 0) return cudaSuccess;
#ifdef JITQUANT_DTYPE
  // A library for x in this dtype alone (nvfp4_kernels.cuh).
  constexpr DType kOnly = static_cast<DType>(JITQUANT_DTYPE);
  if constexpr (kOnly != DType::kFloat32) {
    using Only = std::conditional_t<kOnly == DType::kFloat16, Fp16, Bf16>;
    if (x.scales == nullptr && x.dtype == kOnly) return launch_rows<Only>(w, x, to, stream);
  }
  return cudaErrorInvalidValue;
#else
  if (x.scales != nullptr) return launch_rows<CodeInput>(w, x, to, stream);
  return x.dtype == DType::kBFloat16 ? launch_rows<Bf16>(w, x, to, stream)
                                     : launch_rows<Fp16>(w, x, to, stream);
#endif
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
