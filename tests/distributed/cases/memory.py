"""Tensor bytes by the allocator's own account: the memory events of torch.profiler."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import zerolite
from tests import models
from tests.distributed.cases.training import engine_window, make_engine

TICKET = 48  # bytes of a fence's tensor, which gloo's threads free where the profiler does not see it


def memory_profile() -> Any:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)


def events_in_order(profiler: Any) -> list[tuple[int, int, str]]:
    """``(time, bytes, "")`` for every allocation and release, ``(time, 0, name)`` for every mark."""
    found = []
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            found.append((event.start_ns(), event.nbytes(), ""))
        elif event.name().startswith("mark "):
            found.append((event.start_ns(), 0, event.name()[5:]))
    return sorted(found)


def mark(name: str) -> None:
    with record_function(f"mark {name}"):
        pass


class LoraChain(models.Chain):
    """A chain whose layers are frozen, each with two trained thin ones of ``rank``."""

    def __init__(self, depth: int, width: int, rank: int) -> None:
        super().__init__(depth, width)
        self.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = layer(x) + up(down(x))
        return x


def resident_and_peak(
    config: dict[str, Any], depth: int, width: int, shared_memory: bool, rank: int = 0, steps: int = 3
) -> dict[str, float]:
    """Bytes per parameter held after the last step, and the most held during it, counted from before the model was
    made. ``rank``: with adapters of that rank on a frozen model."""
    os.environ["ZEROLITE_SHARED_MEMORY"] = "1" if shared_memory else "0"
    with memory_profile() as profiler:
        sizes = {"depth": depth, "width": width}
        engine = (
            zerolite.initialize(models.build(LoraChain, **sizes, rank=rank), config)
            if rank
            else make_engine(config, "Chain", sizes)
        )
        x = torch.randn(2, width)
        for step in range(steps):
            if step == steps - 1:
                mark("begin")
            engine.backward(engine(x).square().mean())
            engine.step()
        mark("end")
    held, peak, resident, inside = 0, 0, 0, False
    for _, nbytes, name in events_in_order(profiler):
        held += nbytes
        if name == "begin":
            inside, peak = True, held
        elif name == "end":
            inside, resident = False, held
        if inside:
            peak = max(peak, held)
    numel = depth * width**2
    return {"resident": resident / numel, "peak": peak / numel, "numel": numel}


def growth(config: dict[str, Any], steps: int, profiled: int) -> dict[str, int]:
    """Return what ``steps`` steps leave behind, after three to warm up: bytes of tensors that Python can reach, over
    all of them; the most tensors of one size by the allocator's account, over the last ``profiled``."""
    engine = make_engine(config, "Mlp")

    def train(count: int) -> None:
        for step in range(count):
            engine_window(engine, "Mlp", step, 1)

    train(3)
    before = tensor_bytes()
    train(steps - profiled)
    with memory_profile() as profiler:
        mark("begin")
        train(profiled)
        mark("end")
    left: Counter[int] = Counter()  # tensors by size
    counting = False
    for _, nbytes, name in events_in_order(profiler):
        counting = name == "begin" or (counting and name != "end")
        if counting and nbytes:
            left[abs(nbytes)] += 1 if nbytes > 0 else -1
    del left[TICKET]
    return {"left": max(left.values()), "reachable": tensor_bytes() - before}


def tensor_bytes() -> int:
    """Bytes of all storages that Python can reach."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter) and item.device.type != "meta":
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
    return sum(storages.values())


def engines_one_after_the_other(config: dict[str, Any], count: int) -> list[int]:
    """Tensor bytes alive after each of ``count`` engines was made, trained and dropped."""
    alive = []
    for _ in range(count):
        engine = make_engine(config, "Chain", {"depth": 4, "width": 64})
        engine.backward(engine(torch.randn(2, 64)).square().mean())
        engine.step()
        del engine
        alive.append(tensor_bytes())
        deadline = time.monotonic() + 2.0
        while alive[-1] > 0 and time.monotonic() < deadline:
            time.sleep(0.02)  # gloo's threads let go of the last small messages a moment later
            alive[-1] = tensor_bytes()
    return alive


def dropped_without_gc(config: dict[str, Any]) -> dict[str, Any]:
    """The model outlives its engine and still works as a plain module."""
    model = models.build(models.Mlp)
    engine = zerolite.initialize(model, config)
    batch = models.float_batch(0, 0, dist.get_rank())
    engine.backward(models.square_loss(engine, batch))
    engine.step()
    del engine
    gc.collect()
    models.square_loss(model, batch).backward()
    return {"gradients": all(p.grad is not None for p in model.parameters())}
