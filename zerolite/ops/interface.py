"""C structures of csrc/kernels.h, which the CPU and CUDA libraries share."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_int32, c_int64, c_void_p

import torch

from zerolite.ops.call import UpdateCall
from zerolite.utils.c_functions import declare

ABI = 4
DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class Threads(Structure):
    _fields_ = [("parallel", c_void_p), ("thread_num", c_void_p), ("threads", c_int32)]


class Update(Structure):
    """Arguments of an update. They keep their arrays of addresses alive; the caller keeps the tensors."""

    _fields_ = [
        ("rule", c_int32),
        ("param_dtype", c_int32),
        ("grad_dtype", c_int32),
        ("state_dtype", c_int32),
        ("out_dtype", c_int32),
        ("isa", c_int32),
        ("tensors", c_int64),
        ("segments", c_int64),
        ("numels", c_void_p),
        ("params", c_void_p),
        ("grads", c_void_p),
        ("states", c_void_p * 2),
        ("outs", c_void_p),
        ("table", c_void_p),
        ("rows", c_void_p),
        ("row_count", c_int64),
        ("factor", c_void_p),
        ("skip", c_void_p),
        ("use", c_void_p),
        ("uses", c_void_p),
        ("use_count", c_int64),
        ("threads", Threads),
    ]

    def __init__(self, call: UpdateCall, isa: int = 0, threads: Threads | None = None) -> None:
        """isa, threads: of the CPU kernels."""
        states = [_addresses(tensors) for tensors in call.states]
        params, grads, outs = _addresses(call.params), _addresses(call.grads), _addresses(call.outs)
        numels = _numels(call.params)
        super().__init__(
            rule=call.rule,
            param_dtype=DTYPES[call.params[0].dtype],
            grad_dtype=DTYPES[call.grads[0].dtype],
            state_dtype=DTYPES[call.states[0][0].dtype if call.states else torch.float32],
            out_dtype=DTYPES[call.outs[0].dtype] if call.outs else 0,
            isa=isa,
            tensors=len(call.params),
            segments=call.table.shape[0],
            numels=ctypes.addressof(numels),
            params=ctypes.addressof(params),
            grads=ctypes.addressof(grads),
            states=(c_void_p * 2)(*map(ctypes.addressof, states)),
            outs=ctypes.addressof(outs) if call.outs else None,
            table=call.table.data_ptr(),
            rows=call.rows.data_ptr(),
            row_count=call.rows.shape[0],
            factor=None if call.factor is None else call.factor.data_ptr(),
            skip=None if call.skip is None else call.skip.data_ptr(),
            use=None if call.use is None else call.use.data_ptr(),
            uses=None if call.uses is None else call.uses.data_ptr(),
            use_count=0 if call.uses is None else call.uses.numel(),
            threads=threads or Threads(),
        )
        self._arrays = (*states, params, grads, outs, numels)


class Norm(Structure):
    """Arguments of a sum of squares. They keep their arrays of addresses alive; the caller keeps the tensors."""

    _fields_ = [
        ("dtype", c_int32),
        ("isa", c_int32),
        ("tensors", c_int64),
        ("segments", c_int64),
        ("partials", c_int64),
        ("numels", c_void_p),
        ("values", c_void_p),
        ("table", c_void_p),
        ("partial", c_void_p),
        ("sums", c_void_p),
        ("owners", c_int64),
        ("threads", Threads),
    ]

    def __init__(
        self,
        sums: torch.Tensor,
        values: Sequence[torch.Tensor],
        table: torch.Tensor,
        isa: int = 0,
        threads: Threads | None = None,
    ) -> None:
        addresses, numels = _addresses(values), _numels(values)
        super().__init__(
            dtype=DTYPES[values[0].dtype],
            isa=isa,
            tensors=len(values),
            segments=table.shape[0],
            numels=ctypes.addressof(numels),
            values=ctypes.addressof(addresses),
            table=table.data_ptr(),
            sums=sums.data_ptr(),
            owners=sums.numel(),
            threads=threads or Threads(),
        )
        self._arrays = (addresses, numels)

    def allocate_partials(self, count: int, device: torch.device) -> None:
        """Allocate the memory for the sums of the table's chunks, which the kernel adds in the end."""
        self._partial = torch.empty(count, dtype=torch.float64, device=device)
        self.partials, self.partial = count, self._partial.data_ptr()


def check_abi(library: ctypes.CDLL, kind: str) -> None:
    """Raise RuntimeError if a library has another version of the interface."""
    version = declare(library.zl_abi, c_int32)()
    if version != ABI:
        raise RuntimeError(
            f"the {kind} kernels have interface {version}, expected {ABI}; rebuild them: delete the cache "
            "directory that `zerolite report` names"
        )


def _addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[c_int64]:
    return (c_int64 * len(tensors))(*map(torch.Tensor.data_ptr, tensors))


def _numels(tensors: Sequence[torch.Tensor]) -> ctypes.Array[c_int64]:
    return (c_int64 * len(tensors))(*map(torch.Tensor.numel, tensors))
