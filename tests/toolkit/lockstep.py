"""A model whose layers take part or not, and a step that is skipped on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from zerolite.engine.options import SKIPS_ON_DEVICE


class Gated(nn.Module):
    """A linear layer with a second weight that a rank may leave unused, so that all ranks run the same modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.extra = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Tensor, use_extra: bool) -> Tensor:
        hidden = torch.tanh(x @ self.weight)
        return hidden + x @ self.extra if use_extra else hidden


class Layers(nn.Module):
    """``x [B, 7]`` -> ``[B, 3]``; ``extras`` says which of the gated layers use their second weight."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.layers = nn.ModuleList(Gated(5) for _ in range(layers))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor, extras: tuple[bool, ...] = (True, True, True)) -> Tensor:
        x = self.first(x)
        for layer, use_extra in zip(self.layers, extras, strict=True):
            x = layer(x, use_extra)
        return self.last(self.gain * x)


@contextlib.contextmanager
def skipping_on_device(enabled: bool) -> Iterator[None]:
    """Let engines that are made inside decide on the CPU as they do on CUDA."""
    if enabled:
        SKIPS_ON_DEVICE.add("cpu")
    try:
        yield
    finally:
        SKIPS_ON_DEVICE.discard("cpu")


def make_engine(config: dict[str, Any], on_device: bool, layers: int = 3) -> Any:
    with skipping_on_device(on_device):
        return zerolite.initialize(models.build(Layers, layers=layers), config)


def loss_of(
    engine: Any, step: int, micro: int, extras: tuple[bool, ...] = (True, True, True), bad: bool = False
) -> Tensor:
    x, y = models.float_batch(step, micro, engine.rank)
    loss = F.mse_loss(engine(x, extras).float(), y)
    return loss * float("inf") if bad else loss
