"""Cuts a model over the ranks of a tensor group."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils import parametrize

from zerolite.comm import Communicator
from zerolite.cuts import is_partial, mark_partial, names_of
from zerolite.runtime.initial_sync import broadcast_into, synchronize_tensors
from zerolite.runtime.precision import map_tensors
from zerolite.runtime.zero.partitioned_parameter import handle_of
from zerolite.tensor_parallel import fused, sequence
from zerolite.tensor_parallel import owners as owning
from zerolite.tensor_parallel.auto import auto_plan
from zerolite.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelHead,
    _Cut,
    cut_column,
    cut_embedding,
    cut_head,
    cut_row,
)
from zerolite.tensor_parallel.logits import VocabParallelLogits
from zerolite.tensor_parallel.owners import Layer, Number, Owner
from zerolite.tensor_parallel.plan import (
    Match,
    PlanError,
    Style,
    embedding_like,
    linear_like,
    matches,
    parse_style,
    resolve,
    unmatched,
)
from zerolite.tensor_parallel.regions import Outside, Region, SeenInputs

logger = logging.getLogger("zerolite")


class Settings(Protocol):
    """What the config says: see the block tensor_parallel."""

    @property
    def ranks(self) -> int: ...
    @property
    def plan(self) -> Any: ...
    @property
    def sequence_parallel(self) -> bool: ...
    @property
    def divide(self) -> Any: ...


def apply(
    model: nn.Module, settings: Settings, comm: Communicator, device: torch.device, *, stage: bool = False
) -> list[str]:
    """Leave this rank's part of ``model`` in it: the same modules and Parameters, with parts of the values of the first
    rank of ``comm``, whose state of random numbers the others take too.

    settings: plan, patterns of module names and styles, or "auto"; divide, "auto" or patterns of attributes;
    sequence_parallel. device: where collectives are done. stage: the model is a part of a pipeline, in which other
    patterns than here may match; those that match nothing are returned.

    Raises PlanError, a ValueError, if plan and model do not go together, on all ranks and before anything is changed.
    Called by ``zerolite.initialize`` on all ranks of ``comm``, after the model has been divided into stages and before
    the engine is built.
    """
    if comm.world_size == 1:
        return []
    modules = dict(model.named_modules(remove_duplicate=False))
    _check_model(model)
    found, unused = _matches(model, modules, settings.plan, stage)
    layers = _layers(found, modules, comm)
    owners = owning.pair(layers, modules)
    _set_sizes(layers, owners, comm)
    divided = _divided(owners, modules, settings.divide, comm.world_size)
    made = _made_in_parts(modules, comm)
    runs = sequence.find_runs([*owners, *made], modules) if settings.sequence_parallel else []
    partial = _partial(found, owners, modules, bool(runs))
    _synchronize(model, comm, device)
    for layer in layers:
        _cut(layer, comm)
    for where, name, value in divided:
        setattr(modules[where], name, value // comm.world_size)
    for parameter in partial:
        mark_partial(parameter)
    sequence.connect(runs, modules, comm, _draws(model))
    _connect([*owners, *made], divided, modules, comm, bool(runs))
    if any(isinstance(module, VocabParallelHead) for module in modules.values()):
        model.register_forward_hook(_gather_what_leaves)
    return unused


def _check_model(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if handle_of(parameter) is not None:
            raise PlanError(
                f"expected whole parameters to cut, got '{name}', which zero.Init has already spread over the ranks; "
                "build the model outside of zerolite.zero.Init to use tensor_parallel"
            )


def _matches(
    model: nn.Module, modules: Mapping[str, nn.Module], given: Any, stage: bool
) -> tuple[dict[str, Match], list[str]]:
    names = [name for name in modules if name]
    names += [name for name in _names_elsewhere(model) if name not in modules]
    if isinstance(given, str) and any(isinstance(module, _Cut) for module in modules.values()):
        return {}, []  # the model's author has written it in parts
    if isinstance(given, str):
        plan, optional = auto_plan(model, modules)
    else:
        plan, optional = {pattern: parse_style(pattern, style) for pattern, style in given.items()}, False
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    layers = {pattern: style for pattern, style in plan.items() if style.kind not in ("whole", "partial")}
    others = {pattern: style for pattern, style in plan.items() if pattern not in layers}
    found, unused = resolve(layers, names, optional or stage)
    rest, unused_rest = resolve(others, [*names, *parameters], optional or stage)
    both = {**found, **rest}
    for name in found.keys() & rest.keys():
        both[name] = _more_specific(name, found[name], rest[name])
    return both, [] if optional else [*unused, *unused_rest]


def _names_elsewhere(model: nn.Module) -> list[str]:
    """The modules in the whole model that have a parameter of this stage as their weight."""
    names = [names_of(parameter) or () for parameter in model.parameters()]
    return [name.removesuffix(".weight") for several in names for name in several if name.endswith(".weight")]


def _more_specific(name: str, one: Match, other: Match) -> Match:
    plan = {one.pattern: one.style, other.pattern: other.style}
    return resolve(plan, [name])[0][name]


def _layers(found: Mapping[str, Match], modules: Mapping[str, nn.Module], comm: Communicator) -> list[Layer]:
    """The layers to be cut, each once. Raises PlanError for those that cannot be."""
    layers: dict[int, Layer] = {}
    for name, match in found.items():
        module = modules.get(name)
        if match.style.kind in ("whole", "partial") or module is None or isinstance(module, _Cut):
            continue
        _check_layer(name, module, match)
        style = Style("vocab") if isinstance(module, nn.Embedding) else match.style
        before = layers.get(id(module))
        if before is not None and before.style != style:
            raise PlanError(
                f"expected one style for the module that is both '{before.name}' and '{name}', got {before.style} and "
                f"{style}; give them the same"
            )
        if before is None and module._parameters["weight"] is not None:
            layers[id(module)] = Layer(name, module, style)
    _add_tied(layers, found, modules)
    return list(layers.values())


def _made_in_parts(modules: Mapping[str, nn.Module], comm: Communicator) -> list[Owner]:
    """Of the columns and rows that the model's author has written as such, as far as they belong together."""
    layers = []
    for name, module in modules.items():
        if isinstance(module, _Cut) and module.comm.world_size != comm.world_size:
            raise PlanError(
                f"expected layers in {comm.world_size} parts, as tensor_parallel.size says, got '{name}' in "
                f"{module.comm.world_size}"
            )
        if isinstance(module, RowParallelLinear):
            layers.append(Layer(name, module, Style("row", input_is_parallel=module.input_is_parallel)))
        elif isinstance(module, ColumnParallelLinear) and not isinstance(module, VocabParallelHead):
            layers.append(Layer(name, module, Style("column", gather_output=module.gather_output)))
    try:
        return owning.pair(layers, modules)
    except PlanError:
        return []  # the author knows what happens between them


