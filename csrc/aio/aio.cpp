// The entry points of asynchronous I/O, and the threads that do it.
#include "aio.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <exception>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "queue.h"
#include "ring.h"

#if defined(ZL_AIO_HAS_RING)
#include <sys/eventfd.h>
#endif

#define ZL_EXPORT extern "C" __attribute__((visibility("default")))

using zl_aio_detail::Block;
using zl_aio_detail::Queue;

namespace {

bool again(int error) { return error == EINTR || error == EAGAIN; }

// Note that a call has moved `result` bytes of a block, or failed with -result. Returns true if the block has ended; then
// *error is as in zl_aio_outcome.
bool advance(Block& block, int64_t result, int32_t* error) {
  *error = 0;
  if (result < 0) {
    *error = (int32_t)-result;
    return !again(*error);
  }
  if (result == 0) {
    *error = block.request->write ? EIO : ZL_AIO_END_OF_FILE;
    return true;
  }
  block.done += result;
  return block.done == block.bytes;
}

void work_alone(Queue& queue) {
  Block block;
  while (queue.take_or_sleep(block)) {
    const bool write = block.request->write;
    const int fd = block.request->fd;
    int32_t error;
    for (;;) {
      char* memory = block.memory + block.done;
      const size_t left = (size_t)(block.bytes - block.done);
      const off_t offset = (off_t)(block.offset + block.done);
      const ssize_t moved = write ? pwrite(fd, memory, left, offset) : pread(fd, memory, left, offset);
      if (advance(block, moved < 0 ? -errno : moved, &error)) break;
      if (moved < 0) std::this_thread::yield();
    }
    queue.finish(block, error);
  }
}

#if defined(ZL_AIO_HAS_RING)
// A thread with a ring. It sleeps in the kernel until a block is done or another thread calls wake().
class RingWorker {
 public:
  RingWorker(Queue& queue, int depth) : queue_(queue), slots_((size_t)depth) {
    for (int slot = 0; slot < depth; slot++) free_.push_back(slot);
  }
  ~RingWorker() {
    if (bell_ >= 0) close(bell_);
  }

  // 0 or errno.
  int open() {
    bell_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (bell_ < 0) return errno;
    return ring_.open((unsigned)slots_.size() + 1);
  }

