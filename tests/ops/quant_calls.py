"""Calls that pack and unpack rows, between guard values, for the tests of every kernel."""

from __future__ import annotations

import torch

from tests.ops.cases import BF16, F32, differing, numbers
from tests.ops.cuda_calls import copy_tensor, whole
from zerolite.ops.call import QuantCall, row_bytes

LENGTHS = (1, 2, 7, 255, 256, 257, 1003)
ERRORS = (None, F32, BF16)
_PADDING = 16  # elements after an array, which must not be touched


class Quant(QuantCall):
    """Compares its arrays and the memory around them."""

    def differences(self, other: QuantCall) -> list[str]:
        pairs = {"values": (self.values, other.values), "packed": (self.packed, other.packed)}
        if self.error is not None and other.error is not None:
            pairs["error"] = (self.error, other.error)
        found = {name: differing(whole(one).cpu(), whole(two).cpu()) for name, (one, two) in pairs.items()}
        return [f"{name}: {int(places.sum())}" for name, places in found.items() if bool(places.any())]


def packed_like(values: torch.Tensor, rows: int, bits: int) -> torch.Tensor:
    """Memory for rows, full of ones."""
    return torch.full((rows, row_bytes(values.numel() // rows, bits)), 255, dtype=torch.uint8)


def make_quant(
    bits: int,
    rows: int,
    numel: int,
    dtype: torch.dtype,
    error: torch.dtype | None,
    offset: int = 0,
    is_sum: bool = False,
) -> Quant:
    """``offset``: elements before the values. A few of the values are zeros, denormals, infinities, NaN and the like,
    so rarely that most blocks have none."""

    def placed(count: int, of: torch.dtype, seed: int, special: float) -> torch.Tensor:
        memory = torch.full((offset + count + _PADDING,), 77.0, dtype=of)
        memory[offset : offset + count] = numbers(count, seed=seed, special=special)
        return memory[offset : offset + count]

    values = placed(numel if is_sum else rows * numel, dtype, numel, 1e-3)
    errors = None if error is None else placed(rows * numel, error, numel + 1, 1e-3)
    packed = torch.full((rows, row_bytes(numel, bits)), 255, dtype=torch.uint8)
    return Quant(bits, values, packed, errors, 0.8, 1.0 - 0.8, is_sum)


def unpacking(call: Quant) -> list[Quant]:
    """Calls that unpack what ``call`` packs: row after row, and a third of the sum of its rows."""
    calls = []
    for is_sum, divisor in ((False, 1.0), (True, 3.0)):
        offset = int(call.values.storage_offset())
        back = make_quant(call.bits, call.rows, call.numel, call.values.dtype, None, offset, is_sum)
        back.divisor, back.packed = divisor, call.packed
        calls.append(back)
    return calls


def copy_quant(call: Quant, device: str = "cpu") -> Quant:
    """The same call on copies of its arrays, with their alignment."""
    error = None if call.error is None else copy_tensor(call.error, device)
    values, packed = copy_tensor(call.values, device), call.packed.to(device, copy=True)
    return Quant(call.bits, values, packed, error, call.keep, call.take, call.is_sum, call.divisor)
