"""Ranks that part while they train are told, on all ranks, by name; so is an update that makes weights non-finite."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.toolkit import models
from tests.toolkit.configs import ADAMW, PARTITIONED, config
from tests.toolkit.faults import Warnings
from tests.toolkit.lockstep import skipping_on_device
from tests.toolkit.pool import Pools
from tests.toolkit.training import BATCHES, LOSSES, make_engine


def unread(function: str, **arguments: Any) -> Any:
    """``function`` of this module where the host does not wait for statistics, as on CUDA."""
    with skipping_on_device(True):
        return globals()[function](**arguments)


def train(engine: Any, steps: int = 1, first: int = 0) -> None:
    for step in range(first, first + steps):
        engine.backward(LOSSES["OddModel"](engine, BATCHES["OddModel"](step, 0, dist.get_rank())))
        engine.step()


def said(action: Callable[[], Any]) -> str:
    """The error of ``action``, "" if there is none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _lr(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] *= 0.5


def _lr_in_a_tensor(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"].mul_(0.5)


def _betas(engine: Any) -> None:
    engine.optimizer.param_groups[0]["betas"] = (0.5, 0.95)


def _weight_decay(engine: Any) -> None:
    engine.optimizer.param_groups[0]["weight_decay"] = 0.25


def _plateau(engine: Any) -> None:
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, factor=0.1, patience=0)
    for loss in (1.0, 2.0, 3.0):
        schedule.step(loss)


def _clip(engine: Any) -> None:
    engine._pipeline._max_norm = 0.25


def _steps(engine: Any) -> None:
    engine._pipeline.outcomes.counters.global_steps += 1


NUMBERS = {
    "lr": _lr,
    "tensor": _lr_in_a_tensor,
    "betas": _betas,
    "decay": _weight_decay,
    "plateau": _plateau,
    "clip": _clip,
    "steps": _steps,
}


def other_numbers(config: dict[str, Any], changes: list[str], save_dir: str | None = None) -> dict[str, list[str]]:
    """By change, which the last rank makes after two steps: the errors of the next steps up to the first, or of a save
    instead, and of a step after the change of a group has been taken back."""
    found = {}
    for change in changes:
        engine = make_engine(config)
        if change == "tensor":
            engine.optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
        train(engine, 2)
        before = [dict(group) for group in engine.optimizer.param_groups]
        before[0]["lr"] = float(before[0]["lr"])
        if dist.get_rank() == dist.get_world_size() - 1:
            NUMBERS[change](engine)
        if save_dir is not None:
            found[change] = [said(functools.partial(engine.save_checkpoint, f"{save_dir}/{change}"))]
            continue
        errors: list[str] = []
        while len(errors) < 3 and not (errors and errors[-1]):
            errors.append(said(functools.partial(train, engine, 1, 2 + len(errors))))
        for group, old in zip(engine.optimizer.param_groups, before, strict=True):
            group.update(old)
        if change not in ("clip", "steps"):
            errors.append(said(functools.partial(train, engine, 1, 5)))
        found[change] = errors
    return found


def alike(config: dict[str, Any], steps: int = 4) -> tuple[int, list[str]]:
    """Values that change alike on all ranks, also between clipping and the update, and on a loss that all share."""
    engine = make_engine(config)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, factor=0.5, patience=0)
    with Warnings() as warnings:
        for step in range(steps):
            engine.backward(LOSSES["OddModel"](engine, BATCHES["OddModel"](step, 0, dist.get_rank())))
            engine.clip_gradients(100.0)
            engine.optimizer.param_groups[0]["weight_decay"] = 0.01 * step
            engine.step()
            schedule.step(engine.reduce(float(dist.get_rank() + step)))
    return engine.global_steps, warnings.messages


def other_gathers(config: dict[str, Any]) -> list[str]:
    """The errors of five steps. In the third the last rank gathers another parameter than the rest, which a backend
    that compares nothing lets pass."""
    engine = make_engine(config)
    errors = []
    for step in range(5):
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            engine.coordinator.schedule.note_gather(1, 1)
        errors.append(said(functools.partial(train, engine, 1, step)))
    return errors


def between_clipping_and_update(config: dict[str, Any]) -> list[str]:
    """One rank changes its learning rate where the statistics have been exchanged already."""
    engine = make_engine(config)
    errors = []
    for step in range(3):
        engine.backward(LOSSES["OddModel"](engine, BATCHES["OddModel"](step, 0, dist.get_rank())))
        engine.clip_gradients(100.0)
        if step == 1 and dist.get_rank() == 1:
            _lr(engine)
        errors.append(said(engine.step))
    return errors


