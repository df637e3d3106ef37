"""Cases of the update kernels: rules as optimizers make them, numbers that are hard, and arguments that lie between
guard values."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import pytest
import torch

from zerolite.ops import Lion
from zerolite.ops.call import ADAGRAD, ADAM, UpdateCall
from zerolite.ops.cpu_kernels import ISA_NAMES, CpuKernels
from zerolite.optim.update_rules import UpdateRule, rule_of
from zerolite.utils.builder import op_builder

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
GUARD = 16  # elements on either side of an array
_GUARD_VALUE = 3.0
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACES: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adamw-maximize": lambda p: torch.optim.AdamW(p, lr=1e-2, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.85, 0.95), eps=1e-6),
    "adam-l2": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "adam-small-beta": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.3, 0.5)),
    "lion": lambda p: Lion(p, lr=1e-3),
    "lion-decay": lambda p: Lion(p, lr=1e-3, betas=(0.95, 0.98), weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adagrad-decay": lambda p: torch.optim.Adagrad(
        p, lr=1e-2, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5, maximize=True
    ),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd-l2-maximize": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1, maximize=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd-dampening": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}
TORCH_NAMES = tuple(_FACES)
NAMES = (*TORCH_NAMES, "adamw-uncorrected", "adam-l2-uncorrected")
ONE_OF_EACH = ("adamw", "lion-decay", "adagrad", "sgd-nesterov")

needs_fma = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"),
    reason="torch's own CPU code rounds twice where the kernels fuse a multiplication and an addition, without AVX2",
)


@functools.cache
def library() -> Any:
    try:
        return op_builder.load("cpu_kernels")
    except op_builder.OpUnavailable as error:
        pytest.skip(f"the CPU kernels cannot be built here: {error}")


def kernels_of(isa: str) -> CpuKernels:
    number, kernels = ISA_NAMES.index(isa), CpuKernels(library())
    if number > kernels.best_isa:
        pytest.skip(f"this processor has no {isa}")
    return CpuKernels(library(), number)


def all_kernels() -> list[CpuKernels]:
    """One for every instruction set of this processor, the narrowest first."""
    return [CpuKernels(library(), isa) for isa in range(CpuKernels(library()).best_isa + 1)]


def optimizer(name: str, params: list[torch.Tensor], **options: Any) -> torch.optim.Optimizer:
    """The optimizer that the name stands for; options are those of torch, such as ``foreach``."""
    made = _FACES[name](params)
    made.param_groups[0].update(options)
    return made


@dataclass(frozen=True)
class Rule:
    rule: UpdateRule
    group: dict[str, Any]

    @property
    def states(self) -> int:
        return len(self.rule.states) if self.rule.has_states(self.group) else 0

    def row(self, step: int, **changes: Any) -> tuple[float, ...]:
        """The scalars of a step, counted from 1, with some options of the optimizer changed."""
        return self.rule.row({**self.group, **changes}, step)


def rule(name: str) -> Rule:
    face = optimizer(name.removesuffix("-uncorrected"), [torch.zeros(1)])
    found = rule_of(face)
    assert found is not None
    group = dict(face.param_groups[0])
    return Rule(found, {**group, "bias_correction": False} if name.endswith("-uncorrected") else group)


class Dtypes(NamedTuple):
    """``out`` is None where no 16-bit copy of the parameter is wanted."""

    param: torch.dtype = F32
    grad: torch.dtype = F32
    state: torch.dtype = F32
    out: torch.dtype | None = None


MIXED = Dtypes(F32, BF16, F32, BF16)
FLOATS = (F32, BF16, F16)
ALL_DTYPES = [Dtypes(*kinds) for kinds in itertools.product(FLOATS, FLOATS, FLOATS, (None, BF16, F16))]

SPECIAL = torch.tensor(
    [0.0, 1.0, 1.0 + 2**-23, 1 / 3, 1e-4, 0.5, 65504.0, 65520.0, 1e18, 1e30, 3.4028235e38, float("inf")]
    + [1.1754944e-38, 1e-39, 1e-45, 2**-24, 2**-25, 6e-8, 1e-20, 1e-30]
)
SPECIAL = torch.cat([SPECIAL, -SPECIAL, torch.tensor([float("nan")])])


def numbers(n: int, seed: int, special: float = 0.05) -> torch.Tensor:
    """fp32 [n] of all magnitudes; a fraction ``special`` are zeros, denormals, infinities, NaN and the like."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator) * torch.exp2(torch.randint(-12, 4, (n,), generator=generator))
    chosen = torch.rand(n, generator=generator) < special
    picks = torch.randint(len(SPECIAL), (n,), generator=generator)
    return torch.where(chosen, SPECIAL[picks], values)


class Updates(Protocol):
    """The compiled kernels, or zerolite.ops.reference."""

    def update(self, call: UpdateCall, /) -> None: ...


