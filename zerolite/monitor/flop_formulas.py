"""FLOPs of one operator call: torch's formulas, and those missing in torch's table.

A multiply-add is two FLOPs. Attention counts all pairs of positions, including masked ones.
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
"""Namespaces that are not reported as unknown: their operators without a formula do few products or none."""


class OperatorFlops:
    """Formulas by operator. Torch's registry, with the user's own entries, goes before :data:`MORE_FORMULAS`."""

    def __init__(self) -> None:
        found = ((_operator(name), formula) for name, formula in MORE_FORMULAS.items())
        more = {operator: formula for operator, formula in found if operator is not None}
        missing = {operator: formula for operator, formula in more.items() if operator not in flop_registry}
        self._formulas = FlopCounterMode(display=False, custom_mapping=missing).flop_registry
        self.unknown: set[str] = set()
        """Names of operators that ran, have no formula and are not torch's own: their FLOPs are missing."""

    def of_call(self, func: Function, args: Arguments, kwargs: Keywords, out: object) -> int:
        """Return the FLOPs of a call that returned ``out``; 0 if there is no formula."""
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        if formula is not None:
            return int(formula(*args, **kwargs, out_val=out))
        if isinstance(func, torch._ops.OpOverload) and func.namespace not in _TORCHS_OWN:
            self.unknown.add(func._schema.name)
        return 0


def _operator(name: str) -> object:
    """Return the operator ``name``; None if this version of torch or the imported libraries lack it."""
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator, None)


# Each formula is called like its operator, with a shape in place of every tensor.


def _attention(query: Shape, key: Shape, value: Shape, *args: Any, out_shape: object = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *args: Any, out_shape: object = None, **kwargs: Any
) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


def _grouped_mm(one: Shape, other: Shape, *args: Any, out_shape: object = None, **kwargs: Any) -> int:
    """Return the FLOPs of a grouped product of matrices.

    If both have a group dimension, each group is a product of full matrices. Otherwise the groups share out the rows,
    the columns or the inner dimension, so together they are as much as one product.
    """
    groups = one[0] if len(one) == len(other) == 3 else 1
    return int(2 * groups * one[-2] * one[-1] * other[-1])


def _grouped_mm_backward(rows: Shape, weight: Shape, *args: Any, out_shape: object = None, **kwargs: Any) -> int:
    return 2 * _grouped_mm(rows, weight)


def _recurrent(inputs: Shape, *args: Any, out_shape: object = None, **kwargs: Any) -> int:
    """Return the FLOPs of a recurrent layer: every matrix is used once at each position.

    Args:
        inputs: shape [positions..., features].
        args: shapes of the weights: one list of them, or the first two arguments.
    """
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
"""Formulas missing in torch: attention on CPUs, grouped products of experts, recurrent layers in one kernel."""
