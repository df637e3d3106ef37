"""When reductions are launched and waited for, seen from one rank of many that sends nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.null_communicator import NullCommunicator
from zerolite.comm import Communicator, Pending, communicator, create_topology, done, record, use_communicator
from zerolite.comm.gloo import GlooCommunicator
from zerolite.comm.shared_memory import SharedMemoryCommunicator
from zerolite.comm.transport import DryTransport
from zerolite.config import load_config
from zerolite.engine.arguments import Arguments
from zerolite.engine.build import build_engine
from zerolite.utils.accelerator import Platform, use_platform
from zerolite.zero import bucket as bucket_module
from zerolite.zero import compression as compression_module
from zerolite.zero.compression import Compression, ErrorFeedback
from zerolite.zero.groups import TwoHops
from zerolite.zero.local_sum import LocalSum

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("without_ranks")
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


class Logged(Pending):
    """Notes when it is waited for."""

    def __init__(self, inner: Pending, log: list[tuple[str, int]], bucket: int) -> None:
        super().__init__((), inner.memory(), inner.wait)
        self.log, self.bucket = log, bucket

    def wait(self) -> torch.Tensor:
        if self._finish is not None:
            self.log.append(("wait", self.bucket))
        return super().wait()


class Simulated(NullCommunicator):
    """Notes which bucket of gradients is launched, and waited for, in ``log``."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.log: list[tuple[str, int]] = []

    def all_reduce(self, tensor: torch.Tensor, tag: str, divisor: float = 1.0, key: int = 0) -> Pending:
        pending = super().all_reduce(tensor, tag, divisor, key)
        return self._logged(pending, tag, key)

    def reduce_scatter(
        self, full: torch.Tensor, tag: str, divisor: float = 1.0, dtype: torch.dtype | None = None, key: int = 0
    ) -> Pending:
        pending = super().reduce_scatter(full, tag, divisor, dtype, key)
        return self._logged(pending, tag, key)

    def _logged(self, pending: Pending, tag: str, key: int) -> Pending:
        if tag != "gradients":
            return pending
        self.log.append(("launch", key - 1))
        return Logged(pending, self.log, key - 1)

    def launched(self) -> list[int]:
        return [bucket for event, bucket in self.log if event == "launch"]


def make_engine(comm: Communicator, model: nn.Module, stage: int, sets: int = 1, **config: Any) -> Any:
    zero = {"stage": stage, "reduce_bucket_size": 64, "stage3_param_persistence_threshold": 0}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "consistency_check_interval": 0,
        "zero_optimization": {**zero, **config.pop("zero", {})},
        **config,
    }
    with use_communicator(lambda rank, world: comm):
        resolved = load_config(settings).resolve(comm.world_size)
        topology = create_topology(comm, CPU)
        if sets > 1:
            shard, replicate = NullCommunicator(0, comm.world_size // sets), NullCommunicator(0, sets)
            topology = dataclasses.replace(topology, shard=shard, replicate=replicate.serve("replicate", True))
        return build_engine(model, resolved, Arguments(), topology, CPU)


def train(engine: Any, steps: int = 1) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()


def stack(layers: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(layers)))  # a bucket for each


@pytest.mark.parametrize(
    "stage, world, config, sent",
    [
        *((stage, 64, BF16, torch.float32) for stage in range(4)),
        (2, 63, BF16, torch.bfloat16),
        (2, 64, {**BF16, "communication_data_type": "bf16"}, torch.bfloat16),
        (2, 64, {"fp16": {"enabled": True}}, torch.float16),
    ],
)
def test_bf16_gradients_travel_in_fp32_from_64_ranks_on(stage: int, world: int, config: Any, sent: torch.dtype) -> None:
    engine = make_engine(Simulated(3, world), stack(2), stage, **config)
    with record() as recorder:
        train(engine)
    assert {call.dtype for call in recorder.select(tag="gradients")} == {sent}


@pytest.mark.parametrize("stage, micros, flying", [(0, 1, 8), (0, 2, 8), (1, 2, 8), (1, 1, 2), (2, 1, 2), (3, 1, 2)])
def test_a_reduction_waits_for_another_only_where_its_memory_is_needed(stage: int, micros: int, flying: int) -> None:
    comm = Simulated(0, 4)
    zero = {"stage3_module_granularity_threshold": 0}
    engine = make_engine(comm, stack(), stage, gradient_accumulation_steps=micros, zero=zero)
    for _ in range(3):
        comm.log.clear()
        train(engine, micros)
        counts = list(itertools.accumulate(1 if event == "launch" else -1 for event, _ in comm.log))
        assert len(comm.launched()) == 8 and max(counts) == flying and counts[-1] == 0


