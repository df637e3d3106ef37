"""Messages that torch's pipeline schedules launch together, waited for together on every torch."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules


class Works(list[Any]):
    """What is under way: torch's newer schedules wait for each element, older ones for the whole."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def launch(ops: list[dist.P2POp], desc: str | None = None) -> Works | None:
    """Replace ``_batch_p2p`` of schedules that wait for one thing alone."""
    return Works(dist.batch_isend_irecv(ops)) if ops else None


def wait_for_all_messages() -> None:
    """Mend torch's older schedules, which keep the last of several works and so wait for that alone. On gloo, where
    messages do not arrive in order, a stage that is given two tensors would compute with what was in the first."""
    torchs: Any = schedules
    if not hasattr(torchs, "_wait_batch_p2p"):
        torchs._batch_p2p = launch
