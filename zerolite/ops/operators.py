"""Kernels as torch operators: ``torch.ops.zerolite.adam_``, ``lion_``, ``adagrad_``, ``sgd_`` and ``squares_``.

Each has a schema with its mutations, an implementation for real tensors, and one for fake tensors with the same checks.
They change their arguments in place and return nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from zerolite.ops import reference
from zerolite.ops.call import ADAGRAD, ADAM, COLUMNS, LION, MOMENTUM, SGD, TABLE_COLUMNS, Tensors, UpdateCall
from zerolite.ops.library import kernels_for
from zerolite.utils.dtypes import FLOATS, HALF

_TAIL = (
    "Tensor(z!)[] outs, Tensor table, Tensor rows, Tensor? factor, Tensor? skip, "
    "Tensor? use=None, Tensor? uses=None) -> ()"
)
_UPDATES = {  # operator: (rule, names of its states)
    "adam_": (ADAM, ("exp_avgs", "exp_avg_sqs")),
    "lion_": (LION, ("exp_avgs",)),
    "adagrad_": (ADAGRAD, ("sums",)),
    "sgd_": (SGD, ("momentum_buffers",)),
}
_SQUARES = "squares_(Tensor(a!) sums, Tensor[] values, Tensor table) -> ()"


def _check(call: UpdateCall) -> None:
    lists: dict[str, Tensors] = {"params": call.params, "grads": call.grads}
    lists |= {f"states {i}": states for i, states in enumerate(call.states)}
    if call.outs:
        lists["outs"] = call.outs
    for name, tensors in lists.items():
        allowed = HALF if name == "outs" else FLOATS
        _check_list(name, tensors, call.params, allowed)
    if len({states[0].dtype for states in call.states if states}) > 1:
        raise ValueError(f"expected states of one dtype, got {[states[0].dtype for states in call.states]}")
    _check_table(call.table)
    rows = call.rows
    good = rows.dtype == torch.float32 and rows.dim() == 2 and rows.shape[1] == COLUMNS
    if not (good and rows.is_contiguous() and rows.device.type == "cpu"):
        raise ValueError(f"expected contiguous fp32 rows [rows, {COLUMNS}] on the CPU, got {_describe(rows)}")
    for name, scalar in (("factor", call.factor), ("skip", call.skip)):
        if scalar is None:
            continue
        good = scalar.dtype == torch.float32 and scalar.numel() == 1
        if not good or (call.params and scalar.device != call.params[0].device):
            raise ValueError(f"expected {name} to be one fp32 number on the device of params, got {_describe(scalar)}")
    if call.use is not None or call.uses is not None:
        _check_uses(call)


def _check_uses(call: UpdateCall) -> None:
    use, uses, segments = call.use, call.uses, call.table.shape[0]
    if use is None or uses is None:
        raise ValueError("expected use and uses together, got one of them")
    if not (use.dtype == torch.int64 and use.shape == (segments,) and use.is_contiguous() and use.device.type == "cpu"):
        raise ValueError(f"expected contiguous int64 use [{segments}] on the CPU, got {_describe(use)}")
    good = uses.dtype == torch.float64 and uses.dim() == 1 and uses.is_contiguous()
    if not good or (call.params and uses.device != call.params[0].device):
        raise ValueError(f"expected contiguous float64 uses [n] on the device of params, got {_describe(uses)}")


def _check_list(name: str, tensors: Tensors, like: Tensors, allowed: Sequence[torch.dtype]) -> None:
    if len(tensors) != len(like):
        raise ValueError(f"expected as many {name} as params, {len(like)}, got {len(tensors)}")
    if not tensors:
        return
    dtype, device = tensors[0].dtype, like[0].device
    if dtype not in allowed:
        raise ValueError(f"expected {name} of {' or '.join(map(str, allowed))}, got {dtype}")
    same_kind = {(tensor.dtype, tensor.device) for tensor in tensors} == {(dtype, device)}
    same_numel = tensors is like or [t.numel() for t in tensors] == [t.numel() for t in like]
    if same_kind and same_numel and all(tensor.is_contiguous() for tensor in tensors):
        return
    for i, (tensor, param) in enumerate(zip(tensors, like, strict=True)):
        good = tensor.dtype == dtype and tensor.device == device and tensor.numel() == param.numel()
        if not (good and tensor.is_contiguous()):
            raise ValueError(
                f"expected {name}[{i}] contiguous, {dtype} on {device}, with the {param.numel()} elements of "
                f"params[{i}], got {_describe(tensor)}"
            )


def _check_table(table: torch.Tensor) -> None:
    good = table.dtype == torch.int64 and table.dim() == 2 and table.shape[1] == TABLE_COLUMNS
    if not (good and table.is_contiguous() and table.device.type == "cpu"):
        raise ValueError(
            f"expected a contiguous int64 table [segments, {TABLE_COLUMNS}] on the CPU, got {_describe(table)}"
        )


def _check_bounds(table: torch.Tensor, tensors: Tensors, rows: int) -> None:
    """Check that every segment is within its tensor and names an existing row or owner. Needs real tables."""
    which, start, numel, row = table.unbind(1)
    inside = (which >= 0) & (which < len(tensors)) & (start >= 0) & (numel >= 0) & (row >= 0) & (row < rows)
    sizes = torch.tensor([tensor.numel() for tensor in tensors], device="cpu")
    inside &= numel <= sizes[which.clamp(0, len(tensors) - 1)] - start
    if not bool(inside.all()):
        segment = int((~inside).nonzero()[0])
        raise ValueError(
            f"expected every segment (tensor, start, elements, row) of table within its tensor, with a row below "
            f"{rows}, got {table[segment].tolist()} as number {segment}"
        )


def _describe(tensor: torch.Tensor) -> str:
    strided = "" if tensor.is_contiguous() else " with gaps"
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}{strided}"


def _update_implementation(rule: int, count: int, real: bool) -> Any:
    def implementation(*arguments: Any) -> None:
        params, grads, *rest = arguments
        states = () if rule == SGD and not rest[0] else tuple(rest[:count])  # none: without momentum
        call = UpdateCall(rule, params, grads, states, *rest[count:])
        _check(call)
        if not real or not call.params or not call.table.shape[0]:
            return
        if not call.states and bool(call.rows[:, MOMENTUM].any()):
            raise ValueError("expected momentum_buffers for rows with momentum, got none")
        kernels = kernels_for(call.params[0].device)
        if kernels is None:  # libraries check the bounds themselves
            _check_bounds(call.table, call.params, call.rows.shape[0])
            if call.use is not None and call.uses is not None:
                low, high = (int(bound) for bound in call.use.aminmax())
                if low < -1 or high >= call.uses.numel():
                    raise ValueError(f"expected use from -1 to {call.uses.numel() - 1}, got {low} to {high}")
        (kernels or reference).update(call)
        changed = (*call.params, *itertools.chain(*call.states), *call.outs)
        torch.autograd.graph.increment_version(changed)

    return implementation


def _check_squares(sums: torch.Tensor, values: Tensors, table: torch.Tensor) -> None:
    _check_list("values", values, values, (*FLOATS, torch.float64))
    _check_table(table)
    if sums.dtype != torch.float64 or not sums.is_contiguous() or (values and sums.device != values[0].device):
        raise ValueError(f"expected sums to be contiguous float64 on the device of values, got {_describe(sums)}")


def _squares(sums: torch.Tensor, values: Tensors, table: torch.Tensor) -> None:
    _check_squares(sums, values, table)
    if values and table.shape[0]:
        kernels = kernels_for(sums.device) if values[0].dtype in FLOATS else None
        if kernels is None:
            _check_bounds(table, values, sums.numel())
        (kernels or reference).squares(sums, values, table)
        torch.autograd.graph.increment_version(sums)


_library = torch.library.Library("zerolite", "DEF")


def _register() -> None:
    for name, (rule, states) in _UPDATES.items():
        lists = ", ".join(f"Tensor({letter}!)[] {state}" for letter, state in zip("bc", states, strict=False))
        _library.define(f"{name}(Tensor(a!)[] params, Tensor[] grads, {lists}, {_TAIL}")
        for key in ("CPU", "CUDA"):
            _library.impl(name, _update_implementation(rule, len(states), real=True), key)
        torch.library.register_fake(
            f"zerolite::{name}", _update_implementation(rule, len(states), real=False), lib=_library
        )
    _library.define(_SQUARES)
    for key in ("CPU", "CUDA"):
        _library.impl("squares_", _squares, key)
    torch.library.register_fake("zerolite::squares_", _check_squares, lib=_library)


_register()
