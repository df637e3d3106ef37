"""Search for compilers and ninja without running them, so that a cached library loads at once."""

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
    """Return the compiler of an op, and for CUDA the C++ compiler behind or beside it.

    Raises:
        OpUnavailable: there is none, or nvcc is of another major version than torch's CUDA: a driver that serves torch
            need not serve a newer toolkit's runtime.
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
    """Return the C++ compiler: `CXX`, otherwise g++, clang++ or c++ on the PATH."""
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
    """Return CUDA's compiler: in `CUDA_HOME` or `CUDA_PATH`, otherwise on the PATH, otherwise in /usr/local/cuda.

    torch.utils.cpp_extension looks in the same places. Its import needs setuptools and takes a second, it writes to
    stderr where there is a toolkit and no GPU, and it finds no toolkit where torch is built without CUDA.
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
    return (path, "-ccbin", host[0]) if len(host) == 1 else (path,)  # nvcc takes no words beside a compiler


def find_nvrtc(torch_cuda: str | None) -> Command:
    """Return the command for NVRTC of torch's major version of CUDA, from the packages that torch's wheels depend on:
    cuda_nvrtc/lib beside cuda_runtime/include up to CUDA 12, and one directory, cu13, from then on."""
    from importlib.util import find_spec  # slow, and needed only for CUDA

    major = (torch_cuda or "").partition(".")[0]
    spec, found = find_spec("nvidia"), []
    for root in map(Path, (spec and spec.submodule_search_locations) or ()):
        for library in root.glob(f"*/lib/libnvrtc.so.{major or '[1-9][0-9]'}"):
            for include in (library.parents[1] / "include", root / "cuda_runtime" / "include"):
                if (include / "cuda_fp16.h").is_file():
                    found.append((library.name, str(library), f"-I{include}"))
                    break
    if not found:
        raise OpUnavailable(
            f"There is no NVRTC{f' of CUDA {major}' if major else ''} with its headers in this Python environment "
            "(nvidia/cuda_nvrtc and nvidia/cuda_runtime, or nvidia/cu13).",
            "Install the packages that torch's wheels for CUDA depend on (nvidia-cuda-nvrtc and nvidia-cuda-runtime), "
            + WITHOUT_KERNELS,
        )
    return (sys.executable, str(Path(__file__).resolve().with_name("nvrtc.py")), *max(found)[1:])


def find_ninja() -> str:
    """Return the path of ninja: of the `ninja` package in this environment, otherwise on the PATH."""
    path = shutil.which("ninja", path=f"{sysconfig.get_path('scripts')}:{os.environ.get('PATH', '')}")
    if path is None:
        raise OpUnavailable(
            "There is no ninja: neither the package `ninja` is installed nor is the program on the PATH.",
            f"Install it with `pip install ninja`, {WITHOUT_KERNELS}",
        )
    return path


def ask_version(command: Command) -> str:
    """Return what a tool says of its version: its first line, and of nvcc the release, such as "12.8"."""
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
    """Return the version and path of each tool, or why there is none, as `zerolite report` prints them."""
    tools: dict[str, Callable[[], Command]] = {
        "C++ compiler": find_cxx,
        "nvcc": find_nvcc,
        "NVRTC": lambda: find_nvrtc(None),
        "ninja": lambda: (find_ninja(),),
    }
    found = {}
    for name, find in tools.items():
        try:
            command = find()
            found[name] = f"{ask_version(command)}, {shlex.join(command)}"
        except OpUnavailable as error:
            found[name] = f"none. {error.cause}"
    return found
