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
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
_SHOWN = 5  # names in an error


class GradientTransfers:
    """Copies of the mean gradients of one rank, of all buckets. Nothing here is a collective.

    If the disk loses a gradient, no error is raised there: other ranks wait for this one in whatever comes next. Its
    readers get NaN, and the statistics, or the end of the update, tell all ranks.

    Attributes:
        lost: error by which the disk has lost a gradient since the last step.
    """

    def __init__(self, device: torch.device, transfers: Transfers, observers: Observers) -> None:
        self.device, self.transfers, self._observers = device, transfers, observers
        self.lost: OSError | None = None
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
            self._writes[0].is_there()
        offloaded.is_there()
        self._writes.append(offloaded)

    def end_write(self, offloaded: OffloadedGradient) -> None:
        """Note that no write of this gradient is under way."""
        if offloaded in self._writes:
            self._writes.remove(offloaded)

    def on_lost(self, error: OSError) -> None:
        """Note that the disk has lost a gradient."""
        self.lost = self.lost or error

    def clear(self) -> None:
        """Forget the error: all gradients have been dropped."""
        self.lost = None

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
        self._shared, self._placement, self._numel = shared, placement, numel
        self.stored = placement.zeros(numel, dtype, GRADIENTS)  # reused in every step
        self._write: Transfer = DONE
        self._is_lost = False  # the disk has lost the gradient

    def write_back(self, gradient: torch.Tensor) -> torch.Tensor:
        """Begin to store a gradient that is on the device. Return the stored tensor; :meth:`is_there` waits for it."""
        shared = self._shared
        shared.begin_write(self, gradient)
        try:
            if self.stored.dtype != gradient.dtype or not self.stored.numel():
                self.stored = gradient.new_empty(0)  # first its room on the disk is freed
                self.stored = self._placement.zeros(self._numel, gradient.dtype, GRADIENTS)
            self._write = shared.transfers.write_back(gradient, self.stored, self._placement, shared.max_nbytes)
        except OSError as error:
            self._lose(error)
        return self.stored

    def stage_in(self) -> torch.Tensor:
        """Return a copy of the stored gradient on the device."""
        shared = self._shared
        gradient = tag_memory(torch.empty(self._numel, dtype=self.stored.dtype, device=shared.device), BUCKETS)
        if self.is_there():
            try:
                read = shared.transfers.stage_in(self.stored, self._placement, gradient, shared.max_nbytes)
                read.wait()
                shared.keep_read(read)
                return gradient
            except OSError as error:
                self._lose(error)
        return gradient.fill_(torch.nan)

    def values(self) -> torch.Tensor:
        """Return the stored gradient."""
        return self.stored if self.is_there() else self.stored.new_full((self._numel,), torch.nan)

    def _lose(self, error: OSError) -> None:
        self._is_lost = True
        self._shared.on_lost(error)

    def advance(self) -> None:
        """Begin the second of two chained copies, if the first has ended."""
        with contextlib.suppress(OSError):  # the waiting call raises it
            self._write.advance()

    def is_there(self) -> bool:
        """Wait until the stored gradient is complete. Return False if the disk has lost it, until :meth:`clear`."""
        self._shared.end_write(self)
        write, self._write = self._write, DONE
        try:
            write.finish()
        except OSError as error:
            self._lose(error)
        return not self._is_lost

    def clear(self) -> None:
        """Forget the gradient and its error."""
        self.is_there()
        self._is_lost = False
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

    def stored_tensors(self) -> SpanTensors:
        """Return the stored tensors, for an update that is left out."""
        return self.span_tensors({name: tensor.stored for name, tensor in self.tensors.items()})


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


