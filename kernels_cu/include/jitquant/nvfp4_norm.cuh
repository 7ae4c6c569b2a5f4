// Norms of rows that are read once: a block of threads holds the products of a row and the weight
// in its registers while the row's sums are made, and copies its next row into shared memory
// meanwhile. For rows of whole blocks that are aligned to 16 bytes.
#pragma once

#include "jitquant/nvfp4_held.cuh"

namespace jitquant {

// What is held of a block: |value * weight|, without inv_rms, and the signs of the codes.
// Magnitudes order as integers, NaN above all, of which one instruction compares three.
struct HeldProduct {
  float magnitude[16];
  uint32_t signs;

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
  __device__ __forceinline__ Nvfp4Codes quantize(float b, const RowEncoding& e) {
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
  static __host__ __device__ constexpr size_t bytes(int width) {
    return padded(width) * (16 * sizeof(float) + sizeof(uint32_t));
  }

  // For a thread that holds block `first`, and others a multiple of 32 blocks on.
  __device__ __forceinline__ HeldWeights(void* storage, int width, int first)
      : magnitudes_(static_cast<float4*>(storage)),
        signs_(reinterpret_cast<uint32_t*>(magnitudes_ + 4 * padded(width))),
        place_(kept(place(first))),
        first_(kept(first)) {}

  template <class W>
  __device__ __forceinline__ void put(const W* weight, int b) const {
    const Block<W> w = load_block<true>(weight + b * 16, 16, true);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      magnitudes_[place(b) + 32 * i] = {magnitude_at(w, 4 * i), magnitude_at(w, 4 * i + 1),
                                        magnitude_at(w, 4 * i + 2), magnitude_at(w, 4 * i + 3)};
    }
    signs_[b] = e2m1x16_signs(w);
  }

  // What is held of block first + 32 * k of the values; the squares of the values are added to
  // `squares`.
  template <class Value>
  __device__ __forceinline__ void weigh(const Value& x, int k, HeldProduct& held,
                                        float (&squares)[2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 w = magnitudes_[place_ + (128 * k + 32 * i)];
      const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float v = magnitude_at(x, 4 * i + j);
        held.magnitude[4 * i + j] = mul_rn(v, weight[j]);
        squares[j & 1] = fma_rn(v, v, squares[j & 1]);
      }
    }
    held.signs = e2m1x16_signs(x) ^ signs_[first_ + 32 * k];
  }

 private:
  static __host__ __device__ constexpr int padded(int width) { return (width + 31) & ~31; }
  static __device__ __forceinline__ int place(int b) { return (b & ~31) * 4 + (b & 31); }
  template <class T>
  static __device__ __forceinline__ float magnitude_at(const Block<T>& x, int i) {
    return abs_of(magnitude_of(x, i));
  }

  float4* magnitudes_;
  uint32_t* signs_;
  uint32_t place_, first_;
};

// What a warp copies of its next row, in shared memory: for each tensor of the row and each share
// the 32 blocks that are its threads'. A thread copies other pieces than it reads, so that a warp's
// are without a gap in memory.
template <class T, int kShare>
class CopiedBlocks {
 public:
  static constexpr size_t bytes(int threads, int tensors) {
    return sizeof(Block<T>) * kShare * threads * tensors;
  }

  // For warp `warp`, of whose blocks of a row `left` are there.
  __device__ __forceinline__ CopiedBlocks(void* storage, int warp, int tensors, int first, int left)
      : pieces_(static_cast<uint4*>(storage)) {
    const int lane = threadIdx.x & 31, base = warp * tensors * (kShare * kPieces);
    from_ = kept(first * kParts + lane);
    to_ = kept(base + place(lane / kParts, lane % kParts));
    at_ = kept(base + lane);
    left_ = kept(left - lane / kParts);
  }

  // From the row at p, of whose blocks `first` is the warp's first.
  __device__ __forceinline__ void copy(const T* p, int tensor) const {
    const uint4* const from = kept(reinterpret_cast<const uint4*>(p) + from_);
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
#pragma unroll
      for (int i = 0; i < 32; i += 32 / kParts) {
        if (32 * k + i < static_cast<int>(left_)) {
          __pipeline_memcpy_async(pieces_ + (to_ + (tensor * kShare + k) * kPieces + i),
                                  from + (32 * k + i) * kParts, sizeof(uint4));
        }
      }
    }
  }

  // The block of this thread.
  __device__ __forceinline__ Block<T> read(int tensor, int k) const {
    Block<T> block;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      load_words<4>(
          pieces_ + ((at_ ^ (part * (8 / kParts))) + (tensor * kShare + k) * kPieces + part * 32),
          block.words + 4 * part);
    }
    return block;
  }

 private:
  static constexpr int kParts = Block<T>::kWords / 4;  // of a block, 16 bytes each
  static constexpr int kPieces = 32 * kParts;

  // Neighbours in memory, and the same part of neighbours, are in different banks.
  static __device__ __forceinline__ int place(int block, int part) {
    return part * 32 + (block ^ (part * (8 / kParts)));
  }

  uint4* pieces_;
  uint32_t from_, to_, at_, left_;
};

// Where the codes and scales of a thread's blocks go, from row to row. A warp's blocks are without
// a gap, share after share, and a multiple of four blocks is as far in any row.
class HeldOutput {
 public:
  // `row` is the first of the rows, `step` apart, and `first` the block of the first share.
  __device__ __forceinline__ HeldOutput(const Nvfp4Output& out, uint32_t row, uint32_t step,
                                        uint32_t first)
      : out_(out),
        codes_(reinterpret_cast<uint2*>(out.codes) + static_cast<uint64_t>(row) * width() + first),
        row_(row),
        step_(step),
        codes_step_(step * width() * static_cast<uint32_t>(sizeof(uint2))),
        place_(static_cast<uint32_t>(scale_place(out, first))),
        scales_(scales_of_row()) {}

