"""The CPU library of csrc/cpu, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_int32, c_void_p
from typing import cast

import torch

from zerolite.ops.call import Adam8Call, QuantCall, SquaresCall, UpdateCall
from zerolite.ops.interface import Adam8, Norm, Quant, Threads, Update, check_abi
from zerolite.utils.builder import declare

ISA_NAMES = ("plain", "avx2", "avx512")
_BEST = -1
_ERRORS = {
    1: "unknown rule",
    2: "a dtype that is not fp32, bf16 or fp16",
    3: "an instruction set that this processor lacks",
    4: "the table has a segment that is not within its tensor, or names a row that is not there",
    5: "rows that are not aligned, too short for their codes and scales, or not of 8 or 4 bits",
}


class CpuKernels:
    """Kernels for the CPU. zerolite/ops/launches.py has checked the arguments."""

    def __init__(self, library: ctypes.CDLL, isa: int = _BEST) -> None:
        """
        Args:
            library: the loaded library.
            isa: index in ISA_NAMES, by default the widest instruction set of this processor.

        Raises:
            RuntimeError: the library has another version of the interface.
        """
        check_abi(library, "CPU")
        self._update = declare(library.zl_cpu_update, c_int32, POINTER(Update))
        self._norm = declare(library.zl_cpu_norm, c_int32, POINTER(Norm))
        self._quantize = declare(library.zl_cpu_quantize, c_int32, POINTER(Quant))
        self._dequantize = declare(library.zl_cpu_dequantize, c_int32, POINTER(Quant))
        self._adam8 = declare(library.zl_cpu_adam8, c_int32, POINTER(Adam8))
        self.best_isa: int = declare(library.zl_best_isa, c_int32)()
        self._isa, self._openmp = isa, _openmp()

    def update(self, call: UpdateCall) -> None:
        if call.arguments is None:
            call.arguments = Update(call, self._isa, Threads(*self._openmp))
        arguments = cast(Update, call.arguments)
        arguments.refresh(call)
        arguments.threads.threads = torch.get_num_threads()
        error = self._update(arguments)
        if error:
            raise _refusal(error, "update")

    def squares(self, call: SquaresCall) -> None:
        if call.arguments is None:
            call.arguments = Norm(call, self._isa, Threads(*self._openmp))
        arguments = cast(Norm, call.arguments)
        arguments.refresh(call, arguments.chunks)
        arguments.threads.threads = torch.get_num_threads()
        error = self._norm(arguments)
        if error:
            raise _refusal(error, "norm")

    def quantize(self, call: QuantCall) -> None:
        """Pack rows. Memory traffic for each element: the value is read, 1 or 0.5 bytes and a 64th of a byte are
        written; the error is read and written, if there is one."""
        if error := self._quantize(Quant(call, self._isa, Threads(*self._openmp, torch.get_num_threads()))):
            raise _refusal(error, "quantization")

    def dequantize(self, call: QuantCall) -> None:
        """Unpack rows, or their sum. Memory traffic for each element: 1 or 0.5 bytes and a 64th of a byte are read for
        each row of a sum, and the value is written once."""
        if error := self._dequantize(Quant(call, self._isa, Threads(*self._openmp, torch.get_num_threads()))):
            raise _refusal(error, "quantization")

    def adam8(self, call: Adam8Call) -> None:
        """Make a step of AdamW with moments in 8 bits. Memory traffic for each element: parameter and moments (2
        bytes) are read and written, the gradient is read."""
        if error := self._adam8(Adam8(call, self._isa, Threads(*self._openmp, torch.get_num_threads()))):
            raise _refusal(error, "update with moments in 8 bits")


def _refusal(code: int, what: str) -> ValueError:
    return ValueError(f"the CPU kernel for the {what} refused its arguments: {_ERRORS.get(code, code)}")


@functools.cache
def _openmp() -> tuple[int | None, int | None]:
    """Return the addresses of GOMP_parallel and omp_get_thread_num in the OpenMP runtime that torch has loaded.

    With them, kernels run on torch's own threads and start none beside them. GNU's, LLVM's and Intel's runtimes have
    this interface; (None, None) if no runtime has it.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "omp" in line and ".so" in line}
    except OSError:
        return None, None
    # torch's own copy comes first: it is in torch's directory or beside it. Others may belong to other packages.
    for path in sorted(paths, key=lambda path: ("torch" not in path, path)):
        name = path.rpartition("/")[2]
        if not name.startswith(("libgomp", "libiomp", "libomp")):
            continue
        try:
            library = ctypes.CDLL(path)
            parallel, thread_num = library.GOMP_parallel, library.omp_get_thread_num
        except (OSError, AttributeError):
            continue
        return ctypes.cast(parallel, c_void_p).value, ctypes.cast(thread_num, c_void_p).value
    return None, None
