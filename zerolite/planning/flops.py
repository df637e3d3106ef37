"""FLOPs of a planned step, with those of recomputation counted apart."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerolite.monitor.flop_formulas import OperatorFlops


class Flops(NamedTuple):
    """FLOPs of one rank's step.

    Attributes:
        model: of one forward and backward of each micro-batch.
        recomputed: of forwards that activation checkpointing runs again inside backward.
        unknown: names of operators that ran and have no formula.
    """

    model: int
    recomputed: int
    unknown: frozenset[str]


class StepFlops(TorchDispatchMode):
    """Counts the products of forwards and backwards that run inside: in ``recomputed`` those of activation
    checkpointing, which run inside backward with gradients enabled, and in ``model`` all others."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self.recomputed = 0
        self.operators = OperatorFlops()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        flops = self.operators.of_call(func, args, kwargs, out)
        if torch.is_grad_enabled() and torch._C._current_autograd_node() is not None:
            self.recomputed += flops
        else:
            self.model += flops
        return out
