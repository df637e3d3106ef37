// io_uring without a library: its three system calls and the two rings that it shares with the kernel. One thread uses a
// ring.
#pragma once

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#define ZL_AIO_HAS_RING 1

#include <errno.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef __NR_io_uring_setup  // the same on every processor
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#endif

namespace zl_aio_detail {

class Ring {
 public:
  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  ~Ring() {
    if (entries_) munmap(entries_, entries_bytes_);
    if (completed_memory_ && completed_memory_ != submitted_memory_) munmap(completed_memory_, completed_bytes_);
    if (submitted_memory_) munmap(submitted_memory_, submitted_bytes_);
    if (fd_ >= 0) close(fd_);
  }

  // 0, or errno: this kernel has none, or does not allow it. At most `depth` entries are under way at once.
  int open(unsigned depth) {
    io_uring_params params;
    memset(&params, 0, sizeof params);
    fd_ = (int)syscall(__NR_io_uring_setup, depth, &params);
    if (fd_ < 0) return errno;
    submitted_bytes_ = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    completed_bytes_ = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    const bool one_mapping = params.features & IORING_FEAT_SINGLE_MMAP;
    if (one_mapping && completed_bytes_ > submitted_bytes_) submitted_bytes_ = completed_bytes_;
    submitted_memory_ = map(submitted_bytes_, IORING_OFF_SQ_RING);
    completed_memory_ = one_mapping ? submitted_memory_ : map(completed_bytes_, IORING_OFF_CQ_RING);
    entries_ = (io_uring_sqe*)map(entries_bytes_, IORING_OFF_SQES);
    if (!submitted_memory_ || !completed_memory_ || !entries_) return ENOMEM;
    submit_tail_ = field(submitted_memory_, params.sq_off.tail);
    submit_mask_ = *field(submitted_memory_, params.sq_off.ring_mask);
    order_ = field(submitted_memory_, params.sq_off.array);
    complete_head_ = field(completed_memory_, params.cq_off.head);
    complete_tail_ = field(completed_memory_, params.cq_off.tail);
    complete_mask_ = *field(completed_memory_, params.cq_off.ring_mask);
    completions_ = (io_uring_cqe*)((char*)completed_memory_ + params.cq_off.cqes);
    return 0;
  }

  // A read or write; *piece must stay until the kernel has taken the entry.
  void transfer(bool write, int fd, const iovec* piece, int64_t offset, uint64_t tag) {
    io_uring_sqe& entry = next(write ? IORING_OP_WRITEV : IORING_OP_READV, fd, tag);
    entry.addr = (uint64_t)(uintptr_t)piece;
    entry.len = 1;
    entry.off = (uint64_t)offset;
  }

  // Completes once when `fd` can be read.
  void poll_readable(int fd, uint64_t tag) { next(IORING_OP_POLL_ADD, fd, tag).poll_events = 1 /* POLLIN */; }

  // Hand over what was added, and sleep until `completions` of what is under way have ended. 0 or errno.
  int enter(unsigned completions) {
    const unsigned flags = completions ? IORING_ENTER_GETEVENTS : 0;
    const long taken = syscall(__NR_io_uring_enter, fd_, added_, completions, flags, nullptr, 0);
    if (taken < 0) return errno;
    added_ -= (unsigned)taken;
    return 0;
  }


  // Call ended(tag, result) for what has ended.
  template <class Ended>
  void reap(Ended ended) {
    unsigned head = *complete_head_;
    while (head != __atomic_load_n(complete_tail_, __ATOMIC_ACQUIRE)) {
      const io_uring_cqe completion = completions_[head & complete_mask_];
      __atomic_store_n(complete_head_, ++head, __ATOMIC_RELEASE);
      ended(completion.user_data, completion.res);
    }
  }

 private:
  void* map(size_t bytes, uint64_t what) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, (off_t)what);
    if (memory == MAP_FAILED) return nullptr;
    madvise(memory, bytes, MADV_DONTFORK);
    return memory;
  }

  static unsigned* field(void* memory, unsigned offset) { return (unsigned*)((char*)memory + offset); }

  io_uring_sqe& next(uint8_t operation, int fd, uint64_t tag) {
    const unsigned tail = *submit_tail_, index = tail & submit_mask_;
    io_uring_sqe& entry = entries_[index];
    memset(&entry, 0, sizeof entry);
    entry.opcode = operation;
    entry.fd = fd;
    entry.user_data = tag;
    order_[index] = index;
    __atomic_store_n(submit_tail_, tail + 1, __ATOMIC_RELEASE);  // read by enter() alone: the caller fills it until then
    added_++;
    return entry;
  }

  int fd_ = -1;
  void *submitted_memory_ = nullptr, *completed_memory_ = nullptr;
  size_t submitted_bytes_ = 0, completed_bytes_ = 0, entries_bytes_ = 0;
  io_uring_sqe* entries_ = nullptr;
  io_uring_cqe* completions_ = nullptr;
  unsigned *submit_tail_ = nullptr, *order_ = nullptr, *complete_head_ = nullptr, *complete_tail_ = nullptr;
  unsigned submit_mask_ = 0, complete_mask_ = 0, added_ = 0;
};

}  // namespace zl_aio_detail
#endif
