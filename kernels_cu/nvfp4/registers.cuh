// Rows that are read once and quantized without a norm: a thread block holds a row in registers
// while it computes the row's amax, and loads its next row in the meantime. For rows of whole
// blocks that are aligned to 16 bytes. The norms (norm.cuh), which hold products instead, share the
// encoding of a row.
#pragma once

#include "kernels.cuh"

namespace jitquant {

// A row's encoding, available once its sums are known, and the row's outputs.
struct alignas(16) RowEncoding {
  Nvfp4Encoding encoding;
  float inverse;   // inv_rms, for a norm
  float amax;      // of the quantized values
  uint32_t again;  // the row contains NaN, and the amax without NaN is not known yet
};

// What is the same for all rows of a thread block. In shared memory, because only the last steps of
// a row need it.
struct RowFacts {
  Nvfp4Encoding given;  // for all rows, with kGiven
  float over_cols;
};

// Rows that are quantized without a norm always have a gsa from their own amax here.
template <bool kNorm>
JITQUANT_HD RowMode row_mode(const RowScale& scale) {
  return kNorm ? scale.mode : RowMode::kRowAmax;
}

template <bool kNorm>
__device__ __forceinline__ RowFacts row_facts(const RowScale& scale, Nvfp4Recipe recipe,
                                              int64_t cols) {
  RowFacts facts = {{}, reciprocal_rn(static_cast<float>(cols))};
  if (row_mode<kNorm>(scale) == RowMode::kGiven && scale.given.kind != GlobalScale::kRows) {
    facts.given = given_encoding(scale.given, recipe);
  }
  return facts;
}

// The row's encoding from its sum of squares and the largest magnitude held.
template <bool kNorm, class T>
__device__ __forceinline__ RowEncoding finish_row(float squares, float amax,
                                                  const Normalize<T>& norm, const RowScale& scale,
                                                  Nvfp4Recipe recipe, int64_t row,
                                                  const RowFacts& facts) {
  RowEncoding e = {facts.given, 1.0f, amax, 0};
  if constexpr (kNorm) {
    e.inverse = inverse_rms(squares, facts.over_cols, norm.eps);
    e.amax = amax_ignore_nan(0.0f, mul_rn(amax, e.inverse));
  }
  if (row_mode<kNorm>(scale) == RowMode::kRowAmax) {
    e.encoding = nvfp4_encoding_from_amax(e.amax, scale.divisor, recipe);
  } else if (row_mode<kNorm>(scale) == RowMode::kGiven && scale.given.kind == GlobalScale::kRows) {
    e.encoding = nvfp4_encoding_from_gsa(scale.given.gsa[row * scale.given.stride], recipe);
  }
  return e;
}
// Writes the row's outputs. Called by one thread, which alone accumulates the amax of its rows.
template <bool kNorm, class T>
__device__ __forceinline__ void tell_row(const RowEncoding& e, const Normalize<T>& norm,
                                         const RowScale& scale, int64_t row, float& tensor_amax) {
  if (kNorm) norm.inv_rms[row] = e.inverse;
  if (row_mode<kNorm>(scale) == RowMode::kRowAmax) {
    scale.gsa_out[row] = div_rn(e.amax, scale.divisor);
  } else if (row_mode<kNorm>(scale) == RowMode::kTensorAmax) {
    tensor_amax = fmaxf(tensor_amax, e.amax);
  }
}

// Writes maximum `mine` of `count`, for kTensorAmax, and zeros after them. By one thread for each.
__device__ __forceinline__ void put_partial(const RowScale& scale, int mine, int count,
                                            float amax) {
  scale.partials[mine] = amax;
  for (int i = count + mine; i < scale.maxima; i += count) scale.partials[i] = 0.0f;
}

// The steps that the threads of a row do together. threadIdx.x counts the threads of a row,
// threadIdx.y the rows in flight: an SM holds only so many thread blocks, and one lane per row
// computes the encodings of several rows in the time of one. Called by all threads of the block
// together.
template <bool kNorm, int kMostRows, int kShare = 1>
class RowTeam {
 public:
  struct Shared {
    // The sums of squares of each warp's chunks, and its amax as bits, followed by zeros.
    alignas(16) float squares[kNorm ? kChunkSums : 1];
    uint4 most[8];
    RowEncoding encodings[kMostRows];
    RowFacts facts[kMostRows];
    float tensor_amax[kMostRows];  // of all rows so far, for kTensorAmax
  };

  __device__ __forceinline__ explicit RowTeam(Shared& shared) : shared_(shared) {}

  static __device__ __forceinline__ int slot() { return kMostRows > 1 ? threadIdx.y : 0; }
  static __device__ __forceinline__ int rows() { return kMostRows > 1 ? blockDim.y : 1; }
  static __device__ __forceinline__ int warps() { return blockDim.x >> 5; }

