"""``deepspeed.initialize``, ``deepspeed.tp_model_init`` and ``deepspeed.add_config_arguments``."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import zerolite
from zerolite.comm import collective
from zerolite.compat.deepspeed.comm import init_distributed
from zerolite.compat.deepspeed.pipe import PipelineModule
from zerolite.compat.deepspeed.runtime.config import is_stage3, read_config, with_accelerates_replicas
from zerolite.compat.deepspeed.runtime.engine import DeepSpeedEngine
from zerolite.compat.deepspeed.utils import z3_leaf_module
from zerolite.compat.deepspeed.utils.groups import SequenceGroups
from zerolite.compat.deepspeed.utils.logging import log_dist, warn_once
from zerolite.config.values import as_number

_DEFAULT_PORT = 29500


@collective
def initialize(
    args: object = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: object = None,
    lr_scheduler: object = None,
    distributed_port: int = _DEFAULT_PORT,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: object = None,
    mesh_param: object = None,
    config_params: object = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Make an engine of ``model`` as :func:`zerolite.initialize` does, with DeepSpeed's arguments.

    Args:
        args: may have the path of the config as its attribute ``deepspeed_config``.
        mpu: what ``UlyssesSPAttentionHF.register_with_transformers`` has returned.
        config: the config in DeepSpeed's schema.
        config_params: older name of ``config``.
        optimizer: used in place of the config's.
        lr_scheduler: used if the config has no schedule.

    Returns:
        The engine, its optimizer, its loader of ``training_data``, and its schedule. Each is None if there is none.

    Raises:
        ValueError: zerolite does not support an argument.
        ConfigError: the config is wrong.
    """
    _check_arguments(model, mpu, mesh_param)
    settings = read_config(_config_of(args, config, config_params))
    if dist_init_required is not False:
        init_distributed(distributed_port=distributed_port)
    values = _with_deepspeeds_defaults(settings.zerolite, model, mpu)
    model_parameters, lr_scheduler = _resolve_conflicts(values, optimizer, model_parameters, lr_scheduler)
    engine = zerolite.initialize(
        model,
        values,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
    )
    wrapped = DeepSpeedEngine(engine, settings)
    log_dist(f"DeepSpeed info: provided by zerolite {zerolite.__version__}, {engine!r}", ranks=[0])
    return wrapped, wrapped.optimizer if engine.optimizer else None, wrapped.training_dataloader, wrapped.lr_scheduler


def _resolve_conflicts(values: dict[str, object], optimizer: object, parameters: Any, schedule: Any) -> tuple[Any, Any]:
    """Choose between arguments and config as DeepSpeed does. Remove unused blocks, and return the used arguments."""
    if optimizer is not None:
        if values.pop("optimizer", None) is not None:
            warn_once("initialize: the optimizer argument is used, not the config's optimizer")
        if isinstance(optimizer, torch.optim.Optimizer):
            parameters = None  # the optimizer has them
    if schedule is not None and values.get("scheduler") is not None:
        warn_once("initialize: the config's schedule is used, not the lr_scheduler argument")
        schedule = None
    if optimizer is None and values.get("optimizer") is None:  # an engine that only evaluates
        parameters = schedule = None
        values.pop("scheduler", None)
    return parameters, schedule


def _config_of(args: object, config: object, config_params: object) -> object:
    """Return the config from one of the three arguments that may have it."""
    path = getattr(args, "deepspeed_config", None)
    sources = [source for source in (config, config_params, path) if source is not None]
    if len(sources) != 1:
        raise ValueError(
            "deepspeed.initialize: expected one config, as config= (or config_params=) or as args.deepspeed_config, "
            f"got {len(sources)}"
        )
    return sources[0]


def _check_arguments(model: object, mpu: object, mesh_param: object) -> None:
    if model is None:
        raise ValueError("deepspeed.initialize: expected a model, got None; pass model=")
    if mpu is not None and not isinstance(mpu, SequenceGroups):
        raise ValueError(f"deepspeed.initialize: expected no mpu, got {mpu!r}; set tensor_parallel.size in the config")
    if mesh_param:
        raise ValueError(
            f"deepspeed.initialize: expected no mesh_param, got {mesh_param!r}; for sequences that ranks share write "
            '"sequence_parallel": {"size": ...} into the config, and "inputs": "parts" in it if your loader cuts them'
        )


def _with_deepspeeds_defaults(settings: dict[str, Any], model: torch.nn.Module, mpu: object) -> dict[str, Any]:
    """Return the config with keys for DeepSpeed's implicit behaviour, and for groups that share sequences.

    A plain ``loss.backward()`` is divided by gradient_accumulation_steps. A save replaces a checkpoint of another run
    with the same tag. accelerate's ``ParallelismConfig`` says which ranks divide states. A PipelineModule sets the
    number of stages. At stage 3, modules marked by ``set_z3_leaf_modules`` are gathered as a unit.
    """
    values = with_accelerates_replicas({"divide_plain_backward": True, **settings})
    values["checkpoint"] = {"overwrite": True, **(values.get("checkpoint") or {})}
    if isinstance(mpu, SequenceGroups):
        block = values.get("sequence_parallel") or {}
        values["sequence_parallel"] = {**block, "size": mpu.size, "inputs": mpu.inputs}
        if values.get("sequence_parallel_size") == mpu.size:
            del values["sequence_parallel_size"]
    if isinstance(model, PipelineModule) and model.num_stages is not None:
        values["pipeline"] = {"stages": model.num_stages, **(values.get("pipeline") or {})}
    names = [name for name, module in model.named_modules() if z3_leaf_module(module)] if is_stage3(values) else []
    if names:
        zero = values["zero_optimization"]
        block = zero.get("leaf_module") or {}
        block = {**block, "names": [*block.get("names", ()), *names]}
        values["zero_optimization"] = {**zero, "leaf_module": block}
    return values


def tp_model_init(
    model: torch.nn.Module, tp_size: int, dtype: torch.dtype, config: object = None, **unsupported: object
) -> torch.nn.Module:
    """Return ``model`` as it is: :func:`initialize` divides its layers. transformers' Trainer calls this before.

    Args:
        model: the model.
        tp_size: what ``tensor_parallel.autotp_size`` in the config says.
        dtype: ignored; the config's precision counts.
        config: the config that ``initialize`` will be given.

    Raises:
        ValueError: the config has another size, or an argument is not supported.
    """
    if unsupported:
        raise ValueError(
            f"deepspeed.tp_model_init: expected no {', '.join(unsupported)}; the config sets the groups of ranks, by "
            "tensor_parallel.autotp_size"
        )
    block = read_config(config).zerolite.get("tensor_parallel") if config is not None else None
    size = as_number(block.get("autotp_size", block.get("size", 1))) if isinstance(block, dict) else 1
    if size != tp_size:
        raise ValueError(
            f"deepspeed.tp_model_init: expected a config with tensor_parallel.autotp_size {tp_size}, which is tp_size, "
            f"got {size}; write it there, and pass the config here and to initialize"
        )
    return model


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's options to a parser: --deepspeed, --deepspeed_config."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="use DeepSpeed; the script itself reads this option")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON config")
    return parser
