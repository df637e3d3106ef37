// Enough of CUDA to compile csrc/cuda with a C++ compiler and run it on the CPU, one block after the other. The threads
// of a block are coroutines that yield at barriers, so what they do between two barriers happens in the order of their
// numbers, or in the opposite order, and so do the blocks: see `zl_simulate`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <setjmp.h>
#include <ucontext.h>

#include "../../../csrc/cpu/vec.h"

#define __device__
#define __host__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __builtin_assume(condition) ((void)(condition))

struct dim3 {
  unsigned x;
  explicit dim3(unsigned x = 0) : x(x) {}
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }

using std::max;
using std::min;

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float __uint_as_float(uint32_t x) { return float_of(x); }
inline uint32_t __float_as_uint(float x) { return bits_of(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
namespace sim {

constexpr int WARP = 32;
constexpr size_t STACK = 1 << 16;

// Threads that wait for each other, and what they tell each other when all are there.
struct Barrier {
  int size, here = 0;
  unsigned round = 0, bits = 0, all_bits = 0;
  void wait();
};

// Started as a context; after that by jumps, which leave the signal mask alone and so need no call of the system.
struct Thread {
  ucontext_t context;
  jmp_buf jump;
  std::vector<char> stack = std::vector<char>(STACK);
  dim3 index;
  bool started, done;
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Barrier> warps;
  std::vector<double> values;  // by thread, for shuffles
  Barrier all;
  dim3 index;
  Thread* running;
  jmp_buf scheduler;
  void (*body)(const void*);
  const void* argument;
};

inline Block block;
inline bool backwards = false, misaligned = false;
inline int launches = 0;

inline void yield() {
  if (!_setjmp(block.running->jump)) _longjmp(block.scheduler, 1);
}

inline void resume(Thread& thread) {
  block.running = &thread;
  if (_setjmp(block.scheduler)) return;
  if (thread.started) _longjmp(thread.jump, 1);
  thread.started = true;
  setcontext(&thread.context);
}

inline void Barrier::wait() {
  const unsigned mine = round;
  if (++here == size) {
    here = 0;
    all_bits = bits;
    bits = 0;
    round++;
  }
  while (round == mine) yield();
}

inline Barrier& warp() { return block.warps[block.running->index.x / WARP]; }

inline void start() {
  block.body(block.argument);
  block.running->done = true;
  _longjmp(block.scheduler, 1);
}

inline void run_block(unsigned index, int threads) {
  block.index = dim3(index);
  block.all = Barrier{threads};
  block.warps.assign((size_t)threads / WARP, Barrier{WARP});
  block.values.resize((size_t)threads);
  block.threads.resize((size_t)threads);
  for (int i = 0; i < threads; i++) {
    Thread& thread = block.threads[(size_t)i];
    thread.index = dim3((unsigned)i);
    thread.started = thread.done = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, start, 0);
  }
  for (int left = threads; left;) {
    for (int i = 0; i < threads; i++) {
      Thread& thread = block.threads[(size_t)(backwards ? threads - 1 - i : i)];
      if (thread.done) continue;
      resume(thread);
      left -= thread.done;
    }
  }
}

}  // namespace sim

#define threadIdx (sim::block.running->index)
#define blockIdx (sim::block.index)

// Where the kernels say that a pointer leads to the device's memory, they are about to use it.
template <class T>
bool __isGlobal(T* pointer) {
  if ((uintptr_t)pointer % sizeof(T)) sim::misaligned = true;
  return true;
}

// What others wrote: others run before it is read.
template <class T>
T __ldcg(const T* at) {
  sim::yield();
  return *at;
}

inline void __syncthreads() { sim::block.all.wait(); }
inline void __threadfence() {}

inline unsigned __ballot_sync(unsigned, bool condition) {
  sim::Barrier& warp = sim::warp();
  warp.bits |= (unsigned)condition << (threadIdx.x % sim::WARP);
  warp.wait();
  return warp.all_bits;
}

inline double __shfl_down_sync(unsigned, double x, int step) {
  const unsigned i = threadIdx.x;
  sim::block.values[i] = x;
  sim::warp().wait();
  const double other = i % sim::WARP + (unsigned)step < sim::WARP ? sim::block.values[i + (unsigned)step] : x;
  sim::warp().wait();
  return other;
}

inline unsigned __shfl_xor_sync(unsigned, unsigned x, int mask) {
  const unsigned i = threadIdx.x;
  sim::block.values[i] = x;
  sim::warp().wait();
  const unsigned other = (unsigned)sim::block.values[i ^ (unsigned)mask];
  sim::warp().wait();
  return other;
}

inline unsigned atomicAdd(unsigned* at, unsigned x) {
  const unsigned before = *at;
  *at += x;
  return before;
}

typedef int cudaError_t;
typedef void* cudaStream_t;
constexpr cudaError_t cudaErrorMisalignedAddress = 716;
inline cudaError_t cudaSetDevice(int) { return 0; }
inline const char* cudaGetErrorString(cudaError_t) { return "misaligned address"; }
inline cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) {
  memset(at, value, bytes);
  return 0;
}

template <class Arguments>
cudaError_t cudaLaunchKernel(void (*kernel)(Arguments), dim3 grid, dim3 threads, void** list, size_t, cudaStream_t) {
  struct Body {
    void (*kernel)(Arguments);
    const Arguments* arguments;
    static void run(const void* self) { ((const Body*)self)->kernel(*((const Body*)self)->arguments); }
  };
  const Body body{kernel, (const Arguments*)list[0]};
  sim::block.body = Body::run;
  sim::block.argument = &body;
  sim::launches++;
  sim::misaligned = false;
  for (unsigned i = 0; i < grid.x; i++) sim::run_block(sim::backwards ? grid.x - 1 - i : i, (int)threads.x);
  return sim::misaligned ? cudaErrorMisalignedAddress : 0;
}

// Sets the order of blocks and threads, and returns how many launches there have been.
extern "C" __attribute__((visibility("default"))) int32_t zl_simulate(int32_t backwards) {
  sim::backwards = backwards;
  return sim::launches;
}
