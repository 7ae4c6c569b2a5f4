// Shared by the kernels of NVFP4 products: tiles of codes in shared memory, x in registers, and
// their product. A segment is 256 of k. One stage of a warp's ring of asynchronous copies holds a
// segment: 16 rows of W, each with 128 bytes of codes and then 16 scales.
#pragma once

#include "../nvfp4/common.cuh"
#include "jitquant/mma.cuh"
#include "linear.h"

namespace jitquant {

constexpr int kSegment = 256, kTile = 16;
// Bytes of a row in a stage. As an odd number of 16-byte pieces, it lets the 8 lanes of each
// quarter of a warp's load use different banks.
constexpr int kStageRow = kSegment / 2 + kSegment / 16, kStage = kTile * kStageRow;
constexpr int kScalesAt = kSegment / 2;
constexpr int kMostWarps = 16;
// Of a warp, even because two segments alternate; many with at most 8 warps. Twice as many took up
// to a sixth longer.
constexpr int kFewStages = 2, kManyStages = 4;
constexpr int kStaged = 8 * kSegment * 2;  // bytes of x that a warp transposes at once
constexpr int kCopied = 2 * kStaged;       // of its x in a pass, of 16 rows
constexpr int kNoRow = 1 << 30;
constexpr int kPitch = 20;  // floats from one column of a warp's sums to the next

enum class LinearWay : int { kTwoRows, kEightRows, kSixteenRows };

template <LinearWay kWay>
struct WayTraits {
  static constexpr bool kAfter = kWay == LinearWay::kTwoRows;  // scales come after the product
  static constexpr int kColumns = kWay == LinearWay::kSixteenRows ? 2 : 1;  // of 8 rows of x
  static constexpr int kSegments = kWay == LinearWay::kSixteenRows ? 1 : 2;
  static constexpr int kRows = kAfter ? 2 : 8 * kColumns;
  static constexpr int kSums = kRows * kPitch;  // floats per warp and tile
};

// x as elements of T, or as codes with scales, whose values are exact in bf16.
template <class T>
struct LinearInput {
  using Operand = T;
  static constexpr bool kCodes = false;
};
struct CodeInput {};
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
// If not `there`, loads nothing, and the words keep their values.
__device__ __forceinline__ void load_16_if(bool there, Shared from, uint32_t (&words)[4]) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];}"
               : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
               : "r"(from), "r"(static_cast<uint32_t>(there))
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
// As of memory.cuh.
template <int kWords>
__device__ __forceinline__ void copy_words(Shared to, const uint8_t* from, bool there) {
  __pipeline_memcpy_async(to, from, 4 * kWords, there ? 0 : 4 * kWords);
}
__device__ __forceinline__ void load_16(Shared from, uint32_t* words) {
  load_words<4>(from, words);
}
__device__ __forceinline__ void load_16_if(bool there, Shared from, uint32_t (&words)[4]) {
  if (there) load_16(from, words);
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

// Starts to copy the rows of a stage that whole segments cannot be copied from: those with
// there(row), from codes_at(row) and scales_at(row) on, of a weight with `cols` columns. What is
// beyond the first `left` of them is zero. Scales that are in no whole words are not copied but
// loaded at once.
template <class There, class CodesAt, class ScalesAt>
__device__ __forceinline__ void copy_parts(Shared stage, int cols, int left, const There& there,
                                           const CodesAt& codes_at, const ScalesAt& scales_at) {
  const auto apart_by = [](const uint8_t* first, int row_bytes, int bytes) {
    return (reinterpret_cast<uintptr_t>(first) | row_bytes) % bytes == 0;
  };
  const int lane = threadIdx.x & 31;
  const bool wide = apart_by(codes_at(0), cols / 2, 16);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 4 * i + (lane >> 3), piece = lane & 7, more = left - piece * 32;
    if (!there(row)) continue;
    const uint8_t* const first = codes_at(row);
    const uint8_t* const from = more > 0 ? first + piece * 16 : first;
    const Shared to = stage + row * kStageRow + piece * 16;
    if (wide) {
      copy_words<4>(to, from, more > 0);
    } else {
      copy_words<2>(to, from, more > 0);
      copy_words<2>(to + 8, more > 16 ? from + 8 : from, more > 16);
    }
  }
  if (apart_by(scales_at(0), cols / 16, 4)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 8 * i + (lane >> 2), word = lane & 3;
      if (!there(row)) continue;
      const bool whole = word * 64 < left;
      copy_words<1>(stage + row * kStageRow + kScalesAt + 4 * word,
                    scales_at(row) + (whole ? 4 * word : 0), whole);
    }
    return;
  }
