"""Setting and hyperparameters that every competitor is given, torch's AdamW, and the record of a competitor."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.slow_wire import Node

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
CLIP = 1.0

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """The same for all competitors. `micro_batch` counts sequences a rank. nvme_path: where those that offload to disk
    do. pipeline_micro_batches: into how many a pipeline divides the sequences of a step. nodes: that have equally many
    ranks each; none for this machine."""

    device: str = "cpu"
    dtype: str = "fp32"
    micro_batch: int = 2
    world_size: int = 2
    nvme_path: str = tempfile.gettempdir()
    pipeline_micro_batches: int = 4
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Competitor:
    """`build(model, setting, **options)` gives the step; `package` is what must be installed for it.

    communicates: False for a rank that trains alone. joint: every rank is given the sequences of all ranks, since one
    copy of the model is spread over them; the loss is that of the others all the same. peer: whose time "x peer" takes
    as 1. extra: takes part only if it is asked for.
    """

    name: str
    build: Callable[..., Any]
    package: str = "torch"
    options: dict[str, Any] = field(default_factory=dict)
    communicates: bool = True
    extra: bool = False
    joint: bool = False
    peer: str | None = None

    def missing(self) -> str | None:
        """Say why this competitor cannot run here, or None."""
        if importlib.util.find_spec(self.package) is None:
            return f"not installed: {self.package}"
        return None


def by_name(competitors: list[Competitor]) -> dict[str, Competitor]:
    return {competitor.name: competitor for competitor in competitors}


def optimizer_for(parameters: Any, **kind: bool) -> torch.optim.Optimizer:
    """AdamW with the benchmark's hyperparameters; `parameters` is a module or what an optimizer takes, `kind` is
    `fused=True` or `foreach=True`."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **kind)


def autocast(setting: Setting) -> contextlib.AbstractContextManager[Any]:
    """Context in which torch's own competitors compute."""
    return torch.autocast(setting.device, dtype=torch.bfloat16, enabled=setting.dtype == "bf16")
