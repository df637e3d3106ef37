"""Dry run of one rank: the real engine on tensors without memory."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from zerolite.activation_checkpointing.configure import isolated
from zerolite.checkpoint.model_state import ModelState
from zerolite.comm import (
    Recorder,
    Topology,
    dry_communicator,
    dry_topology,
    record,
    unrecorded,
    use_communicator,
    with_replicas,
    with_sequence,
)
from zerolite.config import ZeroliteConfig
from zerolite.data.micro_batch import MicroBatch
from zerolite.engine.arguments import Arguments, check_model
from zerolite.engine.build import build_engine
from zerolite.engine.engine import Engine
from zerolite.engine.engine_base import parts_of
from zerolite.engine.initialize import parallelize_model
from zerolite.engine.special_engines import PipelineEngine
from zerolite.monitor.flops import Flops
from zerolite.planning.clock import Event, Trace
from zerolite.planning.failures import as_plan_error, as_refusal
from zerolite.planning.fake_backend import DryFakeMode, DryPlatform, as_fake, move_meta_to_fake_cpu, one_document_each
from zerolite.planning.result import PlanError
from zerolite.planning.tracker import ORIGINAL_MODEL, MemoryTracker, PeakMoment
from zerolite.planning.traffic import Grid
from zerolite.planning.training_step import (
    STEP,
    MakeBatch,
    micro_batches,
    pipeline_loss_fn,
    train_one_step,
    walk_through_parameters,
)
from zerolite.tensor_parallel.shard_spec import shard_spec_of
from zerolite.utils.accelerator import current_platform, is_fake, use_platform
from zerolite.utils.lazy import collector_off
from zerolite.utils.memory_tags import ACTIVATIONS, BUFFERS, COMPUTE, DEVICE, HOST, OTHER
from zerolite.utils.nested import map_tensors
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.stage3.partitioned_parameter import unpartitioned_numel

if TYPE_CHECKING:
    from zerolite.pipe.dry_stage import DryPipeline
    from zerolite.pipe.prepare import PreparedStage

_one_at_a_time = threading.RLock()
"""Lock of the dry run in progress, which replaces the communicator and the memory listeners of the process."""

WARM_UP = 3
"""Steps before the reported one. Stage 3 records the execution order in the first step and uses it from the third step
on. The other stages record number and order of gradients in the first two."""


@dataclass(frozen=True)
class Job:
    """Inputs of a dry run.

    Attributes:
        make_model: makes the model; called where tensors have no memory.
        config: resolved for ``grid.data`` ranks. Its tensor_parallel and pipeline blocks apply if the grid has several
            ranks in that dimension.
        grid: all ranks of the job.
        rank: the simulated rank, among all.
        device: "cuda" or "cpu": the simulated kind of device and of its communicator.
        nodes: number of hosts; None: unknown, and one for the communicator.
        batch: makes one micro-batch. With None no forward runs, and every parameter is used once, in the order of
            registration.
        loss: function of the outputs, or of outputs and targets.
    """

    make_model: Callable[[], torch.nn.Module]
    config: ZeroliteConfig
    grid: Grid
    rank: int = 0
    device: str = "cuda"
    nodes: int | None = None
    batch: MakeBatch | None = None
    loss: Callable[..., torch.Tensor] | None = None

    @property
    def warm_up(self) -> int:
        """Steps before the reported one."""
        return WARM_UP if self.config.zero_optimization.stage == 3 else WARM_UP - 1

    @property
    def world_size(self) -> int:
        return self.grid.world_size

    @property
    def stage(self) -> int:
        """Pipeline stage of the rank, from 0."""
        return self.grid.coordinates(self.rank)[0]

    def at_stage(self, stage: int) -> Job:
        """Return the job of the rank with the same data and tensor coordinates in another pipeline stage."""
        _, data, tensor = self.grid.coordinates(self.rank)
        return replace(self, rank=self.grid.rank(stage, data, tensor))

    @property
    def communicator(self) -> str:
        if self.device == "cuda":
            return "nccl"
        return "shared_memory" if self.nodes in (None, 1) else "gloo"

    def topology(self) -> Topology:
        device, shard = torch.device(self.device), self.config.zero_optimization.ranks_of_shards
        made = dry_topology(self.communicator, self.rank, self.world_size, self.grid.pipe, self.grid.tensor)
        made = with_sequence(made, device, self.config.sequence_parallel.size)
        return made if shard is None else with_replicas(made, device, shard)


@dataclass
class Outcome:
    """Observations of a dry run, for :class:`~zerolite.planning.result.Plan`. Sizes in bytes, on the device unless
    noted.

    Attributes:
        model_name: class of the model.
        classes: class of each module, by qualified name.
        parameters: elements of the full parameters of this rank's pipeline stage.
        trained_parameters: elements of its trained parameters.
        tied_parameters: elements of its parameters that an earlier stage has too, and counts.
        rank_parameters: elements on this rank.
        initialize: peak while the engine is made.
        warm_up: peak of the steps before the reported one.
        step: peak of the reported step.
        largest: largest bytes of each item within that step, by location and item.
        at_rest: bytes of each item after that step.
        timeline: see :meth:`MemoryTracker.timeline`.
        recorder: collectives of that step.
        events: what the engine did in the step before and in that step, for :func:`~zerolite.planning.clock.step_time`.
        host_waits: number of reads for which the host waits in the step that begins them.
        checkpoint: bytes that this rank writes.
        original_model: host memory of the model before the engine takes it over.
        host_peak: peak of host memory, with the device's if that is the CPU.
        recurrent: the model has recurrent layers, whose kernels on devices are fused over time.
        flops: FLOPs of that step; None without a batch.
    """

    model_name: str
    classes: dict[str, str]
    parameters: int
    trained_parameters: int
    tied_parameters: int
    rank_parameters: int
    initialize: PeakMoment
    warm_up: PeakMoment
    step: PeakMoment
    largest: dict[str, dict[str, int]]
    at_rest: dict[str, int]
    timeline: list[tuple[dict[str, int], str, str]]
    recorder: Recorder
    events: list[list[Event]]
    host_waits: int
    checkpoint: int
    original_model: int
    host_peak: int
    recurrent: bool
    flops: Flops | None


def run_stages(job: Job) -> dict[int, Outcome]:
    """Return the outcome of :func:`run` for a rank of each pipeline stage, by stage; without a pipeline that of 0."""
    if job.grid.pipe == 1:
        return {0: run(job)}
    from zerolite.pipe.dry_stage import DryPipeline  # only where there is a pipeline

    dry_pipeline = DryPipeline()
    if job.batch is not None and job.config.pipeline.chunks_per_rank > 1:
        _learn_boundaries(job, dry_pipeline)  # otherwise a stage finds what the one before it has passed
    return {stage: run(job.at_stage(stage), dry_pipeline) for stage in range(job.grid.pipe)}


def run(job: Job, dry_pipeline: DryPipeline | None = None) -> Outcome:
    """Make the model and the engine, and train ``job.warm_up`` + 1 steps.

    Args:
        job: the inputs.
        dry_pipeline: state that the stages of a pipeline share; None without a pipeline.

    Raises:
        PlanError: the model needs values, or the engine refuses the job.
        ConfigError: for the config.
    """
    tracker = MemoryTracker(separate_memory=job.device == "cuda")
    with _simulated_rank(job, dry_pipeline) as mode, tracker, tracker.modules.followed(), older_objects_frozen():
        with collector_off():  # the collector would free cycles at another moment in each run
            return _DryRun(job, tracker, mode, dry_pipeline).outcome()


_freezing = False  # an outer older_objects_frozen has called gc.freeze


@contextlib.contextmanager
def older_objects_frozen() -> Iterator[None]:
    """Context whose garbage collections skip all older objects: with torch's own each would take half a second."""
    global _freezing
    inner, frozen = _freezing, not _freezing and gc.get_freeze_count() > 0  # frozen by a caller
    gc.collect()
    if not frozen:
        gc.freeze()
    _freezing = not frozen
    try:
        yield
    finally:
        _freezing = inner
        if not (inner or frozen):
            gc.unfreeze()


