"""With overlap_comm the gathers of a step end in the next forward. A read of a weight before that waits for it."""

from __future__ import annotations

import copy
import gc
import io
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tests.unit.test_launches import Simulated, make_engine, stack, train
from zerolite.comm import Pending
from zerolite.zero.stage3.absent_parameter import AbsentParameter

pytestmark = pytest.mark.usefixtures("without_ranks")


class Late(Simulated):
    """A communicator whose gathers give NaN until they are waited for. ``events``: launches of gathers, and waits."""

    def __init__(self) -> None:
        super().__init__(0, 4)
        self.events: list[tuple[str, int]] = []
        self.seconds = 0.0  # that a wait takes

    def all_gather(self, full: Tensor, tag: str, key: int = 0) -> Pending:
        super().all_gather(full, tag, key)
        own, values, bucket = self.shard(full).clone(), full.clone(), key - 1
        full.fill_(torch.nan)
        self.shard(full).copy_(own)
        self.events.append(("launch", bucket))

        def finish() -> Tensor:
            time.sleep(self.seconds)
            self.events.append(("wait", bucket))
            return full.copy_(values)

        return Pending((), (full,), finish)

    def of(self, event: str) -> list[int]:
        return [bucket for name, bucket in self.events if name == event]


class Tied(nn.Module):
    """Its head is the embedding's weight, called as a function; ``normed`` is one of torch's that reads a child's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.body = nn.Linear(8, 8)
        self.normed = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.normed(self.body(self.embedding(x.long())))
        return nn.functional.linear(hidden, self.embedding.weight)


def overlapping(model: nn.Module, stage: int = 1, overlap: bool | None = True, **config: Any) -> tuple[Late, Any]:
    comm = Late()
    return comm, make_engine(comm, model, stage, zero={"overlap_comm": overlap}, **config)


def saved(model: nn.Module) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return list(torch.load(file, weights_only=False).parameters())


def averaged(model: nn.Module) -> list[Tensor]:
    means = [torch.zeros_like(p) for p in model.parameters()]
    for mean, parameter in zip(means, model.parameters(), strict=True):
        mean.lerp_(parameter, 0.5)
    torch._foreach_lerp_(means, list(model.parameters()), 0.5)
    average = AveragedModel(model)
    average.update_parameters(model)
    return [*means, *average.parameters()]


def clamped(model: nn.Module) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.data.clamp_(-1, 1)
    return list(model.state_dict().values())


def reloaded(model: nn.Module) -> list[Tensor]:
    model.load_state_dict({name: torch.zeros_like(p) for name, p in model.named_parameters()})
    return list(model.parameters())


READS: dict[str, Callable[[Any], list[Tensor]]] = {
    "state_dict": lambda model: list(model.state_dict().values()),
    "snapshot": lambda model: [p.clone() for _, p in model.named_parameters()],
    "detach().cpu()": lambda model: [p.detach().cpu() for p in model.parameters()],
    "numpy": lambda model: [torch.from_numpy(p.detach().numpy()) for p in model.parameters()],
    "average": averaged,
    "deepcopy": lambda model: list(copy.deepcopy(model).parameters()),
    "torch.save": saved,
    "a forward of a submodule": lambda model: [model[2](torch.ones(1, 8))],
    "functional_call": lambda model: [
        torch.func.functional_call(model, {k: v.detach() for k, v in model.named_parameters()}, torch.ones(1, 8))
    ],
    "parameters_to_vector": lambda model: [nn.utils.parameters_to_vector(model.parameters())],
    "norm": lambda model: [nn.utils.get_total_norm(list(model.parameters()))],
    "clamp": clamped,
    "load_state_dict": reloaded,
}


@pytest.mark.parametrize("read", READS)
def test_whoever_reads_weights_after_a_step_waits_for_them(read: str) -> None:
    model = stack()
    comm, engine = overlapping(model)
    train(engine, 2)
    assert comm.of("wait") == comm.of("launch")[:8], "nothing has waited for the second step's"
    kinds = {type(p) for p in model.parameters()}
    assert len(kinds) == 1 and issubclass(kinds.pop(), AbsentParameter)
    for value in READS[read](model):
        assert value.isfinite().all() and not isinstance(value, AbsentParameter)
    train(engine)
    assert sorted(comm.of("wait")) == sorted([*range(8)] * 2)


def test_a_read_waits_only_for_what_it_reads() -> None:
    model = stack()
    comm, engine = overlapping(model)
    train(engine)
    assert model[2].weight.detach().isfinite().all() and comm.of("wait") == [5]
    assert type(model[2].weight) is nn.Parameter and type(model[3].weight) is not nn.Parameter
    for parameter in model.parameters():  # what needs no values waits for nothing
        assert parameter.shape == (8, 8) and parameter.dtype == torch.float32 and parameter.numel() == 64
        assert parameter.grad is None and parameter.requires_grad and isinstance(parameter, nn.Parameter)
    model.zero_grad()
    model.requires_grad_(True)
    assert comm.of("wait") == [5]


@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad"])
def test_the_next_forward_waits_for_each_layer_when_it_comes_to_it(optimizer: str) -> None:
    model = stack()
    comm, engine = overlapping(model, optimizer={"type": optimizer, "params": {"lr": 1e-3}})
    train(engine)
    assert comm.events == [("launch", bucket) for bucket in reversed(range(8))], "the first layer's comes first"
    comm.events.clear()
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: comm.events.append(("run", 0)))
    engine(torch.ones(1, 8))
    assert comm.events == [event for bucket in reversed(range(8)) for event in (("wait", bucket), ("run", 0))]
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


@pytest.mark.parametrize("training", [True, False])
def test_weights_used_outside_their_module_are_waited_for(training: bool) -> None:
    torch.manual_seed(0)
    comm, engine = overlapping(Tied())
    for _ in range(3):
        engine.train(training)
        with torch.no_grad():
            assert engine(torch.ones(2, 3)).isfinite().all()
        engine.train()
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()


def test_by_default_nothing_is_in_flight_after_a_step() -> None:
    for overlap in (None, False):
        model = stack()
        comm, engine = overlapping(model, overlap=overlap)
        train(engine)
        assert comm.of("wait") == comm.of("launch") and {type(p) for p in model.parameters()} == {nn.Parameter}


def test_two_threads_read_weights_after_a_step() -> None:
    model = stack()
    comm, engine = overlapping(model)
    train(engine)
    comm.seconds = 0.02
    together = threading.Barrier(3)

    def read() -> list[bool]:
        together.wait()
        return [bool(p.detach().clone().isfinite().all()) for p in model.parameters()]

    with ThreadPoolExecutor(3) as threads:
        found = [future.result(60) for future in [threads.submit(read) for _ in range(3)]]
    assert found == [[True] * 8] * 3
    assert sorted(comm.of("wait")) == list(range(8)), "each gather has ended once"
    train(engine)


def test_a_forked_process_finds_whole_weights() -> None:
    """A worker of a DataLoader: the threads that gather are not in it."""
    model = stack()
    comm, engine = overlapping(model)
    train(engine)
    assert comm.of("wait") == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 on forks beside threads
        child = os.fork()
    if not child:
        whole = all(type(p) is nn.Parameter and bool(p.isfinite().all()) for p in model.parameters())
        os._exit(0 if whole else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(comm.of("wait")) == list(range(8))


def test_a_weight_that_something_unseen_has_read_is_an_error() -> None:
    model = stack(2)
    comm, engine = overlapping(model)
    train(engine)
    with torch._C.DisableTorchFunctionSubclass():
        loss = (torch.ones(1, 8) @ model[1].weight).sum()
    with pytest.raises(RuntimeError, match="parameter '1.weight' got a gradient while its updated values"):
        loss.backward()


@pytest.mark.slow
def test_the_model_outlives_its_engine() -> None:
    model = stack()
    comm, engine = overlapping(model)
    train(engine)
    alive = weakref.ref(engine)
    del engine
    gc.collect()
    assert alive() is None and {type(p) for p in model.parameters()} == {nn.Parameter}
    assert all(p.isfinite().all() for p in model.parameters())
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
