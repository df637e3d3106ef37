"""Compiler for CUDA device code, run as a program: NVRTC from torch's wheels. It needs no GPU.

    python nvrtc.py LIBRARY --version
    python nvrtc.py LIBRARY FLAGS... -c kernels.cu -o device.s

It writes device.cubin, the machine code for one compute capability, and device.s, which puts that into a library as
`zl_image` together with the names of the kernels: each name is a string at a symbol of the same name.

It imports nothing of this package: it runs by itself.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

UPDATES = ("1, 1, 1", "1, 2, 1", "1, 3, 1", "0, 0, 0")  # dtypes of parameters, gradients, states; 0 for any
KERNELS = (
    *(f"zl::update_kernel<zl::{rule}, {dtypes}>" for rule in ("Adam", "Lion", "Adagrad", "Sgd") for dtypes in UPDATES),
    *(f"zl::norm_kernel<{dtype}>" for dtype in (1, 2, 3)),
)
"""The kernels that csrc/cuda/kernels.cu launches. The linker fails where one is missing."""

# NVRTC knows no headers of the C library. Types as on 64-bit Linux, where host and device share them.
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
    """The functions of libnvrtc that compiling needs."""

    def __init__(self, library: str) -> None:
        # NVRTC opens this one by its bare name, which the loader finds in a directory of a wheel only if it is there
        # already.
        self._builtins = [ctypes.CDLL(str(path)) for path in Path(library).parent.glob("libnvrtc-builtins.so*")]
        self._library = ctypes.CDLL(library)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, source: str, name: str, options: list[str]) -> tuple[bytes, list[str]]:
        """The cubin, and the names that its kernels have in it. Raises RuntimeError with the compiler's messages."""
        program = ctypes.c_void_p()
        texts, names = _strings(list(HEADERS.values())), _strings(list(HEADERS))
        arguments = (source.encode(), name.encode(), len(HEADERS), texts, names)
        self._call("nvrtcCreateProgram", ctypes.byref(program), *arguments)
        try:
            for kernel in KERNELS:
                self._call("nvrtcAddNameExpression", program, kernel.encode())
            code = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            if code:
                raise RuntimeError(self._bytes(program, "ProgramLog").decode(errors="replace").rstrip("\0"))
            lowered = []
            for kernel in KERNELS:
                text = ctypes.c_char_p()
                self._call("nvrtcGetLoweredName", program, kernel.encode(), ctypes.byref(text))
                lowered.append((text.value or b"").decode())
            return self._bytes(program, "CUBIN"), lowered
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

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


def _strings(values: list[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*[value.encode() for value in values])


def assembly(cubin: str, names: list[str]) -> str:
    """The text of device.s. Its symbols are hidden: they are those of one library."""
    lines = ['\t.section .rodata,"a",%progbits', "\t.hidden zl_image", "\t.globl zl_image", "\t.balign 64", "zl_image:"]
    lines.append(f'\t.incbin "{cubin}"')
    for name in names:
        lines += [f"\t.hidden {name}", f"\t.globl {name}", "\t.balign 8", f"{name}:", f'\t.asciz "{name}"']
    return "\n".join([*lines, '\t.section .note.GNU-stack,"",%progbits', ""])


def main(arguments: list[str]) -> int:
    """Compile, or print the version. The exit status is 1 after a message if that fails."""
    library, *flags = arguments
    try:
        nvrtc = Nvrtc(library)
        if flags == ["--version"]:
            print(f"NVRTC {nvrtc.version()}")
            return 0
        source = Path(flags[flags.index("-c") + 1])
        target = Path(flags[flags.index("-o") + 1])
        options = [*flags[: flags.index("-c")], f"-I{source.parent}"]  # to NVRTC the source is a text without a place
        cubin, names = nvrtc.compile(source.read_text(encoding="utf-8"), str(source), options)
    except (OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    image = target.with_suffix(".cubin")
    image.write_bytes(cubin)
    target.write_text(assembly(image.name, names), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
