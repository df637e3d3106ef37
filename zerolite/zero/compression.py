"""Compressed traffic between sets of ranks, whose wire is slow: 8 bits an element for values, 4 for gradients.

    all_gather       own part --8 bits--> every rank unpacks all parts, its own too
    reduce_scatter   a row for each rank --4 bits--> each rank unpacks and adds its row of all ranks, in fp32
    all_reduce       a reduce_scatter, then an all_gather of the sums

All ranks end with the same bits, because they unpack the same bytes. A number that is not finite makes its block of 256
NaN on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerolite.comm import Chained, Communicator, Pending, collective, done
from zerolite.comm.communicator import empty
from zerolite.ops.call import QUANT_BLOCK
from zerolite.ops.quantization import dequantize, dequantize_sum, quantize, row_bytes
from zerolite.utils.accelerator import current_platform
from zerolite.utils.dtypes import FLOATS
from zerolite.utils.memory_tags import BUCKETS, GRADIENTS, tag_memory

VALUE_BITS, GRADIENT_BITS = 8, 4


@dataclass(frozen=True)
class ErrorFeedback:
    """Error feedback: the part of a gradient that packing loses is added to later ones (LoCo, Xie et al. 2024).

    Attributes:
        err_beta: weight of the earlier errors in their moving average.
        reset_T: reductions of a bucket after which its error is forgotten.
    """

    err_beta: float = 0.8
    reset_T: int = 1024


class Compression:
    """Compressed collectives over one communicator, with the arguments and results of its own.

    Attributes:
        comm: ranks of different sets.
    """

    def __init__(self, comm: Communicator, feedback: ErrorFeedback | None = None) -> None:
        self.comm, self._feedback = comm, feedback
        # By the key of the collective, which is a bucket's: what this rank has lost, and the number of reductions.
        self._errors: dict[int, tuple[torch.Tensor, int]] = {}
        self._scale = 1.0  # of the gradients whose errors these are
        # An all-reduce whose second half could not be launched: its key, and the tensor that it sums.
        self._half: tuple[int, torch.Tensor, Chained] | None = None

    def memory(self) -> Sequence[torch.Tensor]:
        """Return the errors that are kept between steps."""
        return [error for error, _ in self._errors.values()]

    def reset(self) -> None:
        """Begin the errors anew: other weights have been loaded, or no step uses the sums that they belong to."""
        self._errors.clear()

    def set_scale(self, scale: float) -> None:
        """Note the factor by which the gradients that come are scaled, and bring the errors of earlier ones to it."""
        if scale != self._scale:
            for error, _ in self._errors.values():
                error.mul_(scale / self._scale)
                _used_here(error)  # the stream of the reductions has allocated it
            self._scale = scale

    @collective
    def all_gather(self, full: torch.Tensor, tag: str, key: int = 0) -> Pending:
        """Gather in place: this rank's part of ``full`` is sent with 8 bits. Every part, this rank's own too, becomes
        what arrives."""
        comm = self.comm
        packed = _rows(comm.world_size, full.numel() // comm.world_size, VALUE_BITS, full)
        quantize(comm.shard(full), packed.narrow(0, comm.rank, 1), VALUE_BITS)
        gathered = comm.all_gather(packed.view(-1), tag, key)

        def unpack(_: torch.Tensor) -> Pending:
            dequantize(packed, full, VALUE_BITS)
            _used_here(packed)
            return done(full)

        return Chained(gathered, unpack, keep=(packed, full))

    @collective
    def reduce_scatter(self, full: torch.Tensor, tag: str, divisor: float = 1.0, key: int = 0) -> Pending:
        """Sum ``full`` over ranks, divided by ``divisor``, of 4 bits an element. ``wait()`` returns this rank's part in
        the dtype of ``full``."""
        comm, values = self.comm, full if full.dtype in FLOATS else full.float()
        numel = full.numel() // comm.world_size
        packed = _rows(comm.world_size, numel, GRADIENT_BITS, full)
        total = empty(numel, values.dtype, full)
        if self._feedback is None:
            quantize(values, packed, GRADIENT_BITS)
            exchanged = comm.all_to_all(packed.view(-1), tag, key)
        else:
            error, count = self._error(key, values, self._feedback.reset_T)
            quantize(values, packed, GRADIENT_BITS, error, self._feedback.err_beta)
            exchanged = comm.all_to_all(packed.view(-1), tag, key)
            self._errors[key] = error, count + 1  # not before: a launch that raises is made again

        def add(received: torch.Tensor) -> Pending:
            dequantize_sum(received.view_as(packed), total, GRADIENT_BITS, divisor)
            _used_here(packed, received, total)
            return done(total.to(full.dtype))

        return Chained(exchanged, add, keep=(packed, total))

    @collective
    def all_reduce(self, full: torch.Tensor, tag: str, divisor: float = 1.0, key: int = 0) -> Pending:
        """Sum ``full`` over ranks, divided by ``divisor``: 4 bits an element to the rank that adds, 8 bits from there.
        ``wait()`` returns the sum, of the length of ``full``.

        Without memory for its second half it raises. A call with the same tensor goes on there. Any other call first
        launches the half that this rank owes the others, and drops its sum.
        """
        if self._half is not None:
            owed, of, summed = self._half
            summed.advance()
            self._half = None
            if of is full:
                return summed
            self._errors.pop(owed, None)  # that of a sum which is dropped
        numel, padded = full.numel(), full
        unit = self.comm.world_size * QUANT_BLOCK  # no block has elements of two parts, nor of two aligned parameters
        if numel % unit:
            padded = empty(-(-numel // unit) * unit, full.dtype, full)
            padded[:numel].copy_(full)
            padded[numel:].zero_()

        def gather(part: torch.Tensor) -> Pending:
            self.comm.shard(padded).copy_(part)
            return Chained(self.all_gather(padded, tag, key), lambda total: done(total[:numel]))

        summed = Chained(self.reduce_scatter(padded, tag, divisor, key), gather, keep=(padded,))
        if current_platform().queues(full):  # the current stream launches the gather behind the sum
            self._half = key, full, summed
            summed.advance()
            self._half = None
        return summed

    def as_sent(self, values: torch.Tensor) -> torch.Tensor:
        """Return what arrives of ``values``, a part that :meth:`all_gather` sends."""
        packed, arrived = _rows(1, values.numel(), VALUE_BITS, values), torch.empty_like(values)
        quantize(values, packed, VALUE_BITS)
        dequantize(packed, arrived, VALUE_BITS)
        return arrived

    def _error(self, key: int, values: torch.Tensor, reset: int) -> tuple[torch.Tensor, int]:
        """Return a copy of a bucket's error, zeros for a new one and after ``reset`` reductions, and its count."""
        error, count = self._errors.get(key, (None, 0))
        if error is None or error.numel() != values.numel() or count == reset:
            return tag_memory(torch.zeros_like(values, dtype=torch.bfloat16), GRADIENTS), 0
        copy = tag_memory(error.clone(), GRADIENTS)
        _used_here(error)  # another stream may have allocated it, and it is freed behind the launch
        return copy, count


def _rows(rows: int, numel: int, bits: int, like: torch.Tensor) -> torch.Tensor:
    nbytes = row_bytes(numel, bits)
    return tag_memory(empty(rows * nbytes, torch.uint8, like), BUCKETS).view(rows, nbytes)


def _used_here(*tensors: torch.Tensor) -> None:
    """Note that this stream has used tensors which another stream may have allocated, and waited for their collective.
    Their memory is given to no later work of that other stream before."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
