"""`parallelize_module`: shard a model over the ranks of a tensor-parallel group."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Protocol

import torch
from torch import nn

from zerolite.comm import Communicator
from zerolite.comm.initial_sync import broadcast_into, synchronize_tensors
from zerolite.tensor_parallel import fused, matching, sequence
from zerolite.tensor_parallel import owners as owning
from zerolite.tensor_parallel.layers import (
    CutLayer,
    VocabParallelHead,
    cut_column,
    cut_embedding,
    cut_head,
    cut_last,
    cut_row,
    share_column,
)
from zerolite.tensor_parallel.logits import VocabParallelLogits
from zerolite.tensor_parallel.owners import Layer, Number, Owner
from zerolite.tensor_parallel.plan import (
    Match,
    TensorPlanError,
    advice,
    general,
    matches,
    unmatched,
)
from zerolite.tensor_parallel.regions import FirstForward, Outside, Region, SeenInputs
from zerolite.tensor_parallel.shard_spec import is_partial, mark_partial, shard_spec_of
from zerolite.utils.nested import map_tensors

logger = logging.getLogger("zerolite")


class Settings(Protocol):
    """Settings of the config's block tensor_parallel."""

    @property
    def ranks(self) -> int: ...
    @property
    def plan(self) -> Any: ...
    @property
    def sequence_parallel(self) -> bool: ...
    @property
    def divide(self) -> Any: ...


def parallelize_module(
    model: nn.Module, settings: Settings, comm: Communicator, device: torch.device, *, stage: bool = False
) -> list[str]:
    """Leave this rank's part of ``model`` in it: the same modules and Parameters, with parts of the values of the first
    rank of ``comm``, whose state of random numbers the others take too.

    Args:
        settings: plan, patterns of module names and styles, or "auto"; divide, "auto" or patterns of attributes;
            sequence_parallel.
        device: where collectives are done.
        stage: the model is a part of a pipeline, in which other patterns than here may match; those that match nothing
            are returned (["auto"] if nothing is known of this part).

    Raises TensorPlanError, a ValueError, if plan and model do not go together, on all ranks and before anything is
    changed. Called by ``zerolite.initialize`` on all ranks of ``comm``, after the model has been divided into stages
    and before the engine is built.
    """
    if comm.world_size == 1:
        return []
    try:
        return _parallelize(model, settings, comm, device, stage)
    except TensorPlanError as error:
        raise error.beside(settings.plan) from None