  void wake() const {
    const uint64_t one = 1;
    while (write(bell_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  void run() {
    ring_.poll_readable(bell_, BELL);
    for (;;) {
      fill();
      if (in_flight() == 0 && queue_.drained()) return;
      enter(1);
      ring_.reap([this](uint64_t tag, int32_t result) { ended(tag, result); });
    }
  }

 private:
  static constexpr uint64_t BELL = UINT64_MAX;

  struct Slot {
    Block block;
    iovec piece;
  };

  size_t in_flight() const { return slots_.size() - free_.size(); }

  void fill() {
    while (!free_.empty() && queue_.take(slots_[(size_t)free_.back()].block)) {
      const int slot = free_.back();
      free_.pop_back();
      start(slot);
    }
  }

  void start(int slot) {
    Slot& s = slots_[(size_t)slot];
    s.piece = {s.block.memory + s.block.done, (size_t)(s.block.bytes - s.block.done)};
    ring_.transfer(s.block.request->write, s.block.request->fd, &s.piece, s.block.offset + s.block.done, (uint64_t)slot);
  }

  // The kernel may be short of memory, or its completion queue full: then first take completions from it.
  void enter(unsigned completions) {
    const int error = ring_.enter(completions);
    if (error && error != EINTR) usleep(100);
  }

  void ended(uint64_t tag, int32_t result) {
    if (tag == BELL) {
      uint64_t count;
      while (read(bell_, &count, sizeof count) < 0 && errno == EINTR) {
      }
      ring_.poll_readable(bell_, BELL);
      return;
    }
    Block& block = slots_[tag].block;
    int32_t error;
    if (!advance(block, result, &error)) {
      start((int)tag);
      return;
    }
    const Block done = block;
    free_.push_back((int)tag);
    queue_.finish(done, error);
  }

  Queue& queue_;
  std::vector<Slot> slots_;
  std::vector<int> free_;
  zl_aio_detail::Ring ring_;
  int bell_ = -1;
};
#endif

// Block all signals in threads of this library: they belong to the program's own threads.
class WithoutSignals {
 public:
  WithoutSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

struct zl_aio {
  Queue queue;

  explicit zl_aio(const zl_aio_options& options) : queue(options.block_size), options_(options) {}
  ~zl_aio() { stop(); }

  // 0 or errno.
  int start() {
    int error = ENOSYS;
    if (options_.backend != ZL_AIO_THREADS) error = open_rings();
    if (error && options_.backend == ZL_AIO_IO_URING) return error;
    if (error) return launch(options_.queue_depth, [this](size_t) { work_alone(queue); });
#if defined(ZL_AIO_HAS_RING)
    error = launch((int)rings_.size(), [this](size_t i) { rings_[i]->run(); });
#endif
    return error;
  }

  void stop() {
    queue.stop();
    wake();
    std::lock_guard<std::mutex> lock(joining_);
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

#if defined(ZL_AIO_HAS_RING)
  void wake() {
    for (const auto& ring : rings_) ring->wake();
  }
  int32_t backend() const { return rings_.empty() ? ZL_AIO_THREADS : ZL_AIO_IO_URING; }
#else
  void wake() {}
  int32_t backend() const { return ZL_AIO_THREADS; }
#endif

  bool is_fork() const { return getpid() != pid_; }

 private:
  // All that are wanted, or errno and none.
  int open_rings() {
#if defined(ZL_AIO_HAS_RING)
    const int count = options_.threads < options_.queue_depth ? options_.threads : options_.queue_depth;
    for (int i = 0; i < count; i++) {
      const int depth = options_.queue_depth / count + (i < options_.queue_depth % count);
      auto ring = std::make_unique<RingWorker>(queue, depth);
      const int error = ring->open();
      if (error) {
        rings_.clear();
        return error;
      }
      rings_.push_back(std::move(ring));
    }
    return 0;
#else
    return ENOSYS;
#endif
  }

  // All of them, or errno and none.
  template <class Run>
  int launch(int count, Run run) {
    const WithoutSignals quiet;
    try {
      for (int i = 0; i < count; i++) threads_.emplace_back(run, (size_t)i);
    } catch (const std::system_error& error) {
      stop();
      return error.code().value();
    }
    return 0;
  }

  const zl_aio_options options_;
  const pid_t pid_ = getpid();
#if defined(ZL_AIO_HAS_RING)
  std::vector<std::unique_ptr<RingWorker>> rings_;
#endif
  std::mutex joining_;
  std::vector<std::thread> threads_;
};

ZL_EXPORT int32_t zl_aio_abi(void) { return ZL_AIO_ABI; }

ZL_EXPORT zl_aio* zl_aio_create(const zl_aio_options* options, int32_t* error) {
  *error = EINVAL;
  if (options->block_size < 1 || options->block_size > (1 << 30) || options->queue_depth < 1 || options->threads < 1)
    return nullptr;
  try {
    auto aio = std::make_unique<zl_aio>(*options);
    *error = aio->start();
    return *error ? nullptr : aio.release();
  } catch (const std::exception&) {
    *error = ENOMEM;
    return nullptr;
  }
}

ZL_EXPORT int32_t zl_aio_backend_of(const zl_aio* aio) { return aio->backend(); }

ZL_EXPORT int64_t zl_aio_submit(zl_aio* aio, int32_t write, int32_t fd, void* memory, int64_t bytes, int64_t offset) {
  if (aio->is_fork()) return -ECHILD;
  if (bytes < 0 || offset < 0) return -EINVAL;
  try {
    const int64_t ticket = aio->queue.submit(write != 0, fd, (char*)memory, bytes, offset);
    if (!ticket) return -ESHUTDOWN;
    aio->wake();
    return ticket;
  } catch (const std::exception&) {
    return -ENOMEM;
  }
}

ZL_EXPORT int32_t zl_aio_wait(zl_aio* aio, int64_t ticket, int64_t timeout_ms, zl_aio_outcome* outcome) {
  return aio->is_fork() ? ECHILD : aio->queue.wait(ticket, timeout_ms, outcome);
}

ZL_EXPORT int32_t zl_aio_ended(zl_aio* aio, int64_t ticket) {
  return aio->is_fork() ? -ECHILD : aio->queue.ended(ticket);
}

ZL_EXPORT int32_t zl_aio_stop(zl_aio* aio) {
  if (aio->is_fork()) return ECHILD;
  aio->stop();
  return 0;
}

ZL_EXPORT void zl_aio_destroy(zl_aio* aio) {
  if (!aio->is_fork()) delete aio;
}
