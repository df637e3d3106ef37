"""A stack of tiny layers, in which nearly all time is the host's, and a rank whose collectives send nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 32
BATCH = 8
FAKE_WORLD = 64
# A unit per module that owns parameters, with a gather and a reduction of its own; and gathered for every use.
MODULES = {
    "stage3_module_granularity_threshold": 0,
    "stage3_prefetch_bucket_size": 1,
    "reduce_bucket_size": 1,
}
RESHARD = {**MODULES, "stage3_max_reuse_distance": 0}


class Layer(nn.Module):
    """`(batch, WIDTH)` in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def build_stack(layers: int, seed: int = 0) -> nn.Sequential:
    """The same weights for every competitor."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Layer() for _ in range(layers)))


def make_inputs(count: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(count)]


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


class CollectiveClock:
    """Seconds spent inside the collectives of a communicator that only pretends: none of them are the runtime's."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self._now = 0.0, now

    def wrap(self, owner: Any, method: str) -> None:
        inner, now = getattr(owner, method), self._now

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = now()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += now() - begin

        setattr(owner, method, timed)


def null_communicator(clock: CollectiveClock, ranks: int = FAKE_WORLD) -> Any:
    """One rank of so many, alone; `clock` takes the time of what it does instead of collectives."""
    from benchmarks.null_communicator import NullCommunicator

    communicator = NullCommunicator(0, ranks)
    for method in ("_gather_shards", "_reduce_scatter", "_all_reduce", "_all_gather"):
        clock.wrap(communicator, method)
    return communicator
