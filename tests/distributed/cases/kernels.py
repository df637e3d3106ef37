"""Training with the kernels on every rank, with everything that an optimizer can be told on the way."""

from __future__ import annotations

import collections
import contextlib
import copy
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zerolite
from tests.toolkit import models
from tests.toolkit.faults import Warnings, poison
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
Groups = Sequence[tuple[str, dict[str, Any]]]  # a part of a parameter's name, and the options of its group
Ways = Sequence[Sequence[str]]  # by step, by rank: the layers that a forward goes through


class Late(nn.Module):
    """``x [B, 7]``, ``way`` -> ``[B, 3]``: the sum of the layers that ``way`` names. No way goes through ``never``."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(7, 3)
        self.b = nn.Linear(7, 3)
        self.c = nn.Linear(7, 3)
        self.never = nn.Linear(7, 3)

    def forward(self, x: Tensor, way: str) -> Tensor:
        return torch.stack([torch.tanh(getattr(self, name)(x)) for name in way]).sum(0)


def make_model(name: str) -> nn.Module:
    return models.build(Late if name == "Late" else getattr(models, name))


def loss_of(model: Any, name: str, step: int, micro: int, rank: int, ways: Ways | None) -> Tensor:
    if ways is None:
        return LOSSES[name](model, BATCHES[name](step, micro, rank))
    x, y = models.float_batch(step, micro, rank)
    return models.square_loss(model, (x, ways[step][rank], y))


def grouped(model: nn.Module, groups: Groups | None) -> list[dict[str, Any]]:
    """Param groups by name; what no entry takes is in a last group without options."""
    rest = {name: p for name, p in model.named_parameters() if p.requires_grad}
    made = []
    for part, options in groups or ():
        made.append({"params": [rest.pop(name) for name in list(rest) if part in name], **options})
    return [*made, {"params": list(rest.values())}]


def change(optimizer: torch.optim.Optimizer, changes: dict[int, dict[str, Any]] | None, step: int) -> None:
    for group in optimizer.param_groups:
        group.update((changes or {}).get(step, {}))


def plain_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    name: str,
    steps: Sequence[int],
    world: int,
    ways: Ways | None = None,
    changes: dict[int, dict[str, Any]] | None = None,
) -> None:
    """Plain PyTorch on what all ranks see."""
    for step in steps:
        change(optimizer, changes, step)
        optimizer.zero_grad()
        torch.stack([loss_of(model, name, step, 0, rank, ways) for rank in range(world)]).mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def by_name(engine: Any, states: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Copies of the states of a state dict, which has them by position."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    order = [names[id(p)] for group in engine.optimizer.param_groups for p in group["params"]]
    return {order[position]: copy.deepcopy(state) for position, state in states.items()}


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
    }


def make_engine(config: dict[str, Any], model: str, groups: Groups | None = None, **more: Any) -> Any:
    module = make_model(model)
    if groups is not None:
        more["model_parameters"] = grouped(module, groups)
    return zerolite.initialize(module, config, **more)


def engine_steps(
    engine: Any,
    name: str,
    steps: Sequence[int],
    ways: Ways | None = None,
    changes: dict[int, dict[str, Any]] | None = None,
) -> list[float]:
    """Windows; returns the norms."""
    norms = []
    for step in steps:
        change(engine.optimizer, changes, step)
        for micro in range(engine.gradient_accumulation_steps):
            engine.backward(loss_of(engine, name, step, micro, dist.get_rank(), ways))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def train(
    config: dict[str, Any],
    model: str = "OddModel",
    steps: int = 4,
    groups: Groups | None = None,
    own: tuple[str, dict[str, Any]] | None = None,
    before: int = 0,
    ways: Ways | None = None,
    changes: dict[int, dict[str, Any]] | None = None,
    kernels: bool = True,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Train and give :func:`facts` and the norms.

    own: class and arguments of an optimizer instance of the user's, with which plain PyTorch takes the first ``before``
    steps. changes: by step, what is written into the param groups before it. kernels: False takes them away. dtype: of
    the model.
    """
    with contextlib.nullcontext() if kernels else taken_away([dist.get_rank()]):
        if own is None:
            module = make_model(model).to(dtype)
            engine = zerolite.initialize(module, config, model_parameters=grouped(module, groups))
        else:
            module = make_model(model)
            optimizer = CLASSES[own[0]](grouped(module, groups), **own[1])
            plain_steps(module, optimizer, model, range(before), dist.get_world_size(), ways, changes)
            engine = zerolite.initialize(module, config, optimizer=optimizer)
        norms = engine_steps(engine, model, range(before, steps), ways, changes)
        return facts(engine) | {"norms": norms}