#pragma unroll 1
  for (int i = lane; i < kTile * 4; i += 32) {
    const int row = i >> 2, block = i % 4 * 4;
    if (!there(row)) continue;
    uint32_t scales = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if ((block + j) * 16 < left) {
        scales |= static_cast<uint32_t>(scales_at(row)[block + j]) << (8 * j);
      }
    }
    store_4(stage + row * kStageRow + kScalesAt + block, scales);
  }
}

// Where a 16-byte piece of a row of x, 512 bytes, is stored: swizzled, so that the 8 lanes of each
// quarter of a warp's load use different banks.
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
    } else if (there && k + 8 <= x.cols && reinterpret_cast<uintptr_t>(p) % 16 == 0) {
      load_words<4>(p, words);
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
// Eight neighboring elements of a row of aligned x; of another row if that one does not exist.
__device__ __forceinline__ const uint16_t* piece_of_x(const LinearOperand& x, int row, int k) {
  return static_cast<const uint16_t*>(x.data) + (row < x.rows ? row : 0) * x.stride + k;
}
// Converts what load_x8 loaded to pairs in the order of codes.
template <class Input>
__device__ __forceinline__ void order_x8(uint32_t* words) {
  using T = typename LinearInput<Input>::Operand;
  uint32_t pairs[4];
  if constexpr (LinearInput<Input>::kCodes) {
    uint32_t scales[2];
    scale_pairs<T>(words[1], scales);
    scale_codes<T>(words[0], half_twice<false>(scales[0]), pairs);
  } else {
    order_as_codes({words[0], words[1], words[2], words[3]}, pairs);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = pairs[i];
}

// The same, without the factor 2^kExponent of decoded codes, which this undoes exactly.
template <class Input>
__device__ __forceinline__ void value_x8(uint32_t (&words)[4]) {
  using T = typename LinearInput<Input>::Operand;
  order_x8<Input>(words);
  if constexpr (LinearInput<Input>::kCodes) {
    constexpr uint32_t kBack = (127 - ScaledCodes<T>::kExponent) * 0x00800080u;
#pragma unroll
    for (uint32_t& pair : words) pair = multiply_pairs<T>(pair, kBack);
  }
}
// As load_x8, of an x whose rows are aligned to 16 bytes. Zeros unless all eight elements exist.
template <class Input>
__device__ __forceinline__ void load_x8_whole(const LinearOperand& x, int row, int k,
                                              uint32_t (&words)[4]) {
  if constexpr (LinearInput<Input>::kCodes) {
    load_x8<Input, false>(x, row, k, words);  // codes are padded
  } else {
#pragma unroll
    for (uint32_t& word : words) word = 0;
    if (k + 8 <= x.cols) {
      load_words<4>(static_cast<const uint16_t*>(x.data) + row * x.stride + k, words);
    }
  }
}

// Rows of x in their own order.
struct RowsAsTheyAre {
  static __device__ __forceinline__ bool any() { return true; }
  __device__ __forceinline__ int operator()(int row) const { return row; }
};

// If scales come after the product: placed bf16 codes are tiny. To make up for that, a power of two
// per row of x, 2^lift, scales its largest element to near 2^126, but by at most 2^127, which is
// exact. A row with Inf or NaN is not scaled. `most` has the bits of the largest magnitude.
__device__ __forceinline__ int lift_of_row(uint32_t most) {
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

// What a warp holds of x during a pass, for up to 8 or 16 rows.
template <class Input, LinearWay kWay, bool kAligned>
struct RowFragments {
  using Way = WayTraits<kWay>;
  // Whether x is loaded row by row and rearranged in shared memory.
  static constexpr bool kTurned = !LinearInput<Input>::kCodes && kAligned;
  // Up to 8 rows gain up to 3% by copies, but the code of both ways costs the others as much.
  static constexpr bool kMayCopy = kTurned && Way::kColumns == 2;
  static constexpr float undo = 1.0f;  // as in TwoRowFragments

  uint32_t pairs[Way::kSegments][Way::kColumns][32];

  // Starts to load the columns from k on, unless there are no rows. Row i of the product is row
  // rows(i) of x, or the first if x has no such row: no other depends on it. All lanes of the warp
  // call rows() together.
  template <class Rows = RowsAsTheyAre>
  __device__ __forceinline__ void request(const LinearOperand& x, int k, Rows rows = {}) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int s = 0; s < Way::kSegments; ++s) {
      // Without a condition for each load: the compiler would load into other registers and wait.
      if (kTurned && !(rows.any() && k + s * kSegment < x.cols)) continue;
#pragma unroll
      for (int c = 0; c < Way::kColumns; ++c) {
#pragma unroll
        for (int q = 0; q < 8; ++q) {
          const int row = rows(c * 8 + (kTurned ? q : g));
          uint32_t* const words = pairs[s][c] + q * 4;
          if constexpr (kTurned) {
            load_words<4>(piece_of_x(x, row, k + s * kSegment + lane * 8), words);
          } else {
            load_x8<Input, kAligned>(x, row, k + s * kSegment + t * 64 + q * 8, words);
          }
        }
      }
    }
  }

  __device__ __forceinline__ const uint32_t* words(int s, int c, int i) const {
    return pairs[s][c] + i * 4;
  }

  // `staging` has kStaged bytes that only this warp uses.
  __device__ __forceinline__ void arrange(Shared staging) {
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
  }

  // If kMayCopy, copy() and take() do the same as request() and arrange(), without registers until
  // x has arrived. They need kCopied bytes that only this warp uses. copy() starts one group of
  // asynchronous copies, for which the warp waits before take().
  __device__ __forceinline__ void copy(const LinearOperand& x, int k, Shared staging) const {
    const int lane = kept(threadIdx.x & 31);
    const uint16_t* from = piece_of_x(x, 0, k + lane * 8);
#pragma unroll
    for (int row = 0; row < Way::kRows; ++row) {
      if (k >= x.cols || row >= x.rows) break;
      copy_16(staging + row * 512 + x_piece(row % 8, lane) * 16, from);
      from = kept(from + x.stride);
    }
    __pipeline_commit();
  }
  __device__ __forceinline__ void take(Shared staging) {
    const int lane = kept(threadIdx.x & 31), g = lane >> 2, t = lane & 3;
    __syncwarp();  // other lanes' copies have arrived
#pragma unroll
    for (int c = 0; c < Way::kColumns; ++c) {
      uint32_t (&p)[32] = pairs[0][c];
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        load_16(staging + c * kStaged + g * 512 + x_piece(g, t * 8 + q) * 16, p + q * 4);
      }
#pragma unroll
      for (int q = 0; q < 8; ++q) order_x8<Input>(p + q * 4);
    }
  }
};

