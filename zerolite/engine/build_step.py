"""Construction of the components of a step: buffer, gradients, optimizer, parameter all-gather and pipeline."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from zerolite.access.sharded_grad import ShardedGradient
from zerolite.comm import Topology
from zerolite.config import ZeroliteConfig
from zerolite.engine.arguments import check_parameters
from zerolite.engine.build_stage3 import bucket_numel, partitioned_buffer, sliced_layout
from zerolite.engine.decisions import (
    SKIPS_ON_DEVICE,
    communication_dtypes,
    loss_scaler,
    reduction_options,
    step_options,
)
from zerolite.engine.evaluation_engine import EvaluationPipeline
from zerolite.engine.model_parallel import (
    InputComparison,
    ModelParallelStats,
    ModelParallelStepPipeline,
    SharedGradReducer,
    counts_once,
)
from zerolite.engine.model_values import fill_buckets, synchronize_untrained
from zerolite.offload.from_config import check_optimizer, placements_of, warn_of_few_threads
from zerolite.offload.offloaded_gradients import GradientTransfers
from zerolite.offload.transfers import Transfers
from zerolite.optim.kernels import kernel_chooser
from zerolite.precision.dtypes import Precision
from zerolite.precision.fp32_modules import Fp32Modules
from zerolite.updates.staged_update import StagedSubGroups
from zerolite.zero.accumulation import GradAccumulation
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.grad_stats import StatsCollector
from zerolite.zero.gradient_memory import GradientMemory
from zerolite.zero.groups import RankGroups
from zerolite.zero.layout import AUTO_BUCKET, ParameterSpec, PartitionLayout
from zerolite.zero.observers import Observers
from zerolite.zero.optimizer import Groups, ShardedOptimizer
from zerolite.zero.param_gatherer import ParamGatherer
from zerolite.zero.reducer import Reducer
from zerolite.zero.stage3.partitioned_model import PartitionedModel
from zerolite.zero.stage3.partitioned_parameter import unpartitioned_numel
from zerolite.zero.stages import StagePolicy
from zerolite.zero.step import StepPipeline
from zerolite.zero.step_state import StepState
from zerolite.zero.step_update import StepUpdate

if TYPE_CHECKING:
    from zerolite.engine.unfrozen_params import Parameters
    from zerolite.pipe.prepare import PreparedStage

_PADDED = 1.5  # warn if buckets of whole parameters have more than 1.5 times the elements of the model

logger = logging.getLogger("zerolite")


@dataclass(frozen=True)
class Setup:
    """Everything that is decided before the first part is made.

    Attributes:
        model: this rank's part of the full model.
        config: resolved for the number of data ranks in ``topology``.
        policy: the row of the table of stages.
        kind: type of device whose rules of memory apply.
        staged: the pipeline stage, if ``model`` is one.
        trains: there is an optimizer.
        whole: each parameter belongs as a whole to one rank.
    """

    model: torch.nn.Module
    config: ZeroliteConfig
    policy: StagePolicy
    precision: Precision
    fp32: Fp32Modules
    topology: Topology
    device: torch.device
    kind: str
    staged: PreparedStage | None
    trains: bool
    whole: bool


class StepComponents:
    """Components of a step, each made from earlier ones. Constructed on all ranks.

    Attributes:
        owned: parameters that belong to the engine.
        partitioned: the model's partitioned parameters at stage 3, else None.
        shared_grads: all-reduce of gradients over ranks that have other parts of the model; None where there are none.
        note_inputs: function that notes the inputs of a forward, to compare them in the next statistics.
    """

    def __init__(self, setup: Setup, make_inner: Callable[[Groups], Optimizer] | Optimizer, groups: Groups) -> None:
        """
        Args:
            make_inner: the user's optimizer, or a function from param groups to one.
            groups: its param groups.
        """
        self.setup = setup
        self.comm = comm = setup.topology.data
        self.rank_groups = RankGroups.of(setup.topology, setup.policy.shard_optimizer)
        self._ties = {} if setup.staged is None else {id(tie.parameter): tie for tie in setup.staged.ties}
        self._communication = communication_dtypes(setup.model, setup.config, setup.precision, comm.world_size)
        self.observers = Observers()
        self._placements = placements_of(setup.config, setup.device, setup.kind, comm)
        self.transfers = Transfers(self._placements)
        if comm.main:
            warn_of_few_threads(self._placements, os.environ)
        names = {id(parameter): name for name, parameter in setup.model.named_parameters()}
        trained = self._trained(groups)
        self.owned = trained if setup.trains else list(setup.model.parameters())
        check_parameters(self.owned, names, meta_allowed=setup.policy.shard_parameters)
        self._specs = self._specs_of(trained, names, groups)
        self.partitioned = self._partition() if setup.policy.shard_parameters else None
        chunks = 1 if setup.staged is None else len(setup.staged.chunks)  # each has its own backward
        self.accumulation = GradAccumulation((setup.config.gradient_accumulation_steps or 1) * chunks)
        self._gradient_memory = self._make_gradient_memory()
        self.buffer = self._make_buffer(trained)
        synchronize_untrained(setup.model, trained, setup.precision, comm, setup.device)
        parallel = setup.trains and not setup.topology.trivial
        collector = self._make_collector(parallel)
        inputs = InputComparison(self.rank_groups.mean, setup.topology.model, setup.device) if parallel else None
        self.note_inputs = None if inputs is None else inputs.note
        if inputs is not None:
            self.observers.add(inputs)
        if self._gradient_memory.offloads is not None:
            self._gradient_memory.offloads.connect(collector.note)
        self.reducer = Reducer(self.buffer, self.observers, ShardedGradient.of)
        self.shared_grads = (
            SharedGradReducer(setup.topology, self.buffer, self._ties, self.reducer, setup.device) if parallel else None
        )
        self.sharded = self._make_optimizer(make_inner, groups)
        self.param_gatherer = self._make_gatherer()
        self.scaler = loss_scaler(setup.config) if setup.trains else None
        self.pipeline = self._make_pipeline(collector)

    def layout_of(self, parameters: Parameters, names: dict[int, str]) -> PartitionLayout:
        """Make the layout of parameters that are trained from now on."""
        setup = self.setup
        setup.fp32.attach()
        added = self._specs_of(parameters, names, self.sharded.inner.param_groups)
        shards = self.rank_groups.shard.world_size
        if self.partitioned is not None:
            return sliced_layout(self.partitioned, parameters, added, setup.config, shards)
        return PartitionLayout.build(added, shards, bucket_numel(self._specs, setup.config, shards))

    def _trained(self, groups: Groups) -> list[torch.nn.Parameter]:
        """Return the parameters to train, in the model's order."""
        chosen = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        trained = [p for p in self.setup.model.parameters() if id(p) in chosen]
        if self.setup.trains and not trained:
            raise ValueError(
                "zerolite.initialize: no parameter to train: none of the given parameters requires a gradient"
            )
        return trained

    def _specs_of(self, trained: Parameters, names: dict[int, str], groups: Groups) -> list[ParameterSpec]:
        # Muon leaves some parameters to an elementwise optimizer. These can be divided between ranks.
        whole = {id(p) for group in groups for p in group["params"] if self.setup.whole and group.get("use_muon", True)}
        specs = []
        for p in trained:
            kind = f"{self.setup.precision.compute_dtype(p)} sent as {self._communication(p)}"
            if id(p) in whole:
                kind += ", whole"
            if id(p) in self._ties:  # gets its own bucket, so that all stages that have it divide it in the same way
                kind += f", shared as {self._ties[id(p)].key}"
            specs.append(ParameterSpec(names[id(p)], unpartitioned_numel(p), kind, id(p) in whole))
        return specs

    def _partition(self) -> PartitionedModel:
        device, groups = self.setup.device, self.rank_groups
        gathers = groups.for_gathers(device)
        return PartitionedModel(self.setup.model, groups, gathers, device, self._placements, self.transfers)

    def _make_buffer(self, trained: list[torch.nn.Parameter]) -> ParameterBuffer:
        setup, specs, placements, shard = self.setup, self._specs, self._placements, self.rank_groups.shard
        if self.partitioned is not None:
            memory = self._gradient_memory
            return partitioned_buffer(
                self.partitioned, trained, specs, setup.config, setup.precision, memory, placements
            )
        layout = PartitionLayout.build(specs, shard.world_size, bucket_numel(specs, setup.config, shard.world_size))
        if setup.whole and shard.main:
            _warn_of_padding(layout)
        buffer = ParameterBuffer(layout, trained, self._gradient_memory, placements)
        fill_buckets(buffer, setup.precision, self.comm, setup.device)
        return buffer

    def _make_collector(self, parallel: bool) -> StatsCollector:
        setup, topology = self.setup, self.setup.topology
        if not parallel:
            return StatsCollector(self.rank_groups, setup.device, self.observers)
        counts = counts_once(topology, self.buffer, self._ties)
        return ModelParallelStats(self.rank_groups, setup.device, self.observers, topology.model, counts)

    def _make_gradient_memory(self) -> GradientMemory:
        setup, placements = self.setup, self._placements
        keep = setup.kind == "cpu"
        alone = setup.topology.world.world_size == 1
        dtype_of = self._communication
        options = reduction_options(
            setup.config,
            setup.policy,
            setup.precision,
            self.rank_groups.mean.world_size,
            self.accumulation.micro_batches,
            dtype_of,
            keep,
            alone,
        )
        here = placements.is_accessible(placements.optimizer, on_host=False)
        offloads = None if here else GradientTransfers(placements.device, self.transfers)
        return GradientMemory(self.rank_groups, options, offloads)

    def _make_optimizer(
        self, make_inner: Callable[[Groups], Optimizer] | Optimizer, groups: Groups
    ) -> ShardedOptimizer:
        setup = self.setup
        choose = kernel_chooser(setup.topology.world, setup.device, self._placements.update_devices())
        update_dtype = setup.precision.update_dtype
        sharded = ShardedOptimizer(make_inner, groups, self.buffer, update_dtype, choose)
        check_optimizer(self._placements, setup.kind, sharded.inner)
        return sharded

    def _make_gatherer(self) -> ParamGatherer:
        config, policy = self.setup.config, self.setup.policy
        return ParamGatherer(
            self.buffer,
            self.rank_groups.shard,
            gather=policy.shard_optimizer and not policy.shard_parameters,
            overlap_forward=config.zero_optimization.overlap_comm is True and not policy.shard_parameters,
            observers=self.observers,
        )

    def _make_pipeline(self, collector: StatsCollector) -> StepPipeline:
        setup, config, buffer = self.setup, self.setup.config, self.buffer
        # With many ranks, or with stage 3's small groups, shards are small. One update then takes several of them, so
        # that there are few large calls.
        numel = min(bucket_numel(self._specs, config, self.rank_groups.shard.world_size), AUTO_BUCKET)
        options = step_options(config, numel, setup.kind in SKIPS_ON_DEVICE, self.comm.main)
        make: Callable[..., StepPipeline] = StepPipeline if setup.trains else EvaluationPipeline
        if self.shared_grads is not None:
            make = functools.partial(ModelParallelStepPipeline, shared_grads=self.shared_grads)
        method, gatherer = self.sharded.method, self.param_gatherer
        state = StepState(self.accumulation, self.scaler, buffer, method, self.observers, options)
        staged = StagedSubGroups(buffer, self.reducer, method, gatherer, self.transfers)
        update = StepUpdate(buffer, self.reducer, method, gatherer, staged, state)
        return make(self.reducer, self.sharded, update, collector, state)


def _warn_of_padding(layout: PartitionLayout) -> None:
    """Warn if a parameter is too large to be balanced over the ranks."""
    largest, numel = max(layout.slots, key=lambda slot: slot.numel), sum(slot.numel for slot in layout.slots)
    if layout.numel > max(_PADDED * numel, AUTO_BUCKET):
        logger.warning(
            "whole parameters: buckets have %.1f times the elements of the model, because parameter '%s' alone has "
            "%.0f %% of them and belongs to one of %d ranks; fewer ranks or an elementwise optimizer need less memory",
            layout.numel / numel,
            largest.name,
            100 * largest.numel / numel,
            layout.world_size,
        )
