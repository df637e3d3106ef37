// The two conversions of the toolkit's header that the kernels use.
#pragma once

#include "cuda_on_cpu.h"

inline unsigned short __ushort_as_half(unsigned short x) { return x; }
inline unsigned short __half_as_ushort(unsigned short x) { return x; }
inline float __half2float(unsigned short x) { return from_f16(x); }
inline unsigned short __float2half_rn(float x) { return to_f16(x); }
