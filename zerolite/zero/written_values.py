"""Values written into parameters outside an update, which are copied into the master weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zerolite.zero.observers import Observers
from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator
from zerolite.zero.step_update import StepUpdate


class WrittenValues:
    """Copy of values that the user has written into parameters to the master weights.

    The step pipeline collects them before an update. Code that saves, loads or reads masters does so between steps, on
    all ranks and in the same order.
    """

    def __init__(self, update: StepUpdate, observers: Observers) -> None:
        self._buffer, self._param_gatherer = update.buffer, update.param_gatherer
        self._update, self._observers = update, observers
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
        if not self._update.params_outdated:
            if self._param_gatherer.pending:
                self._param_gatherer.wait_all()
            self._buffer.collect_assigned_data()
            if self._coordinator is not None:
                self._coordinator.collect_writes()
        if self._loaded:
            self._buffer.placements.drop_reads(self._buffer.copy_to_masters(self._loaded))
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
        written: list[torch.Tensor] = []
        for bucket in () if self._update.params_outdated else self._buffer.buckets:
            written += bucket.sync_master_from_param()
        self._buffer.placements.drop_reads(written)
