// Sources: where the values of a quantizer come from. Loading and computing are separate, so that a
// kernel can load a block while it computes another. A source has `rows`, `cols` and
//   Value                            the type of a block of its values
//   Row row(r)                       locates a row
//   Fetched fetch(row, block)        loads what a block needs, once per block
//   Value value(fetched, row, block) the block; zeros past the last column
//   prefetch(row, block)             prefetches the same into L2; not for NormalizedSource.
//                                    prefetch<true>: the block is whole
//   prefetch_part(row, block, count) the same for some whole blocks of the row, if a cluster may
//                                    hold its rows; by one thread
//   Fetched refetch(row, block)      loads the same value again
//   whole()                          all blocks are whole and aligned to 16 bytes; fetch, value and
//                                    refetch have a bool template argument that is true only then
//   kHeldShare, kHeldFew             blocks of a row per thread that holds them; the second is for
//                                    few or short rows
//   kReadsOnlyInputs                 reads nothing that the previous launch wrote
// Sources for norm_kernel, which copies whole rows ahead of their use, also have
//   kHeldRegisters                   registers per thread on Hopper
//   tensors()                        the number of tensors that a row is made of
//   const T* tensor(row, i)          the row in tensor i
//   Beside beside(row)               what else each thread loads for a row
//   Value copied(part, beside, r)    a block of row r; part(i) is its copy from tensor i
//   kWritesBack                      the block also goes to row.residual
//   kKeepsZeros                      the block is zero where its parts are
//   kLoose                           rows may be unaligned or not whole
//   kCopiesLate                      rows are so large that the weights are laid out before the
//                                    copies start, except in the first thread block of each SM
#pragma once

#include "jitquant/activation.cuh"
#include "jitquant/launch.h"
#include "jitquant/memory.cuh"
#include "jitquant/nvfp4.cuh"

namespace jitquant {

// Whether a source's values need more registers than other sources that fetch as much. Such a
// source has a member kMoreRegisters, and its kernels use fewer threads.
template <class Source>
constexpr auto wants_registers(int) -> decltype(Source::kMoreRegisters) {
  return true;
}
template <class Source>
constexpr bool wants_registers(...) {
  return false;
}

// Whether a source also computes two blocks of a thread together, which take fewer steps between
// lanes. Such a source has members kPairs, pair_block(thread, k) and values(fetched, blocks,
// values).
template <class Source, class = void>
constexpr bool kInPairs = false;
template <class Source>
constexpr bool kInPairs<Source, std::enable_if_t<Source::kPairs>> = true;

// Whether lanes compute values together, so that a lane without a block has to have zeros. Such a
// source has a member kPairs.
template <class Source, class = void>
constexpr bool kTogether = false;
template <class Source>
constexpr bool kTogether<Source, decltype(static_cast<void>(Source::kPairs))> = true;

// Lanes that compute a value together, one block each: a power of two.
template <class Source>
int lanes_together(const Source&) {
  return 1;
}

template <class T>
struct RowPointer {
  T* data;
  bool even;  // rows are s2 apart, and s2 fits in 32 bits
  uint32_t n1, n2;
  int64_t s0, s1, s2;

  explicit RowPointer(const Matrix& m)
      : data(static_cast<T*>(const_cast<void*>(m.data))),
        even(m.n2 == m.rows && m.s2 >= 0 && m.s2 <= UINT32_MAX),
        n1(static_cast<uint32_t>(m.n1)),
        n2(static_cast<uint32_t>(m.n2)),
        s0(m.s0),
        s1(m.s1),
        s2(m.s2) {}

  // One past the last element of `rows` rows of `cols` columns.
  T* end(int64_t rows, int64_t cols) const {
    if (rows == 0) return data;
    const int64_t outer = rows / (int64_t{n1} * n2);
    return data + (outer - 1) * s0 + (int64_t{n1} - 1) * s1 + (int64_t{n2} - 1) * s2 + cols;
  }

