"""Comparison of the ranks when an engine is made; differences are named on every rank."""

from __future__ import annotations

import itertools
import platform
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerolite
from tests.toolkit.compare import assert_same_on_ranks
from tests.toolkit.configs import config
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import raised
from zerolite.comm import HostGroup, create_communicator

Arguments = dict[str, Any]
PYTHON_VERSION = platform.python_version_tuple


class Small(nn.Module):
    """``x [B, 4]`` -> ``[B, 3]``, with a buffer."""

    def __init__(self, head: int = 3) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, head)
        self.register_buffer("offset", torch.zeros(head))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x))) + self.offset


def small(stage: int) -> dict[str, Any]:
    return config(stage, optimizer=("SGD", {"lr": 0.1}))


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


# -------------------------------------------------------------------- what initialize compares


def model_changed(change: Callable[[Any], Any]) -> Callable[[Arguments], Any]:
    return lambda given: change(given["model"])


def config_changed(**blocks: Any) -> Callable[[Arguments], Any]:
    def change(given: Arguments) -> None:
        for key, value in blocks.items():
            old = given["config"].get(key)
            given["config"][key] = {**old, **value} if isinstance(value, dict) and isinstance(old, dict) else value

    return change


def with_instance(given: Arguments, head_lr: float = 0.1, kind: Any = torch.optim.SGD) -> None:
    model = given["model"]
    del given["config"]["optimizer"]
    groups = [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": head_lr}]
    given["optimizer"] = kind(groups, lr=0.1)


def other_membership(given: Arguments) -> None:
    with_instance(given)
    one, other = (group["params"] for group in given["optimizer"].param_groups)
    one.append(other.pop())


def by_function(given: Arguments, momentum: float = 0.0) -> None:
    """A function whose description does not show the number."""
    del given["config"]["optimizer"]
    given["optimizer"] = lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=momentum)


# What the last rank does, where the others do nothing; and where all of them do something.
ODD: dict[str, Callable[[Arguments], Any]] = {
    "shape": lambda given: given.update(model=Small(head=4)),
    "one more": model_changed(lambda model: setattr(model, "scale", nn.Parameter(torch.ones(3)))),
    "order": model_changed(lambda model: setattr(model, "body", model._modules.pop("body"))),
    "dtype": model_changed(lambda model: model.head.double()),
    "frozen": model_changed(lambda model: model.head.bias.requires_grad_(False)),
    "lr": config_changed(optimizer={"params": {"lr": 0.5}}),
    "interpreter": lambda given: setattr(platform, "python_version_tuple", lambda: ("3", "9", "1")),
    "argument": lambda given: given.update(broadcast_buffers=True),
    "instance": with_instance,
    **{f"stage {number}": config_changed(zero_optimization={"stage": number}) for number in range(4)},
}
BOTH: dict[str, tuple[Callable[[Arguments], Any], Callable[[Arguments], Any]]] = {
    "instance lr": (with_instance, lambda given: with_instance(given, head_lr=0.01)),
    "instance class": (with_instance, lambda given: with_instance(given, kind=torch.optim.Adagrad)),
    "membership": (with_instance, other_membership),
    "function": (by_function, lambda given: by_function(given, momentum=0.5)),
}


def refusal(stage: int, change: str, partitioned: bool = False) -> str:
    """Return the error that this rank raises when the last rank does something else."""
    given: Arguments = {"model": Small(), "config": small(stage)}
    (BOTH.get(change) or (lambda given: None, ODD[change]))[is_last()](given)
    if partitioned:
        zero = given["config"]["zero_optimization"]
        stage, zero["stage"] = zero["stage"], 3
        with zerolite.zero.Init(module=given["model"], config_dict_or_path=given["config"]):
            pass
        zero["stage"] = stage
    said = raised(lambda: zerolite.initialize(**given))
    platform.python_version_tuple = PYTHON_VERSION
    return said


