"""Matching of a plan's patterns to a model's layers, and checks before the model is changed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from zerolite.comm import Communicator
from zerolite.tensor_parallel import parallel_blocks
from zerolite.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelLayer,
    VocabParallelHead,
)
from zerolite.tensor_parallel.parallel_blocks import Layer, ParallelBlock
from zerolite.tensor_parallel.plan import (
    Match,
    NoPlanError,
    Style,
    TensorPlanError,
    auto_plan,
    embedding_like,
    is_auto,
    linear_like,
    parse_style,
    resolve,
)
from zerolite.tensor_parallel.shard_spec import names_of
from zerolite.zero.stage3.partitioned_parameter import sharded_param_of

logger = logging.getLogger("zerolite")


def check_model(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if sharded_param_of(parameter) is not None:
            raise TensorPlanError(
                f"expected whole parameters to shard, got '{name}', which zero.Init has partitioned already; "
                "build the model outside of zerolite.zero.Init to use tensor_parallel"
            )


def find_matches(
    model: nn.Module, modules: Mapping[str, nn.Module], plan: str | Mapping[str, object], stage: bool
) -> tuple[dict[str, Match], list[str]]:
    """Return the match of each module or parameter by name, and the patterns that match nothing.

    Args:
        model: the model.
        modules: all its modules by name.
        plan: the plan of the config.
        stage: the model is a pipeline stage, so patterns may match nothing.
    """
    names = [name for name in modules if name]
    names += [name for name in _names_on_other_stages(model) if name not in modules]
    used = _used_by_functions(model)
    names += [name for name in used if name not in names]
    if isinstance(plan, str) and any(isinstance(module, TensorParallelLayer) for module in modules.values()):
        return {}, []  # the model's author has written it with tensor-parallel layers
    mapping = {} if isinstance(plan, str) else plan
    styles = {pattern: parse_style(pattern, style) for pattern, style in mapping.items() if (pattern, style) != AUTO}
    by_name, unused = _resolve(styles, model, names, stage)
    if is_auto(plan):
        replicated = tuple(f"{name}." for name, match in by_name.items() if match.style.sharding == "whole")
        rest = [name for name in names if name not in by_name and not name.startswith(replicated)]
        try:
            brought = auto_plan(model, modules)
        except NoPlanError:
            if not (stage and getattr(model, "is_pipeline_module", False)):
                raise  # otherwise a layer that only another stage builds may have a plan
            return by_name, [*unused, "auto"]
        by_name = _resolve(brought, model, rest, True)[0] | by_name
    wrong = [name for name in used if name in by_name and by_name[name].style.sharding not in ("whole", "partial")]
    if wrong:
        raise TensorPlanError(
            f"expected layers whose forward is called, got '{wrong[0]}', which the forward_fn of a TiedLayerSpec uses "
            "in another way; leave it out of tensor_parallel.plan"
        )
    return by_name, unused


AUTO = ("*", "auto")
"""Entry of a plan that adds the plan of the model itself."""


def _resolve(
    plan: Mapping[str, Style], model: nn.Module, names: Sequence[str], optional: bool
) -> tuple[dict[str, Match], list[str]]:
    """Resolve as :func:`resolve` does; the styles "whole" and "partial" may name parameters too."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    layers = {pattern: style for pattern, style in plan.items() if style.sharding not in ("whole", "partial")}
    others = {pattern: style for pattern, style in plan.items() if pattern not in layers}
    of_layers, unused = resolve(layers, names, optional)
    of_others, unused_others = resolve(others, [*names, *parameters], optional)
    both = {**of_layers, **of_others}
    for name in of_layers.keys() & of_others.keys():  # the more specific pattern is used
        patterns = {match.pattern: match.style for match in (of_layers[name], of_others[name])}
        both[name] = resolve(patterns, [name])[0][name]
    return both, [*unused, *unused_others]


def _used_by_functions(model: nn.Module) -> list[str]:
    """Return the tied layers of a PipelineModule that a forward_fn uses without calling them."""
    indices: Any = getattr(model, "first_indices", ())
    specs: Any = getattr(model, "specs", ()) if getattr(model, "is_pipeline_module", False) else ()
    return [f"layers.{indices[at]}" for at, spec in enumerate(specs) if getattr(spec, "forward_fn", None) is not None]


def _names_on_other_stages(model: nn.Module) -> list[str]:
    """Return the modules of the full model, on any stage, whose weight is a parameter of this stage."""
    names = [names_of(parameter) or () for parameter in model.parameters()]
    return [name.removesuffix(".weight") for tied in names for name in tied if name.endswith(".weight")]


