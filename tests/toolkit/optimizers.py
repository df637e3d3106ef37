"""Training runs whose optimizer is looked at: states, masters, launches of kernels."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import Optimizer
from tests.toolkit.training import BATCHES, LOSSES, snapshot
from zerolite.ops import Lion, library
from zerolite.ops.cpu_kernels import CpuKernels

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "SGD": torch.optim.SGD,
    "Lion": Lion,
}
TORCH_NAMES = {"Adam": "AdamW"}  # of the config: decoupled weight decay unless it says otherwise
Branches = Sequence[Sequence[str]]  # by step, by rank: the layers that a forward of Late goes through


def loss_of(model: Any, name: str, step: int, micro: int, rank: int, branches: Branches | None = None) -> Tensor:
    if branches is not None:
        x, y = models.float_batch(step, micro, rank)
        return models.square_loss(model, (x, branches[step][rank], y))
    return LOSSES[name](model, BATCHES[name](step, micro, rank))


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def torchs(optimizer: Optimizer) -> tuple[str, dict[str, Any]]:
    """Class name and arguments for torch of what a config's optimizer means."""
    name, params = optimizer
    params = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    decoupled = params.pop("adam_w_mode", True)
    return (TORCH_NAMES.get(name, name) if decoupled else name), params


def plain_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    name: str,
    steps: Sequence[int],
    branches: Branches | None = None,
) -> None:
    """Train in plain PyTorch on the joint batch of all ranks."""
    for step in steps:
        optimizer.zero_grad()
        ranks = range(dist.get_world_size())
        torch.stack([loss_of(model, name, step, 0, rank, branches) for rank in ranks]).mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def plain(
    optimizer: Optimizer, steps: int = 4, model: str = "OddModel", **more: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and the optimizer after plain PyTorch's training."""
    module = models.build(getattr(models, model))
    name, params = torchs(optimizer)
    made = CLASSES[name](_trained(module), **params)
    plain_steps(module, made, model, range(steps), **more)
    return module, made


def engine_steps(engine: Any, name: str, steps: Sequence[int], branches: Branches | None = None) -> None:
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps):
            engine.backward(loss_of(engine, name, step, micro, dist.get_rank(), branches))
            engine.step()


def facts(engine: Any) -> dict[str, Any]:
    """All that comparisons look at. Called on all ranks."""
    saved = engine.optimizer.state_dict()
    return {
        "parameters": snapshot(engine),
        "states": by_name(engine, saved["state"]),
        "masters": by_name(engine, saved["masters"]),
        "method": type(engine.optimizer.method).__name__,
        "fused": engine.optimizer.param_groups[0].get("fused"),
        "skipped": engine.skipped_steps,
        "norm": engine.get_global_grad_norm(),
    }


def by_name(engine: Any, states: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Copies of the states of a state dict, which has them by position."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    order = [names[id(p)] for group in engine.optimizer.param_groups for p in group["params"]]
    return {order[position]: copy.deepcopy(state) for position, state in states.items()}


def train(
    config: dict[str, Any],
    model: str = "OddModel",
    steps: int = 4,
    own: tuple[str, dict[str, Any]] | None = None,
    before: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """Train, and return :func:`facts`.

    own: class and arguments of an optimizer instance of the user's, with which plain PyTorch takes the first ``before``
    steps. more: branches.
    """
    module = models.build(getattr(models, model))
    if own is None:
        engine = zerolite.initialize(module, config)
    else:
        optimizer = CLASSES[own[0]](_trained(module), **own[1])
        plain_steps(module, optimizer, model, range(before), **more)
        engine = zerolite.initialize(module, config, optimizer=optimizer)
    engine_steps(engine, model, range(before, steps), **more)
    return facts(engine)


def assert_same_facts(one: dict[str, Any], other: dict[str, Any], what: str) -> None:
    """The same bits of parameters, masters and states."""
    assert_same_bits(one["parameters"], other["parameters"], what)
    for kind in ("masters", "states"):
        assert sorted(one[kind]) == sorted(other[kind]), f"{what}: {kind}"
        for name, value in one[kind].items():
            if isinstance(value, Tensor):
                assert torch.equal(value, other[kind][name]), f"{what}: {kind} of {name}"
            else:
                assert_same_bits(value, other[kind][name], f"{what}: {kind} of {name}")


@contextlib.contextmanager
def without_kernels(ranks: Sequence[int], reason: str = "they are not wanted. Want them.") -> Iterator[None]:
    """These ranks cannot have the kernels, for this reason."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() in ranks:
            patch.setattr(library, "_load", lambda *_: reason)
        yield


@contextlib.contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """The launches of the CPU kernels, by kind: how many tensors each one took."""
    update, squares = CpuKernels.update, CpuKernels.squares
    calls: dict[str, list[int]] = {"update": [], "squares": []}

    def counting_update(self: CpuKernels, call: Any) -> None:
        calls["update"].append(len(call.params))
        update(self, call)

    def counting_squares(self: CpuKernels, call: Any) -> None:
        calls["squares"].append(len(call.values))
        squares(self, call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuKernels, "update", counting_update)
        patch.setattr(CpuKernels, "squares", counting_squares)
        yield calls
