"""The update of one step, and values that users write into parameters between two updates."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zerolite.comm import raise_together
from zerolite.comm.flight_recorder import EVENTS
from zerolite.zero.bucket import Bucket
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.observers import Observers
from zerolite.zero.offload import OffloadUpdate
from zerolite.zero.param_gatherer import ParamGatherer
from zerolite.zero.reducer import Reducer
from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator
from zerolite.zero.stats import StatsVector
from zerolite.zero.step_state import StepState
from zerolite.zero.update import SpanTensors, UpdateInputs, UpdateMethod, sub_groups


class StepUpdate:
    """Update of everything that a rank owns. Buckets that the update can access are updated in place, on the device in
    as few launches as possible. The others are staged.

    Called on all ranks. The only collectives are the parameter gatherer's and those of the update method, in the same
    order on all ranks.

    Attributes:
        failed_update: reason why some masters are a step ahead of others; "" if they are all of one step.
        device_decides: the device decides whether a step is skipped, so that the host need not wait for its statistics.
            This depends on config, optimizer and layout, and never on what differs between ranks. If the host skips a
            step, no all-gather is launched; if the device does, all of them are.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        reducer: Reducer,
        method: UpdateMethod,
        param_gatherer: ParamGatherer,
        offload: OffloadUpdate,
        state: StepState,
    ) -> None:
        self.buffer, self.param_gatherer = buffer, param_gatherer
        self._reducer, self._method, self._offload = reducer, method, offload
        self._observers, self._options = state.observers, state.options
        self.failed_update = ""
        self.plan()

    def plan(self) -> None:
        """Plan the updates and their all-gathers after a change of the layout or of the order of the reductions.

        The bucket that is reduced last comes first, because the next forward uses its parameters first. The plan
        depends only on the config, on sizes and on that order, which are equal on all ranks. So all ranks launch the
        same all-gathers. It must not depend on free memory or gradients, which differ between ranks.
        """
        placements = self.buffer.placements
        self._order = self._reducer.order
        in_place: list[tuple[Bucket, int]] = []
        offloaded: dict[bool, list[tuple[Bucket, int]]] = {False: [], True: []}  # True: the host updates them
        self.device_decides = self._options.skip_on_device
        for bucket in reversed(self._order):
            on_host = bucket.updates_on_host
            accessible = all(
                placements.is_accessible(placement, on_host)
                for placement in (bucket.master_placement, bucket.compute_placement, bucket.placement)
            )
            (in_place if accessible else offloaded[on_host]).append((bucket, bucket.master.numel()))
            self.device_decides &= accessible and not on_host
        total = sum(numel for _, numel in in_place)
        most = total if self._method.one_launch else max(self._options.update_numel, self._method.least_numel)
        self._in_place = sub_groups(in_place, most, 0)
        self._offload.plan(offloaded)

    # ---------------------------------------------------------------- one step

    def used_somewhere(self, stats: StatsVector) -> frozenset[int] | None:
        """Return the parameters that some rank has used, None for all. The host waits for the statistics, which tell
        it, only where this rank has not used all."""
        used = self._reducer.used
        if len(used) == len(self.buffer.layout.slots):
            return None
        return frozenset(used) if stats.world_size == 1 else stats.get().used

    def run(self, inputs: UpdateInputs | None) -> None:
        """Update once, which consumes the gradients, and all-gather each bucket as soon as it is updated.

        Args:
            inputs: what the update uses beside the buckets. None: this rank refuses. It changes nothing, and launches
                what the others do.

        Raises:
            OSError, RuntimeError: the disk of a rank has failed, on all ranks. Then some masters are a step ahead of
                others.
        """
        self._method.begin(inputs)
        for notify in self._observers.on_update_begin if inputs is not None else ():
            notify()
        if self._order is not self._reducer.order:  # it was learned in a backward
            self.plan()
        alone = True
        try:
            failed, alone = self._update_all(inputs), False
            if self.buffer.placements.on_disk:
                agree, device = self.buffer.gradient_memory.groups.agree, self.buffer.placements.device
                raise_together(agree, device, "update", failed, "zerolite", failed="failed in its update:")
            elif failed is not None:
                raise failed
        except BaseException as error:  # between two buckets it leaves some masters ahead
            self.failed_update = f"{type(error).__name__}: {error}"
            if alone:  # the others wait for this rank, if the program goes on
                EVENTS.append(f"raised {type(error).__name__} in its update")
            raise

    def _update_all(self, inputs: UpdateInputs | None) -> OSError | None:
        """Return the error of the disk, if it has failed."""
        syncs, gatherer = self._method.syncs_masters, self.param_gatherer
        if self.buffer.gradient_memory.groups.rounds_values:
            gatherer.wait_all()
            for bucket in self.buffer.buckets:
                bucket.collect_written()
        for spans in self._in_place:
            if gatherer.pending:  # a gather of the step before may still send what this update writes
                gatherer.wait([span.bucket for span in spans])
            if not syncs:
                for span in spans:
                    span.bucket.sync_master_from_param()
            sub_group = [
                SpanTensors(
                    span,
                    span.bucket.take_mean(),
                    span.bucket.master,
                    span.bucket.states,
                    span.bucket.owned if syncs and span.bucket.separate else None,
                )
                for span in spans
            ]
            if inputs is not None:
                self._method.update(sub_group, inputs)
            else:
                self._method.leave_out(sub_group)
            for tensors in sub_group:
                gatherer.gather_bucket(tensors.span.bucket, rounded=tensors.out is not None)
        failed = self._offload.run(inputs) if self._offload.groups else None
        gatherer.end_step()
        return failed

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


