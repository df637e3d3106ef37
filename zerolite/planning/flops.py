"""FLOPs of a step whose forwards nobody calls through an engine: those of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from zerolite.profiling.flop_count import MORE_FORMULAS


class StepFlops(TorchDispatchMode):
    """Inside, counts the products of forwards and backwards, by torch's formulas, in ``total``. What activation
    checkpointing computes again is not counted: inside backward it is what runs with gradients enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._formulas = FlopCounterMode(display=False, custom_mapping=MORE_FORMULAS).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        if formula is not None and not (torch._C._current_autograd_node() is not None and torch.is_grad_enabled()):
            self.total += int(formula(*args, **kwargs, out_val=out))
        return out