// The same for LinearWay::kTwoRows, whose x stays in shared memory. Every lane loads, orders and
// scales a part of each row. Column g of the product is block t = g / 2 of row g % 2, and all its
// other blocks are zero.
template <class Input, bool kAligned>
class TwoRowFragments {
 public:
  using T = typename LinearInput<Input>::Operand;
  static constexpr bool kTurned = false, kMayCopy = false;
  static constexpr int kRowBytes = 2 * kSegment * 2 + 16;  // of staging; rows use different banks

  float undo;  // factor for the sums of row g % 2

  template <class Rows = RowsAsTheyAre>
  __device__ __forceinline__ void request(const LinearOperand& x, int k, Rows rows = {}) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int column = k + s * kSegment;
      there_[s] = rows.any() && column < x.cols;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if constexpr (kAligned && !LinearInput<Input>::kCodes) {
          // Without a condition for each load, as above.
          const uint16_t* const from = piece_of_x(x, rows(r), (there_[s] ? column : 0) + lane * 8);
          if (rows.any()) load_words<4>(from, parts_[s][r]);
        } else {
          load_x8<Input, kAligned>(x, rows(r), column + lane * 8, parts_[s][r]);
        }
      }
    }
  }

  // `staging` has kRowBytes for each of the first `count` rows, which only this warp uses.
  __device__ __forceinline__ void arrange(Shared staging, int count) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, own = g & 1;
    int lifts[2];
    __syncwarp();  // all lanes have read what was staged before
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t pair = 0;
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        uint32_t (&part)[4] = parts_[s][r];
        if (!there_[s]) part[0] = part[1] = part[2] = part[3] = 0;
        order_x8<Input>(part);
#pragma unroll
        for (int i = 0; i < 4; ++i) pair = max_magnitudes(pair, part[i]);
      }
      lifts[r] = lift_of_row(__reduce_max_sync(~0u, max(pair & 0xffffu, pair >> 16)));
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        uint32_t (&part)[4] = parts_[s][r];
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = multiply_pairs<T>(part[i], lift_pair(lifts[r]));
        if (r < count) store_16(staging + r * kRowBytes + s * kSegmentBytes + lane * 16, part);
      }
    }
    __syncwarp();
    undo = undo_lift(own == 0 ? lifts[0] : lifts[1]);
    holds_ = t == g >> 1 && own < count;
    from_ = staging + own * kRowBytes + t * (kSegmentBytes / 4);
  }

  // The four words of segment s that meet word i of the lane's codes, until the next but one call.
  __device__ __forceinline__ const uint32_t* words(int s, int, int i) {
    uint32_t (&w)[4] = words_[i & 1];
    load_16_if(holds_, from_ + s * kSegmentBytes + i * 16, w);
    return w;
  }

 private:
  static constexpr int kSegmentBytes = kSegment * 2;

  bool there_[2];            // whether the segments exist
  uint32_t parts_[2][2][4];  // of a segment and row, until arrange()
  bool holds_;               // whether the lane has any blocks
  Shared from_;
  uint32_t words_[2][4] = {};  // remain zero in other lanes
};

