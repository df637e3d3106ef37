// What kernels.cpp offers for each instruction set, and what it is given: ranges that no other thread touches.
#pragma once

#include "../kernels.h"

namespace zl {

// Elements [begin, end) of the concatenated segments; `ends[i]` is where the i-th segment ends in that numbering.
typedef void (*UpdateRange)(const zl_update&, const int64_t* ends, int64_t begin, int64_t end);

// Chunks [begin, end) of the concatenated chunks of all segments, numbered like `partial`.
typedef void (*NormRange)(const zl_norm&, const int64_t* ends, int64_t begin, int64_t end);

struct Path {
  UpdateRange update;
  NormRange norm;
};

extern const Path path_plain;
#ifndef ZL_ONLY_PLAIN
extern const Path path_avx2;
extern const Path path_avx512;
#endif

}  // namespace zl