@contextlib.contextmanager
def _simulated_rank(job: Job, dry_pipeline: DryPipeline | None) -> Iterator[DryFakeMode]:
    """Context in which this process simulates ``job.rank``.

    Autograd is on as in a training loop, whatever the caller's modes are. Anomaly detection is off: it reads values.
    """
    with (
        _one_at_a_time,
        warnings.catch_warnings(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.set_detect_anomaly(False),
        use_platform(DryPlatform(job.device)),
        isolated(),
        unrecorded(),
        contextlib.nullcontext() if dry_pipeline is None else dry_pipeline.running(),
        use_communicator(lambda rank, world: dry_communicator(job.communicator, job.rank, job.world_size)),
        DryFakeMode() as mode,
    ):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)  # by torch's code
        yield mode


def _learn_boundaries(job: Job, dry_pipeline: DryPipeline) -> None:
    """Find the tensors that each part of the pipeline passes to the next, by one forward of every part, in order."""
    from zerolite.pipe.dry_stage import learn_boundaries

    with _simulated_rank(job, dry_pipeline) as mode:
        engines: list[PipelineEngine] = []
        batches: Iterator[Any] = iter(())
        for stage in range(job.grid.pipe):
            dry_run = _DryRun(job.at_stage(stage), MemoryTracker(), mode, dry_pipeline)
            engine = dry_run.make_engine(dry_run.make_model())
            batches = micro_batches(engine, dry_run.batch)
            assert isinstance(engine, PipelineEngine)
            engines.append(engine)
        with as_plan_error("the model's forward"):
            learn_boundaries([engine.runner for engine in engines], batches)


