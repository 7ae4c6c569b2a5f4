// Loads and stores of a block.
#pragma once

#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include "jitquant/block.cuh"
#include "jitquant/device.cuh"

namespace jitquant {

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ Bf16 from_float<Bf16>(float x) {
#if defined(__CUDA_ARCH__)
  Bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  const uint32_t bits = float_bits(x);
  if (is_nan(x)) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}
template <>
__device__ __forceinline__ Fp16 from_float<Fp16>(float x) {
#if defined(__CUDA_ARCH__)
  Fp16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  if (is_nan(x)) return {0x7fff};
  const uint32_t sign = (float_bits(x) >> 16) & 0x8000u;
  const float a = abs_of(x);
  // Infinity from halfway past the largest finite number up.
  return {static_cast<uint16_t>(sign | (a < 65520.0f ? rounded_code<10, 15>(a) : 0x7c00u))};
#endif
}
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}

// Two values, each rounded to T, in one word.
template <class T>
__device__ __forceinline__ uint32_t pair_from_floats(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  if constexpr (std::is_same<T, Bf16>::value) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  return from_float<T>(low).bits | (static_cast<uint32_t>(from_float<T>(high).bits) << 16);
#endif
}

// Values in words, each rounded to T.
template <class T, int kCount>
__device__ __forceinline__ void round_values(const float (&v)[kCount], uint32_t* words) {
#pragma unroll
  for (int i = 0; i < kCount * static_cast<int>(sizeof(T)) / 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = float_bits(v[i]);
    } else {
      words[i] = pair_from_floats<T>(v[2 * i], v[2 * i + 1]);
    }
  }
}
template <class T>
__device__ __forceinline__ Block<T> block_of(const float (&v)[16]) {
  Block<T> block;
  round_values<T>(v, block.words);
  return block;
}

// Sets value i to x, rounded to T. Values must be set in order.
__device__ __forceinline__ void set_value(Block<float>& block, int i, float x) {
  block.words[i] = float_bits(x);
}
template <class T>
__device__ __forceinline__ void set_value(Block<T>& block, int i, float x) {
  const uint32_t bits = from_float<T>(x).bits;
  block.words[i >> 1] = i & 1 ? block.words[i >> 1] | (bits << 16) : bits;
}

__device__ __forceinline__ uint32_t bits_of(float x) {
  return float_bits(x);
}
template <class T>
__device__ __forceinline__ uint32_t bits_of(T x) {
  return x.bits;
}

// A block whose values below `count` are element(i); the others are zero. For unaligned data, in a
// short loop: constants index all registers.
template <class T, class F>
__device__ __forceinline__ Block<T> gather_block(int64_t count, F&& element) {
  constexpr int kPerWord = 4 / sizeof(T);
  Block<T> block = {};
  const int n = count < 16 ? static_cast<int>(count) : 16;
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(element(i)) << (16 * (i & (kPerWord - 1)));
#pragma unroll
    for (int j = 0; j < Block<T>::kWords; ++j) {
      block.words[j] |= j == i / kPerWord ? bits : 0u;
    }
  }
  return block;
}

// Loads kWords words of a block from memory that is aligned to 16 bytes.
template <int kWords>
__device__ __forceinline__ void load_words(const void* p, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    const uint4 raw = reinterpret_cast<const uint4*>(p)[i / 4];
    words[i] = raw.x, words[i + 1] = raw.y, words[i + 2] = raw.z, words[i + 3] = raw.w;
  }
}
template <int kWords>
__device__ __forceinline__ void store_words(void* p, const uint32_t* words) {
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    reinterpret_cast<uint4*>(p)[i / 4] =
        make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
  }
}

// Returns its argument, but makes the compiler compute it here, once, instead of at each use.
template <class T>
__device__ __forceinline__ const T* kept(const T* x) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+l"(x));
#endif
  return x;
}
__device__ __forceinline__ uint32_t kept(uint32_t x) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(x));
#endif
  return x;
}
__device__ __forceinline__ int64_t kept(int64_t x) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+l"(x));
#endif
  return x;
}

// Number i of an array of int64 if `wide`, else of int32. kCached: reads through the L1 cache.
template <bool kCached = false, class I>
__device__ __forceinline__ int64_t integer_at(const void* p, bool wide, I i) {
  const auto load = [i](auto* integers) -> int64_t {
    return kCached ? integers[i] : __ldcg(integers + i);
  };
  return wide ? load(static_cast<const int64_t*>(p)) : load(static_cast<const int32_t*>(p));
}

// Prefetches a block from p, of which the first `count` elements exist.
template <class T>
__device__ __forceinline__ void prefetch_block(const T* p, int64_t count) {
#pragma unroll
  for (int i = 0; i < 16; i += 32 / sizeof(T)) {
    if (i < count) prefetch(p + i);
  }
}

