"""User functions of activation checkpointing, under DeepSpeed's names, and the choice of a call's settings.

    zerolite.checkpointing.checkpoint(block, x, mask)       # instead of block(x, mask)

saves only the inputs of ``block`` and recomputes everything else in backward. The block ``activation_checkpointing`` of
an engine's config, or :func:`configure`, sets where the inputs are saved.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zerolite.activation_checkpointing.checkpoint import Checkpointing
from zerolite.comm import local_rank
from zerolite.config import ActivationCheckpointingConfig, load_config
from zerolite.utils.accelerator import default_device


class _Running(threading.local):
    """Checkpointing of the models whose forwards are running in this thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Checkpointing] = []


running = _Running()
_configured: Checkpointing | None = None


def checkpoint(function: Callable[..., object], *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``. Only the inputs are saved, and backward recomputes the rest.

    Numbers, random states, autocast and accepted arguments are those of ``torch.utils.checkpoint.checkpoint(function,
    *args, use_reentrant=False, **kwargs)``. torch's own keywords (``preserve_rng_state``, ``context_fn``,
    ``determinism_check``, ``debug``, ``early_stop``) are passed to it. Without gradients it is an ordinary call.

    With the config's settings, or those of :func:`configure`, tensors among the inputs are saved on the host. These
    stay on the device: an input that several checkpoints share, such as a mask;
    parameters; tensors of less than 4096 bytes; and tensors with gaps in memory.

    Raises:
        ValueError: for ``use_reentrant=True``.
        RuntimeError: in backward, if an input was written in place.
    """
    return current().checkpoint(function, args, kwargs)


def configure(
    mpu_: object = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set where :func:`checkpoint` saves inputs outside of engines whose config has settings of its own.

    The arguments are DeepSpeed's. Those that are not listed have no effect: memory is always kept and reused,
    torch.profiler shows where time goes, and ``tensor_parallel.sequence_parallel`` divides activations among ranks.

    Args:
        deepspeed_config: a config (path, dict or object), whose block ``activation_checkpointing`` is used.
        checkpoint_in_cpu: replaces the block's value of ``cpu_checkpointing``.

    Raises:
        ConfigError: for the config.
    """
    settings = ActivationCheckpointingConfig()
    if deepspeed_config is not None:
        settings = load_config(deepspeed_config).activation_checkpointing
    if checkpoint_in_cpu is not None:
        settings = settings.model_copy(update={"cpu_checkpointing": checkpoint_in_cpu})
    _replace(settings)


def is_configured() -> bool:
    """Return True after :func:`configure` has been called."""
    return _configured is not None


def reset() -> None:
    """Undo :func:`configure`, and free the memory of its checkpoints."""
    _replace(None)


def current() -> Checkpointing:
    """Return the settings of a checkpoint that is called now."""
    if running.stack:
        return running.stack[-1]
    return _PLAIN if _configured is None else _configured


def _replace(settings: ActivationCheckpointingConfig | None) -> None:
    global _configured
    _configured = None if settings is None else Checkpointing(settings, default_device(local_rank()))


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Context of a dry run: calls outside of engines save inputs in memory of their own."""
    global _configured
    before = _configured
    _replace(None if before is None else before.settings)
    try:
        yield
    finally:
        _configured = before


# It saves nothing, so the device does not matter.
_PLAIN = Checkpointing(ActivationCheckpointingConfig(), torch.device("cpu"))