def written(config: dict[str, Any], name: str, steps: int = 5, save_dir: str | None = None) -> list[str]:
    """The last rank writes into one element of a parameter after the first step; the errors of the steps after it, or
    of a save."""
    engine = make_engine(config)
    train(engine)
    if dist.get_rank() == dist.get_world_size() - 1:
        parameter = dict(engine.module.named_parameters())[name]
        with torch.no_grad():
            parameter.view(-1)[parameter.numel() // 2] += 1.0
    if save_dir is not None:
        return [said(lambda: engine.save_checkpoint(save_dir))]
    errors: list[str] = []
    while len(errors) < steps and not (errors and errors[-1]):
        errors.append(said(lambda: train(engine, 1, 1 + len(errors))))
    return errors


def written_frozen(config: dict[str, Any]) -> str:
    """The same with a parameter that is not trained."""
    model = models.build(models.OddModel)
    name, parameter = next(iter(model.named_parameters()))
    parameter.requires_grad_(False)
    engine = zerolite.initialize(model, config)
    if dist.get_rank() == 0:
        with torch.no_grad():
            parameter.view(-1)[0] = 7.0
    return f"{name}: {said(lambda: train(engine, 3))}"


def spoiling_update(config: dict[str, Any], change: dict[str, Any], steps: int = 5) -> dict[str, Any]:
    """After two steps a param group takes ``change``; the errors and warnings of the steps after it."""
    engine = make_engine(config)
    train(engine, 2)
    engine.optimizer.param_groups[-1].update(change)
    errors = []
    with Warnings() as warnings:
        while len(errors) < steps and not (errors and errors[-1]):
            errors.append(said(lambda: train(engine, 1, 2 + len(errors))))
    return {"errors": errors, "warnings": warnings.messages}


def new_values_after(config: dict[str, Any], change: dict[str, Any]) -> list[str]:
    """The errors of four steps; values are loaded after the second, which tells that the first has spoilt them."""
    engine = make_engine(config)
    train(engine)
    good, groups = engine.full_state_dict(), [dict(group) for group in engine.optimizer.param_groups]
    engine.optimizer.param_groups[-1].update(change)
    errors = [said(functools.partial(train, engine, 1, step)) for step in (1, 2)]
    for group, old in zip(engine.optimizer.param_groups, groups, strict=True):
        group.update(old)
    engine.load_full_state_dict(good)
    return errors + [said(functools.partial(train, engine, 1, step)) for step in (3, 4)]


def spoilt_save(config: dict[str, Any], change: dict[str, Any], save_dir: str) -> str:
    engine = make_engine(config)
    train(engine, 2)
    engine.optimizer.param_groups[-1].update(change)
    train(engine)
    return said(lambda: engine.save_checkpoint(save_dir))


def infinite_from_the_start(config: dict[str, Any]) -> list[str]:
    """Weights that are -inf by design, which plain PyTorch trains around: elements without a gradient."""
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        model.bias[0] = -torch.inf
    engine = zerolite.initialize(model, {**config, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    errors = []
    for _ in range(3):
        x = torch.ones(2, 4)
        errors.append(said(lambda x=x: (engine.backward(engine(x)[:, 1:].sum()), engine.step())))
    return errors


def bad_loss(config: dict[str, Any], steps: int = 3) -> tuple[int, list[str]]:
    """A loss that is NaN on rank 1 while its gradients are finite; steps taken, and warnings."""
    engine = make_engine(config)
    with Warnings() as warnings:
        for step in range(steps):
            loss = LOSSES["OddModel"](engine, BATCHES["OddModel"](step, 0, dist.get_rank()))
            engine.backward(loss + (torch.nan if dist.get_rank() == 1 else 0.0))
            engine.step()
    return engine.global_steps - engine.skipped_steps, warnings.messages


def spoiling_from_the_start() -> dict[str, str]:
    """By what is wrong: the first error of three steps of a layer whose second input is always 0."""
    found = {}
    for what, more in {
        "eps": {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "eps": 0.0}}},
        "scale": {
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "fp16": {"enabled": True, "loss_scale": 1e-45},
        },
    }.items():
        engine = zerolite.initialize(torch.nn.Linear(2, 3), {"train_micro_batch_size_per_gpu": 2, **more})
        errors = []
        for _ in range(3):
            x = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
            errors.append(said(lambda x=x, engine=engine: (engine.backward(engine(x).sum()), engine.step())))
        found[what] = next(filter(None, errors), "")
    return found


def refused(config: dict[str, Any]) -> str:
    return said(lambda: make_engine(config))


def parts_of_a_layer(stage: int) -> dict[str, list[str]]:
    """Two layers on two tensor-parallel ranks each. By what the last rank does after a step: the errors of the next."""
    found = {}
    for what in ("lr", "weight", "update"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage},
            "tensor_parallel": {"size": 2, "plan": {"0": "column", "2": "row"}},
            "consistency_check_interval": 1,
        }
        engine = zerolite.initialize(model, config)
        x = torch.ones(2, 4) * (1 + engine.data_parallel_rank)

        def step(engine: Any = engine, x: torch.Tensor = x) -> None:
            engine.backward(engine(x).square().sum())
            engine.step()

        step()
        if dist.get_rank() == dist.get_world_size() - 1:
            if what == "lr":
                _lr(engine)
            elif what == "weight":
                with torch.no_grad():
                    engine.module[0].weight.view(-1)[0] += 1.0
            else:
                engine.optimizer.param_groups[0]["lr"] = torch.inf
        elif what == "update":
            engine.optimizer.param_groups[0]["lr"] = torch.inf
        found[what] = [said(step), said(step)]
    return found


