"""Dry run of one rank: the real engine on tensors without memory."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from zerolite.activation_checkpointing.configure import isolated
from zerolite.comm import (
    Communicator,
    Recorder,
    Topology,
    dry_communicator,
    record,
    unrecorded,
    use_communicator,
)
from zerolite.config import ZeroliteConfig
from zerolite.engine.arguments import Arguments, check_model
from zerolite.engine.build import build_engine
from zerolite.engine.engine import Engine
from zerolite.engine.engine_base import parts_of
from zerolite.engine.initialize import form_grid, parallelize_model
from zerolite.planning.clock import Event, Trace
from zerolite.planning.failures import as_plan_error, as_refusal
from zerolite.planning.fake_backend import DryFakeMode, DryPlatform, as_fake, move_meta_to_fake_cpu, one_document_each
from zerolite.planning.result import AT_REST, Peak, PlanError
from zerolite.planning.tracker import ORIGINAL_MODEL, MemoryTracker
from zerolite.planning.traffic import Grid, summarize
from zerolite.planning.training_step import (
    STEP,
    MakeBatch,
    loss_with_targets,
    train_one_step,
    walk_through_parameters,
)
from zerolite.tensor_parallel.shard_spec import shard_spec_of
from zerolite.utils.accelerator import current_platform, is_fake, use_platform
from zerolite.utils.lazy import collector_off
from zerolite.utils.memory_tags import ACTIVATIONS, BUFFERS, COMPUTE, DEVICE, DISK, HOST, ITEMS, OTHER
from zerolite.utils.nested import map_tensors
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.engine_parts import EngineParts
from zerolite.zero.inner_tensors import inner_tensors
from zerolite.zero.stage3.partitioned_parameter import unpartitioned_numel

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
        config: resolved for the ranks of the grid that have samples of their own.
        world_size: number of all ranks.
        rank: the simulated rank, among all.
        device: "cuda" or "cpu": the simulated kind of device and of its communicator.
        nodes: number of nodes; None: unknown, and one for the communicator.
        batch: makes one micro-batch. With None no forward runs, and every parameter is used once, in the order of
            registration.
        loss: function of the outputs, or of outputs and targets.
    """

    make_model: Callable[[], torch.nn.Module]
    config: ZeroliteConfig
    world_size: int
    rank: int = 0
    device: str = "cuda"
    nodes: int | None = None
    batch: MakeBatch | None = None
    loss: Callable[..., torch.Tensor] | None = None

    @property
    def warm_up(self) -> int:
        """Steps before the reported one."""
        return WARM_UP if self.config.zero_optimization.stage == 3 else WARM_UP - 1

    def topology(self) -> Topology:
        return dry_grid(self.config, self.rank, self.world_size, self.device, self.nodes)


def dry_grid(config: ZeroliteConfig, rank: int, world_size: int, device: str, nodes: int | None) -> Topology:
    """Return the grid of a job, of communicators that send nothing. Raises ConfigError if the ranks cannot form it.

    Args:
        device: "cuda" or "cpu".
        nodes: number of nodes; None: unknown.
    """
    host = None if nodes is None else world_size // nodes
    return form_grid(config, _communicator(device, nodes, rank, world_size), torch.device(device), host)


def _communicator(device: str, nodes: int | None, rank: int, world_size: int) -> Communicator:
    """Return a communicator of the kind that a job on these devices has."""
    kind = "nccl" if device == "cuda" else "shared_memory" if nodes in (None, 1) else "gloo"
    return dry_communicator(kind, rank, world_size)


def run(job: Job) -> DryRun:
    """Make the model and the engine, train ``job.warm_up`` + 1 steps, and return what was seen.

    Raises:
        PlanError: the model needs values, or the engine refuses the job.
        ConfigError: for the config.
    """
    tracker = MemoryTracker(separate_memory=job.device == "cuda")
    with _simulated_rank(job) as mode, tracker, tracker.modules.followed(), older_objects_frozen():
        with collector_off():  # the collector would free cycles at another moment in each run
            dry_run = DryRun(job, tracker, mode)
            dry_run.train()
            return dry_run


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
def _simulated_rank(job: Job) -> Iterator[DryFakeMode]:
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
        use_communicator(lambda rank, world: _communicator(job.device, job.nodes, job.rank, job.world_size)),
        DryFakeMode() as mode,
    ):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)  # by torch's code
        yield mode


