// The C interface of asynchronous I/O: reads and writes of open files, in blocks, several of them in flight at once. All
// functions may be called by any thread of the process that called zl_aio_create; in a fork of it they answer ECHILD.
#pragma once

#include <stdint.h>

#define ZL_AIO_ABI 2  // raised with every change of the interface; the Python side compares it

enum zl_aio_backend { ZL_AIO_AUTO = 0, ZL_AIO_IO_URING = 1, ZL_AIO_THREADS = 2 };

// An error beside those of errno: a read met the end of the file.
#define ZL_AIO_END_OF_FILE (-1)

typedef struct zl_aio zl_aio;

// block_size: most bytes that are handed to the kernel at once. queue_depth: most blocks that it has at once. threads:
// with io_uring, how many threads drive a ring; they share the depth. The thread pool has a thread per block in flight.
typedef struct {
  int64_t block_size;
  int32_t queue_depth;
  int32_t threads;
  int32_t backend;
} zl_aio_options;

// error: 0, errno, or ZL_AIO_END_OF_FILE, of the first failure in file order, whose offset is `position`.
// done: bytes read or written.
typedef struct {
  int32_t error;
  int64_t done;
  int64_t position;
} zl_aio_outcome;

#ifdef __cplusplus
extern "C" {
#endif

int32_t zl_aio_abi(void);

// Null, and *error is of errno, where it cannot be had.
zl_aio* zl_aio_create(const zl_aio_options* options, int32_t* error);

// ZL_AIO_IO_URING or ZL_AIO_THREADS.
int32_t zl_aio_backend_of(const zl_aio* aio);

// Begin. A ticket above 0, or an errno below 0: ECHILD, EINVAL, ENOMEM, ESHUTDOWN. File and memory must stay until the
// request has ended.
int64_t zl_aio_submit(zl_aio* aio, int32_t write, int32_t fd, void* memory, int64_t bytes, int64_t offset);

// Sleep until a request has ended, at most so many milliseconds. 0: it has, and its ticket is not valid any more. Else
// ETIMEDOUT, ECHILD, or EINVAL for a ticket that is not valid.
int32_t zl_aio_wait(zl_aio* aio, int64_t ticket, int64_t timeout_ms, zl_aio_outcome* outcome);

// 1 if the request has ended, 0 if not, otherwise an errno below 0.
int32_t zl_aio_ended(zl_aio* aio, int64_t ticket);

// All requests end, and the threads with them. Outcomes can be asked for still.
int32_t zl_aio_stop(zl_aio* aio);

// Stop, and free. No other thread may be in a call. In a fork nothing happens.
void zl_aio_destroy(zl_aio* aio);

#ifdef __cplusplus
}
#endif