# -------------------------------------------------------------------- the tests


SLOW = pytest.mark.slow

WORDS = {
    "lr": "param group 0 has lr 0.001 on {first}, but 0.0005 on {odd}",
    "tensor": "param group 0 has lr 0.0010000000474974513 on {first}, but 0.0005000000237487257 on {odd}",
    "betas": "param group 0 has betas [0.9, 0.95] on {first}, but [0.5, 0.95] on {odd}",
    "decay": "param group 0 has weight_decay 0.1 on {first}, but 0.25 on {odd}",
    "plateau": "param group 0 has lr 0.001 on {first}, but 1e-05 on {odd}",
    "clip": "the update has a max_norm of 0.0 on {first}, but 0.25 on {odd}",
    "steps": "the step has number 3 on {first}, but 4 on {odd}",
}
UNREAD = unread
FIRST = {2: "rank 0", 3: "ranks 0 and 1"}
COMBINATIONS = [
    (0, "fp32", 3),
    (3, "fp16", 2),
    *[
        pytest.param(stage, precision, world, marks=SLOW)
        for stage in range(4)
        for precision in ("fp32", "bf16", "fp16")
        for world in (2, 3)
        if (stage, precision, world) not in {(0, "fp32", 3), (3, "fp16", 2)}
    ],
]


def setting(stage: int, precision: str, **more: Any) -> dict[str, Any]:
    return config(stage, precision, optimizer=ADAMW, **more)


@pytest.mark.slow
@pytest.mark.parametrize("stage, precision, world", COMBINATIONS)
def test_other_numbers_on_one_rank_are_named_on_all_before_the_step(
    pools: Pools, stage: int, precision: str, world: int
) -> None:
    changes = list(WORDS) if stage else ["lr", "steps"]
    given = {"config": setting(stage, precision), "changes": changes}
    ranks = pools(world).run(other_numbers, given, timeout=120)
    for result in ranks:
        assert result == ranks[0] and list(result) == changes
        for change in changes:
            sentence = WORDS[change].format(first=FIRST[world], odd=f"rank {world - 1}")
            assert f"\n- {sentence}\n" in result[change][0], (change, result[change])
            assert not any(result[change][1:]), "training goes on when they agree again"


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, precision, world",
    [(1, "bf16", 2), pytest.param(0, "fp32", 3, marks=SLOW), pytest.param(3, "fp16", 3, marks=SLOW)],
)
def test_where_the_host_does_not_wait_it_is_told_one_step_later(
    pools: Pools, stage: int, precision: str, world: int
) -> None:
    """Also where one rank reads the statistics before the others."""
    given = {"config": setting(stage, precision, consistency_check_interval=1)}
    ranks = pools(world).run(UNREAD, {"function": "other_numbers", "changes": list(WORDS), **given}, timeout=120)
    for result in ranks:
        assert result == ranks[0]
        for change, words in WORDS.items():
            first, error, *after = result[change]
            assert first == "" and not any(after)
            assert f"\n- {words.format(first=FIRST[world], odd=f'rank {world - 1}')}\n" in error
    for errors in pools(world).run(UNREAD, {"function": "written", "name": "down.weight", **given}):
        assert errors[0] == "" and "'down.weight'" in errors[1]
    ranks = pools(world).run(UNREAD, {"function": "spoiling_update", "change": {"lr": float("inf")}, **given})
    for rank, result in enumerate(ranks):
        assert result["errors"][:2] == ["", ""]
        assert result["errors"][2].startswith("FloatingPointError: the update of step 3 made weights of param group 0")
        assert len(result["warnings"]) == (rank == 0)
        assert all("because the update of step 3 made weights" in warning for warning in result["warnings"])


