"""The update kernels against the PyTorch reference, to the bit: what they compute does not depend on the instruction
set, the number of threads, or where an element lies."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.ops.cases import (
    ALL_DTYPES,
    BF16,
    F16,
    F32,
    MIXED,
    NAMES,
    ONE_OF_EACH,
    Dtypes,
    Problem,
    all_kernels,
    assert_same,
    needs_fma,
    problem,
    rule,
    threads,
)
from zerolite.ops import cpu_kernels, reference
from zerolite.ops.cpu_kernels import ISA_NAMES, CpuKernels

LENGTHS = (0, 1, 7, 8, 15, 16, 17)

pytestmark = [needs_fma, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(params=["torch's threads", "own threads"])
def team(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the source of threads: the OpenMP runtime of torch, or, as without one, the library itself."""
    if request.param == "own threads":
        monkeypatch.setattr(cpu_kernels, "_openmp", lambda: (None, None))


@pytest.mark.fast(every=4)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reference_in_all_dtypes(name: str) -> None:
    base = problem(name, (203,), step=1 if "adam" in name else 7)
    for dtypes in ALL_DTYPES if base.states else [d for d in ALL_DTYPES if d.state == F32]:
        one = replace(base, dtypes=dtypes)
        expected = one.run(reference)
        for isa, kernels in zip(ISA_NAMES, all_kernels(), strict=False):
            assert_same(one.run(kernels, offset=5), expected, (isa, dtypes))


@pytest.mark.parametrize("factor", [None, 0.3, 0.0, float("nan")])
def test_the_factor_multiplies_the_gradient(factor: float | None, kernels: CpuKernels) -> None:
    for name, dtypes in itertools.product(("adamw-maximize", "sgd-momentum"), (Dtypes(), MIXED)):
        one = problem(name, dtypes=dtypes, factor=factor)
        one.rows[0, 0] *= 0.7
        assert_same(one.run(kernels), one.run(reference), (name, dtypes))


@pytest.mark.parametrize("skip", [0.0, -0.0, 1.0, 1e-45, float("nan")])
def test_skip_leaves_everything(skip: float, kernels: CpuKernels) -> None:
    one = problem("adamw", dtypes=MIXED)
    nothing = replace(one, table=torch.empty(0, 4, dtype=torch.int64))
    skipped = replace(one, skip=skip).run(kernels)
    assert_same(skipped, (nothing if skip else one).run(kernels))
    assert_same(skipped, replace(one, skip=skip).run(reference))


# ------------------------------------------------------------------- where an element lies


@pytest.mark.fast(every=5)
@pytest.mark.parametrize("dtypes", [Dtypes(), MIXED, Dtypes(BF16, F16, BF16, F16)], ids=["fp32", "mixed", "16 bits"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_short_lengths_at_every_alignment(name: str, dtypes: Dtypes, kernels: CpuKernels) -> None:
    """An element gets the value that it gets as a part of a longer array."""
    long = problem(name, (max(LENGTHS),), dtypes=dtypes, special=0.2)
    expected = long.run(reference)
    for n, offset in itertools.product(LENGTHS, range(16)):
        assert_same(_first(long, n).run(kernels, offset), [array[:n] for array in expected], (n, offset))


def _first(one: Problem, n: int) -> Problem:
    states = [[values[:n] for values in state] for state in one.states]
    table = torch.tensor([[0, 0, n, 0]])
    return replace(one, params=[one.params[0][:n]], grads=[one.grads[0][:n]], states=states, table=table)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_many_segments_and_rows_in_one_call(name: str, kernels: CpuKernels) -> None:
    """Segments in any order, touching and apart, empty ones, several a tensor, tensors without one."""
    of = rule(name)
    rows = torch.tensor([of.row(1), of.row(5, lr=0.3), of.row(2**25, lr=1e-5)], dtype=F32)
    segments = [[3, 10, 90, 2], [0, 0, 16, 0], [0, 16, 1, 1], [0, 20, 13, 2], [5, 0, 0, 0], [1, 1, 511, 1]]
    segments += [[1, 512, 513, 0], [4, 7, 2000, 2], [2, 3, 0, 1], [6, 0, 1, 1], [4, 2007, 1, 0]]
    table = torch.tensor(segments)
    numels = (40, 1025, 3, 130, 2048, 0, 1, 5)
    for dtypes in (Dtypes(), MIXED, Dtypes(F16, F16, BF16, BF16)):
        one = problem(name, numels, table=table, rows=rows, dtypes=dtypes)
        expected = one.run(reference)
        for offset in (0, 3, 8):
            assert_same(one.run(kernels, offset), expected, (dtypes, offset))


# ------------------------------------------------------------------- threads


@pytest.mark.fast("torch's threads-avx2", "own threads-plain")
@pytest.mark.usefixtures("team")
def test_any_number_of_threads(kernels: CpuKernels) -> None:
    """Shares of threads end in the middle of segments."""
    numels = (70_001, 3, 16_384, 0, 100_003)
    segments = [[0, 1, 69_999, 0], [1, 0, 3, 0], [4, 5, 50_000, 0], [2, 0, 16_384, 0], [4, 50_005, 49_997, 0]]
    table = torch.tensor(segments)
    for name, dtypes in (("adamw", Dtypes()), ("adamw", MIXED), ("sgd-nesterov", Dtypes(BF16, F16, BF16, F16))):
        one = problem(name, numels, table=table, dtypes=dtypes)
        expected = one.run(reference)
        for count in (2, 3):
            with threads(count):
                assert_same(one.run(kernels, offset=3), expected, (name, dtypes))
