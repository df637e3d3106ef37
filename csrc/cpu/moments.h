// A step of AdamW whose moments are codes of 8 bits (zl_adam8 in ../kernels.h), a block at a time. A block that has fewer
// elements is filled up with zeros in the cache, so every loop has a constant number of elements. The operations are those
// of torch on processors with FMA, in their order.
#pragma once

#include "quantize.h"

namespace {

// Numbers of codes, and codes of numbers whose cells are known.
#if defined(__AVX512F__)

ZL_INLINE void look_up(const float* numbers, const uint8_t* code, float* x) {
  for (int i = 0; i < QUANT; i += 16) {
    const __m512i at = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(code + i)));
    _mm512_storeu_ps(x + i, _mm512_i32gather_ps(at, numbers, 4));
  }
}

// A gather reads four bytes at a cell. The last cells have no numbers, so it stays within them.
ZL_INLINE void find_codes(const zl_moment& moment, const int32_t* cell, const float* relative, uint8_t* code) {
  const __m512i byte = _mm512_set1_epi32(0xff), one = _mm512_set1_epi32(1);
  for (int i = 0; i < QUANT; i += 16) {
    const __m512i low = _mm512_and_si512(_mm512_i32gather_epi32(_mm512_loadu_si512(cell + i), moment.cells, 1), byte);
    const __m512 border = _mm512_i32gather_ps(low, moment.borders, 4);
    const __mmask16 above = _mm512_cmp_ps_mask(_mm512_loadu_ps(relative + i), border, _CMP_GT_OQ);
    _mm_storeu_si128((__m128i*)(code + i), _mm512_cvtepi32_epi8(_mm512_mask_add_epi32(low, above, low, one)));
  }
}

#else

ZL_INLINE void look_up(const float* numbers, const uint8_t* code, float* x) {
  for (int i = 0; i < QUANT; i++) x[i] = numbers[code[i]];
}

ZL_INLINE void find_codes(const zl_moment& moment, const int32_t* cell, const float* relative, uint8_t* code) {
  for (int i = 0; i < QUANT; i++) {
    const uint8_t low = moment.cells[cell[i]];
    code[i] = (uint8_t)(low + (relative[i] > moment.borders[low]));
  }
}

#endif

ZL_INLINE void read_moment(const zl_moment& moment, int64_t at, int64_t block, float* x, int n) {
  uint8_t filled[QUANT];
  const uint8_t* code = moment.codes + at;
  const float largest = moment.maxima[block];
  if (n < QUANT) {
    memset(filled, 0, QUANT);
    memcpy(filled, code, n);
    code = filled;
  }
  look_up(moment.numbers, code, x);
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
  uint8_t filled[QUANT];
  const float largest = float_of((uint32_t)largest_of(x)), divisor = largest > 0.0f ? largest : 1.0f;
  for (int i = 0; i < QUANT; i++) relative[i] = x[i] / divisor;
  for (int i = 0; i < QUANT; i++) cell[i] = cell_of(relative[i]);
  find_codes(moment, cell, relative, n < QUANT ? filled : moment.codes + at);
  if (n < QUANT) memcpy(moment.codes + at, filled, n);
  moment.maxima[block] = largest;
}

template <class V>
ZL_INLINE void adam8_at(const zl_adam8& call, const zl::Lerp& mean, float keep, float* p, const float* g, float* m, float* v) {
  const V gradient = V::load(g), first = mean(V::load(m), gradient);
  const V second = fma(V(call.square) * gradient, gradient, V::load(v) * V(call.keep_square));
  first.store(m);
  second.store(v);
  const V divisor = sqrt(second) / V(call.correction2) + V(call.eps);
  (V::load(p) * V(keep) + V(call.step) * first / divisor).store(p);
}

void adam8(const zl_adam8& call, int64_t begin, int64_t end) {
  const zl::Lerp mean(call.mean);
  const int size = bytes_of(call.param_dtype), grad_size = bytes_of(call.grad_dtype);
  alignas(64) float weights[QUANT], gradients[QUANT], m[QUANT], v[QUANT];
  for (int64_t block = begin; block < end; block++) {
    const int64_t start = block * QUANT - call.lead, at = start < 0 ? 0 : start;
    const int64_t stop = start + QUANT < call.numel ? start + QUANT : call.numel;
    const int n = (int)(stop - at);
    char* const param = (char*)call.param + at * size;
    const char* const grad = (const char*)call.grad + at * grad_size;
    const bool in_place = n == QUANT && call.param_dtype == ZL_F32, grad_in_place = n == QUANT && call.grad_dtype == ZL_F32;
    float* const p = in_place ? (float*)param : weights;
    const float* const g = grad_in_place ? (const float*)grad : gradients;
    if (!in_place) load_floats(param, call.param_dtype, weights, n);
    if (!grad_in_place) load_floats(grad, call.grad_dtype, gradients, n);
    read_moment(call.moments[0], at, block, m, n);
    read_moment(call.moments[1], at, block, v, n);
    float keep = call.keep;
    if (call.param_dtype != ZL_F32) {  // torch stores the decayed weight
      uint16_t half[QUANT];
      for (int i = 0; i < QUANT; i++) p[i] = p[i] * keep;
      keep = 1.0f;
      narrow(p, half, call.param_dtype, 0, QUANT);
      widen(half, call.param_dtype, 0, p, QUANT);
    }
    for (int i = 0; i < QUANT; i += Wide::width) adam8_at<Wide>(call, mean, keep, p + i, g + i, m + i, v + i);
    if (!in_place) store_floats(p, param, call.param_dtype, n);
    store_moment(call.moments[0], at, block, m, n);
    store_moment(call.moments[1], at, block, v, n);
  }
}

}  // namespace
