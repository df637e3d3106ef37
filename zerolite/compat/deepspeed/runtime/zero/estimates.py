"""Memory of a model at stages 2 and 3, from dry runs of the engine, in place of DeepSpeed's formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import zerolite
from zerolite.utils.text import format_size

_CPU = {"device": "cpu"}
_OPTIONS: dict[int, Sequence[tuple[str, ...]]] = {
    2: (("offload_optimizer",), ()),
    3: (("offload_optimizer", "offload_param"), ("offload_optimizer",), ()),
}


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float | None = None,
) -> None:
    """Print the memory that ``model`` needs at stage 2. ``additional_buffer_factor`` has no effect."""
    _print_estimates(2, model, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float | None = None,
) -> None:
    """Print the memory that ``model`` needs at stage 3. ``additional_buffer_factor`` has no effect."""
    _print_estimates(3, model, num_gpus_per_node, num_nodes)


def _print_estimates(stage: int, model: torch.nn.Module, num_gpus_per_node: int, num_nodes: int) -> None:
    """Print the memory of parameters, gradients and AdamW's states in bf16, for each kind of offload."""
    print(
        f"zerolite: memory at stage {stage} of {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{num_nodes} x {num_gpus_per_node} GPUs, without activations (`zerolite plan` shows them too)"
    )
    for offloaded in _OPTIONS[stage]:
        config: dict[str, Any] = {
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage, **dict.fromkeys(offloaded, _CPU)},
        }
        plan = zerolite.plan(lambda: model, config, num_gpus_per_node * num_nodes, nodes=num_nodes)
        host = 0 if plan.host is None else sum(plan.host.values())
        named = ", ".join(f"{name} cpu" for name in offloaded) or "no offload"
        print(f"  {format_size(plan.peak.bytes):>10} per GPU  {format_size(host):>10} of the host per GPU  {named}")