class _DryRun:
    """One dry run, inside :func:`_simulated_rank`.

    Args:
        job: its inputs.
        tracker: counts memory, if it is active.
        mode: the active FakeTensorMode.
        dry_pipeline: boundaries between pipeline stages; None without a pipeline.
    """

    def __init__(self, job: Job, tracker: MemoryTracker, mode: DryFakeMode, dry_pipeline: DryPipeline | None) -> None:
        self._job, self._tracker, self._mode = job, tracker, mode
        platform = current_platform()
        assert isinstance(platform, DryPlatform)
        self._platform = platform
        self._staged: PreparedStage | None = None
        if dry_pipeline is not None:
            dry_pipeline.set_phase(self._phase)

    def outcome(self) -> Outcome:
        tracker = self._tracker
        model = self.make_model()
        original_model = tracker.items[HOST][ORIGINAL_MODEL]
        tracker.reset_host_peak()
        engine = self.make_engine(model)
        self._prepare_chunks(engine)
        initialize = tracker.peak
        tracker.reset_peak()
        for _ in range(self._job.warm_up - 1):
            self._step(engine)
        # At stage 3 no parameter need be hidden: gathers in flight are waited for as in a real run.
        overlaps = parts_of(engine).param_gatherer.overlaps and self._job.config.zero_optimization.stage < 3
        trace = Trace(tracker, self._platform, overlaps)
        parts = parts_of(engine)  # they live as long as the engine, and must not hold it
        parts.observers.on_update_begin.append(lambda: trace.on_update(_bytes_of_update(parts.buffer)))
        with record(trace), _uses_noted(engine, trace) if overlaps else contextlib.nullcontext():
            trace.begin_step()
            self._step(engine)
            warm_up = tracker.peak
            tracker.reset_peak()
            tracker.record()
            self._platform.reset_host_waits()
            trace.begin_step()
            with record() as recorder:
                self._step(engine)
            trace.end_step()
        later = [] if self._staged is None else [tie for tie in self._staged.ties if tie.ranks[0] != self._job.stage]
        return Outcome(
            model_name=type(model).__name__,
            classes={name: type(module).__name__ for name, module in model.named_modules()},
            parameters=sum(map(_unsharded_numel, model.parameters())),
            trained_parameters=sum(map(_unsharded_numel, parts_of(engine).reducer.parameters)),
            tied_parameters=sum(_unsharded_numel(tie.parameter) for tie in later),
            rank_parameters=sum(map(unpartitioned_numel, model.parameters())),
            initialize=initialize,
            warm_up=warm_up,
            step=tracker.peak,
            largest=tracker.largest,
            at_rest=dict(tracker.items[DEVICE]),
            timeline=tracker.timeline(),
            recorder=recorder,
            events=trace.steps,
            host_waits=self._platform.host_waits,
            checkpoint=ModelState(parts_of(engine)).nbytes(),
            original_model=original_model,
            host_peak=tracker.host_peak,
            recurrent=any(isinstance(module, torch.nn.RNNBase) for module in model.modules()),
            flops=None if self._job.batch is None else tracker.flops,
        )

    def make_model(self) -> torch.nn.Module:
        tracker = self._tracker
        if self._job.device == "cuda":
            tracker.tag_new(ORIGINAL_MODEL, HOST)
        else:
            tracker.tag_new(COMPUTE)
        with as_plan_error("the model's constructor"), self._mode.constructing():
            model = self._job.make_model()
        gc.collect()  # the constructor may leave tensors in cycles, such as torch.load's state dicts
        with as_refusal():
            check_model(model)
        if not getattr(model, "is_pipeline_module", False) or model.built:  # otherwise only this stage is built, later
            if not all(map(is_fake, model.parameters())):
                raise PlanError(
                    "expected a function that makes the model, where tensors have no memory, got one that returns a "
                    "model made before; make it inside the function"
                )
            move_meta_to_fake_cpu(model)
        return model

    def make_engine(self, model: torch.nn.Module) -> Engine:
        tracker, job = self._tracker, self._job
        topology, device = job.topology(), torch.device("cpu")
        loss_fn = pipeline_loss_fn(model, job.grid.pipe, job.loss)
        with as_refusal():
            with self._mode.constructing():
                self._staged, loss_fn = parallelize_model(model, job.config, topology, device, loss_fn)
            staged = self._staged
            if job.batch is None:
                # The hooks of a pipeline stage raise if it is called directly, as the walk below does.
                for module in () if staged is None else model.modules():
                    module._forward_pre_hooks.clear()
                    module._forward_hooks.clear()
                walk_through_parameters(model)
                staged = loss_fn = None  # without activations stages send nothing
            tracker.tag_new(OTHER)
            arguments = Arguments(loss_fn=loss_fn)
            engine = build_engine(model, job.config, arguments, topology, device, job.device, staged)
        tracker.modules.name(model)
        trained = {id(parameter) for parameter in parts_of(engine).reducer.parameters}
        tracker.claim((p for p in model.parameters() if id(p) not in trained and not hasattr(p, "ds_id")), COMPUTE)
        tracker.claim(model.buffers(), BUFFERS)
        return engine

    def _prepare_chunks(self, engine: Engine) -> None:
        """Prepare the pipeline's parts for the shapes of the micro-batches. A real job does this without memory."""
        if not isinstance(engine, PipelineEngine) or self._staged is None:
            return
        with as_plan_error("the model's forward"), self._tracker.without_peaks():
            first = MicroBatch.of(next(micro_batches(engine, self.batch)), engine.loss_fn, engine.device)
            for chunk in self._staged.chunks:
                chunk.prepare(first)

    def _step(self, engine: Engine) -> None:
        """Train one step: all micro-batches of an accumulation, and the update."""
        named = as_plan_error("the pipeline") if isinstance(engine, PipelineEngine) else contextlib.nullcontext()
        with one_document_each(), named:
            train_one_step(engine, self.batch, self._job.loss, self._phase)
        self._tracker.modules.forget()
        self._platform.end_step()

    def batch(self) -> Any:
        if self._job.batch is None:
            return torch.zeros(())
        return map_tensors(as_fake, self._job.batch())

    @contextlib.contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        self._tracker.tag_new(OTHER if phase == STEP else ACTIVATIONS, phase=phase)
        where = "the optimizer's step" if phase == STEP else f"the model's {phase}"
        with self._mode.phase(phase == STEP), as_plan_error(where, self._tracker.modules.now):
            yield


