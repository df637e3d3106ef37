"""The update of one step, or its skip: decided by the host, which reads the statistics, or by the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from zerolite.utils.accelerator import host_value
from zerolite.zero.bucket import Bucket
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.checks import Update, UpdateObserver
from zerolite.zero.grad_stats import StatsVector, clip_coefficient, clip_coefficient_on_device
from zerolite.zero.gradient_scale import GradientScale
from zerolite.zero.outcomes import Outcomes, mean_weight
from zerolite.zero.param_gatherer import ParamGatherer
from zerolite.zero.reducer import Reducer
from zerolite.zero.shown_gradients import Factor
from zerolite.zero.update import Span, SpanTensors, UpdateMethod, sub_groups


class StagedUpdate(Protocol):
    """Update of the buckets that need staging copies, sub-group by sub-group.

    Attributes:
        groups: spans of each sub-group.
    """

    groups: list[list[Span]]

    def plan(self, buckets: Mapping[bool, Sequence[tuple[Bucket, int]]]) -> None:
        """Divide the buckets into sub-groups.

        Args:
            buckets: (bucket, elements of its master) in the order of the updates; True: of buckets that the host
                updates, False: of the others.
        """

    def run(self, gather: bool, update: Update, on_updated: Callable[[Sequence[SpanTensors], bool], None]) -> None:
        """Update all sub-groups.

        Args:
            gather: the update all-gathers the updated parameters.
            update: updates one sub-group.
            on_updated: called with each sub-group and ``gather`` when its results are being written back.

        Raises:
            OSError: the disk failed. Then some masters are ahead of others.
        """


class StepUpdate:
    """Update of everything that a rank owns. Buckets that the update can access are updated in place, on the device in
    as few launches as possible. The others are staged.

    Called on all ranks. The only collectives are the parameter gatherer's, in the same order on all ranks.

    Attributes:
        failed_update: reason why some masters are a step ahead of others; "" if they are all of one step.
        params_outdated: masters are ahead of the parameters.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        reducer: Reducer,
        method: UpdateMethod,
        param_gatherer: ParamGatherer,
        staged: StagedUpdate,
        scale: GradientScale,
        outcomes: Outcomes,
        update_numel: int,
        may_skip_on_device: bool,
        world_size: int,
        observe_update: UpdateObserver | None,
    ) -> None:
        """
        Args:
            observe_update: wraps each update to observe the masters before and after it.
            update_numel: most master elements in one call of a ``method`` that does not update all in one launch.
            may_skip_on_device: the config lets the device decide if a step is skipped.
        """
        self._buffer, self._reducer, self._method = buffer, reducer, method
        self._param_gatherer, self._staged, self._scale, self._outcomes = param_gatherer, staged, scale, outcomes
        self._update_numel, self._may_skip_on_device = update_numel, may_skip_on_device
        self._world_size = world_size
        self._observe_update = observe_update
        self.failed_update = ""
        self.params_outdated = False
        self.plan()

    def plan(self) -> None:
        """Plan the updates and their all-gathers after a change of the layout or of the order of the reductions.

        The bucket that is reduced last comes first, because the next forward uses its parameters first. The plan
        depends only on the config, on sizes and on that order, which are equal on all ranks. So all ranks launch the
        same all-gathers. It must not depend on free memory or gradients, which differ between ranks.
        """
        placements = self._buffer.placements
        self._order = self._reducer.order
        in_place: list[tuple[Bucket, int]] = []
        staged: dict[bool, list[tuple[Bucket, int]]] = {False: [], True: []}  # True: the host updates them
        self._all_on_device = True
        for bucket in reversed(self._order):
            on_host = bucket.updates_on_host
            accessible = all(
                placements.is_accessible(placement, on_host)
                for placement in (bucket.master_placement, bucket.compute_placement, bucket.placement)
            )
            (in_place if accessible else staged[on_host]).append((bucket, bucket.master.numel()))
            self._all_on_device &= accessible and not on_host
        total = sum(numel for _, numel in in_place)
        self._in_place = sub_groups(in_place, total if self._method.one_launch else self._update_numel, 0)
        self._staged.plan(staged)

    # ---------------------------------------------------------------- one step

    def run(self, vector: StatsVector, user_factor: Factor, max_norm: float, gather: bool) -> None:
        """Update what this rank owns, or skip the step on all ranks.

        Args:
            vector: statistics of the step.
            user_factor: number by which the user has multiplied all gradients.
            max_norm: clip to this L2 norm, 0 for never.
            gather: all-gather each bucket as soon as it is updated.

        Raises:
            RuntimeError: on all ranks, because of the statistics.
        """
        # This depends on config, optimizer and layout, and never on gradients, which differ between ranks. If the host
        # skips a step, no all-gather is launched; if the device does, all of them are.
        if self._may_skip_on_device and self._method.can_skip_on_device and self._all_on_device:
            self._run_unread(vector, user_factor, max_norm, gather)
            return
        # The statistics that the host reads are equal on all ranks, so all ranks launch the all-gathers, or none does.
        outcome = vector.get()
        self._outcomes.raise_errors(outcome)
        divisor = self._scale.local_divisor() * mean_weight(outcome)
        if self._outcomes.applies(outcome):
            self._outcomes.check_used(outcome)
            factor = (clip_coefficient(outcome.norm / divisor, max_norm) if max_norm else 1.0) / divisor
            factor *= float(host_value(user_factor)) if isinstance(user_factor, torch.Tensor) else user_factor
            self._update(factor, outcome.used, None, gather)
        elif not gather:
            # all_gather_params() follows and takes all values from the masters, also those that the user has written.
            self._buffer.placements.drop_reads(
                [master for bucket in self._buffer.buckets for master in bucket.sync_master_from_param()]
            )
        self._outcomes.end_step(outcome, divisor)

    def _run_unread(self, vector: StatsVector, user_factor: Factor, max_norm: float, gather: bool) -> None:
        """Update, or skip on the device, without reading the statistics. Every rank launches the same all-gathers.

        A parameter that this rank has not used may have been used on another. The device decides for each of them. If
        there are too many for the update method, the host reads from the statistics which were used.
        """
        divisor = self._scale.local_divisor()
        used: frozenset[int] | None = None
        maybe_unused: frozenset[int] = frozenset()
        if len(self._reducer.used) < len(self._buffer.layout.slots):
            used = frozenset(self._reducer.used)
            if self._world_size > 1:
                maybe_unused = frozenset(s.index for s in self._buffer.layout.slots if s.numel and s.index not in used)
            most = self._method.most_maybe_unused
            if most is not None and len(maybe_unused) > most:
                used, maybe_unused = vector.get().used, frozenset()
        total = vector.total_square()
        found_inf = ~torch.isfinite(total) | vector.mixed() if self._outcomes.check_finite else None
        scale = self._scale.device_divisor(vector)
        if self._scale.weighted:
            no_mean = vector.mixed() | (vector.weight() == 0)
            found_inf = no_mean if found_inf is None else found_inf | no_mean
        factor = user_factor / scale
        if max_norm:
            factor = clip_coefficient_on_device(total.sqrt() / scale, max_norm) / scale * user_factor
        if isinstance(factor, torch.Tensor):
            factor = factor.float()
        if found_inf is not None:
            found_inf = found_inf.float()
        uses = vector.uses() if maybe_unused else None
        self._update(factor, None if used is None else used | maybe_unused, found_inf, gather, maybe_unused, uses)
        self._outcomes.read_later(vector, divisor, maybe_unused)

    def _update(
        self,
        factor: Factor,
        used: frozenset[int] | None,
        found_inf: torch.Tensor | None,
        gather: bool,
        maybe_unused: frozenset[int] = frozenset(),
        uses: torch.Tensor | None = None,
    ) -> None:
        """Update once, which consumes the gradients.

        Args:
            factor: see :meth:`UpdateMethod.update`, also for ``used``, ``found_inf`` and ``uses``.
            gather: all-gather each bucket as soon as it is updated.
            maybe_unused: parameters of ``used`` that the device may leave out.

        Raises:
            OSError: the disk failed. Then some masters are a step ahead of others.
        """
        self._method.begin(used, maybe_unused)
        if self._order is not self._reducer.order:  # it was learned in a backward
            self.plan()

        update = functools.partial(self._method.update, factor=factor, used=used, found_inf=found_inf, uses=uses)
        # Set before the first write, because an exception between two buckets leaves some masters ahead.
        self.params_outdated = not gather
        try:
            self._update_all(update if self._observe_update is None else self._observe_update(update), gather)
        except BaseException as error:
            self.failed_update, self.params_outdated = f"{type(error).__name__}: {error}", False
            raise

    def _update_all(self, update: Update, gather: bool) -> None:
        syncs = gather and self._method.syncs_masters
        gatherer = self._param_gatherer
        for spans in self._in_place:
            if gatherer.pending:  # a gather of the step before may still send what this update writes
                gatherer.wait([span.bucket for span in spans])
            if not syncs:
                for span in spans:
                    span.bucket.sync_master_from_param()
            sub_group = [self._stored_tensors(span, syncs) for span in spans]
            update(sub_group)
            self._on_updated(sub_group, gather)
        if self._staged.groups:
            self._staged.run(gather, update, self._on_updated)
        if gather:
            gatherer.end_step()

    def _stored_tensors(self, span: Span, writes: bool) -> SpanTensors:
        """Return the stored tensors of a whole bucket. writes: the update rounds into the compute parameters."""
        bucket = span.bucket
        out = bucket.owned if writes and bucket.separate else None
        return SpanTensors(span, bucket.mean(), bucket.master, bucket.states, out)

    def _on_updated(self, sub_group: Sequence[SpanTensors], gather: bool) -> None:
        """Release the gradients of the buckets that end in this sub-group, and launch their all-gathers."""
        for tensors in sub_group:
            if tensors.span.last:
                tensors.span.bucket.release()
                if gather:
                    self._param_gatherer.gather_bucket(tensors.span.bucket, rounded=tensors.out is not None)

    def on_params_gathered(self) -> None:
        """Note that the parameters of all ranks have the masters' values, or that their all-gathers are launched."""
        self.params_outdated = False

    def check_no_failed_update(self) -> None:
        """Raise RuntimeError if an update has failed halfway and no checkpoint has been loaded since."""
        if self.failed_update:
            raise RuntimeError(
                f"an update has failed in its middle ({self.failed_update}), so some weights are a step ahead of "
                "others; they cannot be trained on, nor saved. Start again from the last checkpoint"
            )

    def forget_failed_update(self) -> None:
        """Allow updates again after a failed one, because all masters have new values."""
        self.failed_update = ""
