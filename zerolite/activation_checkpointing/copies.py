"""Copies between device and host on their own CUDA streams."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""Source and target, of equal length and dtype."""


class Copy:
    """Copies in flight. Sources and targets stay alive until :meth:`wait`, which also runs when this is freed."""

    def __init__(self, pairs: Sequence[Pair], event: torch.cuda.Event | None, device: torch.device) -> None:
        self._pairs = list(pairs)
        self._event = event
        self._device = device

    def wait(self) -> None:
        """Let the current stream wait for the copies. May be called again.

        So it can read the targets, and reuse the memory of the sources.
        """
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._event = None
        self._pairs.clear()

    def __del__(self) -> None:
        self.wait()


class Copies:
    """Stream of the copies in both directions. Without CUDA a copy is complete at once.

    One stream is enough: forward only copies to the host, and backward only from it. So a later copy never overwrites
    memory that an earlier one still reads.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def launch(self, pairs: Sequence[Pair]) -> Copy:
        """Start the copies."""
        if self._stream is None:
            for source, target in pairs:
                target.copy_(source)
            return Copy((), None, self._device)
        self._stream.wait_stream(
            torch.cuda.current_stream(self._device)
        )  # it has made the sources and used the targets
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Copy(pairs, event, self._device)

    def finish(self) -> None:
        """Let the host wait until no copy is in flight."""
        if self._stream is not None:
            self._stream.synchronize()
