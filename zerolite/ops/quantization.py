"""Numbers with 8 or 4 bits an element for slow wires, by compiled kernels or in plain PyTorch.

    values  fp32, bf16 or fp16    | row 0                  | row 1                  |
    packed  uint8                 | codes | a scale for each 256 | codes | scales   |

A row is what one message carries. The 256 elements of a block share a scale, their largest magnitude / 127 (8 bits) or
/ 7 (4 bits), and none arrives further from its value than half a scale. Zeros stay zeros. A block with an infinity or a
NaN arrives as NaN, so that what looks for numbers that are not finite finds them. The bits are the same on every
processor.

With error feedback (LoCo, Xie et al. 2024, arXiv 2407.04480) a moving average of what earlier calls have lost is added
before a call packs, so that what it loses now is not lost for good.
"""

from __future__ import annotations

import torch

from zerolite.ops import reference
from zerolite.ops.call import QUANT_TOPS, QuantCall, row_bytes
from zerolite.ops.library import Kernels, kernels_for
from zerolite.utils.accelerator import current_platform, is_fake
from zerolite.utils.dtypes import FLOATS

__all__ = ["dequantize", "dequantize_sum", "quantize", "row_bytes"]


def quantize(
    values: torch.Tensor, packed: torch.Tensor, bits: int, error: torch.Tensor | None = None, err_beta: float = 0.0
) -> None:
    """Pack ``values`` into ``packed``.

    With ``error`` it packs values + error, and then sets ``error`` to err_beta * error + (1 - err_beta) * (values +
    error - what arrives), or to 0 in a block that arrives as NaN.

    Memory traffic for each element: the value is read, 1 or 0.5 bytes and a 64th of a byte are written; the error is
    read and written.

    Args:
        values: fp32, bf16 or fp16 [rows * numel].
        packed: uint8 [rows, row_bytes(numel, bits)].
        bits: 8 or 4.
        error: fp32, bf16 or fp16, as long as ``values``; updated in place.
        err_beta: weight of the old error in the new one.

    Raises:
        ValueError: tensors do not fit together.
    """
    call = QuantCall(bits, values, packed, error, err_beta, 1.0 - err_beta)
    if kernels := _kernels(call):
        kernels.quantize(call)
        torch.autograd.graph.increment_version(packed if error is None else [packed, error])


def dequantize(packed: torch.Tensor, values: torch.Tensor, bits: int) -> None:
    """Unpack the rows of ``packed`` into ``values``, one after the other. Arguments as of :func:`quantize`.

    Memory traffic for each element: 1 or 0.5 bytes and a 64th of a byte are read, the value is written.
    """
    call = QuantCall(bits, values, packed)
    if kernels := _kernels(call):
        kernels.dequantize(call)
        torch.autograd.graph.increment_version(values)


def dequantize_sum(packed: torch.Tensor, out: torch.Tensor, bits: int, divisor: float = 1.0) -> None:
    """Unpack the rows of ``packed``, add them in fp32 from the first on, divide, and round once, into ``out`` [numel].

    Memory traffic for each element: 1 or 0.5 bytes and a 64th of a byte are read for each row, the value is written.
    """
    call = QuantCall(bits, out, packed, is_sum=True, divisor=divisor)
    if kernels := _kernels(call):
        kernels.dequantize(call)
        torch.autograd.graph.increment_version(out)


def _kernels(call: QuantCall) -> Kernels | None:
    """Return what carries out a call; None if there is nothing to do. Raises ValueError if its tensors do not fit."""
    _check(call)
    if not call.values.numel():
        return None
    if is_fake(call.values):
        error = 0 if call.error is None else 2 * call.error.nbytes
        current_platform().skip_kernel(call.values.nbytes + call.packed.nbytes + error)
        return None
    return kernels_for(call.values.device) or reference


def _check(call: QuantCall) -> None:
    values, packed, error = call.values, call.packed, call.error
    if call.bits not in QUANT_TOPS or packed.dim() != 2 or not call.rows:
        raise ValueError(f"expected 8 or 4 bits and one row or more, got {call.bits} bits and {list(packed.shape)}")
    if values.dtype not in FLOATS or not values.is_contiguous() or (not call.is_sum and values.numel() % call.rows):
        raise ValueError(
            f"expected contiguous values of {call.rows} rows in fp32, bf16 or fp16, got {values.dtype} "
            f"{list(values.shape)}"
        )
    shape = (call.rows, row_bytes(call.numel, call.bits))
    if packed.dtype != torch.uint8 or packed.shape != shape or not packed.is_contiguous():
        raise ValueError(f"expected contiguous uint8 rows {list(shape)}, got {packed.dtype} {list(packed.shape)}")
    if packed.device != values.device:
        raise ValueError(f"expected packed on {values.device}, got {packed.device}")
    if error is None:
        return
    good = error.dtype in FLOATS and error.numel() == values.numel() and error.is_contiguous()
    if not good or error.device != values.device:
        raise ValueError(
            f"expected a contiguous error of {values.numel()} elements in fp32, bf16 or fp16 on {values.device}, got "
            f"{error.dtype} {list(error.shape)} on {error.device}"
        )
