"""Update kernels on numbers at the limits: rounding to 16 bits, infinities, NaN, denormals, betas near 0 and 1, long
runs."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal, localcontext

import pytest
import torch

from tests.ops.cases import (
    BF16,
    F16,
    F32,
    MIXED,
    NAMES,
    SPECIAL,
    Dtypes,
    Problem,
    assert_same,
    needs_fma,
    problem,
    rule,
)
from zerolite.ops import reference
from zerolite.ops.call import SGD, UpdateCall
from zerolite.ops.cpu_kernels import CpuKernels

HALVES = pytest.mark.parametrize("half", [BF16, F16], ids=["bf16", "fp16"])


# ------------------------------------------------------------------- conversions


def _patterns(half: torch.dtype) -> torch.Tensor:
    """Every value of a 16-bit dtype [65536], NaN and infinities included."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(half)


def _near_midpoints(half: torch.dtype) -> torch.Tensor:
    """fp32: all values of a 16-bit dtype, the middles between neighbours (and beyond the largest, where infinity
    begins), and the floats next to all of these."""
    one_sign = _patterns(half)[1 << 15 :]
    finite = one_sign[one_sign.isfinite()].double()
    beyond = 2 * finite[-1:] - finite[-2:-1]
    points = torch.cat([finite, (finite + torch.cat([finite[1:], beyond])) / 2]).float()
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    near = torch.cat([points, torch.nextafter(points, up), torch.nextafter(points, down)])
    return torch.cat([near, -near, _patterns(half).float(), SPECIAL])


def _sgd(
    kernels: CpuKernels, params: torch.Tensor, grads: torch.Tensor, lr: float, outs: list[torch.Tensor], piece: int
) -> None:
    """One step of plain SGD, in segments of ``piece`` elements: those of one element take the scalar path of every
    instruction set."""
    row = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0, 0.0, -lr, 0.0]])
    starts = torch.arange(0, params.numel(), piece)
    zero = torch.zeros_like(starts)
    table = torch.stack([zero, starts, (params.numel() - starts).clamp(max=piece), zero], dim=1)
    kernels.update(UpdateCall(SGD, [params], [grads], (), outs, table, row, None, None))


@HALVES
@pytest.mark.parametrize("piece", [1 << 20, 1])
def test_narrowing_rounds_to_nearest_even_and_widening_is_exact(
    half: torch.dtype, piece: int, kernels: CpuKernels
) -> None:
    """Values survive as gradients, with a learning rate of -1 from -0; and there and back again, as parameters."""
    values = _near_midpoints(half)
    params, out = values.clone(), values.to(half)
    _sgd(kernels, params, torch.zeros_like(values), 0.0, [out], piece)
    assert_same([params, out], [values, values.to(half)])
    patterns, params = _patterns(half), torch.full((1 << 16,), -0.0)
    _sgd(kernels, params, patterns.clone(), -1.0, [], piece)
    assert_same([params], [patterns.float()])
    params = patterns.clone()
    _sgd(kernels, params, torch.zeros(1 << 16), 0.0, [], piece)
    assert_same([params], [patterns])


# ------------------------------------------------------------------- numbers at the limits


def _crossed(name: str, dtypes: Dtypes) -> Problem:
    """Every special value as parameter, with every one as gradient and as first state."""
    of = rule(name)
    p, g, s = (values.flatten() for values in torch.meshgrid(SPECIAL, SPECIAL, SPECIAL, indexing="ij"))
    second = SPECIAL[torch.randint(len(SPECIAL), p.shape, generator=torch.Generator().manual_seed(1))]
    table, rows = torch.tensor([[0, 0, p.numel(), 0]]), torch.tensor([of.row(3)], dtype=F32)
    return Problem(of, [p], [g], [[s], [second]][: of.states], table, rows, dtypes)