@pytest.mark.slow
def test_other_gathers_of_one_rank_are_told(pools: Pools) -> None:
    partitioned = setting(3, "fp32", zero_optimization={"stage": 3, **PARTITIONED["moving"]})
    for result in pools(3).run(other_gathers, {"config": partitioned}):
        assert result[:2] == ["", ""]
        assert "what stage 3 has gathered has a hash" in result[2] and "on ranks 0 and 1, but" in result[2]
        assert "leaf_modules" in result[2]


def test_numbers_that_change_after_the_statistics_are_found_in_the_next_step(pools: Pools) -> None:
    for errors in pools(2).run(between_clipping_and_update, {"config": setting(1, "bf16")}):
        assert errors[:2] == ["", ""]
        assert "param group 0 has lr 0.001 on rank 0, but 0.0005 on rank 1" in errors[2]


def test_what_changes_alike_is_no_difference(pools: Pools) -> None:
    every = setting(2, "bf16", consistency_check_interval=1)
    assert pools(2).run(alike, {"config": every}) == [(4, [])] * 2


@pytest.mark.parametrize("stage, precision, world", COMBINATIONS)
def test_a_weight_that_one_rank_has_written_is_named_on_all(
    pools: Pools, stage: int, precision: str, world: int
) -> None:
    every = setting(stage, precision, consistency_check_interval=1)
    ranks = pools(world).run(written, {"config": every, "name": "down.weight"})
    for errors in ranks:
        assert errors == ranks[0]
        assert len(errors) == 1
        assert "parameter 'down.weight' is " in errors[0] and f"on {FIRST[world]}, but " in errors[0]
        assert errors[0].count("parameter '") == 1


def test_weights_are_compared_every_so_many_steps(pools: Pools) -> None:
    """At stage 0 a difference stays. With 0 nothing is compared."""
    for interval, expected in ((4, [True, True, False]), (0, [True] * 5)):
        setting_of = setting(0, "fp32", consistency_check_interval=interval)
        for errors in pools(2).run(written, {"config": setting_of, "name": "down.weight"}):
            assert [not error for error in errors] == expected


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_weight_is_compared_too(pools: Pools, stage: int) -> None:
    for error in pools(2).run(written_frozen, {"config": setting(stage, "bf16", consistency_check_interval=2)}):
        name, _, said = error.partition(": ")
        assert f"parameter '{name}' is " in said


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3])
def test_a_save_compares_at_once(pools: Pools, stage: int, tmp_path: Path) -> None:
    given = {"config": setting(stage, "fp32"), "save_dir": str(tmp_path)}
    for errors in pools(2).run(written, {**given, "name": "down.weight"}):
        assert "parameter 'down.weight' is " in errors[0]
    for result in pools(2).run(other_numbers, {**given, "changes": ["lr"]}):
        assert WORDS["lr"].format(first="rank 0", odd="rank 1") in result["lr"][0]
    assert not list(tmp_path.iterdir())


SPOILING = [
    (0, "fp32", {"lr": float("inf")}, "lr=inf"),
    (1, "bf16", {"lr": float("nan")}, "lr=nan"),
    (3, "fp16", {"lr": 1e38}, "lr=1e+38"),
    pytest.param(2, "fp16", {"weight_decay": float("inf")}, "weight_decay=inf", marks=SLOW),
]


@pytest.mark.parametrize("stage, precision, change, words", SPOILING)
def test_an_update_that_makes_weights_non_finite_is_named(
    pools: Pools, stage: int, precision: str, change: dict[str, float], words: str
) -> None:
    ranks = pools(2).run(spoiling_update, {"config": setting(stage, precision), "change": change})
    for result in ranks:
        first, error = result["errors"]
        assert first == "" and error == ranks[0]["errors"][1]
        assert error.startswith("FloatingPointError: the update of step 3 made weights of param group 0 non-finite")
        assert words in error and "from finite gradients" in error
        assert not result["warnings"], "no gradient is blamed"


