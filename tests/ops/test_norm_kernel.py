"""Squares of many tensors, summed in double: the same bits whatever the instruction set, the threads and the
alignment."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from tests.ops.cases import BF16, F16, FLOATS, all_kernels, assert_same, numbers, threads
from zerolite.ops import cpu_kernels, reference
from zerolite.ops.call import SquaresCall
from zerolite.ops.cpu_kernels import CpuKernels
from zerolite.ops.interface import NORM_CHUNK

DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=["fp32", "bf16", "fp16"])
LENGTHS = (0, 1, 7, 8, 15, 16, 17, 511, 513, NORM_CHUNK - 1, NORM_CHUNK, NORM_CHUNK + 1)


def _squares(kernels: object, values: Sequence[torch.Tensor], table: list[list[int]], owners: int = 1) -> torch.Tensor:
    sums = torch.zeros(owners, dtype=torch.float64)
    segments = torch.tensor(table, dtype=torch.int64).reshape(-1, 4)
    kernels.squares(SquaresCall(sums, values, segments))  # type: ignore[attr-defined]
    return sums


def _whole(kernels: object, values: torch.Tensor) -> float:
    return float(_squares(kernels, [values], [[0, 0, values.numel(), 0]]))


def _placed(values: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy that begins ``offset`` elements behind a boundary of 64 bytes, among NaN."""
    room = torch.full((offset + values.numel() + 16,), math.nan, dtype=values.dtype)
    room[offset : offset + values.numel()] = values
    return room[offset : offset + values.numel()]


def _exact(values: torch.Tensor) -> float:
    """Squares of fp32 numbers are exact in double; fsum rounds once."""
    return math.fsum(x * x for x in values.double().tolist())


@DTYPES
def test_is_the_sum_of_squares(dtype: torch.dtype, kernels: CpuKernels) -> None:
    values = numbers(LENGTHS[-1], seed=1, special=0.0).to(dtype)
    for n in LENGTHS:
        assert _whole(kernels, values[:n]) == pytest.approx(_exact(values[:n]), rel=1e-14, abs=0.0), n
        assert _whole(reference, values[:n]) == pytest.approx(_exact(values[:n]), rel=1e-14, abs=0.0), n


@DTYPES
def test_the_same_bits_at_every_alignment_and_instruction_set(dtype: torch.dtype) -> None:
    values = numbers(LENGTHS[-1], seed=2, special=0.0).to(dtype)
    for n in LENGTHS:
        sums = {_whole(k, _placed(values[:n], offset)) for k, offset in itertools.product(all_kernels(), range(16))}
        assert len(sums) == 1, (n, sums)


@pytest.mark.parametrize(
    ("dtype", "own"), [(torch.float32, False), (BF16, True)], ids=["torch's threads", "own threads"]
)
def test_the_same_bits_on_any_number_of_threads(
    dtype: torch.dtype, own: bool, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    if own:
        monkeypatch.setattr(cpu_kernels, "_openmp", lambda: (None, None))
    values = [numbers(n, seed=n, special=0.0).to(dtype) for n in (20 * NORM_CHUNK + 5, 3, 0, 9 * NORM_CHUNK)]
    table = [[0, 1, 12 * NORM_CHUNK, 1], [1, 0, 3, 0], [2, 0, 0, 2], [3, 7, 8 * NORM_CHUNK, 2], [0, 13, 99, 0]]
    sums = []
    for count in (1, 2, 3):
        with threads(count):
            sums.append(_squares(kernels, values, table, owners=3))
    assert_same(sums[1:], [sums[0]] * 2)
    exact = [_exact(values[t][start : start + n]) for t, start, n, _ in table]
    assert sums[0].tolist() == pytest.approx([exact[1] + exact[4], exact[0], exact[2] + exact[3]], rel=1e-14)


def test_sums_are_added_to_what_is_there(kernels: CpuKernels) -> None:
    """Sums follow the order of the segments; an owner without segments keeps its sum."""
    values = [torch.full((n,), float(i + 1)) for i, n in enumerate((5, 3, 2))]
    table = torch.tensor([[2, 0, 2, 0], [0, 1, 4, 3], [1, 0, 3, 0], [0, 0, 0, 1], [0, 2, 2, 3]])
    sums = torch.tensor([0.5, 7.0, -1.0, 2.0], dtype=torch.float64)
    expected = [0.5 + 18 + 12, 7.0, -1.0, 2.0 + 4 + 2]
    for update in (kernels, reference):
        again = sums.clone()
        update.squares(SquaresCall(again, values, table))
        assert again.tolist() == expected


@DTYPES
def test_infinities_and_nan_show(dtype: torch.dtype, kernels: CpuKernels) -> None:
    """They show in their owner's sum, and in no other."""
    for place, value in itertools.product((0, 15, 16, NORM_CHUNK, NORM_CHUNK + 34), (math.inf, -math.inf, math.nan)):
        values = torch.ones(NORM_CHUNK + 35, dtype=dtype)
        values[place] = value
        sums = _squares(kernels, [values, values.new_ones(9)], [[0, 0, values.numel(), 0], [1, 0, 9, 1]], owners=2)
        assert (sums[0].isnan() if math.isnan(value) else sums[0].isinf()) and float(sums[1]) == 9.0, place


def test_huge_and_tiny_values(kernels: CpuKernels) -> None:
    """Squares that no fp32 holds: neither do they overflow nor vanish."""
    largest, smallest = 3.4028234663852886e38, 2.0**-149
    assert _whole(kernels, torch.full((33,), largest)) == pytest.approx(33 * largest**2, rel=1e-14)
    assert _whole(kernels, torch.full((33,), smallest)) == 33 * smallest**2 > 0
    mixed = torch.cat([torch.full((16,), 1e18), torch.full((17,), 1e10)])
    assert _whole(kernels, mixed) == pytest.approx(_exact(mixed), rel=1e-15)


@pytest.mark.parametrize("half", [BF16, F16], ids=["bf16", "fp16"])
def test_all_16_bit_numbers(half: torch.dtype, kernels: CpuKernels) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(half)
    finite = patterns[patterns.isfinite()]
    assert _whole(kernels, finite) == pytest.approx(_exact(finite), rel=1e-14)
    table = [[0, i, 1, i] for i in range(0, finite.numel(), 7)]
    alone = _squares(kernels, [finite], table, owners=finite.numel())
    assert_same([alone[::7]], [finite.double()[::7] ** 2])
