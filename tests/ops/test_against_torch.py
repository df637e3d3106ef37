"""The reference and the kernels against torch.optim: its foreach implementations to the bit, float64 over 1,000 steps."""

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
    assert_same,
    kernels_of,
    needs_fma,
    optimizer,
    rule,
    threads,
)
from zerolite.ops import reference
from zerolite.ops.call import UpdateCall

NUMELS = (1, 7, 16, 33, 1003)
STEPS = 5


def _gradients(step: int, numels: Sequence[int] = NUMELS, dtype: torch.dtype = F32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(n, generator=generator).to(dtype) for n in numels]


def _params(numels: Sequence[int] = NUMELS) -> list[torch.Tensor]:
    return _gradients(10**6, numels)


class _Ours:
    """Trains with kernels (or the reference), as zerolite.runtime.zero.flat_update calls them."""

    def __init__(self, name: str, params: list[torch.Tensor], out: torch.dtype | None = None) -> None:
        self.of: Rule = rule(name)
        self.params = [p.clone() for p in params]
        initial = self.of.rule.initial(self.of.group)
        self.states = [[torch.full_like(p, initial) for p in params] for _ in range(self.of.states)]
        self.outs = [] if out is None else [torch.zeros_like(p, dtype=out) for p in params]
        self._table = torch.tensor([[i, 0, p.numel(), 0] for i, p in enumerate(params)])
        self._steps = 0

    def step(self, kernels: object, grads: list[torch.Tensor]) -> None:
        self._steps += 1
        rows = torch.tensor([self.of.row(self._steps)], dtype=F32)
        call = UpdateCall(
            self.of.rule.number, self.params, grads, tuple(self.states), self.outs, self._table, rows, None, None
        )
        kernels.update(call)  # type: ignore[attr-defined]


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
def test_the_exact_root_makes_a_difference_of_two_ulps_at_most(name: str) -> None:
    """Of the step that is taken, here from 0, so that rounding of the parameter does not hide it. The states have
    torch's bits."""
    numels = (100_003,)
    zeros = [torch.zeros(n) for n in numels]
    kernels = kernels_of("plain")
    ours, theirs = _Ours(name, zeros), _Torchs(name, zeros, **_foreach(name))
    ours.step(kernels, _gradients(0, numels))
    theirs.step(_gradients(0, numels))
    assert _ulps(ours.params[0], theirs.params[0].detach()) <= 2
    for got, expected in zip(ours.states, theirs.states, strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("grad", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["adamw", "adam-l2", "lion-decay", "adagrad", "sgd-nesterov"])
def test_a_thousand_steps_against_float64(name: str, grad: torch.dtype) -> None:
    """fp32 parameters stay within 1e-6 of torch's in float64, relative in the L2 norm: each of the 1,000 roundings of
    an element is up to 2^-24 of it, and they add up like a random walk. Written in 16 bits, the parameter is the
    correctly rounded master."""
    kernels, numels = kernels_of("avx512" if kernels_of("plain").best_isa == 2 else "plain"), (1003,)
    start = _params(numels)
    ours = [_Ours(name, start, out) for out in (None, BF16, F16)]
    exact = _Torchs(name, [p.double() for p in start])
    with threads(1):
        for step in range(1000):
            grads = _gradients(step, numels, grad)
            for one in ours:
                one.step(kernels, grads)
            exact.step(grads)
            for one in ours[1:]:
                assert_same(one.outs, [p.to(one.outs[0].dtype) for p in one.params], step)
    assert_same([one.params[0] for one in ours[1:]], [ours[0].params[0]] * 2)
    p, q = ours[0].params[0].double(), exact.params[0].detach()
    print("REL", name, grad, float((p-q).norm()/q.norm()), float((p-q).norm()/(q-start[0].double()).norm()), float(((p-q)/q).abs().max()), [float((a[0].double()-b[0]).norm()/b[0].norm()) for a,b in zip(ours[0].states, exact.states)])
    assert float((p - q).norm() / q.norm()) < 1e-6
    for got, expected in zip(ours[0].states, exact.states, strict=True):
        assert float((got[0].double() - expected[0]).norm() / expected[0].norm()) < 1e-6
