"""``deepspeed.runtime.zero.stage3``: the estimate of a model's memory."""

from __future__ import annotations

import torch

from zerolite.compat.deepspeed.runtime.zero.estimates import print_estimates


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float | None = None,
) -> None:
    """Print the memory that ``model`` needs at stage 3. additional_buffer_factor: has no effect."""
    print_estimates(3, model, num_gpus_per_node, num_nodes)