def _parallelize(
    model: nn.Module, settings: Settings, comm: Communicator, device: torch.device, stage: bool
) -> list[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    matching.check_model(model)
    found, unused = matching.find_matches(model, modules, settings.plan, stage)
    layers = matching.find_layers(found, modules)
    owners = owning.pair(layers, modules)
    _set_sizes(layers, owners, comm, settings.divide == "auto")
    divided = _divided(owners, modules, settings.divide, comm.world_size)
    made = _not_connected(matching.made_in_parts(modules, comm), settings.sequence_parallel)
    biases = [bias for owner in owners for bias in owning.biases_of_heads(owner)]
    runs = sequence.find_runs([*owners, *made], modules) if settings.sequence_parallel else []
    partial = _partial(found, owners, modules, bool(runs), {id(module._parameters[key]) for module, key in biases})
    if comm.main and not (stage or layers or any(isinstance(module, CutLayer) for module in modules.values())):
        logger.warning("tensor_parallel: the plan leaves all layers whole, so every rank computes the same")
    _synchronize(model, comm, device)
    for layer in layers:
        _cut(layer, comm)
    for module, key in biases:
        cut_last(module, key, comm)
    for where, name, share in divided:
        setattr(modules[where], name, share)
    for parameter in partial:
        mark_partial(parameter)
    sequence.connect(runs, modules, comm, _draws(model))
    _connect([*owners, *made], divided, modules, comm, bool(runs), settings.plan)
    if any(isinstance(module, VocabParallelHead) for module in modules.values()):
        model.register_forward_hook(_gather_what_leaves)
    return unused


def _not_connected(made: Sequence[Owner], sequence_parallel: bool) -> list[Owner]:
    """Without those that an earlier call has cut and connected: the model has had another engine. Raises
    TensorPlanError if sequences were treated otherwise then."""
    new = []
    for owner in made:
        modules: list[Any] = [layer.module for layer in (*owner.columns, *owner.rows)]
        if all(module.region is None for module in modules):
            new.append(owner)
            continue
        before = any(module.sequence is not None for module in modules)
        if before != sequence_parallel:
            raise TensorPlanError(
                f"tensor_parallel.sequence_parallel: expected {str(before).lower()}, as it was when the layers of "
                f"'{owner.name}' were cut for an earlier engine, got {str(sequence_parallel).lower()}; make the model "
                "anew"
            )
    return new


def _set_sizes(layers: Sequence[Layer], owners: Sequence[Owner], comm: Communicator, share: bool) -> None:
    """The parts of fused layers. share: whether several ranks may use one head of key and value. Raises TensorPlanError
    for sizes that ranks cannot share equally."""
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
        if share:
            owning.share_heads(owner, size)
        owning.check_heads(owner, size)
    for layer in layers:
        if layer.style.kind == "vocab" or isinstance(layer.module, nn.Embedding):
            continue
        lengths = layer.sizes if layer.style.kind == "column" else [layer.inputs]
        for length, shared in zip(lengths, layer.shared or [False] * len(lengths), strict=True):
            if length % size and not shared:
                what = "outputs" if layer.style.kind == "column" else "inputs"
                raise TensorPlanError(
                    f"expected {what} of '{layer.name}' that tensor_parallel.size {size} divides, got {length} (a "
                    f"layer of {layer.inputs} inputs and {layer.outputs} outputs); choose another size",
                    whole=layer.parent or layer.name,
                )
    if comm.main:
        for how, names in said.items():
            logger.info("tensor_parallel: %s is cut in %s", _shortened(names), how)


def _shortened(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more like it"


def _divided(owners: Sequence[Owner], modules: Mapping[str, nn.Module], divide: Any, size: int) -> list[Number]:
    """The numbers of which each rank has a part, and its share of each."""
    if isinstance(divide, str):
        once = {
            (id(modules[where]), name): (where, name, share)
            for owner in owners
            for where, name, share in owning.numbers_to_divide(owner, size)
        }
        return list(once.values())
    else:
        numbers = [(where, name, value) for where, module in modules.items() for name, value in _integers(module)]
        names = {f"{where}.{name}" if where else name: (where, name, value) for where, name, value in numbers}
        found = []
        for pattern in divide:
            hits = [number for name, number in names.items() if matches(pattern, name)]
            if not hits:
                raise TensorPlanError(f"tensor_parallel.divide: {unmatched(pattern, names)}")
            found += hits
    once = {(id(modules[where]), name): (where, name, value) for where, name, value in found}
    for where, name, value in once.values():
        if value % size:
            raise TensorPlanError(
                f"expected '{name}' of '{where}' to be a multiple of tensor_parallel.size {size}, of which each rank "
                f"has its share, got {value}; choose a size that divides {value}"
            )
    return [(where, name, value // size) for where, name, value in once.values()]


def _integers(module: nn.Module) -> Iterator[tuple[str, int]]:
    return ((name, value) for name, value in module.__dict__.items() if type(value) is int and not name.startswith("_"))


_HEAD_NORMS = set("q_norm k_norm q_layernorm k_layernorm q_ln k_ln query_norm key_norm norm_q norm_k qk_norm".split())


def _partial(
    found: Mapping[str, Match],
    owners: Sequence[Owner],
    modules: Mapping[str, nn.Module],
    sequence_is_cut: bool,
    biases: Set[int],
) -> list[nn.Parameter]:
    """Whole parameters that act inside regions. Raises TensorPlanError where that cannot be told, unless the gradients
    of all in a block are parts."""
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
                said = sequence_is_cut or id(parameter) in (*chosen, *whole, *biases)
                if parameter.requires_grad and not said:
                    full = f"{where}.{key}" if where else key
                    raise TensorPlanError(
                        f"expected only layers between a column and its row, got the parameter '{full}', of which "
                        'it is unknown how it acts: its style is "whole" if it acts outside of them, and '
                        '"replicated_with_grad_allreduce" if it acts between them on each head alike; else '
                        f"'{owner.name}' cannot be cut",
                        whole=owner.name,
                    )
    return list(chosen.values())


def _norms_of_heads(owner: Owner) -> Iterator[nn.Parameter]:
    width = owning.head_width(owner) if owner.is_attention else None
    for holder in owner.holders.values():
        for name, child in holder.named_children():
            if name in _HEAD_NORMS and all(parameter.shape == (width,) for parameter in child.parameters()):
                yield from child.parameters()


def _synchronize(model: nn.Module, comm: Communicator, device: torch.device) -> None:
    """The first rank's values and random numbers, everywhere; parts that are there already are each rank's own."""
    tensors = [*model.parameters(), *model.buffers()]
    held = [tensor for tensor in tensors if not tensor.is_meta and shard_spec_of(tensor) is None]
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
    elif any(layer.shared):
        share_column(module, comm, layer.sizes, layer.shared, layer.head_width)
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
    plan: object,
) -> None:
    """Tell layers their regions, and modules the shapes that they are to see."""
    changed = {id(modules[where]) for where, _, _ in divided}
    for owner in owners:
        region = Region(comm.rank, _draws(owner.module))
        for layer in (*owner.columns, *owner.rows):
            layer.module.region = region  # type: ignore[assignment]
        if _guard(owner, region, plan) or region.random:
            region.watch(owner.module)
        if not sequence_is_cut:  # its blocks say more then
            how = f"of whose layers each rank has a part{advice(plan, whole=owner.name)}"
            FirstForward(owner.name, how).watch(owner.module)
        narrower = comm.world_size if any(id(holder) in changed for holder in owner.holders.values()) else 1
        longer = comm.world_size if sequence_is_cut else 1
        if owner.is_attention and narrower * longer > 1:
            holders = {id(owner.holder_of(layer)): layer for layer in owner.columns}
            for layer in holders.values():
                seen = SeenInputs(layer.inputs, narrower, longer, sequence.DIM)
                owner.holder_of(layer).register_forward_pre_hook(seen.on_call, with_kwargs=True)


def _guard(owner: Owner, region: Region, plan: object) -> bool:
    """Refuse modules with whole parameters inside ``region``; whether there are any."""
    found = False
    for name, module in owner.module.named_modules():
        if isinstance(module, CutLayer) or module is owner.module:
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if not is_partial(parameter):  # of frozen ones too: they may be trained from some step on
                full = f"{owner.name}.{name}" if owner.name else name
                inside = advice(plan, add=(general(full), "replicated_with_grad_allreduce"))
                outside = advice(plan, whole=owner.name)
                module.register_forward_pre_hook(Outside(region, full, key, inside, outside).check)
                found = True
                break
    return found


def _draws(module: nn.Module) -> bool:
    """True if the module may draw random numbers: a dropout layer, or a number with such a name, above 0."""
    for child in module.modules():
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0:
            return True
        for name, value in child.__dict__.items():
            if "drop" in name.lower() and isinstance(value, (int, float)) and value > 0:
                return True
    return False


def _gather_what_leaves(module: nn.Module, args: object, outputs: object) -> object:
    """Without gradients, logits leave the model whole. With gradients they stay in parts, for a loss outside."""
    if torch.is_grad_enabled():
        return None
    return map_tensors(lambda x: x.gathered() if isinstance(x, VocabParallelLogits) else x, outputs)
