"""Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), Algorithm 2."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

_Lists = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]  # parameters, gradients, momenta


class Lion(Optimizer):
    """Optimizer that moves each element by `lr`, by the sign of an interpolation between momentum and gradient.

        c = m + (1 - beta1) * (g - m)
        p = p - lr * (sign(c) + weight_decay * p)
        m = m + (1 - beta2) * (g - m)

    Args:
        params: parameters or param groups: real tensors of a floating dtype.
        lr: the size of a step; a good one is 3 to 10 times smaller than AdamW's.
        betas: (beta1, beta2), each in [0, 1).
        weight_decay: decoupled weight decay, as in AdamW.

    There is one state per parameter, `exp_avg`, with the parameter's shape and dtype. The update is elementwise: a
    parameter that is updated in pieces gets the same bits.

    Raises:
        ValueError: a value is out of range.
        TypeError: in `step()`, a gradient is sparse.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        if not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"lr must be a finite number of at least 0, but is {lr}.")
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be two numbers of at least 0 and below 1, but is {betas}.")
        if not (math.isfinite(weight_decay) and weight_decay >= 0):
            raise ValueError(f"weight_decay must be a finite number of at least 0, but is {weight_decay}.")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if not p.is_floating_point():
                self.param_groups.pop()
                raise ValueError(
                    f"Lion takes the sign of real numbers, so it needs parameters of a floating dtype, but one of "
                    f"shape {tuple(p.shape)} is {p.dtype}."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The result of the closure; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for params, grads, exp_avgs in self._same_kind(group["params"]):
                _lion(params, grads, exp_avgs, float(group["lr"]), group["betas"], group["weight_decay"])
        return loss

    def _same_kind(self, params: list[torch.Tensor]) -> list[_Lists]:
        """Return lists of one device and dtype each, as torch's foreach operators need them for their fast path."""
        kinds: dict[tuple[torch.device, torch.dtype], _Lists] = {}
        for p in params:
            if p.grad is None:
                continue
            if p.grad.layout != torch.strided:
                raise TypeError(
                    f"Lion needs dense gradients, but a parameter of shape {tuple(p.shape)} has one of layout "
                    f"{p.grad.layout}."
                )
            state = self.state[p]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            lists = kinds.setdefault((p.device, p.dtype), ([], [], []))
            for tensors, tensor in zip(lists, (p, p.grad, state["exp_avg"]), strict=True):
                tensors.append(tensor)
        return list(kinds.values())


def _lion(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    beta1, beta2 = betas
    change = torch._foreach_lerp(exp_avgs, grads, 1 - beta1)
    torch._foreach_sign_(change)
    torch._foreach_mul_(change, -lr)
    if weight_decay != 0:
        torch._foreach_add_(change, params, alpha=-lr * weight_decay)
    torch._foreach_add_(params, change)
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta2)
