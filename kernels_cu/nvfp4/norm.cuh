// Norms of rows that are read once: a thread block holds the products of a row and the weight in
// registers while it computes the row's sums, and copies its next row to shared memory in the
// meantime. For rows of whole blocks that are aligned to 16 bytes.
#pragma once

#include "registers.cuh"

namespace jitquant {

// What a thread holds of a block: |value * weight| without inv_rms, and the signs of the codes.
// Magnitudes compare as integers, with NaN above all; one instruction compares three.
struct HeldProduct {
  float magnitude[16];
  uint32_t signs;

  // From the values x and their weights. Also returns the amax of the products and the sum of
  // squares of the values.
  template <class T, class W>
  static __device__ __forceinline__ HeldProduct of(const Block<T>& x, const Block<W>& weight,
                                                   float& amax, float& squares) {
    HeldProduct held;
    BlockSquares<T> sum;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      held.magnitude[i] = mul_rz(abs_of(magnitude_of(x, i)), abs_of(magnitude_of(weight, i)));
      sum.add(i, value_of(x, i));
    }
    squares = sum.sum();
    amax = held.amax();
    if constexpr (std::is_same<T, W>::value) {
      Block<T> both;
#pragma unroll
      for (int i = 0; i < Block<T>::kWords; ++i) both.words[i] = x.words[i] ^ weight.words[i];
      held.signs = e2m1x16_signs(both);
    } else {
      held.signs = e2m1x16_signs(x) ^ e2m1x16_signs(weight);
    }
    return held;
  }

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
  // Quantizes several blocks with the amaxes b together. Results from index `there` on are
  // arbitrary.
  template <int kCount>
  static __device__ __forceinline__ void quantize(HeldProduct (&x)[kCount],
                                                  const float (&b)[kCount], int there,
                                                  const RowEncoding& e, Nvfp4Codes (&out)[kCount]) {
    Nvfp4Product products[kCount];
    bool usual = true;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      products[k] = nvfp4_product(b[k], e.inverse, e.encoding);
      usual = usual && (products[k].usual || k >= there);
    }
    if (!usual) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        nvfp4_make_usual(x[k].magnitude, x[k].signs, e.inverse, e.encoding, products[k]);
      }
    }
    nvfp4_encode_magnitudes(x, products, out);
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

// The order in which a lane reads the 16-byte parts of its block from shared memory, where blocks
// are contiguous: it gets part p ^ turn as part p, so that eight lanes that are served together use
// different banks. straight() restores the order of the results.
template <class T>
struct Turn {
  static constexpr int kParts = Block<T>::kWords / 4;

  static __device__ __forceinline__ uint32_t of(uint32_t lane) {
    return lane / (8 / kParts) & (kParts - 1);
  }
  static __device__ __forceinline__ Nvfp4Codes straight(Nvfp4Codes x, uint32_t turn) {
    if constexpr (kParts == 4) {
      const uint32_t order = turn & 1 ? 0x1032 : 0x3210;
      x.low = byte_permute(x.low, 0, order), x.high = byte_permute(x.high, 0, order);
    }
    const bool swaps = turn & (kParts / 2);
    return {swaps ? x.high : x.low, swaps ? x.low : x.high, x.scale};
  }
  // Reorders the result of e2m1x16_signs, in either direction.
  static __device__ __forceinline__ uint32_t signs(uint32_t x, uint32_t turn) {
    if constexpr (kParts == 4) x = byte_permute(x, 0, turn & 1 ? 0x1032 : 0x3210);
    return turn & (kParts / 2) ? (x >> 1 & 0x44444444u) | (x << 1 & 0x88888888u) : x;
  }
};

// The weights of a norm in shared memory, laid out for the threads that hold a row of T. For each
// 32 blocks of a warp: magnitudes in fp32, in four planes of four columns, and the signs. With
// kTurns all are in the order of the turn of the block's lane.
template <class T, bool kTurns = true>
class HeldWeights {
 public:
  // For `threads` threads per row with `share` blocks each, including blocks that a row does not
  // have.
  static __host__ __device__ constexpr size_t bytes(int threads, int share) {
    return static_cast<size_t>(threads / 32 * share) * kChunk;
  }

  __device__ __forceinline__ explicit HeldWeights(void* storage)
      : storage_(static_cast<char*>(storage)) {}

