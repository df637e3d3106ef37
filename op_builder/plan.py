"""Cache keys and compiler command lines of a library, computed without running a program."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import OpUnavailable
from .ops import Op, Source
from .tools import Program

INCOMPLETE = (
    "This installation of zerolite is incomplete: install it again with "
    "`pip install --force-reinstall --no-deps zerolite`."
)


@dataclass(frozen=True)
class Recipe:
    """A library that is wanted.

    Attributes:
        op: its entry in the table.
        csrc: the directory of the sources.
        capability: compute capability of the GPU as (major, minor); None for an op that is not CUDA.
        content: key of everything that decides what the library does: sources, headers, flags, kind of machine, torch's
            major version of CUDA. The compiler is not in it.
    """

    op: Op
    csrc: Path
    capability: tuple[int, int] | None
    content: str

    @property
    def prefix(self) -> str:
        """What file names of this content begin with."""
        return f"{self.op.name}-{self.content}"

    def stem(self, compilers: tuple[Program, ...]) -> str:
        """File name without ending of the library as these compilers make it, on this version of the C library."""
        parts = [libc_version()]
        for compiler in compilers:
            parts += [compiler.identity, compiler.version]
        return f"{self.prefix}-{_digest(parts)}"


def make_plan(op: Op, csrc: Path, capability: tuple[int, int] | None, torch_cuda: str | None) -> Recipe:
    """Read the sources and compute their key.

    Raises:
        OpUnavailable: a source is missing, or a CUDA op lacks its compute capability.
    """
    if op.kind == "cpp":
        capability = torch_cuda = None
    elif capability is None:
        raise OpUnavailable(
            f"{op.name} is compiled for the GPU at hand, and there is none (no compute capability was given).",
            "It is of use only where torch sees a CUDA device.",
        )
    about = [op.name, op.kind, machine_tag(), *op.flags, *arch_flags(capability), *op.link_flags]
    about.append((torch_cuda or "").partition(".")[0])
    for source in op.sources:
        about += [source.path, source.object, *source.flags]
    digest = hashlib.sha256("\0".join(about).encode())
    paths = {csrc / source.path for source in op.sources}
    for pattern in op.headers:
        paths.update(csrc.glob(pattern))
    for path in sorted(paths):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise OpUnavailable(f"The kernel source {path} cannot be read: {error.strerror}.", INCOMPLETE) from error
        digest.update(f"\0{path.relative_to(csrc).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return Recipe(op, csrc, capability, digest.hexdigest()[:16])


def compile_command(plan: Recipe, source: Source, compilers: tuple[Program, ...]) -> list[str]:
    """The command that makes an object in the current directory."""
    arch, driver = arch_flags(plan.capability, plan.op.kind), _driver(compilers)
    if source.host:
        arch, driver = [], _driver(compilers[1:])
    flags = [*plan.op.flags, *arch, *source.flags, f"-I{plan.csrc}"]
    return [*driver, *flags, "-c", str(plan.csrc / source.path), "-o", source.object]


def link_command(plan: Recipe, output: str, compilers: tuple[Program, ...]) -> list[str]:
    """The command that makes the library of the objects in the current directory."""
    objects = [source.object for source in plan.op.sources]
    if plan.op.kind == "nvrtc":
        return [*_driver(compilers[1:]), *objects, *plan.op.link_flags, "-o", output]
    return [*_driver(compilers), *objects, *arch_flags(plan.capability), *plan.op.link_flags, "-o", output]


def arch_flags(capability: tuple[int, int] | None, kind: str = "cuda") -> list[str]:
    """The flags of nvcc, or of NVRTC, for one compute capability; none for None."""
    if capability is None:
        return []
    number = f"{capability[0]}{capability[1]}"
    if kind == "nvrtc":
        return [f"--gpu-architecture=sm_{number}"]
    return ["-gencode", f"arch=compute_{number},code=sm_{number}"]


def machine_tag() -> str:
    """The family of processors and the kind of C library, as in "x86_64 x86_64-linux-gnu 64"."""
    bits = 64 if sys.maxsize > 2**32 else 32
    return f"{os.uname().machine} {getattr(sys.implementation, '_multiarch', sys.platform)} {bits}"


def libc_version() -> str:
    """The version of the C library, as in "glibc 2.36"; empty where it does not say."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        return ""


def _driver(compilers: tuple[Program, ...]) -> list[str]:
    """The program that compiles and links. Of a CUDA op that is nvcc, which uses the C++ compiler that the user chose
    (`CXX` with words beside the compiler cannot be handed on to it)."""
    first, *host = compilers
    use_host = bool(host) and "CXX" in os.environ and len(host[0].command) == 1
    return [*first.command, *(["-ccbin", host[0].command[0]] if use_host else [])]


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