@dataclass(frozen=True)
class Problem:
    """Arrays before an update, in fp32 [elements], and the rest of its arguments."""

    rule: Rule
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    states: list[list[torch.Tensor]]
    table: torch.Tensor
    rows: torch.Tensor
    dtypes: Dtypes = field(default_factory=Dtypes)
    factor: float | None = None
    skip: float | None = None

    def run(self, kernels: Updates, offset: int = 0) -> list[torch.Tensor]:
        """Updates copies that begin ``offset`` elements further than a boundary of 64 bytes, each kind of array at
        another place. Returns params, states and outs, flat in one list; guards and what no segment names are
        checked."""
        kinds = [self.params, self.grads, *self.states]
        dtypes = [self.dtypes.param, self.dtypes.grad] + [self.dtypes.state] * len(self.states)
        if self.dtypes.out is not None:
            kinds.append([self._rounded(p) for p in self.params])
            dtypes.append(self.dtypes.out)
        placed = [
            [_Placed(values, dtype, (offset * (2 * kind + 1)) % 16) for values in arrays]
            for kind, (arrays, dtype) in enumerate(zip(kinds, dtypes, strict=True))
        ]
        params, grads, *rest = [[one.array for one in arrays] for arrays in placed]
        states, outs = (rest, []) if self.dtypes.out is None else (rest[:-1], rest[-1])
        factor, skip = (None if x is None else torch.tensor(x) for x in (self.factor, self.skip))
        call = UpdateCall(
            self.rule.rule.number, params, grads, tuple(states), outs, self.table, self.rows, factor, skip
        )
        kernels.update(call)
        changeable = [arrays for kind, arrays in enumerate(placed) if kind != 1]
        for one in placed[1]:
            one.check(torch.zeros(one.array.numel(), dtype=torch.bool))
        for arrays in changeable:
            for one, named in zip(arrays, self._named(), strict=True):
                one.check(named)
        return [one.array for arrays in changeable for one in arrays]

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return the earlier contents of outs: the rounded parameters, a few of which the user has overwritten."""
        assert self.dtypes.out is not None
        rounded = values.to(self.dtypes.param).to(self.dtypes.out).float()
        rounded[::7] = 0.375
        return rounded

    def _named(self) -> list[torch.Tensor]:
        """Return a mask for each tensor: the elements that lie in a segment."""
        masks = [torch.zeros(p.numel(), dtype=torch.bool) for p in self.params]
        for tensor, start, numel, _ in self.table.tolist():
            masks[tensor][start : start + numel] = True
        return masks


class _Placed:
    """A copy of an array between guard values."""

    def __init__(self, values: torch.Tensor, dtype: torch.dtype, offset: int) -> None:
        n, begin = values.numel(), GUARD + offset
        self._before = torch.full((begin + n + GUARD,), _GUARD_VALUE, dtype=dtype)
        self._before[begin : begin + n] = values
        self._all = self._before.clone()
        self._slice = slice(begin, begin + n)
        self.array = self._all[self._slice]

    def check(self, may_change: torch.Tensor) -> None:
        allowed = torch.zeros(self._all.numel(), dtype=torch.bool)
        allowed[self._slice] = may_change
        if bool((differing(self._all, self._before) & ~allowed).any()):
            raise AssertionError("elements outside of the segments have changed")


def problem(
    name: str, numels: Sequence[int] = (1003,), step: int = 7, special: float = 0.05, **options: Any
) -> Problem:
    """One segment for each tensor; options are fields of Problem."""
    of = rule(name)
    lists = [
        [numbers(n, seed=100 * kind + i, special=special) for i, n in enumerate(numels)]
        for kind in range(2 + of.states)
    ]
    if of.rule.number in (ADAM, ADAGRAD):
        lists[-1] = [values.abs() for values in lists[-1]]
    table = torch.tensor([[i, 0, n, 0] for i, n in enumerate(numels)], dtype=torch.int64).reshape(-1, 4)
    made = Problem(of, lists[0], lists[1], lists[2:], table, torch.tensor([of.row(step)], dtype=F32))
    return replace(made, **options)


def differing(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """bool: where bits differ; one NaN is as good as another."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    integers = _INTEGERS[got.element_size()]
    different = got.view(integers) != expected.view(integers)
    return different & ~(got.isnan() & expected.isnan()) if bool(different.any()) else different


def assert_same(got: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], what: Any = "") -> None:
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        places = differing(a, b).nonzero().flatten()
        if places.numel():
            at = int(places[0])
            raise AssertionError(
                f"{what}: array {number} ({a.dtype}) differs in {places.numel()} of {a.numel()} elements, first at "
                f"{at}: got {a[at].item()!r}, expected {b[at].item()!r}"
            )


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
