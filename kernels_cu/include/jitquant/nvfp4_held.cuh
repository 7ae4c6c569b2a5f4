// Rows that are read once: a block of threads holds what it quantizes of a row in its registers
// while the row's sums are made, and loads its next row meanwhile. For rows of whole blocks that
// are aligned to 16 bytes; nvfp4_rows.cuh has the kernel for the others.
#pragma once

#include "jitquant/nvfp4_kernels.cuh"

namespace jitquant {

// What the threads of a row learn of it, and after a reduction one of them knows.
struct RowSums {
  float squares = 0.0f;  // of the values before the weight, for a norm
  float amax = 0.0f;     // of what is held; NaN if there is one in it
};

// What it takes to encode a row, once its sums are known.
struct alignas(16) RowEncoding {
  Nvfp4Encoding encoding;
  float inverse;  // inv_rms, for a norm
};

// What is the same for all rows of a block of threads. In shared memory: only a row's last steps
// need it.
struct RowFacts {
  Nvfp4Encoding given;  // of all rows, for kGiven
  float over_cols;
  float tensor_amax;  // of the rows so far, for kTensorAmax
};

__device__ __forceinline__ RowFacts row_facts(const RowScale& scale, Nvfp4Recipe recipe,
                                              int64_t cols) {
  RowFacts facts = {{}, reciprocal_rn(static_cast<float>(cols)), 0.0f};
  if (scale.mode == RowMode::kGiven && scale.given.kind != GlobalScale::kRows) {
    facts.given = given_encoding(scale.given, recipe);
  }
  return facts;
}

// `writes`: this thread writes what is told of the row.
template <bool kNorm, class T>
__device__ __forceinline__ RowEncoding finish_row(const RowSums& sums, const Normalize<T>& norm,
                                                  const RowScale& scale, Nvfp4Recipe recipe,
                                                  int64_t row, bool writes, RowFacts& facts) {
  RowEncoding e = {facts.given, 1.0f};
  float amax = sums.amax;
  if constexpr (kNorm) {
    e.inverse = reciprocal_sqrt(fma_rn(sums.squares, facts.over_cols, norm.eps));
    if (writes) norm.inv_rms[row] = e.inverse;
    amax = amax_ignore_nan(0.0f, mul_rn(amax, e.inverse));
  }
  if (scale.mode == RowMode::kTensorAmax) {
    if (writes) facts.tensor_amax = fmaxf(facts.tensor_amax, amax);
  } else if (scale.mode == RowMode::kRowAmax) {
    if (writes) scale.gsa_out[row] = div_rn(amax, scale.divisor);
    e.encoding = nvfp4_encoding_from_amax(amax, scale.divisor, recipe);
  } else if (scale.given.kind == GlobalScale::kRows) {
    e.encoding = nvfp4_encoding_from_gsa(scale.given.gsa[row * scale.given.stride], recipe);
  }
  return e;
}

// A block of values of a row that is quantized as it is.
template <class Source, bool kNorm>
struct HeldBlock {
  typename Source::Value x;

  __device__ __forceinline__ float amax() const { return block_amax(x); }
  __device__ __forceinline__ float amax_of_numbers() const {
    Amax<typename Source::Value::Element> numbers;
    numbers.add(x);
    return numbers.result();
  }
  __device__ __forceinline__ Nvfp4Codes quantize(float b, const RowEncoding& e) const {
    return nvfp4_quantize_block(x, b, e.encoding);
  }
};

// Of a row that is normalized: |value * weight|, without inv_rms, and the signs of the codes.
// Magnitudes order as integers, NaN above all, of which one instruction compares three.
template <class Source>
struct HeldBlock<Source, true> {
  float magnitude[16];
  uint32_t signs[2];

  __device__ __forceinline__ float amax() const {
    uint32_t most[2] = {};
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      uint32_t& m = most[(i >> 1) & 1];
      m = max_of_three(m, float_bits(magnitude[i]), float_bits(magnitude[i + 1]));
    }
    return bits_float(most[0] > most[1] ? most[0] : most[1]);
  }
  __device__ __forceinline__ float amax_of_numbers() const {
    float b = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) b = amax_ignore_nan(b, magnitude[i]);
    return b;
  }
  __device__ __forceinline__ Nvfp4Codes quantize(float b, const RowEncoding& e) const {
    return nvfp4_quantize_magnitudes(magnitude, signs, b, e.inverse, e.encoding);
  }

 private:
  static __device__ __forceinline__ uint32_t max_of_three(uint32_t a, uint32_t b, uint32_t c) {
#if __CUDA_ARCH__ >= 900
    return __vimax3_u32(a, b, c);
#else
    return max(max(a, b), c);
#endif
  }
};

