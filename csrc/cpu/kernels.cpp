// The inner loops. Compiled once for every instruction set, with ZL_ISA as its name.
#include <string.h>

#include "moments.h"
#include "paths.h"
#include "vec.h"

#define ZL_JOIN2(a, b) a##b
#define ZL_JOIN(a, b) ZL_JOIN2(a, b)

namespace {

// Elements that are converted at once. Five arrays of them stay in the first-level cache.
constexpr int64_t BLOCK = 512;

// Take values that the user has written into the 16-bit copy over into the parameters. On a CPU this costs almost
// nothing: the cache lines of `out` are about to be written anyway, and nearly always equal.
void follow(float* p, const void* out, int32_t dtype, int64_t at, int64_t n) {
  alignas(64) uint16_t rounded[BLOCK];
  const uint16_t* now = (const uint16_t*)out + at;
  narrow(p, rounded, dtype, 0, n);
  if (!memcmp(rounded, now, n * sizeof(uint16_t))) return;
  for (int64_t i = 0; i < n; i++)
    if (rounded[i] != now[i]) p[i] = dtype == ZL_BF16 ? from_bf16(now[i]) : from_f16(now[i]);
}

template <class V, class Rule>
ZL_INLINE void apply_at(const Rule& rule, float* p, const float* g, float* s0, float* s1) {
  V param = V::load(p), first = s0 ? V::load(s0) : V(0.0f), second = s1 ? V::load(s1) : V(0.0f);
  rule(param, V::load(g), first, second);
  param.store(p);
  if (s0) first.store(s0);
  if (s1) second.store(s1);
}

template <class Rule>
ZL_INLINE void apply(const Rule& rule, float* p, const float* g, float* s0, float* s1, int64_t n) {
  int64_t i = 0;
  for (; i + Wide::width <= n; i += Wide::width)
    apply_at<Wide>(rule, p + i, g + i, s0 ? s0 + i : 0, s1 ? s1 + i : 0);
  for (; i < n; i++) apply_at<One>(rule, p + i, g + i, s0 ? s0 + i : 0, s1 ? s1 + i : 0);
}

// A flat array of any dtype, as floats: in place if it has floats, otherwise through a block that is converted.
struct Stream {
  void* base;
  int32_t dtype;
  alignas(64) float block[BLOCK];

