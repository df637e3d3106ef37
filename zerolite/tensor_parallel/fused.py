"""Columns that are several layers in one: in which parts they are cut."""

from __future__ import annotations

from torch import nn

from zerolite.tensor_parallel.owners import FUSED_ATTENTION, SEPARATE_ATTENTION, Layer, Owner
from zerolite.tensor_parallel.plan import PlanError

FUSED_GATE = "gate_up_proj gate_up w12 w13 wi_fused up_gate fc1_gate".split()
FUSED_KEY_VALUE = "kv kv_proj to_kv key_value c_kv w_kv wkv".split()

# Hugging Face's attention, by the beginning of the class's name. What is neither here nor there has to be said.
_CONTIGUOUS_HEADS = ("GPTNeoX", "GPTBigCode")  # [heads, query key value, head width]
_ONE_BEHIND_THE_OTHER = ("GPT2", "ImageGPT", "DecisionTransformer", "Phi3", "Phi4")
_BIASED_BY_HEAD = ("Bloom", "Mpt", "Falcon")


def column_sizes(layer: Layer, owner: Owner | None) -> tuple[list[int], str]:
    """The sizes of the parts of a column, each of which is cut, and what they are ("" if there is one part and nothing
    to say). owner: None for a column whose outputs are gathered. Raises PlanError where the parts cannot be told."""
    if layer.style.parts is not None:
        return _given_parts(layer, layer.style.parts), "as the plan says"
    if owner is None:
        return [layer.outputs], ""
    near = {row.inputs for row in owner.rows if row.parent == layer.parent} or {row.inputs for row in owner.rows}
    others = [one for one in owner.columns if one.parent == layer.parent and one is not layer]
    thirds = layer.outputs == 3 * layer.inputs and layer.outputs not in near and layer.inputs in near
    if layer.last_name in FUSED_ATTENTION or thirds:
        has_query = any(one.last_name in SEPARATE_ATTENTION and one.outputs in near for one in others)
        return _halves(layer) if has_query else _attention(layer, type(owner.holder_of(layer)), near)
    if layer.last_name in FUSED_KEY_VALUE:
        return _halves(layer)
    gate = layer.outputs % 2 == 0 and layer.outputs // 2 in near and layer.outputs not in near and not others
    if layer.last_name in FUSED_GATE or gate:
        return [layer.outputs // 2] * 2, "gate and up"
    if layer.outputs > max(near) and layer.last_name not in SEPARATE_ATTENTION:
        raise PlanError(
            f"expected as many outputs of the column '{layer.name}' as the row reads inputs, {sorted(near)}, got "
            f'{layer.outputs}; write {{"style": "column", "parts": [...]}} with the sizes of what is fused in it'
        )
    return [layer.outputs], ""


def check_family(owner: Owner) -> None:
    """Raise PlanError for Hugging Face's attention whose bias knows all heads."""
    for holder in owner.holders.values():
        kind = type(holder)
        if _from_library(kind) and kind.__name__.startswith(_BIASED_BY_HEAD) and owner.is_attention:
            raise PlanError(
                f"expected attention that computes each head by itself, got {kind.__name__} in '{owner.name}', whose "
                "model makes a bias (ALiBi) or a mask of all heads; it cannot be cut"
            )


def _from_library(kind: type[nn.Module]) -> bool:
    return kind.__module__.startswith("transformers.models.")


def _halves(layer: Layer) -> tuple[list[int], str]:
    if layer.outputs % 2:
        raise PlanError(f"expected key and value in '{layer.name}', as its name says, got {layer.outputs} outputs")
    return [layer.outputs // 2] * 2, "key and value"


def _attention(layer: Layer, kind: type[nn.Module], reads: set[int]) -> tuple[list[int], str]:
    name = kind.__name__
    if _from_library(kind) and name.startswith(_CONTIGUOUS_HEADS) and layer.outputs == 3 * layer.inputs:
        return [layer.outputs], f"by heads, which are contiguous in {name}"
    if _from_library(kind) and not name.startswith(_ONE_BEHIND_THE_OTHER):
        raise PlanError(
            f"expected to know how {name} arranges query, key and value in '{layer.name}', got a class that is not "
            'known; write {"style": "column", "parts": 3} if they are one behind the other, and "parts": 1 if each '
            "head's are"
        )
    for query in sorted(reads, key=lambda width: (width != layer.inputs, width)):
        rest = layer.outputs - query
        if rest > 0 and rest % 2 == 0 and rest // 2 <= query:
            return [query, rest // 2, rest // 2], "query, key and value"
    if layer.outputs in reads:
        return [layer.outputs], ""
    raise PlanError(
        f"expected query, key and value in '{layer.name}', as its name says, with a query of the {sorted(reads)} "
        f'inputs that the row reads, got {layer.outputs} outputs; write {{"style": "column", "parts": [query, key, '
        "value]} with their sizes"
    )


def _given_parts(layer: Layer, given: int | tuple[int, ...]) -> list[int]:
    if isinstance(given, int):
        if layer.outputs % given:
            raise PlanError(f"expected {given} parts of equal size in '{layer.name}', got {layer.outputs} outputs")
        return [layer.outputs // given] * given
    if sum(given) != layer.outputs:
        raise PlanError(
            f"expected parts of '{layer.name}' that add up to its {layer.outputs} outputs, got {list(given)}, which "
            f"add up to {sum(given)}"
        )
    return list(given)
