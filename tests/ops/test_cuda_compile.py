"""The CUDA library compiles without a GPU, and what can be read from it says that it is what it should be."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from op_builder.ops import OPS

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "csrc/cuda/kernels.cu"


def find_nvcc() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [f"{home}/bin" for home in [*homes, "/usr/local/cuda"]]
    return shutil.which("nvcc", path=os.pathsep.join([*places[:-1], os.environ.get("PATH", ""), places[-1]]))


NVCC = find_nvcc()
pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc, of the CUDA toolkit; this machine has none")


def nvcc(*arguments: str | Path) -> str:
    done = subprocess.run([str(NVCC), *arguments], capture_output=True, text=True)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    return printed


def compile_library(capability: int, target: Path, *more: str) -> str:
    """Compile as op_builder does, with the host compiler's warnings. Returns what the compilers print."""
    code = f"-gencode=arch=compute_{capability},code=sm_{capability}"
    flags = [*OPS["cuda_kernels"].flags, *OPS["cuda_kernels"].link_flags, "-Xcompiler", "-Wall,-Wextra", code, *more]
    return nvcc(*flags, SOURCE, "-o", target)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library for one capability, and what ptxas says about its kernels."""
    target = tmp_path_factory.mktemp("cuda") / "kernels.so"
    return target, compile_library(90, target, "-Xptxas", "-v")


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    target = tmp_path_factory.mktemp("cuda") / "kernels.ptx"
    flags = OPS["cuda_kernels"].flags
    nvcc(*flags, "-ptx", "-gencode=arch=compute_90,code=compute_90", SOURCE, "-o", target)
    return target.read_text(encoding="utf-8")


@pytest.mark.slow
def test_compiles_without_warnings(compiled: tuple[Path, str]) -> None:
    lines = compiled[1].splitlines()
    from_ptxas = re.compile(r"ptxas info\b|\s+\d+ bytes stack frame")
    assert [line for line in lines if line.strip() and not from_ptxas.match(line)] == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 120])
def test_compiles_for_other_devices(tmp_path: Path, capability: int) -> None:
    if f"sm_{capability}" not in nvcc("--list-gpu-code").split():
        pytest.skip(f"this nvcc knows no sm_{capability}")
    assert compile_library(capability, tmp_path / "kernels.so") == ""


@pytest.mark.slow
def test_kernels_fit_into_registers(compiled: tuple[Path, str]) -> None:
    """Nothing is spilled, and four blocks of 256 threads find room for an update."""
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", compiled[1])]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", compiled[1])]
    assert len(spilled) == 2 * len(registers) > 0
    assert max(spilled) == 0 and max(registers) <= 64


def test_arithmetic_is_rounded_correctly(ptx: str) -> None:
    """Nothing is approximated, no denormal is flushed, and nothing fused but what the rules fuse."""
    operations = set(re.findall(r"\b(?:add|sub|mul|fma|div|sqrt|rcp|rsqrt|mad)\.[\w.]*f(?:32|64)", ptx))
    exact = {f"{name}.rn.{kind}" for name in ("add", "sub", "mul", "fma", "div", "sqrt") for kind in ("f32", "f64")}
    assert {"fma.rn.f32", "div.rn.f32", "sqrt.rn.f32"} <= operations <= exact
