"""Comparison of the ranks when an engine is made; differences are named on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.configs import config
from tests.pool import Pools

CASES = "tests.distributed.cases.agreement"

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
    ranks = pools(world).run(f"{CASES}:refusals", {"config": small(stage), "changes": list(WORDS)})
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
        check(pools(world).run(f"{CASES}:refusals", case), words, world)


def test_partitioned_parameters_are_described_whole(pools: Pools) -> None:
    changes = ["frozen", "lr", "instance lr"]
    case = {"config": small(3), "changes": changes, "partitioned": True}
    check(pools(2).run(f"{CASES}:refusals", case), {change: WORDS[change] for change in changes}, 2)


def test_one_process_agrees_with_itself(pools: Pools) -> None:
    assert pools(1).run(f"{CASES}:refusals", {"config": small(2), "changes": ["lr", "function"]}) == [{}]


def test_what_rank_0_alone_does_may_depend_on_the_rank(pools: Pools) -> None:
    totals = pools(2).run(f"{CASES}:accepted", {"config": small(2)})
    assert totals[0] == totals[1]


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_unfreezing_different_parameters_is_named(pools: Pools, stage: int) -> None:
    for message in pools(2).run(f"{CASES}:woken", {"config": small(stage)}):
        assert "begin to train different parameters" in message
        assert "parameter 'body.weight' exists on rank 0 only" in message
        assert "parameter 'body.bias' exists on rank 1 only" in message


def test_objects_travel_without_numpy(pools: Pools) -> None:
    for world in (1, 3):
        wanted = [{"rank": rank, "text": "x" * (1000 * rank)} for rank in range(world)]
        assert pools(world).run(f"{CASES}:objects") == [[wanted, wanted]] * world


@pytest.mark.parametrize("world, failing", [(1, []), (1, [0]), (3, []), (3, [1]), (3, [1, 2]), (3, [0, 1, 2])])
def test_what_fails_on_one_rank_fails_on_all(pools: Pools, world: int, failing: list[int]) -> None:
    first, more = min(failing, default=0), " (and 1 more rank)" if len(failing) == 2 else ""
    for rank, said in enumerate(pools(world).run(f"{CASES}:raised_together", {"failing": failing})):
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
    assert pools(2).run(f"{CASES}:parted_gathers", {"same": True}) == [{"packed": [10, 11], "several": [10, 11]}] * 2
    for result in pools(2).run(f"{CASES}:parted_gathers", {"same": False}):
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
        for result in pools(world).run(f"{CASES}:checked_training", case):
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
    for message in pools(2).run(f"{CASES}:checked_mismatch", {"config": setting, "what": what}):
        assert message.startswith("Mismatch: check_collectives: the ranks are about to launch different collectives")
        assert all(word in message for word in words), message
        assert what != "branch" or "'right.weight' and 1 more" in message


@pytest.mark.slow
def test_the_check_waits_for_nobody_at_a_launch(pools: Pools) -> None:
    for world in (2, 3):
        total = sum(range(world))
        assert pools(world).run(f"{CASES}:crossed_orders") == [[total, 10.0 * total]] * world
