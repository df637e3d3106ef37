"""Staged update: offloaded tensors are staged in by sub-groups, updated and written back.

A sub-group goes through three stages that overlap. Its masters, states, gradients and compute parameters are staged in
while the sub-group before it is updated. Its results are written back while the next one is updated.

    sub-group 0   stage in   update     write back
    sub-group 1              stage in   update       write back
    sub-group 2                         stage in     update       write back

(ZeRO-Infinity: Rajbhandari et al., 2021, section 6.)
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from zerolite.offload.placements import SPAN_ALIGNMENT, Placement
from zerolite.offload.transfers import Staged, Transfers, whole_blocks
from zerolite.utils.memory_tags import STAGING, tag_memory
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.checks import Update
from zerolite.zero.grad_reducer import GradReducer
from zerolite.zero.optim_shards import SpanTensors, UpdateMethod
from zerolite.zero.param_gatherer import ParamGatherer
from zerolite.zero.spans import Span, sub_groups

# A sub-group is at most a 16th of all elements, so that there are several and their stages can overlap. Below 4 Mi
# elements it is not divided any further for that: each stage would cost more than it hides.
_SEVERAL = 16
_SMALLEST = 1 << 22


class _Part(NamedTuple):
    """One tensor of a span that an update reads or writes.

    Attributes:
        offloaded: its storage, a range of the bucket's flat tensor.
        placement: the placement of that storage.
        brought: it must be staged in before the update.
        written: the update changes it.
    """

    offloaded: torch.Tensor
    placement: Placement
    brought: bool
    written: bool

    @property
    def nbytes(self) -> int:
        """Bytes that it needs in a staging buffer."""
        return whole_blocks(self.offloaded.numel() * self.offloaded.element_size()) if self.brought else 0


class _Wanted(NamedTuple):
    """All tensors of a span by name: "gradient", "master", the optimizer's states, and "out" if it is written."""

    span: Span
    parts: dict[str, _Part]

    def span_tensors(self, tensors: dict[str, torch.Tensor]) -> SpanTensors:
        """Return the span's tensors as an update takes them. ``tensors``: those that the update can access, by name."""
        gradient, master, out = (tensors.pop(name, None) for name in ("gradient", "master", "out"))
        assert gradient is not None and master is not None
        return SpanTensors(self.span, gradient, master, tensors, out)


class _SubGroup(Staged):
    """A sub-group that is being staged in, updated or written back."""

    def __init__(
        self,
        wanted: Sequence[_Wanted],
        device: torch.device | None,
        transfers: Transfers,
        numel: int,
        longest: int,
    ) -> None:
        """
        Args:
            device: device of the update; None for the host.
            numel: bytes of the staging buffer on the host. All sub-groups have the same size, so that the next one can
                use the buffer again.
            longest: bytes of the largest tensor, for copies between disk and device.
        """
        buffer = transfers.pool.take(numel, torch.uint8) if device is None else None
        super().__init__(transfers.pool, buffer)
        self._device, self._transfers, self._longest = device, transfers, longest
        self._copies: list[tuple[torch.Tensor, _Part]] = []
        self._position = 0  # next free byte of the buffer
        try:
            self.spans = [
                w.span_tensors({name: self._stage_in(part) for name, part in w.parts.items()}) for w in wanted
            ]
        except BaseException:
            with contextlib.suppress(OSError):
                self.finish()
            raise

    def _stage_in(self, part: _Part) -> torch.Tensor:
        """Return the stored tensor, or a copy that is complete when :meth:`wait` returns."""
        offloaded = part.offloaded
        if not part.brought:
            return offloaded
        if self._buffer is None:
            here = tag_memory(torch.empty_like(offloaded, device=self._device), STAGING)
        else:
            size = offloaded.numel() * offloaded.element_size()
            here = self._buffer.narrow(0, self._position, size).view(offloaded.dtype)
            self._position += part.nbytes
        self._copies.append((here, part))
        self.add(self._transfers.stage_in(offloaded, part.placement, here, self._longest))
        return here

    def write_back(self) -> None:
        """Send updated tensors back to their placements. Tensors on the device are complete when this returns, because
        the next work on the device reads them."""
        for here, part in self._copies:
            if part.written:
                sent = self._transfers.write_back(here, part.offloaded, part.placement, self._longest)
                self.add(sent)
                if part.offloaded.device.type != "cpu":
                    sent.wait()
        self._copies.clear()


