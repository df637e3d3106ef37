"""Optimizers with kernels, and their param groups as rows of scalars."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerolite.ops.call import ADAGRAD, ADAM, LION, SGD
from zerolite.ops.lion import Lion

Group = Mapping[str, Any]
Row = tuple[float, float, float, float, float, float, float, float]  # scalars of csrc/rules.h

ONLY_HERE = ("bias_correction", "fp32_optimizer_states")
"""Keys of a param group that, if False, only the kernels (and their reference) support."""


# Keys of a param group that only torch's implementation supports.
_VARIANTS = ("amsgrad", "capturable", "differentiable")
_CHOICES = ("foreach", "fused")


def unsupported(group: Group) -> str | None:
    """Return the first key of a param group that the kernels do not support, or None."""
    for key, value in group.items():
        chosen = key in _VARIANTS and value or key in _CHOICES and value is not None
        if chosen or (isinstance(value, torch.Tensor) and value.is_cuda):
            return key
    return None


@dataclass(frozen=True)
class UpdateRule:
    """Description of an optimizer for the kernels.

    Attributes:
        number: number of the rule in csrc/kernels.h.
        states: names of the states, as in ``optimizer.state[p]``.
        counts_steps: True if ``optimizer.state[p]`` has a ``step`` as well.
        row: function (param group, number of the step from 1) that returns the scalars of csrc/rules.h. Python computes
            them in double precision.
        has_states: function that returns True if a param group needs the states.
        initial: function that returns the initial value of the states.
    """

    number: int
    states: tuple[str, ...]
    counts_steps: bool
    row: Callable[[Group, int], Row]
    has_states: Callable[[Group], bool] = lambda group: True
    initial: Callable[[Group], float] = lambda group: 0.0

    unsupported = staticmethod(unsupported)

    def only_here(self, groups: Sequence[Group]) -> bool:
        """Return True if a group has an option that torch's optimizer lacks: no bias correction, or 16-bit states."""
        return any(group.get(key) is False for group in groups for key in ONLY_HERE)

    def state_dtype(self, groups: Sequence[Group], update: torch.dtype) -> torch.dtype:
        """Return the dtype of the states.

        Args:
            groups: all param groups.
            update: dtype in which torch's optimizer would compute the update.

        Raises:
            ValueError: the groups differ in ``fp32_optimizer_states``.
        """
        halves = {group.get("fp32_optimizer_states") is False for group in groups}
        if len(halves) > 1:
            raise ValueError("expected fp32_optimizer_states to be the same in all param groups, got both")
        return torch.bfloat16 if True in halves else update


def _adam_row(group: Group, step: int, decoupled: bool) -> Row:
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    beta1, beta2 = map(float, group["betas"])
    correction1, correction2 = 1.0 - beta1**step, 1.0 - beta2**step
    if not group.get("bias_correction", True):
        correction1 = correction2 = 1.0
    shrink, l2 = (-lr * decay, 0.0) if decoupled else (0.0, decay)
    sign = -1.0 if group.get("maximize") else 1.0
    root, rate = correction2**0.5, lr / correction1
    return sign, shrink, l2, 1.0 - beta1, 1.0 - beta2, root, float(group["eps"]), -rate


def _lion_row(group: Group, step: int) -> Row:
    lr = float(group["lr"])
    beta1, beta2 = map(float, group["betas"])
    return 1.0, -lr * float(group["weight_decay"]), 1.0 - beta1, 1.0 - beta2, -lr, 0.0, 0.0, 0.0


def _adagrad_row(group: Group, step: int) -> Row:
    sign = -1.0 if group.get("maximize") else 1.0
    rate = float(group["lr"]) / (1.0 + (step - 1) * float(group["lr_decay"]))
    return sign, float(group["weight_decay"]), float(group["eps"]), -rate, 0.0, 0.0, 0.0, 0.0


def _sgd_row(group: Group, step: int) -> Row:
    sign, decay = -1.0 if group.get("maximize") else 1.0, float(group["weight_decay"])
    momentum, taken = float(group["momentum"]), 1.0 - float(group["dampening"])
    return sign, decay, momentum, taken, float(step == 1), float(bool(group["nesterov"])), -float(group["lr"]), 0.0


_ADAM_STATES = ("exp_avg", "exp_avg_sq")
_RULES: dict[type[torch.optim.Optimizer], UpdateRule] = {
    torch.optim.AdamW: UpdateRule(ADAM, _ADAM_STATES, True, functools.partial(_adam_row, decoupled=True)),
    torch.optim.Adam: UpdateRule(
        ADAM, _ADAM_STATES, True, lambda g, t: _adam_row(g, t, bool(g.get("decoupled_weight_decay")))
    ),
    Lion: UpdateRule(LION, ("exp_avg",), False, _lion_row),
    torch.optim.Adagrad: UpdateRule(
        ADAGRAD, ("sum",), True, _adagrad_row, initial=lambda g: g["initial_accumulator_value"]
    ),
    torch.optim.SGD: UpdateRule(SGD, ("momentum_buffer",), False, _sgd_row, has_states=lambda g: g["momentum"] != 0),
}


def rule_of(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    """Return the rule of the kernels for an optimizer, or None if they do not support it.

    They support exactly the classes of the table, and no subclass. They do not support a group that chooses one of
    torch's implementations (``foreach``, ``fused``, ``capturable``). Nor do they support variants that only torch has:
    ``amsgrad``, or a learning rate in a CUDA tensor.
    """
    rule = _RULES.get(type(optimizer))
    if rule is None or any(unsupported(group) for group in optimizer.param_groups):
        return None
    return rule
