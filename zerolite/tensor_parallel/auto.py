"""Automatic tensor-parallel plan: the model's own, or one derived from its structure."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping

from torch import nn

from zerolite.tensor_parallel.fused import FUSED_GATE, FUSED_KEY_VALUE
from zerolite.tensor_parallel.owners import FUSED_ATTENTION, SEPARATE_ATTENTION
from zerolite.tensor_parallel.plan import NoPlan, PlanError, Style, is_container, linear_like, parse_style

logger = logging.getLogger("zerolite")

_COLUMNS = {
    *FUSED_ATTENTION,
    *FUSED_GATE,
    *FUSED_KEY_VALUE,
    *SEPARATE_ATTENTION,
    *"up up_proj gate gate_proj fc fc1 c_fc fc_in w1 w3 wi wi_0 wi_1 expand expansion".split(),
    *"dense_h_to_4h linear1 lin1".split(),
}
_ROWS = set(
    "o o_proj out out_proj proj c_proj project projection dense dense_4h_to_h down down_proj fc2 fc_out w2 wo contract "
    "linear2 lin2 to_out out_lin".split()
)
ELEMENTWISE = (
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Softplus, nn.Hardswish),
    *(nn.Dropout, nn.Identity),
)
_EXPERTS = ("moe_", "ep_", "grouped_gemm")
_HEADS_OF_MODELS = ("colwise_gather_output", "colwise_rep")


def auto_plan(model: nn.Module, modules: Mapping[str, nn.Module], said: Collection[str] = ()) -> dict[str, Style]:
    """Patterns and styles; patterns may match nothing. said: modules of which the user has said what is done with
    them. Raises NoPlan if nothing is known, with the reason, and PlanError if it is ambiguous."""
    return _plan_of_the_models(modules) or _plan_of_the_structure(model, modules, said)


def _plan_of_the_models(modules: Mapping[str, nn.Module]) -> dict[str, Style]:
    """Of Hugging Face's models in it: ``config.base_model_tp_plan`` and ``_tp_plan``."""
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
    return plan


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
    """Whether it gives logits over the vocabulary of an embedding."""
    return linear_like(module) and any(
        isinstance(other, nn.Embedding) and _shape(module) == (other.embedding_dim, other.num_embeddings)
        for other in modules.values()
    )


def _shape(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return int(module.nx), int(module.nf)  # type: ignore[arg-type]


_PAIRS = (  # BERT and what is made like it: columns, and a row in a module beside theirs
    (("attention.self.query", "attention.self.key", "attention.self.value"), "attention.output.dense"),
    (("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"), "attention.output.dense"),
    (("intermediate.dense",), "output.dense"),
)


def _plan_of_a_family(modules: Mapping[str, nn.Module]) -> dict[str, Style]:
    """Of models whose layers have such names."""
    plan: dict[str, Style] = {}
    for columns, row in _PAIRS:
        for name in modules:
            block = name.removesuffix(f".{columns[0]}")
            together = [f"{block}.{last}" for last in (*columns, row)]
            if block != name and all(linear_like(modules[one]) for one in together if one in modules):
                if all(one in modules for one in together):
                    plan |= {one: Style("row" if one.endswith(row) else "column") for one in together}
    return plan


def _is_feed_forward(module: nn.Module) -> bool:
    """Whether it is a sequence of two linear layers, and between them what works on each number alone."""
    if type(module) is not nn.Sequential:
        return False
    children = list(module)
    linear = [child for child in children if linear_like(child)]
    others = [child for child in children if not linear_like(child)]
    if len(linear) != 2 or not all(isinstance(child, ELEMENTWISE) for child in others):
        return False
    return _shape(linear[0]) == _shape(linear[1])[::-1]


def _plan_of_the_structure(
    model: nn.Module, modules: Mapping[str, nn.Module], said: Collection[str]
) -> dict[str, Style]:
    plan = _plan_of_a_family(modules)
    of_a_family = bool(plan)
    complete = any(name.endswith("attention.output.dense") for name in plan)
    for block in () if complete else _blocks(modules):
        inside = {name: module for name, module in modules.items() if name == block or name.startswith(f"{block}.")}
        parents: dict[str, list[str]] = {}
        for name, module in inside.items():
            if linear_like(module) and name != block and name not in said and name not in plan:
                parents.setdefault(name.rpartition(".")[0], []).append(name)
        for parent, names in parents.items():
            try:
                plan.update(_styles_in(parent, names, modules))
            except PlanError:
                if not of_a_family:  # of which what is known is enough
                    raise
    if not plan and not said:
        raise NoPlan(
            f'expected a model whose layers the plan "auto" knows, got {type(model).__name__}: it brings no plan '
            "(base_model_tp_plan), and has no list of blocks with attention or feed-forward layers of known names; "
            'write tensor_parallel.plan, as {"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}'
        )
    for name, module in modules.items():
        outside = not any(name == planned for planned in plan)
        if outside and name.count(".") <= 1 and linear_like(module) and _is_head(module, modules):
            plan[name] = Style("vocab")
    return plan


def _blocks(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """The members of outermost lists that have members themselves."""
    lists: list[str] = []
    for name, module in modules.items():
        is_list = isinstance(module, nn.Sequential) or is_container(module)
        if not is_list or any(not outer or name.startswith(f"{outer}.") for outer in lists):
            continue
        members = [child for child, member in module.named_children() if any(True for _ in member.children())]
        if members:
            lists.append(name)
            yield from (f"{name}.{child}" if name else child for child in members)


def _styles_in(parent: str, names: list[str], modules: Mapping[str, nn.Module]) -> dict[str, Style]:
    """Of the linear layers in one module. Raises PlanError if their parts cannot be told."""
    last = {name: name.rpartition(".")[2].lower() for name in names}
    columns = [name for name in names if last[name] in _COLUMNS]
    rows = [name for name in names if last[name] in _ROWS]
    if columns and rows and len(columns) + len(rows) == len(names):
        return {**dict.fromkeys(columns, Style("column")), **dict.fromkeys(rows, Style("row"))}
    if _is_feed_forward(modules[parent]):
        return {names[0]: Style("column"), names[1]: Style("row")}
    if not columns and not rows:
        return {}  # a router, an adapter: nothing that is known to be cut
    unknown = [name for name in names if name not in columns and name not in rows] or names
    raise PlanError(
        f"expected layers of known names in '{parent}' for the plan \"auto\", got {', '.join(unknown)}; say the style "
        "of each, or leave them uncut",
        whole=parent,
    )
