"""List of the kernel libraries and their sources; a new library is one entry here."""

from __future__ import annotations

import os
import sys

from .async_io import async_io
from .op import Op, Source

__all__ = ["OPS", "Op", "Source"]

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


def cuda_kernels_nvrtc() -> Op:
    """The same without nvcc. The library calls the driver of the machine it runs on."""
    source = "cuda/kernels.cu"
    host = ("-x", "c++", "-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-DZL_HOST_ONLY")
    return Op(
        name="cuda_kernels_nvrtc",
        kind="nvrtc",
        sources=(
            Source(source, "device.s", ("--std=c++17", "--fmad=false")),
            Source(source, "host.o", host, host=True),
        ),
        headers=("*.h", "cuda/*.h", "cuda/*.cuh"),
        flags=(),
        link_flags=("-shared", "-pthread", "-ldl", "-Wl,-z,defs"),
    )


OPS = {op.name: op for op in (cpu_kernels(os.uname().machine), cuda_kernels(), cuda_kernels_nvrtc(), async_io())}