def test_a_bucket_that_is_under_way_is_reduced_again_only_when_it_has_arrived() -> None:
    comm = Simulated(0, 4)
    engine = make_engine(comm, stack(1), 2, gradient_accumulation_steps=3)
    train(engine, 3)
    assert comm.log == [("launch", 0), ("wait", 0)] * 3


class Numbered(DryTransport):
    """Notes the tags of the messages that are sent."""

    def __init__(self) -> None:
        super().__init__(0, 4)
        self.numbers: list[int] = []

    def send(self, tensor: torch.Tensor, target: int, number: int) -> Any:
        self.numbers.append(number)
        return super().send(tensor, target, number)


def test_messages_do_not_depend_on_when_a_rank_waits_for_its_all_reduces() -> None:
    early, late = Numbered(), Numbered()
    comm = GlooCommunicator(early)
    for _ in range(3):
        comm.all_reduce(torch.ones(8), "gradients").wait()
    comm = GlooCommunicator(late)
    pending = [comm.all_reduce(torch.ones(8), "gradients") for _ in range(3)]
    assert len(late.numbers) == 5 * 3, "a gather follows when the next all-reduce is launched"
    for one in reversed(pending):
        one.wait()
    assert late.numbers == early.numbers and len(set(early.numbers)) == 6


class Unordered(nn.Module):
    """Layers that are registered in another order than the one in which they are used, as in a UNet."""

    def __init__(self, used: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in used)
        self.used = used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.used:
            x = self.layers[index](x)
        return x


UP_AND_DOWN = [7, 6, 5, 4, 0, 1, 2, 3]  # buckets are numbered from the last layer: layer 7's, the last, is 0


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_order_of_launches_follows_the_gradients(stage: int, accumulation: int) -> None:
    comm = Simulated(0, 4)
    model = Unordered(UP_AND_DOWN)
    engine = make_engine(comm, model, stage, gradient_accumulation_steps=accumulation)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: comm.log.append(("gradient", 0)))
    train(engine, accumulation)
    assert comm.launched()[:8] == list(range(8))
    for _ in range(2):
        comm.log.clear()
        with record() as recorder:
            train(engine, accumulation)
        assert comm.launched()[-8:] == [4, 5, 6, 7, 3, 2, 1, 0]
        reducing = comm.log if stage == 2 else comm.log[8 * (accumulation - 1) :]
        assert reducing.index(("launch", 4)) == 1, "the first one follows the first gradient"
        assert recorder.count("all_reduce", "stats") == 1, "nothing is agreed on any more"


def test_what_rank_0_does_not_use_is_reduced_last() -> None:
    comm = Simulated(0, 4)
    model = Unordered([0, 1, 2, 4, 5, 6])
    model.layers.extend(nn.Linear(8, 8, bias=False) for _ in range(2))
    train(make_engine(comm, model, 2), 2)
    assert comm.launched() == [*range(8), 1, 2, 3, 5, 6, 7, 0, 4]


# -------------------------------------------------------------------- no memory in the middle


def no_memory(patch: pytest.MonkeyPatch, owner: Any, name: str, at: int = 0) -> None:
    """Let a method raise once, at its call number ``at``, as an allocation in it may."""
    method, calls = getattr(owner, name), itertools.count()

    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise torch.OutOfMemoryError("no memory")
        return method(*args, **kwargs)

    patch.setattr(owner, name, fail)


def cut_short(engine: Any) -> None:
    """Run a backward that raises, and go on as the next call of the engine does."""
    with pytest.raises(torch.OutOfMemoryError):
        engine.backward(engine(torch.ones(2, 8)).sum())
    engine._parts.pipeline.wait_for_reductions()


def mean_gradients(engine: Any) -> list[torch.Tensor]:
    return [bucket.mean() for bucket in engine._parts.buffer.buckets]


