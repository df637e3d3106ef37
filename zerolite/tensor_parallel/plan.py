"""Tensor-parallel plan: patterns of module names and styles of sharding.

A pattern is the name of a module. A part ``*`` matches one or more parts of a name, and ``*`` within a part matches any
characters: ``blocks.*.mlp.up``, ``model.layers.*.self_attn.*_proj``. If several patterns match, the one with the most
literal parts is used.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

logger = logging.getLogger("zerolite")


class TensorPlanError(ValueError):
    """The plan and the model do not fit each other.

    Args:
        text: the message without a remedy, which depends on the user's plan: see :meth:`with_advice`.
        add: a pattern and its style to add to the plan.
        unsharded: name of the module to leave unsharded.
    """

    def __init__(self, text: str, *, add: tuple[str, object] | None = None, unsharded: str | None = None) -> None:
        self.text, self.add, self.unsharded = text, add, unsharded
        super().__init__(text + advice(None, add, unsharded))

    def with_advice(self, plan: object) -> TensorPlanError:
        """Return the same error with the remedy for ``plan``."""
        return type(self)(self.text + advice(plan, self.add, self.unsharded))


def advice(plan: object, add: tuple[str, object] | None = None, unsharded: str | None = None) -> str:
    """Return the end of a sentence: what to write into ``plan``."""
    if unsharded is not None and not is_auto(plan):
        return f"; leave the layers in '{generalize(unsharded)}' out of tensor_parallel.plan"
    if unsharded is not None:
        add = (generalize(unsharded), "whole")
    if add is None:
        return ""
    pattern, style = add
    if is_auto(plan):
        entries = plan.items() if isinstance(plan, Mapping) else ()
        others = {key: value for key, value in entries if key not in ("*", pattern)}
        return f'; write "plan": {json.dumps({"*": "auto", **others, pattern: style}, default=dict)}'
    return f"; add {json.dumps(pattern)}: {json.dumps(style)} to tensor_parallel.plan"


def is_auto(plan: object) -> bool:
    """Return True if ``plan`` is or contains "auto": the plan of the model itself is used too."""
    return plan == "auto" if isinstance(plan, str) else isinstance(plan, Mapping) and plan.get("*") == "auto"


def generalize(name: str) -> str:
    """Return a pattern that matches this module in all blocks: numbers become ``*``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


class NoPlanError(TensorPlanError):
    """Error for "auto" with a model that has no plan."""


@dataclass(frozen=True)
class Style:
    """Sharding style of a layer.

    Attributes:
        sharding: "column", "row", "vocab", "whole", or "partial" (whole, but each rank has a part of the gradient).
        parts: number or sizes of the layers that a column fuses; None if the plan has no parts.
        gather_output: the outputs of a column are gathered.
        input_is_parallel: the input of a row is already this rank's part.
    """

    sharding: str
    parts: int | tuple[int, ...] | None = None
    gather_output: bool = False
    input_is_parallel: bool = True

    def __str__(self) -> str:
        extra = [f"parts {self.parts}"] if self.parts is not None else []
        extra += ["gather_output"] if self.gather_output else []
        extra += [] if self.input_is_parallel else ["of an input that is whole"]
        return f"{self.sharding} ({', '.join(extra)})" if extra else self.sharding


_GATHERED = Style("column", gather_output=True)
_SPLIT = Style("row", input_is_parallel=False)
STYLES = {
    "column": Style("column"),
    "row": Style("row"),
    "vocab": Style("vocab"),
    "whole": Style("whole"),
    "colwise": Style("column"),
    "rowwise": Style("row"),
    "packed_colwise": Style("column", parts=2),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise_split_input": _SPLIT,
    "rowwise_rep": _SPLIT,
    "embedding_rowwise": Style("vocab"),
    "replicate": Style("whole"),
    "replicated": Style("whole"),
    "replicated_with_grad_allreduce": Style("partial"),
}
"""zerolite's styles, then those of transformers.distributed.tensor_parallel (version 5.23) and their older names."""

_REFUSED = {
    "sequence_parallel": 'set "sequence_parallel": true beside the plan instead',
    "embedding_colwise": "shard the embedding by its vocabulary (vocab) instead",
    "packed_rowwise": "expected the input of a row to be one part; write the model with a layer for each part",
}


