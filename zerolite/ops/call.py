"""Arguments of a kernel launch, the same for every device type."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

ADAM, LION, ADAGRAD, SGD = range(4)  # zl_rule in csrc/kernels.h
COLUMNS = 8  # numbers in a row of scalars
MOMENTUM = 2  # column of the momentum in SGD's rows
TABLE_COLUMNS = 4

Tensors = Sequence[torch.Tensor]


@dataclass
class UpdateCall:
    """One update of many flat arrays. Later launches of the same update change only gradients and scalars.

    ``params``, ``grads``, ``states[k]`` and ``outs`` are lists of contiguous tensors on one device. The i-th tensors of
    all lists have the same number of elements. Each list has one dtype: fp32, bf16 or fp16.

    Attributes:
        rule: ADAM, LION, ADAGRAD or SGD.
        params: masters, which are updated in place.
        grads: gradients.
        states: one list per state of the rule, all with one dtype; updated in place. None for SGD without momentum.
        outs: the 16-bit parameters, or an empty list. They hold the masters, rounded to nearest (ties to even), and get
            the updated values. An element that differs was written by the user, and the update starts from it.
        table: int64 [segments, 4] on the CPU, rows (tensor, start, elements, row of ``rows``). Segments do not overlap.
        rows: fp32 [rows, 8] on the CPU, the scalars of csrc/rules.h.
        factor: fp32, one element on the tensors' device, by which gradients are multiplied; None for 1.
        skip: the same shape; if it is not zero, nothing is changed. None for 0.
        use: int64 [segments] on the CPU: segment i is left alone if ``uses[use[i]]`` is zero. It is updated in any case
            if ``use[i]`` is -1, or without ``use``.
        uses: float64 [n] on the tensors' device; with ``use`` only.
        groups: int32 [rows] on the CPU: the group of each row, an index of ``broken``; with ``broken`` only.
        broken: float64 [groups] on the tensors' device; 1 is written for the groups in which the update has made an
            element of ``params`` non-finite that was finite.
        arguments: the C structure, which the kernels make in the first launch.
    """

    rule: int
    params: Tensors
    grads: Tensors
    states: Sequence[Tensors]
    outs: Tensors
    table: torch.Tensor
    rows: torch.Tensor
    factor: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    use: torch.Tensor | None = None
    uses: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    broken: torch.Tensor | None = None
    arguments: ctypes.Structure | None = field(default=None, init=False, repr=False, compare=False)


@dataclass
class SquaresCall:
    """Sums of squares of segments of many flat arrays, in double. Later launches change only ``sums`` and ``values``.

    Attributes:
        sums: float64 [owners]; the sum of squares of each segment is added to that of its owner.
        values: flat tensors of one dtype.
        table: int64 [segments, 4] on the CPU, rows (tensor, start, elements, owner).
        arguments: the C structure, which the kernels make in the first launch.
    """

    sums: torch.Tensor
    values: Tensors
    table: torch.Tensor
    arguments: ctypes.Structure | None = field(default=None, init=False, repr=False, compare=False)
