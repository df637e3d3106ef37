"""The CPU library of csrc/cpu, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p

import torch

from zerolite.ops.call import UpdateCall

ABI = 1
NORM_CHUNK = 16384
ISA_NAMES = ("plain", "avx2", "avx512")
_BEST = -1
_DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_ERRORS = {
    1: "unknown rule",
    2: "a dtype that is not fp32, bf16 or fp16",
    3: "an instruction set that this processor lacks",
    4: "the table has a segment that is not within its tensor, or names a row that is not there",
}


class _Threads(Structure):
    _fields_ = [("parallel", c_void_p), ("thread_num", c_void_p), ("threads", c_int32)]


class _Update(Structure):
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
        ("threads", _Threads),
    ]


class _Norm(Structure):
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
        ("threads", _Threads),
    ]


class CpuKernels:
    """Arguments have been checked by the operators in zerolite/ops/operators.py."""

    def __init__(self, library: ctypes.CDLL, isa: int = _BEST) -> None:
        """isa: index in ISA_NAMES, by default the widest that the processor has. Raises RuntimeError for a library
        of another version of the interface."""
        library.zl_abi.restype = c_int32
        if library.zl_abi() != ABI:
            raise RuntimeError(
                f"the CPU kernels have interface {library.zl_abi()}, expected {ABI}; rebuild them: delete the cache "
                "directory that `zerolite report` names"
            )
        self._update = _prototype(library.zl_cpu_update, _Update)
        self._norm = _prototype(library.zl_cpu_norm, _Norm)
        library.zl_best_isa.restype = c_int32
        self.best_isa: int = library.zl_best_isa()
        self._isa = isa

    def update(self, call: UpdateCall) -> None:
        states = [_addresses(tensors) for tensors in call.states]
        kept = (_addresses(call.params), _addresses(call.grads), _addresses(call.outs), _numels(call.params))
        done = self._update(
            _Update(
                rule=call.rule,
                param_dtype=_DTYPES[call.params[0].dtype],
                grad_dtype=_DTYPES[call.grads[0].dtype],
                state_dtype=_DTYPES[call.states[0][0].dtype if call.states else torch.float32],
                out_dtype=_DTYPES[call.outs[0].dtype] if call.outs else 0,
                isa=self._isa,
                tensors=len(call.params),
                segments=call.table.shape[0],
                numels=_pointer(kept[3]),
                params=_pointer(kept[0]),
                grads=_pointer(kept[1]),
                states=(c_void_p * 2)(*(_pointer(state) for state in states)),
                outs=_pointer(kept[2]) if call.outs else None,
                table=call.table.data_ptr(),
                rows=call.rows.data_ptr(),
                row_count=call.rows.shape[0],
                factor=None if call.factor is None else call.factor.data_ptr(),
                skip=None if call.skip is None else call.skip.data_ptr(),
                threads=_threads(),
            )
        )
        _check(done, "update")

    def squares(self, sums: torch.Tensor, values: Sequence[torch.Tensor], table: torch.Tensor) -> None:
        """sums[owner] += the sum of squares of each segment (tensor, start, elements, owner) of ``table``, in
        double."""
        chunks = int(((table[:, 2] + (NORM_CHUNK - 1)) // NORM_CHUNK).sum())
        partial = torch.empty(chunks, dtype=torch.float64)
        kept, numels = _addresses(values), _numels(values)
        done = self._norm(
            _Norm(
                dtype=_DTYPES[values[0].dtype],
                isa=self._isa,
                tensors=len(values),
                segments=table.shape[0],
                partials=chunks,
                numels=_pointer(numels),
                values=_pointer(kept),
                table=table.data_ptr(),
                partial=partial.data_ptr(),
                sums=sums.data_ptr(),
                owners=sums.numel(),
                threads=_threads(),
            )
        )
        _check(done, "norm")


def _prototype(function: ctypes._NamedFuncPointer, argument: type[Structure]) -> ctypes._NamedFuncPointer:
    function.argtypes = [POINTER(argument)]
    function.restype = c_int32
    return function


def _addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[c_int64]:
    return (c_int64 * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


def _numels(tensors: Sequence[torch.Tensor]) -> ctypes.Array[c_int64]:
    return (c_int64 * len(tensors))(*[tensor.numel() for tensor in tensors])


def _pointer(array: ctypes.Array[c_int64]) -> int:
    return ctypes.addressof(array)


def _check(code: int, what: str) -> None:
    if code:
        raise ValueError(f"the CPU kernel for the {what} refused its arguments: {_ERRORS.get(code, code)}")


def _threads() -> _Threads:
    parallel, thread_num = _openmp()
    return _Threads(parallel=parallel, thread_num=thread_num, threads=torch.get_num_threads())


@functools.cache
def _openmp() -> tuple[int | None, int | None]:
    """Addresses of GOMP_parallel and omp_get_thread_num in the OpenMP runtime that torch has loaded, so that kernels
    run on torch's own threads; None where there is none that speaks GNU's interface (LLVM's and Intel's do)."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "omp" in line and ".so" in line}
    except OSError:
        return None, None
    # torch's own copy first: it lies in torch's directory or beside it, others may belong to other packages.
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
