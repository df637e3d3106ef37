"""Search for compilers and other build tools, without running them, so that a cached library loads at once."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import OpUnavailable
from .store import write_text

VERSION_TIMEOUT_S = 30.0
WITHOUT_KERNELS = "or set ZEROLITE_KERNELS=0 to train on PyTorch's own operations without this message."


@dataclass(frozen=True)
class Program:
    """A compiler.

    Attributes:
        command: how it is called: the program's path and what else the user put into the variable.
        identity: path after following links, size in bytes, time of change in ns; of every part that is a program.
        version: what it says about itself.
    """

    command: tuple[str, ...]
    identity: str
    version: str


def find_cxx(store: Path | None) -> Program:
    """Return the C++ compiler: `CXX`, otherwise g++, clang++ or c++ on the PATH.

    Raises:
        OpUnavailable: there is none, or it does not run.
    """
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        command = shlex.split(chosen)
        path = shutil.which(command[0])
        if path is None:
            raise OpUnavailable(
                f"CXX is {chosen!r}, and there is no program {command[0]!r} on the PATH.",
                f"Set CXX to a C++ compiler or unset it, {WITHOUT_KERNELS}",
            )
        return _identified((path, *command[1:]), "C++ compiler", store)
    for name in ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path is not None:
            return _identified((path,), "C++ compiler", store)
    raise OpUnavailable(
        "There is no C++ compiler: neither g++, clang++ nor c++ is on the PATH.",
        f"Install one (on Debian and Ubuntu: apt install g++) or set CXX, {WITHOUT_KERNELS}",
    )


def find_nvcc(store: Path | None) -> Program:
    """Return CUDA's compiler: in `CUDA_HOME` or `CUDA_PATH`, otherwise on the PATH, otherwise in /usr/local/cuda.

    Raises:
        OpUnavailable: there is none, or it does not run.
    """
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home:
            path = shutil.which(os.path.join(home, "bin", "nvcc"))
            if path is None:
                raise OpUnavailable(
                    f"{variable} is {home!r}, and there is no bin/nvcc in it.",
                    f"Set it to the directory of a CUDA toolkit or unset it, {WITHOUT_KERNELS}",
                )
            return _identified((path,), "CUDA compiler", store)
    path = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if path is None:
        raise OpUnavailable(
            "There is no CUDA compiler: nvcc is neither on the PATH nor in /usr/local/cuda/bin.",
            f"Install the CUDA toolkit of torch's CUDA version or set CUDA_HOME to it, {WITHOUT_KERNELS}",
        )
    return _identified((path,), "CUDA compiler", store)


def find_nvrtc(store: Path | None, torch_cuda: str | None) -> Program:
    """Return NVRTC, CUDA's compiler as a library, of torch's major version of CUDA: that of the packages which torch's
    wheels depend on. The program is nvrtc.py, and the headers of CUDA are among its words.

    Raises:
        OpUnavailable: it is not installed, or does not work.
    """
    major = (torch_cuda or "").partition(".")[0]
    found = [entry for entry in _nvrtc_packages() if not major or entry[0] == major]
    if not found:
        version = f" of CUDA {major}" if major else ""
        raise OpUnavailable(
            f"There is no NVRTC{version} with its headers in this Python environment (nvidia/cuda_nvrtc and "
            "nvidia/cuda_runtime, or nvidia/cu13).",
            f"Install the packages that torch's wheels for CUDA depend on (nvidia-cuda-nvrtc and nvidia-cuda-runtime), "
            f"{WITHOUT_KERNELS}",
        )
    _, library, include = found[-1]
    script = Path(__file__).resolve().with_name("nvrtc.py")
    command = (sys.executable, str(script), str(library))
    program = _identified(command, "CUDA compiler", store, (str(script), str(library)))
    return Program((*command, f"-I{include}"), program.identity, program.version)


def _nvrtc_packages() -> list[tuple[str, Path, Path]]:
    """Major version of CUDA, library and directory of headers, the lowest version first: cuda_nvrtc/lib beside
    cuda_runtime/include up to CUDA 12, and one directory, cu13, from then on."""
    from importlib.util import find_spec  # slow, and needed only where something is compiled

    spec = find_spec("nvidia")
    found = []
    for root in spec.submodule_search_locations or () if spec is not None else ():
        for library in Path(root).glob("*/lib/libnvrtc.so.*"):
            major, home = library.name.removeprefix("libnvrtc.so."), library.parents[1]
            for include in (home / "include", Path(root) / "cuda_runtime" / "include"):
                if major.isdigit() and (include / "cuda_fp16.h").is_file():
                    found.append((major, library, include))
                    break
    return sorted(found, key=lambda entry: int(entry[0]))


def check_cuda_version(nvcc: Program, torch_cuda: str) -> None:
    """Compare major versions: a driver that serves torch need not serve a newer toolkit's runtime.

    Raises:
        OpUnavailable: they differ.
    """
    found = cuda_version(nvcc)
    if found.partition(".")[0] != torch_cuda.partition(".")[0]:
        raise OpUnavailable(
            f"{nvcc.command[0]} is of CUDA {found}, and torch was built with CUDA {torch_cuda}: the major versions "
            "must be equal.",
            f"Set CUDA_HOME to a toolkit of CUDA {torch_cuda.partition('.')[0]}, {WITHOUT_KERNELS}",
        )


def cuda_version(nvcc: Program) -> str:
    """Return nvcc's release, such as "12.8"; "unknown" where it does not say."""
    match = re.search(r"release (\d+\.\d+)", nvcc.version)
    return match.group(1) if match else "unknown"