def _check_layer(name: str, module: nn.Module, match: Match) -> None:
    kind = match.style.kind
    what = f"'{name}' (pattern '{match.pattern}', style {kind})"
    if parametrize.is_parametrized(module) or "weight" not in module._parameters:
        raise PlanError(f"expected a layer with a weight of its own as {what}, got {_description(module)}")
    if isinstance(module, nn.Embedding) and kind in ("vocab", "row"):
        if not embedding_like(module):
            raise PlanError(f"expected an nn.Embedding as {what}, got {_description(module)}")
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise PlanError(f"expected an embedding without {option} as {what}; remove it or the pattern")
    elif not linear_like(module) or isinstance(module, nn.Embedding):
        raise PlanError(f"expected an nn.Linear{_or_embedding(kind)} as {what}, got {_description(module)}")


def _or_embedding(kind: str) -> str:
    return " or nn.Embedding" if kind == "vocab" else ""


def _description(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return f"{name}, which keeps query, key and value in one parameter; write attention with nn.Linear layers"
    if hasattr(module, "base_layer") or hasattr(module, "lora_A"):
        return f"{name}, a layer with adapters (LoRA); merge them, or remove the pattern"
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return f"{name}, which has a forward of its own or a weight that is computed"
    return f"{name}; cut are nn.Linear, nn.Embedding and transformers' Conv1D"


def _add_tied(layers: dict[int, Layer], found: Mapping[str, Match], modules: Mapping[str, nn.Module]) -> None:
    """An embedding and a head with one weight are both cut where one is, though it is in another stage. Raises
    PlanError for another module that has a weight which is cut, and for different styles."""
    styles: dict[int, tuple[str, Style]] = {}
    for layer in layers.values():
        known = styles.setdefault(id(layer.module._parameters["weight"]), (layer.name, layer.style))
        if known[1] != layer.style:
            raise PlanError(_DIFFERENT.format(known[1], known[0], layer.style, layer.name))
    for name, module in modules.items():
        for key, parameter in module._parameters.items():
            if parameter is None or id(module) in layers or isinstance(module, _Cut):
                continue
            where, style = styles.get(id(parameter)) or _style_elsewhere(parameter, found)
            if style is None:
                continue
            can_be = embedding_like(module) or linear_like(module)
            if style.kind != "vocab" or key != "weight" or not can_be:
                raise PlanError(_DIFFERENT.format(style, where, "none", name))
            layers[id(module)] = Layer(name, module, style)
            logger.info("tensor_parallel: '%s' has the weight of '%s' and is cut with it", name, where)


_DIFFERENT = (
    "expected the same style wherever a weight is used, got {} for '{}' and {} for '{}', which has the same weight"
)


def _style_elsewhere(parameter: nn.Parameter, found: Mapping[str, Match]) -> tuple[str, Style | None]:
    for name in names_of(parameter) or ():
        match = found.get(name.removesuffix(".weight"))
        if match is not None and match.style.kind == "vocab":
            return name, match.style
    return "", None


def _set_sizes(layers: Sequence[Layer], owners: Sequence[Owner], comm: Communicator) -> None:
    """The parts of fused layers. Raises PlanError for sizes that ranks cannot share equally."""
    size = comm.world_size
    owner_of = {id(layer): owner for owner in owners for layer in (*owner.columns, *owner.rows)}
    said: dict[str, list[str]] = {}
    for owner in owners:
        fused.check_family(owner)
    for layer in layers:
        if layer.style.kind == "column":
            layer.sizes, why = fused.column_sizes(layer, owner_of.get(id(layer)))
            if why:
                said.setdefault(f"{layer.sizes} outputs: {why}", []).append(layer.name)
    for owner in owners:
        owning.check_heads(owner, size)
    for layer in layers:
        if layer.style.kind == "vocab" or isinstance(layer.module, nn.Embedding):
            continue
        for length in layer.sizes if layer.style.kind == "column" else [layer.inputs]:
            if length % size:
                what = "outputs" if layer.style.kind == "column" else "inputs"
                raise PlanError(
                    f"expected {what} of '{layer.name}' that tensor_parallel.size {size} divides, got {length} (a "
                    f"layer of {layer.inputs} inputs and {layer.outputs} outputs); choose another size, or remove it "
                    "from the plan"
                )
    if comm.rank == 0:
        for how, names in said.items():
            logger.info("tensor_parallel: %s is cut in %s", _shortened(names), how)


def _shortened(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more like it"


def _divided(owners: Sequence[Owner], modules: Mapping[str, nn.Module], divide: Any, size: int) -> list[Number]:
    """The numbers of which each rank has a part."""
    if isinstance(divide, str):
        found = [number for owner in owners for number in owning.numbers_to_divide(owner, size)]
    else:
        numbers = [(where, name, value) for where, module in modules.items() for name, value in _integers(module)]
        names = {f"{where}.{name}" if where else name: (where, name, value) for where, name, value in numbers}
        found = []
        for pattern in divide:
            hits = [number for name, number in names.items() if matches(pattern, name)]
            if not hits:
                raise PlanError(f"tensor_parallel.divide: {unmatched(pattern, names)}")
            found += hits
    once = {(id(modules[where]), name): (where, name, value) for where, name, value in found}
    for where, name, value in once.values():
        if value % size:
            raise PlanError(
                f"expected '{name}' of '{where}' to be a multiple of tensor_parallel.size {size}, of which each rank "
                f"has its share, got {value}; choose a size that divides {value}"
            )
    return list(once.values())


def _integers(module: nn.Module) -> Iterator[tuple[str, int]]:
    return ((name, value) for name, value in module.__dict__.items() if type(value) is int and not name.startswith("_"))


_HEAD_NORMS = set("q_norm k_norm q_layernorm k_layernorm q_ln k_ln query_norm key_norm norm_q norm_k qk_norm".split())


def _partial(
    found: Mapping[str, Match], owners: Sequence[Owner], modules: Mapping[str, nn.Module], sequence_is_cut: bool
) -> list[nn.Parameter]:
    """Whole parameters that act inside regions. Raises PlanError where that cannot be told, unless the gradients of all
    in a block are parts."""
    chosen: dict[int, nn.Parameter] = {}
    whole: set[int] = set()
    for name, match in found.items():
        place, _, key = name.rpartition(".")
        module = modules.get(name)
        if match.style.kind not in ("partial", "whole") or (module is None and place not in modules):
            continue
        given = list(module.parameters()) if module is not None else [modules[place]._parameters.get(key)]
        if match.style.kind == "partial":
            chosen.update((id(parameter), parameter) for parameter in given if parameter is not None)
        else:
            whole.update(id(parameter) for parameter in given)
    for owner in owners:
        chosen.update((id(norm), norm) for norm in _norms_of_heads(owner) if id(norm) not in whole)
        for where, holder in owner.holders.items():
            for key, parameter in holder.named_parameters(recurse=False):
                said = sequence_is_cut or id(parameter) in chosen or id(parameter) in whole
                if parameter.requires_grad and not said:
                    full = f"{where}.{key}" if where else key
                    raise PlanError(
                        f"expected only layers between a column and its row, got the parameter '{full}'; say in the "
                        f'plan whether it acts there ("{full}": "replicated_with_grad_allreduce") or outside '
                        f'("{full}": "whole")'
                    )
    return list(chosen.values())


def _norms_of_heads(owner: Owner) -> Iterator[nn.Parameter]:
    width = owning.head_width(owner) if owner.is_attention else None
    for holder in owner.holders.values():
        for name, child in holder.named_children():
            if name in _HEAD_NORMS and all(parameter.shape == (width,) for parameter in child.parameters()):
                yield from child.parameters()


def _synchronize(model: nn.Module, comm: Communicator, device: torch.device) -> None:
    """The first rank's values and random numbers, everywhere."""
    tensors = [*model.parameters(), *model.buffers()]
    held = [tensor for tensor in tensors if not tensor.is_meta]
    synchronize_tensors(held, comm, device, "initial_sync")
    if comm.peers_agree:
        return
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    for generator in generators:
        state = generator.get_state()
        broadcast_into(state, comm, device, "initial_sync")
        generator.set_state(state)


def _cut(layer: Layer, comm: Communicator) -> None:
    style, module = layer.style, layer.module
    if isinstance(module, nn.Embedding):
        cut_embedding(module, comm)
    elif style.kind == "vocab":
        cut_head(module, comm)
    elif style.kind == "column":
        cut_column(module, comm, layer.sizes, style.gather_output)
    else:
        cut_row(module, comm, style.input_is_parallel)


def _connect(
    owners: Sequence[Owner],
    divided: Sequence[Number],
    modules: Mapping[str, nn.Module],
    comm: Communicator,
    sequence_is_cut: bool,
) -> None:
    """Tell layers their regions, and modules the shapes that they are to see."""
    changed = {id(modules[where]) for where, _, _ in divided}
    for owner in owners:
        region = Region(comm.rank, _draws(owner.module))
        for layer in (*owner.columns, *owner.rows):
            layer.module.region = region  # type: ignore[assignment]
        if _guard(owner, region) or region.random:
            region.watch(owner.module)
        narrower = comm.world_size if any(id(holder) in changed for holder in owner.holders.values()) else 1
        longer = comm.world_size if sequence_is_cut else 1
        if owner.is_attention and narrower * longer > 1:
            holders = {id(owner.holder_of(layer)): layer for layer in owner.columns}
            for layer in holders.values():
                seen = SeenInputs(layer.inputs, narrower, longer, sequence.DIM)
                owner.holder_of(layer).register_forward_pre_hook(seen.on_call, with_kwargs=True)


def _guard(owner: Owner, region: Region) -> bool:
    """Refuse modules with whole parameters inside ``region``; whether there are any."""
    found = False
    for name, module in owner.module.named_modules():
        if isinstance(module, _Cut) or module is owner.module:
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and not is_partial(parameter):
                full = f"{owner.name}.{name}" if owner.name else name
                module.register_forward_pre_hook(Outside(region, full, key).check)
                found = True
                break
    return found


def _draws(module: nn.Module) -> bool:
    """Whether it may draw random numbers: a dropout layer, or a number with such a name, above 0."""
    for child in module.modules():
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0:
            return True
        for name, value in child.__dict__.items():
            if "drop" in name.lower() and isinstance(value, (int, float)) and value > 0:
                return True
    return False


def _gather_what_leaves(module: nn.Module, args: object, outputs: Any) -> Any:
    """Without gradients, logits leave the model whole. With gradients they stay in parts, for a loss outside."""
    if torch.is_grad_enabled():
        return None
    return map_tensors(lambda x: x.gathered() if isinstance(x, VocabParallelLogits) else x, outputs)


__all__ = ["Settings", "Style", "apply"]
