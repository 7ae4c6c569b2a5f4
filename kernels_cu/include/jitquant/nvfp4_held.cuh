// Rows that are read once, and quantized as they are: a block of threads holds a row in its
// registers while the row's amax is made, and loads its next row meanwhile. For rows of whole
// blocks that are aligned to 16 bytes. What it takes to encode a row is shared with the norms
// (nvfp4_norm.cuh), which hold another thing.
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

// What the threads of a row do together once each has looked at what it holds of it: x are those of
// the row, y the rows at once, as a multiprocessor holds only so many blocks, and what has to be
// worked out of a row takes as long for several, a lane each. All threads of the block call it
// together.
template <bool kNorm, int kMostRows>
class RowTeam {
 public:
  struct Shared {
    float2 partial[32];
    RowEncoding encodings[kMostRows];
    RowFacts facts[kMostRows];
  };

  __device__ __forceinline__ explicit RowTeam(Shared& shared) : shared_(shared) {}

  static __device__ __forceinline__ int slot() { return kMostRows > 1 ? threadIdx.y : 0; }
  static __device__ __forceinline__ int rows() { return kMostRows > 1 ? blockDim.y : 1; }
  static __device__ __forceinline__ int warps() { return blockDim.x >> 5; }

  __device__ __forceinline__ void begin(const RowScale& scale, Nvfp4Recipe recipe, int64_t cols) {
    if (threadIdx.x == 0) shared_.facts[slot()] = row_facts(scale, recipe, cols);
    __syncthreads();
  }

  // Works out the encoding of row r of `count`, which is this thread's, from what each thread has
  // of it: the sum of the squares, the largest magnitude as bits, and, asked for only where one of
  // them is NaN, the same without those, as if they were not there: numbers().
  template <class T, class F>
  __device__ __forceinline__ void agree(float squares, uint32_t most, int r, int count,
                                        const Normalize<T>& norm, const RowScale& scale,
                                        Nvfp4Recipe recipe, F&& numbers) {
    const int mine = threadIdx.x, first_warp = slot() * warps();
    const bool leads = slot() == 0 && mine < 32;
    const float sum = kNorm ? warp_sum(squares) : 0.0f;
#pragma unroll 1
    for (bool again = false;; again = true) {
      most = __reduce_max_sync(0xffffffffu, most);
      if ((mine & 31) == 0) shared_.partial[first_warp + (mine >> 5)] = {sum, bits_float(most)};
      __syncthreads();
      bool has_nan = false;
      if (leads) {
        // All lanes have the one row there is, or each has one of several.
        int of = 0;
        bool own = true, writes = mine == 0;
        RowSums sums;
        if (rows() == 1) {
          const float2 p = mine < warps() ? shared_.partial[mine] : float2{0.0f, 0.0f};
          sums = {kNorm ? warp_sum(p.x) : 0.0f, warp_max(p.y)};
        } else {
          of = mine;
          own = writes = mine < rows() && r + mine < count;
          for (int w = 0; own && w < warps(); ++w) {
            const float2 p = shared_.partial[of * warps() + w];
            sums.squares += p.x;
            sums.amax = amax_keep_nan(sums.amax, p.y);
          }
        }
        has_nan = own && is_nan(sums.amax) && !again;
        if (own && !has_nan) {
          const RowEncoding e = finish_row<kNorm>(sums, norm, scale, recipe, row_of(r + of), writes,
                                                  shared_.facts[of]);
          if (writes) shared_.encodings[of] = e;
        }
      }
      if (!__syncthreads_or(has_nan)) break;
      most = numbers();
    }
  }

  __device__ __forceinline__ const RowEncoding& encoding() const {
    return shared_.encodings[slot()];
  }
  // Of the rows so far, for kTensorAmax.
  __device__ __forceinline__ void put_partial(const RowScale& scale) const {
    if (threadIdx.x != 0) return;
    scale.partials[blockIdx.x * rows() + slot()] = shared_.facts[slot()].tensor_amax;
  }

 private:
  // In a norm's leading warp alone: its threads have few registers left.
  static __device__ __forceinline__ int64_t row_of(int r) {
    if constexpr (kNorm) return kept(static_cast<uint32_t>(r));
    return r;
  }

  Shared& shared_;
};

// Most rows at once.
constexpr int kRowsAtOnce = 8;

// Most threads of a row: a quarter of a multiprocessor's registers is for whole warps.
constexpr int most_threads_with(int registers) {
  const int warps = 4 * (16384 / (32 * registers));
  return 32 * (warps < 32 ? warps : 32);
}

// Bytes that a thread may load ahead: more do not fit beside what it holds.
constexpr int kMostAhead = 64;

// Registers of a thread: no more, so that rows enough are at work on a multiprocessor.
template <class Source>
constexpr int held_registers() {
  return sizeof(typename Source::Element) == 4 ? 128 : 72;
}

// A thread has kShare blocks of values of a row.
template <class Source, int kShare>
__global__ void __maxnreg__(held_registers<Source>())
    held_kernel(Source source, Normalize<typename Source::Element> norm, RowScale scale,
                Nvfp4Recipe recipe, Nvfp4Output out) {
  constexpr bool kAhead = sizeof(typename Source::Fetched) * kShare <= kMostAhead;
  constexpr int kMostRows = kShare == 1 ? kRowsAtOnce : 1;
  using Value = typename Source::Value;
  using Team = RowTeam<false, kMostRows>;
  __shared__ typename Team::Shared shared;
  Team team(shared);
  const int width = static_cast<int>(blocks_of(source.cols));
  const int row_count = static_cast<int>(source.rows);
  const int threads = blockDim.x, mine = threadIdx.x;
  wait_for_previous();
  let_next_begin();
  team.begin(scale, recipe, source.cols);

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
  const int step = gridDim.x * team.rows();
  int r = blockIdx.x * team.rows() + team.slot();
  if constexpr (kAhead) fetch(r);
#pragma unroll 1
  for (; r - team.slot() < row_count; r += step) {
    const bool there = kMostRows == 1 || r < row_count;
    Value held[kShare];
    float block_max[kShare];
    uint32_t most = 0;  // an amax as bits
    if (there) {
      const typename Source::Row row = source.row(r);
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        const int b = mine + k * threads;
        block_max[k] = 0.0f;
        if (b < width) {
          if constexpr (!kAhead) fetched[0] = source.template fetch<true>(row, b);
          held[k] = source.template value<true>(fetched[kAhead ? k : 0], row, b);
          block_max[k] = block_amax(held[k]);
          most = max(most, float_bits(block_max[k]));
        }
      }
    }
    if constexpr (kAhead) fetch(r + step);

    team.agree(0.0f, most, r, row_count, norm, scale, recipe, [&] {
      Amax<typename Value::Element> numbers;
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        if (there && mine + k * threads < width) numbers.add(held[k]);
      }
      return float_bits(numbers.result());
    });
    if (!there) continue;
    const RowEncoding& e = team.encoding();
    const OutputRow to(out, r);
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      const int b = mine + k * threads;
      if (b < width) {
        to.store(b, place + k * place_step,
                 nvfp4_quantize_block(held[k], block_max[k], e.encoding));
      }
    }
  }
  zero_padding(out);
}

}  // namespace jitquant
