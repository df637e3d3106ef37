// Functions of kernels.cpp for each instruction set. Each is called with a range that no other thread uses.
#pragma once

#include "../kernels.h"

namespace zl {

// Elements [begin, end) of the concatenated segments; `ends[i]` is the end of the i-th segment in that numbering.
typedef void (*UpdateRange)(const zl_update&, const int64_t* ends, int64_t begin, int64_t end);

// Chunks [begin, end) of the concatenated chunks of all segments, numbered like `partial`.
typedef void (*NormRange)(const zl_norm&, const int64_t* ends, int64_t begin, int64_t end);

// Blocks [begin, end), numbered row by row; those of one row where rows are summed.
typedef void (*QuantRange)(const zl_quant&, int64_t begin, int64_t end);

// Blocks [begin, end) of an array.
typedef void (*Adam8Range)(const zl_adam8&, int64_t begin, int64_t end);

struct Path {
  UpdateRange update;
  NormRange norm;
  QuantRange quantize, dequantize;
  Adam8Range adam8;
};

extern const Path path_plain;
#ifndef ZL_ONLY_PLAIN
extern const Path path_avx2;
extern const Path path_avx512;
#endif

}  // namespace zl