def find_ninja() -> str:
    """Return the path of ninja: that of the `ninja` package in this environment, otherwise one on the PATH.

    Raises:
        OpUnavailable: there is none.
    """
    path = _packaged_ninja() or shutil.which("ninja")
    if path is None:
        raise OpUnavailable(
            "There is no ninja: neither the package `ninja` is installed nor is the program on the PATH.",
            f"Install it with `pip install ninja`, {WITHOUT_KERNELS}",
        )
    return path


def _packaged_ninja() -> str | None:
    from importlib import metadata  # slow, and needed only where something is compiled

    try:
        files = metadata.files("ninja") or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        path = os.path.normpath(str(file.locate()))
        if file.name == "ninja" and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def _identified(command: tuple[str, ...], what: str, store: Path | None, files: tuple[str, ...] = ()) -> Program:
    """Describe a program by its file, and by its version, which is remembered in `store` for this very file. files:
    further ones that belong to it."""
    parts = [*command]
    for path in (*map(shutil.which, command), *files):  # `CXX="ccache g++"`: both files matter
        if path is not None:
            resolved = os.path.realpath(path)
            about = os.stat(resolved)
            parts += [resolved, str(about.st_size), str(about.st_mtime_ns)]
    identity = "\n".join(parts)
    remembered = store / f"version-{hashlib.sha256(identity.encode()).hexdigest()[:16]}" if store is not None else None
    version = ""
    if remembered is not None:
        try:
            version = remembered.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            version = ""
    if not version:
        version = _ask_version(command, what)
        if remembered is not None:
            write_text(remembered, version)
    return Program(command, identity, version)


def _ask_version(command: tuple[str, ...], what: str) -> str:
    remedy = f"Choose another with {'CUDA_HOME' if what.startswith('CUDA') else 'CXX'}, {WITHOUT_KERNELS}"
    try:
        answer = subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OpUnavailable(f"The {what} `{shlex.join(command)}` does not run: {error}.", remedy) from error
    if answer.returncode != 0 or not answer.stdout.strip():
        raise OpUnavailable(
            f"The {what} `{shlex.join(command)}` does not work: asked for `--version`, it ended with status "
            f"{answer.returncode}.",
            remedy,
        )
    return answer.stdout.strip()
