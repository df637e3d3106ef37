"""Update of everything that a rank owns, with offloaded tensors staged in and written back.

Tensors that the update can reach where they are kept are updated there: on the device, buckets of one kind in one
launch. The others go by sub-groups, each in three stages that overlap: its masters, states, gradients and compute
parameters are staged in while the one before is updated, and its results are written back while the next one is.

    sub-group 0   stage in   update     write back
    sub-group 1              stage in   update       write back
    sub-group 2                         stage in     update       write back

(ZeRO-Infinity: Rajbhandari et al., 2021, section 6.)
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from zerolite.offload.tiers import SPAN_ALIGNMENT, Tier
from zerolite.offload.transfers import Transfer, Transfers, whole_blocks
from zerolite.utils.memory_items import STAGING, own
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.checks import UpdateLook
from zerolite.zero.grad_reducer import GradReducer
from zerolite.zero.pieces import Hand, UpdateMethod
from zerolite.zero.publisher import Publisher
from zerolite.zero.spans import Span, sub_groups

_SEVERAL = 16  # sub-groups at most where the config allows fewer
_NONE: Mapping[int, torch.Tensor] = {}
_SMALLEST = 1 << 22  # elements of a sub-group that the config does not ask for


class _Part(NamedTuple):
    """Of something that an update reads or writes: what rests, and whether it must be brought within reach."""

    resting: torch.Tensor
    tier: Tier
    brought: bool
    written: bool

    @property
    def nbytes(self) -> int:
        """Of a staging buffer."""
        return whole_blocks(self.resting.numel() * self.resting.element_size()) if self.brought else 0


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
        """What rests, or a copy that is complete when :meth:`ready` returns."""
        resting = part.resting
        if not part.brought:
            return resting
        if self._buffer is None:
            here = own(torch.empty_like(resting, device=self._device), STAGING)
        else:
            size = resting.numel() * resting.element_size()
            here = self._buffer.narrow(0, self._position, size).view(resting.dtype)
            self._position += part.nbytes
        self._copies.append((here, part))
        self._under_way.append(self._transfers.bring(resting, part.tier, here, self._longest_part))
        return here

    def ready(self) -> None:
        for transfer in self._under_way:
            transfer.wait()

    def give_back(self) -> None:
        """After the update: send what it has written to where it rests. The device sees it there."""
        for here, part in self._copies:
            if part.written:
                self._under_way.append(self._transfers.send(here, part.resting, part.tier, self._longest_part))
                if part.resting.device.type != "cpu":
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


class UpdateSweep:
    """See the module. Called on all ranks; the only collectives are the publisher's, in the same order on all."""

    def __init__(
        self,
        buffer: ParameterBuffer,
        reducer: GradReducer,
        method: UpdateMethod,
        publisher: Publisher,
        transfers: Transfers,
        update_numel: int,
    ) -> None:
        """update_numel: master elements that are updated in one call where ``method`` is better with few."""
        self._buffer = buffer
        self._reducer = reducer
        self._method = method
        self._publisher = publisher
        self._tiers = buffer.tiers
        self._transfers = transfers
        self._update_numel = update_numel
        self.look: UpdateLook | None = None
        self.plan()

    def plan(self) -> None:
        """Look anew at the layout, and at the order in which buckets are reduced: one of them has changed.

        Updates and gathers follow this plan: the bucket that is reduced last comes first, as its parameters are the
        first that the next forward uses. All of it comes from the config, from sizes and from an order that are equal
        on all ranks: no rank's free memory, and no gradient, has a say.
        """
        self._order = self._reducer.order
        near: list[tuple[int, int]] = []
        far: dict[bool, list[tuple[int, int]]] = {False: [], True: []}  # by whether the host updates
        for bucket in reversed(self._order):
            its = near if self._within_reach(bucket) else far[self._tiers.updates_on_host(bucket)]
            its.append((bucket, self._buffer.master[bucket].numel()))
        total = sum(numel for _, numel in near)
        limit = total if self._method.one_launch else self._update_numel
        self._near = sub_groups(near, limit, 0)
        alignment = SPAN_ALIGNMENT if self._method.cuts_buckets else 0
        elements = sum(numel for buckets in far.values() for _, numel in buckets)
        most = min(self._tiers.sub_group_numel, max(_SMALLEST, elements // _SEVERAL))  # there is something to overlap
        self._far = [group for buckets in far.values() for group in sub_groups(buckets, most, alignment)]

    def _within_reach(self, bucket: int) -> bool:
        """Whether everything of a bucket is updated where it rests."""
        buffer, on_host = self._buffer, self._tiers.updates_on_host(bucket)
        tiers = {buffer.tier_of_master(bucket), buffer.tier_of_compute(bucket), self._tiers.of_optimizer(bucket)}
        return all(self._tiers.within_reach(tier, on_host) for tier in tiers)

    @property
    def all_on_device(self) -> bool:
        return not self._far and not any(self._tiers.updates_on_host(s.bucket) for chunk in self._near for s in chunk)

    def run(
        self,
        factor: float | torch.Tensor,
        used: frozenset[int] | None,
        found_inf: torch.Tensor | None,
        publish: bool,
        doubtful: Mapping[int, torch.Tensor] = _NONE,
    ) -> None:
        """One update, with :meth:`UpdateMethod.update`'s arguments, after :meth:`UpdateMethod.begin`; consumes the
        gradients. doubtful: further parameters, each with a ``found_inf`` of its own. Raises OSError if the disk
        failed: then some masters are ahead of others."""
        look = self.look
        if self._order is not self._reducer.order:  # learned in a backward
            self.plan()
        if look is not None:
            look.begin()
        for chunk in self._near:
            gradients = [self._reducer.reduced(span.bucket) for span in chunk]
            self._publisher.wait([span.bucket for span in chunk])
            masters = [self._buffer.master[span.bucket] for span in chunk] if look is not None else []
            if look is not None:
                look.found(chunk, masters)
            if not (publish and self._method.follows):
                for span in chunk:
                    self._buffer.follow(span.bucket)
            for index, left_out in doubtful.items():
                self._update_one(index, chunk, gradients, factor, left_out, publish)
            rounded = self._method.update(chunk, gradients, factor, used, found_inf, publish)
            if look is not None:
                look.left(chunk, masters)
            self._end(chunk, rounded, publish)
        if self._far:
            self._run_far(factor, used, publish)
        if look is not None:
            look.end()
        if publish:
            self._publisher.end_step()

    def _update_one(
        self,
        index: int,
        chunk: Sequence[Span],
        gradients: Sequence[torch.Tensor],
        factor: float | torch.Tensor,
        found_inf: torch.Tensor,
        publish: bool,
    ) -> None:
        """Update one parameter, if it is in ``chunk``."""
        bucket = self._buffer.layout.slots[index].bucket
        for span, gradient in zip(chunk, gradients, strict=True):
            if span.bucket == bucket:
                self._method.update([span], [gradient], factor, frozenset([index]), found_inf, publish)

    def _run_far(self, factor: float | torch.Tensor, used: frozenset[int] | None, publish: bool) -> None:
        if not publish:
            for bucket in {span.bucket for spans in self._far for span in spans}:
                self._buffer.follow(bucket)
            self._tiers.written_in_place()
        count = self._tiers.buffer_count
        wanted = [[self._wanted(span, publish) for span in spans] for spans in self._far]
        sizes = [[part.nbytes for of_span in group for part in of_span.parts] for group in wanted]
        longest = _Longest(max(map(sum, sizes)), max(map(max, sizes)))
        coming: deque[_Grip] = deque()  # the first is in hand
        leaving: deque[_Grip] = deque()
        try:
            for index, spans in enumerate(self._far):
                while len(coming) < min(2, count) and index + len(coming) < len(self._far):
                    coming.append(self._take(wanted[index + len(coming)], longest))
                grip = coming[0]
                grip.ready()
                gradients = [hand.gradient for hand in grip.hands]
                masters = [hand.master for hand in grip.hands]
                if self.look is not None:
                    self.look.found(spans, masters)
                rounded = self._method.update(spans, gradients, factor, used, None, publish, grip.hands)
                if self.look is not None:
                    self.look.left(spans, masters)
                for earlier in leaving:
                    earlier.advance()
                grip.give_back()
                leaving.append(coming.popleft())
                while len(leaving) > max(0, count - 2):
                    leaving.popleft().finish()
                self._end(spans, rounded, publish)
            while leaving:
                leaving.popleft().finish()
        except BaseException:
            for grip in (*coming, *leaving):
                with contextlib.suppress(Exception):
                    grip.finish()
            raise

    def _take(self, wanted: Sequence[_Wanted], longest: _Longest) -> _Grip:
        buckets = [of_span.span.bucket for of_span in wanted]
        self._publisher.wait(buckets)
        for bucket in buckets:
            self._reducer.reduced(bucket)  # has arrived
        on_host = self._tiers.updates_on_host(buckets[0]) or not self._tiers.apart
        return _Grip(wanted, None if on_host else self._tiers.device, self._transfers, longest)

    def _wanted(self, span: Span, publish: bool) -> _Wanted:
        buffer, tiers, bucket = self._buffer, self._tiers, span.bucket
        on_host = tiers.updates_on_host(bucket)

        def part(flat: torch.Tensor, tier: Tier, written: bool) -> _Part:
            return _Part(flat[span.low : span.high], tier, not tiers.within_reach(tier, on_host), written)

        of_optimizer, of_compute = tiers.of_optimizer(bucket), buffer.tier_of_compute(bucket)
        writes = publish and buffer.separate_master(bucket)
        return _Wanted(
            span,
            part(self._reducer.place_of_reduced(bucket), of_optimizer, False),
            part(buffer.master[bucket], buffer.tier_of_master(bucket), True),
            {name: part(flat, of_optimizer, True) for name, flat in self._method.states_of(bucket).items()},
            part(buffer.owned_compute(bucket), of_compute, True) if writes else None,
        )

    def _end(self, spans: Sequence[Span], rounded: bool, publish: bool) -> None:
        for span in spans:
            if span.last:
                self._reducer.release(span.bucket)
                if publish:
                    self._publisher.publish_bucket(span.bucket, rounded)
