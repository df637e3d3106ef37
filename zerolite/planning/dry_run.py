"""One rank of a job, run on tensors without memory: the engine as it is, and what it did."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zerolite.accelerator import collector_off, dry_run, is_fake
from zerolite.comm import Recorder, dry_communicator, record, unrecorded, use_communicator
from zerolite.config import ZeroliteConfig
from zerolite.memory_items import ACTIVATIONS, BUFFERS, COMPUTE, DEVICE, HOST, OTHER
from zerolite.planning.failures import explained, refusals
from zerolite.planning.fakes import WithoutMemory, on_the_cpu, without_memory
from zerolite.planning.skeleton import Skeleton
from zerolite.planning.steps import STEP, Batch, Loss, train_one_step
from zerolite.planning.tracker import MADE, Fullest, MemoryTracker
from zerolite.planning.walk import walk_through_parameters
from zerolite.profiling.flop_count import count_flops
from zerolite.runtime.build import Arguments, build_engine, check_model
from zerolite.runtime.engine import Engine

_one_at_a_time = threading.RLock()
"""What a dry run stands in for (the communicator, the listeners to memory) is the process's."""

WARM_UP = 3
"""Steps before the one that is reported: stage 3 records in the first what it follows from the third on."""


@dataclass(frozen=True)
class Job:
    """What is run. config: resolved for ``world_size`` ranks. device: "cuda" or "cpu", whose communicator and habits
    are imitated. shared_memory: on the CPU, whether the ranks are on one host. batch: None runs no forward of the
    model: every parameter is used once, in the order of registration. make_arguments: called when the model has been
    made."""

    make_model: Callable[[], torch.nn.Module]
    config: ZeroliteConfig
    world_size: int
    rank: int = 0
    device: str = "cuda"
    shared_memory: bool = True
    batch: Batch | None = None
    loss: Loss | None = None
    make_arguments: Callable[[], Arguments] = Arguments

    @property
    def communicator(self) -> str:
        if self.device == "cuda":
            return "nccl"
        return "shared_memory" if self.shared_memory else "gloo"


@dataclass
class Outcome:
    """What was seen, in bytes of the device where nothing else is said; see :class:`~zerolite.planning.result.Plan`."""

    model_name: str
    classes: dict[str, str]  # by qualified name of the module
    parameters: int
    trained_parameters: int
    initialize: Fullest
    warm_up: Fullest
    step: Fullest
    largest: dict[str, dict[str, int]]  # by place and item
    at_rest: dict[str, int]
    course: list[tuple[dict[str, int], str, str]]
    recorder: Recorder
    checkpoint: int
    made: int  # of the host: what the model took, before the engine had it
    most_in_host_memory: int  # with the device's, where that is the CPU
    of_peers: int  # in the communicators' memory: what the other ranks of this host have made, and this one maps
    recurrent: bool  # whether the model has layers whose kernels are fused over time
    flops: int | None = None


def run(job: Job, points: int = 1000) -> Outcome:
    """Make the model and the engine, train :data:`WARM_UP` + 1 steps. points: of the course of the last one.

    Raises PlanError where the model needs values or the engine refuses the job, and ConfigError.
    """
    tracker = MemoryTracker(apart=job.device == "cuda")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_one_at_a_time)
        stack.enter_context(_without_warnings())
        stack.enter_context(_as_in_a_loop())
        stack.enter_context(dry_run())
        stack.enter_context(unrecorded())
        stack.enter_context(
            use_communicator(lambda rank, world: dry_communicator(job.communicator, job.rank, job.world_size))
        )
        mode = stack.enter_context(WithoutMemory())
        stack.enter_context(tracker)
        stack.enter_context(tracker.modules.followed())
        gc.collect()  # before and not inside, so that the same run gives the same numbers
        stack.enter_context(collector_off())
        return _Run(job, tracker, mode).outcome(points)


