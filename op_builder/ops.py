"""What is built from which sources: a new kernel library is one entry here."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Source:
    """One call of the compiler.

    Attributes:
        path: the source, relative to csrc/.
        object: name of the object file, unique within the op.
        flags: what this call has beside the flags of the op.
    """

    path: str
    object: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Op:
    """A library with a plain C interface.

    Attributes:
        name: what `load` calls it; the library's file begins with it.
        kind: "cpp" is compiled by a C++ compiler alone, "cuda" by nvcc for one compute capability.
        sources: the calls of the compiler, which run at the same time.
        headers: patterns relative to csrc/ of what the sources include; a change of these files builds anew.
        flags: of every call that compiles.
        link_flags: of the call that links.
    """

    name: str
    kind: Literal["cpp", "cuda"]
    sources: tuple[Source, ...]
    headers: tuple[str, ...]
    flags: tuple[str, ...]
    link_flags: tuple[str, ...]


AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *AVX2)


def cpu_kernels(machine: str) -> Op:
    """The CPU library, which chooses among its instruction sets when it runs.

    Only the flags of its own object may name an instruction set: the rest must run on every processor of the family.
    """
    kernels = "cpu/kernels.cpp"
    sources: tuple[Source, ...] = (Source(kernels, "plain.o", ("-DZL_ISA=plain",)),)
    if machine in ("x86_64", "AMD64"):
        sources += (
            Source(kernels, "avx2.o", ("-DZL_ISA=avx2", *AVX2)),
            Source(kernels, "avx512.o", ("-DZL_ISA=avx512", *AVX512)),
            Source("cpu/dispatch.cpp", "dispatch.o"),
        )
    else:
        sources += (Source("cpu/dispatch.cpp", "dispatch.o", ("-DZL_ONLY_PLAIN",)),)
    return Op(
        name="cpu_kernels",
        kind="cpp",
        sources=sources,
        headers=("*.h", "cpu/*.h"),
        # No contraction and no fast maths: vector body, scalar tail and every instruction set give the same bits.
        flags=(
            *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden"),
            *("-ffp-contract=off", "-fno-math-errno", "-pthread"),
        ),
        link_flags=("-shared", "-pthread", *(("-s",) if sys.platform == "linux" else ())),
    )


def cuda_kernels() -> Op:
    """The CUDA library, for the compute capability that is asked for; the CUDA runtime is linked into it."""
    return Op(
        name="cuda_kernels",
        kind="cuda",
        sources=(Source("cuda/kernels.cu", "kernels.o"),),
        headers=("*.h", "cuda/*.h", "cuda/*.cuh"),
        flags=("-O3", "-std=c++17", "--fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
        link_flags=("-shared", "-cudart", "static"),
    )


OPS = {op.name: op for op in (cpu_kernels(os.uname().machine), cuda_kernels())}
