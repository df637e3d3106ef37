"""Values written into parameters outside an update, which are copied into the master weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.outcomes import Outcomes
from zerolite.zero.param_gatherer import ParamGatherer
from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator
from zerolite.zero.step_update import StepUpdate


class WrittenValues:
    """Copies values that the user has written into parameters to the master weights.

    The step pipeline calls it before an update; code that saves, loads or reads masters calls it between steps. Called
    on all ranks, in the same order.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        param_gatherer: ParamGatherer,
        update: StepUpdate,
        outcomes: Outcomes,
    ) -> None:
        self._buffer, self._param_gatherer = buffer, param_gatherer
        self._update, self._outcomes = update, outcomes
        self._shards: PartitionedParameterCoordinator | None = None
        self._loaded: set[int] = set()  # parameters into which values have been loaded

    def use(self, shards: PartitionedParameterCoordinator) -> None:
        """Collect writes through ``shards`` from now on, because the model is at stage 3."""
        self._shards = shards

    def note_loaded(self, indices: Iterable[int]) -> None:
        """Note that values have been loaded into these parameters. The next update starts from them."""
        self._loaded.update(indices)

    def note_loaded_parameters(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Note those of ``parameters`` that are trained, as :meth:`note_loaded` does."""
        index_of = {id(parameter): index for index, parameter in enumerate(self._buffer.parameters)}
        self.note_loaded(index_of[id(p)] for p in parameters if id(p) in index_of)

    def forget(self) -> None:
        """Forget the loaded parameters, because masters have been loaded, which overwrite them."""
        self._loaded.clear()

    def take(self) -> None:
        """Copy values into the masters that were loaded into parameters or assigned by ``p.data = values``.

        Raises RuntimeError if their shape or dtype differs.
        """
        if not self._update.params_outdated:
            if self._param_gatherer.pending:
                self._param_gatherer.wait_all()
            self._buffer.take_assigned_data()
            if self._shards is not None:
                self._shards.collect_writes()
        if self._loaded:
            self._buffer.refresh_masters(self._loaded)
            self._buffer.placements.drop_reads()
            self._loaded.clear()
            if self._outcomes.checks is not None:  # the weights differ from those that the last update left
                self._outcomes.checks.forget(update=False)

    def take_all(self) -> None:
        """Do :meth:`take`, and copy now what was written in place: an update would do that later.

        Values of frozen parameters are copied into their shards.
        """
        self.take()
        if self._shards is not None:
            self._shards.collect_frozen_writes()
        for bucket in () if self._update.params_outdated else range(len(self._buffer.layout.buckets)):
            self._buffer.sync_master_from_param(bucket)
        self._buffer.placements.drop_reads()