class _Run:
    """Needs the modes that :func:`run` sets."""

    def __init__(self, job: Job, tracker: MemoryTracker, mode: WithoutMemory) -> None:
        self._job, self._tracker, self._mode = job, tracker, mode

    def outcome(self, points: int) -> Outcome:
        tracker = self._tracker
        model = self._make_model()
        made = tracker.items[HOST][MADE]
        tracker.forget_most()
        parameters = _numel(model.parameters())
        engine = self._make_engine(model)
        initialize = tracker.fullest
        tracker.measure_from_here()
        for _ in range(WARM_UP):
            self._step(engine)
        warm_up = tracker.fullest
        tracker.measure_from_here()
        tracker.record()
        with record() as recorder:
            self._step(engine)
        outcome = Outcome(
            model_name=type(model).__name__,
            classes={name: type(module).__name__ for name, module in model.named_modules()},
            parameters=parameters,
            trained_parameters=sum(slot.numel for slot in engine.parts.reducer.layout.slots),
            initialize=initialize,
            warm_up=warm_up,
            step=tracker.fullest,
            largest=tracker.largest,
            at_rest=dict(tracker.items[DEVICE]),
            course=tracker.course(points),
            recorder=recorder,
            checkpoint=engine.checkpointer.nbytes(),
            made=made,
            most_in_host_memory=tracker.most_in_host_memory,
            of_peers=_of_peers(engine),
            recurrent=any(isinstance(module, torch.nn.RNNBase) for module in model.modules()),
        )
        if self._job.batch is not None:
            outcome.flops = self._count_flops(engine, model)
        return outcome

    def _count_flops(self, engine: Engine, model: torch.nn.Module) -> int:
        """Of one more step, without what checkpointing recomputes. Not of one that is measured: counting may keep
        tensors alive."""
        with count_flops(engine, model) as count:
            self._step(engine)
        return count.total.model

    def _make_model(self) -> torch.nn.Module:
        tracker = self._tracker
        tracker.item, tracker.place = (MADE, HOST) if self._job.device == "cuda" else (COMPUTE, DEVICE)
        with explained("the model's constructor"), self._mode.constructing():
            model = self._job.make_model()
        gc.collect()  # what the constructor has left in cycles: torch.load's state dicts
        with refusals():
            check_model(model)
        if not all(is_fake(tensor) for tensor in (*model.parameters(), *model.buffers())):
            model = Skeleton(model).model  # somebody else's: it stays as it is
        on_the_cpu(model)
        if self._job.batch is None:
            walk_through_parameters(model)
        return model

    def _make_engine(self, model: torch.nn.Module) -> Engine:
        tracker, job = self._tracker, self._job
        tracker.item, tracker.place = OTHER, DEVICE
        with refusals():
            engine = build_engine(
                model,
                job.config,
                job.make_arguments(),
                dry_communicator(job.communicator, job.rank, job.world_size),
                torch.device("cpu"),
                job.device,
            )
        tracker.modules.name(model)
        trained = {id(parameter) for parameter in engine.parts.reducer.parameters}
        tracker.claim((p for p in model.parameters() if id(p) not in trained and not hasattr(p, "ds_id")), COMPUTE)
        tracker.claim(model.buffers(), BUFFERS)
        return engine

    def _step(self, engine: Engine) -> None:
        """One window of micro-batches."""
        train_one_step(engine, self._batch, self._job.loss, self._phase)
        self._tracker.modules.forget()

    def _batch(self) -> Any:
        if self._job.batch is None:
            return torch.zeros(())
        return without_memory(self._job.batch())

    @contextlib.contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        tracker = self._tracker
        tracker.phase, tracker.item = phase, OTHER if phase == STEP else ACTIVATIONS
        self._mode.stepping = phase == STEP
        where = "the optimizer's step" if phase == STEP else f"the model's {phase}"
        try:
            with explained(where, tracker.modules.now):
                yield
        finally:
            self._mode.stepping = False


def _of_peers(engine: Engine) -> int:
    comms = {id(comm): comm for comm in (engine.parts.comm, getattr(engine.coordinator, "comm", engine.parts.comm))}
    mapped = sum(tensor.untyped_storage().nbytes() for comm in comms.values() for tensor in comm.memory())
    return mapped * (engine.world_size - 1) // engine.world_size


def _numel(parameters: Any) -> int:
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Of torch's own code about tensors without memory, which a user cannot do anything about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        yield


@contextlib.contextmanager
def _as_in_a_loop() -> Iterator[None]:
    """A loop that trains records gradients, whatever is set where a plan is asked for; and no value is looked at."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        yield
