"""Offloaded buckets: mean gradients that wait off the device, and the update of tensors that need staging.

In a backward each mean gradient is written back as soon as it is reduced. Before that, the device computes the step's
statistics of it (its squares). To add the gradient of a later backward, the sum is staged in and added on the device.
So it has the same bits as without offload.

An update takes sub-groups. Masters, states, gradients and compute parameters of one are staged in while the one before
is updated. Its results are written back while the next one is updated.

    sub-group 0   stage in   update     write back
    sub-group 1              stage in   update       write back
    sub-group 2                         stage in     update       write back

(ZeRO-Infinity: Rajbhandari et al., 2021, section 6.)
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from zerolite.offload.placement import DONE, SPAN_ALIGNMENT, Placement, Transfer, whole_blocks
from zerolite.offload.transfers import StagedTransfer, Transfers
from zerolite.utils.memory_tags import BUCKETS, GRADIENTS, STAGING, tag_memory
from zerolite.zero.update import Span, SpanTensors, UpdateInputs, UpdateMethod, sub_groups

if TYPE_CHECKING:
    from zerolite.zero.bucket import Bucket
    from zerolite.zero.buffer import ParameterBuffer
    from zerolite.zero.observers import Observers
    from zerolite.zero.param_gatherer import ParamGatherer

_MAX_WRITES = 2  # buckets under way; each of them holds its gradient on the device
# A sub-group is at most a 16th of all elements, so that there are several and their stages can overlap. But it may have
# up to 4 Mi elements in any case: a stage of fewer costs more than it hides.
_MIN_SUB_GROUPS = 16
_MIN_NUMEL = 1 << 22


class GradientTransfers:
    """Copies of the mean gradients of one rank, of all buckets. Nothing here is a collective."""

    def __init__(self, device: torch.device, transfers: Transfers, observers: Observers) -> None:
        self.device, self.transfers, self._observers = device, transfers, observers
        self.max_nbytes = 0  # of a bucket's gradient: staging buffers have this length, so each fits all
        self._writes: list[OffloadedGradient] = []  # under way
        self._last_read: Transfer = DONE

    def set_max_nbytes(self, nbytes: int) -> None:
        """Set the bytes of the longest gradient of a bucket."""
        self.max_nbytes = nbytes

    def begin_write(self, offloaded: OffloadedGradient, gradient: torch.Tensor) -> None:
        """Prepare to write a gradient: wait until few are under way."""
        for notify in self._observers.before_offload:
            notify(offloaded.bucket, gradient)
        tag_memory(gradient, BUCKETS)
        for earlier in self._writes:
            earlier.advance()
        while len(self._writes) >= _MAX_WRITES:
            self._writes[0].wait()
        offloaded.wait()
        self._writes.append(offloaded)

    def end_write(self, offloaded: OffloadedGradient) -> None:
        """Note that no write of this gradient is under way."""
        if offloaded in self._writes:
            self._writes.remove(offloaded)

    def keep_read(self, read: Transfer) -> None:
        """Keep a read whose copy the device waits for, and the host does not: its staging buffer is freed one read
        later."""
        self._last_read.finish()
        self._last_read = read


class OffloadedGradient:
    """The mean gradient of one bucket on this rank, where the device cannot access it."""

    def __init__(
        self, shared: GradientTransfers, bucket: int, placement: Placement, numel: int, dtype: torch.dtype
    ) -> None:
        """Allocate the memory now, so that a full disk is an error before training.

        Args:
            shared: copies of all buckets.
            bucket: index of the bucket.
            placement: placement of the gradient.
            numel: its elements.
            dtype: its first dtype.
        """
        self.bucket = bucket
        self._shared, self._placement = shared, placement
        self.stored = placement.zeros(numel, dtype, GRADIENTS)  # reused in every step
        self._write: Transfer = DONE
        self._error: OSError | None = None  # the disk has lost the gradient

    def write_back(self, gradient: torch.Tensor) -> torch.Tensor:
        """Begin to store a gradient that is on the device. Return the stored tensor, complete after :meth:`wait`."""
        self._shared.begin_write(self, gradient)
        if self.stored.dtype != gradient.dtype:
            numel = self.stored.numel()
            del self.stored
            self.stored = self._placement.zeros(numel, gradient.dtype, GRADIENTS)
        shared = self._shared
        self._write = shared.transfers.write_back(gradient, self.stored, self._placement, shared.max_nbytes)
        return self.stored

    def stage_in(self) -> torch.Tensor:
        """Return a copy of the stored gradient on the device. Raises OSError if the disk fails."""
        self.wait()
        shared = self._shared
        gradient = tag_memory(torch.empty_like(self.stored, device=shared.device), BUCKETS)
        try:
            read = shared.transfers.stage_in(self.stored, self._placement, gradient, shared.max_nbytes)
            read.wait()
        except OSError as error:
            self._error = error
            raise
        shared.keep_read(read)
        return gradient

    def advance(self) -> None:
        """Begin the second of two chained copies, if the first has ended."""
        with contextlib.suppress(OSError):  # the waiting call raises it
            self._write.advance()

    def wait(self) -> None:
        """Wait until the stored gradient is complete. If the disk has failed, raise OSError in every call until
        :meth:`clear`, because the gradient is lost for all of its readers."""
        self._shared.end_write(self)
        write, self._write = self._write, DONE
        try:
            write.finish()
        except OSError as error:
            self._error = error
        if self._error is not None:
            raise self._error

    def clear(self) -> None:
        """Forget the gradient and its error."""
        with contextlib.suppress(OSError):
            self.wait()
        self._error = None
        self._shared.keep_read(DONE)


class _StoredTensor(NamedTuple):
    """One tensor of a span that an update reads or writes.

    Attributes:
        stored: the stored tensor, a range of the bucket's flat tensor.
        placement: its placement.
        needs_staging: it must be staged in before the update.
        written: the update changes it.
    """

    stored: torch.Tensor
    placement: Placement
    needs_staging: bool
    written: bool

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a staging buffer."""
        return whole_blocks(self.stored.numel() * self.stored.element_size()) if self.needs_staging else 0