  template <bool kWhole = true>
  __device__ __forceinline__ void put(const ColumnVector& weight, int b, int cols) const {
    const int count = cols - b * 16;
    if (count <= 0) {
      put(Block<T>{}, b);
    } else if (weight.fp32) {
      const float* const p = static_cast<const float*>(weight.data) + b * 16;
      put(load_block<kWhole>(p, count, weight.vector), b);
    } else {
      const T* const p = static_cast<const T*>(weight.data) + b * 16;
      put(load_block<kWhole>(p, count, weight.vector), b);
    }
  }

  // Computes the held products of block b + 32 * k, their amax, and the sum of squares of the
  // values.
  template <class Value>
  __device__ __forceinline__ void weigh(const Value& x, int b, int k, HeldProduct& held,
                                        float& amax, float& squares) const {
    weigh(x, storage_ + (magnitudes(b) + k * kChunk), storage_ + (signs(b) + k * kChunk), held,
          amax, squares);
  }
  // The same of the block at `place`, which is place(b) and, for block b + step of a warp's lanes,
  // place(b) + place(step): without turns the blocks of neighboring lanes are 16 bytes apart.
  template <class Value>
  __device__ __forceinline__ void weigh(const Value& x, uint32_t place, HeldProduct& held,
                                        float& amax, float& squares) const {
    static_assert(!kTurns);
    weigh(x, storage_ + place, storage_ + (place + kSigns), held, amax, squares);
  }
  static __device__ __forceinline__ uint32_t place(int b) { return magnitudes(b); }

 private:
  template <class Value>
  static __device__ __forceinline__ void weigh(const Value& x, const char* magnitudes,
                                               const char* signs, HeldProduct& held, float& amax,
                                               float& squares) {
    BlockSquares<T> sum;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 w = reinterpret_cast<const float4*>(magnitudes)[32 * i];
      const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float v = magnitude_at(x, 4 * i + j);
        held.magnitude[4 * i + j] = mul_rz(v, weight[j]);
        sum.add(4 * i + j, v);
      }
    }
    squares = sum.sum();
    amax = held.amax();
    held.signs = e2m1x16_signs(x) ^ *reinterpret_cast<const uint32_t*>(signs);
  }

  static constexpr int kSigns = 4 * 32 * sizeof(float4);  // behind the magnitudes
  // With the stride of the magnitudes if that saves an instruction per block. Otherwise packed:
  // shared memory limits how many rows are in flight.
  static constexpr int kSignStep = kTurns ? sizeof(uint32_t) : sizeof(float4);
  static constexpr int kChunk = kSigns + 32 * kSignStep;
  static constexpr int kPlanes = 4 / Turn<T>::kParts;  // per part

  static __device__ __forceinline__ uint32_t magnitudes(int b) {
    return (b >> 5) * kChunk + (b & 31) * static_cast<int>(sizeof(float4));
  }
  static __device__ __forceinline__ uint32_t signs(int b) {
    return (b >> 5) * kChunk + kSigns + (b & 31) * kSignStep;
  }
  template <class W>
  static __device__ __forceinline__ float magnitude_at(const Block<W>& x, int i) {
    return abs_of(magnitude_of(x, i));
  }
  template <class W>
  __device__ __forceinline__ void put(const Block<W>& w, int b) const {
    const uint32_t turn = kTurns ? Turn<T>::of(b & 31) : 0;
    float4* const planes = reinterpret_cast<float4*>(storage_ + magnitudes(b));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      planes[32 * (i ^ (turn * kPlanes))] = {magnitude_at(w, 4 * i), magnitude_at(w, 4 * i + 1),
                                             magnitude_at(w, 4 * i + 2),
                                             magnitude_at(w, 4 * i + 3)};
    }
    *reinterpret_cast<uint32_t*>(storage_ + signs(b)) = Turn<T>::signs(e2m1x16_signs(w), turn);
  }

  char* storage_;
};

// The part of the next row that a warp copies to shared memory: for each tensor of the row and each
// share, the 32 blocks of its threads, in memory order. A thread copies other pieces than it reads:
// each copy of a warp is contiguous on both sides, so that no sector is requested twice. kLoose:
// for rows that may be unaligned or not whole, copies from the preceding multiple of 128 bytes, as
// far as the warp's blocks may reach.
template <class T, int kShare, bool kLoose>
class CopiedBlocks {
 public:
  static constexpr size_t bytes(int threads, int tensors) {
    return sizeof(uint4) * kAll * (threads / 32) * tensors;
  }