def parse_style(pattern: str, value: object) -> Style:
    """Return the style for a name, or for a mapping with "style" and perhaps "parts" and "gather_output"."""
    options: Mapping[str, Any] = value if isinstance(value, Mapping) else {"style": value}
    name = options.get("style")
    style = STYLES.get(name) if isinstance(name, str) else None
    if style is None:
        remedy = _REFUSED.get(str(name), f"known are {', '.join(STYLES)}")
        if str(name).startswith(("moe", "ep_", "grouped_gemm", "mla_", "local", "all_reduce")):
            remedy = "layers of experts and of latent attention are not sharded; leave the pattern out"
        raise TensorPlanError(f"expected a style that is supported for '{pattern}', got {name!r}; {remedy}")
    parts, gather = options.get("parts"), options.get("gather_output")
    if (parts is not None or gather is not None) and style.sharding != "column":
        raise TensorPlanError(
            f"expected parts and gather_output with the style column only, got {dict(options)} for '{pattern}'"
        )
    if parts is not None:
        style = replace(style, parts=_read_parts(pattern, parts))
    if gather is not None:
        if not isinstance(gather, bool):
            raise TensorPlanError(f"expected true or false as gather_output of '{pattern}', got {gather!r}")
        style = replace(style, gather_output=gather)
    return style


def _read_parts(pattern: str, parts: object) -> int | tuple[int, ...]:
    if isinstance(parts, int) and not isinstance(parts, bool) and parts > 0:
        return parts
    if isinstance(parts, Sequence) and not isinstance(parts, str) and parts:
        if all(isinstance(part, int) and not isinstance(part, bool) and part > 0 for part in parts):
            return tuple(parts)
    raise TensorPlanError(f"expected a number of parts or a list of their sizes as parts of '{pattern}', got {parts!r}")


def matches(pattern: str, name: str) -> bool:
    return _matches(pattern.split("."), name.split("."))


def _matches(pattern: Sequence[str], name: Sequence[str]) -> bool:
    if not pattern or not name:
        return not pattern and not name
    if pattern[0] == "*":
        return any(_matches(pattern[1:], name[taken:]) for taken in range(1, len(name) + 1))
    return fnmatch.fnmatchcase(name[0], pattern[0]) and _matches(pattern[1:], name[1:])


def specificity(pattern: str) -> tuple[int, int]:
    """Return a larger key for a more specific pattern: its literal parts, then its literal characters."""
    parts = pattern.split(".")
    return sum("*" not in part for part in parts), sum(len(part) for part in parts) - pattern.count("*")


@dataclass(frozen=True)
class Match:
    """Style of a module (for "whole" and "partial" also of a parameter), and the pattern that it comes from."""

    style: Style
    pattern: str


def resolve(
    plan: Mapping[str, Style], names: Iterable[str], optional: bool = False
) -> tuple[dict[str, Match], list[str]]:
    """Find the names that each pattern of ``plan`` matches, and the patterns that match none.

    Raises TensorPlanError if two equally specific patterns give a name different styles, and unless ``optional`` for
    patterns that match none.
    """
    by_name: dict[str, Match] = {}
    all_names = list(names)
    unused = []
    for pattern, style in plan.items():
        hits = [name for name in all_names if matches(pattern, name)]
        if not hits:
            unused.append(pattern)
        for name in hits:
            before = by_name.get(name)
            new, old = specificity(pattern), specificity(before.pattern) if before else (-1, -1)
            if before is not None and new == old and style != before.style:
                raise TensorPlanError(
                    f"expected one style for '{name}', got {before.style} from '{before.pattern}' and {style} from "
                    f"'{pattern}'; remove one of the two, or make one more specific"
                )
            if new > old:
                by_name[name] = Match(style, pattern)
    if unused and not optional:
        raise TensorPlanError("; ".join(unmatched(pattern, all_names) for pattern in unused))
    return by_name, unused


def unmatched(pattern: str, names: Iterable[str]) -> str:
    """Return the message for a pattern that matches no module."""
    patterns = dict.fromkeys(generalize(name) for name in names)
    near = difflib.get_close_matches(pattern, [name for name in patterns if name], n=3, cutoff=0.5)
    hint = f"the nearest names are {', '.join(repr(name) for name in near)}" if near else _examples(patterns)
    return f"expected the name or pattern of modules of the model, got '{pattern}', which matches nothing; {hint}"