  // The start of a row. A 32-bit row index takes fewer instructions.
  template <class I>
  __device__ __forceinline__ T* operator()(I row) const {
    if (even) {
      if constexpr (sizeof(I) == 8) return data + row * s2;
      return even_row(static_cast<uint32_t>(row));
    }
    const uint32_t r = static_cast<uint32_t>(row), i = r / n2;
    return data + (i / n1) * s0 + (i % n1) * s1 + (r % n2) * s2;
  }
  // Requires `even`.
  __device__ __forceinline__ T* even_row(uint32_t r) const {
    return data + static_cast<uint64_t>(r) * static_cast<uint32_t>(s2);
  }
};

template <class T>
struct PlainSource {
  using Element = T;
  static constexpr int kHeldShare = 2;
  static constexpr int kHeldFew = 1;
  using Value = Block<T>;
  using Fetched = Block<T>;
  using Row = const T*;
  static constexpr bool kReadsOnlyInputs = true;
  RowPointer<const T> row;
  int64_t rows, cols;
  bool vector;

  explicit PlainSource(const Matrix& m) : row(m), rows(m.rows), cols(m.cols), vector(m.vector) {}

  bool whole() const { return vector && cols % 16 == 0; }
  template <bool kWhole>
  __device__ __forceinline__ Fetched fetch(Row p, int64_t block) const {
    return load_block<kWhole>(p + block * 16, cols - block * 16, vector);
  }
  template <bool kWhole = false>
  __device__ __forceinline__ void prefetch(Row p, int64_t block) const {
    prefetch_block(p + block * 16, kWhole ? 16 : cols - block * 16);
  }
  __device__ __forceinline__ void prefetch_part(Row p, int block, int count) const {
    prefetch_blocks(p, block, count);
  }
  template <bool kWhole>
  __device__ __forceinline__ Fetched refetch(Row p, int64_t block) const {
    return fetch<kWhole>(p, block);
  }
  template <bool kWhole>
  __device__ __forceinline__ Value value(const Fetched& x, Row, int64_t) const {
    return x;
  }

  static constexpr int kHeldRegisters = sizeof(T) == 4 ? 96 : 64;
  static constexpr bool kLoose = false;
  static constexpr bool kWritesBack = false;
  static constexpr bool kCopiesLate = false;
  static constexpr bool kKeepsZeros = true;
  struct Beside {};
  __host__ __device__ int tensors() const { return 1; }
  __device__ __forceinline__ const T* tensor(Row p, int) const { return p; }
  __device__ __forceinline__ Beside beside(Row) const { return {}; }
  template <class Part>
  __device__ __forceinline__ Value copied(Part&& part, const Beside&, uint32_t) const {
    return part(0);
  }
};

// Rows of two-byte values at any address, to be held or copied ahead.
template <class T>
struct LooseSource : PlainSource<T> {
  using typename PlainSource<T>::Value;
  using typename PlainSource<T>::Row;
  using Fetched = LooseBlock<T>;
  const T* end;  // one past the last element of all rows

  explicit LooseSource(const PlainSource<T>& source)
      : PlainSource<T>(source), end(source.row.end(source.rows, source.cols)) {}

  template <bool>
  __device__ __forceinline__ Fetched fetch(Row p, int64_t block) const {
    return load_loose(p + block * 16, this->cols - block * 16);
  }
  template <bool>
  __device__ __forceinline__ Value value(const Fetched& x, Row p, int64_t) const {
    return x.straight(elements_over<16>(p));
  }

  static constexpr int kHeldRegisters = 72;
  static constexpr bool kLoose = true;
  struct Beside {
    int over;
  };
  __device__ __forceinline__ Beside beside(Row p) const { return {elements_over<128>(p)}; }
  template <class Part>
  __device__ __forceinline__ Value copied(Part&& part, const Beside& beside, uint32_t) const {
    return part(0, beside.over);
  }
};

// Contiguous blocks, as one row.
template <class T>
struct FlatSource {
  using Element = T;
  using Value = Block<T>;
  using Fetched = Block<T>;
  using Row = int;
  static constexpr bool kReadsOnlyInputs = true;
  const T* data;
  int64_t blocks;

