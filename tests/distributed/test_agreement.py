"""Comparison of the ranks when an engine is made; differences are named on every rank."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerolite
from tests.toolkit.configs import config
from tests.toolkit.pool import Pools
from zerolite.comm import (
    CollectiveCheck,
    HostGroup,
    RaiseTogether,
    create_communicator,
    raise_together,
    read_objects_without_numpy,
    use_communicator,
)
from zerolite.comm.flight_recorder import WAIT
from zerolite.comm.gloo import GlooCommunicator
from zerolite.comm.transport import ProcessGroupTransport

Arguments = dict[str, Any]


class Small(nn.Module):
    """``x [B, 4]`` -> ``[B, 3]``, with a buffer."""

    def __init__(self, head: int = 3) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, head)
        self.register_buffer("offset", torch.zeros(head))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x))) + self.offset


def _wider_head(given: Arguments) -> None:
    given["model"] = Small(head=4)


def _one_parameter_more(given: Arguments) -> None:
    given["model"].scale = nn.Parameter(torch.ones(3))


def _another_order(given: Arguments) -> None:
    model = given["model"]
    body = model.body
    del model.body
    model.body = body


def _another_dtype(given: Arguments) -> None:
    given["model"].head.double()


def _frozen(given: Arguments) -> None:
    given["model"].head.bias.requires_grad_(False)


def _another_buffer(given: Arguments) -> None:
    given["model"].register_buffer("offset", torch.zeros(1, 3))


def _config_of(**params: Any) -> Callable[[Arguments], None]:
    def change(given: Arguments) -> None:
        given["config"]["optimizer"]["params"].update(params)

    return change


def _stage(number: int) -> Callable[[Arguments], None]:
    def change(given: Arguments) -> None:
        given["config"]["zero_optimization"]["stage"] = number

    return change


def _clipping(given: Arguments) -> None:
    given["config"]["gradient_clipping"] = 0.5


def _no_gradients_kept(given: Arguments) -> None:
    given["config"]["bf16"] = {"enabled": True}


def _another_config_optimizer(given: Arguments) -> None:
    given["config"]["optimizer"] = {"type": "Adam", "params": {"lr": 0.1}}


def _buffers_sent(given: Arguments) -> None:
    given["broadcast_buffers"] = True


def _with_instance(given: Arguments, lr: float = 0.1, head_lr: float = 0.1, kind: Any = torch.optim.SGD) -> None:
    model = given["model"]
    del given["config"]["optimizer"]
    groups = [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": head_lr}]
    given["optimizer"] = kind(groups, lr=lr)


def _many_settings(given: Arguments) -> None:
    _with_instance(given)
    given["optimizer"].param_groups[0].update({f"setting{number}": number for number in range(12)})


def _other_membership(given: Arguments) -> None:
    model = given["model"]
    del given["config"]["optimizer"]
    groups = [{"params": [*model.body.parameters(), model.head.bias]}, {"params": [model.head.weight]}]
    given["optimizer"] = torch.optim.SGD(groups, lr=0.1)


def _by_function(given: Arguments, momentum: float = 0.0) -> None:
    del given["config"]["optimizer"]
    given["optimizer"] = functools.partial(_make, _Hidden(momentum))


class _Hidden:
    """A number that no description of the function shows."""

    def __init__(self, value: float) -> None:
        self.value = value


def _make(momentum: _Hidden, groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=momentum.value)


def _same(given: Arguments) -> None:
    pass


def _variable(given: Arguments) -> None:
    os.environ["ZEROLITE_CHECK_COLLECTIVES"] = "1"


# What all ranks do, and what the last one does instead.
CHANGES: dict[str, tuple[Callable[[Arguments], None], Callable[[Arguments], None]]] = {
    "shape": (_same, _wider_head),
    "one more": (_same, _one_parameter_more),
    "order": (_same, _another_order),
    "dtype": (_same, _another_dtype),
    "frozen": (_same, _frozen),
    "buffer": (_same, _another_buffer),
    "lr": (_same, _config_of(lr=0.5)),
    "momentum": (_same, _config_of(momentum=0.9)),
    "clipping": (_same, _clipping),
    "bf16": (_same, _no_gradients_kept),
    "config optimizer": (_same, _another_config_optimizer),
    "variable": (_same, _variable),
    "argument": (_same, _buffers_sent),
    "instance lr": (_with_instance, functools.partial(_with_instance, head_lr=0.01)),
    "instance class": (_with_instance, functools.partial(_with_instance, kind=torch.optim.Adagrad)),
    "many": (_with_instance, _many_settings),
    "membership": (_with_instance, _other_membership),
    "instance": (_same, _with_instance),
    "function": (_by_function, functools.partial(_by_function, momentum=0.5)),
    **{f"stage {number}": (_same, _stage(number)) for number in range(4)},
}


def _arguments(config: dict[str, Any], partitioned: bool, change: str, odd: bool) -> Arguments:
    model: nn.Module = Small()
    config = copy.deepcopy(config)
    given: Arguments = {"model": model, "config": config}
    CHANGES[change][odd](given)
    if partitioned:
        stage, config["zero_optimization"]["stage"] = config["zero_optimization"]["stage"], 3
        with zerolite.zero.Init(module=given["model"], config_dict_or_path=config):
            pass
        config["zero_optimization"]["stage"] = stage
    return given


def refusals(config: dict[str, Any], changes: list[str], partitioned: bool = False) -> dict[str, str]:
    """For each change what is raised, and at the end training that works."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    messages = {}
    for change in changes:
        given = _arguments(config, partitioned, change, odd)
        try:
            zerolite.initialize(**given)
        except Exception as error:
            messages[change] = f"{type(error).__name__}: {error}"
        os.environ.pop("ZEROLITE_CHECK_COLLECTIVES", None)
    return messages


