"""The device of this process, and the one door through which tensors are read on the host.

Every ``.item()`` of the project is here, so that a step's synchronisations can be counted, and a dry run on fake
tensors has a single place to answer from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def default_device(local_rank: int) -> torch.device:
    """``cuda:<local_rank>`` (modulo the visible devices) where CUDA is usable, otherwise ``cpu``."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


class HostRead:
    """A tensor on its way to the host. On CUDA the copy runs behind the work queued so far; ``get()`` waits for it
    alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host = tensor.clone()

    def get(self) -> torch.Tensor:
        """The values, as a CPU tensor."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host


def host_values(tensor: torch.Tensor) -> list[float]:
    """The elements of a small tensor as Python numbers; waits for the device."""
    values: Sequence[float] = HostRead(tensor.reshape(-1)).get().tolist()
    return list(values)


def host_value(tensor: torch.Tensor) -> float:
    """The single element of ``tensor`` as a Python number; waits for the device."""
    return host_values(tensor)[0]
