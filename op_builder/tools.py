"""Search for compilers and ninja. Only a build needs it, so that a cached library loads at once."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from .ops import WITHOUT_KERNELS, Op, OpUnavailable

Command = tuple[str, ...]


def find_compilers(op: Op, torch_cuda: str | None) -> tuple[Command, ...]:
    """Return the compiler of an op, and for CUDA also the C++ compiler that goes with it.

    Raises:
        OpUnavailable: there is none, or nvcc and torch have different major versions of CUDA. A driver that is new
            enough for torch may be too old for a newer toolkit's runtime.
    """
    if op.kind == "cpp":
        return (find_cxx(),)
    if op.kind == "nvrtc":
        return find_nvrtc(torch_cuda), find_cxx()
    nvcc = find_nvcc()
    version = ask_version(nvcc)
    wanted = (torch_cuda or version).partition(".")[0]
    if version.partition(".")[0] != wanted:
        raise OpUnavailable(
            f"{nvcc[0]} is of CUDA {version}, and torch was built with CUDA {torch_cuda}: the major versions must be "
            "equal.",
            f"Set CUDA_HOME to a toolkit of CUDA {wanted}, {WITHOUT_KERNELS}",
        )
    return nvcc, find_cxx()


def find_cxx() -> Command:
    """Return the C++ compiler: `CXX`, else g++, clang++ or c++ on the PATH."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for program, *words in [chosen] if chosen else [["g++"], ["clang++"], ["c++"]]:
        path = shutil.which(program)
        if path is not None:
            return (path, *words)
    missing = f"no program {chosen[0]!r}, which CXX names," if chosen else "neither g++, clang++ nor c++"
    raise OpUnavailable(
        f"There is no C++ compiler: {missing} is on the PATH.",
        f"Install one (on Debian and Ubuntu: apt install g++) or set CXX to one, {WITHOUT_KERNELS}",
    )


def find_nvcc() -> Command:
    """Return nvcc: in `CUDA_HOME` or `CUDA_PATH`, else on the PATH, else in /usr/local/cuda.

    torch.utils.cpp_extension searches the same directories, but is not used. Its import needs setuptools and takes a
    second. It writes to stderr if there is a toolkit without a GPU, and finds none if torch is built without CUDA.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = f"{home}/bin" if home else f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
    path = shutil.which("nvcc", path=places)
    if path is None:
        raise OpUnavailable(
            f"There is no CUDA compiler: no nvcc in {places if home else 'the PATH and /usr/local/cuda/bin'}.",
            f"Install the CUDA toolkit of torch's CUDA version or set CUDA_HOME to it, {WITHOUT_KERNELS}",
        )
    host = shlex.split(os.environ.get("CXX", ""))
    return (path, "-ccbin", host[0]) if len(host) == 1 else (path,)  # nvcc takes a compiler without arguments only


def find_nvrtc(torch_cuda: str | None) -> Command:
    """Return the command for NVRTC with torch's major version of CUDA, from the packages of torch's wheels.

    Up to CUDA 12 the library is in cuda_nvrtc/lib and its headers in cuda_runtime/include; later both are in cu13.
    """
    from importlib.util import find_spec  # a slow import, needed only for CUDA

    major = (torch_cuda or "").partition(".")[0]
    spec, candidates = find_spec("nvidia"), []
    for root in map(Path, (spec and spec.submodule_search_locations) or ()):
        for library in root.glob(f"*/lib/libnvrtc.so.{major or '[1-9][0-9]'}"):
            for include in (library.parents[1] / "include", root / "cuda_runtime" / "include"):
                if (include / "cuda_fp16.h").is_file():
                    candidates.append((library.name, str(library), f"-I{include}"))
                    break
    if not candidates:
        raise OpUnavailable(
            f"There is no NVRTC{f' of CUDA {major}' if major else ''} with its headers in this Python environment "
            "(nvidia/cuda_nvrtc and nvidia/cuda_runtime, or nvidia/cu13).",
            "Install the packages that torch's wheels for CUDA depend on (nvidia-cuda-nvrtc and nvidia-cuda-runtime), "
            + WITHOUT_KERNELS,
        )
    return (sys.executable, str(Path(__file__).resolve().with_name("nvrtc.py")), *max(candidates)[1:])


def find_ninja() -> str:
    """Return the path of ninja: from the `ninja` package in this environment, else on the PATH."""
    path = shutil.which("ninja", path=f"{sysconfig.get_path('scripts')}:{os.environ.get('PATH', '')}")
    if path is None:
        raise OpUnavailable(
            "There is no ninja: neither the package `ninja` is installed nor is the program on the PATH.",
            f"Install it with `pip install ninja`, {WITHOUT_KERNELS}",
        )
    return path


def ask_version(command: Command) -> str:
    """Run `--version` and return the first line, or the release of nvcc, such as "12.8"."""
    try:
        options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "text": True, "timeout": 30}
        answer: str = subprocess.check_output([*command, "--version"], **options)  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError) as error:
        raise OpUnavailable(
            f"`{shlex.join(command)} --version` does not work: {error}.",
            f"Choose another compiler with CXX or CUDA_HOME, {WITHOUT_KERNELS}",
        ) from error
    release = re.search(r"Cuda compilation tools, release (\d+\.\d+)", answer)
    return release.group(1) if release else answer.strip().partition("\n")[0]


def describe_tools() -> dict[str, str]:
    """Return the version and path of each tool, or why there is none, for `zerolite report`."""
    tools: dict[str, Callable[[], Command]] = {
        "C++ compiler": find_cxx,
        "nvcc": find_nvcc,
        "NVRTC": lambda: find_nvrtc(None),
        "ninja": lambda: (find_ninja(),),
    }
    versions = {}
    for name, find in tools.items():
        try:
            command = find()
            versions[name] = f"{ask_version(command)}, {shlex.join(command)}"
        except OpUnavailable as error:
            versions[name] = f"none. {error.cause}"
    return versions
