"""What every competitor is given: the setting, the hyperparameters, torch's AdamW, the keys of a JSON config."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
CLIP = 1.0

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """What is the same for all competitors. `micro_batch` counts sequences a rank. nvme_path: where those that offload
    to disk do. pipeline_micro_batches: into how many a pipeline divides the sequences of a step."""

    device: str = "cpu"
    dtype: str = "fp32"
    micro_batch: int = 2
    world_size: int = 2
    nvme_path: str = tempfile.gettempdir()
    pipeline_micro_batches: int = 4


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
        """Why this competitor cannot run here, or None."""
        if importlib.util.find_spec(self.package) is None:
            return f"not installed: {self.package}"
        return None

    def make_step(self, model: nn.Module, setting: Setting) -> Step:
        step: Step = self.build(model, setting, **self.options)
        return step


def optimizer_for(parameters: Any, **kind: bool) -> torch.optim.Optimizer:
    """AdamW with the benchmark's hyperparameters; `parameters` is a module or what an optimizer takes, `kind` is
    `fused=True` or `foreach=True`."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **kind)


def json_config(setting: Setting, stage: int) -> dict[str, Any]:
    """The keys that DeepSpeed and zerolite share."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setting.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
    }
    if setting.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def adamw_entry(fused: bool) -> dict[str, Any]:
    """The block `optimizer` for zerolite. fused: torch's fused AdamW updates; otherwise zerolite's kernels."""
    params = {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY}
    return {"type": "AdamW", "params": params | ({"fused": True} if fused else {})}


def autocast(setting: Setting) -> contextlib.AbstractContextManager[Any]:
    """What torch's own competitors compute under."""
    if setting.dtype == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(setting.device, dtype=torch.bfloat16)


def engine_loop(engine: Any) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
