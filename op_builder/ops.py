"""Table of the kernel libraries, in which a new library is one entry; and the error of this package."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

WITHOUT_KERNELS = "or set ZEROLITE_KERNELS=0 to train on PyTorch's own operations without this message."

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *AVX2)
HOST = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread")


class OpUnavailable(RuntimeError):
    """Kernels cannot be used here; training goes on with PyTorch's own operations.

    Attributes:
        cause: sentence that says what is wrong.
        remedy: sentence that says what to do.
        log: path of the compiler's whole output; None if no compiler ran.
    """

    def __init__(self, cause: str, remedy: str, log: Path | None = None) -> None:
        super().__init__(f"{cause} {remedy}")
        self.cause, self.remedy, self.log = cause, remedy, log


@dataclass(frozen=True)
class Source:
    """One call of a compiler.

    Attributes:
        path: the source, relative to csrc/.
        object: name of the object that the call makes.
        flags: flags of this call alone.
    """

    path: str
    object: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Op:
    """Library with a plain C interface.

    Attributes:
        name: name for `load`, and the beginning of the library's file name.
        kind: "cpp" needs a C++ compiler alone. "cuda" is compiled by nvcc, and "nvrtc" by NVRTC, for one compute
            capability. With "nvrtc" a C++ compiler makes the object files (.o).
        sources: calls of the compiler, which run at the same time.
        headers: patterns, relative to csrc/, of the headers; a change of one of them causes a new build.
        flags: flags of every compilation.
        link_flags: flags of the linker.
    """

    name: str
    kind: Literal["cpp", "cuda", "nvrtc"]
    sources: tuple[Source, ...]
    headers: tuple[str, ...]
    flags: tuple[str, ...]
    link_flags: tuple[str, ...]


def _cpu_sources(machine: str) -> tuple[Source, ...]:
    """Return one source for each instruction set; the library chooses among them when it runs.

    Only these objects may be compiled for an instruction set. The rest must run on every processor of the family.
    """
    plain = Source("cpu/kernels.cpp", "plain.o", ("-DZL_ISA=plain",))
    if machine not in ("x86_64", "AMD64"):
        return plain, Source("cpu/dispatch.cpp", "dispatch.o", ("-DZL_ONLY_PLAIN",))
    avx2 = Source("cpu/kernels.cpp", "avx2.o", ("-DZL_ISA=avx2", *AVX2))
    avx512 = Source("cpu/kernels.cpp", "avx512.o", ("-DZL_ISA=avx512", *AVX512))
    return plain, avx2, avx512, Source("cpu/dispatch.cpp", "dispatch.o")


_OPS = (
    Op(
        name="cpu_kernels",
        kind="cpp",
        sources=_cpu_sources(os.uname().machine),
        headers=("*.h", "cpu/*.h"),
        # No contraction (a * b + c in one rounding) and no fast maths, so that vector bodies, scalar tails and all
        # instruction sets give the same bits.
        flags=("-O3", *HOST, "-ffp-contract=off", "-fno-math-errno"),
        link_flags=("-shared", "-pthread", "-s"),
    ),
    Op(
        name="cuda_kernels",
        kind="cuda",
        sources=(Source("cuda/kernels.cu", "kernels.o"),),
        headers=("*.h", "cuda/*.h", "cuda/*.cuh"),
        flags=("-O3", "-std=c++17", "--fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
        link_flags=("-shared", "-cudart", "static"),
    ),
    Op(  # the same kernels without nvcc; the library loads the driver of the machine on which it runs
        name="cuda_kernels_nvrtc",
        kind="nvrtc",
        sources=(
            Source("cuda/kernels.cu", "device.s", ("--std=c++17", "--fmad=false")),
            Source("cuda/kernels.cu", "host.o", ("-x", "c++", "-O2", *HOST, "-DZL_HOST_ONLY")),
        ),
        headers=("*.h", "cuda/*.h", "cuda/*.cuh"),
        flags=(),
        link_flags=("-shared", "-pthread", "-ldl", "-Wl,-z,defs"),
    ),
    Op(  # io_uring needs no library; without its header, threads do the work
        name="async_io",
        kind="cpp",
        sources=(Source("aio/aio.cpp", "aio.o"),),
        headers=("aio/*.h",),
        flags=("-O2", *HOST),
        link_flags=("-shared", "-pthread", "-s"),
    ),
)
OPS = {op.name: op for op in _OPS}
