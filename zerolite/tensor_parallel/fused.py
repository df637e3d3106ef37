"""Fused column-parallel layers (such as query, key and value in one): ranges of their shards."""

from __future__ import annotations

from typing import Any

from torch import nn

from zerolite.tensor_parallel.parallel_blocks import FUSED_ATTENTION, SEPARATE_ATTENTION, Layer, ParallelBlock
from zerolite.tensor_parallel.plan import TensorPlanError

FUSED_GATE = "gate_up_proj gate_up w12 w13 wi_fused up_gate fc1_gate".split()
FUSED_KEY_VALUE = "kv kv_proj to_kv key_value c_kv w_kv wkv".split()

# Hugging Face's attention, by the folder of its model. For families in neither list the plan must give the parts.
_CONTIGUOUS_HEADS = "gpt_neox gpt_neox_japanese gpt_bigcode persimmon falcon bloom".split()  # [heads, 3, head width]
_CONCATENATED = "gpt2 imagegpt decision_transformer openai phi3 phi4_multimodal modernbert mpt".split()


def column_sizes(layer: Layer, tp_block: ParallelBlock | None) -> tuple[list[int], str]:
    """Return the sizes of the fused parts of a column, each of which is sharded, and a description of the parts.

    The description is "" for a single part. Raises TensorPlanError if the parts cannot be inferred.

    Args:
        layer: the column.
        tp_block: its parallel block; None for a column whose outputs are gathered.
    """
    if layer.style.parts is not None:
        plan_sizes = _parts_of_plan(layer, layer.style.parts)
        if tp_block is not None:
            _check_sizes_of_plan(layer, tp_block, plan_sizes)
        return plan_sizes, "as the plan says"
    return ([layer.outputs], "") if tp_block is None else _infer_sizes(layer, tp_block)


def _check_sizes_of_plan(layer: Layer, tp_block: ParallelBlock, plan_sizes: list[int]) -> None:
    """Raise TensorPlanError if ``plan_sizes`` contradicts the known arrangement of the layer.

    Outputs that belong together would be on different ranks, and no other check would notice.
    """
    module_class = type(tp_block.module_of(layer))
    read = {row.inputs for row in _rows_of(layer, tp_block)}
    alone = layer.last_name in SEPARATE_ATTENTION or read == {layer.outputs}
    if not (_from_library(module_class) or alone):
        return
    try:
        known, why = ([layer.outputs], "") if alone else _infer_sizes(layer, tp_block)
    except TensorPlanError:
        return  # the arrangement is unknown, so the user's is used
    if plan_sizes != known:
        how = why or "one layer, each rank having consecutive outputs"
        raise TensorPlanError(
            f"expected parts {known} of '{layer.name}', which {module_class.__name__} reads as {how}, got "
            f'{plan_sizes}: ranks would compute with outputs that do not belong together. Remove "parts" from its style'
        )


def _rows_of(layer: Layer, tp_block: ParallelBlock) -> list[Layer]:
    """Return the rows beside ``layer``, or else all rows of ``tp_block``."""
    return [row for row in tp_block.rows if row.parent == layer.parent] or tp_block.rows


def _infer_sizes(layer: Layer, tp_block: ParallelBlock) -> tuple[list[int], str]:
    """Infer the result of :func:`column_sizes` for a plan without parts."""
    near = {row.inputs for row in _rows_of(layer, tp_block)}
    others = [one for one in tp_block.columns if one.parent == layer.parent and one is not layer]
    thirds = layer.outputs == 3 * layer.inputs and layer.outputs not in near and layer.inputs in near
    if layer.last_name in FUSED_ATTENTION or thirds:
        has_query = any(one.last_name in SEPARATE_ATTENTION and one.outputs in near for one in others)
        return _key_and_value(layer) if has_query else _attention(layer, tp_block.module_of(layer), near)
    if layer.last_name in FUSED_KEY_VALUE:
        return _key_and_value(layer)
    gate = layer.outputs % 2 == 0 and layer.outputs // 2 in near and layer.outputs not in near and not others
    if layer.last_name in FUSED_GATE or gate:
        return [layer.outputs // 2] * 2, "gate and up"
    if layer.outputs > max(near) and layer.last_name not in SEPARATE_ATTENTION:
        raise TensorPlanError(
            f"expected as many outputs of the column '{layer.name}' as the row reads inputs, {sorted(near)}, got "
            f'{layer.outputs}; give it the style {{"style": "column", "parts": [...]}} with the sizes of the layers '
            "that are fused in it, if these can be divided",
            unsharded=layer.parent,
        )
    return [layer.outputs], ""


def check_family(tp_block: ParallelBlock) -> None:
    """Raise TensorPlanError for Hugging Face's attention with a bias that is computed for all heads at once."""
    for inner in tp_block.inner_modules.values():
        module_class = type(inner)
        family = _family(module_class)
        config: Any = getattr(inner, "config", None)
        biased = family in ("bloom", "mpt") or (family == "falcon" and getattr(config, "alibi", False))
        if biased and tp_block.is_attention:
            raise TensorPlanError(
                f"expected attention that computes each head by itself, got {module_class.__name__} in "
                f"'{tp_block.name}', whose model computes a bias (ALiBi) of all heads: it cannot be sharded, but its "
                "MLP layers can",
                unsharded=tp_block.name,
            )


def _from_library(module_class: type[nn.Module]) -> bool:
    return module_class.__module__.startswith("transformers.models.")


def _family(module_class: type[nn.Module]) -> str:
    """Return the folder of a model of transformers; "" for other classes."""
    return module_class.__module__.split(".")[2] if _from_library(module_class) else ""


def _key_and_value(layer: Layer) -> tuple[list[int], str]:
    if layer.outputs % 2:
        raise TensorPlanError(
            f"expected key and value in '{layer.name}', as its name says, got {layer.outputs} outputs"
        )
    return [layer.outputs // 2] * 2, "key and value"


def _attention(layer: Layer, inner: nn.Module, reads: set[int]) -> tuple[list[int], str]:
    name, family = type(inner).__name__, _family(type(inner))
    grouped = bool(getattr(inner, "new_decoder_architecture", False))  # Falcon's: some queries, their key and value
    shared = bool(getattr(inner, "multi_query", False)) and not grouped
    if family in _CONTIGUOUS_HEADS and not shared and (grouped or layer.outputs == 3 * layer.inputs):
        return [layer.outputs], f"by heads, which are contiguous in {name}"
    if family and not shared and family not in _CONCATENATED:
        raise TensorPlanError(
            f"expected a known arrangement of query, key and value in '{layer.name}', got class {name}, whose "
            'arrangement is unknown; write the style {"style": "column", "parts": 3} if they follow each other, or '
            '"parts": 1 if those of each head do. Any other arrangement cannot be sharded',
            unsharded=layer.parent,
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


def _parts_of_plan(layer: Layer, parts: int | tuple[int, ...]) -> list[int]:
    if isinstance(parts, int):
        if layer.outputs % parts:
            raise TensorPlanError(
                f"expected {parts} parts of equal size in '{layer.name}', got {layer.outputs} outputs"
            )
        return [layer.outputs // parts] * parts
    if sum(parts) != layer.outputs:
        raise TensorPlanError(
            f"expected parts of '{layer.name}' that add up to its {layer.outputs} outputs, got {list(parts)}, which "
            f"add up to {sum(parts)}"
        )
    return list(parts)