template <class Input, LinearWay kWay, bool kAligned>
using Fragments = std::conditional_t<WayTraits<kWay>::kAfter, TwoRowFragments<Input, kAligned>,
                                     RowFragments<Input, kWay, kAligned>>;

// The sums are the products times 2^kExponent.
template <class Input, LinearWay kWay>
constexpr int kExponent = [] {
  using T = typename LinearInput<Input>::Operand;
  const int of_x = LinearInput<Input>::kCodes ? ScaledCodes<T>::kExponent : 0;
  return of_x + (WayTraits<kWay>::kAfter ? 0 : ScaledCodes<T>::kExponent);  // if kAfter, in `undo`
}();

__device__ __forceinline__ float two_to_the(int exponent) {
  return bits_float(static_cast<uint32_t>(127 + exponent) << 23);
}

// What a lane reads of a stage: its codes of row g and its scales of that row. Those of row g + 8
// come 8 rows later.
struct LaneParts {
  Shared codes, scales;
};
__device__ __forceinline__ uint32_t lane_codes_at(int lane) {
  return (lane >> 2) * kStageRow + (lane & 3) * 32;
}
__device__ __forceinline__ uint32_t lane_scales_at(int lane) {
  return (lane >> 2) * kStageRow + kScalesAt + (lane & 3) * 4;
}
// What it has loaded of that: scales and half of the codes at first, so that it can wait for them
// while it requests a stage.
struct LaneWords {
  LaneParts from;
  uint32_t codes[2][8], scales[2];  // of rows g and g + 8

  __device__ __forceinline__ explicit LaneWords(LaneParts parts) : from(parts) {
#pragma unroll
    for (int h = 0; h < 2; ++h) scales[h] = load_4(from.scales + h * 8 * kStageRow);
    load<0>();
  }
  template <int kHalf>
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      load_16(from.codes + h * 8 * kStageRow + kHalf * 16, codes[h] + kHalf * 4);
    }
  }
};

// Adds the products of 16 rows of W with all columns, over a segment, to acc. x(c, i) are a lane's
// words of column c that meet word i of its codes.
template <class Input, LinearWay kWay, class X>
__device__ __forceinline__ void multiply_segment(LaneWords& words, X&& x,
                                                 float (&acc)[WayTraits<kWay>::kColumns][4]) {
  using Way = WayTraits<kWay>;
  using T = typename LinearInput<Input>::Operand;
  constexpr float kZero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  words.load<1>();
  const uint32_t (&codes)[2][8] = words.codes;
  if constexpr (Way::kAfter) {
    float scales[2][4];
    floats_from_e4m3(words.scales[0], scales[0]);
    floats_from_e4m3(words.scales[1], scales[1]);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      float d[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t low[4], high[4];
        place_codes<T>(codes[0][2 * b + i], low);
        place_codes<T>(codes[1][2 * b + i], high);
        const uint32_t* const p = x(0, 2 * b + i);
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
    uint32_t scales[2][2];
    scale_pairs<T>(words.scales[0], scales[0]);
    scale_pairs<T>(words.scales[1], scales[1]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t low[4], high[4];
      const bool upper = i / 2 % 2 == 1;
      const auto of = [&](int h) {
        const uint32_t pair = scales[h][i / 4];
        return upper ? half_twice<true>(pair) : half_twice<false>(pair);
      };
      scale_codes<T>(codes[0][i], of(0), low);
      scale_codes<T>(codes[1][i], of(1), high);
#pragma unroll
      for (int c = 0; c < Way::kColumns; ++c) {
        const uint32_t* const p = x(c, i);
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

#ifndef __CUDACC_RTC__
// Whether rows of that many bytes start on multiples of 16.
inline bool apart_by_16(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && bytes % 16 == 0;
}

// -DJITQUANT_ALIGNED builds a library for aligned operands, which compiles faster.
#ifdef JITQUANT_ALIGNED
constexpr bool kTakesUnaligned = false;
#else
constexpr bool kTakesUnaligned = true;
#endif

// Whether whole segments of a weight, of one expert or of many, and of x are loaded 16 bytes at a
// time.
template <class Input, class Weight>
bool is_aligned(const Weight& w, const LinearOperand& x) {
  return w.cols % kSegment == 0 && x.cols == w.cols && apart_by_16(w.codes, 0) &&
         apart_by_16(w.scales, 0) &&
         (LinearInput<Input>::kCodes || apart_by_16(x.data, x.stride * 2));
}
#endif

}  // namespace jitquant
