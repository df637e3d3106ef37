"""User functions of activation checkpointing, under DeepSpeed's names.

    zerolite.checkpointing.checkpoint(block, x, mask)       # instead of block(x, mask)

keeps only the inputs of ``block`` and recomputes everything else in backward. The block ``activation_checkpointing`` of
an engine's config, or :func:`configure`, says where the inputs are kept until then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerolite.activation_checkpointing.current import configured, current, replace_configured
from zerolite.comm import Communicator, create_communicator, local_rank
from zerolite.config import ActivationCheckpointingConfig, load_config
from zerolite.utils.accelerator import default_device

__all__ = ["checkpoint", "configure", "is_configured", "reset"]

_KEYS = {
    "partition_activations": "partition_activations",
    "checkpoint_in_cpu": "cpu_checkpointing",
}


def checkpoint(function: Callable[..., object], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, of which backward keeps the inputs alone and computes the rest again.

    Equal to ``torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)`` in its numbers, in
    random states and autocast, and in what may be passed: keywords, nested lists, tuples and dicts, values that are no
    tensors; torch's own keywords (``preserve_rng_state``, ``context_fn``, ``determinism_check``, ``debug``,
    ``early_stop``) go to it. Where no gradients are recorded it is a plain call.

    Where the config, or :func:`configure`, says so, floating and other tensors among the inputs rest on the host or in
    parts over a group of ranks. An input that several checkpoints share, a mask for one, stays where it is, and so do
    parameters, tensors of less than 4096 bytes, and those with gaps in memory.

    Raises ValueError for ``use_reentrant=True``; in backward, RuntimeError if an input was written into meanwhile, or
    if inputs that were to be sharded over ranks were not equal on them.
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
    """Say where :func:`checkpoint` keeps inputs, for calls outside of engines whose config says it; and, for all, over
    which ranks inputs are sharded.

    Args:
        mpu_: DeepSpeed's and Megatron's object with ``get_model_parallel_group()`` or
            ``get_tensor_model_parallel_group()``.
        group: that process group itself, in which activations are equal on all ranks.
        deepspeed_config: a config (path, dict or object), whose block ``activation_checkpointing`` counts.
        partition_activations: instead of what the block says; see its key in the configuration.
        checkpoint_in_cpu: the same.
        contiguous_checkpointing: DeepSpeed's, without effect: memory is kept and used again anyway.
        num_checkpoints: DeepSpeed's, without effect for the same reason.
        synchronize: DeepSpeed's, without effect: torch.profiler shows where time goes.
        profile: DeepSpeed's, without effect for the same reason.

    Raises:
        ValueError: for an ``mpu_`` without groups.
        ConfigError: for the config.

    Called on all ranks if there is a group, in the same order as other collectives.
    """
    settings = ActivationCheckpointingConfig()
    if deepspeed_config is not None:
        settings = load_config(deepspeed_config).activation_checkpointing
    given = {
        "partition_activations": partition_activations,
        "checkpoint_in_cpu": checkpoint_in_cpu,
    }
    settings = settings.model_copy(update={_KEYS[name]: value for name, value in given.items() if value is not None})
    replace_configured(settings, _communicator(mpu_, group))


def is_configured() -> bool:
    """True after :func:`configure` has been called."""
    return configured() is not None


def reset() -> None:
    """Forget what :func:`configure` has said, and let go of its memory."""
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