def accepted(config: dict[str, Any]) -> float:
    """Train with settings that may depend on the rank; return the loss of a step, summed over ranks."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    config["steps_per_print"] = 1000 + rank
    config["wall_clock_breakdown"] = rank == 1
    config["jsonl_monitor"] = {"enabled": False, "output_path": f"/somewhere/{rank}"}
    engine = zerolite.initialize(Small(), config)
    loss = engine(torch.full((2, 4), float(rank))).square().sum()
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total)


def woken(config: dict[str, Any]) -> str:
    """One rank unfreezes a parameter, the others another one."""
    model = Small()
    model.body.requires_grad_(False)
    engine = zerolite.initialize(model, config)
    odd = dist.get_rank() == dist.get_world_size() - 1
    (model.body.bias if odd else model.body.weight).requires_grad_(True)
    try:
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    except RuntimeError as error:
        return str(error)
    return ""


def parted_gathers(same: bool) -> dict[str, Any]:
    """Messages of a gather of as many elements on all ranks; of another parameter on the last rank, unless ``same``."""
    group = dist.new_group(timeout=timedelta(seconds=1), backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    comm = GlooCommunicator(ProcessGroupTransport(group))
    results: dict[str, Any] = {}
    for name, numel in (("packed", 6), ("several", 40_000)):
        key = 1 if same or rank < world - 1 else 2
        full = torch.zeros(world * numel)
        # Whether a rank times out or loses the other is chance: the watchdog of one would ask where the other stands.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WAIT, "explain", lambda error: None)
            try:
                comm.gather_shards([full], [torch.full((numel,), rank + 10.0 * key)], "parameters", key).wait()
                results[name] = full[::numel].tolist()
            except RuntimeError as error:
                results[name] = str(error)
        if not same:
            break  # the group is of no use any more
    comm.close()
    dist.destroy_process_group(group)
    return results


# ------------------------------------------------------------------ check_collectives


def checked_training(config: dict[str, Any], shared_memory: bool, joined: bool = False) -> dict[str, Any]:
    """Some steps with the check, and without: losses, and how many collectives there are by op and tag."""
    os.environ["ZEROLITE_SHARED_MEMORY"] = str(int(shared_memory))
    found: dict[str, Any] = {}
    for name, on in (("off", False), ("on", True)):
        torch.manual_seed(0)
        if shared_memory:
            config["check_collectives"] = on
        else:
            os.environ["ZEROLITE_CHECK_COLLECTIVES"] = str(int(on))
        engine = zerolite.initialize(Small(), config)
        losses = []
        with zerolite.comm.record() as recorder, engine.join() if joined else contextlib.nullcontext():
            for step in range(3 + joined * dist.get_rank()):
                loss = engine(torch.full((2, 4), float(step + dist.get_rank()))).square().sum()
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
        weight = zerolite.get_full_master(engine.module.body.weight).clone()
        checks = recorder.count(tag="check")
        found[name] = (losses, weight, {key: n for key, n in recorder.summary().items() if key[1] != "check"})
        found[f"checks {name}"] = checks
        del engine
    return found


class Branches(nn.Module):
    """Two layers of equal size, of which one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 5)
        self.left = nn.Linear(5, 5)
        self.right = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return (self.left if left else self.right)(torch.tanh(self.stem(x)))


