"""``deepspeed.accelerator``: the kind of device on which this process trains."""

from __future__ import annotations

from typing import Any

import torch

from zerolite.comm import local_rank
from zerolite.utils.accelerator import default_device


class Accelerator:
    """The interface of DeepSpeed's accelerators. Other names are looked up in ``torch.cuda`` or ``torch.cpu``."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._functions = torch.cuda if kind == "cuda" else torch.cpu

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """Return a context in which the device is the current one."""
        return torch.device(self.device_name(device_index))

    def current_device_name(self) -> str:
        return str(default_device(local_rank()))

    def communication_backend_name(self) -> str:
        return "nccl" if self._name == "cuda" else "gloo"

    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    def is_bf16_supported(self) -> bool:
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def empty_cache(self) -> None:
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes of tensors on the device; 0 on a CPU, where torch has no count."""
        return torch.cuda.memory_allocated(device_index) if self._name == "cuda" else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index) if self._name == "cuda" else 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)


def is_current_accelerator_supported() -> bool:
    """Return True: engines train on CUDA devices and on CPUs."""
    return True


def get_accelerator() -> Accelerator:
    """Return the interface of the device that engines use."""
    return Accelerator(default_device(0).type)
