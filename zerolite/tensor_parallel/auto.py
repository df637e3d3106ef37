"""Automatic tensor-parallel plan: the one that the model brings."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import nn

from zerolite.tensor_parallel.plan import NoPlan, Style, linear_like, parse_style

logger = logging.getLogger("zerolite")

_EXPERTS = ("moe_", "ep_", "grouped_gemm")
_HEADS_OF_MODELS = ("colwise_gather_output", "colwise_rep")


def auto_plan(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, Style]:
    """Patterns and styles of Hugging Face's models in ``model``: their ``config.base_model_tp_plan`` and ``_tp_plan``.

    Patterns may match nothing. Raises NoPlan if no module brings a plan.
    """
    plan: dict[str, Style] = {}
    inside: list[str] = []
    for name, module in modules.items():
        if any(not outer or name.startswith(f"{outer}.") for outer in inside):
            continue
        words = _words_of(module)
        if words:
            inside.append(name)
        for pattern, word in words.items():
            place = f"{name}.{pattern}" if name else pattern
            target = modules.get(place)
            if word in _HEADS_OF_MODELS and target is not None and _is_head(target, modules):
                plan[place] = Style("vocab")
            elif word.startswith(_EXPERTS):
                logger.info("tensor_parallel: experts ('%s') stay whole on every rank", place)
            else:
                plan[place] = parse_style(place, word)
    if not plan:
        raise NoPlan(no_plan(model))
    return plan


def no_plan(model: nn.Module) -> str:
    """The sentence about a model that brings no plan."""
    return (
        'expected a model that brings a plan (base_model_tp_plan or _tp_plan) for tensor_parallel.plan "auto", got '
        f"{type(model).__name__}, which brings none; write the patterns of its layers, as "
        '{"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}'
    )


def _words_of(module: nn.Module) -> dict[str, str]:
    config = module.__dict__.get("config")
    base = getattr(config, "base_model_tp_plan", None) or {}
    prefix = getattr(module, "base_model_prefix", "")
    inner = module._modules.get(prefix) if isinstance(prefix, str) else None
    words = {f"{prefix}.{pattern}" if inner is not None else pattern: word for pattern, word in base.items()}
    own = getattr(module, "_tp_plan", None)
    if base or own:
        words.update(own or {})
    return {str(pattern): str(word) for pattern, word in words.items()}


def _is_head(module: nn.Module, modules: Mapping[str, nn.Module]) -> bool:
    """Return True for a layer that gives logits over the vocabulary of an embedding."""
    return linear_like(module) and any(
        isinstance(other, nn.Embedding) and _shape(module) == (other.embedding_dim, other.num_embeddings)
        for other in modules.values()
    )


def _shape(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return int(module.nx), int(module.nf)  # type: ignore[arg-type]
