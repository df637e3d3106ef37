"""User functions of activation checkpointing, under DeepSpeed's names.

    zerolite.checkpointing.checkpoint(block, x, mask)       # instead of block(x, mask)

saves only the inputs of ``block`` and recomputes everything else in backward. The block ``activation_checkpointing`` of
an engine's config, or :func:`configure`, sets where the inputs are saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerolite.activation_checkpointing.current import configured, current, replace_configured
from zerolite.comm import Communicator, create_communicator, local_rank
from zerolite.config import ActivationCheckpointingConfig, load_config
from zerolite.utils.accelerator import default_device

__all__ = ["checkpoint", "configure", "is_configured", "reset"]


def checkpoint(function: Callable[..., object], *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``. Only the inputs are saved, and backward recomputes the rest.

    Numbers, random states, autocast and accepted arguments are those of ``torch.utils.checkpoint.checkpoint(function,
    *args, use_reentrant=False, **kwargs)``. torch's own keywords (``preserve_rng_state``, ``context_fn``,
    ``determinism_check``, ``debug``, ``early_stop``) are passed to it. Without gradients it is an ordinary call.

    With the config's settings, or those of :func:`configure`, tensors among the inputs are saved on the host or sharded
    over a group of ranks. These stay on the device: an input that several checkpoints share, such as a mask;
    parameters; tensors of less than 4096 bytes; and tensors with gaps in memory.

    Raises:
        ValueError: for ``use_reentrant=True``.
        RuntimeError: in backward, if an input was written in place, or if inputs to shard were not equal on all ranks.
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
    *,
    group: object = None,
) -> None:
    """Set where :func:`checkpoint` saves inputs.

    The settings apply outside of engines whose config has its own. The group applies everywhere. With a group, called
    on all ranks, in the same order as other collectives.

    Args:
        mpu_: DeepSpeed's and Megatron's object with ``get_model_parallel_group()`` or
            ``get_tensor_model_parallel_group()``.
        group: the process group itself, in which activations are equal on all ranks.
        deepspeed_config: a config (path, dict or object), whose block ``activation_checkpointing`` is used.
        partition_activations: replaces the block's value; see its key in the configuration.
        checkpoint_in_cpu: replaces the block's value of ``cpu_checkpointing``.
        contiguous_checkpointing: DeepSpeed's, without effect: memory is always kept and reused.
        num_checkpoints: DeepSpeed's, without effect for the same reason.
        synchronize: DeepSpeed's, without effect: use torch.profiler.
        profile: DeepSpeed's, without effect for the same reason.

    Raises:
        ValueError: for an ``mpu_`` without groups.
        ConfigError: for the config.
    """
    settings = ActivationCheckpointingConfig()
    if deepspeed_config is not None:
        settings = load_config(deepspeed_config).activation_checkpointing
    given = {"partition_activations": partition_activations, "cpu_checkpointing": checkpoint_in_cpu}
    settings = settings.model_copy(update={key: value for key, value in given.items() if value is not None})
    replace_configured(settings, _communicator(mpu_, group))


def is_configured() -> bool:
    """Return True after :func:`configure` has been called."""
    return configured() is not None


def reset() -> None:
    """Undo :func:`configure`, and free the memory of its checkpoints."""
    replace_configured(None, None)


def _communicator(mpu: object, group: Any) -> Communicator | None:
    if mpu is not None and group is None:
        names = ("get_model_parallel_group", "get_tensor_model_parallel_group")
        get = next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)
        if get is None:
            raise ValueError(
                f"zerolite.checkpointing.configure: expected an mpu with {names[0]}() or {names[1]}(), got "
                f"{type(mpu).__name__}, which has neither; pass group=, the process group"
            )
        group = get()
    if group is None:
        return None
    return create_communicator(default_device(local_rank()), group)
