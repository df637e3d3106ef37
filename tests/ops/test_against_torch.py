"""The reference and the kernels against torch.optim: foreach to the bit, float64 over 1,000 steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.ops.cases import BF16, F16, F32, TORCH_NAMES, Updates, assert_same, kernels_of, needs_fma, optimizer, rule
from zerolite.ops import reference
from zerolite.ops.call import UpdateCall

NUMELS = (1, 7, 16, 33, 1003)
LONG_RUN = (1003,)
# Lion adds the same number in every step: if that is no multiple of a weight's last place, roundings add up in line.
LONG_RUNS: list[tuple[str, dict[str, float], torch.dtype]] = [
    ("adam", {}, F32), ("adam-l2", {}, BF16), ("adamw", {}, F16), ("lion", {"lr": 2.0**-10}, F16),
    ("adagrad-decay", {}, BF16), ("sgd-dampening", {}, F16), ("sgd-nesterov", {}, BF16),
]  # fmt: skip
DTYPE_IDS = {F32: "fp32", BF16: "bf16", F16: "fp16"}


def _gradients(step: int, numels: Sequence[int] = NUMELS, dtype: torch.dtype = F32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(n, generator=generator).to(dtype) for n in numels]


class _Ours:
    """Trains with kernels (or the reference), as zerolite.zero.kernel_update calls them."""

    def __init__(self, name: str, params: list[torch.Tensor], out: torch.dtype | None = None, **options: float) -> None:
        self.of = rule(name)
        self._options = options
        self.params = [p.clone() for p in params]
        initial = self.of.rule.initial(self.of.group)
        self.states = [[torch.full_like(p, initial) for p in params] for _ in range(self.of.states)]
        self.outs = [] if out is None else [p.to(out) for p in params]
        self._table = torch.tensor([[i, 0, p.numel(), 0] for i, p in enumerate(params)])
        self._steps = 0

    def step(self, kernels: Updates, grads: list[torch.Tensor]) -> None:
        self._steps += 1
        rows = torch.tensor([self.of.row(self._steps, **self._options)], dtype=F32)
        number, states = self.of.rule.number, tuple(self.states)
        kernels.update(UpdateCall(number, self.params, grads, states, self.outs, self._table, rows, None, None))


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
@pytest.mark.parametrize("name", [name for name in TORCH_NAMES if not name.startswith("adam")])
def test_the_reference_is_torchs_foreach(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference gives foreach's bits over five steps; Adagrad with torch's square root in the place of the exact
    one."""
    monkeypatch.setattr(reference, "correct_root", torch.sqrt)
    start = _gradients(10**6)
    ours, theirs = _Ours(name, start), _Torchs(name, start, **_foreach(name))
    for step in range(5):
        ours.step(reference, _gradients(step))
        theirs.step(_gradients(step))
        assert_same(ours.params, [p.detach() for p in theirs.params], step)
        for got, expected in zip(ours.states, theirs.states, strict=True):
            assert_same(got, expected, step)


def _ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest distance in units of the last place, of numbers of one sign."""
    return int((a.view(torch.int32).long() - b.view(torch.int32).long()).abs().max())


@pytest.mark.parametrize("name", [name for name in TORCH_NAMES if name.startswith("ada")])
def test_a_step_differs_from_foreach_in_last_places(name: str) -> None:
    """A step differs from foreach at most in last places, where the square root is torch's own or operations have
    another order. The step is taken from 0, so that rounding of the parameter does not hide it."""
    zeros, gradients = [torch.zeros(100_003)], _gradients(0, (100_003,))
    ours, theirs = _Ours(name, zeros), _Torchs(name, zeros, **_foreach(name))
    ours.step(kernels_of("plain"), gradients)
    theirs.step(gradients)
    assert _ulps(ours.params[0], theirs.params[0].detach()) <= 4
    for got, expected in zip(ours.states, theirs.states, strict=True):
        assert _ulps(got[0], expected[0]) <= 2


def _far(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.fast("adam-fp32", "lion-fp16")
@pytest.mark.parametrize(
    ("name", "options", "grad"), LONG_RUNS, ids=[f"{run[0]}-{DTYPE_IDS[run[2]]}" for run in LONG_RUNS]
)
def test_a_thousand_steps_against_float64(name: str, options: dict[str, float], grad: torch.dtype) -> None:
    """Parameters stay within 1e-6 of torch.optim's in float64, in the L2 norm relative to themselves: each of the 1,000
    roundings of an element is up to 2^-24 of it, and they add up like a random walk. (Element by element there is no
    such bound, since an element may be near 0.) States stay within 2e-6: squares of 16-bit gradients have few digits,
    and a sum rounds them alike. Written in 16 bits, the parameter is the correctly rounded master."""
    kernels, start = kernels_of("plain"), _gradients(10**6, LONG_RUN)
    ours = [_Ours(name, start, out, **options) for out in (None, BF16, F16)]
    exact = _Torchs(name, [p.double() for p in start], **options)
    for step in range(1000):
        grads = _gradients(step, LONG_RUN, grad)
        for one in ours:
            one.step(kernels, grads)
        exact.step(grads)
        for one in ours[1:]:
            assert_same(one.outs, [one.params[0].to(one.outs[0].dtype)], step)
    assert_same([one.params[0] for one in ours[1:]], [ours[0].params[0]] * 2)
    got = [ours[0].params[0], *(state[0] for state in ours[0].states)]
    expected = [exact.params[0].detach(), *(state[0] for state in exact.states)]
    distances = [_far(a, b) for a, b in zip(got, expected, strict=True)]
    assert distances[0] < 1e-6 and max(distances) < 2e-6, distances