  __device__ __forceinline__ Row row(int r) const { return r; }
  template <bool kWhole = true>
  __device__ __forceinline__ Fetched fetch(Row, int64_t block) const {
    return fetch(block);
  }
  __device__ __forceinline__ Fetched fetch(int64_t block) const {
    return load_block<true>(data + block * 16, 16, true);
  }
  __device__ __forceinline__ void prefetch(Row, int64_t block) const { prefetch(block); }
  __device__ __forceinline__ void prefetch(int64_t block) const {
    prefetch_block(data + block * 16, 16);
  }
  template <bool kWhole>
  __device__ __forceinline__ Value value(const Fetched& x, Row, int64_t) const {
    return x;
  }
};

__device__ __forceinline__ float swiglu(float gate, float up) {
  return mul_rn(Silu::value(gate), up);
}

// Alternating runs of `run` gate and up columns. run == cols is the plain layout [gate | up].
template <class T>
struct DeinterleaveSource {
  using Element = T;
  static constexpr int kHeldShare = 1;
  static constexpr int kHeldFew = 1;
  using Value = Block<float>;
  struct Fetched {
    Block<T> gate, up;
  };
  using Row = const T*;
  static constexpr bool kReadsOnlyInputs = true;
  RowPointer<const T> row;
  int64_t rows, cols;
  uint32_t run;
  Divisor over_run;
  bool activate;  // silu(gate) * up; otherwise only the gate
  bool vector;    // eight neighbors are in one run and aligned

  DeinterleaveSource(const Matrix& m, int64_t run, bool activate)
      : row(m),
        rows(m.rows),
        cols(m.cols / 2),
        run(static_cast<uint32_t>(run)),
        over_run(this->run >> 31 ? 1 : this->run),
        activate(activate),
        vector(m.vector && run % 8 == 0) {}

  __device__ __forceinline__ int64_t gate_column(uint32_t c) const {
    if (run == 8) return 2 * static_cast<int64_t>(c & ~7u) + (c & 7u);
    if (run == cols) return c;
    return static_cast<int64_t>(c / run) * 2 * run + c % run;
  }

  bool whole() const { return vector && cols % 16 == 0 && cols < (int64_t{1} << 31); }
  // Prefetches as many values of the row as a block needs, wherever the block's own are.
  template <bool kWhole = false>
  __device__ __forceinline__ void prefetch(Row gate, int64_t block) const {
    const int64_t first = block * 32, count = kWhole ? 32 : 2 * cols - first;
    prefetch_block(gate + first, count);
    prefetch_block(gate + first + 16, count - 16);
  }
  __device__ __forceinline__ void prefetch_part(Row gate, int block, int count) const {
    prefetch_blocks(gate, 2 * block, 2 * count);
  }
  template <bool kWhole>
  __device__ __forceinline__ Fetched fetch(Row gate, int64_t block) const {
    const T* up = gate + run;
    const uint32_t first = static_cast<uint32_t>(block * 16);
    const int64_t count = cols - first;
    constexpr int kHalf = Block<T>::kWords / 2;
    if constexpr (kWhole) {
      const uint32_t second = first + 8;
      const uint32_t a = first + over_run.quotient_of(first) * run;
      const uint32_t b = second + over_run.quotient_of(second) * run;
      Fetched f;
      load_words<kHalf>(gate + a, f.gate.words);
      load_words<kHalf>(gate + b, f.gate.words + kHalf);
      if (activate) {
        load_words<kHalf>(up + a, f.up.words);
        load_words<kHalf>(up + b, f.up.words + kHalf);
      }
      return f;
    }
    Fetched f = {};
    if (vector && count >= 16) {
      const int64_t a = gate_column(first), b = gate_column(first + 8);
      load_words<kHalf>(gate + a, f.gate.words);
      load_words<kHalf>(gate + b, f.gate.words + kHalf);
      if (activate) {
        load_words<kHalf>(up + a, f.up.words);
        load_words<kHalf>(up + b, f.up.words + kHalf);
      }
    } else {
      f.gate = gather_block<T>(count, [&](int i) { return gate[gate_column(first + i)]; });
      if (activate) {
        f.up = gather_block<T>(count, [&](int i) { return up[gate_column(first + i)]; });
      }
    }
    return f;
  }
  template <bool kWhole>
  __device__ __forceinline__ Fetched refetch(Row gate, int64_t block) const {
    return fetch<kWhole>(gate, block);
  }
  template <bool kWhole>
  __device__ __forceinline__ Value value(const Fetched& f, Row, int64_t) const {
    Value v;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float gate = value_of(f.gate, i);
      set_value(v, i, activate ? swiglu(gate, value_of(f.up, i)) : gate);
    }
    return v;
  }
};