// Prefetches `count` blocks of a row at p that is aligned to 16 bytes.
template <class T>
__device__ __forceinline__ void prefetch_blocks(const T* p, int block, int count) {
  prefetch_bulk(p + block * 16, count * static_cast<int>(sizeof(Block<T>)));
}

// Sixteen elements from p, of which the first `count` exist; the others are zero. p is aligned to
// an element. Loads them one by one, all in flight together.
template <class T>
__device__ __forceinline__ Block<T> load_part(const T* p, int64_t count) {
  constexpr int kPerWord = 4 / sizeof(T);
  const int n = count < 16 ? static_cast<int>(count) : 16;
  Block<T> block = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = i < n ? bits_of(p[i]) : 0u;
    block.words[i / kPerWord] |= bits << (16 * (i % kPerWord));
  }
  return block;
}

// Sixteen two-byte elements from p, which is not aligned to a word: loads words and shifts.
template <class T>
__device__ __forceinline__ Block<T> load_between_words(const T* p) {
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(p + 1);
  uint32_t raw[9];
  raw[0] = bits_of(p[0]) << 16, raw[8] = bits_of(p[15]);
#pragma unroll
  for (int i = 0; i < 7; ++i) raw[i + 1] = words[i];
  Block<T> block;
#pragma unroll
  for (int i = 0; i < 8; ++i) block.words[i] = byte_permute(raw[i], raw[i + 1], 0x5432);
  return block;
}

// Sixteen elements from p, of which the first `count` exist; the others are zero. `vector`: p is
// aligned to 16 bytes. kWhole: it is, and all sixteen exist. kTogether: unaligned loads are all in
// flight together; otherwise they take turns and use few registers.
template <bool kWhole = false, bool kTogether = true, class T>
__device__ __forceinline__ Block<T> load_block(const T* p, int64_t count, bool vector) {
  Block<T> block;
  if (!kWhole && (!vector || count < 16)) {
    // With an odd row length, every other row starts between words.
    const bool between = sizeof(T) == 2 && reinterpret_cast<uintptr_t>(p) % 4 != 0;
    if constexpr (kTogether) {
      if (count < 16) return load_part(p, count);
      if constexpr (sizeof(T) == 2) {
        if (between) return load_between_words(p);
      }
    } else if (count < 16 || between) {
      return gather_block<T>(count, [=](int i) { return p[i]; });
    }
#pragma unroll
    for (int i = 0; i < Block<T>::kWords; ++i) {
      block.words[i] = reinterpret_cast<const uint32_t*>(p)[i];
    }
    return block;
  }
  load_words<Block<T>::kWords>(p, block.words);
  return block;
}

// Drops the first `skip` two-byte elements, at most 7: kOut + 4 words become kOut.
template <int kOut>
__device__ __forceinline__ void skip_elements(uint32_t (&words)[kOut + 4], int skip,
                                              uint32_t* out) {
#pragma unroll
  for (int i = 0; i < kOut + 2; ++i) words[i] = skip & 4 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < kOut + 1; ++i) words[i] = skip & 2 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < kOut; ++i) {
    out[i] = byte_permute(words[i], words[i + 1], skip & 1 ? 0x5432 : 0x3210);
  }
}

// Two-byte elements between p and the preceding multiple of kBytes.
template <int kBytes, class T>
__device__ __forceinline__ int elements_over(const T* p) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(p) % kBytes / sizeof(T));
}

// Sixteen two-byte elements at any address, as loaded: the words that contain them, starting at a
// multiple of 16 bytes. A separate step skips what precedes them, so that nothing waits for the
// load yet.
template <class T>
struct LooseBlock {
  uint32_t words[12];

  // The block, where `skip` elements precede it.
  __device__ __forceinline__ Block<T> straight(int skip) const {
    Block<T> block;
    LooseBlock x = *this;
    skip_elements<8>(x.words, skip, block.words);
    return block;
  }
};

// From p, of which the first `count` elements exist; the others are zero.
template <class T>
__device__ __forceinline__ LooseBlock<T> load_loose(const T* p, int64_t count) {
  const int skip = elements_over<16>(p);
  const uint4* const pieces = reinterpret_cast<const uint4*>(p - skip);
  LooseBlock<T> x = {};
  if (skip + count >= 24 || (skip == 0 && count >= 16)) {
    load_words<8>(pieces, x.words);
    if (skip > 0) load_words<4>(pieces + 2, x.words + 8);
    return x;
  }
  const int there = skip + static_cast<int>(count);
#pragma unroll
  for (int i = 0; i < 12; ++i) {
    if (2 * i + 1 < there) {
      x.words[i] = reinterpret_cast<const uint32_t*>(pieces)[i];
    } else if (2 * i < there) {
      x.words[i] = reinterpret_cast<const uint16_t*>(pieces)[2 * i];
    }
  }
  return x;
}

