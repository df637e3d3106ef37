"""Arguments of a kernel launch, the same for every device type."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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


QUANT_BLOCK = 256  # elements that share a scale
QUANT_LEAST = 2.0**-119  # a smaller largest magnitude of a block counts as this, so that no scale is a denormal
QUANT_TOPS = {8: 127.0, 4: 7.0}  # the largest code, by bits


@dataclass
class QuantCall:
    """Rows of numbers, and the same rows as codes with a scale for each block of 256: see ``zl_quant`` in
    csrc/kernels.h.

    Attributes:
        bits: of a code, 8 or 4.
        values: fp32, bf16 or fp16 [rows * numel]; [numel] for a sum of rows.
        packed: uint8 [rows, bytes of a row], as :func:`zerolite.ops.quantization.row_bytes` has them.
        error: fp32, bf16 or fp16 [rows * numel], what earlier calls have lost; None to forget it.
        keep, take: weights of the error before and of what is lost now in the next error.
        is_sum: the rows are summed.
        divisor: divides the sum.
    """

    bits: int
    values: torch.Tensor
    packed: torch.Tensor
    error: torch.Tensor | None = None
    keep: float = 0.0
    take: float = 0.0
    is_sum: bool = False
    divisor: float = 1.0

    @property
    def rows(self) -> int:
        return self.packed.shape[0]

    @property
    def numel(self) -> int:
        """Elements of a row."""
        return self.values.numel() // (1 if self.is_sum else max(self.rows, 1))

    @property
    def scale_offset(self) -> int:
        """Byte of a row at which its scales begin."""
        return scale_offset(self.numel, self.bits)


def scale_offset(numel: int, bits: int) -> int:
    """Return the bytes of the codes of a packed row of ``numel`` elements, up to the scales."""
    return (numel * bits + 127) // 128 * 16


def row_bytes(numel: int, bits: int) -> int:
    """Return the bytes of a packed row of ``numel`` elements: codes, then an fp32 scale for each block, both filled up
    to a multiple of 16."""
    blocks = (numel + QUANT_BLOCK - 1) // QUANT_BLOCK
    return scale_offset(numel, bits) + (blocks * 4 + 15) // 16 * 16


CODES = 256
CELLS = 8192
CELL_LEAST = 0x337F  # upper 16 bits of a float; the first cell has all smaller magnitudes too


class CodeTable(NamedTuple):
    """The codes of a moment in 8 bits: see ``zl_moment`` in csrc/kernels.h. All tensors are on one device.

    Attributes:
        numbers: fp32 [256], in ascending order; NaN for codes that do not exist.
        borders: fp32 [256], between the numbers; infinite behind the last one.
        cells: uint8 [8192], the code of the lowest number of each cell.
    """

    numbers: torch.Tensor
    borders: torch.Tensor
    cells: torch.Tensor


@dataclass
class Adam8Call:
    """A step of AdamW on one flat array on the host, whose moments are codes of 8 bits in blocks of 256.

    Attributes:
        param: fp32, bf16 or fp16 [elements], updated in place.
        grad: fp32, bf16 or fp16 [elements].
        codes: of both moments, uint8 [elements]; updated in place.
        maxima: of both moments, fp32 [blocks]; updated in place.
        tables: of both moments.
        lead: elements of the first block that are before the array.
        scalars: 1 - lr * decay, 1 - beta1, beta2, 1 - beta2, sqrt(1 - beta2^t), eps, -lr / (1 - beta1^t).
    """

    param: torch.Tensor
    grad: torch.Tensor
    codes: tuple[torch.Tensor, torch.Tensor]
    maxima: tuple[torch.Tensor, torch.Tensor]
    tables: tuple[CodeTable, CodeTable]
    lead: int
    scalars: tuple[float, float, float, float, float, float, float]