// x + residual, summed in fp32 and rounded once to the residual's type. The rounded sum is stored
// in the residual and used from there on, as in a model that adds and normalizes in two steps.
template <class T>
struct ResidualSource {
  using Element = T;
  static constexpr int kHeldShare = 2;
  static constexpr int kHeldFew = 2;
  using Value = Block<T>;
  struct Fetched {
    Block<T> x, residual;
    bool summed;  // x already is the sum
  };
  struct Row {
    const T* x;
    T* residual;
  };
  RowPointer<const T> x_row;
  RowPointer<T> residual_row;
  int64_t rows, cols;
  bool vector;

  ResidualSource(const Matrix& x, const Matrix& residual)
      : x_row(x),
        residual_row(residual),
        rows(x.rows),
        cols(x.cols),
        vector(x.vector && residual.vector) {}

  bool whole() const { return vector && cols % 16 == 0; }
  template <class I>
  __device__ __forceinline__ Row row(I r) const {
    return {x_row(r), residual_row(r)};
  }
  __device__ __forceinline__ void prefetch(const Row& p, int64_t block) const {
    prefetch_block(p.x + block * 16, cols - block * 16);
    prefetch_block(p.residual + block * 16, cols - block * 16);
  }
  __device__ __forceinline__ void prefetch_part(const Row& p, int block, int count) const {
    prefetch_blocks(p.x, block, count);
    prefetch_blocks(static_cast<const T*>(p.residual), block, count);
  }
  template <bool kWhole>
  __device__ __forceinline__ Fetched fetch(const Row& p, int64_t block) const {
    const int64_t count = cols - block * 16;
    const T* residual = p.residual + block * 16;
    return {load_block<kWhole>(p.x + block * 16, count, vector),
            load_block<kWhole>(residual, count, vector), false};
  }
  template <bool kWhole>
  __device__ __forceinline__ Fetched refetch(const Row& p, int64_t block) const {
    const T* sum = p.residual + block * 16;
    return {load_block<kWhole>(sum, cols - block * 16, vector), {}, true};
  }
  __device__ __forceinline__ Value sum(const Fetched& f) const {
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = add_rn(value_of(f.x, i), value_of(f.residual, i));
    return block_of<T>(v);
  }
  template <bool kWhole>
  __device__ __forceinline__ Value value(const Fetched& f, const Row& p, int64_t block) const {
    if (f.summed) return f.x;
    const Value sum = this->sum(f);
    store_block<kWhole>(p.residual + block * 16, cols - block * 16, vector, sum);
    return sum;
  }

  static constexpr int kHeldRegisters = sizeof(T) == 4 ? 112 : 96;
  static constexpr bool kLoose = false;
  static constexpr bool kWritesBack = true;
  static constexpr bool kCopiesLate = true;
  static constexpr bool kKeepsZeros = true;
  struct Beside {};
  __host__ __device__ int tensors() const { return 2; }
  __device__ __forceinline__ const T* tensor(const Row& p, int i) const {
    return i == 0 ? p.x : p.residual;
  }
  __device__ __forceinline__ Beside beside(const Row&) const { return {}; }
  template <class Part>
  __device__ __forceinline__ Value copied(Part&& part, const Beside&, uint32_t) const {
    return sum({part(0), part(1), false});
  }
};

// The mixed streams of a hyper-connection: sum over h of A[row, h] * X[row, h, :], h in order.
template <class T>
struct HyperConnectionSource {
  using Element = T;
  static constexpr int kHeldShare = 2;
  static constexpr int kHeldFew = 2;
  using Value = Block<float>;
  static constexpr int kAtOnce = sizeof(T) == 2 ? 4 : 2;  // streams loaded together
  struct Fetched {
    Block<T> x[kAtOnce];
  };
  struct Row {
    const T* x;
    int64_t weights;  // of its first stream
  };
  RowPointer<const T> x_row;  // of (row, 0, 0)
  const void* weights;
  int64_t rows, cols, stream_stride, weight_row_stride, weight_stride;
  int streams;
  bool vector, weights_fp32;

