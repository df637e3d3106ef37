"""Cases of the examples' tests for the workers, and the plain PyTorch that they are compared with."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.cli.helpers import ROOT

EXAMPLES = ROOT / "examples"
State = dict[str, Tensor]
Sections = dict[str, dict[str, Any]]  # zero_optimization, by name of the run


def load(example: str, name: str = "train") -> ModuleType:
    """A module of an example, which finds the modules beside it."""
    directory = EXAMPLES / example
    spec = importlib.util.spec_from_file_location(f"examples_{example}_{name}", directory / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(directory))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(directory))
    return module


def read_config(example: str, name: str, **params: Any) -> dict[str, Any]:
    """A config of an example, with further parameters of its optimizer."""
    config: dict[str, Any] = json.loads((EXAMPLES / example / f"{name}.json").read_text())
    config["optimizer"]["params"].update(params)
    return config


def plain_optimizer(config: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
    """The torch optimizer that a config means."""
    section = config["optimizer"]
    return getattr(torch.optim, section["type"])(parameters, **section["params"])


# ------------------------------------------------------------------------------------------------ plain loops


def run_script(path: str, arguments: list[str], port: int) -> str:
    """Run a script as a launcher would, in this process, and return what it printed."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    directory = str(Path(path).parent)
    modules = set(sys.modules)
    argv, sys.argv = sys.argv, [path, *arguments]
    sys.path.insert(0, directory)
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = argv
        sys.path.remove(directory)
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(directory):
                del sys.modules[name]
    return output.getvalue()


# ------------------------------------------------------------------------------------------------ digits


def uneven_rows(rank: int) -> slice:
    """Rank 0 has one sample, rank 1 two, rank 2 three."""
    first = rank * (rank + 1) // 2
    return slice(first, first + rank + 1)


def joint_batch(world: int) -> tuple[Tensor, Tensor]:
    """Inputs and weights of the loss, [samples, 3, 2, 4], far from zero mean."""
    random = torch.Generator().manual_seed(3)
    shape = (uneven_rows(world - 1).stop, 3, 2, 4)
    return torch.randn(shape, generator=random) + 5, torch.randn(shape, generator=random)


def norm_of(kind: type[nn.BatchNorm2d]) -> nn.BatchNorm2d:
    norm = kind(3)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
        norm.bias.copy_(torch.tensor([0.1, 0.0, -0.3]))
    return norm


def joint_batch_norm() -> dict[str, Any]:
    """Two passes over uneven parts of a batch: this rank's outputs and gradients, and what all ranks share."""
    norm = norm_of(load("digits", "batch_norm").JointBatchNorm2d)
    x, weights = (tensor[uneven_rows(dist.get_rank())] for tensor in joint_batch(dist.get_world_size()))
    for _ in range(2):
        x = x.detach().requires_grad_()
        norm.zero_grad()
        y = norm(x)
        (y * weights).sum().backward()
    gradients = [norm.weight.grad, norm.bias.grad]
    for gradient in gradients:
        dist.all_reduce(gradient)
    buffers = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    half = norm(x.detach().bfloat16()).detach()
    norm.load_state_dict(buffers, strict=False)
    evaluated = norm.eval()(x).detach()
    own = {"y": y.detach(), "gradient": x.grad, "half": half, "evaluated": evaluated}
    return {**own, "gradients": gradients, "buffers": buffers}


def plain_batch_norm(world: int) -> dict[str, Any]:
    """The same with torch's BatchNorm2d of the joint batch."""
    norm = norm_of(nn.BatchNorm2d)
    x, weights = joint_batch(world)
    x.requires_grad_()
    for _ in range(2):
        x.grad = None
        norm.zero_grad()
        y = norm(x)
        (y * weights).sum().backward()
    gradients, buffers = [norm.weight.grad, norm.bias.grad], {name: b.clone() for name, b in norm.named_buffers()}
    return {
        "y": y.detach(),
        "gradient": x.grad,
        "evaluated": norm.eval()(x).detach(),
        "gradients": gradients,
        "buffers": buffers,
    }


# ------------------------------------------------------------------------------------------------ LoRA
