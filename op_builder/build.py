"""Key and compiler commands of a library, and its compilation with ninja in a temporary directory."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .cache import seal
from .ops import OPS, WITHOUT_KERNELS, Op, OpUnavailable, Source
from .tools import Command, find_compilers, find_ninja

BUILD_S = 600.0
"""Seconds after which a compilation is given up."""


def csrc_path() -> Path:
    """Return the directory of the kernel sources, in a checkout and in an installed wheel."""
    return Path(__file__).resolve().parent.parent / "csrc"


@dataclass(frozen=True)
class Recipe:
    """All that a library is built from.

    Attributes:
        op: the entry of the table of libraries.
        capability: compute capability of the GPU as (major, minor); None for the CPU.
        torch_cuda: `torch.version.cuda`, whose major version nvcc must share; None skips the comparison.
        csrc: the directory of the sources.
        file_name: name of the library's file: the op's name and a key. The key is a hash of all inputs of the build:
            sources, headers, flags, kind of machine, and torch's major version of CUDA. The compiler is not part of it,
            since a library of any compiler will do.
    """

    op: Op
    capability: tuple[int, int] | None
    torch_cuda: str | None
    csrc: Path
    file_name: str

    def compile_command(self, source: Source, compilers: tuple[Command, ...]) -> list[str]:
        """Return the command that compiles a source to an object in the current directory."""
        device = self.op.kind == "cuda" or source.object.endswith(".s")
        flags = [*self.op.flags, *(self.arch_flags() if device else ()), *source.flags]
        compiler = compilers[0 if device else -1]
        return [*compiler, *flags, f"-I{self.csrc}", "-c", str(self.csrc / source.path), "-o", source.object]

    def arch_flags(self) -> list[str]:
        """Return the flags of nvcc, or of NVRTC, for the compute capability."""
        if self.capability is None:
            return []
        number = "{}{}".format(*self.capability)
        if self.op.kind == "nvrtc":
            return [f"--gpu-architecture=sm_{number}"]
        return ["-gencode", f"arch=compute_{number},code=sm_{number}"]

    def ninja_file(self, compilers: tuple[Command, ...]) -> str:
        """Return the text of build.ninja: one edge per object, and one that links them."""
        edges = [(source.object, "", self.compile_command(source, compilers)) for source in self.op.sources]
        objects = [source.object for source in self.op.sources]
        linker = compilers[-1 if self.op.kind == "nvrtc" else 0]
        edges.append(("library.so", " ".join(objects), [*linker, *objects, *self.op.link_flags, "-o", "library.so"]))
        lines = ["rule run", "  command = $command"]
        for name, needs, command in edges:
            lines += [f"build {name}: run {needs}", f"  command = {shlex.join(command).replace('$', '$$')}"]
        return "\n".join([*lines, ""])


def make_recipe(name: str, capability: tuple[int, int] | None, torch_cuda: str | None) -> Recipe:
    """Read the sources of an op and compute the key of its library.

    Args:
        name: a key of `OPS`.
        capability: compute capability of the GPU as (major, minor); a CUDA op needs it.
        torch_cuda: `torch.version.cuda`; None skips the comparison with the CUDA compiler's version.

    Raises:
        OpUnavailable: a CUDA op has no compute capability, or a source cannot be read.
        ValueError: there is no such op.
    """
    if name not in OPS:
        raise ValueError(f"there is no op {name!r}; there are {', '.join(sorted(OPS))}")
    op, csrc = OPS[name], csrc_path()
    if op.kind == "cpp":
        capability = torch_cuda = None
    elif capability is None:
        raise OpUnavailable(
            f"{name} is compiled for the GPU at hand, and there is none (no compute capability was given).",
            "It is of use only where torch sees a CUDA device.",
        )
    family = f"{os.uname().machine} {getattr(sys.implementation, '_multiarch', sys.platform)} {sys.maxsize}"
    parts = [repr(op), family, repr(capability), (torch_cuda or "").partition(".")[0]]
    paths = {csrc / source.path for source in op.sources}
    try:
        for path in sorted(paths.union(*(csrc.glob(pattern) for pattern in op.headers))):
            parts += [path.relative_to(csrc).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()]
    except OSError as error:
        remedy = "install it again with `pip install --force-reinstall --no-deps zerolite`."
        raise OpUnavailable(
            f"A kernel source cannot be read: {error}.", f"This installation of zerolite is incomplete: {remedy}"
        ) from error
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return Recipe(op, capability, torch_cuda, csrc, f"{name}-{key}.so")


def compile_into(recipe: Recipe, target: Path) -> None:
    """Compile a library in a temporary directory beside ``target``, and move it to ``target``.

    Raises:
        OpUnavailable: a tool is missing, or a source does not compile. The compilers' output is kept beside the target.
        OSError: files cannot be written.
    """
    compilers, log = find_compilers(recipe.op, recipe.torch_cuda), target.with_suffix(".log")
    with tempfile.TemporaryDirectory(prefix="building-", dir=target.parent, ignore_cleanup_errors=True) as name:
        work = Path(name)
        (work / "build.ninja").write_text(recipe.ninja_file(compilers), encoding="utf-8")
        problem = run_ninja(work)
        if problem is not None:
            os.replace(work / "build.log", log)
            raise compile_error(recipe, problem, log)
        seal(work / "library.so")
        # Write the data before the name appears, so that even a crash of the machine leaves no half library. Loading
        # one could end the process.
        with open(work / "library.so", "rb") as library:
            os.fsync(library)
        os.replace(work / "library.so", target)
    log.unlink(missing_ok=True)


def run_ninja(work: Path) -> str | None:
    """Run ninja in `work`, with its output in build.log. Return what went wrong, or None."""
    environ = {**os.environ, "LC_ALL": "C", "NINJA_STATUS": ""}
    with (
        open(work / "build.log", "wb") as log,
        subprocess.Popen(
            [find_ninja(), "--verbose"], cwd=work, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ
        ) as process,
    ):
        try:
            return "failed" if process.wait(BUILD_S) else None
        except subprocess.TimeoutExpired:
            return f"took longer than {BUILD_S:g} s"
        finally:
            process.terminate()  # ninja then ends its compilers


def compile_error(recipe: Recipe, problem: str, log: Path) -> OpUnavailable:
    """Return the error for a library that did not compile. It quotes the lines of the log with the cause."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\b(error|fatal|not found|cannot)\b", line, re.IGNORECASE)]
    quoted = "\n".join(telling[:4] or lines[-4:])
    return OpUnavailable(
        f"Compiling {recipe.op.name} {problem}:\n{quoted}\nThe whole log is {log}.",
        f"Choose another compiler with CXX{' or CUDA_HOME' if recipe.op.kind == 'cuda' else ''}, {WITHOUT_KERNELS}",
        log,
    )
