"""Compilation with ninja in a private directory; the finished library is renamed into place in one step."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .errors import CannotStore, OpUnavailable
from .plan import Recipe, compile_command, link_command
from .store import seal
from .tools import WITHOUT_KERNELS, Program, find_ninja
from .turn import BEAT_S

DEFAULT_TIMEOUT_S = 300.0
STALE_S = 3600.0
QUOTED_LINES = 4
WORK_SUFFIX = ".work"
# How compilers say that the disk is full; with LC_ALL=C.
DISK_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))


def build(plan: Recipe, compilers: tuple[Program, ...], target: Path, beat: Callable[[], None] = lambda: None) -> None:
    """Compile and put the library at `target`, whose directory exists. `beat` is called about every second.

    The work is done in a directory beside the target, and the finished library is moved into place. What compilers
    write on failure is kept as `target` with the ending .log.

    Raises:
        OpUnavailable: no ninja, a source that does not compile, or too slow.
        CannotStore: the target's directory is full or cannot be written to.
    """
    ninja, timeout_s = find_ninja(), build_timeout_s()
    try:
        work = Path(tempfile.mkdtemp(prefix=f"{target.stem}.", suffix=WORK_SUFFIX, dir=target.parent))
        try:
            (work / "build.ninja").write_text(ninja_file(plan, compilers), encoding="utf-8")
            problem = run_ninja(ninja, work, timeout_s, beat)
            if problem is not None:
                check_disk(work)
                raise failure(plan, compilers, problem, keep_log(work, target))
            seal(work / "library.so")
            os.replace(work / "library.so", target)
            with contextlib.suppress(OSError):
                target.with_suffix(".log").unlink()
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise CannotStore(f"{error.strerror}: {error.filename or target.parent}") from error


def build_timeout_s() -> float:
    """Seconds after which compiling is given up: `ZEROLITE_BUILD_TIMEOUT`, otherwise DEFAULT_TIMEOUT_S.

    Raises:
        OpUnavailable: the variable is no positive number.
    """
    text = os.environ.get("ZEROLITE_BUILD_TIMEOUT")
    if text is None:
        return DEFAULT_TIMEOUT_S
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if seconds > 0:
            return seconds
    raise OpUnavailable(
        f"ZEROLITE_BUILD_TIMEOUT expects a positive number of seconds, and got {text!r}.",
        f"Correct it or unset it (it is then {DEFAULT_TIMEOUT_S:.0f}), {WITHOUT_KERNELS}",
    )


def ninja_file(plan: Recipe, compilers: tuple[Program, ...]) -> str:
    """The text of build.ninja: an edge for each object and one that links them."""
    lines = ["rule run", "  command = $command", "  description = $out"]
    for source in plan.op.sources:
        command = shlex.join(compile_command(plan, source, compilers))
        lines += [f"build {source.object}: run", f"  command = {_escape(command)}"]
    objects = " ".join(source.object for source in plan.op.sources)
    command = shlex.join(link_command(plan, "library.so", compilers))
    lines += [f"build library.so: run {objects}", f"  command = {_escape(command)}", "default library.so", ""]
    return "\n".join(lines)


def _escape(command: str) -> str:
    return command.replace("$", "$$")


def run_ninja(ninja: str, work: Path, timeout_s: float, beat: Callable[[], None]) -> str | None:
    """Run ninja in `work`, its output in build.log. Return what went wrong, None if nothing did.

    The output is a file and not a pipe, and nothing is inherited: whatever outlives this process holds nothing.
    """
    with open(work / "build.log", "wb") as log:
        process = subprocess.Popen(
            [ninja, "--verbose"],
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C", "NINJA_STATUS": ""},
        )
    give_up = time.monotonic() + timeout_s
    try:
        while process.poll() is None:
            left = give_up - time.monotonic()
            if left <= 0:
                return f"took longer than {timeout_s:g} s (ZEROLITE_BUILD_TIMEOUT)"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(BEAT_S, left))
            beat()
    finally:
        if process.poll() is None:
            _stop(process)
    return None if process.returncode == 0 else "failed"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End ninja, which ends what it started."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def first_errors(log: str) -> str:
    """The lines of a log in which compilers say what is wrong, at most QUOTED_LINES; the last ones if none does."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\b(error|fatal|not found|cannot)\b", line, re.IGNORECASE)]
    return "\n".join(telling[:QUOTED_LINES] or lines[-QUOTED_LINES:])


def read_log(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def failure(plan: Recipe, compilers: tuple[Program, ...], problem: str, log: Path) -> OpUnavailable:
    """The error for a library that did not compile, from its log."""
    compiler = shlex.join(compilers[0].command)
    return OpUnavailable(
        f"Compiling {plan.op.name} with {compiler} {problem}:\n{first_errors(read_log(log))}\nThe whole log is {log}.",
        f"Choose another compiler with CXX{' or CUDA_HOME' if plan.op.kind == 'cuda' else ''}, {WITHOUT_KERNELS}",
        log,
    )


def check_disk(work: Path) -> None:
    """Raise CannotStore if the compiler failed because there was no room for what it wrote."""
    text = read_log(work / "build.log")
    for words in DISK_FULL:
        if words in text:
            raise CannotStore(f"{words}: {work.parent}")


def keep_log(work: Path, target: Path) -> Path:
    """Move the log of a failure beside the target and return its path."""
    log = target.with_suffix(".log")
    os.replace(work / "build.log", log)
    return log


def remove_leftovers(store: Path, stem: str) -> None:
    """Remove the working directories of builders that were killed: those of this library, whose lock the caller holds,
    and others that are older than any build takes."""
    try:
        old = os.stat(store / f"{stem}.lock").st_mtime - max(STALE_S, 2 * build_timeout_s())
        for work in store.glob(f"*{WORK_SUFFIX}"):
            if work.name.startswith(f"{stem}.") or work.stat().st_mtime < old:
                shutil.rmtree(work, ignore_errors=True)
    except OSError:
        return  # somebody else removed it, or it cannot be removed: it takes room and does no harm
