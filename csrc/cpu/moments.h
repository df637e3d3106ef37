// A step of AdamW whose moments are codes of 8 bits (zl_adam8 in ../kernels.h), a block at a time. A block that has fewer
// elements is filled up with zeros in the cache, so every loop has a constant number of elements. The operations are those
// of torch on processors with FMA, in their order.
#pragma once

#include "quantize.h"

namespace {

ZL_INLINE void read_moment(const zl_moment& moment, int64_t at, int64_t block, float* x, int n) {
  uint8_t code[QUANT] = {};
  memcpy(code, moment.codes + at, n);
  const float largest = moment.maxima[block];
  for (int i = 0; i < QUANT; i++) x[i] = moment.numbers[code[i]];
  for (int i = 0; i < QUANT; i++) x[i] = x[i] * largest;
  if (n < QUANT) memset(x + n, 0, (QUANT - n) * sizeof(float));
}

// The cell of a number tells its code but for one: no cell has two borders. NaN has the code of 1.
ZL_INLINE int32_t cell_of(float x) {
  x = x < 1.0f ? x : 1.0f;
  x = x > -1.0f ? x : -1.0f;
  const int32_t magnitude = (int32_t)(bits_of(x) >> 16 & 0x7fffu), sign = (int32_t)(bits_of(x) >> 31);
  return (magnitude < ZL_CELL_LEAST ? 0 : magnitude - ZL_CELL_LEAST) + sign * (ZL_CELLS / 2);
}

ZL_INLINE void store_moment(const zl_moment& moment, int64_t at, int64_t block, const float* x, int n) {
  alignas(64) float relative[QUANT];
  alignas(64) int32_t cell[QUANT];
  uint8_t code[QUANT];
  const float largest = float_of((uint32_t)largest_of(x)), divisor = largest > 0.0f ? largest : 1.0f;
  for (int i = 0; i < QUANT; i++) relative[i] = x[i] / divisor;
  for (int i = 0; i < QUANT; i++) cell[i] = cell_of(relative[i]);
  for (int i = 0; i < QUANT; i++) {
    const uint8_t low = moment.cells[cell[i]];
    code[i] = (uint8_t)(low + (relative[i] > moment.borders[low]));
  }
  memcpy(moment.codes + at, code, n);
  moment.maxima[block] = largest;
}

template <class V>
ZL_INLINE void adam8_at(const zl_adam8& call, const zl::Lerp& mean, float* p, const float* g, float* m, float* v) {
  const V gradient = V::load(g), first = mean(V::load(m), gradient);
  const V second = fma(V(call.square) * gradient, gradient, V::load(v) * V(call.keep_square));
  first.store(m);
  second.store(v);
  const V divisor = sqrt(second) / V(call.correction2) + V(call.eps);
  (V::load(p) + V(call.step) * first / divisor).store(p);
}

void adam8(const zl_adam8& call, int64_t begin, int64_t end) {
  const zl::Lerp mean(call.mean);
  const int size = bytes_of(call.param_dtype), grad_size = bytes_of(call.grad_dtype);
  alignas(64) float p[QUANT], g[QUANT], m[QUANT], v[QUANT];
  for (int64_t block = begin; block < end; block++) {
    const int64_t start = block * QUANT - call.lead, at = start < 0 ? 0 : start;
    const int64_t stop = start + QUANT < call.numel ? start + QUANT : call.numel;
    const int n = (int)(stop - at);
    char* const param = (char*)call.param + at * size;
    load_floats(param, call.param_dtype, p, n);
    load_floats((const char*)call.grad + at * grad_size, call.grad_dtype, g, n);
    read_moment(call.moments[0], at, block, m, n);
    read_moment(call.moments[1], at, block, v, n);
    for (int i = 0; i < QUANT; i++) p[i] = p[i] * call.keep;
    if (call.param_dtype != ZL_F32) {  // torch stores the decayed weight
      uint16_t half[QUANT];
      narrow(p, half, call.param_dtype, 0, QUANT);
      widen(half, call.param_dtype, 0, p, QUANT);
    }
    for (int i = 0; i < QUANT; i += Wide::width) adam8_at<Wide>(call, mean, p + i, g + i, m + i, v + i);
    store_floats(p, param, call.param_dtype, n);
    store_moment(call.moments[0], at, block, m, n);
    store_moment(call.moments[1], at, block, v, n);
  }
}

}  // namespace
