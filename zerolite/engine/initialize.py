"""``zerolite.initialize``: set up communication, divide the model over its grid, build the engine."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zerolite.comm import (
    Communicator,
    Topology,
    create_communicator,
    create_topology,
    init_distributed,
    local_rank,
)
from zerolite.config import ConfigError, ZeroliteConfig, load_config
from zerolite.data.micro_batch import LossFunction
from zerolite.diagnostics import uncaught
from zerolite.diagnostics.rank_comparison import Description, check_equal_on_ranks
from zerolite.diagnostics.watchdog import start_watchdog
from zerolite.engine.arguments import OptimizerLike
from zerolite.engine.build import Arguments, build_engine, check_model
from zerolite.engine.engine import Engine
from zerolite.engine.parallelize_model import keep_local_patterns, parallelize_model
from zerolite.utils.accelerator import default_device, keep_freed_memory, make_current

logger = logging.getLogger("zerolite")


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
    loss_fn: LossFunction | None = None,
) -> Engine:
    """Make an :class:`~zerolite.engine.engine.Engine` of ``model``. Called on all ranks, with equal arguments.

    If torch.distributed is not running, it is started from the environment. With ``tensor_parallel`` and ``pipeline``,
    only this rank's part stays in ``model``.

    Args:
        model: moved to this process's device. Its ``Parameter`` objects stay; they get rank 0's values, the compute
            dtype of ``config``, and memory in flat buffers.
        config: DeepSpeed's schema as a dict, a path, or JSON or hjson text.
        optimizer: an instance, a class, or a function of parameters; default: ``config["optimizer"]``. Without either
            the parameters are frozen, and the engine only evaluates.
        model_parameters: parameters or param groups to train; default: all that require a gradient.
        training_data: a dataset, for ``engine.dataloader``.
        lr_scheduler: an instance, or a function of the optimizer; default: ``config["scheduler"]``. The engine steps it
            after every update.
        collate_fn: makes a batch of a list of samples, for this engine's loaders.
        broadcast_buffers: send rank 0's buffers before each training forward.
        num_local_io_workers: processes that load ``training_data``; 0 loads in this one.
        loss_fn: function of (outputs, targets) that returns a scalar, for ``engine.train_batch``; None if the model
            computes its loss itself.

    Raises:
        ConfigError: for the config.
        ValueError: for the other arguments.
        RuntimeError: ranks have different models, configs or optimizers.
    """
    check_model(model)
    given = load_config(config)
    device = _start_process()
    watchdog = start_watchdog(given.desync_timeout_s)
    topology = _make_topology(given, create_communicator(device), device)
    resolved = _resolved(given, topology)
    trained = None if model_parameters is None else [_listed_params(entry) for entry in model_parameters]
    arguments = Arguments(optimizer, trained, lr_scheduler, broadcast_buffers, collate_fn)
    staged, loss_fn = parallelize_model(model, resolved, topology, device, loss_fn)
    resolved = keep_local_patterns(model, resolved, topology)
    engine = build_engine(model, resolved, arguments, topology, device, staged=staged, loss_fn=loss_fn)
    watchdog.watch(engine)
    uncaught.watch(model, engine.compute_dtype, topology.world.rank, trains=engine.optimizer is not None)
    if training_data is not None:
        engine.dataloader = engine.deepspeed_io(training_data, num_local_io_workers=num_local_io_workers)
    if resolved.dump_state and topology.data.main:
        print(f"{engine!r}\n{json.dumps(engine.config.model_dump(mode='json'), indent=2, default=str)}", flush=True)
    return engine


def _start_process() -> torch.device:
    """Start torch.distributed if it is not running, and return this process's device."""
    init_distributed()
    device = default_device(local_rank())
    make_current(device)  # also if the user has started torch.distributed
    if device.type == "cpu":
        keep_freed_memory()
    return device


def _make_topology(config: ZeroliteConfig, world: Communicator, device: torch.device) -> Topology:
    """Make the grid of the config. Raises on all ranks if their configs have different grids."""
    pipe, tensor = config.pipeline.stages, config.tensor_parallel.ranks
    facts = {f"config key {key}": {"": str(size)} for key, size in ((_PIPE, pipe), (_TENSOR, tensor))}
    different = "zerolite.initialize: the ranks are to form different grids"
    check_equal_on_ranks(Description(facts), world, device, different)
    try:
        return create_topology(world, device, pipe, tensor)
    except ValueError as error:
        raise ConfigError([(_PIPE if pipe > 1 else _TENSOR, str(error))]) from None


def _resolved(config: ZeroliteConfig, topology: Topology) -> ZeroliteConfig:
    """Warn of keys without effect, and resolve the batch sizes.

    With several dimensions an error says that its world size counts data-parallel ranks only.
    """
    if topology.data.main:
        for path, sentence in config.without_effect:
            logger.warning("%s has no effect: %s", path, sentence)
    try:
        return config.resolve(topology.data.world_size)
    except ConfigError as error:
        if topology.trivial:
            raise
        counted = f"the world size is that of data-parallel ranks: {topology.grid} of {topology.world.world_size}"
        raise ConfigError([(path, f"{sentence} ({counted})") for path, sentence in error.errors]) from None


_PIPE, _TENSOR = "pipeline.stages", "tensor_parallel.size"


def _listed_params(entry: Any) -> Any:
    """Return a param group with a list of parameters, because an iterator can be read only once; others unchanged."""
    members = entry.get("params") if isinstance(entry, dict) else None
    return entry if members is None or isinstance(members, torch.Tensor) else {**entry, "params": list(members)}