  __device__ __forceinline__ void store(int k, const Nvfp4Codes& x) const {
    codes_[32 * k] = make_uint2(x.low, x.high);
    scales_[k * (out_.swizzled ? 32 / 4 * 512 : 32)] = x.scale;
  }

  __device__ __forceinline__ void next() {
    row_ += step_;
    codes_ = reinterpret_cast<uint2*>(reinterpret_cast<char*>(codes_) + codes_step_);
    scales_ = out_.swizzled ? scales_of_row() : scales_ + codes_step_ / sizeof(uint2);
  }

 private:
  __device__ __forceinline__ uint32_t width() const { return static_cast<uint32_t>(out_.blocks); }
  __device__ __forceinline__ uint8_t* scales_of_row() const {
    const uint64_t row = out_.swizzled
                             ? static_cast<uint64_t>(row_ >> 7) * (((width() + 3) & ~3u) * 128) +
                                   ((row_ & 31) * 16 + ((row_ >> 5) & 3) * 4)
                             : static_cast<uint64_t>(row_) * width();
    return out_.scales + row + place_;
  }

  const Nvfp4Output& out_;
  uint2* codes_;
  uint32_t row_, step_, place_;
  uint32_t codes_step_;  // bytes, which fit: rows are at work together, and a thread has few blocks
  uint8_t* scales_;
};

// Registers of a thread: no more, so that rows enough are at work on a multiprocessor. The compiler
// wants more for sm_100 and later.
template <class Source>
constexpr int norm_registers(bool sm_100) {
  return Source::kHeldRegisters + (sm_100 ? (Source::kHeldRegisters > 72 ? 16 : 8) : 0);
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kSm100 = true;
#else
constexpr bool kSm100 = false;
#endif

// Each thread has kShare blocks of a row.
template <class Source, int kShare>
__global__ void __maxnreg__(norm_registers<Source>(kSm100))
    norm_kernel(Source source, Normalize<typename Source::Element> norm, RowScale scale,
                Nvfp4Recipe recipe, Nvfp4Output out) {
  using Element = typename Source::Element;
  using Team = RowTeam<true, kShare == 1 ? kRowsAtOnce : 1>;
  extern __shared__ uint4 row_storage[];
  __shared__ typename Team::Shared shared;
  Team team(shared);
  const int width = static_cast<int>(blocks_of(source.cols));
  const int row_count = static_cast<int>(source.rows);
  const int mine = threadIdx.x, begin = (mine >> 5) * (32 * kShare), first = begin + (mine & 31);
  const int left = width - first;
  const HeldWeights weights(row_storage, width, first);
  const int tensors = source.tensors();
  const CopiedBlocks<Element, kShare> copied(
      reinterpret_cast<char*>(row_storage) + HeldWeights::bytes(width),
      team.slot() * team.warps() + (mine >> 5), tensors, begin, width - begin);
  const bool quantizes = scale.mode != RowMode::kTensorAmax;
#pragma unroll 1
  for (int b = team.slot() * blockDim.x + mine; b < width; b += team.rows() * blockDim.x) {
    if (norm.weight.fp32) {
      weights.put(static_cast<const float*>(norm.weight.data), b);
    } else {
      weights.put(static_cast<const Element*>(norm.weight.data), b);
    }
  }
  wait_for_previous();
  let_next_begin();
  team.begin(scale, recipe, source.cols);

  const int step = gridDim.x * team.rows();
  int r = blockIdx.x * team.rows() + team.slot();
  typename Source::Row row = source.row(r < row_count ? r : 0);
  HeldOutput to(out, r, step, first);
  typename Source::Beside beside;
  auto copy = [&] {  // of `row`
    for (int t = 0; t < tensors; ++t) copied.copy(source.tensor(row, t), t);
    __pipeline_commit();
    beside = source.beside(row);
  };
  if (r < row_count) copy();
#pragma unroll 1
  for (; r - team.slot() < row_count; r += step) {
    const bool there = kShare > 1 || r < row_count;
    HeldProduct held[kShare];
    float block_max[kShare];
    float squares[2] = {};
    uint32_t most = 0;  // an amax as bits
    __pipeline_wait_prior(0);
    __syncwarp();
    if (there) {
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        block_max[k] = 0.0f;
        if (32 * k < left) {
          weights.weigh(
              source.copied([&](int t) { return copied.read(t, k); }, beside, row, first + 32 * k),
              k, held[k], squares);
          block_max[k] = held[k].amax();
          most = max(most, float_bits(block_max[k]));
        }
      }
    }
    __syncwarp();
    if (r + step < row_count) {
      row = source.after(row, r, step);
      copy();
    }

    team.agree(squares[0] + squares[1], most, r, row_count, norm, scale, recipe, [&] {
      uint32_t numbers = 0;
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        if (there && 32 * k < left) numbers = max(numbers, float_bits(held[k].amax_of_numbers()));
      }
      return numbers;
    });
    if (quantizes && there) {
      const RowEncoding& e = team.encoding();
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        if (32 * k < left) to.store(k, held[k].quantize(block_max[k], e));
      }
      to.next();
    }
  }
  if (quantizes) {
    zero_padding(out);
  } else {
    team.put_partial(scale);
  }
}

}  // namespace jitquant