def _examples(names: Iterable[str]) -> str:
    some = [name for name in names if name][:8]
    return f"the model has {', '.join(repr(name) for name in some)}" if some else "the model has no submodules"


def is_container(module: nn.Module) -> bool:
    """Return True for a module that is not called itself, only its members: nn.ModuleList and the like."""
    return type(module).forward is nn.Module.forward


def linear_like(module: nn.Module) -> bool:
    """Return True for nn.Linear, and for Hugging Face's Conv1D, which is a linear layer with a transposed weight."""
    if isinstance(module, nn.Linear):
        module_class = type(module)
        # Falcon's own class only rounds between the product and the bias.
        falcon = module_class.__name__ == "FalconLinear" and module_class.__module__.startswith("transformers.")
        return module_class.forward is nn.Linear.forward or falcon
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def linear_shape(module: nn.Module) -> tuple[bool, int, int]:
    """Return True if the weight is [inputs, outputs], and both sizes."""
    if isinstance(module, nn.Linear):
        return False, module.in_features, module.out_features
    return True, int(module.nx), int(module.nf)  # type: ignore[arg-type]


def embedding_like(module: nn.Module) -> bool:
    """Return True for nn.Embedding, and for a class whose forward only changes the result of nn.Embedding's."""
    if not isinstance(module, nn.Embedding):
        return False
    forward = type(module).forward
    # The names in its byte code show if it calls super().forward() and does not look up the weight by itself.
    used = set(forward.__code__.co_names)
    calls = {"super", "forward"} <= used and "embedding" not in used and ("weight" not in used or "dtype" in used)
    return forward is nn.Embedding.forward or calls


# -------------------------------------------------------------------- "auto": the plan of the model itself

_EXPERTS = ("moe_", "ep_", "grouped_gemm")
_GATHERED_HEADS = ("colwise_gather_output", "colwise_rep")


def auto_plan(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, Style]:
    """Return the patterns and styles of Hugging Face models in ``model``: ``config.base_model_tp_plan``, ``_tp_plan``.

    Patterns may match nothing. Raises NoPlanError if no module has a plan.
    """
    plan: dict[str, Style] = {}
    inside: list[str] = []
    for name, module in modules.items():
        if any(not outer or name.startswith(f"{outer}.") for outer in inside):
            continue
        styles = _styles_of(module)
        if styles:
            inside.append(name)
        of_experts = tuple(f"{pattern}." for pattern, style in styles.items() if style.startswith(_EXPERTS))
        for pattern, style in styles.items():
            full_name = f"{name}.{pattern}" if name else pattern
            target = modules.get(full_name)
            if style in _GATHERED_HEADS and target is not None and is_head(target, modules):
                plan[full_name] = Style("vocab")
            elif pattern.startswith(of_experts):
                continue  # a weight in them
            elif style.startswith(_EXPERTS):
                logger.info(
                    "tensor_parallel: experts ('%s') stay whole; expert_parallel spreads them over ranks", full_name
                )
            else:
                plan[full_name] = parse_style(full_name, style)
    if not plan:
        raise NoPlanError(no_plan_sentence(model))
    return plan


def no_plan_sentence(model: nn.Module) -> str:
    """Return the message for a model without a plan."""
    return (
        'expected a model that brings a plan (base_model_tp_plan or _tp_plan) for tensor_parallel.plan "auto", got '
        f"{type(model).__name__}, which brings none; write the patterns of its layers, as "
        '{"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"} (docs/tensor-parallelism.md has those of GPT-2, OPT '
        "and BERT)"
    )


def _styles_of(module: nn.Module) -> dict[str, str]:
    config = module.__dict__.get("config")
    base = getattr(config, "base_model_tp_plan", None) or {}
    prefix = getattr(module, "base_model_prefix", "")
    inner = module._modules.get(prefix) if isinstance(prefix, str) else None
    styles = {f"{prefix}.{pattern}" if inner is not None else pattern: style for pattern, style in base.items()}
    styles |= getattr(module, "_tp_plan", None) or {}
    return {str(pattern): str(style) for pattern, style in styles.items()}


def is_head(module: nn.Module, modules: Mapping[str, nn.Module]) -> bool:
    """Return True for a layer whose outputs are logits over the vocabulary of an embedding."""
    return linear_like(module) and any(
        isinstance(other, nn.Embedding) and linear_shape(module)[1:] == (other.embedding_dim, other.num_embeddings)
        for other in modules.values()
    )