def checked_mismatch(config: dict[str, Any], what: str) -> str:
    """The last rank does something else, over a process group of its own kind for this case."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    odd = dist.get_rank() == dist.get_world_size() - 1
    message = ""
    with use_communicator(lambda rank, world: GlooCommunicator(ProcessGroupTransport(group))):
        engine = zerolite.initialize(Branches(), {**config, "check_collectives": True})
    try:
        if what == "branch":
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 4), left=not odd).sum())
                engine.step()
        elif what == "length":
            engine.parts.comm.all_reduce(torch.ones(8 + odd), "mine").wait()
        elif what == "op":
            tensor = torch.ones(8)
            (engine.parts.comm.all_gather if odd else engine.parts.comm.all_reduce)(tensor, "mine").wait()
        elif what == "dtype":
            engine.parts.comm.all_reduce_max(torch.ones(8, dtype=torch.float64 if odd else torch.float32), "mine")
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    del engine
    gc.collect()
    dist.destroy_process_group(group)
    return message


def crossed_orders() -> list[float]:
    """Two communicators whose collectives each rank launches in an order of its own: no rank may wait at a launch."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    first = GlooCommunicator(ProcessGroupTransport(group))
    second = first.second("gloo")
    for comm, label in ((first, "first"), (second, "second")):
        comm.watch(CollectiveCheck(comm, label))
    tensors = [torch.full((world,), float(rank)), torch.full((world,), 10.0 * rank)]
    pairs = list(zip((first, second), tensors, strict=True))
    pending = [comm.reduce_scatter(tensor, "mine") for comm, tensor in (pairs if rank else pairs[::-1])]
    sums = sorted(float(one.wait()[0]) for one in pending)
    first.close()
    dist.destroy_process_group(group)
    return sums


