"""Construction of an engine's parts: buckets, gradients, optimizer, gathers, and the order of a step."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import TYPE_CHECKING

import torch

from zerolite.comm import Topology, collective, largest, raise_together
from zerolite.config import ZeroliteConfig
from zerolite.engine.arguments import OptimizerChoice, check_parameters
from zerolite.engine.model_parallel import (
    InputComparison,
    SharedGradReducer,
    counts_once,
)
from zerolite.engine.options import (
    SKIPS_ON_DEVICE,
    communication_dtypes,
    loss_scaler,
    precision_of,
    reduction_options,
    stage3_options,
    step_options,
)
from zerolite.engine.trained_params import LayoutRules, fill_buckets, launch_by_groups, synchronize_untrained
from zerolite.offload.from_config import check_optimizer, placements_of, warn_of_few_threads
from zerolite.offload.transfers import Transfers
from zerolite.optim.kernels import kernel_chooser
from zerolite.precision.dtypes import GraphBoundary, scales_of_quantized
from zerolite.precision.fp32_modules import Fp32Modules
from zerolite.tensor_parallel.shard_spec import is_of_experts
from zerolite.zero.accumulation import GradAccumulation, UnmanagedAccumulation
from zerolite.zero.backward import Backward
from zerolite.zero.buffer import ParameterBuffer, PartitionedParameterBuffer
from zerolite.zero.compression import ErrorFeedback
from zerolite.zero.engine_parts import EngineParts, ModuleCall
from zerolite.zero.groups import RankGroups
from zerolite.zero.layout import AUTO_BUCKET, PartitionLayout
from zerolite.zero.local_sum import GradientMemory
from zerolite.zero.observers import Observers
from zerolite.zero.offload import GradientTransfers, OffloadUpdate
from zerolite.zero.optimizer import Groups, ShardedOptimizer
from zerolite.zero.param_gatherer import ParamGatherer
from zerolite.zero.reducer import Reducer
from zerolite.zero.replica_sums import ReplicaSums
from zerolite.zero.stage3.partitioned_model import PartitionedModel, partition_experts
from zerolite.zero.stages import STAGES
from zerolite.zero.stats import ModelTotals, StatsCollector
from zerolite.zero.step import StepPipeline
from zerolite.zero.step_state import StepState
from zerolite.zero.step_update import StepUpdate

if TYPE_CHECKING:
    from zerolite.pipe.prepare import PreparedStage

logger = logging.getLogger("zerolite")


@collective
class PartsBuilder:
    """Makes the parts of one engine, each from earlier ones.

    Attributes:
        fp32: the modules that stay in fp32.
        device_kind: type of device whose rules of memory apply.
        shared_grads: all-reduce of gradients over ranks that have other parts of the model; None where there are none.
        rules: layouts of trained parameters, also of those that are trained later.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: ZeroliteConfig,
        topology: Topology,
        device: torch.device,
        device_kind: str,
        pipe_stage: PreparedStage | None,
    ) -> None:
        """
        Args:
            model: this rank's part of the full model.
            config: resolved for the number of data ranks in ``topology``.
            device_kind: type of device whose rules of memory apply.
            pipe_stage: the pipeline stage, if ``model`` is one.
        """
        self.model, self.config, self.topology, self.device = model, config, topology, device
        self.device_kind = device_kind
        self.policy = STAGES[config.zero_optimization.stage]
        precision = precision_of(config)
        self.fp32 = Fp32Modules(model, config.fp32_modules, precision.compute, precision.autocast, device.type)
        self.precision = dataclasses.replace(
            precision, keeps_fp32=self.fp32.holds, keeps_dtype=scales_of_quantized(model)
        )
        self._ties = {} if pipe_stage is None else {id(tie.parameter): tie for tie in pipe_stage.ties}
        self._chunks = 1 if pipe_stage is None else len(pipe_stage.chunks)  # each has its own backward
        zero = config.zero_optimization
        self._groups = RankGroups.of(topology, self.policy, zero.is_hierarchical)
        if zero.zero_quantized_weights or zero.zero_quantized_gradients:
            feedback = None
            if zero.feeds_errors_back:
                feedback = ErrorFeedback(**zero.zeropp_loco_param.model_dump(exclude_none=True))
            self._groups.compress(zero.zero_quantized_weights, zero.zero_quantized_gradients, feedback)
        if topology.expert_spread > 1:  # otherwise each data rank has the same experts, as it has the same layers
            self._groups.spread_experts(RankGroups.of_experts(topology, self.policy, zero.is_hierarchical))
        if config.gradient_allreduce_op == "sum":
            self._groups.take_sums()
        self._observers = Observers()
        self.shared_grads: SharedGradReducer | None = None

    def build(self, choice: OptimizerChoice, param_groups: Groups, trains: bool) -> EngineParts:
        """Make the parts, and install the hooks through which gradients arrive.

        Args:
            choice: the user's optimizer.
            param_groups: its param groups.
            trains: False for an engine without an optimizer.
        """
        model, config = self.model, self.config
        self._make_placements()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        trained, owned = self._choose_parameters(param_groups, trains, names)
        partitioned = self._partition() if self.policy.shard_parameters else None
        self.rules = LayoutRules(config, self._groups, self.precision, self._bucket_kind, partitioned)
        accumulation = self._make_accumulation()
        memory = self._make_gradient_memory(accumulation)
        self._buffer = self._make_buffer(trained, self.rules.layout(trained, names), memory, partitioned)
        synchronize_untrained(model, trained, self.precision, self.topology.data, self.device)
        collector = self._make_collector(trains and not self.topology.trivial)
        self._reducer = Reducer(self._buffer, self._observers)
        if memory.options.reduce_each_backward and memory.options.use_reduce_scatter and self._groups.has_replicas:
            self._observers.add(ReplicaSums(self._groups, self._reducer, accumulation))
        inputs = self._observe_model_ranks() if trains else None
        optimizer = self._make_optimizer(choice, param_groups)
        gatherer = self._make_gatherer()
        pipeline = self._make_pipeline(optimizer, gatherer, accumulation, collector, trains)
        self._end_start_on_disk()
        return EngineParts(
            model=model,
            config=config,
            topology=self.topology,
            groups=self._groups,
            device=self.device,
            precision=self.precision,
            trains=trains,
            owned=owned,
            transfers=self._transfers,
            buffer=self._buffer,
            reducer=self._reducer,
            optimizer=optimizer,
            param_gatherer=gatherer,
            accumulation=accumulation,
            scaler=self._scaler,
            pipeline=pipeline,
            observers=self._observers,
            partitioned=partitioned,
            boundary=self._connect_backward(pipeline, gatherer),
            call=ModuleCall(model),
            note_inputs=None if inputs is None else inputs.note,
        )

    def _make_placements(self) -> None:
        comm = self.topology.data
        self._placements = placements_of(self.config, self.device, self.device_kind, comm)
        self._transfers = Transfers(self._placements)
        if comm.is_rank0:
            warn_of_few_threads(self._placements, os.environ)

    def _end_start_on_disk(self) -> None:
        """Wait until tensors on the disk have their first values. Raises OSError on all ranks if a disk has failed."""
        if self._placements.on_disk:
            error = self._placements.end_start()
            raise_together(self.topology.world, self.device, "errors", error, "zerolite.initialize", OSError)

    def _choose_parameters(
        self, param_groups: Groups, trains: bool, names: dict[int, str]
    ) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
        """Return the parameters to train and those that belong to the engine, in the model's order. names: by id."""
        chosen = {id(p) for group in param_groups for p in group["params"] if p.requires_grad}
        trained = [p for p in self.model.parameters() if id(p) in chosen]
        if trains and not trained:
            raise ValueError(
                "zerolite.initialize: no parameter to train: none of the given parameters requires a gradient"
            )
        owned = trained if trains else list(self.model.parameters())
        check_parameters(owned, names, meta_allowed=self.policy.shard_parameters)
        return trained, owned

    def _bucket_kind(self, parameter: torch.nn.Parameter) -> str:
        """Return the name of the parameters that may share a bucket with ``parameter``."""
        # A tied parameter gets its own bucket, so that all stages that have it divide it in the same way.
        tie = self._ties.get(id(parameter))
        shared = "" if tie is None else f", shared as {tie.key}"
        experts = ", of experts" if is_of_experts(parameter) else ""
        dtypes = f"{self.precision.compute_dtype(parameter)} sent as {self._communication_dtype(parameter)}"
        return f"{dtypes}{shared}{experts}"

    def _observe_model_ranks(self) -> InputComparison | None:
        """Compare the inputs of ranks that are given the same ones, and sum the gradients of parameters that parts of
        the model share. Returns None if all ranks have inputs of their own."""
        topology = self.topology
        copies, others = topology.model.world_size, topology.data
        if self.config.sequence_parallel.inputs == "whole":
            copies, others = copies * topology.sequence.world_size, topology.batch
        if copies == 1:
            return None
        inputs = InputComparison(others, copies, self.device)
        self._observers.add(inputs)
        if not topology.trivial:
            self.shared_grads = SharedGradReducer(topology, self._buffer, self._ties, self._reducer, self.device)
            self._observers.add(self.shared_grads)
        return inputs

    def _partition(self) -> PartitionedModel:
        gathers = self._groups.for_gathers(self.device)
        if self._groups.experts is not None:
            experts = {id(p) for p in self.model.parameters() if is_of_experts(p)}
            on_host = self.config.zero_optimization.offload_param.enabled
            partition_experts(self.model, experts, self._groups.experts, self.device, on_host)
        partitioned = PartitionedModel(
            self.model, self._groups, gathers, self.device, self._placements, self._transfers
        )
        partitioned.plan(stage3_options(self.config, self.model, self._groups.shard.is_rank0))
        return partitioned

    def _make_buffer(
        self,
        trained: list[torch.nn.Parameter],
        layout: PartitionLayout,
        memory: GradientMemory,
        partitioned: PartitionedModel | None,
    ) -> ParameterBuffer:
        """Make the buckets, with the parameters' values: shards at stage 3, each bucket in its placement."""
        placements = self._placements
        if partitioned is None:
            buffer = ParameterBuffer(layout, trained, memory, placements)
        else:
            buffer = PartitionedParameterBuffer(layout, trained, memory, placements)
        fill_buckets(buffer, self.precision, self.topology.data, self.device)
        if partitioned is not None:
            in_layout = {id(p) for p in trained}
            partitioned.place_frozen(in_layout, self.precision.compute_dtype, placements, self.rules.bucket_numel)
        return buffer

    def _make_accumulation(self) -> GradAccumulation:
        of_parts = self.topology.sequence.world_size > 1 and self.config.sequence_parallel.inputs == "whole"
        # Also of parts that are given: attention brings the other ranks' losses to this rank's keys and values.
        of_others = self.topology.sequence.world_size > 1 or self.topology.expert.world_size > 1
        if not self.config.managed_gradient_accumulation:
            return UnmanagedAccumulation(of_parts, of_others)
        micro_batches = self.config.gradient_accumulation_steps or 1
        return GradAccumulation(micro_batches * self._chunks, of_parts, of_others)

    def _make_collector(self, parallel: bool) -> StatsCollector:
        totals = None
        if parallel:
            totals = ModelTotals(self.topology.model, counts_once(self.topology, self._buffer, self._ties))
        collector = StatsCollector(self._groups, self.device, self._observers, totals)
        self._observers.before_offload.append(collector.note)
        return collector

    def _make_gradient_memory(self, accumulation: GradAccumulation) -> GradientMemory:
        placements, ranks = self._placements, self._groups.shard.world_size
        self._communication_dtype = communication_dtypes(self.model, self.config, self.precision, ranks)
        options = reduction_options(
            self.config,
            self.policy,
            self.precision,
            self._groups,
            accumulation.micro_batches > 1 or isinstance(accumulation, UnmanagedAccumulation),
            self._communication_dtype,
            keep_buckets=self.device_kind == "cpu",
            alone=self.topology.world.world_size == 1,
        )
        offloads = None
        if not placements.is_accessible(placements.optimizer, on_host=False):
            offloads = GradientTransfers(placements.device, self._transfers, self._observers)
        return GradientMemory(self._groups, options, Backward(options.copy_factor), offloads)

    def _make_optimizer(self, choice: OptimizerChoice, param_groups: Groups) -> ShardedOptimizer:
        choose = kernel_chooser(self.topology.world, self.device, self._placements.update_devices())
        update_dtype = self.precision.update_dtype
        optimizer = ShardedOptimizer(choice.make, param_groups, self._buffer, update_dtype, choose, choice.undivided)
        check_optimizer(self._placements, self.device_kind, optimizer.inner)
        return optimizer

    def _make_gatherer(self) -> ParamGatherer:
        overlaps = self.config.zero_optimization.overlap_comm is not False
        return ParamGatherer(self._buffer, overlaps, self._observers)

    def _make_pipeline(
        self,
        optimizer: ShardedOptimizer,
        gatherer: ParamGatherer,
        accumulation: GradAccumulation,
        collector: StatsCollector,
        trains: bool,
    ) -> StepPipeline:
        buffer, reducer, method = self._buffer, self._reducer, optimizer.method
        # With many ranks, or with stage 3's small groups, shards are small. One update then takes several of them, so
        # that there are few large calls.
        numel, skips = min(self.rules.bucket_numel, AUTO_BUCKET), self.device_kind in SKIPS_ON_DEVICE
        if skips:
            # Torch's fused kernels decide for themselves, and one rank alone may have states that keep it from them.
            (never,) = largest([int(not method.can_skip_on_device)], self.topology.world, self.device, "kernels")
            method.can_skip_on_device = skips = method.can_skip_on_device and not never  # a dry run reads zeros
        options = step_options(self.config, numel, skips, self.topology)
        self._scaler = loss_scaler(self.config) if trains else None
        state = StepState(accumulation, self._scaler, buffer, method, self._observers, options)
        offload = OffloadUpdate(buffer, method, gatherer, self._transfers)
        update = StepUpdate(buffer, reducer, method, gatherer, offload, state)
        return StepPipeline(reducer, optimizer, update, collector, state)

    def _connect_backward(self, pipeline: StepPipeline, gatherer: ParamGatherer) -> GraphBoundary:
        """Install the hooks through which a backward reaches the pipeline, and return the edge of the model's graph."""
        scales, state, compression = self._scaler is not None, pipeline.state, self._groups.compression
        loss_scale = state.loss_scale if scales else None
        boundary = GraphBoundary(pipeline.begin_backward, loss_scale, self.precision)
        if scales:
            self._observers.on_backward_begin.append(boundary.expect_scale)
        if self.config.zero_optimization.feeds_errors_back:
            # If the device has skipped the last step, the first reduction must not make up for its sums.
            self._observers.before_backward.append(state.settle)
        if scales and compression is not None:
            set_scale = compression.set_scale
            self._observers.on_backward_begin.append(lambda: set_scale(state.loss_scale() / state.weight_unit()))
        self._reducer.hooks.attach(
            pipeline.begin_backward,
            boundary.check_scaled if scales else None,
        )
        gatherer.use_layout()
        return boundary


def start_stage3(parts: EngineParts) -> None:
    """Install the hooks that gather parameters. Called when those of activation checkpointing are installed."""
    if parts.partitioned is None:
        return
    coordinator = parts.partitioned.start(parts)
    parts.observers.on_parameters_updated.append(coordinator.on_update)
    parts.observers.on_gradients_dropped.append(coordinator.end_failed)
    launch_by_groups(parts.partitioned, parts.reducer)
    parts.pipeline.written.use_coordinator(coordinator)