  __device__ __forceinline__ void begin(const RowScale& scale, Nvfp4Recipe recipe, int64_t cols) {
    if (threadIdx.x == 0) {
      shared_.facts[slot()] = row_facts<kNorm>(scale, recipe, cols);
      shared_.tensor_amax[slot()] = 0.0f;
    }
    if (slot() == 0 && threadIdx.x < 32) {
      if constexpr (kNorm) shared_.squares[threadIdx.x] = shared_.squares[threadIdx.x + 32] = 0.0f;
      most_of(threadIdx.x) = 0;
    }
    __syncthreads();
  }

  // The encoding of this thread's row, r of `count`. Each thread passes the sums of squares of its
  // blocks, which are in neighboring chunks, and its largest magnitude as bits. numbers() is the
  // largest magnitude without NaNs, called only if one is NaN. meanwhile() is called once, while
  // other threads compute.
  template <class T, class F, class G>
  __device__ __forceinline__ RowEncoding agree(const float (&squares)[kNorm ? kShare : 1],
                                               uint32_t most, int r, int count,
                                               const Normalize<T>& norm, const RowScale& scale,
                                               Nvfp4Recipe recipe, F&& numbers, G&& meanwhile) {
    const int mine = threadIdx.x, warp = slot() * warps() + (mine >> 5);
    const bool leads = slot() == 0 && mine < 32;
    if constexpr (kNorm) {
      const float sum = chunk_sum(squares);
      const int place = kept(static_cast<uint32_t>(mine)) >> 4, part = place & 1;  // of a chunk
      if ((mine & 15) == 0 && part < kShare) {
        shared_.squares[kShare * (slot() * warps() + (place >> 1)) + part] = sum;
      }
    }
    RowEncoding e;
#pragma unroll 1
    for (bool again = false;; again = true) {
      most = __reduce_max_sync(0xffffffffu, most);
      if ((mine & 31) == 0) most_of(warp) = most;
      __syncthreads();
      if (leads) {
        lead(r, count, again, norm, scale, recipe);
      } else if (!again) {
        meanwhile();
      }
      __syncthreads();
      e = shared_.encodings[slot()];
      if (!e.again) break;
      most = numbers();
    }
    if (leads) meanwhile();
    if (mine == 0 && r < count) {
      tell_row<kNorm>(e, norm, scale, row_of(r), shared_.tensor_amax[slot()]);
    }
    return e;
  }

  // Writes the amax of the rows so far, for kTensorAmax.
  __device__ __forceinline__ void put_partial(const RowScale& scale) const {
    if (threadIdx.x != 0) return;
    jitquant::put_partial(scale, blockIdx.x * rows() + slot(), gridDim.x * rows(),
                          shared_.tensor_amax[slot()]);
  }

 private:
  // Only for the leading warp of a norm, whose threads have few registers left.
  static __device__ __forceinline__ int64_t row_of(int r) {
    if constexpr (kNorm) return kept(static_cast<uint32_t>(r));
    return r;
  }

  // Called by the leading warp: all its lanes compute the encoding of the only row, or each lane
  // that of one of several rows.
  template <class T>
  __device__ __forceinline__ void lead(int r, int count, bool again, const Normalize<T>& norm,
                                       const RowScale& scale, Nvfp4Recipe recipe) const {
    int of = 0;
    bool own = true;
    float squares = 0.0f;
    uint32_t most = 0;
    if (rows() == 1) {
      if constexpr (kNorm) squares = sum_of_chunks(shared_.squares, kShare * warps());
      most = __reduce_max_sync(0xffffffffu, most_of(threadIdx.x));
    } else {
      of = threadIdx.x;
      own = of < rows() && r + of < count;
      if (kNorm && own) squares = shared_.squares[of];  // here each row of a norm has one warp
      for (int w = of * warps(); own && w < (of + 1) * warps(); ++w) most = max(most, most_of(w));
    }
    const bool has_nan = own && is_nan(bits_float(most)) && !again;
    RowEncoding e = finish_row<kNorm>(squares, bits_float(most), norm, scale, recipe,
                                      row_of(own ? r + of : 0), shared_.facts[own ? of : 0]);
    e.again = __any_sync(0xffffffffu, has_nan);
    if (rows() == 1 ? threadIdx.x == 0 : of < rows()) shared_.encodings[of] = e;
  }

  __device__ __forceinline__ uint32_t& most_of(int warp) const {
    return reinterpret_cast<uint32_t*>(shared_.most)[warp];
  }

  Shared& shared_;
};

// The maximum number of rows in flight.
constexpr int kRowsAtOnce = 8;

// When the thread blocks of a norm start with their first row. If all of an SM loaded at the same
// time, all data would arrive late, with nothing to compute until then.
struct RowStart {
  int sms;    // thread blocks are assigned to them in order
  int apart;  // cycles between the starts of two thread blocks on an SM

  // Whether this thread block is the first on its SM.
  __device__ __forceinline__ bool is_first() const { return static_cast<int>(blockIdx.x) < sms; }
  __device__ __forceinline__ void wait() const {
#if defined(__CUDA_ARCH__)
    if (apart == 0) return;
    const uint32_t cycles = blockIdx.x / static_cast<uint32_t>(sms) * apart;
    uint32_t begin, now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(begin));
    do {
      asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
    } while (now - begin < cycles);
#endif
  }
};

