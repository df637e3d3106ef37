"""Rows packed with 8 or 4 bits an element: the bound on the error, what is special, and equal bits everywhere."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ops.cases import BF16, F16, F32, FLOATS, all_kernels, assert_same, differing, numbers, threads
from tests.ops.quant_calls import ERRORS, LENGTHS, copy_quant, make_quant, packed_like, unpacking
from zerolite.ops import cpu_kernels, reference
from zerolite.ops.call import QUANT_BLOCK, QUANT_LEAST, QUANT_TOPS, QuantCall, row_bytes
from zerolite.ops.cpu_kernels import CpuKernels
from zerolite.ops.quantization import dequantize, dequantize_sum, quantize

BITS = pytest.mark.parametrize("bits", [8, 4])


def through(values: torch.Tensor, bits: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """Return one row as it arrives."""
    packed, arrived = packed_like(values, 1, bits), torch.empty_like(values, dtype=dtype)
    quantize(values, packed, bits)
    dequantize(packed, arrived, bits)
    return arrived


def half_steps(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return half a step of each element's block, in double."""
    blocks = values.double().split(QUANT_BLOCK)
    tops = [torch.full_like(block, max(float(block.abs().max()), QUANT_LEAST)) for block in blocks]
    return torch.cat(tops) / QUANT_TOPS[bits] / 2


@BITS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_element_arrives_further_than_half_a_step_from_its_value(bits: int, dtype: torch.dtype) -> None:
    for n, scale in itertools.product((1, 2, 255, 256, 257, 4099), (1.0, 1e-30, 1e-38, 1e-42, 1e30)):
        if dtype == F16 and scale != 1.0:
            continue
        values = (numbers(n, seed=n, special=0.0) * scale).to(dtype)
        arrived = through(values, bits)
        bound = half_steps(values, bits) * (1 + 2**-18)  # the scale and the quotient are rounded to fp32
        assert bool(((arrived.double() - values.double()).abs() <= bound).all()), (n, scale)
    largest = torch.full((QUANT_BLOCK,), torch.finfo(dtype).max * 0.99, dtype=dtype)
    torch.testing.assert_close(through(largest, bits), largest.float(), rtol=1e-6, atol=0.0)


@BITS
def test_a_sum_is_as_far_as_the_errors_of_its_rows_and_rounded_once(bits: int) -> None:
    rows, n = 5, 1003
    values = numbers(rows * n, seed=3, special=0.0)
    packed = packed_like(values, rows, bits)
    quantize(values, packed, bits)
    arrived, total, half = torch.empty(rows * n), torch.empty(n), torch.empty(n, dtype=BF16)
    dequantize(packed, arrived, bits)
    dequantize_sum(packed, total, bits, divisor=3.0)
    dequantize_sum(packed, half, bits, divisor=3.0)
    expected = torch.zeros(n)
    for row in arrived.view(rows, n):
        expected = expected + row
    assert_same([total, half], [expected / 3.0, (expected / 3.0).to(BF16)])
    bound = sum(half_steps(row, bits) for row in values.view(rows, n)) / 3
    exact = values.view(rows, n).double().sum(0) / 3
    assert bool(((total.double() - exact).abs() <= bound * (1 + 1e-5)).all())


@BITS
def test_zeros_stay_zeros_and_empty_rows_are_nothing(bits: int) -> None:
    values = numbers(700, seed=4, special=0.0)
    values[::3] = 0.0
    values[256:512] = -0.0
    arrived = through(values, bits)
    assert_same([arrived[::3], arrived[256:512]], [torch.zeros(234), torch.zeros(256)])
    empty = torch.empty(0)
    quantize(empty, torch.empty(3, 0, dtype=torch.uint8), bits)
    dequantize_sum(torch.empty(3, 0, dtype=torch.uint8), empty, bits)