  bool whole() const { return vector && cols % 16 == 0; }
  template <class I>
  __device__ __forceinline__ Row row(I r) const {
    return {x_row(r), r * weight_row_stride};
  }
  // The bits of a weight. Converting them is a separate step, so that nothing waits for the load
  // yet.
  __device__ __forceinline__ uint32_t weight_bits(const Row& p, int h) const {
    const int64_t i = p.weights + h * weight_stride;
    return weights_fp32 ? static_cast<const uint32_t*>(weights)[i]
                        : bits_of(static_cast<const T*>(weights)[i]);
  }
  __device__ __forceinline__ float weight_of(uint32_t bits) const {
    if (sizeof(T) == 4 || weights_fp32) return bits_float(bits);
    return value_of(Block<T>{{bits}}, 0);
  }
  __device__ __forceinline__ float weight(const Row& p, int h) const {
    return weight_of(weight_bits(p, h));
  }
  __device__ __forceinline__ void prefetch(const Row& p, int64_t block) const {
    if (block == 0) {
      const int64_t bytes = weights_fp32 ? sizeof(float) : sizeof(T);
      jitquant::prefetch(static_cast<const char*>(weights) + p.weights * bytes);
    }
#pragma unroll 1
    for (int h = 0; h < streams; ++h) {
      prefetch_block(p.x + h * stream_stride + block * 16, cols - block * 16);
    }
  }
  template <bool kWhole>
  __device__ __forceinline__ Fetched fetch(const Row& p, int64_t block, int first = 0) const {
    const T* x = p.x + first * stream_stride + block * 16;
    Fetched f;
#pragma unroll
    for (int h = 0; h < kAtOnce; ++h) {
      if (first + h < streams) f.x[h] = load_block<kWhole, false>(x, cols - block * 16, vector);
      x += stream_stride;
    }
    return f;
  }
  template <bool kWhole>
  __device__ __forceinline__ Fetched refetch(const Row& p, int64_t block) const {
    return fetch<kWhole>(p, block);
  }
  template <bool kWhole>
  __device__ __forceinline__ Value value(Fetched f, const Row& p, int64_t block) const {
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = -0.0f;  // adding the first product to -0 changes no bit
#pragma unroll 1
    for (int first = 0;;) {
#pragma unroll
      for (int h = 0; h < kAtOnce; ++h) {
        if (first + h >= streams) break;
        const float a = weight(p, first + h);
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = fma_rn(a, value_of(f.x[h], i), v[i]);
      }
      first += kAtOnce;
      if (first >= streams) break;
      f = fetch<kWhole>(p, block, first);
    }
    // A negative weight makes the zeros past the last column negative.
    Value mix;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      set_value(mix, i, kWhole || i < cols - block * 16 ? v[i] : 0.0f);
    }
    return mix;
  }

  static constexpr int kHeldRegisters = 96;
  static constexpr bool kLoose = false;
  static constexpr bool kWritesBack = false;
  static constexpr bool kCopiesLate = true;
  static constexpr bool kKeepsZeros = false;  // a weight may be infinite
  struct Beside {
    uint32_t weight_bits[4];  // of the first streams
  };
  __host__ __device__ int tensors() const { return streams; }
  __device__ __forceinline__ const T* tensor(const Row& p, int i) const {
    return p.x + i * stream_stride;
  }
  __device__ __forceinline__ Beside beside(const Row& p) const {
    Beside b;
#pragma unroll
    for (int h = 0; h < 4; ++h) b.weight_bits[h] = h < streams ? weight_bits(p, h) : 0;
    return b;
  }
  template <class Part>
  __device__ __forceinline__ Value copied(Part&& part, const Beside& beside, uint32_t r) const {
    Value mix;
#pragma unroll
    for (int i = 0; i < 16; ++i) set_value(mix, i, -0.0f);
    auto add = [&](int h, float a) {
      const Block<T> x = part(h);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        set_value(mix, i, fma_rn(a, value_of(x, i), value_of(mix, i)));
      }
    };
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      if (h < streams) add(h, weight_of(beside.weight_bits[h]));
    }