@contextlib.contextmanager
def _uses_noted(engine: Engine, trace: Trace) -> Iterator[None]:
    """Context in which every module that is called tells ``trace`` that the buckets of its parameters are used."""
    buckets = parts_of(engine).buffer.buckets
    key_of = {id(parameter): bucket.index + 1 for bucket in buckets for parameter in bucket.parameters}

    def before(module: torch.nn.Module, args: Any) -> None:
        for key in dict.fromkeys(key_of.get(id(parameter), 0) for parameter in module._parameters.values()):
            trace.on_use(key)

    handle = register_module_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


def _bytes_of_update(buffer: ParameterBuffer) -> int:
    """Return the bytes that an update on the device reads and writes: masters and states both, mean gradients are read
    for the norm and for the update, and compute parameters are written."""
    nbytes = 0
    for bucket in buffer.buckets:
        if not (bucket.updates_on_host or bucket.is_offloaded):
            changed = sum(tensor.nbytes for tensor in (bucket.master, *bucket.states.values()))
            gradient = bucket.master.numel() * bucket.dtypes.mean[0].itemsize
            nbytes += 2 * changed + 2 * gradient + (bucket.owned.nbytes if bucket.separate else 0)
    return nbytes


def _unsharded_numel(parameter: torch.nn.Parameter) -> int:
    """Return the number of elements of the tensor without tensor parallelism."""
    spec = shard_spec_of(parameter)
    return unpartitioned_numel(parameter) if spec is None else spec.full_numel
