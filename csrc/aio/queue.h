// Requests, and the blocks into which they are divided.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "aio.h"

namespace zl_aio_detail {

struct Request {
  bool write;
  int fd;
  char* memory;
  int64_t bytes, offset;
  int64_t given = 0;   // bytes in blocks so far
  int64_t in_hand = 0; // blocks that are being worked on
  zl_aio_outcome outcome = {0, 0, 0};

  bool ended() const { return given == bytes && in_hand == 0; }
};

// A block of a request, of which `done` bytes have been moved.
struct Block {
  Request* request = nullptr;
  char* memory = nullptr;
  int64_t offset = 0, bytes = 0, done = 0;
};

// Shared by the threads that submit requests, that work on blocks, and that wait.
class Queue {
 public:
  explicit Queue(int64_t block_size) : block_size_(block_size) {}

  // A ticket, or 0 after stop().
  int64_t submit(bool write, int fd, char* memory, int64_t bytes, int64_t offset) {
    auto request = std::make_unique<Request>(Request{write, fd, memory, bytes, offset});
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return 0;
    Request* added = request.get();
    requests_.emplace(++last_ticket_, std::move(request));
    if (bytes > 0) {
      try {
        waiting_.push_back(added);
      } catch (...) {
        requests_.erase(last_ticket_);
        throw;
      }
      work_.notify_all();
    }
    return last_ticket_;
  }

  // The next block. False: there is none now.
  bool take(Block& block) {
    std::lock_guard<std::mutex> lock(mutex_);
    return next(block);
  }

  // Wait for the next block. False: there will be none.
  bool take_or_sleep(Block& block) {
    std::unique_lock<std::mutex> lock(mutex_);
    work_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
    return next(block);
  }

  // The block has ended. error: as in zl_aio_outcome.
  void finish(const Block& block, int32_t error) {
    std::lock_guard<std::mutex> lock(mutex_);
    Request& request = *block.request;
    request.outcome.done += block.done;
    request.in_hand--;
    if (error) {
      const int64_t position = block.offset + block.done;
      if (!request.outcome.error || position < request.outcome.position) {
        request.outcome.error = error;
        request.outcome.position = position;
      }
      if (request.given < request.bytes) forget(&request);
    }
    if (request.ended()) ended_.notify_all();
  }

  int32_t wait(int64_t ticket, int64_t timeout_ms, zl_aio_outcome* outcome) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = requests_.find(ticket);
    if (found == requests_.end()) return EINVAL;
    const Request& request = *found->second;
    if (!ended_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return request.ended(); })) return ETIMEDOUT;
    *outcome = request.outcome;
    requests_.erase(ticket);
    return 0;
  }

  int32_t ended(int64_t ticket) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = requests_.find(ticket);
    return found == requests_.end() ? -EINVAL : found->second->ended();
  }

  void stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    work_.notify_all();
  }

  // After stop() this stays true.
  bool drained() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stopping_ && waiting_.empty();
  }

 private:
  bool next(Block& block) {
    if (waiting_.empty()) return false;
    Request* request = waiting_.front();
    const int64_t left = request->bytes - request->given;
    block.request = request;
    block.memory = request->memory + request->given;
    block.offset = request->offset + request->given;
    block.bytes = left < block_size_ ? left : block_size_;
    block.done = 0;
    request->given += block.bytes;
    request->in_hand++;
    if (request->given == request->bytes) waiting_.pop_front();
    return true;
  }

  // No more blocks of a request that has failed.
  void forget(Request* request) {
    request->given = request->bytes;
    for (auto at = waiting_.begin(); at != waiting_.end(); ++at)
      if (*at == request) {
        waiting_.erase(at);
        return;
      }
  }

  const int64_t block_size_;
  std::mutex mutex_;
  std::condition_variable work_, ended_;
  std::unordered_map<int64_t, std::unique_ptr<Request>> requests_;
  std::deque<Request*> waiting_;  // requests with bytes that are in no block yet
  int64_t last_ticket_ = 0;
  bool stopping_ = false;
};

}  // namespace zl_aio_detail