// The weights of a norm as the threads that hold a row want them, in shared memory: magnitudes in
// fp32, in four planes of four columns for each 32 blocks, which are one warp's, and the signs.
class HeldWeights {
 public:
  static constexpr size_t bytes(int width) {
    return padded(width) * 16 * sizeof(float) + width * sizeof(uint2);
  }

  __device__ __forceinline__ HeldWeights(void* storage, int width)
      : magnitudes_(static_cast<float4*>(storage)),
        signs_(reinterpret_cast<uint2*>(magnitudes_ + 4 * padded(width))) {}

  template <class W>
  __device__ __forceinline__ void put(const W* weight, int b) const {
    const Block<W> w = load_block<true>(weight + b * 16, 16, true);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      magnitudes_[place(b) + 32 * i] = {magnitude_at(w, 4 * i), magnitude_at(w, 4 * i + 1),
                                        magnitude_at(w, 4 * i + 2), magnitude_at(w, 4 * i + 3)};
    }
    signs_[b] = {e2m1x8_signs(w, 0), e2m1x8_signs(w, 1)};
  }

  // What is held of block b of the values; the squares of the values are added to `squares`.
  template <class Value, class Source>
  __device__ __forceinline__ void weigh(const Value& x, int b, HeldBlock<Source, true>& held,
                                        float (&squares)[2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 w = magnitudes_[place(b) + 32 * i];
      const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float v = magnitude_at(x, 4 * i + j);
        held.magnitude[4 * i + j] = mul_rn(v, weight[j]);
        squares[j & 1] = fma_rn(v, v, squares[j & 1]);
      }
    }
    const uint2 signs = signs_[b];
    held.signs[0] = e2m1x8_signs(x, 0) ^ signs.x;
    held.signs[1] = e2m1x8_signs(x, 1) ^ signs.y;
  }

 private:
  static __host__ __device__ constexpr int padded(int width) { return (width + 31) & ~31; }
  static __device__ __forceinline__ int place(int b) { return (b & ~31) * 4 + (b & 31); }
  template <class T>
  static __device__ __forceinline__ float magnitude_at(const Block<T>& x, int i) {
    return abs_of(magnitude_of(x, i));
  }

  float4* magnitudes_;
  uint2* signs_;
};

// Bytes that a thread may load ahead: more do not fit beside what it holds.
constexpr int kMostAhead = 64;

// Registers of a thread: no more, so that rows enough are at work on a multiprocessor.
template <class Source, bool kNorm, int kShare>
constexpr int held_registers() {
  if (sizeof(typename Source::Element) == 4) return 128;
  return kNorm ? (kShare == 1 ? 64 : 128) : 72;
}

// The threads of a block: x those of a row, each with kShare blocks of its values; y, for kShare of
// 1, the rows at once: a multiprocessor holds only so many blocks, and what has to be worked out of
// a row takes as long for several, a lane each.
constexpr int kRowsAtOnce = 8;