def find_layers(by_name: Mapping[str, Match], modules: Mapping[str, nn.Module]) -> list[Layer]:
    """Return the layers to shard, each once. Raises TensorPlanError for layers that cannot be sharded."""
    layers: dict[int, Layer] = {}
    for name, match in by_name.items():
        module = modules.get(name)
        if match.style.sharding in ("whole", "partial") or module is None or isinstance(module, TensorParallelLayer):
            continue
        _check_layer(name, module, match)
        style = Style("vocab") if isinstance(module, nn.Embedding) else match.style
        before = layers.get(id(module))
        if before is not None and before.style != style:
            raise TensorPlanError(
                f"expected one style for the module that is both '{before.name}' and '{name}', got {before.style} and "
                f"{style}; give both names the same style"
            )
        if before is None and module._parameters["weight"] is not None:
            layers[id(module)] = Layer(name, module, style)
    _add_tied(layers, by_name, modules)
    return list(layers.values())


def find_sharded_layers(modules: Mapping[str, nn.Module], comm: Communicator) -> list[ParallelBlock]:
    """Return the blocks of column and row layers that the model's author has written as tensor-parallel layers."""
    layers = []
    for name, module in modules.items():
        if isinstance(module, TensorParallelLayer) and module.comm.world_size != comm.world_size:
            raise TensorPlanError(
                f"expected layers in {comm.world_size} parts, as tensor_parallel.size says, got '{name}' in "
                f"{module.comm.world_size}; make the layers with tensor_ranks({comm.world_size})"
            )
        if isinstance(module, RowParallelLinear):
            layers.append(Layer(name, module, Style("row", input_is_parallel=module.input_is_parallel)))
        elif isinstance(module, ColumnParallelLinear) and not isinstance(module, VocabParallelHead):
            layers.append(Layer(name, module, Style("column", gather_output=module.gather_output)))
    try:
        return parallel_blocks.find_parallel_blocks(layers, modules)
    except TensorPlanError:
        return []  # the author may use a column without a row


def _check_layer(name: str, module: nn.Module, match: Match) -> None:
    sharding = match.style.sharding
    what = f"'{name}' (pattern '{match.pattern}', style {sharding})"
    if parametrize.is_parametrized(module) or "weight" not in module._parameters:
        raise TensorPlanError(f"expected a layer with a weight of its own as {what}, got {_description(module)}")
    if isinstance(module, nn.Embedding) and sharding in ("vocab", "row"):
        if not embedding_like(module):
            raise TensorPlanError(f"expected an nn.Embedding as {what}, got {_description(module)}")
        # VocabParallelEmbedding.forward does not pass these on to F.embedding.
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise TensorPlanError(f"expected an embedding without {option} as {what}; remove it or the pattern")
    elif not linear_like(module) or isinstance(module, nn.Embedding):
        wanted = "nn.Linear or nn.Embedding" if sharding == "vocab" else "nn.Linear"
        raise TensorPlanError(f"expected an {wanted} as {what}, got {_description(module)}")


def _description(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return f"{name}, which keeps query, key and value in one parameter; write attention with nn.Linear layers"
    if hasattr(module, "base_layer") or hasattr(module, "lora_A"):
        return f"{name}, a layer with adapters (LoRA); merge them, or remove the pattern"
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return f"{name}, which has a forward of its own or a weight that is computed"
    return f"{name}; nn.Linear, nn.Embedding and transformers' Conv1D can be sharded"


def _add_tied(layers: dict[int, Layer], by_name: Mapping[str, Match], modules: Mapping[str, nn.Module]) -> None:
    """Add embeddings and heads whose weight is sharded by another layer, on this stage or another.

    Raises TensorPlanError for other modules with a sharded weight, and for different styles.
    """
    styles: dict[int, tuple[str, Style]] = {}
    for layer in layers.values():
        name, style = styles.setdefault(id(layer.module._parameters["weight"]), (layer.name, layer.style))
        if style != layer.style:
            raise TensorPlanError(_DIFFERENT_STYLES.format(style, name, layer.style, layer.name))
    for name, module in modules.items():
        for key, parameter in module._parameters.items():
            if parameter is None or id(module) in layers or isinstance(module, TensorParallelLayer):
                continue
            where, tied = styles.get(id(parameter)) or _style_on_other_stage(parameter, by_name)
            if tied is None:
                continue
            can_be_sharded = embedding_like(module) or linear_like(module)
            if tied.sharding != "vocab" or key != "weight" or not can_be_sharded:
                raise TensorPlanError(_DIFFERENT_STYLES.format(tied, where, "none", name))
            layers[id(module)] = Layer(name, module, tied)
            logger.info("tensor_parallel: '%s' has the weight of '%s' and is sharded with it", name, where)


_DIFFERENT_STYLES = (
    "expected the same style wherever a weight is used, got {} for '{}' and {} for '{}', which has the same weight"
)


def _style_on_other_stage(parameter: nn.Parameter, by_name: Mapping[str, Match]) -> tuple[str, Style | None]:
    for name in names_of(parameter) or ():
        match = by_name.get(name.removesuffix(".weight"))
        if match is not None and match.style.sharding == "vocab":
            return name, match.style
    return "", None
