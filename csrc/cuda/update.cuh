// The update of many tensors in one launch.
#pragma once

#include "table.cuh"
#include "values.cuh"

namespace zl {

constexpr int UPDATE_CHUNK = 4096;  // elements of a block
constexpr int UPDATE_BLOCKS = 4;    // blocks that fit on a multiprocessor: limits a thread to 64 registers

// Elements [begin, end) of arrays whose start was moved down by `begin` elements, so that groups of four elements are
// aligned in all arrays. If the arrays are aligned differently, `begin` and `aligned` are 0.
struct UpdatePiece {
  char* param;
  const char* grad;
  char* state[2];
  char* out;
  int64_t end;
  int8_t begin, aligned;
  float row[ZL_COLUMNS];
};

struct UpdateArguments {
  const float* factor;
  const float* skip;
  int8_t param_dtype, grad_dtype, state_dtype, out_dtype;
  Table<UpdatePiece> table;
};
static_assert(sizeof(UpdateArguments) <= 4096, "the arguments of a launch have 4 KB");
// Only types that the compilers of host and device lay out in the same way.
static_assert(sizeof(UpdatePiece) == 88 && sizeof(UpdateArguments) == 48 + 42 * 96, "as both compilers see it");

#ifdef ZL_HOST_ONLY

template <class Rule, int P, int G, int S>
void update_kernel(UpdateArguments a);  // see driver.h

#else

// One block's elements, [low, high) of the arrays. P, G, S: dtypes of param, grad and states, ZL_NONE for any.
template <class Rule, int P, int G, int S>
struct UpdateChunk {
  char* param;
  const char* grad;
  char* first;  // states, or null
  char* second;
  char* out;
  int param_dtype, grad_dtype, state_dtype, out_dtype;
  int low, high;
  bool aligned;

  __device__ __forceinline__ UpdateChunk(const UpdateArguments& a, const UpdatePiece& piece, int64_t start) {
    param_dtype = P ? P : a.param_dtype;
    grad_dtype = G ? G : a.grad_dtype;
    state_dtype = S ? S : a.state_dtype;
    out_dtype = a.out_dtype == ZL_BF16 ? ZL_BF16 : ZL_F16;
    param = piece.param + start * size_of(param_dtype);
    grad = piece.grad + start * size_of(grad_dtype);
    first = Rule::states > 0 && piece.state[0] ? piece.state[0] + start * size_of(state_dtype) : nullptr;
    second = Rule::states > 1 && piece.state[1] ? piece.state[1] + start * size_of(state_dtype) : nullptr;
    out = piece.out ? piece.out + start * size_of(out_dtype) : nullptr;
    const int64_t rest = piece.end - start;
    low = start ? 0 : piece.begin;
    high = rest < UPDATE_CHUNK ? (int)rest : UPDATE_CHUNK;
    aligned = piece.aligned;
  }

  __device__ __forceinline__ void update_quad(const Rule& rule, int at) const {
    const Quad param_quad = load_quad(param + at * size_of(param_dtype), param_dtype);
    const Quad grad_quad = load_quad(grad + at * size_of(grad_dtype), grad_dtype);
    Quad first_quad = {}, second_quad = {};
    if (first) first_quad = load_quad(first + at * size_of(state_dtype), state_dtype);
    if (second) second_quad = load_quad(second + at * size_of(state_dtype), state_dtype);
    float p[QUAD], g[QUAD], s0[QUAD], s1[QUAD];
    unpack(param_quad, param_dtype, p);
    unpack(grad_quad, grad_dtype, g);
    unpack(first_quad, state_dtype, s0);
    unpack(second_quad, state_dtype, s1);
    if (out) {
      float written[QUAD];
      unpack(load_quad(out + at * size_of(out_dtype), out_dtype), out_dtype, written);
#pragma unroll
      for (int i = 0; i < QUAD; i++) p[i] = follow(p[i], written[i], out_dtype);
    }
#pragma unroll
    for (int i = 0; i < QUAD; i++) apply(rule, p[i], g[i], s0[i], s1[i]);
    store_quad(param + at * size_of(param_dtype), param_dtype, p);
    if (first) store_quad(first + at * size_of(state_dtype), state_dtype, s0);
    if (second) store_quad(second + at * size_of(state_dtype), state_dtype, s1);
    if (out) store_quad(out + at * size_of(out_dtype), out_dtype, p);
  }

  __device__ __forceinline__ void update_one(const Rule& rule, int at) const {
    float p = load_one(param + at * size_of(param_dtype), param_dtype);
    const float g = load_one(grad + at * size_of(grad_dtype), grad_dtype);
    float s0 = first ? load_one(first + at * size_of(state_dtype), state_dtype) : 0.0f;
    float s1 = second ? load_one(second + at * size_of(state_dtype), state_dtype) : 0.0f;
    if (out) p = follow(p, load_one(out + at * size_of(out_dtype), out_dtype), out_dtype);
    apply(rule, p, g, s0, s1);
    store_one(param + at * size_of(param_dtype), param_dtype, p);
    if (first) store_one(first + at * size_of(state_dtype), state_dtype, s0);
    if (second) store_one(second + at * size_of(state_dtype), state_dtype, s1);
    if (out) store_one(out + at * size_of(out_dtype), out_dtype, p);
  }

