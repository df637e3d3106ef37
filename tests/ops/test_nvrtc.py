"""The CUDA kernels without nvcc: NVRTC compiles them for a GPU that is not there, and the launches through the driver's
interface run on a driver that simulates them on the CPU."""

from __future__ import annotations

import ctypes
import shutil
from ctypes import Structure
from pathlib import Path

import pytest
import torch

from op_builder import OpUnavailable, build, build_into, nvrtc
from op_builder.tools import find_nvrtc
from tests.ops.cases import ALL_DTYPES, F16, F32, FLOATS
from tests.ops.cuda_calls import LENGTHS, RULES, make_call
from tests.ops.test_cuda_on_cpu import CXX, FP32, ROOT, SHIM, UPDATE_ROOM, check_quant, check_update, compile_in
from tests.ops.test_cuda_on_cpu import SimulatedKernels as Simulated
from zerolite.ops import library as op_library
from zerolite.ops.call import ADAM, QuantCall, SquaresCall, UpdateCall
from zerolite.ops.cpu_kernels import CpuKernels
from zerolite.ops.cuda_kernels import CudaKernels, _Entry
from zerolite.ops.self_check import check_kernels

CSRC = ROOT / "csrc"
pytestmark = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler; this machine has none")


def lowered(kernel: str) -> str:
    """The name of a kernel in the machine code: ``zl::norm_kernel<1>`` gives ``_ZN2zl11norm_kernelILi1EEEvNS_...``."""
    name, _, arguments = kernel.removeprefix("zl::").rstrip(">").partition("<")
    parts = [argument.strip().removeprefix("zl::") for argument in arguments.split(",")]
    mangled = "".join(f"Li{part}E" if part.isdigit() else f"NS_{len(part)}{part}E" for part in parts)
    if "quantize" in name:
        return f"_ZN2zl{len(name)}{name}I{mangled}EEv8zl_quant"
    takes = "UpdateArguments" if name.startswith("update") else "NormArguments"
    return f"_ZN2zl{len(name)}{name}I{mangled}EEvNS_{len(takes)}{takes}E"


# -------------------------------------------------------------------- on a simulated driver


class DrivenKernels(Simulated):
    """The device's memory is the host's. ordinal: of the device."""

    def __init__(self, library: ctypes.CDLL, driver: ctypes.CDLL, ordinal: int = 0) -> None:
        CudaKernels.__init__(self, library)
        self._simulate, self.ordinal = driver.zl_simulate, ordinal
        self.capturing = self.backwards = False

    def _launch(self, entry: _Entry, arguments: Structure, device: torch.device) -> None:
        super()._launch(_OnDevice(entry, self.ordinal), arguments, device)  # type: ignore[arg-type]


