"""Measured time of each layer, for partition_method "profile"."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from zerolite.pipe.modules import LayerSpec, PipelineModule, TiedLayerSpec
from zerolite.utils.nested import map_tensors

REPEATS = 3


def seconds_of_layers(model: PipelineModule, device: torch.device) -> list[float]:
    """Forward and backward of each layer on ``model.example``, the best of three, one layer in memory at a time. Raises
    ValueError without an example."""
    if model.example is None:
        raise ValueError(
            'PipelineModule: partition_method "profile" measures the layers on inputs of one micro-batch; pass '
            "PipelineModule(..., example=inputs)"
        )
    value = map_tensors(lambda tensor: tensor.to(device), model.example)
    seconds = []
    with torch.random.fork_rng():
        for spec in model.specs:
            layer = spec.build() if isinstance(spec, LayerSpec) else spec
            if isinstance(layer, nn.Module):
                layer = layer.to(device)
            forward = getattr(spec, "forward_fn", None) if isinstance(spec, TiedLayerSpec) else None
            best, value = min(
                (_timed(layer, forward, value, device) for _ in range(REPEATS)), key=lambda measured: measured[0]
            )
            seconds.append(best)
            if isinstance(layer, nn.Module):
                layer.zero_grad(set_to_none=True)
    return seconds


def _timed(layer: Any, forward: Any, value: Any, device: torch.device) -> tuple[float, Any]:
    inputs = map_tensors(lambda t: t.detach().requires_grad_(t.is_floating_point()), value)
    start = _now(device)
    with torch.enable_grad():
        outputs = layer(inputs) if forward is None else forward(layer, inputs)
        made = [t for t in (outputs if isinstance(outputs, (tuple, list)) else (outputs,)) if t.requires_grad]
        if made:
            torch.autograd.backward(made, [torch.ones_like(tensor) for tensor in made])
    return _now(device) - start, map_tensors(lambda tensor: tensor.detach(), outputs)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
