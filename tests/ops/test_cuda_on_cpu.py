"""The CUDA sources, compiled by a C++ compiler and run on the CPU thread by thread: segments, alignments, tails, tables
and the order of sums. What the hardware does (its arithmetic, its memory model, streams) is for tests/gpu."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from ctypes import Structure
from pathlib import Path

import pytest
import torch

from tests.ops.cases import ALL_DTYPES, BF16, F16, F32, FLOATS, MIXED, Dtypes
from tests.ops.cuda_calls import LENGTHS, RULES, copy_call, copy_tensor, differences, finite, make_call
from tests.ops.quant_calls import ERRORS, copy_quant, make_quant, unpacking
from zerolite.ops.call import ADAM, SGD, QuantCall, SquaresCall, UpdateCall
from zerolite.ops.cpu_kernels import CpuKernels
from zerolite.ops.cuda_kernels import CudaKernels, _Entry
from zerolite.ops.interface import Quant

ROOT = Path(__file__).resolve().parents[2]
CXX = shutil.which(os.environ.get("CXX", "c++"))
SHIM = ("-I", ROOT / "tests/ops/cuda_on_cpu", "-include", ROOT / "tests/ops/cuda_on_cpu/cuda_on_cpu.h")
FP32 = Dtypes(out=BF16)
UPDATE_ROOM, NORM_ROOM = 42, 126  # segments that travel in a launch's arguments
UPDATE_CHUNK, NORM_CHUNK = 4096, 16384

pytestmark = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler; this machine has none")


class SimulatedKernels(CudaKernels):
    """The device's memory is the host's. capturing: as in the capture of a graph. backwards: blocks and threads run in
    the opposite order."""

    def __init__(self, library: ctypes.CDLL, capturing: bool = False, backwards: bool = False) -> None:
        super().__init__(library)
        self._simulate, self.ordinal = library.zl_simulate, 0
        self.capturing, self.backwards = capturing, backwards
        self.launches = 0

    def _launch(self, entry: _Entry, arguments: Structure, device: torch.device) -> None:
        call = ctypes.byref(arguments)
        filled = copied = None
        size = entry.bytes(arguments.segments)
        if size and not self.capturing:
            filled = torch.full((size,), 0x55, dtype=torch.uint8)
            self._check(entry.fill(call, filled.data_ptr()), entry.name, device)
            copied = filled.clone()
        tables = [None if table is None else table.data_ptr() for table in (filled, copied)]
        before = self._simulate(self.backwards)
        self._check(entry.launch(call, *tables, 0, None), entry.name, device)
        self.launches = self._simulate(False) - before

    def _launch_quant(self, launch: ctypes._NamedFuncPointer, call: QuantCall) -> None:
        before = self._simulate(self.backwards)
        self._check(launch(Quant(call), self.ordinal, None), "quantization", call.values.device)
        self.launches = self._simulate(False) - before


def compile_in(directory: Path, *arguments: str | Path) -> None:
    flags = "-O1 -std=c++17 -ffp-contract=off -fno-math-errno -fPIC -shared -fvisibility=hidden -pthread".split()
    done = subprocess.run([str(CXX), *flags, *arguments], capture_output=True, text=True, cwd=directory)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    directory = tmp_path_factory.mktemp("cuda_on_cpu")
    source = ["-x", "c++", *SHIM, ROOT / "csrc/cuda/kernels.cu"]
    compile_in(directory, *source, "-o", "kernels.so")
    return ctypes.CDLL(str(directory / "kernels.so"))


@pytest.fixture(params=["uploaded", "captured", "backwards"])
def kernels(request: pytest.FixtureRequest, library: ctypes.CDLL) -> SimulatedKernels:
    return SimulatedKernels(library, request.param == "captured", request.param == "backwards")


def check_update(kernels: SimulatedKernels, cpu: CpuKernels, call: UpdateCall) -> None:
    wanted = copy_call(call)
    cpu.update(wanted)
    kernels.update(call)
    assert differences(call, wanted) == []


@pytest.mark.fast("1")
@pytest.mark.parametrize("rule", RULES)
def test_all_dtypes_give_the_bits_of_the_cpu(library: ctypes.CDLL, cpu: CpuKernels, rule: int) -> None:
    kernels = SimulatedKernels(library)
    for dtypes in ALL_DTYPES:
        check_update(kernels, cpu, make_call(rule, dtypes, (17, 5), factor=0.37, skip=0.0))


@pytest.mark.parametrize("rule", RULES)
def test_lengths_at_every_alignment(library: ctypes.CDLL, cpu: CpuKernels, rule: int) -> None:
    """Arrays that are aligned alike, and each its own way."""
    kernels = SimulatedKernels(library)
    for dtypes, offset in itertools.product((FP32, Dtypes(F32, BF16, F32, F16)), range(8)):
        alike = make_call(rule, dtypes, LENGTHS, lambda array, tensor, o=offset: o)
        own = make_call(rule, dtypes, LENGTHS, lambda array, tensor, o=offset: o * (array + tensor) % 8)
        check_update(kernels, cpu, alike)
        check_update(kernels, cpu, own)


@pytest.mark.parametrize(
    ("numel", "offset"), [(UPDATE_CHUNK - 1, 0), (UPDATE_CHUNK, 1), (UPDATE_CHUNK + 1, 3), (3 * UPDATE_CHUNK + 5, 1)]
)
def test_segments_of_several_chunks(kernels: SimulatedKernels, cpu: CpuKernels, numel: int, offset: int) -> None:
    for arrays in (range(5), [1]):  # all of them begin there, or the gradients alone
        call = make_call(ADAM, MIXED, (numel, 9), lambda array, tensor, a=arrays: offset if array in a else 0)
        check_update(kernels, cpu, call)


@pytest.mark.parametrize("count", [1, UPDATE_ROOM, UPDATE_ROOM + 1, 1100])
def test_many_segments_give_the_bits_of_the_cpu(kernels: SimulatedKernels, cpu: CpuKernels, count: int) -> None:
    """Segments of a few tensors, in no order, some of them empty, with gaps between them that stay as they are."""
    per_tensor = (count + 3) // 4
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    table = [(i // per_tensor, i % per_tensor * 11 + 2, i % 10, i % 3) for i in order]
    call = make_call(ADAM, FP32, (per_tensor * 11 + 20,) * 4, table=table)
    check_update(kernels, cpu, call)
    filled = sum(numel > 0 for _, _, numel, _ in table)
    assert kernels.launches == (-(-filled // UPDATE_ROOM) if kernels.capturing else min(filled, 1))


@pytest.mark.parametrize("skip", [1.0, float("nan")])
def test_a_skipped_call_changes_nothing(kernels: SimulatedKernels, skip: float) -> None:
    call = make_call(ADAM, FP32, (17, UPDATE_CHUNK + 1), skip=skip)
    before = copy_call(call)
    kernels.update(call)
    assert differences(call, before) == []


@pytest.mark.parametrize("out", [None, torch.bfloat16])
def test_sgd_needs_no_states(kernels: SimulatedKernels, cpu: CpuKernels, out: torch.dtype | None) -> None:
    call = make_call(SGD, Dtypes(out=out), LENGTHS, table=[(i, 0, n, 3) for i, n in enumerate(LENGTHS)])
    call.states = []
    check_update(kernels, cpu, call)


@pytest.mark.parametrize(
    ("segment", "count"),
    [((2, 0, 1, 0), 1), ((-1, 0, 1, 0), UPDATE_ROOM + 1), ((0, -1, 1, 0), NORM_ROOM + 1), ((0, 0, -1, 0), 1),
     ((0, 0, 1, -1), NORM_ROOM + 1), ((0, 0, 9, 0), 1), ((1, 7, 2, 0), NORM_ROOM + 1), ((0, 9, 0, 0), 1),
     ((0, 0, 1, 3), 1), ((0, 2**62, 2**62, 0), 1)],
)  # fmt: skip
def test_a_bad_segment_is_refused_before_anything_changes(
    kernels: SimulatedKernels, segment: tuple[int, int, int, int], count: int
) -> None:
    table = [(0, 0, 1, 0)] + [(0, 1, 0, 0)] * (count - 1) + [segment]
    call = make_call(ADAM, FP32, (8, 8), table=table)
    before = copy_call(call)
    with pytest.raises(ValueError, match="kernel for the update refused its arguments: a segment that is not within"):
        kernels.update(call)
    assert differences(call, before) == []
    sums = torch.zeros(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="kernel for the norm refused its arguments: a segment that is not within"):
        kernels.squares(SquaresCall(sums, call.params, call.table))
    assert sums.item() == 0.0


@pytest.mark.parametrize("dtype", FLOATS)
def test_squares_are_summed_in_one_launch(kernels: SimulatedKernels, dtype: torch.dtype) -> None:
    lengths = [*LENGTHS, NORM_CHUNK - 1, NORM_CHUNK, 3 * NORM_CHUNK + 13]
    values = [finite(numel, i % 9, dtype, i) for i, numel in enumerate(lengths)]
    table = torch.tensor([(i, 0, numel, i % 4) for i, numel in enumerate(lengths)])
    sums = torch.arange(5, dtype=torch.float64)
    wanted = sums.clone()
    for i, value in enumerate(values):
        wanted[i % 4] += value.double().square().sum()
    kernels.squares(SquaresCall(sums, values, table))
    torch.testing.assert_close(sums, wanted, rtol=1e-14, atol=0)
    assert kernels.launches == 1


def test_squares_depend_on_the_segment_alone(library: ctypes.CDLL) -> None:
    """Not on its address, the rest of the table, how the table travels, or the order in which blocks run."""
    numel = 3 * NORM_CHUNK + 13
    settings = ((0, 0, ""), (1, 0, "reversed"), (8, 0, "captured"), (0, 70, "reversed"), (3, 70, "captured, reversed"))
    for dtype in FLOATS:
        value = finite(numel, 0, dtype, 1)
        found = set()
        for offset, others, how in settings:
            moved = torch.zeros(offset + numel + 9, dtype=dtype)[offset : offset + numel].copy_(value)
            table = [(1, 0, i % 7, 1) for i in range(others)] + [(0, 0, numel, 0)] + [(1, 3, 4, 1)] * others
            sums = torch.zeros(2, dtype=torch.float64)
            kernels = SimulatedKernels(library, "captured" in how, "reversed" in how)
            kernels.squares(SquaresCall(sums, [moved, value[:10]], torch.tensor(table)))
            found.add(sums[0].item())
        assert len(found) == 1


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_squares_show_what_is_not_finite(kernels: SimulatedKernels, bad: float) -> None:
    values = [copy_tensor(finite(NORM_CHUNK + 5, 0, torch.bfloat16, i)) for i in range(2)]
    values[1][-1] = bad
    sums = torch.zeros(2, dtype=torch.float64)
    kernels.squares(SquaresCall(sums, values, torch.tensor([(i, 0, NORM_CHUNK + 5, i) for i in range(2)])))
    assert sums.isfinite().tolist() == [True, False]


def check_quant(
    kernels: SimulatedKernels, cpu: CpuKernels, bits: int, dtype: torch.dtype, numels: Sequence[int]
) -> None:
    """Codes, scales, errors, values and sums have the bits of the CPU's kernels, and nothing else is written."""
    for n, (error, offset, rows) in zip(itertools.cycle(numels), QUANTS[: 2 * len(numels)], strict=False):
        call = make_quant(bits, rows, n, dtype, error, offset)
        wanted = copy_quant(call)
        kernels.quantize(call)
        assert kernels.launches == 1
        cpu.quantize(wanted)
        assert call.differences(wanted) == [], (n, error, offset)
        for back in unpacking(call):
            wanted = copy_quant(back)
            kernels.dequantize(back)
            cpu.dequantize(wanted)
            assert back.differences(wanted) == [], (n, offset, back.is_sum)


QUANTS = list(itertools.product(ERRORS, (0, 1, 4), (1, 3)))  # dtype of the error, alignment, rows


@pytest.mark.fast(every=5)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_packed_to_the_bits_of_the_cpu(
    kernels: SimulatedKernels, cpu: CpuKernels, bits: int, dtype: torch.dtype
) -> None:
    check_quant(kernels, cpu, bits, dtype, (1, 2, 7, 255, 256, 257, 1003, 2304, 2307))


@pytest.mark.parametrize("bits", [8, 4])
def test_bad_rows_are_refused(library: ctypes.CDLL, bits: int) -> None:
    kernels, call = SimulatedKernels(library), make_quant(bits, 2, 256, F32, None)
    call.packed = call.packed[:, :-16].contiguous()
    before = copy_quant(call)
    with pytest.raises(ValueError, match="the quantization refused its arguments: rows that are not aligned"):
        kernels.quantize(call)
    assert call.differences(before) == []
