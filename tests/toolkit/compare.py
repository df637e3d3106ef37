"""Comparisons of what ranks and runs give."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def everywhere_equal(module: nn.Module) -> None:
    """Every parameter has the same bits on all ranks."""
    for name, parameter in module.named_parameters():
        largest, smallest = parameter.detach().clone(), -parameter.detach()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(smallest, op=dist.ReduceOp.MAX)
        assert torch.equal(largest, -smallest), name