class _SpanPlan(NamedTuple):
    """All tensors of a span by name: "gradient", "master", each optimizer state, and "out" if the update writes it."""

    span: Span
    tensors: dict[str, _StoredTensor]

    def span_tensors(self, tensors: dict[str, torch.Tensor]) -> SpanTensors:
        """Return the arguments of an update.

        Args:
            tensors: the stored tensor or its staging copy, by name.
        """
        gradient, master, out = (tensors.pop(name, None) for name in ("gradient", "master", "out"))
        assert gradient is not None and master is not None
        return SpanTensors(self.span, gradient, master, tensors, out)


class _SubGroup(StagedTransfer):
    """A sub-group that is being staged in, updated or written back."""

    def __init__(
        self,
        plans: Sequence[_SpanPlan],
        device: torch.device | None,
        transfers: Transfers,
        buffer_bytes: int,
        longest: int,
    ) -> None:
        """
        Args:
            device: device of the update; None for the host.
            plans: plans of its spans.
            transfers: copies between placements.
            buffer_bytes: size of the staging buffer on the host. It is the same for all sub-groups, so that a later one
                can reuse the buffer.
            longest: bytes of the longest tensor, for copies between disk and device.
        """
        buffer = transfers.pool.acquire(buffer_bytes, torch.uint8) if device is None else None
        super().__init__(transfers.pool, buffer)
        self._device, self._transfers, self._longest = device, transfers, longest
        self._copies: list[tuple[torch.Tensor, _StoredTensor]] = []
        self._position = 0  # next free byte of the buffer
        self.spans: list[SpanTensors] = []
        try:
            for plan in plans:
                accessible = {name: self._stage_in(tensor) for name, tensor in plan.tensors.items()}
                self.spans.append(plan.span_tensors(accessible))
        except BaseException:
            with contextlib.suppress(OSError):
                self.finish()
            raise

    def _stage_in(self, tensor: _StoredTensor) -> torch.Tensor:
        """Return the stored tensor, or a copy that is complete when :meth:`wait` returns."""
        stored = tensor.stored
        if not tensor.needs_staging:
            return stored
        if self._buffer is None:
            copy = tag_memory(torch.empty_like(stored, device=self._device), STAGING)
        else:
            size = stored.numel() * stored.element_size()
            copy = self._buffer.narrow(0, self._position, size).view(stored.dtype)
            self._position += tensor.nbytes
        self._copies.append((copy, tensor))
        self.add(self._transfers.stage_in(stored, tensor.placement, copy, self._longest))
        return copy

    def write_back(self) -> None:
        """Begin to copy updated tensors back to their placements.

        The current stream waits for those on the device, because the next work on it reads them: the all-gather.
        """
        for copy, tensor in self._copies:
            if tensor.written:
                transfer = self._transfers.write_back(copy, tensor.stored, tensor.placement, self._longest)
                self.add(transfer)
                if tensor.stored.device.type != "cpu":
                    transfer.wait()
        self._copies.clear()