def train_many(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Several runs of :func:`train` in one call, by name."""
    return {name: train(**run) for name, run in runs.items()}


# -------------------------------------------------------------------- saving


def save_and_load(
    first: dict[str, Any],
    second: dict[str, Any],
    model: str = "OddModel",
    ways: Ways | None = None,
    used: bool = False,
) -> dict[str, Any]:
    """Three steps with config ``first``, a save, three more; and the same three by another engine with config
    ``second`` that loads what was saved, the module's values first. ``used``: that one has trained before."""
    engine = make_engine(first, model)
    engine_steps(engine, model, range(3), ways)
    values = engine.full_state_dict()
    saved = copy.deepcopy(engine.optimizer.state_dict())
    engine_steps(engine, model, range(3, 6), ways)
    resumed = make_engine(second, model)
    if used:
        engine_steps(resumed, model, range(5), ways)
    resumed.load_full_state_dict(values)
    resumed.optimizer.load_state_dict(saved)
    at_load = facts(resumed)
    engine_steps(resumed, model, range(3, 6), ways)
    return {
        "saved": by_name(engine, saved["state"]),
        "loaded": at_load["states"],
        "wanted": facts(engine),
        "resumed": facts(resumed),
    }


def into_plain_torch(config: dict[str, Any], own: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """World 1, stage 0: three steps with the engine, then its state goes to torch's optimizer, which goes on; beside
    the engine that goes on."""
    engine = make_engine(config, "Mlp")
    engine_steps(engine, "Mlp", range(3))
    model = make_model("Mlp")
    model.load_state_dict(engine.full_state_dict())
    optimizer = CLASSES[own[0]](model.parameters(), **own[1])
    saved = engine.optimizer.state_dict()
    shape = {key: sorted(state) for key, state in saved["state"].items()}
    optimizer.load_state_dict({"state": copy.deepcopy(saved["state"]), "param_groups": saved["param_groups"]})
    engine_steps(engine, "Mlp", range(3, 6))
    plain_steps(model, optimizer, "Mlp", range(3, 6), 1)
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    theirs = {
        key: sorted(k for k, v in state.items() if v is not None)
        for key, state in optimizer.state_dict()["state"].items()
    }
    return {"engine": snapshot(engine), "plain": plain, "shape": shape, "theirs": theirs}


def refused_option(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """An option that the kernels cannot follow appears in the param groups midway, and goes again."""
    engine = make_engine(config, "Mlp")
    engine_steps(engine, "Mlp", range(2))
    before, old = facts(engine), engine.optimizer.param_groups[0][key]
    engine.optimizer.param_groups[0][key] = value
    try:
        engine_steps(engine, "Mlp", range(2, 3))
        error = "none"
    except ValueError as refusal:
        error = str(refusal)
    after = facts(engine)
    engine.optimizer.param_groups[0][key] = old
    engine.zero_grad()
    engine_steps(engine, "Mlp", range(2, 4))
    return {"error": error, "before": before, "after": after, "end": facts(engine)}


# -------------------------------------------------------------------- kernels that are not there


@contextlib.contextmanager
def taken_away(ranks: Sequence[int], reason: str = "they are not wanted. Want them.") -> Iterator[None]:
    """These ranks cannot have the kernels, for this reason."""
    load = library._load
    if dist.get_rank() in ranks:
        library._load = lambda *_: reason  # type: ignore[assignment]
    try:
        yield
    finally:
        library._load = load


def fall_back(config: dict[str, Any], ranks: Sequence[int], reason: str) -> dict[str, Any]:
    """Train where the kernels are missing on some ranks, with two engines one after the other."""
    with Warnings() as warnings, taken_away(ranks, reason), counted() as calls:
        result = train(config)
        again = train(config)
    same = all(torch.equal(value, again["parameters"][name]) for name, value in result["parameters"].items())
    return {**result, "warnings": warnings.messages, "updates": len(calls["update"]), "same": same}


def switched_off(config: dict[str, Any]) -> dict[str, Any]:
    """Train with the environment variable that switches the kernels off."""
    os.environ["ZEROLITE_KERNELS"] = "0"
    library._load.cache_clear()
    try:
        with Warnings() as warnings, counted() as calls:
            result = train(config)
    finally:
        del os.environ["ZEROLITE_KERNELS"]
        library._load.cache_clear()
    return {**result, "warnings": warnings.messages, "updates": len(calls["update"])}


# -------------------------------------------------------------------- what a step costs


@contextlib.contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """The launches of the CPU kernels, by kind: how many tensors each one took."""
    update, squares = CpuKernels.update, CpuKernels.squares
    calls: dict[str, list[int]] = {"update": [], "squares": []}

    def counting_update(self: CpuKernels, call: Any) -> None:
        calls["update"].append(len(call.params))
        update(self, call)

    def counting_squares(self: CpuKernels, sums: Tensor, values: Sequence[Tensor], table: Tensor) -> None:
        calls["squares"].append(len(values))
        squares(self, sums, values, table)

    CpuKernels.update, CpuKernels.squares = counting_update, counting_squares  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        CpuKernels.update, CpuKernels.squares = update, squares  # type: ignore[method-assign]


class Passes(TorchDispatchMode):
    """The operators that read or write some memory; those that only make views do not count."""

    def __init__(self, memory: dict[str, list[Tensor]]) -> None:
        super().__init__()
        self._ranges = {
            name: [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.numel()]
            for name, tensors in memory.items()
        }
        self.seen: dict[str, list[str]] = {name: [] for name in memory}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returned = [r.alias_info for r in func._schema.returns]
        view = any(info is not None and not info.is_write for info in returned)
        tensors = [t for t in tree_leaves((args, kwargs or {}, result)) if isinstance(t, Tensor) and t.numel()]
        for name, ranges in self._ranges.items():
            touched = any(
                t.data_ptr() < end and t.data_ptr() + t.numel() * t.element_size() > start
                for t in tensors
                for start, end in ranges
            )
            if touched and not view:
                self.seen[name].append(str(func).removesuffix(".default"))
        return result


class TwoDtypes(nn.Module):
    """``x [B, 7]`` -> ``[B, 3]``; one layer is in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 3).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).bfloat16()).float()


def step_costs(config: dict[str, Any], model: str = "Mlp", ways: Ways | None = None) -> dict[str, Any]:
    """The launches and the passes over gradients, masters and compute parameters of the third step."""
    module = models.build(TwoDtypes) if model == "TwoDtypes" else make_model(model)
    engine = zerolite.initialize(module, config)
    batches = "Mlp" if model == "TwoDtypes" else model
    engine_steps(engine, batches, range(2), ways)
    for micro in range(engine.gradient_accumulation_steps - 1):
        engine.backward(loss_of(engine, batches, 2, micro, dist.get_rank(), ways))
        engine.step()
    engine.backward(loss_of(engine, batches, 2, 9, dist.get_rank(), ways))
    engine.reduce_gradients()
    buffer, reducer = engine._pipeline._buffer, engine._reducer
    buckets = range(len(buffer.layout.buckets))
    memory = {
        "gradients": [reducer.reduced(bucket) for bucket in buckets],
        "masters": buffer.master,
        "compute": buffer.compute,
    }
    with counted() as calls, Passes(memory) as passes:
        engine.step()
    return {"calls": calls, "passes": passes.seen, "buckets": len(buckets)}


class Calls(TorchDispatchMode):
    """Count the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def torchs_calls(config: dict[str, Any]) -> dict[str, Any]:
    """Calls of torch's fused optimizer, and multiplications of gradients by the step's factor, in the third step."""
    engine = make_engine(config, "Mlp")
    engine_steps(engine, "Mlp", range(2))
    engine.backward(loss_of(engine, "Mlp", 2, 0, dist.get_rank(), None))
    engine.clip_gradients(0.01)
    with Calls() as calls:
        engine.update()
    counts = {name: calls.counts[name] for name in ("_fused_adamw_", "_foreach_mul_", "mul_")}
    flats = engine._pipeline._buffer.master
    masters = [(bucket, flats[bucket].numel()) for bucket in reversed(engine._reducer.order.buckets)]
    pieces = [len(pieces) for pieces in engine.optimizer.pieces_by_bucket]
    return {"method": type(engine.optimizer.method).__name__, "masters": masters, "pieces": pieces, **counts}


def two_phases(config: dict[str, Any]) -> dict[str, Any]:
    """update() and publish() one after the other, and step() beside them."""
    parts, whole = make_engine(config, "Mlp"), make_engine(config, "Mlp")
    changed = []
    for step in range(3):
        parts.backward(loss_of(parts, "Mlp", step, 0, dist.get_rank(), None))
        before = snapshot(parts)
        parts.update()
        updated = snapshot(parts)
        parts.publish()
        published = snapshot(parts)
        parts.zero_grad()
        pairs = [(before, updated), (updated, published)]
        changed.append([any(not torch.equal(a[n], b[n]) for n in a) for a, b in pairs])
    engine_steps(whole, "Mlp", range(3))
    return {"changed": changed, "parts": facts(parts), "whole": facts(whole)}


# -------------------------------------------------------------------- steps that are skipped


def skip_one(config: dict[str, Any]) -> dict[str, Any]:
    """Four steps; between the second and the third, on rank 0, one whose gradient is infinite; and without that one."""
    runs = {}
    for name in ("with", "without"):
        engine = make_engine(config, "Mlp")
        engine_steps(engine, "Mlp", range(2))
        if name == "with":
            before = facts(engine)
            hook = poison(engine, "first.weight", float("inf")) if dist.get_rank() == 0 else contextlib.nullcontext()
            engine_steps(engine, "Mlp", range(7, 8))
            if dist.get_rank() == 0:
                hook.remove()
            after = facts(engine)
        engine_steps(engine, "Mlp", range(2, 4))
        runs[name] = facts(engine)
    return {**runs, "before": before, "after": after}


def in_turns(configs: list[dict[str, Any]], together: bool) -> list[dict[str, Any]]:
    """Engines trained step by step in turns, or one after the other."""
    engines = [make_engine(config, "Mlp") for config in configs]
    order = [(s, e) for s in range(3) for e in engines] if together else [(s, e) for e in engines for s in range(3)]
    for step, engine in order:
        engine_steps(engine, "Mlp", range(step, step + 1))
    return [facts(engine) for engine in engines]


def initialize_error(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> str:
    """Return the error of ``initialize`` about the config, for an Mlp of this dtype."""
    try:
        zerolite.initialize(make_model("Mlp").to(dtype), config)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