#pragma unroll 1
    for (int h = 4; h < streams; ++h) add(h, weight(row(r), h));
    return mix;
  }
};

// The multiplication of RMSNorm: a source's values times weight times inv_rms[row].
template <class T>
struct Normalize {
  ColumnVector weight;
  float eps;
  float* inv_rms;  // (rows,)

  // The weights of a block, shared by all rows; the first `count` exist.
  __device__ __forceinline__ void prefetch(int64_t block, int64_t count = 16) const {
    if (weight.fp32) {
      prefetch_block(static_cast<const float*>(weight.data) + block * 16, count);
    } else {
      prefetch_block(static_cast<const T*>(weight.data) + block * 16, count);
    }
  }
  template <bool kWhole, class Value>
  __device__ __forceinline__ Block<float> weighted(const Value& x, int64_t block,
                                                   int64_t cols) const {
    const int64_t first = block * 16;
    Block<float> y;
    if (weight.fp32) {
      multiply<kWhole>(x, static_cast<const float*>(weight.data) + first, cols - first, y);
    } else {
      multiply<kWhole>(x, static_cast<const T*>(weight.data) + first, cols - first, y);
    }
    return y;
  }

 private:
  template <bool kWhole, class Value, class W>
  __device__ __forceinline__ void multiply(const Value& x, const W* w, int64_t count,
                                           Block<float>& y) const {
    constexpr int kHalf = Block<W>::kWords / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // takes fewer registers than all weights at once
      Block<W> part;
      if (kWhole || (weight.vector && count >= 16)) {
        load_words<kHalf>(w + 8 * half, part.words);
      } else {
        part = gather_block<W>(count - 8 * half, [=](int i) { return w[8 * half + i]; });
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        set_value(y, 8 * half + i, mul_rz(value_of(x, 8 * half + i), value_of(part, i)));
      }
    }
  }
};

// The normalized values of a source whose inv_rms was written by an earlier launch.
template <class Source>
struct NormalizedSource {
  using Element = typename Source::Element;
  using Value = Block<float>;
  using Fetched = typename Source::Fetched;
  struct Row {
    typename Source::Row row;
    float inv_rms;
  };
  static constexpr bool kReadsOnlyInputs = false;
  Source source;
  Normalize<Element> norm;
  int64_t rows, cols;

  NormalizedSource(const Source& source, const Normalize<Element>& norm)
      : source(source), norm(norm), rows(source.rows), cols(source.cols) {}

  bool whole() const { return source.whole() && norm.weight.vector; }
  __device__ __forceinline__ Row row(int64_t r) const { return {source.row(r), norm.inv_rms[r]}; }
  template <bool kWhole>
  __device__ __forceinline__ Fetched fetch(const Row& p, int64_t block) const {
    return source.template refetch<kWhole>(p.row, block);
  }
  // Excludes inv_rms, which is applied when encoding (quantize_value).
  template <bool kWhole>
  __device__ __forceinline__ Value value(const Fetched& f, const Row& p, int64_t block) const {
    return norm.template weighted<kWhole>(source.template value<kWhole>(f, p.row, block), block,
                                          cols);
  }
};

// The codes of one block of a row's values.
template <class Source>
__device__ __forceinline__ Nvfp4Codes quantize_value(const Source&, const typename Source::Row&,
                                                     const typename Source::Value& v,
                                                     const Nvfp4Encoding& e) {
  return nvfp4_quantize_block(v, block_amax(v), e);
}
template <class Source>
__device__ __forceinline__ Nvfp4Codes
quantize_value(const NormalizedSource<Source>&, const typename NormalizedSource<Source>::Row& p,
               const Block<float>& v, const Nvfp4Encoding& e) {
  return nvfp4_quantize_scaled_block<sizeof(typename Source::Element) == 2>(v, block_amax(v),
                                                                            p.inv_rms, e);
}

}  // namespace jitquant
