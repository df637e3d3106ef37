// The entry points of the CPU library: checks, the choice of a path, and threads.
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "../quant.h"
#include "paths.h"

#define ZL_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Elements per thread: with fewer, another thread costs more time than it saves.
constexpr int64_t UPDATE_GRAIN = 16384, NORM_GRAIN_CHUNKS = 4, QUANT_GRAIN_BLOCKS = 256;
constexpr int64_t ADAM8_GRAIN_BLOCKS = 32;

int best_isa() {
#if defined(ZL_ONLY_PLAIN)
  return ZL_PLAIN;
#else
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!avx2) return ZL_PLAIN;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return avx512 ? ZL_AVX512 : ZL_AVX2;
#endif
}

const zl::Path* find_path(int32_t isa) {
  const int best = best_isa();
  if (isa == ZL_BEST) isa = best;
  if (isa < ZL_PLAIN || isa > best) return nullptr;
#if !defined(ZL_ONLY_PLAIN)
  if (isa == ZL_AVX512) return &zl::path_avx512;
  if (isa == ZL_AVX2) return &zl::path_avx2;
#endif
  return &zl::path_plain;
}

using zl::is_float;

// [0, total) in one part per thread; bounds are multiples of `align`. The i-th thread takes the i-th part, so that memory
// stays near the processor that touched it first (NUMA). Then threads take parts that are left, because OpenMP may start
// fewer threads than asked for.
template <class Range>
struct Work {
  const Range& range;
  int64_t total, align;
  int threads;
  int (*thread_num)(void);
  std::vector<std::atomic<bool>> taken;

  Work(const Range& body, int64_t all, int64_t multiple, int parts, int (*number)(void))
      : range(body), total(all), align(multiple), threads(parts), thread_num(number), taken((size_t)parts) {}

  void take(int first) {
    for (int n = 0; n < threads; n++) {
      const int i = (first + n) % threads;
      if (!taken[(size_t)i].exchange(true) && bound(i) < bound(i + 1)) range(bound(i), bound(i + 1));
    }
  }
  int64_t bound(int i) const {
    if (i >= threads) return total;
    return total / align * i / threads * align;
  }
  static void in_team(void* self) {
    Work* work = (Work*)self;
    work->take(work->thread_num());
  }
};

// Run range(begin, end) over [0, total) on as many threads as are worth it.
template <class Range>
void spread(const zl_threads& how, int64_t total, int64_t grain, int64_t align, const Range& range) {
  const int64_t useful = total / grain;
  const int threads = (int)(useful < how.threads ? (useful < 1 ? 1 : useful) : (how.threads < 1 ? 1 : how.threads));
  if (threads == 1) return range(0, total);
  Work<Range> work(range, total, align, threads, how.thread_num);
  if (how.parallel && how.thread_num) {
    how.parallel(Work<Range>::in_team, &work, (unsigned)threads, 0);
    return;
  }
  std::vector<std::thread> team;
  try {
    team.reserve((size_t)threads - 1);
    for (int i = 1; i < threads; i++) team.emplace_back([&work, i] { work.take(i); });
  } catch (const std::exception&) {  // the system starts no more threads: the existing ones do the rest
  }
  work.take(0);
  for (std::thread& thread : team) thread.join();
}

// Compute the end of each segment if all are numbered consecutively, in units of `unit` elements (rounded up for each
// segment). Returns false if a segment is not within its tensor, or its last column is not below `limit`.
template <class Call>
bool ends_of(const Call& call, int64_t unit, int64_t limit, std::vector<int64_t>& ends) {
  int64_t end = 0;
  ends.resize((size_t)call.segments);
  for (int64_t i = 0; i < call.segments; i++) {
    const int64_t* segment = call.table + i * ZL_TABLE_COLUMNS;
    if (segment[0] < 0 || segment[0] >= call.tensors || segment[3] < 0 || segment[3] >= limit) return false;
    if (segment[1] < 0 || segment[2] < 0 || segment[2] > call.numels[segment[0]] - segment[1]) return false;
    end += (segment[2] + unit - 1) / unit;
    ends[(size_t)i] = end;
  }
  return true;
}

