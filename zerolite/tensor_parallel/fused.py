"""Fused column-parallel layers (such as query, key and value in one): ranges of their shards."""

from __future__ import annotations

from typing import Any

from torch import nn

from zerolite.tensor_parallel.owners import FUSED_ATTENTION, SEPARATE_ATTENTION, Layer, Owner
from zerolite.tensor_parallel.plan import TensorPlanError

FUSED_GATE = "gate_up_proj gate_up w12 w13 wi_fused up_gate fc1_gate".split()
FUSED_KEY_VALUE = "kv kv_proj to_kv key_value c_kv w_kv wkv".split()

# Hugging Face's attention, by the folder of its model. What is neither here nor there has to be said.
_CONTIGUOUS_HEADS = "gpt_neox gpt_neox_japanese gpt_bigcode persimmon falcon bloom".split()  # [heads, 3, head width]
_ONE_BEHIND_THE_OTHER = "gpt2 imagegpt decision_transformer openai phi3 phi4_multimodal modernbert mpt".split()


def column_sizes(layer: Layer, owner: Owner | None) -> tuple[list[int], str]:
    """The sizes of the parts of a column, each of which is cut, and what they are ("" if there is one part and nothing
    to say). owner: None for a column whose outputs are gathered. Raises TensorPlanError where the parts cannot be
    told."""
    if layer.style.parts is not None:
        given = _given_parts(layer, layer.style.parts)
        if owner is not None:
            _check_given(layer, owner, given)
        return given, "as the plan says"
    return ([layer.outputs], "") if owner is None else _inferred(layer, owner)


def _check_given(layer: Layer, owner: Owner, given: list[int]) -> None:
    """Raise TensorPlanError if ``given`` contradicts what is known of the layer: outputs that belong together would be
    on different ranks, and nothing else would show it."""
    kind = type(owner.holder_of(layer))
    alone = layer.last_name in SEPARATE_ATTENTION or {row.inputs for row in _rows_of(layer, owner)} == {layer.outputs}
    if not (_from_library(kind) or alone):
        return
    try:
        known, why = ([layer.outputs], "") if alone else _inferred(layer, owner)
    except TensorPlanError:
        return  # it is unknown, so the user has to say
    if given != known:
        how = why or "one layer, of whose outputs each rank has a run"
        raise TensorPlanError(
            f"expected parts {known} of '{layer.name}', which {kind.__name__} reads as {how}, got {given}: ranks would "
            'compute with outputs that do not belong together; remove "parts" from its style'
        )


def _rows_of(layer: Layer, owner: Owner) -> list[Layer]:
    """The rows beside ``layer``, or else all of ``owner``."""
    return [row for row in owner.rows if row.parent == layer.parent] or owner.rows


def _inferred(layer: Layer, owner: Owner) -> tuple[list[int], str]:
    """Infer what :func:`column_sizes` returns, where the plan does not say it."""
    near = {row.inputs for row in _rows_of(layer, owner)}
    others = [one for one in owner.columns if one.parent == layer.parent and one is not layer]
    thirds = layer.outputs == 3 * layer.inputs and layer.outputs not in near and layer.inputs in near
    if layer.last_name in FUSED_ATTENTION or thirds:
        has_query = any(one.last_name in SEPARATE_ATTENTION and one.outputs in near for one in others)
        return _halves(layer) if has_query else _attention(layer, owner.holder_of(layer), near)
    if layer.last_name in FUSED_KEY_VALUE:
        return _halves(layer)
    gate = layer.outputs % 2 == 0 and layer.outputs // 2 in near and layer.outputs not in near and not others
    if layer.last_name in FUSED_GATE or gate:
        return [layer.outputs // 2] * 2, "gate and up"
    if layer.outputs > max(near) and layer.last_name not in SEPARATE_ATTENTION:
        raise TensorPlanError(
            f"expected as many outputs of the column '{layer.name}' as the row reads inputs, {sorted(near)}, got "
            f'{layer.outputs}; give it the style {{"style": "column", "parts": [...]}} with the sizes of what is fused '
            "in it, if these can be divided",
            whole=layer.parent,
        )
    return [layer.outputs], ""


def check_family(owner: Owner) -> None:
    """Raise TensorPlanError for Hugging Face's attention whose bias knows all heads."""
    for holder in owner.holders.values():
        kind = type(holder)
        family = _family(kind)
        config: Any = getattr(holder, "config", None)
        biased = family in ("bloom", "mpt") or (family == "falcon" and getattr(config, "alibi", False))
        if biased and owner.is_attention:
            raise TensorPlanError(
                f"expected attention that computes each head by itself, got {kind.__name__} in '{owner.name}', whose "
                "model makes a bias (ALiBi) of all heads: it cannot be cut, but its feed-forward layers can",
                whole=owner.name,
            )


def _from_library(kind: type[nn.Module]) -> bool:
    return kind.__module__.startswith("transformers.models.")


def _family(kind: type[nn.Module]) -> str:
    """The folder of a model of transformers, "" for other classes."""
    return kind.__module__.split(".")[2] if _from_library(kind) else ""


def _halves(layer: Layer) -> tuple[list[int], str]:
    if layer.outputs % 2:
        raise TensorPlanError(
            f"expected key and value in '{layer.name}', as its name says, got {layer.outputs} outputs"
        )
    return [layer.outputs // 2] * 2, "key and value"


def _attention(layer: Layer, holder: nn.Module, reads: set[int]) -> tuple[list[int], str]:
    name, family = type(holder).__name__, _family(type(holder))
    grouped = bool(getattr(holder, "new_decoder_architecture", False))  # Falcon's: some queries, their key and value
    shared = bool(getattr(holder, "multi_query", False)) and not grouped
    if family in _CONTIGUOUS_HEADS and not shared and (grouped or layer.outputs == 3 * layer.inputs):
        return [layer.outputs], f"by heads, which are contiguous in {name}"
    if family and not shared and family not in _ONE_BEHIND_THE_OTHER:
        raise TensorPlanError(
            f"expected to know how {name} arranges query, key and value in '{layer.name}', got a class that is not "
            'known; if they are one behind the other, say it with the style {"style": "column", "parts": 3}, and with '
            '"parts": 1 if each head\'s are; else it cannot be cut',
            whole=layer.parent,
        )
    for query in sorted(reads, key=lambda width: (width != layer.inputs, width)):
        rest = layer.outputs - query
        if rest > 0 and rest % 2 == 0 and rest // 2 <= query:
            return [query, rest // 2, rest // 2], "query, key and value"
    if layer.outputs in reads:
        return [layer.outputs], ""
    raise TensorPlanError(
        f"expected query, key and value in '{layer.name}', as its name says, with a query of the {sorted(reads)} "
        f'inputs that the row reads, got {layer.outputs} outputs; write {{"style": "column", "parts": [query, key, '
        "value]} with their sizes"
    )


def _given_parts(layer: Layer, given: int | tuple[int, ...]) -> list[int]:
    if isinstance(given, int):
        if layer.outputs % given:
            raise TensorPlanError(
                f"expected {given} parts of equal size in '{layer.name}', got {layer.outputs} outputs"
            )
        return [layer.outputs // given] * given
    if sum(given) != layer.outputs:
        raise TensorPlanError(
            f"expected parts of '{layer.name}' that add up to its {layer.outputs} outputs, got {list(given)}, which "
            f"add up to {sum(given)}"
        )
    return list(given)
