// 8 bits with one scale per 128 neighbors, for few of them: a kernel of one to two kilobytes of
// code and one or two lines of arguments, because fetching these takes most of its time.
#pragma once

#include "jitquant/sources.cuh"
#include "kernels.cuh"

namespace jitquant {

constexpr int kFewThreads8 = 128;
// Up to this many times eight neighbors per SM. With 256 rows of 7168 the kernel for any number
// takes 2.7 us back to back, and this one 2.9.
constexpr int64_t kFewEights = 1024;

// Eight neighbors.
template <class T>
struct Eight {
  static constexpr int kWords = 2 * sizeof(T);
  uint32_t words[kWords];

  // Followed by what is not used.
  __device__ __forceinline__ Block<T> block() const {
    Block<T> b;
#pragma unroll
    for (int i = 0; i < kWords; ++i) b.words[i] = words[i];
    return b;
  }
};

// Where they come from: as they are in memory, or silu(gate) * up.
template <class T>
struct PlainEights {
  using Fetched = Eight<T>;
  const T* x;

  __device__ __forceinline__ const T* place(uint32_t i) const { return x + uint64_t{8} * i; }
  __device__ __forceinline__ void prefetch_at(uint32_t i) const { prefetch(place(i)); }
  __device__ __forceinline__ Fetched fetch(uint32_t i) const {
    Fetched f;
    load_words<Eight<T>::kWords>(place(i), f.words);
    return f;
  }
  __device__ __forceinline__ Eight<T> value(const Fetched& f) const { return f; }
};
template <class T>
struct GatedEights {
  struct Fetched {
    Eight<T> gate, up;
  };
  const T* fused;
  uint32_t step, run;  // from one row to the next, in elements
  Divisor width;       // eights per row of the result
  Divisor over_run;

  __device__ __forceinline__ const T* place(uint32_t i) const {
    const uint32_t row = width.quotient_of(i), column = 8 * (i - row * width.divisor);
    return fused + uint64_t{row} * step + column + uint64_t{over_run.quotient_of(column)} * run;
  }
  __device__ __forceinline__ void prefetch_at(uint32_t i) const {
    prefetch(place(i));
    prefetch(place(i) + run);
  }
  __device__ __forceinline__ Fetched fetch(uint32_t i) const {
    Fetched f;
    load_words<Eight<T>::kWords>(place(i), f.gate.words);
    load_words<Eight<T>::kWords>(place(i) + run, f.up.words);
    return f;
  }
  __device__ __forceinline__ Eight<float> value(const Fetched& f) const {
    const Block<T> gate = f.gate.block(), up = f.up.block();
    Eight<float> v;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v.words[i] = float_bits(swiglu(value_of(gate, i), value_of(up, i)));
    }
    return v;
  }
};

template <class T>
__device__ __forceinline__ uint32_t amax_word(const Eight<T>& x) {
  uint32_t m = x.words[0];
#pragma unroll
  for (int i = 1; i < Eight<T>::kWords; ++i) m = larger<T>(m, x.words[i]);
  return m;
}
// The amax of 16 neighboring lanes, NaN if they contain one.
template <class T>
__device__ __forceinline__ float amax_of_lanes(const Eight<T>& x) {
  uint32_t m = amax_word(x);
#pragma unroll
  for (int offset = 8; offset > 0; offset >>= 1) {
    m = larger<T>(m, __shfl_xor_sync(0xffffffffu, m, offset));
  }
  return amax_of_word<T>(m);
}

template <EightBit kFormat, class T>
__device__ __forceinline__ uint2 encode_eight(const Eight<T>& x, float factor) {
  const auto block = x.block();
  uint32_t codes[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = mul_rn(value_of(block, 4 * k + j), factor);
    codes[k] = pack4<kFormat>(v);
  }
  return make_uint2(codes[0], codes[1]);
}

// Sixteen threads have a group. Without division by scales or bounds of the elements, and with
// scales in fp32.
template <class Eights, EightBit kFormat>
__global__ void __launch_bounds__(kFewThreads8)
    few_groups_kernel(Eights source, uint8_t* data, float* scales, uint32_t count,
                      GroupNumerics numerics) {
  numerics.format = kFormat;
  numerics.bounded = false;
  const uint32_t mine = blockIdx.x * kFewThreads8 + threadIdx.x;
  const uint32_t i = min(mine, count - 1);  // all lanes take part in the shuffles
  source.prefetch_at(i);
  wait_for_previous();
  let_next_begin();
  const auto x = source.value(source.fetch(i));
  const GroupScale g = group_scale(numerics, amax_of_lanes(x));
  if (mine >= count) return;
  if ((threadIdx.x & 15) == 0) scales[i >> 4] = g.scale_inv;
  reinterpret_cast<uint2*>(data)[i] = encode_eight<kFormat>(x, g.factor);
}

#ifndef __CUDACC_RTC__
// The same of a source whose rows are whole and evenly strided; `some` is whether it can be had.
struct NoEights {};
template <class T>
struct SomeEights {
  bool some;
  T eights;
};
template <class Source>
NoEights eights_of(const Source&) {
  return {};
}
template <class T>
SomeEights<PlainEights<T>> eights_of(const PlainSource<T>& x) {
  return {x.rows == 1 || x.row.s2 == x.cols, {x.row.data}};
}
template <class T>
SomeEights<GatedEights<T>> eights_of(const DeinterleaveSource<T>& x) {
  return {x.activate && x.cols > 0,
          {x.row.data, static_cast<uint32_t>(x.row.s2), x.run,
           Divisor(static_cast<uint32_t>(x.cols > 8 ? x.cols / 8 : 1)), x.over_run}};
}

template <class Eights>
cudaError_t launch_few_groups(const Eights& source, uint8_t* data, float* scales, int64_t count,
                              const GroupNumerics& numerics, cudaStream_t stream) {
  const LaunchShape shape = {(count + kFewThreads8 - 1) / kFewThreads8, kFewThreads8,
                             Start::kOverlapped};
  return dispatch_format(numerics.format, [&](auto format) {
    return launch<&few_groups_kernel<Eights, format>>(shape, stream, source, data, scales,
                                                      static_cast<uint32_t>(count), numerics);
  });
}
#endif

}  // namespace jitquant