@BITS
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_with_a_number_that_is_not_finite_arrives_as_nan(bits: int, bad: float, kernels: CpuKernels) -> None:
    """And no other block. What error feedback knew of it is forgotten: no NaN stays for later steps."""
    for place, run in itertools.product((0, 255, 256, 700), (kernels, reference)):
        values = numbers(2 * 701, seed=5, special=0.0)
        values[place] = bad
        packed, error, arrived = packed_like(values, 2, bits), torch.ones(2 * 701), torch.empty(2 * 701)
        run.quantize(QuantCall(bits, values, packed, error, 0.5, 0.5))
        run.dequantize(QuantCall(bits, arrived, packed))
        block = slice(place // 256 * 256, min(place // 256 * 256 + 256, 701))
        expected = torch.zeros(2 * 701, dtype=torch.bool)
        expected[block] = True
        assert torch.equal(arrived.isnan(), expected) and bool(arrived[~expected].isfinite().all())
        assert torch.equal(error == 0.0, expected) and bool(error.isfinite().all())
        total = torch.empty(701)
        run.dequantize(QuantCall(bits, total, packed, is_sum=True))
        assert torch.equal(total.isnan(), expected[:701])


@pytest.mark.fast(every=5)
@BITS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kernels_give_the_bits_of_the_reference(bits: int, dtype: torch.dtype, kernels: CpuKernels) -> None:
    """Codes, scales, errors, values and sums, at every length and alignment; what lies around them stays as it is."""
    for n, rows, error, offset in itertools.product(LENGTHS, (1, 3), ERRORS, (0, 3)):
        call = make_quant(bits, rows, n, dtype, error, offset)
        wanted = copy_quant(call)
        kernels.quantize(call)
        reference.quantize(wanted)
        assert call.differences(wanted) == [], (n, rows, error)
        for back in unpacking(call):
            wanted = copy_quant(back)
            kernels.dequantize(back)
            reference.dequantize(wanted)
            assert back.differences(wanted) == [], (n, rows, back.is_sum)


@pytest.mark.parametrize("own", [False, True], ids=["torch's threads", "own threads"])
def test_the_same_bits_on_any_number_of_threads(
    own: bool, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    if own:
        monkeypatch.setattr(cpu_kernels, "_openmp", lambda: (None, None))
    found = []
    for count in (1, 3):
        with threads(count):
            call = make_quant(4, 3, 70_001, BF16, BF16, 1)
            kernels.quantize(call)
            total = torch.empty(70_001)
            kernels.dequantize(QuantCall(4, total, call.packed, is_sum=True))
        found.append([call.packed, call.error, total])
    assert_same(*found)


def test_error_feedback_sends_later_what_it_could_not_send_at_once() -> None:
    """A constant gradient arrives on average: exactly as the moving average of the paper has it."""
    values, beta = numbers(2048, seed=6, special=0.0), 0.8
    errors = torch.zeros(2048)
    expected, sums = torch.zeros(2048), {True: torch.zeros(2048), False: torch.zeros(2048)}
    packed, arrived = packed_like(values, 1, 4), torch.empty(2048)
    for _ in range(200):
        for feedback in (True, False):
            quantize(values, packed, 4, errors if feedback else None, beta)
            dequantize(packed, arrived, 4)
            sums[feedback] += arrived / 200
            if feedback:
                expected = expected * beta + (values + expected - arrived) * (1 - beta)
                torch.testing.assert_close(errors, expected, rtol=1e-6, atol=1e-6)
    lost = {feedback: float((total - values).norm()) for feedback, total in sums.items()}
    assert lost[True] < lost[False] / 10


def test_tensors_without_memory_are_checked_and_not_computed() -> None:
    with FakeTensorMode():
        values = torch.empty(512)
        quantize(values, torch.empty(2, row_bytes(256, 4), dtype=torch.uint8), 4)
        with pytest.raises(ValueError, match="expected contiguous uint8 rows"):
            quantize(values, torch.empty(2, 3, dtype=torch.uint8), 4)


def test_what_does_not_fit_is_refused() -> None:
    values, packed = torch.zeros(512), packed_like(torch.zeros(512), 2, 8)
    for arguments, message in [
        ((values, packed, 5), "expected 8 or 4 bits"),
        ((values[:511], packed, 8), "expected contiguous values of 2 rows"),
        ((values.double(), packed, 8), "got torch.float64"),
        ((values, packed[:, :-16], 8), "expected contiguous uint8 rows"),
        ((values, packed, 8, values[:3]), "expected a contiguous error of 512"),
    ]:
        with pytest.raises(ValueError, match=message):
            quantize(*arguments)  # type: ignore[arg-type]
    kernels = all_kernels()[-1]
    call = make_quant(8, 2, 256, F32, None)
    call.packed = call.packed[:, :-16].contiguous()
    with pytest.raises(ValueError, match="refused its arguments: rows that are not aligned"):
        kernels.quantize(call)
    assert not differing(call.values, make_quant(8, 2, 256, F32, None).values).any()