@pytest.mark.fast(every=5)
@needs_fma
@pytest.mark.parametrize("name", NAMES)
def test_special_values_give_the_bits_of_the_reference(name: str, kernels: CpuKernels) -> None:
    for dtypes in (Dtypes(), MIXED, Dtypes(F32, F16, BF16, F16)):
        one = _crossed(name, dtypes)
        assert_same(one.run(kernels), one.run(reference), dtypes)


def test_infinities_and_nan_reach_the_outputs(kernels: CpuKernels) -> None:
    """Nothing hides an overflow: what is not finite in the gradient is not finite afterwards."""
    one = problem("adamw", (64,), special=0.0, dtypes=MIXED)
    one.grads[0][[3, 17, 40]] = torch.tensor([math.nan, math.inf, -math.inf])
    broken = torch.zeros(64, dtype=torch.bool)
    broken[[3, 17, 40]] = True
    params, first, second, out = one.run(kernels)
    assert torch.equal(~params.isfinite(), broken) and torch.equal(~out.isfinite(), broken)
    assert torch.equal(~first.isfinite(), broken) and torch.equal(~second.isfinite(), broken)


LIMITS = (0.0, 1e-7, 0.5, 0.9999999)


@needs_fma
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_betas_at_their_limits(name: str, kernels: CpuKernels) -> None:
    of = rule(name)
    for step, *betas in itertools.product((1, 1000, (1 << 24) + 1), LIMITS, LIMITS):
        one = problem(name, (259,), rows=torch.tensor([of.row(step, betas=betas)], dtype=F32))
        assert_same(one.run(kernels), one.run(reference), (step, betas))


# ------------------------------------------------------------------- step counts

STEPS = (1, 2, 1000, (1 << 24) - 1, 1 << 24, (1 << 24) + 1, (1 << 24) + 2, 1 << 25, (1 << 31) + 1, 1 << 40)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9999999, 0.99999999), (0.0, 0.0)])
def test_corrections_at_any_step(betas: tuple[float, float]) -> None:
    """The factors that correct the bias, against decimal arithmetic with 60 digits."""
    for step in STEPS:
        row = rule("adamw").row(step, betas=betas, lr=1e-3)
        with localcontext() as context:
            context.prec = 60
            corrections = [1 - Decimal(beta) ** step for beta in betas]
            root, rate = corrections[1].sqrt(), -Decimal(1e-3) / corrections[0]
        assert (row[5], row[7]) == pytest.approx((float(root), float(rate)), rel=1e-8), step


def test_steps_do_not_stall() -> None:
    """fp32 holds no odd number above 2^24: a count in fp32 stays there for ever, a rate that depends on it too."""
    counts = [(1 << 24) + i for i in range(4)]
    rates = [rule("adagrad").row(step, lr_decay=1.0, lr=1.0)[3] for step in counts]
    assert rates == [-1.0 / step for step in counts] and len(set(rates)) == 4
    corrections = [rule("adam").row(step, betas=(0.9, 1 - 2.0**-26))[5] for step in counts]
    assert corrections == sorted(corrections) and len(set(corrections)) == 4


@HALVES
def test_an_update_starts_from_what_somebody_has_written(half: torch.dtype, kernels: CpuKernels) -> None:
    """The 16-bit copy counts where it is not what the parameter rounds to; elsewhere all bits of the parameter do. SGD
    with lr 0 shows what an update starts from."""
    params = torch.randn(1003, generator=torch.Generator().manual_seed(3)) * 3
    copy = params.to(half)
    written = torch.arange(params.numel()) % 10 == 0
    copy[written] = copy[written].clamp(-0.01, 0.01)  # as WGAN does
    copy[500:520] = float("nan")
    wanted = torch.where(copy == params.to(half), params, copy.float())
    _sgd(kernels, params, torch.zeros_like(params), 0.0, [copy], params.numel())
    assert params[written].nan_to_num().abs().max() <= 0.0101
    torch.testing.assert_close(params, wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(copy, wanted.to(half), rtol=0, atol=0, equal_nan=True)
