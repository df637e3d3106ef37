"""Update of everything that a rank owns.

Tensors that the update can reach where they are kept are updated there: on the device, buckets of one kind in one
launch. The others are staged (staged_update.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zerolite.offload.transfers import Transfers
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.checks import UpdateLook
from zerolite.zero.grad_reducer import GradReducer
from zerolite.zero.pieces import Hand, UpdateMethod
from zerolite.zero.publisher import Publisher
from zerolite.zero.spans import Span, sub_groups
from zerolite.zero.staged_update import StagedSpans

_NONE: Mapping[int, torch.Tensor] = {}


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
        self._staged = StagedSpans(buffer, reducer, method, publisher, transfers)
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
        self._staged.plan(far)

    def _within_reach(self, bucket: int) -> bool:
        """Return True if everything of a bucket is updated where it rests."""
        buffer, on_host = self._buffer, self._tiers.updates_on_host(bucket)
        tiers = {buffer.tier_of_master(bucket), buffer.tier_of_compute(bucket), self._tiers.of_optimizer(bucket)}
        return all(self._tiers.within_reach(tier, on_host) for tier in tiers)

    @property
    def all_on_device(self) -> bool:
        return not self._staged.groups and not any(
            self._tiers.updates_on_host(s.bucket) for chunk in self._near for s in chunk
        )

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

        def update_staged(spans: Sequence[Span], hands: Sequence[Hand]) -> bool:
            gradients, masters = [hand.gradient for hand in hands], [hand.master for hand in hands]
            if look is not None:
                look.found(spans, masters)
            rounded = self._method.update(spans, gradients, factor, used, None, publish, hands)
            if look is not None:
                look.left(spans, masters)
            return rounded

        if self._staged.groups:
            self._staged.run(publish, update_staged, self._end)
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

    def _end(self, spans: Sequence[Span], rounded: bool, publish: bool) -> None:
        for span in spans:
            if span.last:
                self._reducer.release(span.bucket)
                if publish:
                    self._publisher.publish_bucket(span.bucket, rounded)