class OffloadUpdate:
    """Update of the buckets that it cannot access without staging, by sub-groups. The only collectives are those of the
    method's updates.

    Attributes:
        groups: spans of each sub-group.
    """

    def __init__(
        self, buffer: ParameterBuffer, method: UpdateMethod, param_gatherer: ParamGatherer, transfers: Transfers
    ) -> None:
        self._placements, self._method = buffer.placements, method
        self._param_gatherer, self._transfers = param_gatherer, transfers
        self.groups: list[list[Span]] = []

    def plan(self, buckets: Mapping[bool, Sequence[tuple[Bucket, int]]]) -> None:
        """Divide the buckets into sub-groups.

        Args:
            buckets: (bucket, elements of its master) in the order of the updates; True: of buckets that the host
                updates, False: of the others.
        """
        alignment = SPAN_ALIGNMENT if self._method.splits_buckets else 0
        elements = sum(numel for side in buckets.values() for _, numel in side)
        limit = min(self._placements.options.sub_group_numel, max(_MIN_NUMEL, elements // _MIN_SUB_GROUPS))
        self.groups = [group for side in buckets.values() for group in sub_groups(side, limit, alignment)]

    def run(self, inputs: UpdateInputs | None) -> None:
        """Update all sub-groups, and all-gather each bucket as soon as it is updated.

        Args:
            inputs: see :meth:`StepUpdate.run`.

        Raises:
            OSError: the disk failed. Then some masters are ahead of others.
        """
        count = self._placements.options.buffer_count
        plans = [[self._plan_span(span) for span in spans] for spans in self.groups]
        sizes = [[tensor.nbytes for plan in group for tensor in plan.tensors.values()] for group in plans]
        buffer_bytes, longest = max(map(sum, sizes)), max(map(max, sizes))
        incoming: deque[_SubGroup] = deque()  # the first is the one to update
        outgoing: deque[_SubGroup] = deque()
        try:
            for index in range(len(self.groups)):
                while len(incoming) < min(2, count) and index + len(incoming) < len(self.groups):
                    incoming.append(self._begin(plans[index + len(incoming)], buffer_bytes, longest))
                current = incoming[0]
                current.wait()
                if inputs is not None:
                    self._method.update(current.spans, inputs)
                else:
                    self._method.leave_out(current.spans)
                # The copies of earlier results to a staging buffer ran during this update. Begin their writes to disk.
                for earlier in outgoing:
                    earlier.advance()
                current.write_back()
                outgoing.append(incoming.popleft())
                # One buffer is updated and one is staged in, so the others may be written back.
                while len(outgoing) > max(0, count - 2):
                    outgoing.popleft().finish()
                for tensors in current.spans:
                    if tensors.span.last:
                        tensors.span.bucket.release()
                        self._param_gatherer.gather_bucket(tensors.span.bucket, rounded=tensors.out is not None)
            while outgoing:
                outgoing.popleft().finish()
        except BaseException:
            for unfinished in (*incoming, *outgoing):
                with contextlib.suppress(Exception):
                    unfinished.finish()
            raise

    def _begin(self, plans: Sequence[_SpanPlan], buffer_bytes: int, longest: int) -> _SubGroup:
        buckets = [plan.span.bucket for plan in plans]
        self._param_gatherer.wait(buckets)  # a gather of the step before may still send what this update writes
        for bucket in buckets:
            bucket.mean()  # waits for its write-back
        on_host = buckets[0].updates_on_host or not self._placements.separate_memory
        return _SubGroup(plans, None if on_host else self._placements.device, self._transfers, buffer_bytes, longest)

    def _plan_span(self, span: Span) -> _SpanPlan:
        placements, bucket = self._placements, span.bucket
        on_host = bucket.updates_on_host

        def tensor(flat: torch.Tensor, placement: Placement, written: bool = True) -> _StoredTensor:
            needs_staging = not placements.is_accessible(placement, on_host)
            return _StoredTensor(flat[span.low : span.high], placement, needs_staging, written)

        tensors = {name: tensor(flat, bucket.placement) for name, flat in bucket.states.items()}
        if bucket.separate:
            tensors["out"] = tensor(bucket.owned, bucket.compute_placement)
        assert bucket.reduced is not None, "an update follows the reductions"
        tensors["gradient"] = tensor(bucket.reduced, bucket.placement, written=False)
        tensors["master"] = tensor(bucket.master, bucket.master_placement)
        return _SpanPlan(span, tensors)
