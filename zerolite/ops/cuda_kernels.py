"""The CUDA library of csrc/cuda, called through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import cast

import torch

from zerolite.ops.call import QuantCall, SquaresCall, UpdateCall
from zerolite.ops.interface import Norm, Quant, Update, check_abi
from zerolite.utils.builder import declare


@dataclass(frozen=True)
class _Entry:
    """C functions of one kernel.

    Attributes:
        name: name of the kernel.
        bytes: (number of segments) -> bytes of their table; 0 if it fits into the arguments of a launch.
        fill: (call, memory) lays out the table of a call in memory.
        launch: (call, table on the host, table on the device, device, stream) launches the kernel.
    """

    name: str
    bytes: ctypes._NamedFuncPointer
    fill: ctypes._NamedFuncPointer
    launch: ctypes._NamedFuncPointer


class CudaKernels:
    """Kernels for CUDA devices. zerolite/ops/launches.py has checked the arguments.

    A call is one launch on the current stream of its tensors' device, and never waits for the device. The arguments of
    a launch hold 4 KB: 42 segments of an update, or 126 of a norm. A longer table of segments is copied through pinned
    memory, which torch keeps until the copy is done.

    During the capture of a CUDA graph there is no copy: a longer table becomes several launches. A replay uses the
    addresses, the table and the rows of scalars (lr, bias correction) of the captured call. It reads anew only what is
    on the device: the tensors' elements, ``factor`` and ``skip``. Run a call once before it is captured, so that its
    kernel is loaded.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raise RuntimeError if the library has another version of the interface."""
        check_abi(library, "CUDA")
        self._update = _entry(library, "update", Update)
        self._norm = _entry(library, "norm", Norm)
        self._quantize = declare(library.zl_cuda_quantize, c_int32, POINTER(Quant), c_int32, c_void_p)
        self._dequantize = declare(library.zl_cuda_dequantize, c_int32, POINTER(Quant), c_int32, c_void_p)
        self._partials = declare(library.zl_cuda_norm_partials, c_int64, POINTER(Norm))
        self._error_string = declare(library.zl_cuda_error_string, c_char_p, c_int32)

    def update(self, call: UpdateCall) -> None:
        if call.arguments is None:
            call.arguments = Update(call)
        arguments = cast(Update, call.arguments)
        arguments.refresh(call)
        self._launch(self._update, arguments, call.params[0].device)

    def squares(self, call: SquaresCall) -> None:
        """Add the sum of squares of each segment to its owner's sum.

        Equal segments have equal sums, bit for bit, wherever they are, and an owner's sums are added in the order of
        the table. The bits differ from the CPU's, which adds within a segment in another order.
        """
        if call.arguments is None:
            call.arguments = Norm(call)
        arguments = cast(Norm, call.arguments)
        arguments.refresh(call, self._partials(ctypes.byref(arguments)))
        self._launch(self._norm, arguments, call.sums.device)

    def quantize(self, call: QuantCall) -> None:
        """Pack rows, a warp for each block. Memory traffic as of the CPU's kernel."""
        self._launch_quant(self._quantize, call)

    def dequantize(self, call: QuantCall) -> None:
        """Unpack rows, or their sum, a warp for each block. Memory traffic as of the CPU's kernel."""
        self._launch_quant(self._dequantize, call)

    def _launch_quant(self, launch: ctypes._NamedFuncPointer, call: QuantCall) -> None:
        device = call.values.device
        with torch.cuda.device(device):
            code = launch(Quant(call), device.index, torch.cuda.current_stream().cuda_stream)
        self._check(code, "quantization", device)

    def _launch(self, entry: _Entry, arguments: Structure, device: torch.device) -> None:
        """Launch on the current stream of ``device``.

        The table is freed when this returns, before the kernel has run. That is safe: only later work on the same
        stream can get its memory.
        """
        call = ctypes.byref(arguments)
        filled = copied = None
        size = entry.bytes(arguments.segments)
        with torch.cuda.device(device):
            if size and not torch.cuda.is_current_stream_capturing():
                filled = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
                self._check(entry.fill(call, filled.data_ptr()), entry.name, device)
                copied = filled.to(device, non_blocking=True)
            tables = [None if table is None else table.data_ptr() for table in (filled, copied)]
            stream = torch.cuda.current_stream().cuda_stream
            self._check(entry.launch(call, *tables, device.index, stream), entry.name, device)

    def _check(self, code: int, kernel: str, device: torch.device) -> None:
        if not code:
            return
        text = self._error_string(code).decode()
        if code > 0:  # of zl_error
            raise ValueError(f"the CUDA kernel for the {kernel} refused its arguments: {text}")
        raise RuntimeError(f"the CUDA kernel for the {kernel} could not be started on {device}: {text}")


def _entry(library: ctypes.CDLL, name: str, call: type[Structure]) -> _Entry:
    return _Entry(
        name,
        declare(library[f"zl_cuda_{name}_bytes"], c_int64, c_int64),
        declare(library[f"zl_cuda_{name}_fill"], c_int32, POINTER(call), c_void_p),
        declare(library[f"zl_cuda_{name}"], c_int32, POINTER(call), c_void_p, c_void_p, c_int32, c_void_p),
    )
