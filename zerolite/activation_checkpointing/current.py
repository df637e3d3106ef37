"""Choice of the checkpointing settings for a call: those of the running engine, or those that the user configured."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from zerolite.activation_checkpointing.checkpoint import Checkpointing
from zerolite.comm import Communicator, local_rank
from zerolite.config import ActivationCheckpointingConfig
from zerolite.utils.accelerator import default_device


class _Running(threading.local):
    """Checkpointing of the models whose forwards are running in this thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Checkpointing] = []


running = _Running()
_configured: Checkpointing | None = None
_group: Communicator | None = None


def current() -> Checkpointing:
    """Return the settings of a checkpoint that is called now."""
    if running.stack:
        return running.stack[-1]
    if _configured is not None:
        return _configured
    return _PLAIN


def configured() -> Checkpointing | None:
    """Return the settings of ``zerolite.checkpointing.configure``; None without."""
    return _configured


def replace_configured(settings: ActivationCheckpointingConfig | None, group: Communicator | None) -> None:
    """Replace the settings for calls outside of engines that have their own.

    Args:
        settings: the settings; None for torch's checkpoint.
        group: the ranks over which inputs are sharded, also inside of engines.
    """
    global _configured, _group
    _group = group
    device = default_device(local_rank())
    _configured = None if settings is None else Checkpointing(settings, device, sharding_group)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Context of a dry run: calls outside of engines save unsharded inputs in separate memory."""
    global _configured, _group
    before = _configured, _group
    replace_configured(None if _configured is None else _configured.settings, None)
    try:
        yield
    finally:
        _configured, _group = before


def sharding_group() -> Communicator | None:
    """Return the ranks over which inputs are sharded."""
    return _group


# It saves nothing, so the device does not matter.
_PLAIN = Checkpointing(ActivationCheckpointingConfig(), torch.device("cpu"), sharding_group)
