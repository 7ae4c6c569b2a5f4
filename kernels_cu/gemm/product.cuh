// Shared by the kernels of NVFP4 products: tiles of codes in shared memory, x in registers, and
// their product. A segment is 256 of k. One stage of a warp's ring of asynchronous copies holds a
// segment: 16 rows of W by 128 bytes of codes and 16 scales.
#pragma once

#include "../nvfp4/common.cuh"
#include "jitquant/mma.cuh"
#include "linear.h"

namespace jitquant {

constexpr int kSegment = 256, kTile = 16, kStage = kTile * (kSegment / 2 + kSegment / 16);
constexpr int kScalesAt = kTile * kSegment / 2;
constexpr int kMostWarps = 16;
constexpr int kFewStages = 3, kManyStages = 5;  // odd, because two segments alternate
constexpr int kStaged = 8 * kSegment * 2;       // bytes of x that a warp transposes at once
constexpr int kNoRow = 1 << 30;
constexpr int kPitch = 20;  // floats from one column of a warp's sums to the next

enum class LinearWay : int { kTwoRows, kEightRows, kSixteenRows };

template <LinearWay kWay>
struct WayTraits {
  static constexpr bool kAfter = kWay == LinearWay::kTwoRows;  // scales come after the product
  static constexpr int kColumns = kWay == LinearWay::kSixteenRows ? 2 : 1;  // of 8 rows of x
  static constexpr int kSegments = kWay == LinearWay::kSixteenRows ? 1 : 2;
  static constexpr int kRows = kAfter ? 2 : 8 * kColumns;
  static constexpr int kLoads = kAfter ? 2 : 8;  // of 8 elements per lane, segment and column
  static constexpr int kSums = kRows * kPitch;   // floats per warp and tile
};

// x as elements of T, or as codes with scales, whose values are exact in bf16.
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

// A shared-memory address as a 32-bit number. From a generic pointer, the compiler would compute it
// again at each use.
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

// Where a 16-byte piece of a row of codes is stored: swizzled, so that the 8 lanes of each quarter
// of a warp's load use different banks.
__device__ __forceinline__ int code_piece(int row, int piece) {
  return piece ^ (row & 1);
}
// The same for a row of x, 512 bytes.
__device__ __forceinline__ int x_piece(int row, int piece) {
  return piece ^ ((row + 2 * (piece >> 3)) & 7);
}

// Loads eight neighboring elements of a row of x, from column k on, as they are in memory. Out of
// range elements are zero. Nothing waits for the loads yet.
template <class Input, bool kAligned>
__device__ __forceinline__ void load_x8(const LinearOperand& x, int row, int k, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = 0;
  // If aligned, a segment is entirely in range or entirely out of range.
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
// Converts what load_x8 loaded to pairs in the order of codes.
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

// Rows of x in their own order.
struct RowsAsTheyAre {
  static __device__ __forceinline__ bool any() { return true; }
  __device__ __forceinline__ int operator()(int row) const { return row; }
};

// If scales come after the product: placed bf16 codes are tiny. To make up for that, a power of two
// per row of x, 2^lift, scales its largest element to near 2^126, but by at most 2^127, which is
// exact. A row with Inf or NaN is not scaled. `most` has the bits of the largest magnitude.
__device__ __forceinline__ int lift_of(uint32_t most) {
  const int exponent = static_cast<int>(most >> 7);
  return exponent == 255 ? 0 : min(253 - max(exponent, 1), 127);
}
// A pair of bf16 with the value 2^lift.
__device__ __forceinline__ uint32_t lift_pair(int lift) {
  return static_cast<uint32_t>(lift + 127) * 0x00800080u;
}
// Reverses the lift and the power of two of the codes: 2^(126 - lift).
__device__ __forceinline__ float undo_lift(int lift) {
  return bits_float(static_cast<uint32_t>(253 - lift) << 23);
}
__device__ __forceinline__ uint32_t max_magnitudes(uint32_t a, uint32_t b) {
  return halves_max(a, b & 0x7fff7fffu);
}

template <int kSegments, int kColumns>
struct HeldPairs {
  uint32_t pairs[kSegments][kColumns][32];
  float undo;  // factor for the sums of row `lane / 4 % 2`, if scales come after
};
// What a warp holds of x during a pass. kThrough: through shared memory, if x is aligned.
template <class Input, LinearWay kWay, bool kAligned, bool kThrough = kWay != LinearWay::kTwoRows>
struct HeldX : HeldPairs<WayTraits<kWay>::kSegments, WayTraits<kWay>::kColumns> {
  using Way = WayTraits<kWay>;
  using T = typename LinearInput<Input>::Operand;
  using HeldPairs<Way::kSegments, Way::kColumns>::pairs;
  using HeldPairs<Way::kSegments, Way::kColumns>::undo;

  // Whether x is loaded row by row and rearranged in shared memory.
  static constexpr bool kTurned = kThrough && !LinearInput<Input>::kCodes && kAligned;

  // Starts to load the columns from k on, unless there are no rows. Row i of the product is row
  // rows(i) of x, or the first if x has no such row: no other depends on it. All lanes of the warp
  // call rows() together.
  template <class Rows = RowsAsTheyAre>
  __device__ __forceinline__ void request(const LinearOperand& x, int k, Rows rows = {}) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int s = 0; s < Way::kSegments; ++s) {
      // Without a condition for each load: the compiler would load into other registers and wait.
      present_[s] = rows.any() && k + s * kSegment < x.cols;
      if (kTurned && !present_[s]) continue;
#pragma unroll
      for (int c = 0; c < Way::kColumns; ++c) {
#pragma unroll
        for (int q = 0; q < (kTurned ? Way::kLoads : 8); ++q) {
          int row = rows(kTurned ? c * 8 + q : Way::kAfter ? g & 1 : c * 8 + g);
          if constexpr (kTurned) {
            const int64_t at = (row < x.rows ? row : 0) * x.stride + k + lane * 8;
            load_words<4>(static_cast<const uint16_t*>(x.data) + at + s * kSegment,
                          Way::kAfter ? loaded(s, q) : pairs[s][c] + q * 4);
          } else {
            // If scales come after, column g of the product is block t = g / 2 of row g % 2, and
            // all its other blocks are zero.
            if (Way::kAfter && t != (g >> 1)) row = kNoRow;
            load_x8<Input, kAligned>(x, row, k + s * kSegment + t * 64 + q * 8,
                                     pairs[s][c] + q * 4);
          }
        }
      }
    }
  }

