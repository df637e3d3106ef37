"""Preparation of a model for its grid: this rank's pipeline stage and tensor-parallel shards."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any

import torch

from zerolite.comm import HostGroup, RaiseTogether, Topology
from zerolite.config import ConfigError, ZeroliteConfig
from zerolite.data.micro_batch import LossFunction
from zerolite.diagnostics.rank_comparison import check_equal_on_ranks, describe_config, describe_process, joined
from zerolite.engine.full_state import forbid_partial_state_dicts

if TYPE_CHECKING:
    from zerolite.pipe.prepare import PreparedStage


def parallelize_model(
    model: torch.nn.Module,
    config: ZeroliteConfig,
    topology: Topology,
    device: torch.device,
    loss_fn: LossFunction | None,
) -> tuple[PreparedStage | None, LossFunction | None]:
    """Reduce ``model`` to this rank's pipeline stage and its tensor-parallel shards.

    Returns:
        The prepared stage, None without a pipeline; and the loss function, the given one or the model's.

    Called on all ranks.
    """
    staged: Any = None
    if not topology.trivial:
        described = joined(describe_process(), describe_config(config))
        different = "zerolite.initialize: the ranks hold different configs or versions"
        check_equal_on_ranks(described, topology.world, device, different)
    if topology.pipe.world_size > 1 or getattr(model, "is_pipeline_module", False):
        from zerolite.pipe.prepare import prepare

        staged = prepare(model, config.pipeline, topology, device, loss_fn)
    if topology.tensor.world_size > 1:
        _shard_layers(model, config, topology, device)
    forbid_partial_state_dicts(model, topology)
    if staged is not None:
        loss_fn = staged.loss_fn
    return staged if topology.pipe.world_size > 1 else None, loss_fn


def _shard_layers(model: torch.nn.Module, config: ZeroliteConfig, topology: Topology, device: torch.device) -> None:
    """Shard the layers by the tensor-parallel plan. If the plan is wrong on one stage, all stages raise ValueError. It
    may match nothing on some stages, but not on all."""
    from zerolite import tensor_parallel
    from zerolite.tensor_parallel.plan import no_plan_sentence, unmatched

    stages = topology.pipe.world_size
    unused = RaiseTogether(HostGroup(topology.pipe, "parts"), "zerolite.initialize", ValueError).gather(
        lambda: tensor_parallel.parallelize_module(
            model, config.tensor_parallel, topology.tensor, device, stage=stages > 1
        )
    )
    nowhere = set.intersection(*map(set, unused))
    if nowhere and len(unused) == stages > 1:  # a dry run sees its own stage only, so it cannot tell
        sentence = no_plan_sentence(model) if "auto" in nowhere else f"{unmatched(min(nowhere), ())}, on any stage"
        raise ValueError(f"tensor_parallel.plan: {sentence}")


def keep_local_patterns(model: torch.nn.Module, config: ZeroliteConfig, topology: Topology) -> ZeroliteConfig:
    """Return ``config`` without the patterns that match only modules of other stages.

    A LayerSpec makes its layer on its own stage alone, so the other stages do not have that module. Raises ConfigError
    on all ranks for a pattern that matches on no stage. Called on all ranks.
    """
    if topology.pipe.world_size == 1:
        return config
    given = {
        "fp32_modules": config.fp32_modules,
        "activation_checkpointing.modules": config.activation_checkpointing.modules,
        "torch_autocast.lower_precision_safe_modules": config.torch_autocast.lower_precision_safe_modules or (),
    }
    if not any(given.values()):
        return config
    here = {key: frozenset(p for p in patterns if _some_match(model, p)) for key, patterns in given.items()}
    of_stages = HostGroup(topology.pipe, "parts").gather(here)
    everywhere = {key: frozenset().union(*(of_stage[key] for of_stage in of_stages)) for key in given}
    errors = [
        (key, f'expected patterns of modules in the model, got "{pattern}", which matches none on any stage')
        for key, patterns in given.items()
        for pattern in patterns
        if pattern not in everywhere[key]
    ]
    if errors and len(of_stages) == topology.pipe.world_size:  # a dry run sees its own stage only, so it cannot tell
        raise ConfigError(errors)
    local = {key: tuple(p for p in patterns if p in here[key]) for key, patterns in given.items()}
    checkpointing = {"modules": local["activation_checkpointing.modules"]}
    autocast = {"lower_precision_safe_modules": local["torch_autocast.lower_precision_safe_modules"] or None}
    return config.model_copy(
        update={
            "fp32_modules": local["fp32_modules"],
            "activation_checkpointing": config.activation_checkpointing.model_copy(update=checkpointing),
            "torch_autocast": config.torch_autocast.model_copy(update=autocast),
        }
    )


def _some_match(model: torch.nn.Module, pattern: str) -> bool:
    """Return True if the name of a module, or of its class, matches. Each key has stricter rules of its own, applied
    later."""
    for name, module in model.named_modules(remove_duplicate=False):
        mro = type(module).__mro__
        classes = [text for cls in mro for text in (cls.__qualname__, f"{cls.__module__}.{cls.__qualname__}")]
        names = (name, f".{name}", f"torch.nn.{type(module).__name__}", *classes)
        if name and any(fnmatch.fnmatchcase(text, pattern) for text in names):
            return True
    return False