  // For a thread of warp `warp` whose first block is `first`.
  __device__ __forceinline__ CopiedBlocks(void* storage, int warp, int tensors, int first)
      : pieces_(static_cast<uint4*>(storage)),
        first_(first),
        tensors_(tensors),
        warp_(kShare == 1 ? warp : 0) {}

  // Where the thread reads its first block, and its turn.
  __device__ __forceinline__ uint32_t at() const {
    const uint32_t first = kept(first_), lane = first & 31;
    return begin(first) + lane * kParts + Turn<T>::of(lane);
  }
  __device__ __forceinline__ uint32_t turn() const { return at() & (kParts - 1); }

  // Zero-fills what rows of `cols` columns do not have.
  __device__ __forceinline__ void clear(int tensors, int cols) const {
    const int left = this->left(cols);
    for (int t = 0; t < tensors; ++t) {
      uint4* const to = pieces_ + (this->to() + t * kAll);
#pragma unroll
      for (int i = 0; i < kAll; i += 32) {
        if (i >= left && is_of(i)) to[i] = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Copies from the row at p. kLoose: never touches memory past `end`, where the tensor's memory
  // may end, not even with a copy of size zero, which sanitizers count as a read.
  __device__ __forceinline__ void copy(const T* p, int tensor, int cols, const T* end) const {
    const int over = kLoose ? elements_over<128>(p) : 0;
    const uint4* const from = kept(reinterpret_cast<const uint4*>(p - over) + this->from());
    const int left = this->left(cols);
    // The same number for every row: zeros past the end overwrite the previous row.
    const int there = kLoose ? cols + over - 8 * static_cast<int>(this->from()) : 0;  // in elements
    uint4* const to = pieces_ + (this->to() + tensor * kAll);
#pragma unroll
    for (int i = 0; i < kAll; i += 32) {
      if (i < left && is_of(i)) {
        const int zeros = kLoose ? min(max(16 - 2 * (there - 8 * i), 0), 16) : 0;
        if (kLoose && reinterpret_cast<const T*>(from + i + 1) > end) {
          store_words<4>(to + i,
                         load_last(reinterpret_cast<const T*>(from + i), 8 - zeros / 2).words);
        } else {
          __pipeline_memcpy_async(to + i, from + i, 16, zeros);
        }
      }
    }
  }

  // This thread's block in the order of its turn; `at` is at(). The row started `over` elements
  // past a multiple of 128 bytes.
  __device__ __forceinline__ Block<T> read(int tensor, int k, uint32_t at, int over) const {
    Block<T> block;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint4* const piece = pieces_ + ((at ^ part) + tensor * kAll + k * kPieces);
      if constexpr (kLoose) {
        uint32_t words[8];
        load_words<8>(piece + over / 8, words);
        skip_elements<4>(words, over & 7, block.words + 4 * part);
      } else {
        load_words<4>(piece, block.words + 4 * part);
      }
    }
    return block;
  }
  // Overwrites the block of tensor 0.
  __device__ __forceinline__ void write(int k, uint32_t at, const Block<T>& block) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      store_words<4>(pieces_ + ((at ^ part) + k * kPieces), block.words + 4 * part);
    }
  }
  // Copies what the warp has written to the row at p.
  __device__ __forceinline__ void store(T* p, int cols) const {
    uint4* const to = reinterpret_cast<uint4*>(p) + this->from();
    const uint4* const from = pieces_ + this->to();
    const int left = this->left(cols);
#pragma unroll
    for (int i = 0; i < kShare * kPieces; i += 32) {
      if (i < left) to[i] = from[i];
    }
  }

 private:
  static constexpr int kParts = Turn<T>::kParts;
  static constexpr int kPieces = 32 * kParts;
  static constexpr int kAll = kShare * kPieces + (kLoose ? 128 / 16 : 0);  // per tensor

  // Whether piece i of this thread belongs to the warp.
  __device__ __forceinline__ bool is_of(int i) const {
    if constexpr (kAll % 32 == 0) {
      return true;
    } else {
      return i + 32 <= kAll || (kept(first_) & 31) < kAll % 32;
    }
  }

