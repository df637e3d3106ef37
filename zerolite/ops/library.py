"""Kernels of this process, loaded once per device type."""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from zerolite.ops.call import QuantCall, SquaresCall, UpdateCall
from zerolite.ops.cpu_kernels import CpuKernels
from zerolite.utils.builder import op_builder


class Kernels(Protocol):
    """Compiled kernels of one device type."""

    def update(self, call: UpdateCall) -> None: ...

    def squares(self, call: SquaresCall) -> None: ...

    def quantize(self, call: QuantCall) -> None: ...

    def dequantize(self, call: QuantCall) -> None: ...


def kernels_for(device: torch.device) -> Kernels | None:
    """Return the compiled kernels for a device, built on first use; None if they cannot be built."""
    kernels = _load(device.type, _capability(device))
    return None if isinstance(kernels, str) else kernels


def unavailable_reason(device: torch.device) -> str | None:
    """Return None if there are kernels for the device; else a sentence with the cause and the remedy."""
    reason = _load(device.type, _capability(device))
    return reason if isinstance(reason, str) else None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _load_cuda(capability: tuple[int, int] | None) -> Kernels:
    """Load the kernels of nvcc, or without nvcc those of NVRTC.

    Raises:
        OSError: a library cannot be loaded.
        RuntimeError: neither compiler can be used, or NVRTC's kernels compute wrong values.
    """
    from zerolite.ops.cuda_kernels import CudaKernels
    from zerolite.ops.self_check import check_kernels

    try:
        return CudaKernels(op_builder.load("cuda_kernels", capability=capability, torch_cuda=torch.version.cuda))
    except op_builder.OpUnavailable as error:
        without_nvcc = error
    try:
        library = op_builder.load("cuda_kernels_nvrtc", capability=capability, torch_cuda=torch.version.cuda)
    except op_builder.OpUnavailable as error:
        raise RuntimeError(f"{without_nvcc} Nor can NVRTC compile them: {error}") from error
    kernels = CudaKernels(library)
    check_kernels(kernels, torch.device("cuda", torch.cuda.current_device()))
    return kernels


@functools.cache
def _load(device_type: str, capability: tuple[int, int] | None) -> Kernels | str:
    if device_type not in ("cpu", "cuda"):
        return f"there are no kernels for devices of type '{device_type}'."
    try:
        if device_type == "cpu":
            return CpuKernels(op_builder.load("cpu_kernels"))
        return _load_cuda(capability)
    except (op_builder.OpUnavailable, OSError, RuntimeError, AttributeError) as error:
        return str(error)
