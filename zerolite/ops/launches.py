"""Kernel launches that steps repeat: their arguments are checked when they are new, and not in every step.

A launch runs on compiled kernels, or in plain PyTorch if they cannot be built. Tensors without memory, as in a dry run,
are checked and not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_

import torch

from zerolite.ops import reference
from zerolite.ops.call import COLUMNS, MOMENTUM, SGD, TABLE_COLUMNS, SquaresCall, Tensors, UpdateCall
from zerolite.ops.library import Kernels, kernels_for
from zerolite.utils.accelerator import is_fake
from zerolite.utils.dtypes import FLOATS, HALF


class UpdateLaunch:
    """Update of flat arrays by one launch, in step after step."""

    def __init__(self, rule: int, table: torch.Tensor) -> None:
        """Arguments as in :class:`UpdateCall`."""
        self._rule, self._table = rule, table
        self._call: UpdateCall | None = None
        self._tensors: list[torch.Tensor] = []  # what `_call` changes
        self._like: list[object] = []  # description of its other arguments
        self._kernels: Kernels | None = None  # None: nothing is computed

    def run(
        self,
        params: Tensors,
        grads: Tensors,
        states: Sequence[Tensors],
        outs: Tensors,
        rows: torch.Tensor,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Update once. Arguments as in :class:`UpdateCall`.

        Raises:
            ValueError: the kernels would read or write past the end of a tensor.
        """
        tensors = [*params, *chain(*states), *outs]
        # A tensor that is the same object may have got other memory, by an assignment to its `data`.
        described = (*grads, rows, factor, skip, *tensors)
        like: list[object] = [None if t is None else (t.dtype, t.device, t.shape, t.stride()) for t in described]
        call = self._call
        if (
            call is None
            or like != self._like
            or len(tensors) != len(self._tensors)
            or not all(map(is_, tensors, self._tensors))
        ):
            call = UpdateCall(self._rule, params, grads, states, outs, self._table, rows, factor, skip)
            _check_update(call)
            computes = bool(params) and bool(self._table.shape[0]) and not is_fake(params[0])
            self._kernels = (kernels_for(params[0].device) or reference) if computes else None
            self._call, self._tensors, self._like = call, tensors, like
        else:
            call.grads, call.rows, call.factor, call.skip = grads, rows, factor, skip
        try:
            if self._kernels is not None:
                self._kernels.update(call)
                torch.autograd.graph.increment_version(tensors)
        finally:
            call.grads = ()  # their memory is not kept until the next step

    def forget(self) -> None:
        """Drop the tensors, because those of the next step are others."""
        self._call, self._tensors = None, []


class SquaresLaunch:
    """Sums of squares of flat arrays by one launch, in step after step."""

    def __init__(self, table: torch.Tensor) -> None:
        """table: see :class:`SquaresCall`."""
        self._table = table
        self._call: SquaresCall | None = None
        self._like: list[object] = []  # description of its other arguments
        self._kernels: Kernels | None = None  # None: nothing is computed

    def run(self, sums: torch.Tensor, values: Tensors) -> None:
        """Add the squares once. Arguments as in :class:`SquaresCall`.

        Raises:
            ValueError: the kernels would read or write past the end of a tensor.
        """
        like: list[object] = [(t.dtype, t.device, t.shape, t.stride()) for t in (sums, *values)]
        call = self._call
        if call is None or like != self._like:
            call = SquaresCall(sums, values, self._table)
            _check_squares(call)
            computes = bool(values) and bool(self._table.shape[0]) and not is_fake(values[0])
            kernels = kernels_for(sums.device) if computes and values[0].dtype in FLOATS else None
            self._kernels = (kernels or reference) if computes else None
            self._call, self._like = call, like
        else:
            call.sums, call.values = sums, values
        try:
            if self._kernels is not None:
                self._kernels.squares(call)
                torch.autograd.graph.increment_version(sums)
        finally:
            call.values = ()  # their memory is not kept until the next step


def _check_update(call: UpdateCall) -> None:
    lists: dict[str, Tensors] = {"params": call.params, "grads": call.grads}
    lists |= {f"states {i}": states for i, states in enumerate(call.states)}
    if call.outs:
        lists["outs"] = call.outs
    for name, tensors in lists.items():
        _check_list(name, tensors, call.params, HALF if name == "outs" else FLOATS)
    if len({states[0].dtype for states in call.states if states}) > 1:
        raise ValueError(f"expected states of one dtype, got {[states[0].dtype for states in call.states]}")
    rows = call.rows
    good = rows.dtype == torch.float32 and rows.dim() == 2 and rows.shape[1] == COLUMNS
    if not (good and rows.is_contiguous() and rows.device.type == "cpu"):
        raise ValueError(f"expected contiguous fp32 rows [rows, {COLUMNS}] on the CPU, got {_describe(rows)}")
    if call.rule == SGD and not call.states and not is_fake(rows) and bool(rows[:, MOMENTUM].any()):
        raise ValueError("expected momentum_buffers for rows with momentum, got none")
    for name, scalar in (("factor", call.factor), ("skip", call.skip)):
        good = scalar is None or (scalar.dtype == torch.float32 and scalar.numel() == 1)
        if scalar is not None and not (good and (not call.params or scalar.device == call.params[0].device)):
            raise ValueError(f"expected {name} to be one fp32 number on the device of params, got {_describe(scalar)}")
    _check_table(call.table, call.params, rows.shape[0])


def _check_squares(call: SquaresCall) -> None:
    sums, values = call.sums, call.values
    _check_list("values", values, values, (*FLOATS, torch.float64))
    if sums.dtype != torch.float64 or not sums.is_contiguous() or (values and sums.device != values[0].device):
        raise ValueError(f"expected sums to be contiguous float64 on the device of values, got {_describe(sums)}")
    _check_table(call.table, values, sums.numel())


def _check_list(name: str, tensors: Tensors, like: Tensors, allowed: Sequence[torch.dtype]) -> None:
    if len(tensors) != len(like):
        raise ValueError(f"expected as many {name} as params, {len(like)}, got {len(tensors)}")
    if not tensors:
        return
    dtype, device = tensors[0].dtype, like[0].device
    if dtype not in allowed:
        raise ValueError(f"expected {name} of {' or '.join(map(str, allowed))}, got {dtype}")
    for i, (tensor, param) in enumerate(zip(tensors, like, strict=True)):
        good = tensor.dtype == dtype and tensor.device == device and tensor.numel() == param.numel()
        if not (good and tensor.is_contiguous()):
            raise ValueError(
                f"expected {name}[{i}] contiguous, {dtype} on {device}, with the {param.numel()} elements of "
                f"params[{i}], got {_describe(tensor)}"
            )


def _check_table(table: torch.Tensor, tensors: Tensors, rows: int) -> None:
    """Check that every segment is within its tensor and names an existing row or owner."""
    good = table.dtype == torch.int64 and table.dim() == 2 and table.shape[1] == TABLE_COLUMNS
    if not (good and table.is_contiguous() and table.device.type == "cpu"):
        raise ValueError(
            f"expected a contiguous int64 table [segments, {TABLE_COLUMNS}] on the CPU, got {_describe(table)}"
        )
    if not tensors or is_fake(table) or is_fake(tensors[0]):
        return
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