class WrittenValues:
    """Copy of values that the user has written into parameters to the master weights.

    The step pipeline collects them before an update. Code that saves, loads or reads masters does so between steps, on
    all ranks and in the same order.
    """

    def __init__(self, update: StepUpdate, observers: Observers) -> None:
        self._buffer, self._param_gatherer = update.buffer, update.param_gatherer
        self._observers = observers
        self._coordinator: PartitionedParameterCoordinator | None = None
        self._loaded: set[int] = set()  # parameters into which values have been loaded

    def use_coordinator(self, coordinator: PartitionedParameterCoordinator) -> None:
        """Collect writes through ``coordinator`` from now on, because the model is at stage 3."""
        self._coordinator = coordinator

    def on_loaded(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Note that values have been loaded into these parameters. The next update of the trained ones starts from
        them."""
        index_of = {id(parameter): index for index, parameter in enumerate(self._buffer.parameters)}
        self._loaded.update(index_of[id(p)] for p in parameters if id(p) in index_of)

    def forget(self) -> None:
        """Forget the loaded parameters, because masters have been loaded, which overwrite them."""
        self._loaded.clear()

    def collect(self) -> None:
        """Copy values into the masters that were loaded into parameters or assigned by ``p.data = values``.

        Raises:
            RuntimeError: an assigned tensor has another shape or dtype than its parameter.
        """
        if self._param_gatherer.pending:
            self._param_gatherer.wait_all()
        if self._coordinator is None:
            self._buffer.collect_assigned_data()
        else:
            self._coordinator.collect_writes()
        if self._loaded:
            for bucket in self._buffer.buckets:
                bucket.copy_to_master(self._loaded)
            self._buffer.placements.drop_reads()
            self._loaded.clear()
            for notify in self._observers.on_weights_written:
                notify(False)

    def collect_all(self) -> None:
        """Copy all written values into the masters, and those of frozen parameters into their shards.

        An update does not need this for values that were written in place: it copies them itself.
        """
        self.collect()
        if self._coordinator is not None:
            self._coordinator.collect_frozen_writes()
        for bucket in self._buffer.buckets:
            bucket.sync_master_from_param()
        self._buffer.placements.drop_reads()
