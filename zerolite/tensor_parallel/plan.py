"""Tensor-parallel plan: patterns of module names and styles of sharding.

A pattern is a module's name in which ``*`` as a whole part stands for one or more parts, and within a part for any
characters: ``blocks.*.mlp.up``, ``model.layers.*.self_attn.*_proj``. Where several match, the one with most literal
parts counts.
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
        text: what is wrong.
        add: a pattern and its style that would help.
        whole: the module that is better left unsharded.

    The remedy depends on the plan that the user has written: see :meth:`beside`.
    """

    def __init__(self, text: str, *, add: tuple[str, object] | None = None, whole: str | None = None) -> None:
        self.text, self.add, self.whole = text, add, whole
        super().__init__(text + advice(None, add, whole))

    def beside(self, plan: object) -> TensorPlanError:
        """Return the same error with the remedy for the author of ``plan``."""
        return type(self)(self.text + advice(plan, self.add, self.whole))


def advice(plan: Any, add: tuple[str, object] | None = None, whole: str | None = None) -> str:
    """Return the end of a sentence that says what to write into ``plan``."""
    if whole is not None and not by_itself(plan):
        return f"; leave the layers in '{general(whole)}' out of tensor_parallel.plan"
    if whole is not None:
        add = (general(whole), "whole")
    if add is None:
        return ""
    pattern, style = add
    if by_itself(plan):
        own = {} if isinstance(plan, str) else {key: value for key, value in plan.items() if key not in ("*", pattern)}
        return f'; write "plan": {json.dumps({"*": "auto", **own, pattern: style}, default=dict)}'
    return f"; add {json.dumps(pattern)}: {json.dumps(style)} to tensor_parallel.plan"


def by_itself(plan: object) -> bool:
    """Return True if the model itself says which layers are sharded, in addition to ``plan``."""
    return plan == "auto" if isinstance(plan, str) else isinstance(plan, Mapping) and plan.get("*") == "auto"