@pytest.mark.parametrize("divides", [{}, {"gradient_predivide_factor": 3.0}])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_launch_that_raises_is_made_again_with_its_gradients(
    stage: int, divides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for fails in (False, True):
        torch.manual_seed(1)
        comm = Simulated(0, 4)
        engine = make_engine(comm, stack(), stage, zero={"overlap_comm": False}, **BF16, **divides)
        if fails:
            no_memory(monkeypatch, comm, "_reduce_scatter" if stage else "_all_reduce", at=3)
            cut_short(engine)
        else:
            engine.backward(engine(torch.ones(2, 8)).sum())
        found.append(mean_gradients(engine))
    assert len(found[0]) == 8 and all(map(torch.equal, *found))


def late_gradients(stage: int, fails: Callable[[], None] | None) -> tuple[list[Any], list[torch.Tensor]]:
    """Train one backward in which the last layer gets a second gradient behind its launch. Return the launches, and
    the mean gradients."""
    torch.manual_seed(1)
    comm, model = Simulated(0, 4), stack(3)

    def bring_more(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            (model[2].weight * 0.37).sum().backward()

    engine = make_engine(comm, model, stage, **BF16)
    model[0].register_forward_hook(lambda module, args, output: output.register_hook(bring_more) and None)
    with record() as recorder:
        if fails is None:
            engine.backward(engine(torch.ones(2, 8)).sum())
        else:
            fails()
            cut_short(engine)
        engine._parts.pipeline.wait_for_reductions()
    assert recorder.count("all_reduce", "stats") == 1, "the ranks agree once"
    return comm.launched(), mean_gradients(engine)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("name", "at"), [("finish", 2), ("complete", 3), ("finish", 3)])
def test_late_reductions_go_on_where_they_have_raised(
    stage: int, name: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the wait before the ranks agree on late gradients, in the second launch, and in the wait for that."""
    launched, expected = late_gradients(stage, None)
    assert launched == [0, 1, 2, 0]
    found = late_gradients(stage, lambda: no_memory(monkeypatch, LocalSum, name, at))
    assert found[0] == launched and all(map(torch.equal, found[1], expected))
    assert {gradient.dtype for gradient in found[1]} == {torch.bfloat16}


class Mapped(DryTransport):
    """Its memory of every rank is that of this one."""

    def share_memory(self, nbytes: int, like: torch.Tensor) -> list[torch.Tensor]:
        return [torch.zeros(nbytes, dtype=torch.uint8)] * self.world_size


class Queues(Platform):
    """A device that queues collectives, as CUDA does."""

    def queues(self, tensor: torch.Tensor) -> bool:
        return True

    def side_stream(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


@pytest.mark.parametrize("hop", ["all_reduce", "compressed"])
def test_a_second_hop_that_raises_is_launched_before_the_next_first_one(
    hop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, calls = [], []
    for fails in (None, "all_reduce" if hop == "all_reduce" else "all_gather"):
        shard, between = NullCommunicator(0, 2), NullCommunicator(0, 2)
        hops = TwoHops(shard, between.all_reduce if hop == "all_reduce" else Compression(between).all_reduce)
        if fails == "all_reduce":
            no_memory(monkeypatch, hops, "second")
        elif fails:
            no_memory(monkeypatch, between, fails)
        with use_platform(Queues()), record() as recorder:
            fulls = [torch.arange(1024.0).bfloat16() * number for number in (1, 2, 3)]
            earlier = torch.ones(512)
            pending = [hops.reduce_scatter(full, "gradients", 2.0, torch.float32, 0, earlier) for full in fulls]
            results.append([one.wait() for one in pending])
        calls.append([call.op for call in recorder.calls])
    assert calls[0] == calls[1] and len(calls[0]) == (6 if hop == "all_reduce" else 9)
    assert hop == "compressed" or all(map(torch.equal, *results)), "what nobody sends has no values to compare"


@pytest.mark.parametrize("at", ["launch", "half", "wait", "store"])
def test_sums_over_replicas_that_raise_go_on_where_they_have_stopped(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the launch of the first second hop of three, or of its second half, in the wait for it, and behind that."""
    calls, means = [], []
    platform = Queues() if at == "half" else Platform()
    for fails in (False, True):
        torch.manual_seed(1)
        engine = make_engine(Simulated(0, 4), stack(3), 2, sets=2, gradient_accumulation_steps=2)
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine._parts.reducer.wait()
        groups = engine._parts.groups
        assert len(groups.partial) == 3
        if at == "half":
            groups.two_hops.second = Compression(groups.replicate).all_reduce
        with use_platform(platform), record() as recorder, monkeypatch.context() as patch:
            if fails:
                owner, name = {
                    "launch": (groups.two_hops, "second"),
                    "half": (groups.replicate, "all_gather"),
                    "wait": (LocalSum, "finish"),
                    "store": (bucket_module, "tag_memory"),
                }[at]
                no_memory(patch, owner, name)
                with pytest.raises(torch.OutOfMemoryError):
                    engine._parts.pipeline.finish_reductions()
            engine._parts.pipeline.finish_reductions()
        assert engine._parts.reducer.finished
        calls.append([(call.op, call.dimension, call.key) for call in recorder.calls])
        means.append(mean_gradients(engine))
    assert calls[0] == calls[1] and len(calls[0]) == (6 if at == "half" else 3)
    assert at == "half" or all(map(torch.equal, *means)), "what nobody sends has no values to compare"


def test_a_closing_launch_that_raises_adds_the_sum_of_the_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of a backward, whose gradients have all come."""
    means = []
    for fails in (False, True):
        torch.manual_seed(1)
        engine = make_engine(Simulated(0, 4), stack(3), 2, sets=2, gradient_accumulation_steps=2)
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        loss = engine(torch.full((2, 8), 3.0)).sum()
        with monkeypatch.context() as patch:
            if fails:
                no_memory(patch, engine._parts.groups.two_hops, "reduce_scatter", 2)
                with pytest.raises(torch.OutOfMemoryError):
                    engine.backward(loss)
            else:
                engine.backward(loss)
        engine._parts.pipeline.finish_reductions()
        means.append(mean_gradients(engine))
    assert all(map(torch.equal, *means))


@pytest.mark.parametrize(("name", "at"), [("empty", 0), ("quantize", 0), ("empty", 1), ("all_to_all", 0)])
def test_an_error_is_fed_back_once_by_a_sum_that_raises(name: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for fails in (False, True):
        comm = Communicator()
        compression, values = Compression(comm, ErrorFeedback()), torch.linspace(-1.0, 3.0, 512)
        found = []
        for number in range(3):
            if fails and number == 1:
                with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                    no_memory(patch, comm if name == "all_to_all" else compression_module, name, at)
                    compression.reduce_scatter(values.clone(), "gradients")
            found.append(compression.reduce_scatter(values.clone(), "gradients").wait())
        results.append([*found, *compression.memory()])
    assert len(results[0]) == 4 and all(map(torch.equal, *results))


def test_nothing_overwrites_what_a_wait_that_raised_has_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of shared memory are used again by every other collective."""
    comm = SharedMemoryCommunicator(Mapped(0, 2))
    pending = comm.all_to_all(torch.full((8192,), 0.0), "values")
    with monkeypatch.context() as patch:
        no_memory(patch, torch, "cat")
        with pytest.raises(torch.OutOfMemoryError):
            pending.wait()
    for number in (1.0, 2.0):
        comm.all_to_all(torch.full((8192,), number), "values")
    assert not pending.wait().any()


def test_a_launch_that_raises_in_its_copy_takes_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks have had no such launch, so the next one is in the same place as theirs."""
    comm = SharedMemoryCommunicator(Mapped(0, 2))
    comm.all_to_all(torch.full((8192,), 0.0), "values").wait()
    before = comm._large.count, comm._launched
    with monkeypatch.context() as patch:
        no_memory(patch, torch.Tensor, "copy_")
        with pytest.raises(torch.OutOfMemoryError):
            comm.all_to_all(torch.full((8192,), 1.0), "values")
    assert (comm._large.count, comm._launched) == before


def test_a_mean_that_raises_is_divided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    no_memory(monkeypatch, communicator, "empty")
    total = torch.full((4,), 6.0)
    pending = Pending((), (), lambda: communicator.divide(total, 3.0, torch.bfloat16))
    with pytest.raises(torch.OutOfMemoryError):
        pending.wait()
    assert pending.wait().tolist() == [2.0] * 4 and done(total).wait().tolist() == [2.0] * 4


def test_a_compressed_sum_that_raised_halfway_is_not_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second half, which this rank owes the others, is launched before. What packing it has lost is forgotten."""
    between = NullCommunicator(0, 2)
    compression = Compression(between, ErrorFeedback())
    with use_platform(Queues()), record() as recorder:
        no_memory(monkeypatch, between, "all_gather")
        with pytest.raises(torch.OutOfMemoryError):
            compression.all_reduce(torch.ones(512), "gradients", key=1)
        summed = compression.all_reduce(torch.ones(1024), "gradients", key=2).wait()
    assert summed.numel() == 1024 and compression._errors.keys() == {2}
    assert [(call.op, call.key) for call in recorder.calls] == [
        ("all_to_all", 1),
        ("all_gather", 1),
        ("all_to_all", 2),
        ("all_gather", 2),
    ]


def test_few_reductions_are_in_flight_behind_a_backward_of_a_program_that_communicates() -> None:
    comm = Simulated(0, 4)
    engine = make_engine(comm, stack(), 2, zero={"collectives_in_backward": True})
    train(engine)
    comm.log.clear()
    engine.backward(engine(torch.ones(2, 8)).sum())
    events = [event for event, _ in comm.log]
    assert events == ["launch"] * 8 + ["wait"] * 6