class _Staging:
    """The sub-groups of one update on their way: staged in, updated, written back.

    Attributes:
        stored: number of sub-groups whose results are stored.
    """

    def __init__(self, begins: Sequence[Callable[[], _SubGroup]], count: int) -> None:
        """
        Args:
            begins: functions that begin to stage in a sub-group, in the order of the updates.
            count: sub-groups under way at the same time.
        """
        self._begins, self._count, self.stored = deque(begins), count, 0
        self._incoming: deque[_SubGroup] = deque()  # the first is the one to update
        self._outgoing: deque[_SubGroup] = deque()

    @property
    def current(self) -> Sequence[SpanTensors]:
        """Tensors of the sub-group to update."""
        return self._incoming[0].spans

    def stage_in(self) -> None:
        """Wait for the sub-group to update. The one behind it is staged in meanwhile."""
        while self._begins and len(self._incoming) < min(2, self._count):
            self._incoming.append(self._begins.popleft()())
        self._incoming[0].wait()

    def write_back(self) -> None:
        """Begin to write back the sub-group that has been updated."""
        # The copies of earlier results to a staging buffer ran during this update. Begin their writes to disk.
        for earlier in self._outgoing:
            earlier.advance()
        self._incoming[0].write_back()
        self._outgoing.append(self._incoming.popleft())
        # One buffer is updated and one is staged in, so the others may be written back.
        self.finish(but=max(0, self._count - 2))

    def finish(self, but: int = 0) -> None:
        """Wait until all but the last ``but`` sub-groups are stored."""
        while len(self._outgoing) > but:
            self._outgoing.popleft().finish()
            self.stored += 1

    def abandon(self) -> None:
        """Wait for what is still under way after an error."""
        for unfinished in (*self._incoming, *self._outgoing):
            with contextlib.suppress(Exception):
                unfinished.finish()


class OffloadUpdate:
    """Update of the buckets that it cannot access without staging, by sub-groups. The only collectives are those of the
    method's updates.

    Attributes:
        groups: spans of each sub-group.
    """

    def __init__(
        self, buffer: ParameterBuffer, method: UpdateMethod, param_gatherer: ParamGatherer, transfers: Transfers
    ) -> None:
        self._placements, self._layout, self._method = buffer.placements, buffer.layout, method
        self._gradients = buffer.gradient_memory.offloads
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

    def run(self, inputs: UpdateInputs | None) -> OSError | None:
        """Update all sub-groups, and all-gather each bucket as soon as it is updated.

        Args:
            inputs: see :meth:`StepUpdate.run`.

        Returns:
            the error of the disk. From there on this rank has updated nothing, and has launched what the others launch.
        """
        plans = [[self._plan_span(span) for span in spans] for spans in self.groups]
        sizes = [[tensor.nbytes for plan in group for tensor in plan.tensors.values()] for group in plans]
        buffer_bytes, longest = max(map(sum, sizes)), max(map(max, sizes))
        begins = [functools.partial(self._begin, group, buffer_bytes, longest) for group in plans]
        staging = _Staging(begins, self._placements.options.buffer_count)
        failed: OSError | None = None

        def attempt(action: Callable[[], None]) -> None:
            nonlocal failed
            try:
                if failed is None:
                    action()
            except OSError as error:
                failed = error

        try:
            for group in plans:
                if inputs is not None:
                    attempt(staging.stage_in)
                if inputs is not None and failed is None:
                    attempt(functools.partial(self._method.update, staging.current, inputs))
                    attempt(staging.write_back)
                else:
                    self._method.leave_out([plan.stored_tensors() for plan in group])
                for span, _ in group:
                    if span.last:
                        span.bucket.release()
                        self._param_gatherer.gather_bucket(span.bucket, rounded=span.bucket.separate)
            attempt(staging.finish)
        finally:
            staging.abandon()
        return None if failed is None else self._describe(failed, staging.stored)

    def _describe(self, error: OSError, stored: int) -> OSError:
        """Return ``error`` with the parameters that have been updated: with those of ``stored`` sub-groups."""
        missing = {
            fragment.slot.index
            for span in (span for spans in self.groups[stored:] for span in spans)
            for fragment in span.bucket.fragments
            if fragment.shard_start < span.high and span.low < fragment.shard_start + fragment.numel
        }
        names = [slot.name for slot in self._layout.slots if slot.index not in missing]
        some = ", ".join(f"'{name}'" for name in names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        described = type(error)(
            error.errno,
            f"{error.strerror}. This rank has updated its parts of {len(names)} of {len(self._layout.slots)} parameters"
            f"{f' ({some})' if names else ''}, and others may have updated all of theirs: load the last checkpoint",
        )
        described.__cause__ = error
        return described

    def _begin(self, plans: Sequence[_SpanPlan], buffer_bytes: int, longest: int) -> _SubGroup:
        buckets = [plan.span.bucket for plan in plans]
        self._param_gatherer.wait(buckets)  # a gather of the step before may still send what this update writes
        for bucket in buckets:
            bucket.wait_for_storage()
        if self._gradients is not None and (lost := self._gradients.lost) is not None:
            raise type(lost)(lost.errno, f"a gradient is lost: {lost.strerror}") from lost
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
