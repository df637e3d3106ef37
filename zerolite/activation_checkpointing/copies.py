"""Copies between device and host on their own CUDA streams."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""Source and target, of one length and dtype."""


class Copy:
    """Copies under way; both ends stay alive until :meth:`wait`, which letting go of this does too."""

    def __init__(self, pairs: Sequence[Pair], event: torch.cuda.Event | None, device: torch.device) -> None:
        self._pairs = list(pairs)
        self._event = event
        self._device = device

    def wait(self) -> None:
        """The current stream waits: what it does from here on comes after them, with the targets and with memory that
        the sources leave. May be called again."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._event = None
        self._pairs.clear()

    def __del__(self) -> None:
        self.wait()


class Copies:
    """One stream for both directions: forward only sends, backward only brings, and what is launched later overwrites
    nothing that an earlier copy still reads. Without CUDA a copy is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def launch(self, pairs: Sequence[Pair]) -> Copy:
        """Begin these copies."""
        if self._stream is None:
            for source, target in pairs:
                target.copy_(source)
            return Copy((), None, self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # what makes the sources, or used the targets
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Copy(pairs, event, self._device)

    def finish(self) -> None:
        """The host waits until no copy is under way."""
        if self._stream is not None:
            self._stream.synchronize()
