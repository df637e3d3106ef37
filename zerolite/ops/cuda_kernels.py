"""The CUDA library of csrc/cuda, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch

from zerolite.ops.call import UpdateCall
from zerolite.ops.interface import Norm, Update, check_abi, norm_arguments, update_arguments
from zerolite.utils.c_functions import declare


@dataclass(frozen=True)
class _Entry:
    """The functions of one kernel.

    Attributes:
        bytes: of a table of so many segments, 0 if it fits into a launch's arguments.
        fill: lays out the table of a call.
        launch: call, table on the host, table on the device, device, stream.
    """

    name: str
    bytes: ctypes._NamedFuncPointer
    fill: ctypes._NamedFuncPointer
    launch: ctypes._NamedFuncPointer


class CudaKernels:
    """Arguments have been checked by the operators in zerolite/ops/operators.py.

    A call is one launch on the current stream of its tensors' device and never waits for that device. A table of
    segments that does not fit into the arguments of a launch (4 KB: 42 segments of an update, 126 of a norm) goes
    through pinned memory, which torch keeps until the copy is done.

    In the capture of a CUDA graph there is no such copy: a longer table becomes several launches. A replay works on the
    addresses, the table and the rows of scalars (lr, bias correction) that the call had when it was captured; only what
    lies on the device is read anew: the tensors' elements, ``factor`` and ``skip``. As everything that is captured, a
    call should have run once before, so that its kernel is loaded.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raise RuntimeError for a library of another version of the interface."""
        check_abi(library, "CUDA")
        self._update = _entry(library, "update", Update)
        self._norm = _entry(library, "norm", Norm)
        self._partials = declare(library.zl_cuda_norm_partials, c_int64, POINTER(Norm))
        self._error_string = declare(library.zl_cuda_error_string, c_char_p, c_int32)

    def update(self, call: UpdateCall) -> None:
        self._launch(self._update, update_arguments(call), call.params[0].device)

    def squares(self, sums: torch.Tensor, values: Sequence[torch.Tensor], table: torch.Tensor) -> None:
        """sums[owner] += the sum of squares of each segment (tensor, start, elements, owner) of ``table``, in double.

        Equal segments have equal sums, bit for bit, wherever they lie; an owner's are added in the order of the table.
        Not those of the CPU's kernel: the order of additions within a segment is another."""
        arguments = norm_arguments(sums, values, table)
        arguments.partials = self._partials(ctypes.byref(arguments))
        partial = torch.empty(arguments.partials, dtype=torch.float64, device=sums.device)
        arguments.partial = partial.data_ptr()
        self._launch(self._norm, arguments, sums.device)

    def _launch(self, entry: _Entry, arguments: Structure, device: torch.device) -> None:
        """Launch on the current stream of ``device``. Memory that is let go of here is used again by later work on that
        stream only, so the launch comes first."""
        call = ctypes.byref(arguments)
        filled = copied = None
        size = entry.bytes(arguments.segments)
        with torch.cuda.device(device):
            if size and not torch.cuda.is_current_stream_capturing():
                filled = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                self._check(entry.fill(call, filled.data_ptr()), entry, device)
                copied = filled.to(device, non_blocking=True)
            tables = [None if table is None else table.data_ptr() for table in (filled, copied)]
            stream = torch.cuda.current_stream().cuda_stream
            self._check(entry.launch(call, *tables, device.index, stream), entry, device)

    def _check(self, code: int, entry: _Entry, device: torch.device) -> None:
        if code:
            text = self._error_string(code).decode()
            raise RuntimeError(f"the CUDA kernel for the {entry.name} could not be started on {device}: {text}")


def _entry(library: ctypes.CDLL, name: str, call: type[Structure]) -> _Entry:
    return _Entry(
        name,
        declare(library[f"zl_cuda_{name}_bytes"], c_int64, c_int64),
        declare(library[f"zl_cuda_{name}_fill"], c_int32, POINTER(call), c_void_p),
        declare(library[f"zl_cuda_{name}"], c_int32, POINTER(call), c_void_p, c_void_p, c_int32, c_void_p),
    )
