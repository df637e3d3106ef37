"""Compiler for CUDA device code, run as a program: NVRTC from torch's wheels. It needs neither nvcc nor a GPU.

    python nvrtc.py LIBRARY --version
    python nvrtc.py LIBRARY FLAGS... -c kernels.cu -o device.s

It writes device.cubin, the machine code for one compute capability, and device.s. The latter embeds that code in a
library as `zl_image`, and each kernel's name as a string at a symbol of the same name.

It imports nothing of this package, because it runs as a program of its own.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from pathlib import Path

UPDATES = ("1, 1, 1", "1, 2, 1", "1, 3, 1", "0, 0, 0")  # dtypes of parameters, gradients, states; 0 for any
# The kernels that csrc/cuda/kernels.cu launches. The linker fails if one is missing here.
KERNELS = (
    *(f"zl::update_kernel<zl::{rule}, {dtypes}>" for rule in ("Adam", "Lion", "Adagrad", "Sgd") for dtypes in UPDATES),
    *(f"zl::norm_kernel<{dtype}>" for dtype in (1, 2, 3)),
    *(f"zl::{way}_kernel<{bits}, {d}>" for way in ("quantize", "dequantize") for bits in (8, 4) for d in (1, 2, 3)),
)
# NVRTC has no headers of the C library. These are the types of 64-bit Linux, which host and device share.
HEADERS = {
    "stddef.h": "",
    "stdint.h": """
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long uint64_t; typedef unsigned long uintptr_t;
static_assert(sizeof(int64_t) == 8 && sizeof(uintptr_t) == 8, "a 64-bit system");
""",
}


class Nvrtc:
    """Functions of libnvrtc for a compilation. Each raises RuntimeError with NVRTC's message."""

    def __init__(self, library: str) -> None:
        # NVRTC opens the builtins by their bare name. The loader does not search a wheel's directory, but it finds a
        # library of that name that is loaded already.
        self._builtins = [ctypes.CDLL(str(path)) for path in Path(library).parent.glob("libnvrtc-builtins.so*")]
        self._library = ctypes.CDLL(library)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, source: Path, options: list[str]) -> tuple[bytes, list[str]]:
        """Return the cubin, and the mangled names of its kernels."""
        program, name = ctypes.c_void_p(), ctypes.c_char_p()
        text = (source.read_bytes(), str(source).encode(), len(HEADERS), _strings(HEADERS.values()), _strings(HEADERS))
        self._call("nvrtcCreateProgram", ctypes.byref(program), *text)
        for kernel in KERNELS:
            self._call("nvrtcAddNameExpression", program, kernel.encode())
        if self._library.nvrtcCompileProgram(program, len(options), _strings(options)):
            raise RuntimeError(self._bytes(program, "ProgramLog").decode(errors="replace").rstrip("\0"))
        lowered = []
        for kernel in KERNELS:
            self._call("nvrtcGetLoweredName", program, kernel.encode(), ctypes.byref(name))
            lowered.append((name.value or b"").decode())
        return self._bytes(program, "CUBIN"), lowered

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        room = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, room)
        return room.raw

    def _call(self, function: str, *arguments: object) -> None:
        code = self._library[function](*arguments)
        if code:
            raise RuntimeError(f"error: {function} failed: {self._library.nvrtcGetErrorString(code).decode()}")


def _strings(values: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [value.encode() for value in values]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def assembly(cubin: str, names: list[str]) -> str:
    """Return the text of device.s. Its symbols are hidden, because they belong to one library alone."""
    lines = ['\t.section .rodata,"a",%progbits', "\t.hidden zl_image", "\t.globl zl_image", "\t.balign 64", "zl_image:"]
    lines.append(f'\t.incbin "{cubin}"')
    for name in names:
        lines += [f"\t.hidden {name}", f"\t.globl {name}", "\t.balign 8", f"{name}:", f'\t.asciz "{name}"']
    return "\n".join([*lines, '\t.section .note.GNU-stack,"",%progbits', ""])


def main(library: str, *flags: str) -> None:
    """Compile, or print the version."""
    nvrtc = Nvrtc(library)
    if flags[-1:] == ("--version",):
        return print(f"NVRTC {nvrtc.version()}")
    source, target = (Path(flags[flags.index(flag) + 1]) for flag in ("-c", "-o"))
    # NVRTC gets the source as text, so the directory of its headers must be named.
    cubin, names = nvrtc.compile(source, [*flags[: flags.index("-c")], f"-I{source.parent}"])
    image = target.with_suffix(".cubin")
    image.write_bytes(cubin)
    target.write_text(assembly(image.name, names), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OSError, RuntimeError) as error:
        sys.exit(str(error))