  // The first `count` of eight elements; the others are zero.
  struct Piece {
    uint32_t words[4];
  };
  static __device__ __forceinline__ Piece load_last(const T* p, int count) {
    Piece x = {};
#pragma unroll 1
    for (int i = count - 1; i >= 0; --i) {
      x.words[3] = x.words[3] << 16 | x.words[2] >> 16;
      x.words[2] = x.words[2] << 16 | x.words[1] >> 16;
      x.words[1] = x.words[1] << 16 | x.words[0] >> 16;
      x.words[0] = x.words[0] << 16 | bits_of(p[i]);
    }
    return x;
  }

  // In pieces: where in a row this thread copies from, how many are left from there, and where they
  // go. Recomputed at each use, because there are no registers to keep them.
  __device__ __forceinline__ uint32_t from() const {
    const uint32_t first = kept(first_);
    return first * kParts - (first & 31) * (kParts - 1);
  }
  __device__ __forceinline__ int left(int cols) const {
    if constexpr (kLoose) return (cols + 63 + 7) / 8 - static_cast<int>(from());
    return static_cast<int>(blocks_of(cols) * kParts - from());
  }
  __device__ __forceinline__ uint32_t to() const {
    const uint32_t first = kept(first_);
    return begin(first) + (first & 31);
  }
  // The first piece of the warp. Follows from the thread's first block if the warp has rows of its
  // own.
  __device__ __forceinline__ uint32_t begin(uint32_t first) const {
    return (kShare == 1 ? warp_ : first / (32 * kShare)) * (tensors_ * kAll);
  }

  uint4* pieces_;
  uint32_t first_;
  int tensors_;
  uint32_t warp_;
};

// Where the codes and scales of a thread's blocks of row r go. A warp's blocks are contiguous,
// share after share, and the offset of every fourth block is the same in all rows.
class HeldOutput {
 public:
  __device__ __forceinline__ HeldOutput(const Nvfp4Output& out, uint32_t r, uint32_t first)
      : step_(static_cast<int>(scale_place(out, 32))) {
    const uint32_t width = static_cast<uint32_t>(out.blocks);
    const uint64_t row = static_cast<uint64_t>(r) * width;
    codes_ = reinterpret_cast<uint2*>(out.codes) + row + first;
    scales_ = out.swizzled ? out.scales + swizzle_128x4(r, first, swizzled_blocks(width))
                           : out.scales + row + first;
  }

  __device__ __forceinline__ void store(int k, const Nvfp4Codes& x) const {
    codes_[32 * k] = make_uint2(x.low, x.high);
    scales_[k * step_] = x.scale;
  }

 private:
  uint2* codes_;
  uint8_t* scales_;
  int step_;
};

