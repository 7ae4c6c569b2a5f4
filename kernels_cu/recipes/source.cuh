// Values that are rotated before quantization: rotary position embedding of the first columns of a
// row, a Hadamard transform of 16 to 256 neighbors, or both, as DeepSeek's indexer does with
// queries and keys. Like the sources in sources.cuh, with one block per lane: neighboring lanes
// compute a transform together.
#pragma once

#include "jitquant/sources.cuh"
#include "rules.cuh"

namespace jitquant {

struct Nothing {};
struct MoreRegisters {
  static constexpr bool kMoreRegisters = true;
};

template <class T, bool kRope>
struct RotatedSource : std::conditional_t<kRope, MoreRegisters, Nothing> {
  using Element = T;
  static constexpr int kHeldShare = 1;
  static constexpr int kHeldFew = 1;
  static constexpr bool kReadsOnlyInputs = true;
  static constexpr bool kPairs = !kRope && sizeof(T) == 2;
  using Value = Block<float>;
  struct Beside {
    Block<T> other;  // the other halves of pairs; not loaded if pairs are neighbors
    uint32_t position;
  };
  struct Fetched {
    Block<T> x;
    bool there;  // otherwise there is nothing to read
    std::conditional_t<kRope, Beside, Nothing> beside;
  };
  struct Row {
    const T* data;
    uint32_t position;
  };
  struct Rows : RowPointer<const T> {
    Divisor each;

    Rows(const Matrix& m, const Rope& rope)
        : RowPointer<const T>(m), each(static_cast<uint32_t>(rope.rows_each)) {}
    template <class I>
    __device__ __forceinline__ Row operator()(I r) const {
      return with(RowPointer<const T>::operator()(r), static_cast<uint32_t>(r));
    }
    __device__ __forceinline__ Row even_row(uint32_t r) const {
      return with(RowPointer<const T>::even_row(r), r);
    }
    // Row r, which starts at p.
    __device__ __forceinline__ Row with(const T* p, uint32_t r) const {
      return {p, kRope ? each.quotient_of(r) : 0u};
    }
  };
  Rows row;
  int64_t rows, cols;
  bool vector;
  Rotation rotation;
  Rope rope;

  RotatedSource(const Matrix& m, const Rotation& rotation, const Rope& rope)
      : row(m, rope),
        rows(m.rows),
        cols(m.cols),
        vector(m.vector),
        rotation(rotation),
        rope(rope) {}

  bool whole() const { return vector && cols % 16 == 0; }
  template <bool kWhole = false>
  __device__ __forceinline__ void prefetch(const Row& p, int64_t block) const {
    prefetch_block(p.data + block * 16, kWhole ? 16 : cols - block * 16);
  }
  __device__ __forceinline__ void prefetch_part(const Row& p, int block, int count) const {
    prefetch_blocks(p.data, block, count);
  }
  template <bool kWhole>
  __device__ __forceinline__ Fetched fetch(const Row& p, int64_t block) const {
    Fetched f = {};
    f.x = load_block<kWhole>(p.data + block * 16, cols - block * 16, vector);
    f.there = true;
    if constexpr (kRope) {
      f.beside.position = p.position;
      if (16 * block < rope.size && !rope.interleaved) {
        const int64_t half = rope.size / 32, other = block < half ? block + half : block - half;
        f.beside.other = load_block<kWhole>(p.data + other * 16, cols - other * 16, vector);
      }
    }
    return f;
  }
  template <bool kWhole>
  __device__ __forceinline__ Fetched refetch(const Row& p, int64_t block) const {
    return fetch<kWhole>(p, block);
  }

