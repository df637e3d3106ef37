"""The reference and the kernels against torch.optim: foreach to the bit, float64 over 1,000 steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.ops.cases import (
    BF16,
    F16,
    F32,
    TORCH_NAMES,
    Rule,
    Updates,
    assert_same,
    kernels_of,
    needs_fma,
    optimizer,
    rule,
)
from zerolite.ops import reference
from zerolite.ops.call import ADAGRAD, ADAM, LION, UpdateCall

NUMELS = (1, 7, 16, 33, 1003)
STEPS = 5
LONG_RUN = (1003,)
# Name, options, how far in L2. AdamW's decay rounds the same way step after step while a weight hardly moves. Lion adds
# the same number in every step: if that is no multiple of a weight's last place, roundings add up in line.
LONG_RUNS: list[tuple[str, dict[str, float], float]] = [
    ("adamw", {"lr": 1e-3, "weight_decay": 1e-2}, 6e-6),
    ("adam-l2", {}, 1e-6),
    ("lion-decay", {"lr": 2.0**-10}, 1e-6),
    ("adagrad-decay", {}, 1e-6),
    ("sgd-dampening", {}, 1e-6),
    ("sgd-nesterov", {}, 1e-6),
]


def _gradients(step: int, numels: Sequence[int] = NUMELS, dtype: torch.dtype = F32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(n, generator=generator).to(dtype) for n in numels]


def _params(numels: Sequence[int] = NUMELS) -> list[torch.Tensor]:
    return _gradients(10**6, numels)


class _Ours:
    """Trains with kernels (or the reference), as zerolite.runtime.zero.flat_update calls them."""

    def __init__(self, name: str, params: list[torch.Tensor], out: torch.dtype | None = None, **options: float) -> None:
        self.of: Rule = rule(name)
        self._options = options
        self.params = [p.clone() for p in params]
        initial = self.of.rule.initial(self.of.group)
        self.states = [[torch.full_like(p, initial) for p in params] for _ in range(self.of.states)]
        self.outs = [] if out is None else [torch.zeros_like(p, dtype=out) for p in params]
        self._table = torch.tensor([[i, 0, p.numel(), 0] for i, p in enumerate(params)])
        self._steps = 0

    def step(self, kernels: Updates, grads: list[torch.Tensor]) -> list[float]:
        """Returns the row of scalars, as fp32 holds them."""
        self._steps += 1
        rows = torch.tensor([self.of.row(self._steps, **self._options)], dtype=F32)
        call = UpdateCall(
            self.of.rule.number, self.params, grads, tuple(self.states), self.outs, self._table, rows, None, None
        )
        kernels.update(call)
        return rows[0].tolist()


class _Torchs:
    """Trains with torch.optim (zerolite's Lion)."""

    def __init__(self, name: str, params: list[torch.Tensor], **options: object) -> None:
        self.params = [torch.nn.Parameter(p.clone()) for p in params]
        self._optimizer = optimizer(name, list(self.params), **options)
        self._names = rule(name).rule.states

    def step(self, grads: list[torch.Tensor]) -> None:
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad.to(p.dtype)
        self._optimizer.step()

    @property
    def states(self) -> list[list[torch.Tensor]]:
        kept = [self._optimizer.state[p] for p in self.params]
        return [[state[name] for state in kept] for name in self._names if kept[0].get(name) is not None]


def _foreach(name: str) -> dict[str, object]:
    return {} if name.startswith("lion") else {"foreach": True}


@needs_fma
@pytest.mark.parametrize("name", TORCH_NAMES)
def test_the_reference_is_torchs_foreach(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit over five steps; Adam and Adagrad with torch's square root in the place of the exact one."""
    monkeypatch.setattr(reference, "_root", torch.sqrt)
    ours, theirs = _Ours(name, _params()), _Torchs(name, _params(), **_foreach(name))
    for step in range(STEPS):
        ours.step(reference, _gradients(step))
        theirs.step(_gradients(step))
        assert_same(ours.params, [p.detach() for p in theirs.params], step)
        for got, expected in zip(ours.states, theirs.states, strict=True):
            assert_same(got, expected, step)


@needs_fma
@pytest.mark.parametrize("name", [name for name in TORCH_NAMES if name.startswith(("lion", "sgd"))])
def test_lion_and_sgd_give_torchs_bits(name: str) -> None:
    kernels = kernels_of("plain")
    ours, theirs = _Ours(name, _params()), _Torchs(name, _params(), **_foreach(name))
    for step in range(STEPS):
        ours.step(kernels, _gradients(step))
        theirs.step(_gradients(step))
        assert_same(ours.params, [p.detach() for p in theirs.params], step)


def _ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest distance in units of the last place, of numbers of one sign."""
    return int((a.view(torch.int32).long() - b.view(torch.int32).long()).abs().max())


@needs_fma
@pytest.mark.parametrize("name", [name for name in TORCH_NAMES if name.startswith("ada")])
def test_the_exact_root_makes_a_difference_of_three_ulps_at_most(name: str) -> None:
    """Of the step that is taken, here from 0, so that rounding of the parameter does not hide it. The states have
    torch's bits."""
    numels = (100_003,)
    zeros = [torch.zeros(n) for n in numels]
    kernels = kernels_of("plain")
    ours, theirs = _Ours(name, zeros), _Torchs(name, zeros, **_foreach(name))
    ours.step(kernels, _gradients(0, numels))
    theirs.step(_gradients(0, numels))
    assert _ulps(ours.params[0], theirs.params[0].detach()) <= 3
    for got, expected in zip(ours.states, theirs.states, strict=True):
        assert_same(got, expected)


def _textbook(number: int, row: list[float], p: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor]) -> None:
    """One step in float64, in place, from the scalars of csrc/rules.h."""
    g = g.double() * row[0]
    if number == ADAM:
        _, keep, l2, weight1, beta2, weight2, correction2, eps, step, _ = row
        m, v = states
        g = g + l2 * p
        m += weight1 * (g - m)
        v.copy_(beta2 * v + weight2 * g * g)
        p.copy_(keep * p + step * m / (v.sqrt() / correction2 + eps))
    elif number == LION:
        _, keep, beta1, weight1, beta2, weight2, step, *_ = row
        (m,) = states
        p.copy_(keep * p + step * (beta1 * m + weight1 * g).sign())
        m.copy_(beta2 * m + weight2 * g)
    elif number == ADAGRAD:
        _, l2, eps, step, *_ = row
        (total,) = states
        g = g + l2 * p
        total += g * g
        p += step * g / (total.sqrt() + eps)
    else:
        _, l2, momentum, weight, first, nesterov, step, *_ = row
        (buffer,) = states
        g = g + l2 * p
        buffer.copy_(g if first else momentum * buffer + weight * g)
        p += step * (g + momentum * buffer if nesterov else buffer)


def _far(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The distance, relative, in the L2 norm."""
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("grad", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("name", "options", "bound"), LONG_RUNS, ids=[name for name, *_ in LONG_RUNS])
def test_a_thousand_steps_against_float64(
    name: str, options: dict[str, float], bound: float, grad: torch.dtype
) -> None:
    """Parameters and states stay within 1e-6 of float64 with the same scalars, in the L2 norm relative to themselves:
    each of the 1,000 roundings of an element is up to 2^-24 of it, and they add up like a random walk. Element by
    element there is no such bound, since an element may be near 0. Written in 16 bits, the parameter is the correctly
    rounded master.

    Rounding the scalars themselves to fp32 counts in every step alike (1 - lr x decay may be off by 3e-8, beta2 and
    1 - beta2 do not quite add up to 1). So against torch.optim in float64 the claim is that torch in fp32 is as far.
    """
    kernels, start = kernels_of("plain"), _params(LONG_RUN)
    ours = [_Ours(name, start, out, **options) for out in (None, BF16, F16)]
    exact, exact_states = start[0].double(), [state[0].double() for state in ours[0].states]
    double, single = (_Torchs(name, [p.to(dtype) for p in start], **options) for dtype in (torch.float64, F32))
    for step in range(1000):
        grads = _gradients(step, LONG_RUN, grad)
        for one in ours:
            row = one.step(kernels, grads)
        _textbook(ours[0].of.rule.number, row, exact, grads[0], exact_states)
        double.step(grads)
        single.step(grads)
        for one in ours[1:]:
            assert_same(one.outs, [one.params[0].to(one.outs[0].dtype)], step)
    assert_same([one.params[0] for one in ours[1:]], [ours[0].params[0]] * 2)
    params = ours[0].params[0]
    distances = [_far(params, exact)] + [
        _far(state[0], value) for state, value in zip(ours[0].states, exact_states, strict=True)
    ]
    assert max(distances) < bound, distances
    torchs = double.params[0].detach()
    assert _far(params, torchs) < 1.02 * _far(single.params[0].detach(), torchs)
