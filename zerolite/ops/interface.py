"""C structures of csrc/kernels.h, which the CPU and CUDA libraries share."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

import torch

from zerolite.ops.call import Adam8Call, QuantCall, SquaresCall, UpdateCall
from zerolite.utils.builder import declare

ABI = 9
NORM_CHUNK = 16384
DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class Threads(Structure):
    _fields_ = [("parallel", c_void_p), ("thread_num", c_void_p), ("threads", c_int32)]


class Update(Structure):
    """Arguments of an update. They keep their arrays of addresses alive; the call keeps the tensors."""

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
        ("threads", Threads),
    ]

    def __init__(self, call: UpdateCall, isa: int = 0, threads: Threads | None = None) -> None:
        """isa, threads: of the CPU kernels."""
        count = len(call.params)
        lists = call.params, call.grads, *call.states, call.outs
        self._arrays = [(c_int64 * len(tensors))() for tensors in lists]
        self._numels = (c_int64 * count)(*map(torch.Tensor.numel, call.params))
        params, grads, *states, outs = map(ctypes.addressof, self._arrays)
        super().__init__(
            rule=call.rule,
            param_dtype=DTYPES[call.params[0].dtype],
            grad_dtype=DTYPES[call.grads[0].dtype],
            state_dtype=DTYPES[call.states[0][0].dtype if call.states else torch.float32],
            out_dtype=DTYPES[call.outs[0].dtype] if call.outs else 0,
            isa=isa,
            tensors=count,
            segments=call.table.shape[0],
            numels=ctypes.addressof(self._numels),
            params=params,
            grads=grads,
            states=(c_void_p * 2)(*states),
            outs=outs if call.outs else None,
            table=call.table.data_ptr(),
            row_count=call.rows.shape[0],
            threads=threads or Threads(),
        )

    def refresh(self, call: UpdateCall) -> None:
        """Take over what may differ from the launch before: addresses and scalars."""
        for array, tensors in zip(self._arrays, (call.params, call.grads, *call.states, call.outs), strict=True):
            array[:] = list(map(torch.Tensor.data_ptr, tensors))
        self.rows = call.rows.data_ptr()
        self.factor = None if call.factor is None else call.factor.data_ptr()
        self.skip = None if call.skip is None else call.skip.data_ptr()


class Norm(Structure):
    """Arguments of a sum of squares. They keep their arrays of addresses alive; the call keeps the tensors.

    Attributes:
        chunks: the table's chunks of ``NORM_CHUNK`` elements.
    """

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

    def __init__(self, call: SquaresCall, isa: int = 0, threads: Threads | None = None) -> None:
        self._values, count = (c_int64 * len(call.values))(), len(call.values)
        self._numels = (c_int64 * count)(*map(torch.Tensor.numel, call.values))
        super().__init__(
            dtype=DTYPES[call.values[0].dtype],
            isa=isa,
            tensors=count,
            segments=call.table.shape[0],
            numels=ctypes.addressof(self._numels),
            values=ctypes.addressof(self._values),
            table=call.table.data_ptr(),
            owners=call.sums.numel(),
            threads=threads or Threads(),
        )
        numels = call.table[:, 2].clamp(0, max(self._numels))
        self.chunks = int(((numels + (NORM_CHUNK - 1)) // NORM_CHUNK).sum())

    def refresh(self, call: SquaresCall, partials: int) -> None:
        """Take over the addresses of a launch, and allocate ``partials`` numbers for the sums of the table's chunks,
        which the kernel adds in the end."""
        self._values[:] = list(map(torch.Tensor.data_ptr, call.values))
        self._partial = torch.empty(partials, dtype=torch.float64, device=call.sums.device)
        self.partials, self.partial, self.sums = partials, self._partial.data_ptr(), call.sums.data_ptr()


class Quant(Structure):
    """Arguments of a packing or unpacking of rows."""

    _fields_ = [
        ("bits", c_int32),
        ("dtype", c_int32),
        ("error_dtype", c_int32),
        ("isa", c_int32),
        ("sum", c_int32),
        ("keep", c_float),
        ("take", c_float),
        ("divisor", c_float),
        ("rows", c_int64),
        ("numel", c_int64),
        ("row_bytes", c_int64),
        ("scale_offset", c_int64),
        ("values", c_void_p),
        ("packed", c_void_p),
        ("error", c_void_p),
        ("threads", Threads),
    ]

    def __init__(self, call: QuantCall, isa: int = 0, threads: Threads | None = None) -> None:
        super().__init__(
            bits=call.bits,
            dtype=DTYPES[call.values.dtype],
            error_dtype=0 if call.error is None else DTYPES[call.error.dtype],
            isa=isa,
            sum=call.is_sum,
            keep=call.keep,
            take=call.take,
            divisor=call.divisor,
            rows=call.rows,
            numel=call.numel,
            row_bytes=call.packed.shape[1],
            scale_offset=call.scale_offset,
            values=call.values.data_ptr(),
            packed=call.packed.data_ptr(),
            error=None if call.error is None else call.error.data_ptr(),
            threads=threads or Threads(),
        )


class Moment(Structure):
    _fields_ = [
        ("codes", c_void_p),
        ("maxima", c_void_p),
        ("numbers", c_void_p),
        ("borders", c_void_p),
        ("cells", c_void_p),
    ]


class Adam8(Structure):
    """Arguments of a step of AdamW with moments in 8 bits."""

    _fields_ = [
        ("param_dtype", c_int32),
        ("grad_dtype", c_int32),
        ("isa", c_int32),
        ("keep", c_float),
        ("mean", c_float),
        ("keep_square", c_float),
        ("square", c_float),
        ("correction2", c_float),
        ("eps", c_float),
        ("step", c_float),
        ("numel", c_int64),
        ("lead", c_int64),
        ("param", c_void_p),
        ("grad", c_void_p),
        ("moments", Moment * 2),
        ("threads", Threads),
    ]

    def __init__(self, call: Adam8Call, isa: int, threads: Threads) -> None:
        moments = [
            Moment(*(tensor.data_ptr() for tensor in (codes, maxima, *table)))
            for codes, maxima, table in zip(call.codes, call.maxima, call.tables, strict=True)
        ]
        super().__init__(
            DTYPES[call.param.dtype],
            DTYPES[call.grad.dtype],
            isa,
            *call.scalars,
            call.param.numel(),
            call.lead,
            call.param.data_ptr(),
            call.grad.data_ptr(),
            (Moment * 2)(*moments),
            threads,
        )


def check_abi(library: ctypes.CDLL, name: str) -> None:
    """Raise RuntimeError if a library has another version of the interface."""
    version = declare(library.zl_abi, c_int32)()
    if version != ABI:
        raise RuntimeError(
            f"the {name} kernels have interface {version}, expected {ABI}; rebuild them: delete the cache "
            "directory that `zerolite report` names"
        )