class _OnDevice:
    """An entry whose launch goes to another device than 0."""

    def __init__(self, entry: _Entry, ordinal: int) -> None:
        self.name, self.bytes, self.fill = entry.name, entry.bytes, entry.fill
        self.launch = lambda call, filled, copied, _, stream: entry.launch(call, filled, copied, ordinal, stream)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A libcuda.so.1: who asks for that name afterwards gets it."""
    if torch.version.cuda is not None:
        pytest.skip("the name of the simulated driver is that of the real one, which this torch may load")
    where = tmp_path_factory.mktemp("driver")
    source = [*SHIM, ROOT / "tests/ops/cuda_on_cpu/driver.cpp"]
    compile_in(where, "-Wl,-soname,libcuda.so.1", *source, "-o", "libcuda.so.1")
    return ctypes.CDLL(str(where / "libcuda.so.1"))


@pytest.fixture(scope="module")
def library(driver: ctypes.CDLL, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    where = tmp_path_factory.mktemp("library")
    (where / "device.cubin").write_bytes(b"simulated")
    names = [lowered(kernel) for kernel in nvrtc.KERNELS]
    (where / "device.s").write_text(nvrtc.assembly("device.cubin", names))
    host = ["-x", "c++", "-Wall", "-Wextra", "-Werror", "-DZL_HOST_ONLY", f"-I{CSRC}"]
    compile_in(where, *host, "-c", CSRC / "cuda/kernels.cu", "-o", "host.o")
    compile_in(where, "host.o", "device.s", "-ldl", "-Wl,-z,defs", "-o", "kernels.so")
    return ctypes.CDLL(str(where / "kernels.so"))


@pytest.fixture
def kernels(library: ctypes.CDLL, driver: ctypes.CDLL) -> DrivenKernels:
    return DrivenKernels(library, driver)


@pytest.mark.fast("2")
@pytest.mark.parametrize("rule", RULES)
def test_each_kernel_is_the_one_that_the_dtypes_ask_for(kernels: DrivenKernels, cpu: CpuKernels, rule: int) -> None:
    for dtypes in ALL_DTYPES:
        if dtypes.param != F16 and dtypes.state == F32:
            call = make_call(rule, dtypes, LENGTHS, lambda array, tensor: array, factor=0.37, skip=0.0)
            check_update(kernels, cpu, call)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_each_kernel_packs_what_its_bits_and_dtype_ask_for(
    kernels: DrivenKernels, cpu: CpuKernels, bits: int, dtype: torch.dtype
) -> None:
    check_quant(kernels, cpu, bits, dtype, (257, 512))


@pytest.mark.parametrize("count", [1, UPDATE_ROOM, UPDATE_ROOM + 1, 300])
def test_tables_in_arguments_and_in_memory(kernels: DrivenKernels, cpu: CpuKernels, count: int) -> None:
    for capturing in (False, True):
        kernels.capturing = capturing
        check_update(kernels, cpu, make_call(ADAM, FP32, [i % 19 + 1 for i in range(count)]))
        assert kernels.launches == (-(-count // UPDATE_ROOM) if capturing else 1)


def test_errors_of_the_driver_are_told(library: ctypes.CDLL, driver: ctypes.CDLL) -> None:
    with pytest.raises(RuntimeError, match="could not be started on .*: invalid device ordinal"):
        DrivenKernels(library, driver, ordinal=7).update(make_call(ADAM, FP32, (5,)))
    message = CudaKernels(library)._error_string
    assert b"libcuda.so.1, cannot be loaded" in message(-100000) and b"does not know" in message(-12345)


# -------------------------------------------------------------------- before kernels are trusted


def test_right_kernels_pass_the_check(kernels: DrivenKernels, cpu: CpuKernels) -> None:
    check_kernels(kernels, torch.device("cpu"))
    check_kernels(cpu, torch.device("cpu"))


@pytest.mark.parametrize("wrong", ["rate", "skip", "tail", "squares", "codes", "errors", "sums"])
def test_wrong_kernels_are_not_used(cpu: CpuKernels, wrong: str) -> None:
    class Wrong(CpuKernels):
        def update(self, call: UpdateCall) -> None:
            if wrong == "rate":
                call.rows.mul_(1.001)
            if wrong == "tail":
                call.table[0, 2] -= 1
            if wrong == "skip" and call.skip is not None:
                call.skip.zero_()
            super().update(call)

        def squares(self, call: SquaresCall) -> None:
            super().squares(call)
            if wrong == "squares":
                call.sums.mul_(1 + 1e-9)

        def quantize(self, call: QuantCall) -> None:
            super().quantize(call)
            if wrong == "codes":
                call.packed[0, 3] ^= 1
            if wrong == "errors" and call.error is not None:
                call.error[-1] = 1.0

        def dequantize(self, call: QuantCall) -> None:
            super().dequantize(call)
            if wrong == "sums" and call.is_sum:
                call.values[0] += 1.0

    broken = Wrong.__new__(Wrong)
    vars(broken).update(vars(cpu))
    with pytest.raises(RuntimeError, match=r"do not compute what their reference does .*zerolite report"):
        check_kernels(broken, torch.device("cpu"))


BOTH = ["cuda_kernels", "cuda_kernels_nvrtc"]
LOADED: dict[str, tuple[list[str], bool, list[str], str]] = {  # what is missing, whether it is wrong, what is loaded
    "nvcc": ([], False, BOTH[:1], ""),
    "NVRTC": (BOTH[:1], False, BOTH, ""),
    "NVRTC, wrong": (BOTH[:1], True, BOTH, "do not compute"),
    "neither": (BOTH, False, BOTH, "Nor can NVRTC"),
}


@pytest.mark.parametrize("case", LOADED)
def test_nvcc_comes_first_and_only_nvrtcs_kernels_are_checked(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    missing, wrong, loaded, reason = LOADED[case]
    asked, checked = [], []

    def load(name: str, **about: object) -> str:
        asked.append(name)
        if name in missing:
            raise OpUnavailable(f"no {name}.", "Install it.")
        return name

    def check(kernels: object, device: torch.device) -> None:
        checked.append(kernels)
        if wrong:
            raise RuntimeError("they do not compute what they should")

    monkeypatch.setattr(op_library.op_builder, "load", load)
    monkeypatch.setattr(op_library.op_builder, "OpUnavailable", OpUnavailable)
    monkeypatch.setattr("zerolite.ops.cuda_kernels.CudaKernels", lambda library: f"kernels of {library}")
    monkeypatch.setattr("zerolite.ops.self_check.check_kernels", check)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = op_library._load.__wrapped__("cuda", (9, 0))
    assert asked == loaded and len(checked) == (len(loaded) == 2 and len(missing) == 1)
    assert reason in found if reason else found == f"kernels of {loaded[-1]}"


# -------------------------------------------------------------------- with NVRTC


def compile_kernels(directory: Path, capability: tuple[int, int]) -> Path:
    try:
        find_nvrtc(None)
    except OpUnavailable as error:
        pytest.skip(error.cause)
    return build_into(directory, "cuda_kernels_nvrtc", capability=capability)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_nvrtc_compiles_the_kernels(tmp_path: Path, capability: tuple[int, int]) -> None:
    """Loading the library and asking about tables needs neither a GPU nor a driver."""
    compiled = compile_kernels(tmp_path, capability)
    kernels = CudaKernels(ctypes.CDLL(str(compiled)))
    assert (kernels._update.bytes(42), kernels._update.bytes(43)) == (0, 16 + 43 * 96)
    assert (kernels._norm.bytes(126), kernels._norm.bytes(127)) == (0, 16 + 127 * 32)
    image = compiled.read_bytes()
    for kernel in nvrtc.KERNELS:  # as a string of the host's, and as a symbol of the device's code
        assert image.count(lowered(kernel).encode() + b"\0") >= 2, kernel


def test_nvrtc_says_what_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(CSRC, tmp_path / "csrc")
    with (tmp_path / "csrc/cuda/update.cuh").open("a") as source:
        source.write("\n__device__ int broken = undefined_name;\n")
    monkeypatch.setattr(build, "csrc_path", lambda: tmp_path / "csrc")
    with pytest.raises(OpUnavailable, match=r'(?s)Compiling cuda_kernels_nvrtc failed.*"undefined_name" is undefined'):
        compile_kernels(tmp_path / "out", (9, 0))