  // The block of values that a thread's k-th block is, in values() of two.
  __device__ __forceinline__ uint32_t pair_block(uint32_t thread, int k) const {
    return LaneBlocks<2>(rotation).of(thread, k);
  }
  // Zeros of any sign if a lane has no block and has fetched zeros: all lanes of a group do, or
  // none.
  template <bool kWhole, class R>
  __device__ __forceinline__ Value value(const Fetched& f, const R&, int64_t block) const {
    Value y[1];
    values<1>({f}, {block}, y);
    return y[0];
  }
  template <int kBlocks>
  __device__ __forceinline__ void values(const Fetched (&f)[kBlocks],
                                         const int64_t (&block)[kBlocks],
                                         Value (&y)[kBlocks]) const {
    float v[kBlocks][16];
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
      for (int i = 0; i < 16; ++i) v[k][i] = value_of(f[k].x, i);
      if constexpr (kRope) {
        if (f[k].there && 16 * block[k] < rope.size) turn(v[k], f[k], block[k]);
      }
      if (rotation.lanes > 0) {
        const int place = static_cast<int>(block[k]) & (rotation.lanes - 1);
        negate(v[k], f[k].there ? minus_signs(rotation, place) : 0u);
        transform_within(v[k], rotation, 0u);
      }
    }
    if (rotation.lanes > 0) {
      // Where some lanes have left, only whole groups are here. A mask that is no constant would be
      // compared between all lanes in each step, which takes a tenth of the time.
      if (__activemask() == 0xffffffffu) {
        transform_between(v, rotation, 0xffffffffu);
      } else {
        const int lanes = rotation.lanes > kBlocks ? rotation.lanes / kBlocks : 1;
        transform_between(v, rotation,
                          (0xffffffffu >> (32 - lanes))
                              << (static_cast<int>(threadIdx.x) & 31 & -lanes));
      }
    }
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      y[k] = block_of<float>(v[k]);
      if (rotation.rounded && rotation.lanes > 0) {
        const Block<T> rounded = block_of<T>(v[k]);
#pragma unroll
        for (int i = 0; i < 16; ++i) set_value(y[k], i, value_of(rounded, i));
      }
    }
  }

 private:
  __device__ __forceinline__ void four(const float* table, int64_t at, float (&values)[4]) const {
    if (rope.vector) {
      const float4 all = *reinterpret_cast<const float4*>(table + at);
      values[0] = all.x, values[1] = all.y, values[2] = all.z, values[3] = all.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = table[at + i];
    }
  }
  // a cos - b sin, b cos + a sin of the pairs (a, b); products and sums are rounded separately.
  // Loads the tables here, from the caches: there are no registers to load them earlier.
  __device__ __forceinline__ void turn(float (&v)[16], const Fetched& f, int64_t block) const {
    const int64_t table = f.beside.position * int64_t{rope.size / 2};
    float cos[4], sin[4];
    if (rope.interleaved) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i % 4 == 0) {
          four(rope.cos, table + 8 * block + i, cos);
          four(rope.sin, table + 8 * block + i, sin);
        }
        const float a = v[2 * i], b = v[2 * i + 1], c = cos[i % 4], s = sin[i % 4];
        v[2 * i] = add_rn(mul_rn(a, c), -mul_rn(b, s));
        v[2 * i + 1] = add_rn(mul_rn(b, c), mul_rn(a, s));
      }
      return;
    }
    const bool second = 32 * block >= rope.size;
    const int64_t first = table + 16 * block - (second ? rope.size / 2 : 0);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i % 4 == 0) {
        four(rope.cos, first + i, cos);
        four(rope.sin, first + i, sin);
      }
      const float turned = mul_rn(value_of(f.beside.other, i), sin[i % 4]);
      v[i] = add_rn(mul_rn(v[i], cos[i % 4]), second ? turned : -turned);
    }
  }
};

// Lanes that compute a value together.
template <class T, bool kRope>
inline int lanes_together(const RotatedSource<T, kRope>& source) {
  return source.rotation.lanes;
}

#ifndef __CUDACC_RTC__
// Calls f with the source of rows that are rotated. -DJITQUANT_ROPE=0 builds a library for rows
// without a rotary position embedding alone, =1 for those with one.
template <class F>
cudaError_t rotated_rows(const Matrix& x, const Rotation& rotation, const Rope& rope, F&& f) {
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
#ifdef JITQUANT_ROPE
    constexpr bool kRope = JITQUANT_ROPE == 1;
    return (rope.size > 0) == kRope ? f(RotatedSource<T, kRope>(x, rotation, rope))
                                    : cudaErrorInvalidValue;
#else
    return rope.size > 0 ? f(RotatedSource<T, true>(x, rotation, rope))
                         : f(RotatedSource<T, false>(x, rotation, rope));
#endif
  });
}
#endif

}  // namespace jitquant
