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
    """Checkpointing of the models whose forwards are under way in this thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Checkpointing] = []


running = _Running()
_configured: Checkpointing | None = None
_group: Communicator | None = None


def current() -> Checkpointing:
    """Return the settings for a call from here."""
    if running.stack:
        return running.stack[-1]
    if _configured is not None:
        return _configured
    return _PLAIN


def configured() -> Checkpointing | None:
    """Return the settings that the user has asked for beside engines' configs."""
    return _configured


def replace_configured(settings: ActivationCheckpointingConfig | None, group: Communicator | None) -> None:
    """Another way from now on, for calls outside of engines that have one; None: torch's. group: for those of engines
    too."""
    global _configured, _group
    _group = group
    device = default_device(local_rank())
    _configured = None if settings is None else Checkpointing(settings, device, sharding_group)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Inside, calls outside of engines save inputs in memory of their own, whole and unnoticed: those of a dry run."""
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


_PLAIN = Checkpointing(
    ActivationCheckpointingConfig(), torch.device("cpu"), sharding_group
)  # saves nothing, so that the device does not matter
