"""Staged update: what rests off the device comes within reach by sub-groups, and goes back.

A sub-group goes through three stages that overlap: its masters, states, gradients and compute parameters are staged in
while the one before is updated, and its results are written back while the next one is.

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

from zerolite.offload.placements import SPAN_ALIGNMENT, Placement, Transfer
from zerolite.offload.transfers import Transfers, whole_blocks
from zerolite.utils.memory_tags import STAGING, tag_memory
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.checks import Update
from zerolite.zero.grad_reducer import GradReducer
from zerolite.zero.param_gatherer import ParamGatherer
from zerolite.zero.pieces import Hand, UpdateMethod
from zerolite.zero.spans import Span, sub_groups

_SEVERAL = 16  # sub-groups at most where the config allows fewer
_SMALLEST = 1 << 22  # elements of a sub-group that the config does not ask for


class _Part(NamedTuple):
    """One tensor that an update reads or writes: its storage, and if it must be staged before the update."""

    offloaded: torch.Tensor
    placement: Placement
    brought: bool
    written: bool

    @property
    def nbytes(self) -> int:
        """Size of a staging buffer."""
        return whole_blocks(self.offloaded.numel() * self.offloaded.element_size()) if self.brought else 0


class _Wanted(NamedTuple):
    """All parts of a span."""

    span: Span
    gradient: _Part
    master: _Part
    states: dict[str, _Part]
    out: _Part | None

    @property
    def parts(self) -> list[_Part]:
        return [self.gradient, self.master, *self.states.values(), *([] if self.out is None else [self.out])]


class _Longest(NamedTuple):
    """Bytes of staging buffers, the same for all sub-groups, so that they fit the next."""

    sub_group: int
    part: int  # on its way between disk and device


class _Grip:
    """A sub-group on its way to the update, in hand, or on its way back, in one staging buffer."""

    def __init__(
        self, wanted: Sequence[_Wanted], device: torch.device | None, transfers: Transfers, longest: _Longest
    ) -> None:
        """device: of the update, where that is not the host."""
        self._device = device
        self._transfers = transfers
        self._copies: list[tuple[torch.Tensor, _Part]] = []
        self._under_way: list[Transfer] = []
        self._buffer = transfers.pool.take(longest.sub_group, torch.uint8) if device is None else None
        self._position = 0
        self._longest_part = longest.part
        try:
            self.hands = [self._hand(of_span) for of_span in wanted]
        except BaseException:
            with contextlib.suppress(OSError):
                self.finish()
            raise

    def _hand(self, wanted: _Wanted) -> Hand:
        states = {name: self._within_reach(part) for name, part in wanted.states.items()}
        out = None if wanted.out is None else self._within_reach(wanted.out)
        return Hand(wanted.span, self._within_reach(wanted.gradient), self._within_reach(wanted.master), states, out)

    def _within_reach(self, part: _Part) -> torch.Tensor:
        """Return the stored tensor, or a copy that is complete when :meth:`ready` returns."""
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
        self._under_way.append(self._transfers.bring(offloaded, part.placement, here, self._longest_part))
        return here

    def ready(self) -> None:
        for transfer in self._under_way:
            transfer.wait()

    def give_back(self) -> None:
        """After the update: send what it has written to where it rests. The device sees it there."""
        for here, part in self._copies:
            if part.written:
                self._under_way.append(self._transfers.send(here, part.offloaded, part.placement, self._longest_part))
                if part.offloaded.device.type != "cpu":
                    self._under_way[-1].wait()

    def advance(self) -> None:
        for transfer in self._under_way:
            transfer.advance()

    def finish(self) -> None:
        """Wait until all of it is there, and let the buffer go. Raises the first error then."""
        errors: list[OSError] = []
        while self._under_way:
            try:
                self._under_way.pop().finish()
            except OSError as error:
                errors.append(error)
        self._copies.clear()
        if self._buffer is not None:
            self._transfers.pool.give_back(self._buffer)
            self._buffer = None
        if errors:
            raise errors[0]


class StagedSpans:
    """The sub-groups of what an update cannot reach where it rests. Called on all ranks; nothing here is a
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
        """See :class:`~zerolite.zero.step_update.StagedUpdate`."""
        alignment = SPAN_ALIGNMENT if self._method.cuts_buckets else 0
        elements = sum(numel for of_place in buckets.values() for _, numel in of_place)
        several = max(_SMALLEST, elements // _SEVERAL)  # there is something to overlap
        most = min(self._placements.sub_group_numel, several)
        self.groups = [group for of_place in buckets.values() for group in sub_groups(of_place, most, alignment)]

    def run(self, publish: bool, update: Update, end: Callable[[Sequence[Hand], bool], None]) -> None:
        """See :class:`~zerolite.zero.step_update.StagedUpdate`."""
        if not publish:
            for bucket in {span.bucket for spans in self.groups for span in spans}:
                self._buffer.follow(bucket)
            self._placements.written_in_place()
        count = self._placements.buffer_count
        wanted = [[self._wanted(span, publish) for span in spans] for spans in self.groups]
        sizes = [[part.nbytes for of_span in group for part in of_span.parts] for group in wanted]
        longest = _Longest(max(map(sum, sizes)), max(map(max, sizes)))
        coming: deque[_Grip] = deque()  # the first is in hand
        leaving: deque[_Grip] = deque()
        try:
            for index in range(len(self.groups)):
                while len(coming) < min(2, count) and index + len(coming) < len(self.groups):
                    coming.append(self._take(wanted[index + len(coming)], longest))
                grip = coming[0]
                grip.ready()
                update(grip.hands)
                for earlier in leaving:
                    earlier.advance()
                grip.give_back()
                leaving.append(coming.popleft())
                while len(leaving) > max(0, count - 2):
                    leaving.popleft().finish()
                end(grip.hands, publish)
            while leaving:
                leaving.popleft().finish()
        except BaseException:
            for grip in (*coming, *leaving):
                with contextlib.suppress(Exception):
                    grip.finish()
            raise

    def _take(self, wanted: Sequence[_Wanted], longest: _Longest) -> _Grip:
        buckets = [of_span.span.bucket for of_span in wanted]
        self._param_gatherer.wait(buckets)
        for bucket in buckets:
            self._reducer.reduced(bucket)  # has arrived
        on_host = self._placements.updates_on_host(buckets[0]) or not self._placements.apart
        return _Grip(wanted, None if on_host else self._placements.device, self._transfers, longest)

    def _wanted(self, span: Span, publish: bool) -> _Wanted:
        buffer, placements, bucket = self._buffer, self._placements, span.bucket
        on_host = placements.updates_on_host(bucket)

        def part(flat: torch.Tensor, placement: Placement, written: bool) -> _Part:
            return _Part(
                flat[span.low : span.high], placement, not placements.within_reach(placement, on_host), written
            )

        of_optimizer, of_compute = placements.of_optimizer(bucket), buffer.placement_of_compute(bucket)
        writes = publish and buffer.separate[bucket]
        return _Wanted(
            span,
            part(self._reducer.place_of_reduced(bucket), of_optimizer, False),
            part(buffer.master[bucket], buffer.placement_of_master(bucket), True),
            {name: part(flat, of_optimizer, True) for name, flat in self._method.states_of(bucket).items()},
            part(buffer.owned[bucket], of_compute, True) if writes else None,
        )
