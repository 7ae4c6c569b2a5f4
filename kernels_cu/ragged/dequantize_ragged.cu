// Dequantizes ragged tensors (many tensors in one buffer), each with its own scale. Zero between
// segments.
#include "launch.h"
#include "segments.cuh"

namespace jitquant {

// FP8: sixteen bytes are sixteen elements, wherever segments begin.
struct Fp8Elements {
  using Fetched = uint4;
  static constexpr bool kWholeBlocks = false;
  const uint8_t* data;
  EightBit format;
  bool vector;

  __device__ __forceinline__ Fetched fetch(int64_t position, int64_t count) const {
    if (vector && count >= 16) return *reinterpret_cast<const uint4*>(data + position);
    uint4 bytes = make_uint4(0, 0, 0, 0);
    const int n = count < 16 ? static_cast<int>(count) : 16;
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
      const uint32_t byte = static_cast<uint32_t>(data[position + i]) << (8 * (i & 3));
      bytes.x |= i < 4 ? byte : 0u;
      bytes.y |= i >= 4 && i < 8 ? byte : 0u;
      bytes.z |= i >= 8 && i < 12 ? byte : 0u;
      bytes.w |= i >= 12 ? byte : 0u;
    }
    return bytes;
  }
  __device__ __forceinline__ void values(const Fetched& x, float scale, float (&v)[16]) const {
    const auto four = [&](uint32_t word, int first) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint8_t code = static_cast<uint8_t>(word >> (8 * i));
        const float element =
            format == EightBit::kE4m3 ? float_from_e4m3(code) : float_from_e5m2(code);
        v[first + i] = dequantize_fp8(element, scale);
      }
    };
    four(x.x, 0), four(x.y, 4), four(x.z, 8), four(x.w, 12);
  }
};

// NVFP4: a block of sixteen belongs to the segment of its first element.
struct Nvfp4Elements {
  struct Fetched {
    uint2 codes;
    uint8_t scale;
  };
  static constexpr bool kWholeBlocks = true;
  const uint2* codes;
  const uint8_t* scales;

  __device__ __forceinline__ Fetched fetch(int64_t position, int64_t) const {
    return {codes[position >> 4], scales[position >> 4]};
  }
  __device__ __forceinline__ void values(const Fetched& x, float gsa, float (&v)[16]) const {
    const float scale = float_from_e4m3(x.scale);
    nvfp4_dequantize8(x.codes.x, scale, gsa, v);
    nvfp4_dequantize8(x.codes.y, scale, gsa, v + 8);
  }
};

// MXFP8: half a block.
struct Mxfp8Elements {
  struct Fetched {
    uint4 bytes;
    uint8_t exponent;
  };
  static constexpr bool kWholeBlocks = false;
  Fp8Elements elements;
  const uint8_t* scales;

  __device__ __forceinline__ Fetched fetch(int64_t position, int64_t count) const {
    return {elements.fetch(position, count), scales[position >> 5]};
  }
  __device__ __forceinline__ void values(const Fetched& x, float, float (&v)[16]) const {
    elements.values(x.bytes, float_from_e8m0(x.exponent), v);
  }
};

// Loads the next elements while it computes the current ones. `scales`: of the segments, or null.
template <class T, class Elements>
__global__ void __launch_bounds__(kThreads, 2)
    ragged_dequant_kernel(Elements elements, const float* scales, Segments segments, int64_t range,
                          T* out, bool vector) {
  const int lane = threadIdx.x & 31;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5);
  int64_t position = warp * range;
  const int64_t stop = position + range < segments.numel ? position + range : segments.numel;
  wait_for_previous();
  let_next_begin();
  if (position >= stop) return;

  typename Elements::Fetched next = {};
  const auto fetch = [&](int64_t at) {
    at += 16 * lane;
    if (at < segments.numel) next = elements.fetch(at, segments.numel - at);
  };
  fetch(position);
  int segment = segment_at(segments, position);
  SegmentBounds bounds = {0, 0};
  float scale = 0.0f;
  const auto enter = [&] {
    const bool is_there = segment >= 0 && segment < segments.count;
    bounds = is_there ? segments.bounds(segment) : SegmentBounds{0, 0};
    scale = is_there && scales != nullptr ? scales[segment] : 0.0f;
  };
  enter();
#pragma unroll 1
  for (; position < stop; position += kStep) {
    const typename Elements::Fetched x = next;
    if (position + kStep < stop) fetch(position + kStep);
    if (position >= bounds.stop && segment + 1 < segments.count) {
      const int now = own_segment_at(segments, segment, segments.count, position);
      if (now != segment) {
        segment = now;
        enter();
      }
    }
    const int64_t mine = position + 16 * lane;
    float v[16];
    if (bounds.start <= position && position + kStep <= bounds.stop) {
      elements.values(x, scale, v);
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i) v[i] = 0.0f;
      visit_own_segments(segments, segment < 0 ? 0 : segment, segments.count, mine, [&](int g) {
        const SegmentBounds at = segments.bounds(g);
        const Part part(at, mine);
        if (part.empty() || (Elements::kWholeBlocks && at.start > mine)) return;
        float w[16];
        elements.values(x, scales != nullptr ? scales[g] : 0.0f, w);
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = part.has(i) ? w[i] : v[i];
      });
    }
    if (mine >= segments.numel) continue;
    store_block<false>(out + mine, segments.numel - mine, vector, block_of<T>(v));
  }
}

namespace {

template <class Elements>
cudaError_t launch_elements(const Elements& elements, const float* scales, const Segments& segments,
                            void* out, DType dtype, cudaStream_t stream) {
  if (segments.numel == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kWarps = kThreads / 32;
    const int64_t steps = (segments.numel + kStep - 1) / kStep;
    const int per_sm = blocks_per_sm<&ragged_dequant_kernel<T, Elements>>(kThreads, 0);
    const int64_t grid = persistent_grid((steps + kWarps - 1) / kWarps, per_sm);
    return launch<&ragged_dequant_kernel<T, Elements>>(
        {grid, kThreads, Start::kOverlapped}, stream, elements, scales, segments,
        range_of_warp(segments.numel, grid * kWarps), static_cast<T*>(out),
        reinterpret_cast<uintptr_t>(out) % 16 == 0);
  });
}

}  // namespace

#ifndef __CUDACC_RTC__
cudaError_t launch_dequantize_ragged_fp8(const uint8_t* data, EightBit format,
                                         const float* scale_inv, const SegmentTable& segments,
                                         const Values& out, cudaStream_t stream) {
  const Fp8Elements elements = {data, format, reinterpret_cast<uintptr_t>(data) % 16 == 0};
  return launch_elements(elements, scale_inv, Segments(segments), out.data, out.dtype, stream);
}

cudaError_t launch_dequantize_ragged_mxfp8(const uint8_t* data, EightBit format,
                                           const uint8_t* block_scales,
                                           const SegmentTable& segments, const Values& out,
                                           cudaStream_t stream) {
  const Fp8Elements elements = {data, format, reinterpret_cast<uintptr_t>(data) % 16 == 0};
  return launch_elements(Mxfp8Elements{elements, block_scales}, nullptr, Segments(segments),
                         out.data, out.dtype, stream);
}

cudaError_t launch_dequantize_ragged_nvfp4(const Codes& x_fp4, const uint8_t* x_sf,
                                           const float* gsa, const SegmentTable& segments,
                                           const Values& out, cudaStream_t stream) {
  const Nvfp4Elements elements = {reinterpret_cast<const uint2*>(x_fp4.data), x_sf};
  return launch_elements(elements, gsa, Segments(segments), out.data, out.dtype, stream);
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