  // `staging` has kStaged bytes that only this warp uses.
  __device__ __forceinline__ void arrange(Shared staging) {
    if constexpr (kTurned && Way::kAfter) {
      arrange_two(staging);
    } else {
      arrange_each(staging);
    }
  }

 private:
  bool present_[Way::kSegments];  // whether the segments exist

  __device__ __forceinline__ void arrange_each(Shared staging) {
    // Kept, so that the addresses below are computed here and not held in registers until then.
    const int lane = kept(threadIdx.x & 31), g = lane >> 2, t = lane & 3;
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

  // Two rows in shared memory: the words of segment s and row r as they were loaded.
  __device__ __forceinline__ uint32_t* loaded(int s, int r) {
    return pairs[0][0] + (s * 2 + r) * 4;
  }

  __device__ __forceinline__ void scale_up() {
    uint32_t pair = 0;
#pragma unroll
    for (int s = 0; s < Way::kSegments; ++s) {
#pragma unroll
      for (int i = 0; i < 32; ++i) pair = max_magnitudes(pair, pairs[s][0][i]);
    }
    uint32_t most = max(pair & 0xffffu, pair >> 16);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) {
      if (lanes != 4) most = max(most, __shfl_xor_sync(~0u, most, lanes));
    }
    const int up = lift_of(most);
#pragma unroll
    for (int s = 0; s < Way::kSegments; ++s) {
#pragma unroll
      for (int i = 0; i < 32; ++i)
        pairs[s][0][i] = multiply_pairs<T>(pairs[s][0][i], lift_pair(up));
    }
    undo = undo_lift(up);
  }