// The rows of each thread block of register_rows_kernel. Most thread blocks are persistent and have
// a row of the first `end` in every `step`. Memory serves some of them later than others, by up to
// a fifth of the time at 4096 rows. So the last rows get thread blocks of their own, which start
// when another one ends.
struct RowSchedule {
  int staying;  // persistent thread blocks
  int step, end;

  // The first of the `rows` rows that this thread block has in flight.
  __device__ __forceinline__ int first(int rows) const {
    const int i = blockIdx.x;
    return i < staying ? i * rows : end + (i - staying);
  }
  // Whether there are more rows after r.
  __device__ __forceinline__ bool more(int r) const {
    return static_cast<int>(blockIdx.x) < staying && r + step < end;
  }
};

// The maximum threads per row: each quarter of an SM's registers holds whole warps.
constexpr int most_threads_with(int registers) {
  const int warps = 4 * (16384 / (32 * registers));
  return 32 * (warps < 32 ? warps : 32);
}

// Bytes that a thread may load ahead. More does not fit next to what it holds.
constexpr int kMostAhead = 96;

// Registers per thread, limited so that enough rows are in flight on an SM. Shifting values into
// place takes some.
template <class Source>
constexpr int register_rows_registers() {
  using T = typename Source::Element;
  constexpr size_t kFetched = sizeof(typename Source::Fetched);
  if (sizeof(T) == 4) return 128;
  return kFetched == sizeof(Block<T>) ? 64 : (kFetched == sizeof(LooseBlock<T>) ? 80 : 72);
}

// Each thread has kShare blocks of a row.
template <class Source, int kShare>
__global__ void __maxnreg__(register_rows_registers<Source>())
    register_rows_kernel(Source source, Normalize<typename Source::Element> norm, RowScale scale,
                         Nvfp4Recipe recipe, Nvfp4Output out, RowSchedule rows) {
  constexpr bool kAhead = sizeof(typename Source::Fetched) * kShare <= kMostAhead;
  // Loads early instead of while others compute the row's encoding, for which there are not enough
  // registers.
  constexpr bool kEarly =
      sizeof(typename Source::Fetched) >= 2 * sizeof(Block<typename Source::Element>);
  constexpr int kMostRows = kShare == 1 ? kRowsAtOnce : 1;
  using Value = typename Source::Value;
  using Team = RowTeam<false, kMostRows>;
  __shared__ typename Team::Shared shared;
  Team team(shared);
  const int width = static_cast<int>(blocks_of(source.cols));
  const int row_count = static_cast<int>(source.rows);
  const int mine = threadIdx.x, first = (mine >> 5) * (32 * kShare) + (mine & 31);
  const int left = width - first;
  int r = rows.first(team.rows()) + team.slot();
  if (r < row_count) {
    const typename Source::Row row = source.row(r);
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      if (32 * k < left) source.prefetch(row, first + 32 * k);
    }
  }
  wait_for_previous();
  let_next_begin();

  // Missing blocks of a row are zero.
  typename Source::Fetched fetched[kAhead ? kShare : 1] = {};
  auto fetch = [&](int r) {
    if (kMostRows > 1 && r >= row_count) return;
    const typename Source::Row row = source.row(kept(static_cast<uint32_t>(r)));
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      if (32 * k < left) fetched[k] = source.template fetch<true>(row, first + 32 * k);
    }
  };
  if (kAhead && r < row_count) fetch(r);
  team.begin(scale, recipe, source.cols);
#pragma unroll 1
  for (bool more = r - team.slot() < row_count; more;) {
    const bool there = kMostRows == 1 || r < row_count;
    Value held[kShare];
    float block_max[kShare];
    uint32_t most = 0;  // an amax as bits
    const typename Source::Row row = source.row(there ? r : 0);
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      const int b = first + 32 * k;
      if constexpr (!kAhead) {
        if (there && 32 * k < left) fetched[0] = source.template fetch<true>(row, b);
      }
      held[k] = source.template value<true>(fetched[kAhead ? k : 0], row, b);
      block_max[k] = block_amax(held[k]);
      most = max(most, float_bits(block_max[k]));
    }
    const auto fetch_next = [&] {
      if (rows.more(r - team.slot())) fetch(r + rows.step);
    };
    if constexpr (kAhead && kEarly) fetch_next();
    const float none[1] = {};
    const RowEncoding e = team.agree(
        none, most, r, row_count, norm, scale, recipe,
        [&] {
          Amax<typename Value::Element> numbers;
#pragma unroll
          for (int k = 0; k < kShare; ++k) numbers.add(held[k]);
          return float_bits(numbers.result());
        },
        [&] {
          if constexpr (kAhead && !kEarly) fetch_next();
        });
    const OutputRow to(out, kept(static_cast<uint32_t>(r)));
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      const Nvfp4Codes codes = nvfp4_quantize_block(held[k], block_max[k], e.encoding);
      const uint32_t b = kept(static_cast<uint32_t>(first)) + 32 * k;
      if (there && 32 * k < left) to.store(b, scale_place(out, b), codes);
    }
    more = rows.more(r - team.slot());
    r += rows.step;
  }
  zero_padding(out);
}

}  // namespace jitquant