// Registers per thread for `share` blocks, limited so that enough rows are in flight on an SM. nvcc
// needs more for sm_100 and later.
template <class Source>
constexpr int norm_registers(int share, bool sm_100) {
  const int registers = share == 1 && Source::kHeldRegisters < 80 ? 80 : Source::kHeldRegisters;
  return registers + (sm_100 ? (registers > 72 ? 16 : 8) : 0);
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kSm100 = true;
#else
constexpr bool kSm100 = false;
#endif

// Not for few or short rows, which start with something slower: fetching instructions.
template <class Source, int kShare>
constexpr bool kBeginsApart = !Source::kCopiesLate && kShare > 1;

// Each thread has kShare blocks of a row.
template <class Source, int kShare>
__global__ void __maxnreg__(norm_registers<Source>(kShare, kSm100))
    norm_kernel(Source source, Normalize<typename Source::Element> norm, RowScale scale,
                Nvfp4Recipe recipe, Nvfp4Output out, RowStart start) {
  using Element = typename Source::Element;
  using Team = RowTeam<true, kShare == 1 ? kRowsAtOnce : 1, kShare>;
  extern __shared__ __align__(128) uint4 row_storage[];
  __shared__ typename Team::Shared shared;
  Team team(shared);
  const int cols = static_cast<int>(source.cols), width = static_cast<int>(blocks_of(cols));
  const int row_count = static_cast<int>(source.rows);
  const int mine = static_cast<int>(kept(threadIdx.x)), begin = (mine >> 5) * (32 * kShare),
            first = begin + (mine & 31);
  const int left = width - first;
  // Recomputed in the loop, because there are no registers to keep it.
  const auto there_are = [&] {
    return width - static_cast<int>(kept(static_cast<uint32_t>(first)));
  };
  const HeldWeights<Element> weights(row_storage);
  const int tensors = source.tensors();
  using Copied = CopiedBlocks<Element, kShare, Source::kLoose>;
  const Copied copied(
      reinterpret_cast<char*>(row_storage) + HeldWeights<Element>::bytes(blockDim.x, kShare),
      team.slot() * team.warps() + (mine >> 5), tensors, first);
  const bool quantizes = scale.mode != RowMode::kTensorAmax;
  const int step = gridDim.x * team.rows();
  int r = blockIdx.x * team.rows() + team.slot();
  if (r < row_count) {
    const typename Source::Row row = source.row(static_cast<uint32_t>(r));
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      if (32 * k >= left) break;
      source.prefetch(row, first + 32 * k);
      if (r == 0) norm.prefetch(first + 32 * k, cols - (first + 32 * k) * 16);
    }
  }
  wait_for_previous();
  let_next_begin();
  if constexpr (kBeginsApart<Source, kShare>) start.wait();

  typename Source::Beside beside;
  auto copy = [&](int r) {
    if (r >= row_count) return;
    const typename Source::Row row = source.row(static_cast<uint32_t>(r));
    for (int t = 0; t < tensors; ++t) {
      const Element* end = nullptr;
      if constexpr (Source::kLoose) end = source.end;
      copied.copy(source.tensor(row, t), t, cols, end);
    }
    __pipeline_commit();
    beside = source.beside(row);
  };
  // Twice if the weights come first, so that the copy is compiled only once.
  const bool early = !Source::kCopiesLate || start.is_first();
#pragma unroll 1
  for (bool late = false;; late = true) {
    if (early != late) copy(r);
    if (late) break;
    if (Source::kKeepsZeros) copied.clear(tensors, cols);
#pragma unroll 1
    for (int b = team.slot() * blockDim.x + mine; b < blockDim.x * kShare;
         b += team.rows() * blockDim.x) {
      weights.template put<!Source::kLoose>(norm.weight, b, cols);
    }
    team.begin(scale, recipe, source.cols);
    if (!Source::kCopiesLate) break;
  }

#pragma unroll 1
  for (; r - team.slot() < row_count; r += step) {
    const bool there = kShare > 1 || r < row_count;
    HeldProduct held[kShare];
    float block_max[kShare];
    float squares[kShare];
    uint32_t most = 0;  // an amax as bits
    __pipeline_wait_prior(0);
    __syncwarp();
    const uint32_t here = kept(static_cast<uint32_t>(first)), at = copied.at();
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      const auto x = source.copied([&](int t, int over = 0) { return copied.read(t, k, at, over); },
                                   beside, static_cast<uint32_t>(r));
      if constexpr (Source::kWritesBack) copied.write(k, at, x);
      block_max[k] = squares[k] = 0.0f;
      if (Source::kKeepsZeros || 32 * k < there_are()) {
        weights.weigh(x, here, k, held[k], block_max[k], squares[k]);
        most = max(most, float_bits(block_max[k]));
      }
    }
    __syncwarp();
    if constexpr (Source::kWritesBack) {
      if (there) copied.store(source.row(static_cast<uint32_t>(r)).residual, cols);
      __syncwarp();
    }
    copy(r + step);
    const RowEncoding e = team.agree(
        squares, most, r, row_count, norm, scale, recipe,
        [&] {
          uint32_t numbers = 0;
#pragma unroll
          for (int k = 0; k < kShare; ++k) {
            if (Source::kKeepsZeros || 32 * k < there_are()) {
              numbers = max(numbers, float_bits(held[k].amax_of_numbers()));
            }
          }
          return numbers;
        },
        [] {});
    if (quantizes && there) {
      Nvfp4Codes codes[kShare];
      HeldProduct::quantize(held, block_max, (there_are() + 31) >> 5, e, codes);
      const HeldOutput to(out, r, kept(static_cast<uint32_t>(first)));
      const uint32_t turn = copied.turn();
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        if (32 * k < there_are()) {
          to.store(k, Turn<Element>::straight(codes[k], turn));
        }
      }
    }
  }
  if (quantizes) {
    zero_padding(out);
  } else {
    team.put_partial(scale);
  }
}

}  // namespace jitquant
