"""Plan to propose for a model that brings none, by the names and sizes of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from zerolite.tensor_parallel.fused import FUSED_GATE, FUSED_KEY_VALUE
from zerolite.tensor_parallel.parallel_blocks import FUSED_ATTENTION, SEPARATE_ATTENTION, ParallelBlock
from zerolite.tensor_parallel.plan import TensorPlanError, generalize, is_head, linear_like, matches

_COLUMNS = frozenset(
    (*FUSED_ATTENTION, *SEPARATE_ATTENTION, *FUSED_GATE, *FUSED_KEY_VALUE)
    + tuple("gate_proj up_proj gate up fc1 fc_in c_fc dense_h_to_4h lin1 wi wi_0 wi_1 w1 w3".split())
)
_ROWS = frozenset(
    "o o_proj out_proj c_proj proj dense wo out_lin down_proj down fc2 fc_out dense_4h_to_h lin2 w2".split()
)
# BERT's column and row are in different modules, so their own names say nothing.
_APART = {f"self.{name}": "column" for name in ("query", "key", "value")}
_APART |= {"intermediate.dense": "column", "output.dense": "row"}
_HEADS = ("lm_head", "head", "embed_out")


def propose_plan(
    modules: Mapping[str, nn.Module],
    user_plan: Mapping[str, object],
    read: Callable[[Mapping[str, object]], Sequence[ParallelBlock]],
) -> dict[str, object]:
    """Return patterns and styles that ``read`` accepts, ``user_plan`` included; {} if no names of layers are known.

    Args:
        modules: all modules of the model by name.
        user_plan: patterns that the user has written beside "auto". What they match is not proposed.
        read: returns the parallel blocks of a plan, or raises TensorPlanError.
    """
    plan = _plan_by_names(modules, user_plan)
    while "row" in plan.values():
        try:
            _check_widths(read({**plan, **user_plan}))
            return {**plan, **user_plan}
        except TensorPlanError as error:
            # The error names the module that cannot be sharded, attention for one; the MLP may be.
            refused = generalize(error.unsharded) if error.unsharded else ""
            rest = {
                pattern: style
                for pattern, style in plan.items()
                if (not f"{pattern}.".startswith(f"{refused}.") if refused else style != "vocab")
            }
            if rest == plan:
                break
            plan = rest
    return {}


def _plan_by_names(modules: Mapping[str, nn.Module], user_plan: Mapping[str, object]) -> dict[str, str]:
    """Return the styles of heads, and of the modules all of whose linear layers have known names."""
    plan: dict[str, str] = {}
    groups: dict[str, dict[str, str]] = {}  # styles by pattern, by the pattern of the module that has the layers
    unknown: set[str] = set()
    for name, module in modules.items():
        pattern = generalize(name)
        parent, _, last = pattern.rpartition(".")
        taken = any(matches(key, name) or matches(f"{key}.*", name) for key in user_plan)
        can_be_sharded = linear_like(module) and "weight" in module._parameters and not taken
        style = "column" if last.lower() in _COLUMNS else "row" if last.lower() in _ROWS else None
        if last in _HEADS and can_be_sharded and is_head(module, modules):
            plan[pattern] = "vocab"
        elif style and can_be_sharded:
            groups.setdefault(parent, {})[pattern] = style
        elif style or isinstance(module, nn.Linear) or linear_like(module):
            unknown.add(parent)  # such as the projections of a state space, and adapters
    for parent, styles in groups.items():
        apart = {pattern: _APART.get(".".join(pattern.split(".")[-2:]), "") for pattern in styles}
        if parent in unknown or "expert" in parent.lower():
            continue
        if {"column", "row"} <= set(styles.values()):
            plan |= styles
        elif all(apart.values()):
            plan |= apart
    return plan


def _check_widths(tp_blocks: Sequence[ParallelBlock]) -> None:
    """Raise TensorPlanError for a row without a column that feeds it, or an MLP's column without a row behind it."""
    for tp_block in tp_blocks:
        reads = {row.inputs for row in tp_block.rows}
        parts = {size for layer in tp_block.columns for size in layer.sizes}
        fused = any(layer.last_name in FUSED_ATTENTION for layer in tp_block.columns)
        wrong = [row for row in tp_block.rows if row.inputs not in parts and not fused]
        wrong += [layer for layer in tp_block.columns if not (tp_block.is_attention or reads.issuperset(layer.sizes))]
        if wrong:
            raise TensorPlanError(f"expected a width that fits '{wrong[0].name}'", unsharded=wrong[0].parent or None)