def general(name: str) -> str:
    """Return a pattern for this module in all blocks: numbers become ``*``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


class NoPlan(TensorPlanError):
    """Error for a model that brings no plan."""


@dataclass(frozen=True)
class Style:
    """Sharding style of a layer.

    Attributes:
        kind: "column", "row", "vocab", "whole", or "partial" (whole, but each rank sees only a part of its gradient).
        parts: number or sizes of the layers that a column fuses; None if the plan does not say.
        gather_output: the outputs of a column are gathered.
        input_is_parallel: the input of a row is this rank's part already.
    """

    kind: str
    parts: int | tuple[int, ...] | None = None
    gather_output: bool = False
    input_is_parallel: bool = True

    def __str__(self) -> str:
        extra = [f"parts {self.parts}"] if self.parts is not None else []
        extra += ["gather_output"] if self.gather_output else []
        extra += [] if self.input_is_parallel else ["of an input that is whole"]
        return f"{self.kind} ({', '.join(extra)})" if extra else self.kind


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
"""Ours, then those of transformers.distributed.tensor_parallel (version 5.23) and their older names."""

_REFUSED = {
    "sequence_parallel": 'set "sequence_parallel": true beside the plan instead',
    "embedding_colwise": "shard the embedding by its vocabulary (vocab) instead",
    "packed_rowwise": "expected the input of a row to be one part; write the model with a layer for each part",
}


def parse_style(pattern: str, given: object) -> Style:
    """Return the style for a word, or for a mapping with "style" and perhaps "parts" and "gather_output"."""
    options: Mapping[str, Any] = given if isinstance(given, Mapping) else {"style": given}
    word = options.get("style")
    style = STYLES.get(word) if isinstance(word, str) else None
    if style is None:
        advice = _REFUSED.get(str(word), f"known are {', '.join(STYLES)}")
        if str(word).startswith(("moe", "ep_", "grouped_gemm", "mla_", "local", "all_reduce")):
            advice = "layers of experts and of latent attention are not sharded; leave the pattern out"
        raise TensorPlanError(f"expected a style that is supported for '{pattern}', got {word!r}; {advice}")
    parts, gather = options.get("parts"), options.get("gather_output")
    if (parts is not None or gather is not None) and style.kind != "column":
        raise TensorPlanError(
            f"expected parts and gather_output with the style column only, got {dict(options)} for '{pattern}'"
        )
    if parts is not None:
        style = replace(style, parts=_parts(pattern, parts))
    if gather is not None:
        if not isinstance(gather, bool):
            raise TensorPlanError(f"expected true or false as gather_output of '{pattern}', got {gather!r}")
        style = replace(style, gather_output=gather)
    return style


def _parts(pattern: str, parts: object) -> int | tuple[int, ...]:
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
    """Style of a module (or of a parameter, for "whole" and "partial"), and the pattern that gives it."""

    style: Style
    pattern: str


def resolve(
    plan: Mapping[str, Style], names: Iterable[str], optional: bool = False
) -> tuple[dict[str, Match], list[str]]:
    """Find the names that each pattern of ``plan`` matches, and the patterns that match none.

    Raises TensorPlanError if two equally specific patterns give a name different styles, and for patterns that match
    none unless ``optional``.
    """
    found: dict[str, Match] = {}
    known = list(names)
    unused = []
    for pattern, style in plan.items():
        hits = [name for name in known if matches(pattern, name)]
        if not hits:
            unused.append(pattern)
        for name in hits:
            before = found.get(name)
            new, old = specificity(pattern), specificity(before.pattern) if before else (-1, -1)
            if before is not None and new == old and style != before.style:
                raise TensorPlanError(
                    f"expected one style for '{name}', got {before.style} from '{before.pattern}' and {style} from "
                    f"'{pattern}'; remove one of the two, or make one more specific"
                )
            if new > old:
                found[name] = Match(style, pattern)
    if unused and not optional:
        raise TensorPlanError("; ".join(unmatched(pattern, known) for pattern in unused))
    return found, unused


def unmatched(pattern: str, names: Iterable[str]) -> str:
    """Return a sentence about a pattern that matches no module."""
    patterns = dict.fromkeys(general(name) for name in names)
    near = difflib.get_close_matches(pattern, [name for name in patterns if name], n=3, cutoff=0.5)
    hint = f"the nearest names are {', '.join(repr(name) for name in near)}" if near else _examples(patterns)
    return f"expected the name or pattern of modules of the model, got '{pattern}', which matches nothing; {hint}"


def _examples(names: Iterable[str]) -> str:
    some = [name for name in names if name][:8]
    return f"the model has {', '.join(repr(name) for name in some)}" if some else "the model has no submodules"


def is_container(module: nn.Module) -> bool:
    """True for a module whose members are called and not itself: nn.ModuleList and its like."""
    return type(module).forward is nn.Module.forward


def linear_like(module: nn.Module) -> bool:
    """True for nn.Linear, and for Hugging Face's Conv1D, which is a linear layer with a transposed weight."""
    if isinstance(module, nn.Linear):
        kind = type(module)
        falcon = kind.__name__ == "FalconLinear" and kind.__module__.startswith("transformers.")  # rounds in between
        return kind.forward is nn.Linear.forward or falcon
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def linear_shape(module: nn.Module) -> tuple[bool, int, int]:
    """Return True if the weight is [inputs, outputs], and both sizes."""
    if isinstance(module, nn.Linear):
        return False, module.in_features, module.out_features
    return True, int(module.nx), int(module.nf)  # type: ignore[arg-type]


def embedding_like(module: nn.Module) -> bool:
    """True for nn.Embedding, and for a class whose forward only changes the result of nn.Embedding's."""
    if not isinstance(module, nn.Embedding):
        return False
    forward = type(module).forward
    # The names in its byte code tell if it calls super().forward() and does not look up the weight by itself.
    used = set(forward.__code__.co_names)
    calls = {"super", "forward"} <= used and "embedding" not in used and ("weight" not in used or "dtype" in used)
    return forward is nn.Embedding.forward or calls


# -------------------------------------------------------------------- "auto": the plan that the model brings

_EXPERTS = ("moe_", "ep_", "grouped_gemm")
_HEADS_OF_MODELS = ("colwise_gather_output", "colwise_rep")


def auto_plan(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, Style]:
    """Return the patterns and styles that Hugging Face models in ``model`` bring: ``config.base_model_tp_plan``,
    ``_tp_plan``.

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
    """Return a sentence about a model that brings no plan."""
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
    """Return True for a layer whose outputs are logits over the vocabulary of an embedding."""
    return linear_like(module) and any(
        isinstance(other, nn.Embedding) and linear_shape(module)[1:] == (other.embedding_dim, other.num_embeddings)
        for other in modules.values()
    )