// Stores the first `count` elements in kWords words to p, which is aligned to an element. `vector`:
// p is aligned to 16 bytes. Partial-word writes cost several times as much, so unaligned stores
// write whole words except at both ends.
template <int kWords, class T>
__device__ __forceinline__ void store_elements(T* p, int64_t count, bool vector,
                                               const uint32_t* words) {
  using Element = std::conditional_t<sizeof(T) == 1, uint8_t,
                                     std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;
  constexpr int kPerWord = 4 / sizeof(T), kBits = 8 * sizeof(T), kAll = kWords * kPerWord;
  Element* const to = reinterpret_cast<Element*>(p);
  if (vector && count >= kAll) {
    store_words<kWords>(p, words);
    return;
  }
  if (count < kAll) {
#pragma unroll
    for (int i = 0; i < kAll; ++i) {
      if (i < count) to[i] = static_cast<Element>(words[i / kPerWord] >> (kBits * (i % kPerWord)));
    }
    return;
  }
  const int over = static_cast<int>(reinterpret_cast<uintptr_t>(p) % 4 / sizeof(T));
  if (over == 0) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint32_t*>(p)[i] = words[i];
    return;
  }
  if constexpr (kPerWord > 1) {
    const int before = kPerWord - over;
    const uint32_t order = 0x3210 + 0x1111 * before * sizeof(T);
#pragma unroll
    for (int i = 0; i < kPerWord - 1; ++i) {
      if (i < before) to[i] = static_cast<Element>(words[0] >> (kBits * i));
      if (i < over)
        to[kAll - 1 - i] = static_cast<Element>(words[kWords - 1] >> (32 - kBits * (i + 1)));
    }
#pragma unroll
    for (int i = 0; i < kWords - 1; ++i) {
      reinterpret_cast<uint32_t*>(to + before)[i] = byte_permute(words[i], words[i + 1], order);
    }
  }
}

template <bool kWhole = false, class T>
__device__ __forceinline__ void store_block(T* p, int64_t count, bool vector,
                                            const Block<T>& block) {
  if (kWhole) {
    store_words<Block<T>::kWords>(p, block.words);
  } else {
    store_elements<Block<T>::kWords>(p, count, vector, block.words);
  }
}

// Sixteen bytes.
template <bool kWhole = false>
__device__ __forceinline__ void store_bytes(uint8_t* p, int64_t count, bool vector,
                                            const uint4& bytes) {
  if (kWhole) {
    *reinterpret_cast<uint4*>(p) = bytes;
  } else {
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    store_elements<4>(p, count, vector, words);
  }
}

// Stores 16 neighboring bytes of each lane of a warp, each at its `to`, which may have any
// alignment. Each lane takes as many bytes from the one before it as come before its 16-byte
// boundary. The first lane takes them from the last one: it stores both ends, by words. All lanes
// call this together.
__device__ __forceinline__ void store_line(uint8_t* to, int lane, const uint4& bytes) {
  const int over = static_cast<int>(reinterpret_cast<uintptr_t>(to) & 15), skip = -over & 15;
  const int before = over == 0 ? lane : (lane - 1) & 31;
  uint32_t w[8] = {__shfl_sync(0xffffffffu, bytes.x, before),
                   __shfl_sync(0xffffffffu, bytes.y, before),
                   __shfl_sync(0xffffffffu, bytes.z, before),
                   __shfl_sync(0xffffffffu, bytes.w, before),
                   bytes.x,
                   bytes.y,
                   bytes.z,
                   bytes.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) w[i] = skip & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = skip & 4 ? w[i + 1] : w[i];
  const uint32_t order = 0x3210 + 0x1111 * (skip & 3);
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = byte_permute(w[i], w[i + 1], order);
  uint8_t* const aligned = to - over;
  if (lane != 0) {
    *reinterpret_cast<uint4*>(aligned) = make_uint4(w[0], w[1], w[2], w[3]);
    return;
  }
  const auto place = [&](int i) { return aligned + i + (i < over ? 16 * 32 : 0); };
  uint32_t edge = 0;  // a word that is stored in two parts
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool whole = over <= 4 * i || over >= 4 * i + 4;
    if (whole) *reinterpret_cast<uint32_t*>(place(4 * i)) = w[i];
    if (!whole) edge = w[i];
  }
  if ((over & 3) == 0) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) *place((over & 12) + i) = static_cast<uint8_t>(edge >> (8 * i));
}

#if defined(__CUDA_ARCH__)
// Copies 1, 2 or 4 words to shared memory asynchronously, or stores zeros if `there` is false. Both
// addresses are multiples of as many bytes, and `from` has to be readable even so.
template <int kWords>
__device__ __forceinline__ void copy_words(uint32_t to, const uint8_t* from, bool there) {
  constexpr int kBytes = 4 * kWords;
  const int bytes = there ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes),
                 "r"(bytes)
                 : "memory");
  }
}
#endif

}  // namespace jitquant
