"""FLOPs of one operator call: torch's formulas, and those missing in torch's table.

A multiplication and an addition are two. Attention counts all pairs of positions, masked ones too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from zerolite.utils.nested import Arguments, Function, Keywords

Shape = Sequence[int]
_TORCHS_OWN = ("aten", "prims", "prim", "profiler", "c10d", "_c10d_functional", "c10d_functional", "zerolite")
"""Namespaces whose operators without a formula do no products, or next to none."""


class OperatorFlops:
    """Formulas by operator. Those of torch, and those that a user has registered with torch, come first."""

    def __init__(self) -> None:
        found = ((_operator(name), formula) for name, formula in MORE_FORMULAS.items())
        more = {operator: formula for operator, formula in found if operator is not None}
        missing = {operator: formula for operator, formula in more.items() if operator not in flop_registry}
        self._formulas = FlopCounterMode(display=False, custom_mapping=missing).flop_registry
        self.unknown: set[str] = set()
        """Names of the operators that ran, are not torch's own, and have no formula."""

    def of_call(self, func: Function, args: Arguments, kwargs: Keywords, out: object) -> int:
        """Return the FLOPs of a call that returned ``out``; 0 if there is no formula."""
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        if formula is not None:
            return int(formula(*args, **kwargs, out_val=out))
        if isinstance(func, torch._ops.OpOverload) and func.namespace not in _TORCHS_OWN:
            self.unknown.add(func._schema.name)
        return 0


def _operator(name: str) -> object:
    """The operator of that name, None if this torch, or what is imported, has none."""
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator, None)


# Each formula gets shapes in place of tensors.


def _attention(query: Shape, key: Shape, value: Shape, *args: Any, out_shape: object = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *args: Any, out_shape: object = None, **kwargs: Any
) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


def _grouped_mm(one: Shape, other: Shape, *args: Any, out_shape: object = None, **kwargs: Any) -> int:
    """Rows of ``one``, columns of ``other`` or the dimension between them are divided among the groups, so each is
    multiplied once. Only with a group dimension in both is it a product of whole matrices for each group."""
    groups = one[0] if len(one) == len(other) == 3 else 1
    return int(2 * groups * one[-2] * one[-1] * other[-1])


def _grouped_mm_backward(rows: Shape, weight: Shape, *args: Any, out_shape: object = None, **kwargs: Any) -> int:
    return 2 * _grouped_mm(rows, weight)


def _recurrent(inputs: Shape, *args: Any, out_shape: object = None, **kwargs: Any) -> int:
    """Every matrix once at each position. ``inputs [positions..., features]``; matrices follow one by one, or in a
    list."""
    weights = args[0] if isinstance(args[0], list) else args[:2]
    return 2 * math.prod(inputs[:-1]) * sum(math.prod(shape) for shape in weights if len(shape) == 2)


def _recurrent_backward(inputs: Shape, *args: Any, out_shape: object = None, **kwargs: Any) -> int:
    return 2 * _recurrent(inputs, *args)


MORE_FORMULAS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_grouped_mm": _grouped_mm,
    "aten::_scaled_grouped_mm": _grouped_mm,
    "aten::_scaled_grouped_mm_v2": _grouped_mm,
    "aten::_scaled_mm_v2": _grouped_mm,
    "transformers::grouped_mm_fallback": _grouped_mm,
    "transformers::grouped_mm_fallback_backward": _grouped_mm_backward,
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::mkldnn_rnn_layer_backward": _recurrent_backward,
    "aten::_cudnn_rnn": _recurrent,
    "aten::_cudnn_rnn_backward": _recurrent_backward,
}
"""Attention of CPUs, products of experts, and recurrent layers that run as one kernel."""
