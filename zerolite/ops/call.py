"""Arguments of one kernel launch, equal for every device type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ADAM, LION, ADAGRAD, SGD = range(4)  # zl_rule in csrc/kernels.h
COLUMNS = 8  # of a row of scalars
MOMENTUM = 2  # the column of SGD's rows that has it
TABLE_COLUMNS = 4

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class UpdateCall:
    """One update of many flat arrays.

    Attributes:
        rule: ADAM, LION, ADAGRAD or SGD.
        params, grads, states, outs: lists of contiguous tensors of one device, the i-th of every list of the same
            number of elements; one dtype per list (fp32, bf16, fp16), the same for all states. outs: empty,
            or tensors of a 16-bit dtype that hold the parameters, rounded to the nearest (ties to even), and get the
            updated ones; an element that differs was written by the user, and the update starts from it.
        table: int64 on the CPU, [segments, 4]: tensor, start, elements, row; segments do not overlap.
        rows: fp32 on the CPU, [rows, 8], the scalars of csrc/rules.h.
        factor: fp32, one element on the tensors' device, multiplies the gradients.
        skip: the same; if it is not zero, nothing is changed.
    """

    rule: int
    params: Tensors
    grads: Tensors
    states: Sequence[Tensors]
    outs: Tensors
    table: torch.Tensor
    rows: torch.Tensor
    factor: torch.Tensor | None
    skip: torch.Tensor | None