int32_t quant(const zl_quant& call, zl::QuantRange zl::Path::*range) {
  const zl::Path* path = find_path(call.isa);
  if (!path) return ZL_BAD_ISA;
  if (const int32_t code = zl::check(call)) return code;
  spread(call.threads, zl::blocks_of(call), QUANT_GRAIN_BLOCKS, 1,
         [&](int64_t begin, int64_t end) { (path->*range)(call, begin, end); });
  return ZL_OK;
}

}  // namespace

ZL_EXPORT int32_t zl_abi() { return ZL_ABI; }

// The widest path of this processor, a zl_isa.
ZL_EXPORT int32_t zl_best_isa() { return best_isa(); }

ZL_EXPORT int32_t zl_cpu_update(const zl_update* call) {
  const zl::Path* path = find_path(call->isa);
  if (!path) return ZL_BAD_ISA;
  if (call->rule < 0 || call->rule >= ZL_RULES) return ZL_BAD_RULE;
  if (!is_float(call->param_dtype) || !is_float(call->grad_dtype) || !is_float(call->state_dtype)) return ZL_BAD_DTYPE;
  if (call->out_dtype != ZL_NONE && call->out_dtype != ZL_BF16 && call->out_dtype != ZL_F16) return ZL_BAD_DTYPE;
  if (call->skip && *call->skip != 0.0f) return ZL_OK;
  std::vector<int64_t> ends;
  if (!ends_of(*call, 1, call->row_count, ends)) return ZL_BAD_TABLE;
  const int64_t total = ends.empty() ? 0 : ends.back();
  if (!total) return ZL_OK;
  spread(call->threads, total, UPDATE_GRAIN, 64,
         [&](int64_t begin, int64_t end) { path->update(*call, ends.data(), begin, end); });
  return ZL_OK;
}

ZL_EXPORT int32_t zl_cpu_norm(const zl_norm* call) {
  const zl::Path* path = find_path(call->isa);
  if (!path) return ZL_BAD_ISA;
  if (!is_float(call->dtype)) return ZL_BAD_DTYPE;
  std::vector<int64_t> ends;
  if (!ends_of(*call, ZL_NORM_CHUNK, call->owners, ends)) return ZL_BAD_TABLE;
  const int64_t total = ends.empty() ? 0 : ends.back();
  if (total > call->partials) return ZL_BAD_TABLE;
  spread(call->threads, total, NORM_GRAIN_CHUNKS, 1,
         [&](int64_t begin, int64_t end) { path->norm(*call, ends.data(), begin, end); });
  int64_t chunk = 0;
  for (int64_t i = 0; i < call->segments; i++)
    for (; chunk < ends[(size_t)i]; chunk++) call->sums[call->table[i * ZL_TABLE_COLUMNS + 3]] += call->partial[chunk];
  return ZL_OK;
}

ZL_EXPORT int32_t zl_cpu_quantize(const zl_quant* call) { return quant(*call, &zl::Path::quantize); }
ZL_EXPORT int32_t zl_cpu_dequantize(const zl_quant* call) { return quant(*call, &zl::Path::dequantize); }

ZL_EXPORT int32_t zl_cpu_adam8(const zl_adam8* call) {
  const zl::Path* path = find_path(call->isa);
  if (!path) return ZL_BAD_ISA;
  if (!is_float(call->param_dtype) || !is_float(call->grad_dtype)) return ZL_BAD_DTYPE;
  if (call->numel < 0 || call->lead < 0 || call->lead >= ZL_QUANT_BLOCK) return ZL_BAD_ROWS;
  if (!call->numel) return ZL_OK;
  const int64_t blocks = (call->lead + call->numel + ZL_QUANT_BLOCK - 1) / ZL_QUANT_BLOCK;
  spread(call->threads, blocks, ADAM8_GRAIN_BLOCKS, 1,
         [&](int64_t begin, int64_t end) { path->adam8(*call, begin, end); });
  return ZL_OK;
}
