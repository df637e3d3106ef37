"""``zerolite.initialize``: where this process stands, whether the job fits, then the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zerolite.accelerator import default_device, keep_freed_memory
from zerolite.comm import create_communicator, init_distributed, local_rank
from zerolite.config import ZeroliteConfig, load_config
from zerolite.planning.fits import check_memory, choose_stage
from zerolite.runtime.arguments import OptimizerLike
from zerolite.runtime.build import Arguments, build_engine, check_model
from zerolite.runtime.engine import Engine
from zerolite.runtime.watchdog import start_watchdog


def initialize(
    model: torch.nn.Module,
    config: ZeroliteConfig | dict[str, Any] | str | os.PathLike[str],
    *,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    broadcast_buffers: bool = False,
    num_local_io_workers: int = 0,
) -> Engine:
    """Make an :class:`~zerolite.runtime.engine.Engine` of ``model``.

    model: moved to this process's device; its parameters take rank 0's values, the compute dtype of ``config``, and
    a place in flat buffers (same ``Parameter`` objects). config: DeepSpeed's schema as a dict, a path, or JSON or
    hjson text. optimizer: an instance, a class, or a function of parameters; otherwise ``config["optimizer"]``.
    model_parameters: parameters or param groups to train, by default all that require a gradient. training_data: a
    dataset, for ``engine.dataloader``. lr_scheduler: an instance, or a function of the optimizer; otherwise
    ``config["scheduler"]``; stepped by the engine after every update. broadcast_buffers: send rank 0's buffers
    before each training forward.
    collate_fn: a list of samples to a batch, for this engine's loaders. num_local_io_workers: processes that load
    ``training_data``; 0 loads in this one.

    Starts torch.distributed from the environment if it does not run. Raises ConfigError for the config, ValueError
    for the other arguments, RuntimeError if ranks hold different models, configs or optimizers, MemoryError if model
    states do not fit (``memory_check``). Called on all ranks, with equal arguments.
    """
    check_model(model)
    given = load_config(config)
    init_distributed()
    device = default_device(local_rank())
    if device.type == "cpu":
        keep_freed_memory()
    watchdog = start_watchdog(given.desync_timeout_s)
    comm = create_communicator(device)
    resolved = given.resolve(comm.world_size)
    trained = None if model_parameters is None else [_lasting(entry) for entry in model_parameters]
    arguments = Arguments(optimizer, trained, lr_scheduler, broadcast_buffers)
    resolved = choose_stage(model, resolved, arguments, comm, device)
    check_memory(model, resolved, arguments, comm, device)
    engine = build_engine(model, resolved, arguments, comm, device)
    engine.loaders.collate_fn = collate_fn
    watchdog.watch(engine)
    if training_data is not None:
        engine.dataloader = engine.deepspeed_io(training_data, num_local_io_workers=num_local_io_workers)
    if resolved.dump_state and comm.rank == 0:
        _dump_state(engine)
    return engine


def _lasting(entry: Any) -> Any:
    """A param group whose parameters can be read more than once; anything else as it is."""
    members = entry.get("params") if isinstance(entry, dict) else None
    return entry if members is None or isinstance(members, torch.Tensor) else {**entry, "params": list(members)}


def _dump_state(engine: Engine) -> None:
    print(f"{engine!r}\n{json.dumps(engine.config.model_dump(mode='json'), indent=2, default=str)}", flush=True)
