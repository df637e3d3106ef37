"""Ranks that part while they train are told, on all ranks, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerolite
from tests.distributed.test_agreement import FIRST, is_last
from tests.toolkit import models
from tests.toolkit.compare import assert_same_on_ranks
from tests.toolkit.configs import ADAMW, at, config
from tests.toolkit.faults import Warnings
from tests.toolkit.lockstep import skipping_on_device
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import backward, make_engine, raised, run_steps


def setting(stage: int, precision: str, **more: Any) -> dict[str, Any]:
    return config(stage, precision, optimizer=ADAMW, **more)


def train(engine: Any, steps: int = 1, first: int = 0) -> None:
    run_steps(engine, steps, first, "OddModel")


def errors_of(engine: Any, first: int, most: int) -> list[str]:
    """The errors of the steps up to the first one that raises, the same on all ranks."""
    errors: list[str] = []
    while len(errors) < most and not (errors and errors[-1]):
        errors.append(raised(lambda: train(engine, 1, first + len(errors))))
    assert_same_on_ranks({"errors": errors})
    return errors


# -------------------------------------------------------------------- numbers of a step


def _lr(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] *= 0.5


def _steps(engine: Any) -> None:
    engine._parts.pipeline.state.counters.global_steps += 1


# What one rank changes, and what is said of it.
NUMBERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "lr": (_lr, "param group 0 has lr 0.001 on {first}, but 0.0005 on {odd}"),
    "tensor": (_lr, "param group 0 has lr 0.0010000000474974513 on {first}, but 0.0005000000237487257 on {odd}"),
    "betas": (
        lambda engine: engine.optimizer.param_groups[0].update(betas=(0.5, 0.95)),
        "param group 0 has betas [0.9, 0.95] on {first}, but [0.5, 0.95] on {odd}",
    ),
    "clip": (
        lambda engine: setattr(engine._parts.pipeline, "_max_norm", 0.25),
        "the update has a max_norm of 0.0 on {first}, but 0.25 on {odd}",
    ),
    "steps": (_steps, "the step has number 3 on {first}, but 4 on {odd}"),
}


def words(change: str) -> str:
    world = dist.get_world_size()
    return "\n- " + NUMBERS[change][1].format(first=FIRST[world], odd=f"rank {world - 1}")


@pytest.mark.slow
@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (3, "fp16")])
@on_ranks(3, timeout=120)
def test_other_numbers_on_one_rank_are_named_on_all(stage: int, precision: str, unread: bool) -> None:
    """Before the step; one step later where the host does not wait for statistics (``unread``), as on CUDA."""
    made = setting(stage, precision, **({"consistency_check_interval": 1} if unread else {}))
    for change in NUMBERS if stage == 1 else ["lr", "steps"]:
        with skipping_on_device(unread):
            engine = make_engine(made)
        if change == "tensor":
            engine.optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
        train(engine, 2)
        before = [dict(group) for group in engine.optimizer.param_groups]
        before[0]["lr"] = float(before[0]["lr"])
        if is_last():
            NUMBERS[change][0](engine)
        *quiet, error = errors_of(engine, 2, 3)
        assert quiet == [""] * unread and words(change) + "\n" in error, (change, error)
        for group, old in zip(engine.optimizer.param_groups, before, strict=True):
            group.update(old)
        if change not in ("clip", "steps"):
            train(engine, 1, 5)  # training goes on when they agree again


@pytest.mark.slow
@on_ranks(3)
def test_other_gathers_of_one_rank_are_told() -> None:
    """In the third step the last rank gathers another parameter than the rest, which a backend that compares nothing
    lets pass."""
    engine = make_engine(at(3, optimizer=ADAMW))
    train(engine, 2)
    if is_last():
        engine._parts.coordinator.schedule.note_gather(1, 1)
    said = raised(lambda: train(engine, 1, 2))
    assert "what stage 3 has gathered has a hash" in said and "on ranks 0 and 1, but" in said and "leaf_modules" in said


def _each(engine: Any, change: Callable[[torch.Tensor], Any]) -> None:
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            parameter.grad = change(parameter.grad)


# What a rank does after the statistics, where ``odd`` is True on the last rank alone; and what is said of it.
AFTER: dict[str, tuple[Callable[[Any, bool], Any], str]] = {
    "lr": (lambda engine, odd: odd and _lr(engine), "param group 0 has lr 0.001 on rank 0, but 0.0005 on rank 1"),
    "max_norm": (
        lambda engine, odd: nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3 if odd else 1e-2),
        "what was done to p.grad is mul_(",
    ),
    "mul_": (lambda engine, odd: _each(engine, lambda g: g.mul_(0.5 if odd else 1.0)), "mul_(1.0) (11 gradients) on"),
    "None": (
        lambda engine, odd: [setattr(p, "grad", None) for p in engine.module.parameters() if odd],
        "is nothing on rank 0, but set to None (11 gradients) on rank 1",
    ),
}


@pytest.mark.fast("2-step")
@pytest.mark.parametrize("then", ["clip", "step", "save"])
@on_ranks(2)
def test_numbers_that_change_after_the_statistics_are_found_in_the_next_step(then: str, tmp_path: Path) -> None:
    """Also if that step collects its statistics only after its own numbers are known, and in a save."""
    for change, (act, words) in AFTER.items():
        engine = make_engine(setting(1, "bf16"))
        said = ""
        for step in range(2):
            backward(engine, step, model="OddModel")
            engine.clip_gradients(100.0)
            act(engine, step == 1 and is_last())
            said = raised(engine.step)  # at once where the change is applied to the shards: the norm is another one
        if not said and then == "save":
            said = raised(engine.save_checkpoint, str(tmp_path))
        elif not said:
            backward(engine, 2, model="OddModel")
            if then == "clip":
                engine.clip_gradients(100.0)
            said = raised(engine.step)
        assert words in said, (change, said)
        assert_same_on_ranks({"said": said})


@pytest.mark.fast("2-1")
@pytest.mark.parametrize("accumulation", [1, 2])
@on_ranks(2)
def test_a_step_more_on_one_rank_is_told(accumulation: int) -> None:
    """The other rank is in its next backward: the gradient of this rank would count as zero."""
    engine = make_engine(config(1, "bf16", accumulation, optimizer=ADAMW))
    for micro in range(2 * accumulation - 1):
        backward(engine, 0, micro, model="OddModel")
        engine.step()
    if not is_last():
        backward(engine, 1, model="OddModel")
    said = raised(engine.step)
    last = 2 * accumulation
    assert f"the training so far has a count of backwards of {last} on rank 0, but {last - 1} on rank 1" in said, said
    assert_same_on_ranks({"said": said})


@on_ranks(2)
def test_what_changes_alike_is_no_difference() -> None:
    """Also between clipping and the update, and on a loss that all share."""
    engine = make_engine(setting(2, "bf16", consistency_check_interval=1))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, factor=0.5, patience=0)
    with Warnings() as warnings:
        for step in range(4):
            backward(engine, step, model="OddModel")
            engine.clip_gradients(100.0)
            engine.optimizer.param_groups[0]["weight_decay"] = 0.01 * step
            engine.step()
            schedule.step(engine.reduce(float(dist.get_rank() + step)))
    assert (engine.global_steps, warnings.messages) == (4, [])


# -------------------------------------------------------------------- weights


def written(made: dict[str, Any], unread: bool = False) -> Any:
    """An engine whose last rank has written into one element of a parameter after the first step."""
    with skipping_on_device(unread):
        engine = make_engine(made)
    train(engine)
    if is_last():
        with torch.no_grad():
            engine.module.down.weight.view(-1)[engine.module.down.weight.numel() // 2] += 1.0
    return engine


@pytest.mark.fast("3-0-fp32-False", "2-3-fp16-False")
@pytest.mark.parametrize(
    ("stage", "precision", "unread"),
    [(0, "fp32", False), (1, "bf16", False), (2, "fp16", False), (3, "fp16", False), (1, "bf16", True)],
)
@on_ranks(2, 3)
def test_a_weight_that_one_rank_has_written_is_named_on_all(stage: int, precision: str, unread: bool) -> None:
    *quiet, error = errors_of(written(setting(stage, precision, consistency_check_interval=1), unread), 1, 5)
    assert quiet == [""] * unread and "'down.weight'" in error
    if not unread:
        assert "parameter 'down.weight' is " in error and f"on {FIRST[dist.get_world_size()]}, but " in error
        assert error.count("parameter '") == 1


@on_ranks(2)
def test_weights_are_compared_every_so_many_steps() -> None:
    """At stage 0 a difference stays. With 0 nothing is compared."""
    for interval, quiet in ((4, [True, True, False]), (0, [True] * 5)):
        errors = errors_of(written(setting(0, "fp32", consistency_check_interval=interval)), 1, 5)
        assert [not error for error in errors] == quiet


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_frozen_weight_is_compared_too(stage: int) -> None:
    model = models.build(models.OddModel)
    name, parameter = next(iter(model.named_parameters()))
    parameter.requires_grad_(False)
    engine = zerolite.initialize(model, setting(stage, "bf16", consistency_check_interval=2))
    if is_last():
        with torch.no_grad():
            parameter.view(-1)[0] = 7.0
    assert f"parameter '{name}' is " in raised(lambda: train(engine, 3))


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_save_compares_at_once(stage: int, tmp_path: Path) -> None:
    engine = written(setting(stage, "fp32"))
    assert "parameter 'down.weight' is " in raised(lambda: engine.save_checkpoint(str(tmp_path)))
    engine = make_engine(setting(stage, "fp32"))
    train(engine, 2)
    if is_last():
        _lr(engine)
    assert words("lr") in raised(lambda: engine.save_checkpoint(str(tmp_path)))
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------- tensor parallelism, leaf modules


@pytest.mark.fast("4-1-lr")
@pytest.mark.parametrize(("stage", "what"), [(1, "lr"), (1, "weight"), (3, "weight")])
@on_ranks(4)
def test_ranks_with_parts_of_layers_stop_together(stage: int, what: str) -> None:
    """Two layers on two tensor-parallel ranks each; the last rank changes something after a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    made = config(stage, optimizer=ADAMW, consistency_check_interval=1)
    made["tensor_parallel"] = {"size": 2, "plan": {"0": "column", "2": "row"}}
    engine = zerolite.initialize(model, made)
    x = torch.ones(2, 4) * (1 + engine.data_parallel_rank)

    def step() -> None:
        engine.backward(engine(x).square().sum())
        engine.step()

    step()
    if is_last() and what == "lr":
        _lr(engine)
    elif is_last():
        with torch.no_grad():
            engine.module[0].weight.view(-1)[0] += 1.0
    errors = [raised(step), raised(step)]
    assert_same_on_ranks({"errors": errors})
    if what == "lr":
        assert "but 0.0005 on rank 3" in errors[0]
    else:
        assert "parameter '0.weight' is " in errors[0] and "on rank 1, but " in errors[0] and "on rank 3" in errors[0]


@on_ranks(2)
def test_leaf_modules_that_match_nothing_are_an_error() -> None:
    zero = {"leaf_modules": ["*.weights", "dwn"], "leaf_module": {"classes": ["Expert"]}}
    said = raised(make_engine, config(3, zero=zero))
    assert "zero_optimization.leaf_modules: expected classes or qualified names of modules in the model" in said
    assert "got '*.weights', 'dwn', which none has; the closest name is 'down'" in said
    assert "zero_optimization.leaf_module: " in said and "'Expert'" in said
    make_engine(config(3, zero={"leaf_module": {"classes": ["Expert"], "names": ["down"]}}))
