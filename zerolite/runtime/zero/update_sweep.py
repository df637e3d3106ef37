"""The update of everything that a rank owns, whatever tier it rests at.

What the update reaches where it rests is updated there: on the device, buckets of one kind in one launch. The rest goes
by sub-groups, each of them in three stages that overlap: its masters, states, gradients and compute parameters come
into staging buffers while the one before is updated, and its results leave while the next one is.

    sub-group 0   come   update   leave
    sub-group 1          come     update   leave
    sub-group 2                   come     update   leave

(ZeRO-Infinity: Rajbhandari et al., 2021, section 6.)
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerolite.runtime.zero.buffer import ParameterBuffer
from zerolite.runtime.zero.grad_reducer import GradReducer
from zerolite.runtime.zero.pieces import Hand, UpdateMethod
from zerolite.runtime.zero.publisher import Publisher
from zerolite.runtime.zero.spans import Span, sub_groups
from zerolite.runtime.zero.tiers import SPAN_ALIGNMENT, Tier
from zerolite.runtime.zero.transfers import Transfer, Transfers

_SEVERAL = 16  # sub-groups at most where the config allows fewer
_SMALLEST = 1 << 22  # elements of a sub-group that the config does not ask for


class _Copy(NamedTuple):
    """What is in hand of something that rests elsewhere."""

    here: torch.Tensor
    resting: torch.Tensor
    tier: Tier
    written: bool


class _Grip:
    """A sub-group on its way to the update, in hand, or on its way back."""

    def __init__(self, spans: Sequence[Span], transfers: Transfers) -> None:
        self.spans = spans
        self.hands: list[Hand] = []
        self._transfers = transfers
        self._copies: list[_Copy] = []
        self._under_way: list[Transfer] = []

    def bring(self, resting: torch.Tensor, tier: Tier, device: torch.device, written: bool) -> torch.Tensor:
        """A copy of ``resting``, within reach of an update on ``device`` when :meth:`ready` returns."""
        transfers = self._transfers
        if device.type == "cpu":
            here = transfers.pool.take(resting.numel(), resting.dtype)
        else:
            here = torch.empty_like(resting, device=device)
        self._copies.append(_Copy(here, resting, tier, written))
        self._under_way.append(transfers.bring(resting, tier, here))
        return here

    def ready(self) -> None:
        for transfer in self._under_way:
            transfer.wait()

    def give_back(self) -> None:
        """After the update: send what it has written to where it rests. The device sees it there."""
        for here, resting, tier, written in self._copies:
            if written:
                self._under_way.append(self._transfers.send(here, resting, tier))
                if resting.device.type != "cpu":
                    self._under_way[-1].wait()

    def advance(self) -> None:
        for transfer in self._under_way:
            transfer.advance()

    def finish(self) -> None:
        """Wait until it is there, and let the buffers go."""
        while self._under_way:
            self._under_way.pop().finish()
        while self._copies:
            here = self._copies.pop().here
            if here.device.type == "cpu":
                self._transfers.pool.give_back(here)


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
        self.plan()

    def plan(self) -> None:
        """Look at the layout anew: it has other buckets than before."""
        near: list[tuple[int, int]] = []
        far: list[tuple[int, int]] = []
        for bucket, master in enumerate(self._buffer.master):
            (near if self._within_reach(bucket) else far).append((bucket, master.numel()))
        total = sum(numel for _, numel in near)
        limit = total if self._method.one_launch else self._update_numel
        self._near = sub_groups(near, limit, 0)
        alignment = SPAN_ALIGNMENT if self._method.cuts_buckets else 0
        several = max(_SMALLEST, sum(numel for _, numel in far) // _SEVERAL)  # so that there is something to overlap
        self._far = sub_groups(far, min(self._tiers.sub_group_numel, several), alignment)

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
    ) -> None:
        """One update, with :meth:`UpdateMethod.update`'s arguments, after :meth:`UpdateMethod.begin`; consumes the
        gradients. Raises OSError if the disk
        failed: then some masters are ahead of others."""
        for chunk in self._near:
            gradients = [self._reducer.reduced(span.bucket) for span in chunk]
            self._publisher.wait([span.bucket for span in chunk])
            rounded = self._method.update(chunk, gradients, factor, used, found_inf, publish)
            self._end(chunk, rounded, publish)
        if self._far:
            self._run_far(factor, used, publish)
        if publish:
            self._publisher.end_step()

    def _run_far(self, factor: float | torch.Tensor, used: frozenset[int] | None, publish: bool) -> None:
        if not publish:
            for bucket in {span.bucket for spans in self._far for span in spans}:
                self._buffer.follow(bucket)
            self._tiers.written_in_place()
        count = self._tiers.buffer_count
        coming: deque[_Grip] = deque()  # the first is in hand
        leaving: deque[_Grip] = deque()
        try:
            for index, spans in enumerate(self._far):
                while len(coming) < min(2, count) and index + len(coming) < len(self._far):
                    coming.append(self._take(self._far[index + len(coming)], publish))
                grip = coming[0]
                grip.ready()
                gradients = [hand.gradient for hand in grip.hands]
                rounded = self._method.update(spans, gradients, factor, used, None, publish, grip.hands)
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

    def _take(self, spans: Sequence[Span], publish: bool) -> _Grip:
        grip = _Grip(spans, self._transfers)
        self._publisher.wait([span.bucket for span in spans])
        for span in spans:
            grip.hands.append(self._hand(grip, span, publish))
        return grip

    def _hand(self, grip: _Grip, span: Span, publish: bool) -> Hand:
        buffer, tiers, bucket = self._buffer, self._tiers, span.bucket
        on_host = tiers.updates_on_host(bucket)
        device = torch.device("cpu") if on_host else tiers.device

        def reach(flat: torch.Tensor, tier: Tier, written: bool) -> torch.Tensor:
            part = flat[span.low : span.high]
            return part if tiers.within_reach(tier, on_host) else grip.bring(part, tier, device, written)

        states = self._method.states_of(bucket)
        of_optimizer, of_compute = tiers.of_optimizer(bucket), buffer.tier_of_compute(bucket)
        writes = publish and buffer.separate_master(bucket)
        return Hand(
            span,
            reach(self._reducer.reduced(bucket), of_optimizer, False),
            reach(buffer.master[bucket], buffer.tier_of_master(bucket), True),
            {name: reach(flat, of_optimizer, True) for name, flat in states.items()},
            reach(buffer.owned_compute(bucket), of_compute, True) if writes else None,
        )

    def _end(self, spans: Sequence[Span], rounded: bool, publish: bool) -> None:
        for span in spans:
            if span.last:
                self._reducer.release(span.bucket)
                if publish:
                    self._publisher.publish_bucket(span.bucket, rounded)