# What the message says of each change; {first} are the ranks that agree, {odd} is the last one.
WORDS = {
    "shape": [
        "parameter 'head.weight' has shape (3, 5) on {first}, but (4, 5) on {odd}",
        "parameter 'head.bias' has shape (3,) on {first}, but (4,) on {odd}",
        "buffer 'offset' has shape (3,) on {first}, but (4,) on {odd}",
    ],
    "one more": ["parameter 'scale' exists on {odd} only", "param group 0 has a size of 4 on {first}, but 5 "],
    "order": ["the model's parameters come in another order: number 0 is 'body.weight' on {first}, but 'head.weight'"],
    "dtype": ["parameter 'head.bias' has dtype torch.float32 on {first}, but torch.float64 on {odd}"],
    "frozen": [
        "parameter 'head.bias' has requires_grad True on {first}, but False on {odd}",
        "param group 0 has a size of 4 on {first}, but 3 on {odd}",
        "the param group of 'head.bias' is 0 on {first}, but not set on {odd}",
    ],
    "lr": ["config key optimizer.params.lr is 0.1 on {first}, but 0.5 on {odd}"],
    "interpreter": [
        f"the version of Python is {sys.version_info[0]}.{sys.version_info[1]} on {{first}}, but 3.9 on {{odd}}"
    ],
    "argument": ["the argument broadcast_buffers is False on {first}, but True on {odd}"],
    "instance lr": ["param group 1 has lr 0.1 on {first}, but 0.01 on {odd}"],
    "instance class": ["the optimizer is torch.optim.sgd.SGD on {first}, but torch.optim.adagrad.Adagrad on {odd}"],
    "membership": [
        "param group 0 has a size of 2 on {first}, but 3 on {odd}",
        "param group 1 has a size of 2 on {first}, but 1 on {odd}",
        "the param group of 'head.bias' is 1 on {first}, but 0 on {odd}",
    ],
    "instance": [
        "the optimizer is not given on {first}, but torch.optim.sgd.SGD on {odd}",
        "config key optimizer.type is 'SGD' on {first}, but not set on {odd}",
    ],
    "function": ["param group 0 has momentum 0.0 on {first}, but 0.5 on {odd}"],
}
FIRST = {2: "rank 0", 3: "ranks 0 and 1", 4: "ranks 0-2"}
OTHERS_FOLLOW = {"shape", "one more", "order", "dtype", "frozen", "instance", "instance class"}


def assert_named(said: str, sentences: list[str]) -> None:
    world = dist.get_world_size()
    assert said.startswith("RuntimeError: zerolite.initialize: the ranks hold different"), said
    for sentence in sentences:
        wanted = sentence.format(first=FIRST[world], odd=f"rank {world - 1}")
        assert f"\n- {wanted}" in said, (wanted, said)
    assert_same_on_ranks({"said": said})


@pytest.mark.fast("2")
@on_ranks(2, 4)
def test_differences_are_named_on_every_rank() -> None:
    stage = 1 if dist.get_world_size() == 2 else 3
    for change, sentences in WORDS.items():
        said = refusal(stage, change)
        assert_named(said, sentences)
        assert change in OTHERS_FOLLOW or said.count("\n- ") == len(sentences), said
    zerolite.initialize(Small(), small(stage))  # it works when they agree


@on_ranks(2)
def test_different_stages_and_partitioned_parameters_are_named_too() -> None:
    for partitioned, stage, other in itertools.product((False, True), range(4), range(4)):
        if stage != other:
            sentence = f"config key zero_optimization.stage is {stage} on {{first}}, but {other} on {{odd}}"
            assert_named(refusal(stage, f"stage {other}", partitioned), [sentence])
    for change in ("frozen", "lr", "instance lr"):
        assert_named(refusal(3, change, True), WORDS[change])


@on_ranks(2)
def test_what_rank_0_alone_does_may_depend_on_the_rank() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    made = small(2) | {"steps_per_print": 1000 + rank, "wall_clock_breakdown": rank == 1}
    made["csv_monitor"] = {"enabled": False, "output_path": f"/somewhere/{rank}"}
    engine = zerolite.initialize(Small(), made)
    engine.backward(engine(torch.full((2, 4), float(rank))).square().sum())
    engine.step()
    assert_same_on_ranks(engine.full_state_dict())


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_unfreezing_different_parameters_is_named(stage: int) -> None:
    model = Small()
    model.body.requires_grad_(False)
    engine = zerolite.initialize(model, small(stage))
    (model.body.bias if is_last() else model.body.weight).requires_grad_(True)
    with pytest.raises(RuntimeError, match="(?s)begin to train different parameters") as caught:
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    assert "parameter 'body.weight' exists on rank 0 only" in str(caught.value)
    assert "parameter 'body.bias' exists on rank 1 only" in str(caught.value)


# -------------------------------------------------------------------- objects and messages


@on_ranks(1, 3)
def test_objects_travel_without_numpy() -> None:
    """The objects have several lengths, and come from each rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    host = HostGroup(create_communicator(torch.device("cpu")), "objects")
    wanted = [{"rank": number, "text": "x" * (1000 * number)} for number in range(world)]

    def no_numpy(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Numpy is not available")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "numpy", no_numpy)
        found = [host.gather(wanted[rank]), [host.broadcast(wanted[rank], source) for source in range(world)]]
        to_first = host.gather_to_first(wanted[rank])
    assert found == [wanted] * 2 and to_first == (wanted if rank == 0 else [])


# -------------------------------------------------------------------- optimizer states


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_states_that_one_rank_alone_has_loaded_are_refused_on_both(stage: int) -> None:
    """The last rank has a part of a state, which it would take for the whole; the other has none."""
    model = Small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if is_last():
        optimizer.state[model.head.weight] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(7)}
    made = {key: value for key, value in small(stage).items() if key != "optimizer"}
    said = raised(lambda: zerolite.initialize(model, made, optimizer=optimizer))
    assert said.startswith("ValueError: zerolite.initialize: ") and ("rank 1" in said) == (not is_last()), said
    assert "'exp_avg' of parameter 'head.weight'" in said or not is_last()