template <class Source, bool kNorm, int kShare>
__global__ void __maxnreg__((held_registers<Source, kNorm, kShare>()))
    held_kernel(Source source, Normalize<typename Source::Element> norm, RowScale scale,
                Nvfp4Recipe recipe, Nvfp4Output out) {
  constexpr bool kAhead = sizeof(typename Source::Fetched) * kShare <= kMostAhead;
  constexpr int kMostRows = kShare == 1 ? kRowsAtOnce : 1;
  extern __shared__ uint4 row_storage[];
  __shared__ float2 partial[32];
  __shared__ RowEncoding encodings[kMostRows];
  __shared__ RowFacts facts[kMostRows];
  const int width = static_cast<int>(blocks_of(source.cols));
  const int row_count = static_cast<int>(source.rows);
  const int threads = blockDim.x, mine = threadIdx.x;
  const int slot = kMostRows > 1 ? threadIdx.y : 0, rows = kMostRows > 1 ? blockDim.y : 1;
  const int warps = threads >> 5, first_warp = slot * warps;
  const bool leads = slot == 0 && mine < 32;  // the warp that works out what all need to encode
  const HeldWeights weights(row_storage, width);
  const bool quantizes = scale.mode != RowMode::kTensorAmax;
  if (quantizes) let_next_begin();
  if constexpr (kNorm) {
#pragma unroll 1
    for (int b = slot * threads + mine; b < width; b += rows * threads) {
      if (norm.weight.fp32) {
        weights.put(static_cast<const float*>(norm.weight.data), b);
      } else {
        weights.put(static_cast<const typename Source::Element*>(norm.weight.data), b);
      }
    }
  }
  wait_for_previous();
  if (!quantizes) let_next_begin();
  if (mine == 0) facts[slot] = row_facts(scale, recipe, source.cols);
  __syncthreads();

  // A multiple of four blocks is as far in any row, wherever it begins.
  const int place = static_cast<int>(scale_place(out, mine));
  const int place_step = static_cast<int>(scale_place(out, threads));
  typename Source::Fetched fetched[kAhead ? kShare : 1];
  auto fetch = [&](int r) {
    if (r >= row_count) return;
    const typename Source::Row row = source.row(r);
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      const int b = mine + k * threads;
      if (b < width) fetched[k] = source.template fetch<true>(row, b);
    }
  };
  const int step = gridDim.x * rows;
  int r = blockIdx.x * rows + slot;
  if constexpr (kAhead) fetch(r);
#pragma unroll 1
  for (; r - slot < row_count; r += step) {
    const bool there = kMostRows == 1 || r < row_count;
    HeldBlock<Source, kNorm> held[kShare];
    float block_max[kShare];
    float squares[2] = {};
    uint32_t most = 0;  // an amax as bits
    if (there) {
      const typename Source::Row row = source.row(r);
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        const int b = mine + k * threads;
        block_max[k] = 0.0f;
        if (b < width) {
          if constexpr (!kAhead) fetched[0] = source.template fetch<true>(row, b);
          const typename Source::Value x =
              source.template value<true>(fetched[kAhead ? k : 0], row, b);
          if constexpr (kNorm) {
            weights.weigh(x, b, held[k], squares);
          } else {
            held[k].x = x;
          }
          block_max[k] = held[k].amax();
          most = max(most, float_bits(block_max[k]));
        }
      }
    }
    if constexpr (kAhead) fetch(r + step);

    const float sum = kNorm ? warp_sum(squares[0] + squares[1]) : 0.0f;
#pragma unroll 1
    for (bool again = false;; again = true) {
      most = __reduce_max_sync(0xffffffffu, most);
      if ((mine & 31) == 0) partial[first_warp + (mine >> 5)] = {sum, bits_float(most)};
      __syncthreads();
      bool has_nan = false;
      if (leads) {
        // All lanes have the one row there is, or each has one of several.
        int of = 0;
        bool own = true, writes = mine == 0;
        RowSums sums;
        if (rows == 1) {
          const float2 p = mine < warps ? partial[mine] : float2{0.0f, 0.0f};
          sums = {kNorm ? warp_sum(p.x) : 0.0f, warp_max(p.y)};
        } else {
          of = mine;
          own = writes = mine < rows && r + mine < row_count;
          for (int w = 0; own && w < warps; ++w) {
            const float2 p = partial[of * warps + w];
            sums.squares += p.x;
            sums.amax = amax_keep_nan(sums.amax, p.y);
          }
        }
        has_nan = own && is_nan(sums.amax) && !again;
        if (own && !has_nan) {
          const RowEncoding e =
              finish_row<kNorm>(sums, norm, scale, recipe, r + of, writes, facts[of]);
          if (writes) encodings[of] = e;
        }
      }
      if (!__syncthreads_or(has_nan)) break;
      // Once more without the NaN: the rest of the row is as if it were not there.
      most = 0;
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        if (there && mine + k * threads < width) {
          most = max(most, float_bits(held[k].amax_of_numbers()));
        }
      }
    }
    if (!quantizes || !there) continue;
    const RowEncoding& e = encodings[slot];
    const OutputRow to(out, r);
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      const int b = mine + k * threads;
      if (b < width) to.store(b, place + k * place_step, held[k].quantize(block_max[k], e));
    }
  }
  if (quantizes) {
    zero_padding(out);
  } else if (mine == 0) {
    scale.partials[blockIdx.x * rows + slot] = facts[slot].tensor_amax;
  }
}

}  // namespace jitquant