@pytest.mark.parametrize("optimizer", ["foreach", pytest.param("fused", marks=SLOW)])
def test_torchs_own_optimizers_are_looked_at_as_well(pools: Pools, optimizer: str) -> None:
    chosen = config(1, "bf16", optimizer=("AdamW", {"lr": 1e-3, optimizer: True}))
    for result in pools(2).run(spoiling_update, {"config": chosen, "change": {"lr": float("inf")}}):
        assert "the update of step 3 made weights of param group 0 non-finite" in result["errors"][1]


def test_masters_on_the_host_are_looked_at_as_well(pools: Pools) -> None:
    offloaded = setting(2, "bf16") | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    for result in pools(2).run(spoiling_update, {"config": offloaded, "change": {"lr": float("inf")}}):
        assert "the update of step 3 made weights of param group 0 non-finite" in result["errors"][1]


def test_an_eps_of_zero_is_named_and_so_is_a_loss_scale_near_zero(pools: Pools) -> None:
    for result in pools(2).run(spoiling_from_the_start, {}):
        assert (
            "the update of step 1 made weights of param group 0 non-finite" in result["eps"]
            and "eps=0" in result["eps"]
        )
        assert "gradients divided by 1e-45 (loss scale)" in result["scale"]


def test_new_values_end_it(pools: Pools) -> None:
    plain = config(1, "bf16", optimizer=("SGD", {"lr": 0.01}))
    for errors in pools(2).run(new_values_after, {"config": plain, "change": {"lr": float("inf")}}):
        assert [not error for error in errors] == [True, False, True, True], errors


def test_spoilt_weights_are_not_saved(pools: Pools, tmp_path: Path) -> None:
    given = {"config": setting(1, "fp32"), "change": {"lr": float("inf")}, "save_dir": str(tmp_path)}
    for error in pools(2).run(spoilt_save, given):
        assert error.startswith("FloatingPointError: the update of step 3 made weights")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (2, "bf16")])
def test_weights_that_are_infinite_from_the_start_are_trained_around(pools: Pools, stage: int, precision: str) -> None:
    assert pools(2).run(infinite_from_the_start, {"config": config(stage, precision)}) == [[""] * 3] * 2


def test_a_loss_that_is_not_finite_while_its_gradients_are_is_said_once(pools: Pools) -> None:
    (applied, warnings), (_, elsewhere) = pools(2).run(bad_loss, {"config": config(2, "bf16")})
    assert applied == 3 and not elsewhere
    assert len(warnings) == 1 and warnings[0].startswith(
        "step 1: a loss on rank 1 is not finite although all gradients"
    )


@pytest.mark.parametrize("stage, world", [(1, 2), *[pytest.param(stage, 4, marks=SLOW) for stage in (0, 1, 3)]])
def test_ranks_with_parts_of_layers_stop_together(pools: Pools, stage: int, world: int) -> None:
    ranks = pools(world).run(parts_of_a_layer, {"stage": stage}, timeout=120)
    for result in ranks:
        assert result == ranks[0]
        assert f"but 0.0005 on rank {world - 1}" in result["lr"][0]
        assert "the update of step 2 made weights of param group 0 non-finite" in result["update"][1]
        weight = result["weight"][0]
        if world == 2:  # each rank has a part of its own
            assert not weight
        else:
            assert "parameter '0.weight' is " in weight and "on rank 1, but " in weight and "on rank 3" in weight


def test_leaf_modules_that_match_nothing_are_an_error(pools: Pools) -> None:
    wrong = config(3, zero={"leaf_modules": ["*.weights", "dwn"], "leaf_module": {"classes": ["Expert"]}})
    for error in pools(2).run(refused, {"config": wrong}):
        assert "zero_optimization.leaf_modules: expected classes or qualified names of modules in the model" in error
        assert "got '*.weights', 'dwn', which none has; the closest name is 'down'" in error
        assert "zero_optimization.leaf_module: " in error and "'Expert'" in error
    right = config(3, zero={"leaf_module": {"classes": ["Expert"], "names": ["down"]}})
    assert pools(2).run(refused, {"config": right}) == ["", ""]
