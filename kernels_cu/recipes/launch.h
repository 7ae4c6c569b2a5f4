// What the launchers of recipes for training and rotation take.
#pragma once

#include "jitquant/launch.h"

namespace jitquant {

// Of other folders, which launchers take too.
struct ElementRows;
struct Fp8Scale;
struct GroupNumerics;
struct GroupOutput;
struct RowCounts;

// Maxima of a matrix, and as many of its transpose, that one launch passes to the next.
constexpr int kBothPartials = 512;

// A Hadamard transform of 16 * lanes neighbors; no transform if lanes is 0.
struct Rotation {
  int lanes;
  bool rounded;         // to the input's type, as TransformerEngine does
  float factor;         // 1 / sqrt(16 * lanes)
  const int8_t* signs;  // (16 * lanes,), or null
};

// cos and sin of the first `size` columns, fp32 (positions, size / 2). Each position serves
// `rows_each` consecutive rows.
struct Rope {
  const float* cos;
  const float* sin;
  int64_t rows_each;
  int32_t size;      // a multiple of 32, or 0
  bool interleaved;  // pairs are neighbors; otherwise they are `size / 2` columns apart
  bool vector;       // the tables are aligned to 16 bytes
};

enum class Error : int { kAbsolute, kSquared, kLargest };

// How the scale of an NVFP4 block is selected.
struct Select {
  bool none;    // as in recipe "te"
  bool single;  // no choice: the block's amax maps to `full`
  bool scaled;  // compares errors of scaled values
  Error error;
  float full;
};

// Those after kRceil turn a block whose byte is 0 into zeros.
enum class Mxfp4Scaling : int {
  kFloor,
  kCeil,
  kEven,
  kRceil,
  kGptOssUp,
  kGptOssDown,
  kStatic6,
  kStatic4
};

struct Rounding {
  bool stochastic;
  const int64_t* rng_state;     // seed and offset, or null
  const uint8_t* random_bytes;  // (rows, cols), or null
};

struct Recipe {
  Rotation rotation;
  Select select;
  Rounding rounding;
  Mxfp4Scaling scaling;
  bool tile;  // 16 rows share a scale
};

// Of a matrix and of its transpose: `count` partial amaxes each, or a given gsa each.
struct BothScale {
  const float* side[2];
  int count;
  bool from_gsa;
  float divisor;
};

// Given random bytes of both, (rows, cols) and (cols, rows), or null.
struct BothBytes {
  const uint8_t* side[2];
};

struct Mxfp4Input {
  const uint8_t* codes;   // (rows, groups * 16)
  const uint8_t* scales;  // (rows, groups), or swizzled
  int64_t rows, groups;
  bool swizzled;
};

}  // namespace jitquant