class StagedSpans:
    """Sub-groups of the buckets that an update cannot access without staging. Called on all ranks; nothing here is a
    collective."""

    def __init__(
        self,
        buffer: ParameterBuffer,
        reducer: GradReducer,
        method: UpdateMethod,
        param_gatherer: ParamGatherer,
        transfers: Transfers,
    ) -> None:
        self._buffer, self._reducer, self._method = buffer, reducer, method
        self._param_gatherer, self._transfers, self._placements = param_gatherer, transfers, buffer.placements
        self.groups: list[list[Span]] = []

    def plan(self, buckets: Mapping[bool, Sequence[tuple[int, int]]]) -> None:
        alignment = SPAN_ALIGNMENT if self._method.splits_buckets else 0
        elements = sum(numel for of_place in buckets.values() for _, numel in of_place)
        several = max(_SMALLEST, elements // _SEVERAL)
        most = min(self._placements.sub_group_numel, several)
        self.groups = [group for of_place in buckets.values() for group in sub_groups(of_place, most, alignment)]

    def run(self, gather: bool, update: Update, end: Callable[[Sequence[SpanTensors], bool], None]) -> None:
        if not gather:
            for bucket in {span.bucket for spans in self.groups for span in spans}:
                self._buffer.sync_master_from_param(bucket)
            self._placements.written_in_place()
        count = self._placements.buffer_count
        wanted = [[self._wanted(span, gather) for span in spans] for spans in self.groups]
        sizes = [[part.nbytes for of_span in group for part in of_span.parts.values()] for group in wanted]
        numel, longest = max(map(sum, sizes)), max(map(max, sizes))
        coming: deque[_SubGroup] = deque()  # the first is the one to update
        leaving: deque[_SubGroup] = deque()
        try:
            for index in range(len(self.groups)):
                while len(coming) < min(2, count) and index + len(coming) < len(self.groups):
                    coming.append(self._take(wanted[index + len(coming)], numel, longest))
                current = coming[0]
                current.wait()
                update(current.spans)
                for earlier in leaving:
                    earlier.advance()
                current.write_back()
                leaving.append(coming.popleft())
                while len(leaving) > max(0, count - 2):
                    leaving.popleft().finish()
                end(current.spans, gather)
            while leaving:
                leaving.popleft().finish()
        except BaseException:
            for under_way in (*coming, *leaving):
                with contextlib.suppress(Exception):
                    under_way.finish()
            raise

    def _take(self, wanted: Sequence[_Wanted], numel: int, longest: int) -> _SubGroup:
        buckets = [of_span.span.bucket for of_span in wanted]
        self._param_gatherer.wait(buckets)
        for bucket in buckets:
            self._reducer.reduced(bucket)  # waits for the bucket's reduction
        on_host = self._placements.updates_on_host(buckets[0]) or not self._placements.apart
        return _SubGroup(wanted, None if on_host else self._placements.device, self._transfers, numel, longest)

    def _wanted(self, span: Span, gather: bool) -> _Wanted:
        buffer, placements, bucket = self._buffer, self._placements, span.bucket
        on_host = placements.updates_on_host(bucket)

        def part(flat: torch.Tensor, placement: Placement, written: bool = True) -> _Part:
            brought = not placements.is_accessible(placement, on_host)
            return _Part(flat[span.low : span.high], placement, brought, written)

        of_optimizer = placements.of_optimizer(bucket)
        parts = {name: part(flat, of_optimizer) for name, flat in self._method.states_of(bucket).items()}
        if gather and buffer.separate[bucket]:
            parts["out"] = part(buffer.owned[bucket], buffer.placement_of_compute(bucket))
        parts["gradient"] = part(self._reducer.stored_reduced(bucket), of_optimizer, written=False)
        parts["master"] = part(buffer.master[bucket], buffer.placement_of_master(bucket))
        return _Wanted(span, parts)