  // Scales two rows, orders them as codes, and gives each lane its block of its row. All other
  // lanes read zeros.
  __device__ __forceinline__ void arrange_two(Shared staging) {
    const int lane = kept(threadIdx.x & 31), g = lane >> 2, t = lane & 3;
    uint32_t most = 0;  // of both rows, in its halves
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t pair = 0;
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        uint32_t* const words = loaded(s, r);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!present_[s]) words[i] = 0;
          pair = max_magnitudes(pair, words[i]);
        }
      }
      most |= max(pair & 0xffffu, pair >> 16) << (16 * r);
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) {
      most = halves_max(most, __shfl_xor_sync(~0u, most, lanes));
    }
    const int up[2] = {lift_of(most & 0xffffu), lift_of(most >> 16)};
    undo = undo_lift((g & 1) == 0 ? up[0] : up[1]);
    constexpr int kRow = 2 * kSegment * 2, kZerosAt = 2 * kRow + 32;
    constexpr uint32_t kZeros[4] = {};
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) store_16(staging + 2 * kRow + (i * 32 + lane) * 16, kZeros);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t* const words = loaded(s, r);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = multiply_pairs<T>(words[i], lift_pair(up[r]));
        order_x8<Input>(words);
        store_16(staging + r * kRow + (s * 32 + (lane ^ r)) * 16, words);
      }
    }
    __syncwarp();
    const int row = g & 1;
    const bool own = t == (g >> 1);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        const int piece = own ? t * 8 + (q ^ row) : q;
        load_16(staging + (own ? row * kRow : kZerosAt) + (s * 32 + piece) * 16,
                pairs[s][0] + q * 4);
      }
    }
  }
};

// The same for LinearWay::kTwoRows with a fifth of the instructions: every lane loads, orders and
// scales a part of each row, and only then gets what it holds.
template <class Input, bool kAligned>
struct HeldRows : HeldPairs<2, 1> {
  using T = typename LinearInput<Input>::Operand;
  static constexpr bool kTurned = false;
  static constexpr int kBytes = 2 * 2 * kSegment * 2;  // of staging: two segments of two rows
  uint32_t parts[2][2][4];                             // of a segment and row

  __device__ __forceinline__ void request(const LinearOperand& x, int k) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int column = k + s * kSegment + (threadIdx.x & 31) * 8;
        load_x8<Input, kAligned>(x, row, column, parts[s][row]);
      }
    }
  }
  __device__ __forceinline__ void arrange(Shared staging) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int lifts[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32_t pair = 0;
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        order_x8<Input>(parts[s][row]);
#pragma unroll
        for (int i = 0; i < 4; ++i) pair = max_magnitudes(pair, parts[s][row][i]);
      }
      lifts[row] = lift_of(__reduce_max_sync(~0u, max(pair & 0xffffu, pair >> 16)));
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          parts[s][row][i] = multiply_pairs<T>(parts[s][row][i], lift_pair(lifts[row]));
        }
        store_16(staging + (2 * s + row) * 512 + x_piece(row, lane) * 16, parts[s][row]);
      }
    }
    __syncwarp();
    // Column g of the product is block t = g / 2 of row g % 2. All else is zero.
    const int own = g & 1;
    undo = undo_lift(own == 0 ? lifts[0] : lifts[1]);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int i = 0; i < 32; ++i) pairs[s][0][i] = 0;
      if (t == g >> 1) {
#pragma unroll
        for (int q = 0; q < 8; ++q) {
          load_16(staging + (2 * s + own) * 512 + x_piece(own, t * 8 + q) * 16,
                  pairs[s][0] + q * 4);
        }
      }
    }
    __syncwarp();
  }
};
static_assert(HeldRows<Bf16, true>::kBytes <= kStage, "staged in a free stage of the ring");

// The sums are the products times 2^kExponent.
template <class Input, LinearWay kWay>
constexpr int kExponent = [] {
  using T = typename LinearInput<Input>::Operand;
  const int of_x = LinearInput<Input>::kCodes ? ScaledCodes<T>::kExponent : 0;
  return of_x + (WayTraits<kWay>::kAfter ? 0 : ScaledCodes<T>::kExponent);  // if kAfter, in `undo`
}();

__device__ __forceinline__ float power_of_two(int exponent) {
  return bits_float(static_cast<uint32_t>(127 + exponent) << 23);
}

// Adds the products of 16 rows of W with all columns, over a segment, to acc.
template <class Input, LinearWay kWay>
__device__ __forceinline__ void multiply_segment(Shared stage,
                                                 const uint32_t (&x)[WayTraits<kWay>::kColumns][32],
                                                 float (&acc)[WayTraits<kWay>::kColumns][4]) {
  using Way = WayTraits<kWay>;
  using T = typename LinearInput<Input>::Operand;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  constexpr float kZero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  uint32_t codes[2][8], scale_bytes[2];  // of rows g and g + 8
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

__device__ __forceinline__ void wait_for_stage(bool many) {
  if (many) {
    __pipeline_wait_prior(kManyStages - 2);
  } else {
    __pipeline_wait_prior(kFewStages - 2);
  }
}

}  // namespace jitquant