  ZL_MEMBER Stream(void* array, int32_t type) : base(array), dtype(type) {}
  ZL_MEMBER float* open(int64_t at, int64_t n) {
    if (!base) return 0;
    if (dtype == ZL_F32) return (float*)base + at;
    widen(base, dtype, at, block, n);
    return block;
  }
  ZL_MEMBER void close(int64_t at, int64_t n) {
    if (base && dtype != ZL_F32) narrow(block, base, dtype, at, n);
  }
};

template <class Rule>
void update_segment(const zl_update& call, const int64_t* segment, int64_t begin, int64_t end) {
  const int64_t tensor = segment[0];
  const Rule rule(call.rows + segment[3] * ZL_COLUMNS, call.factor ? *call.factor : 1.0f);
  Stream param(call.params[tensor], call.param_dtype);
  Stream grad((void*)call.grads[tensor], call.grad_dtype);
  Stream first(Rule::states > 0 && call.states[0] ? call.states[0][tensor] : 0, call.state_dtype);
  Stream second(Rule::states > 1 && call.states[1] ? call.states[1][tensor] : 0, call.state_dtype);
  void* const out = call.out_dtype == ZL_NONE ? 0 : call.outs[tensor];
  for (int64_t at = begin; at < end; at += BLOCK) {
    const int64_t n = end - at < BLOCK ? end - at : BLOCK;
    float* const p = param.open(at, n);
    const float* const g = grad.open(at, n);
    float* const s0 = first.open(at, n);
    float* const s1 = second.open(at, n);
    if (out) follow(p, out, call.out_dtype, at, n);
    if (s1)
      apply(rule, p, g, s0, s1, n);
    else if (s0)
      apply(rule, p, g, s0, (float*)0, n);
    else
      apply(rule, p, g, (float*)0, (float*)0, n);
    param.close(at, n);
    first.close(at, n);
    second.close(at, n);
    if (out) narrow(p, out, call.out_dtype, at, n);
  }
}

// The first segment that ends after `position`.
int64_t find(const int64_t* ends, int64_t count, int64_t position) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (ends[middle] <= position)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

template <class Rule>
void update_range(const zl_update& call, const int64_t* ends, int64_t begin, int64_t end) {
  for (int64_t i = find(ends, call.segments, begin); i < call.segments && begin < end; i++) {
    const int64_t* segment = call.table + i * ZL_TABLE_COLUMNS;
    const int64_t stop = ends[i] < end ? ends[i] : end;
    const int64_t shift = segment[1] + segment[2] - ends[i];  // from the common numbering to the tensor's
    if (begin < stop) update_segment<Rule>(call, segment, begin + shift, stop + shift);
    begin = stop > begin ? stop : begin;
  }
}

void update(const zl_update& call, const int64_t* ends, int64_t begin, int64_t end) {
  switch (call.rule) {
    case ZL_ADAM: return update_range<zl::Adam>(call, ends, begin, end);
    case ZL_LION: return update_range<zl::Lion>(call, ends, begin, end);
    case ZL_ADAGRAD: return update_range<zl::Adagrad>(call, ends, begin, end);
    case ZL_SGD: return update_range<zl::Sgd>(call, ends, begin, end);
  }
}

// Sixteen sums, one for each index in the chunk modulo 16, are then added in pairs, pairs of pairs, and so on. So the
// additions are the same for every vector width. The square of a float is exact in double, so a fused multiply-add gives
// the same result as two operations.
constexpr int LANES = 16;

double squares(const float* x, int64_t n) {
  double lane[LANES] = {};
  int64_t i = 0;
#if defined(__AVX512F__)
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
  for (; i + LANES <= n; i += LANES) {
    const __m512d a = _mm512_cvtps_pd(_mm256_loadu_ps(x + i)), b = _mm512_cvtps_pd(_mm256_loadu_ps(x + i + 8));
    low = _mm512_fmadd_pd(a, a, low);
    high = _mm512_fmadd_pd(b, b, high);
  }
  _mm512_storeu_pd(lane, low);
  _mm512_storeu_pd(lane + 8, high);
#elif defined(__AVX2__)
  __m256d sum[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
  for (; i + LANES <= n; i += LANES)
    for (int j = 0; j < 4; j++) {
      const __m256d a = _mm256_cvtps_pd(_mm_loadu_ps(x + i + 4 * j));
      sum[j] = _mm256_fmadd_pd(a, a, sum[j]);
    }
  for (int j = 0; j < 4; j++) _mm256_storeu_pd(lane + 4 * j, sum[j]);
#else
  for (; i + LANES <= n; i += LANES)
    for (int j = 0; j < LANES; j++) lane[j] += (double)x[i + j] * (double)x[i + j];
#endif
  for (int j = 0; i < n; i++, j++) lane[j] += (double)x[i] * (double)x[i];
  for (int step = 1; step < LANES; step *= 2)
    for (int j = 0; j < LANES; j += 2 * step) lane[j] += lane[j + step];
  return lane[0];
}

double squares_of_chunk(const void* values, int32_t dtype, int64_t at, int64_t n) {
  if (dtype == ZL_F32) return squares((const float*)values + at, n);
  alignas(64) float block[BLOCK];
  double sum = 0.0;
  for (int64_t i = 0; i < n; i += BLOCK) {
    const int64_t m = n - i < BLOCK ? n - i : BLOCK;
    widen(values, dtype, at + i, block, m);
    sum += squares(block, m);
  }
  return sum;
}

void norm(const zl_norm& call, const int64_t* ends, int64_t begin, int64_t end) {
  int64_t i = find(ends, call.segments, begin);
  for (int64_t chunk = begin; chunk < end; chunk++) {
    while (ends[i] <= chunk) i++;
    const int64_t* segment = call.table + i * ZL_TABLE_COLUMNS;
    const int64_t chunks = (segment[2] + ZL_NORM_CHUNK - 1) / ZL_NORM_CHUNK;
    const int64_t offset = (chunk - (ends[i] - chunks)) * ZL_NORM_CHUNK;
    const int64_t rest = segment[2] - offset;
    const int64_t n = rest < ZL_NORM_CHUNK ? rest : (int64_t)ZL_NORM_CHUNK;
    call.partial[chunk] = squares_of_chunk(call.values[segment[0]], call.dtype, segment[1] + offset, n);
  }
}

}  // namespace

namespace zl {
extern const Path ZL_JOIN(path_, ZL_ISA);
const Path ZL_JOIN(path_, ZL_ISA) = {update, norm, quantize, dequantize, adam8};
}  // namespace zl