class DryRun:
    """One dry run, inside :func:`_simulated_rank`. Sizes in bytes, on the device unless noted.

    Attributes:
        job: its inputs.
        grid: the ranks.
        fields: fields of :class:`~zerolite.planning.result.Plan`.
        recorder: collectives of the reported step.
        events: what the engine did in the step before and in that step, for :func:`~zerolite.planning.clock.step_time`.
        original_model: host memory of the model before the engine takes it over.
        recurrent: the model has recurrent layers, whose kernels on devices are fused over time.
        unknown: operators without a known number of operations.
    """

    def __init__(self, job: Job, tracker: MemoryTracker, mode: DryFakeMode) -> None:
        """
        Args:
            job: its inputs.
            tracker: counts memory.
            mode: the active FakeTensorMode.
        """
        self.job, self._tracker, self._mode = job, tracker, mode
        self._topology = job.topology()
        self.grid = Grid.of(self._topology)
        self.fields: dict[str, Any] = {}
        self.original_model = 0
        self.recorder, self.recurrent, self.unknown = Recorder(), False, set[str]()
        self.events: list[list[Event]] = []
        platform = current_platform()
        assert isinstance(platform, DryPlatform)
        self._platform = platform

    def train(self) -> None:
        """Make the model and its engine, train, and note what is seen."""
        tracker = self._tracker
        model = self.make_model()
        self.original_model = tracker.items[HOST][ORIGINAL_MODEL]
        tracker.reset_host_peak()
        engine = self.make_engine(model)
        peaks = [tracker.peak]
        tracker.reset_peak()
        for _ in range(self.job.warm_up - 1):
            self._step(engine)
        # At stage 3 no parameter need be hidden: gathers in flight are waited for as in a real run.
        parts = parts_of(engine)  # they live as long as the engine, and must not hold it
        overlaps = parts.param_gatherer.overlaps and self.job.config.zero_optimization.stage < 3
        trace = Trace(tracker, self._platform, overlaps)
        parts.observers.on_update_begin.append(lambda: trace.on_update(_bytes_of_update(parts.buffer)))
        with record(trace), _uses_noted(engine, trace) if overlaps else contextlib.nullcontext():
            trace.begin_step()
            self._step(engine)
            peaks.append(tracker.peak)
            tracker.reset_peak()
            tracker.record()
            self._platform.reset_host_waits()
            trace.begin_step()
            with record(self.recorder):
                self._step(engine)
            trace.end_step()
        parts.param_gatherer.wait_all()  # memory at rest is that of a job whose parameters have arrived
        self.events = trace.steps
        self._note_parameters(model, parts)
        self._note_memory([*peaks, tracker.peak], {name: type(m).__name__ for name, m in model.named_modules()})
        self.fields["traffic"] = summarize(self.recorder.calls, self.grid, self.job.nodes)
        self.fields["host_waits"] = self._platform.host_waits if self.job.device == "cuda" else 0
        if self.job.batch is not None and tracker.flops is not None:
            flops = tracker.flops
            self.fields |= {"flops": flops.model, "recomputed_flops": flops.recomputed}
            self.unknown = flops.unknown

    def _note_parameters(self, model: torch.nn.Module, parts: EngineParts) -> None:
        self.recurrent = any(isinstance(module, torch.nn.RNNBase) for module in model.modules())
        self.fields |= {
            "model": type(model).__name__,
            "parameters": sum(map(_unsharded_numel, model.parameters())),
            "trained_parameters": sum(map(_unsharded_numel, parts.reducer.parameters)),
        }

    def _note_memory(self, moments: list[Peak], classes: dict[str, str]) -> None:
        """Note the memory of the reported step, and the peaks while the engine is made, before that step, and in it."""
        tracker, largest = self._tracker, self._tracker.largest
        peaks = [replace(peak, module_class=classes.get(peak.module, "")) for peak in moments]
        items = {place: {item: held[item] for item in ITEMS} for place, held in largest.items()}
        self.fields |= {
            "states": dict.fromkeys(ITEMS, 0) | {item: items[DEVICE][item] for item in AT_REST},
            "at_rest": {item: tracker.items[DEVICE][item] for item in ITEMS},
            "peak": max(peaks, key=lambda peak: peak.bytes),
            "initialize_peak": peaks[0],
            "step_peak": peaks[2],
            "timeline": tracker.timeline(),
            **{place: items[place] if any(items[place].values()) else None for place in (HOST, DISK)},
            "host_peak": tracker.host_peak,
        }

    def make_model(self) -> torch.nn.Module:
        tracker = self._tracker
        if self.job.device == "cuda":
            tracker.tag_new(ORIGINAL_MODEL, HOST)
        else:
            tracker.tag_new(COMPUTE)
        with as_plan_error("the model's constructor"), self._mode.constructing():
            model = self.job.make_model()
        gc.collect()  # the constructor may leave tensors in cycles, such as torch.load's state dicts
        with as_refusal():
            check_model(model)
        if not all(is_fake(inner) for parameter in model.parameters() for inner in inner_tensors(parameter)):
            raise PlanError(
                "expected a function that makes the model, where tensors have no memory, got one that returns a model "
                "made before; make it inside the function"
            )
        move_meta_to_fake_cpu(model)
        return model

    def make_engine(self, model: torch.nn.Module) -> Engine:
        tracker, job = self._tracker, self.job
        topology, device = self._topology, torch.device("cpu")
        loss_fn = loss_with_targets(job.loss)
        with as_refusal():
            with self._mode.constructing():
                _, loss_fn = parallelize_model(model, job.config, topology, device, loss_fn)
            if job.batch is None:
                walk_through_parameters(model)
                loss_fn = None
            tracker.tag_new(OTHER)
            engine = build_engine(model, job.config, Arguments(loss_fn=loss_fn), topology, device, job.device)
        tracker.modules.name(model)
        trained = {id(parameter) for parameter in parts_of(engine).reducer.parameters}
        tracker.claim((p for p in model.parameters() if id(p) not in trained and not hasattr(p, "ds_id")), COMPUTE)
        tracker.claim(model.buffers(), BUFFERS)
        return engine

    def _step(self, engine: Engine) -> None:
        """Train one step: all micro-batches of an accumulation, and the update."""
        with one_document_each():
            train_one_step(engine, self.batch, self.job.loss, self._phase)
        self._tracker.modules.forget()
        self._platform.end_step()

    def batch(self) -> Any:
        if self.job.batch is None:
            return torch.zeros(())
        return map_tensors(as_fake, self.job.batch())

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