def objects() -> list[Any]:
    """Return objects that travel by pickle, where numpy is missing; of several lengths, and from each rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    host = HostGroup(create_communicator(torch.device("cpu")), "objects")
    value = {"rank": rank, "text": "x" * (1000 * rank)}
    torchs: Any = dist.distributed_c10d
    kept, reads = torch.Tensor.numpy, torchs._tensor_to_object
    torch.Tensor.numpy = _no_numpy  # type: ignore[method-assign]
    try:
        read_objects_without_numpy()
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, value)  # torch's own, as torch.distributed.checkpoint calls them
        return [host.gather(value), [host.broadcast(value, source) for source in range(world)], gathered]
    finally:
        torch.Tensor.numpy, torchs._tensor_to_object = kept, reads  # type: ignore[method-assign]


def raised_together(failing: Sequence[int]) -> list[str]:
    """Return the messages on this rank for calls that fail on the ranks ``failing``, each with an exception of its
    own."""
    rank = dist.get_rank()
    comm = create_communicator(torch.device("cpu"))
    host = HostGroup(comm, "test")

    def work(error: type[Exception]) -> int:
        if rank in failing:
            raise error(f"engine.f: no luck {rank}")
        return 10 * rank

    def flagged() -> list[int]:
        error = OSError(f"no luck {rank}") if rank in failing else None
        raise_together(comm, torch.device("cpu"), "test", error, "engine.f", OSError)
        return [10 * rank]

    plain = RaiseTogether(host, "engine.f")
    kind = RaiseTogether(host, "engine.f", ValueError, failed="could not do it:", same=ValueError)
    said = []
    for call in (
        lambda: plain.gather(lambda: work(RuntimeError)),
        lambda: [kind.run(lambda: work(KeyError))],
        lambda: [kind.run(lambda: work(_ValueError))],
        flagged,
    ):
        try:
            said.append(str(call()))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


class _ValueError(ValueError):
    pass


def _no_numpy(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("Numpy is not available")


# -------------------------------------------------------------------- the tests


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
    "buffer": ["buffer 'offset' has shape (3,) on {first}, but (1, 3) on {odd}"],
    "lr": ["config key optimizer.params.lr is 0.1 on {first}, but 0.5 on {odd}"],
    "momentum": ["config key optimizer.params.momentum is not set on {first}, but 0.9 on {odd}"],
    "clipping": ["config key gradient_clipping is 0.0 on {first}, but 0.5 on {odd}"],
    "bf16": ["config key bf16.enabled is False on {first}, but True on {odd}"],
    "config optimizer": ["config key optimizer.type is 'SGD' on {first}, but 'Adam' on {odd}"],
    "variable": ["the environment variable ZEROLITE_CHECK_COLLECTIVES is '' on {first}, but '1' on {odd}"],
    "argument": ["the argument broadcast_buffers is False on {first}, but True on {odd}"],
    "instance lr": ["param group 1 has lr 0.1 on {first}, but 0.01 on {odd}"],
    "instance class": ["the optimizer is torch.optim.sgd.SGD on {first}, but torch.optim.adagrad.Adagrad on {odd}"],
    "many": [
        *(f"param group 0 has setting{number} not set on {{first}}, but {number} on {{odd}}" for number in range(10)),
        "and 2 more differences\n",
    ],
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
WORLDS = [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]


def small(stage: int) -> dict[str, Any]:
    return config(stage, optimizer=("SGD", {"lr": 0.1}))


def check(ranks: list[dict[str, str]], words: dict[str, list[str]], world: int) -> None:
    for rank, messages in enumerate(ranks):
        assert messages == ranks[0], rank
        for change, sentences in words.items():
            message = messages.get(change, "nothing was raised")
            assert message.startswith("RuntimeError: zerolite.initialize: the ranks hold different"), (change, message)
            for sentence in sentences:
                wanted = sentence.format(first=FIRST[world], odd=f"rank {world - 1}")
                assert f"\n- {wanted}" in message, (change, wanted, message)


@pytest.mark.fast("1-2")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_differences_are_named_on_every_rank(pools: Pools, stage: int, world: int) -> None:
    ranks = pools(world).run(refusals, {"config": small(stage), "changes": list(WORDS)})
    check(ranks, WORDS, world)
    for change in set(WORDS) - {
        "shape",
        "one more",
        "order",
        "dtype",
        "frozen",
        "instance",
        "instance class",
        "config optimizer",
    }:
        assert ranks[0][change].count("\n- ") == len(WORDS[change]), ranks[0][change]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("partitioned", [False, True], ids=["plain", "zero.Init"])
def test_different_stages_are_named(pools: Pools, partitioned: bool, world: int) -> None:
    for stage in range(4):
        others = {f"stage {number}": number for number in range(4) if number != stage}
        case = {"config": small(stage), "changes": list(others), "partitioned": partitioned}
        sentence = f"config key zero_optimization.stage is {stage} on {{first}}, but {{}} on {{odd}}"
        words = {name: [sentence.replace("{}", str(number))] for name, number in others.items()}
        check(pools(world).run(refusals, case), words, world)


def test_partitioned_parameters_are_described_whole(pools: Pools) -> None:
    changes = ["frozen", "lr", "instance lr"]
    case = {"config": small(3), "changes": changes, "partitioned": True}
    check(pools(2).run(refusals, case), {change: WORDS[change] for change in changes}, 2)


def test_one_process_agrees_with_itself(pools: Pools) -> None:
    assert pools(1).run(refusals, {"config": small(2), "changes": ["lr", "function"]}) == [{}]


def test_what_rank_0_alone_does_may_depend_on_the_rank(pools: Pools) -> None:
    totals = pools(2).run(accepted, {"config": small(2)})
    assert totals[0] == totals[1]


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_unfreezing_different_parameters_is_named(pools: Pools, stage: int) -> None:
    for message in pools(2).run(woken, {"config": small(stage)}):
        assert "begin to train different parameters" in message
        assert "parameter 'body.weight' exists on rank 0 only" in message
        assert "parameter 'body.bias' exists on rank 1 only" in message


def test_objects_travel_without_numpy(pools: Pools) -> None:
    for world in (1, 3):
        wanted = [{"rank": rank, "text": "x" * (1000 * rank)} for rank in range(world)]
        assert pools(world).run(objects) == [[wanted, wanted, wanted]] * world


@pytest.mark.parametrize("world, failing", [(1, []), (1, [0]), (3, []), (3, [1]), (3, [1, 2]), (3, [0, 1, 2])])
def test_what_fails_on_one_rank_fails_on_all(pools: Pools, world: int, failing: list[int]) -> None:
    first, more = min(failing, default=0), " (and 1 more rank)" if len(failing) == 2 else ""
    for rank, said in enumerate(pools(world).run(raised_together, {"failing": failing})):
        if not failing:
            assert said == [str([10 * other for other in range(world)]), *[f"[{10 * rank}]"] * 3]
        elif rank in failing:
            own = [f"{kind}: engine.f: no luck {rank}" for kind in ("RuntimeError", "KeyError", "_ValueError")]
            assert [text.replace("'", "") for text in said] == [*own, f"OSError: no luck {rank}"]
        else:
            assert said == [
                f"RuntimeError: engine.f: rank {first} stopped with RuntimeError: no luck {first}{more}",
                f"ValueError: engine.f: rank {first} could not do it: KeyError: 'engine.f: no luck {first}'{more}",
                f"_ValueError: engine.f: no luck {first}",
                f"OSError: engine.f: rank {first}: no luck {first}{more}",
            ]


@pytest.mark.slow
def test_messages_of_different_collectives_never_meet(pools: Pools) -> None:
    """Between hosts nothing compares them; ranks that part must not take one parameter for another."""
    assert pools(2).run(parted_gathers, {"same": True}) == [{"packed": [10, 11], "several": [10, 11]}] * 2
    for result in pools(2).run(parted_gathers, {"same": False}):
        assert isinstance(result["packed"], str), result  # an error: it timed out, or the other rank did first


# -------------------------------------------------------------------- check_collectives

MOVING = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


@pytest.mark.fast("0-even", "2-join", "3-even")
@pytest.mark.parametrize("joined", [False, True], ids=["even", "join"])
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_checked_training_is_the_same(pools: Pools, stage: int, joined: bool) -> None:
    for world, shared_memory in ((2, True), (2, False)):
        setting = config(stage, optimizer=("SGD", {"lr": 0.1}), zero=MOVING if stage == 3 else None)
        case = {"config": setting, "shared_memory": shared_memory, "joined": joined}
        for result in pools(world).run(checked_training, case):
            losses, weight, calls = result["off"]
            checked_losses, checked_weight, checked_calls = result["on"]
            assert losses == checked_losses and torch.equal(weight, checked_weight)
            assert calls == checked_calls
            assert result["checks off"] == 0
            # those of engine.join() are no collectives of a communicator
            assert result["checks on"] == sum(count for (_, tag), count in calls.items() if tag != "control")


@pytest.mark.parametrize("what", ["length", "op", "dtype", "branch"])
def test_different_collectives_are_named_before_they_begin(pools: Pools, what: str) -> None:
    setting = config(3 if what == "branch" else 1, optimizer=("SGD", {"lr": 0.1}), zero=MOVING)
    setting["zero_optimization"]["stage3_module_granularity_threshold"] = 0
    words = {
        "length": ["rank 0: all_reduce for 'mine', 8 elements of torch.float32; rank 1: all_reduce for 'mine', 9 "],
        "op": ["rank 0: all_reduce for 'mine', 8", "rank 1: all_gather for 'mine', 8 elements of torch.float32"],
        "dtype": ["8 elements of torch.float32; rank 1:", "8 elements of torch.float64."],
        "branch": ["of the gathers of parameters): rank 0: all_gather for 'parameters'", "'left.weight' and 1 more"],
    }[what]
    for message in pools(2).run(checked_mismatch, {"config": setting, "what": what}):
        assert message.startswith("Mismatch: check_collectives: the ranks are about to launch different collectives")
        assert all(word in message for word in words), message
        assert what != "branch" or "'right.weight' and 1 more" in message


@pytest.mark.slow
def test_the_check_waits_for_nobody_at_a_launch(pools: Pools) -> None:
    for world in (2, 3):
        total = sum(range(world))
        assert pools(world).run(crossed_orders) == [[total, 10.0 * total]] * world