  // The parameter, or the value that the user has written into its 16-bit copy.
  static __device__ __forceinline__ float follow(float p, float written, int dtype) {
    const float rounded = widen(narrow(p, dtype), dtype);
    return __float_as_uint(rounded) == __float_as_uint(written) ? p : written;
  }

  __device__ __forceinline__ void apply(const Rule& rule, float& p, float g, float& s0, float& s1) const {
    One param(p), first(s0), second(s1);
    rule(param, One(g), first, second);
    p = param.v;
    s0 = first.v;
    s1 = second.v;
  }

  // [head, tail) four at a time, the rest one by one; one by one for all if the arrays are aligned differently.
  __device__ __forceinline__ void update(const Rule& rule) const {
    const int head = aligned ? min(high, (low + QUAD - 1) / QUAD * QUAD) : high;
    const int tail = max(head, high / QUAD * QUAD);
#pragma unroll 1
    for (int at = head + (int)threadIdx.x * QUAD; at < tail; at += THREADS * QUAD) update_quad(rule, at);
    const int before = head - low, single = before + high - tail;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < single; i += THREADS)
      update_one(rule, i < before ? low + i : tail + i - before);
  }
};

template <class Rule, int P, int G, int S>
__global__ void __launch_bounds__(THREADS, UPDATE_BLOCKS) update_kernel(const __grid_constant__ UpdateArguments a) {
  if (a.skip && *a.skip != 0.0f) return;
  const int64_t* ends = a.table.all_ends();
  const int i = find_piece(ends, a.table.count, blockIdx.x);
  const UpdatePiece& piece = a.table.piece(i);
  const int64_t chunk = (int64_t)blockIdx.x - (i ? ends[i - 1] : 0);
  const UpdateChunk<Rule, P, G, S> elements(a, piece, chunk * UPDATE_CHUNK);
  elements.update(Rule(piece.row, a.factor ? *a.factor : 1.0f));
}

#endif

#ifndef __CUDACC_RTC__  // from here on code of the host, which NVRTC does not compile

typedef void (*UpdateKernel)(UpdateArguments);

// fp32 parameters and states have kernels of their own; all others share one that switches on the dtypes at run time.
template <class Rule>
UpdateKernel update_kernel_for(const zl_update& call) {
  if (call.param_dtype == ZL_F32 && call.state_dtype == ZL_F32) {
    if (call.grad_dtype == ZL_F32) return update_kernel<Rule, ZL_F32, ZL_F32, ZL_F32>;
    if (call.grad_dtype == ZL_BF16) return update_kernel<Rule, ZL_F32, ZL_BF16, ZL_F32>;
    return update_kernel<Rule, ZL_F32, ZL_F16, ZL_F32>;
  }
  return update_kernel<Rule, ZL_NONE, ZL_NONE, ZL_NONE>;
}

inline UpdateKernel update_kernel_for(const zl_update& call) {
  switch (call.rule) {
    case ZL_ADAM: return update_kernel_for<Adam>(call);
    case ZL_LION: return update_kernel_for<Lion>(call);
    case ZL_ADAGRAD: return update_kernel_for<Adagrad>(call);
    default: return update_kernel_for<Sgd>(call);
  }
}

// Describes segments of a call (see `fill`).
struct UpdateMaker {
  const zl_update& call;

  int64_t operator()(int64_t i, UpdatePiece* piece) const {
    const int64_t* segment = call.table + i * ZL_TABLE_COLUMNS;
    const int64_t tensor = segment[0], start = segment[1], numel = segment[2];
    if (!numel) return 0;
    char* at[5] = {start_of(call.params[tensor], call.param_dtype, start),
                   start_of(call.grads[tensor], call.grad_dtype, start),
                   call.states[0] ? start_of(call.states[0][tensor], call.state_dtype, start) : nullptr,
                   call.states[1] ? start_of(call.states[1][tensor], call.state_dtype, start) : nullptr,
                   call.outs ? start_of(call.outs[tensor], call.out_dtype, start) : nullptr};
    const int size[5] = {size_of(call.param_dtype), size_of(call.grad_dtype), size_of(call.state_dtype),
                         size_of(call.state_dtype), size_of(call.out_dtype)};
    const int begin = past_quad(at[0], size[0]);
    piece->aligned = 1;
    for (int j = 1; j < 5; j++)
      if (at[j] && past_quad(at[j], size[j]) != begin) piece->aligned = 0;
    piece->begin = piece->aligned ? (int8_t)begin : (int8_t)0;
    for (int j = 0; j < 5; j++)
      if (at[j]) at[j] -= piece->begin * size[j];
    piece->end = piece->begin + numel;
    piece->param = at[0];
    piece->grad = at[1];
    piece->state[0] = at[2];
    piece->state[1] = at[3];
    piece->out = at[4];
    for (int j = 0; j < ZL_COLUMNS; j++) piece->row[j] = call.rows[segment[3] * ZL_COLUMNS + j];
    return (piece->end + UPDATE_CHUNK - 1) / UPDATE_CHUNK;
  }

  static char* start_of(const void* array, int dtype, int64_t start) { return (char*)array + start * size_of(dtype); }
  static int past_quad(const char* at, int size) { return (int)((uintptr_t)at / (uintptr_t)size % QUAD); }
};

#endif

}  // namespace zl
