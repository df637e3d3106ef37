"""Cache key and compiler command lines of a library, and its compilation with ninja in a private directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import WITHOUT_KERNELS, OpUnavailable
from .ops import Op, Source
from .store import seal
from .tools import Command, find_ninja

QUOTED_LINES = 4


@dataclass(frozen=True)
class Recipe:
    """A library that is wanted, for a GPU's compute capability if it is one for CUDA.

    Attributes:
        prefix: name and key of everything that decides what the library does: sources, headers, flags, kind of
            machine, torch's major version of CUDA. The compiler is not in it.
    """

    op: Op
    csrc: Path
    capability: tuple[int, int] | None
    prefix: str

    def file_name(self, compilers: tuple[Command, ...]) -> str:
        """Return the name of the library as these compilers make it, on this version of the C library."""
        return f"{self.prefix}-{_digest([os.confstr('CS_GNU_LIBC_VERSION') or '', *_identity(compilers)])}.so"

    def compile_command(self, source: Source, compilers: tuple[Command, ...]) -> list[str]:
        """Return the command that makes an object in the current directory."""
        device = self.op.kind == "cuda" or source.object.endswith(".s")
        flags = [*self.op.flags, *(arch_flags(self.op, self.capability) if device else ()), *source.flags]
        compiler = compilers[0 if device else -1]
        return [*compiler, *flags, f"-I{self.csrc}", "-c", str(self.csrc / source.path), "-o", source.object]

    def ninja_file(self, compilers: tuple[Command, ...]) -> str:
        """Return the text of build.ninja: an edge for each object and one that links them."""
        objects = [source.object for source in self.op.sources]
        commands = [self.compile_command(source, compilers) for source in self.op.sources]
        linker = compilers[-1 if self.op.kind == "nvrtc" else 0]
        edges = [(name, "", command) for name, command in zip(objects, commands, strict=True)]
        edges.append(("library.so", " ".join(objects), [*linker, *objects, *self.op.link_flags, "-o", "library.so"]))
        lines = ["rule run", "  command = $command"]
        for name, needs, command in edges:
            lines += [f"build {name}: run {needs}", f"  command = {shlex.join(command).replace('$', '$$')}"]
        return "\n".join([*lines, ""])


def make_recipe(op: Op, csrc: Path, capability: tuple[int, int] | None, torch_cuda: str | None) -> Recipe:
    """Read the sources and compute their key.

    Raises:
        OpUnavailable: a CUDA op lacks its compute capability.
        OSError: a source is missing.
    """
    if op.kind == "cpp":
        capability = torch_cuda = None
    elif capability is None:
        raise OpUnavailable(
            f"{op.name} is compiled for the GPU at hand, and there is none (no compute capability was given).",
            "It is of use only where torch sees a CUDA device.",
        )
    family = f"{os.uname().machine} {getattr(sys.implementation, '_multiarch', sys.platform)} {sys.maxsize}"
    parts = [repr(op), family, repr(capability), (torch_cuda or "").partition(".")[0]]
    paths = {csrc / source.path for source in op.sources}
    for path in sorted(paths.union(*(csrc.glob(pattern) for pattern in op.headers))):
        parts += [path.relative_to(csrc).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()]
    return Recipe(op, csrc, capability, f"{op.name}-{_digest(parts)}")


def arch_flags(op: Op, capability: tuple[int, int] | None) -> list[str]:
    """Return the flags of nvcc, or of NVRTC, for one compute capability; none for None."""
    if capability is None:
        return []
    number = f"{capability[0]}{capability[1]}"
    if op.kind == "nvrtc":
        return [f"--gpu-architecture=sm_{number}"]
    return ["-gencode", f"arch=compute_{number},code=sm_{number}"]


def _identity(compilers: tuple[Command, ...]) -> Iterator[str]:
    """Words of the commands, and of each file among them its place, size in bytes and time of change in ns."""
    for word in (word for command in compilers for word in command):
        yield word
        path = os.path.realpath(shutil.which(word) or word)  # `CXX="ccache g++"`: both files matter
        if os.path.isfile(path):
            about = os.stat(path)
            yield f"{path} {about.st_size} {about.st_mtime_ns}"


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def compiled(recipe: Recipe, compilers: tuple[Command, ...], log: Path | None = None) -> Iterator[Path]:
    """Compile a library and give it out in a private directory, which is removed at the end.

    Raises:
        OpUnavailable: a source does not compile, or too slowly. What compilers write is kept in `log`, or where only
            this user can read it.
        OSError: there is no room.
    """
    with tempfile.TemporaryDirectory(prefix="zerolite-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        (work / "build.ninja").write_text(recipe.ninja_file(compilers), encoding="utf-8")
        problem = run_ninja(work)
        if problem is not None:
            log = log or Path(tempfile.mkstemp(prefix="zerolite-", suffix=".log")[1])
            shutil.copyfile(work / "build.log", log)
            raise failure(recipe.op, compilers, problem, log)
        seal(work / "library.so")
        yield work / "library.so"


def run_ninja(work: Path) -> str | None:
    """Run ninja in `work`, its output in build.log. Return what went wrong, None if nothing did."""
    ninja, seconds = [*find_ninja(), "--verbose"], build_timeout_s()
    environ = {**os.environ, "LC_ALL": "C", "NINJA_STATUS": ""}
    with (
        open(work / "build.log", "wb") as log,
        subprocess.Popen(ninja, cwd=work, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ) as process,
    ):
        try:
            return "failed" if process.wait(seconds) else None
        except subprocess.TimeoutExpired:
            return f"took longer than {seconds:g} s (ZEROLITE_BUILD_TIMEOUT)"
        finally:
            process.terminate()  # ninja ends what it started


def build_timeout_s() -> float:
    """Return the seconds after which compiling is given up: `ZEROLITE_BUILD_TIMEOUT`, otherwise 300."""
    text = os.environ.get("ZEROLITE_BUILD_TIMEOUT", "300")
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise OpUnavailable(
        f"ZEROLITE_BUILD_TIMEOUT expects a positive number of seconds, and got {text!r}.",
        f"Correct it or unset it (it is then 300), {WITHOUT_KERNELS}",
    )


def failure(op: Op, compilers: tuple[Command, ...], problem: str, log: Path) -> OpUnavailable:
    """Return the error for a library that did not compile. It quotes the lines of the log that say what is wrong."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\b(error|fatal|not found|cannot)\b", line, re.IGNORECASE)]
    quoted = "\n".join(telling[:QUOTED_LINES] or lines[-QUOTED_LINES:])
    return OpUnavailable(
        f"Compiling {op.name} with {shlex.join(compilers[0])} {problem}:\n{quoted}\nThe whole log is {log}.",
        f"Choose another compiler with CXX{' or CUDA_HOME' if op.kind == 'cuda' else ''}, {WITHOUT_KERNELS}",
        log,
    )
