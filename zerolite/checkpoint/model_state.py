"""Tensors of an engine (parameters, buffers, optimizer states), by name, to checkpoint shards and back.

A trained parameter is stored once, as its master weights: the compute parameter is rounded from them. A rank's part of
it, and of every state, is a range of the flattened parameter (:class:`FlatRange`). The parameter itself may be a
tensor-parallel shard (:class:`~zerolite.tensor_parallel.shard_spec.ShardSpec`).

Tensors that every data-parallel rank holds completely are divided evenly over them, so that each writes the same share.
Of tensors that are equal on all tensor-parallel ranks, or on several pipeline stages, the first of these ranks writes
all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.flat_ranges import (
    FlatRange,
    Shard,
    range_of,
    shards_of,
    split_evenly,
)
from zerolite.checkpoint.safetensors import dtype_name
from zerolite.checkpoint.state import ModelFacts, ParameterFacts, TensorFacts, clean
from zerolite.checkpoint.storage import Scalars
from zerolite.comm import collective
from zerolite.tensor_parallel.shard_spec import names_of, shard_spec_of
from zerolite.zero.engine_parts import EngineParts
from zerolite.zero.flat import flattened
from zerolite.zero.inner_tensors import take_in_replaced
from zerolite.zero.stage3.available_parameters import refresh
from zerolite.zero.stage3.partitioned_parameter import (
    AVAILABLE,
    sharded_param_of,
    unpartitioned_numel,
    unpartitioned_shape,
)
from zerolite.zero.update import OptimParamShard

PARAMETERS, BUFFERS, OPTIMIZER, RANKS = "parameters/", "buffers/", "optimizer/", "ranks/"
Kinds = dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]  # shape and dtype by state and stored name
_COUNTS = frozenset(("step", "eta", "mu", "mu_product"))  # states of torch's optimizers with one number a parameter


class ModelState:
    """The tensors of one engine. It reads and writes them between steps only."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts

    @property
    def speaks_for_stage(self) -> bool:
        """True if there is a pipeline and this rank describes its stage to the others."""
        grid = self.parts.topology
        return grid.pipe.world_size > 1 and grid.data.rank == 0 and grid.tensor.rank == 0

    # ---------------------------------------------------------------- names

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return each parameter once, by the first of its names in the full model."""
        parameters = {}
        take_in_replaced(self.parts.model)
        for name, parameter in self.parts.model.named_parameters():
            names = names_of(parameter)
            parameters[clean(name if names is None else names[0])] = parameter
        return parameters

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that belong to a state dict, each once."""
        buffers: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for prefix, module in self.parts.model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                    seen.add(id(buffer))
                    buffers[clean(f"{prefix}.{name}" if prefix else name)] = buffer
        return buffers

    def extra_state(self) -> dict[str, Any]:
        """Return the state that modules add to their state dict by ``get_extra_state``."""
        return {clean(name): module.get_extra_state() for name, module in self.with_extra_state()}

    def load_extra_state(self, extra: dict[str, object]) -> None:
        for name, module in self.with_extra_state():
            if clean(name) in extra:
                module.set_extra_state(extra[clean(name)])

    def with_extra_state(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the modules with a ``get_extra_state`` of their own, and their names."""
        default = torch.nn.Module.get_extra_state
        return ((n, m) for n, m in self.parts.model.named_modules() if type(m).get_extra_state is not default)

    def index_of(self) -> dict[int, int]:
        """Return the index in the layout of each trained parameter, by its id."""
        return {id(parameter): index for index, parameter in enumerate(self.parts.buffer.parameters)}

    def names_by_index(self) -> list[str]:
        """Return the names of the trained parameters. Raises CheckpointError if the model has lost one."""
        names = {id(parameter): name for name, parameter in self.named_parameters().items()}
        slots = self.parts.buffer.layout.slots
        lost = [slots[i].name for i, p in enumerate(self.parts.buffer.parameters) if id(p) not in names]
        if lost:
            raise CheckpointError(
                f"parameter '{lost[0]}' is trained, but is not in the model any more ({len(lost)} in all); it was "
                "replaced or removed after zerolite.initialize. Make a new engine for the changed model"
            )
        return [names[id(parameter)] for parameter in self.parts.buffer.parameters]

    def describe(self) -> ModelFacts:
        """Describe the model here, which may be a stage of a pipeline, with the shapes of full tensors."""
        trained = self.index_of()
        parameters = self.named_parameters()
        others: dict[int, list[str]] = {}
        for name, parameter in self.parts.model.named_parameters(remove_duplicate=False):
            others.setdefault(id(parameter), [clean(one) for one in names_of(parameter) or ()]).append(clean(name))
        described = {
            name: ParameterFacts(
                shape=list(_full_shape(parameter)),
                dtype=dtype_name(parameter.dtype, name),
                trained=id(parameter) in trained,
                aliases=[other for other in dict.fromkeys(others[id(parameter)]) if other != name],
            )
            for name, parameter in parameters.items()
        }
        buffers = {
            name: TensorFacts(shape=list(buffer.shape), dtype=dtype_name(buffer.dtype, name))
            for name, buffer in self.named_buffers().items()
        }
        names = {id(parameter): name for name, parameter in parameters.items()}
        param_groups = self.parts.optimizer.param_groups
        groups = [[names[id(p)] for p in group["params"] if id(p) in names] for group in param_groups]
        return ModelFacts(described, buffers, groups)

    # ---------------------------------------------------------------- ranges

    def _masters(self, names: Sequence[str]) -> Iterator[tuple[int, FlatRange]]:
        """Yield this rank's master weights by index; full ones if every data-parallel rank has them."""
        for bucket in self.parts.buffer.buckets:
            for fragment in bucket.fragments:
                index = fragment.slot.index
                values = bucket.master.narrow(0, fragment.shard_start, fragment.numel)
                yield index, self.range(PARAMETERS + names[index], index, fragment.param_start, values)

    def range(self, key: str, index: int, start: int, values: torch.Tensor) -> FlatRange:
        """Return a range of a tensor of the size of the trained parameter ``index``."""
        parameter = self.parts.buffer.parameters[index]
        shape = tuple(unpartitioned_shape(parameter))
        return FlatRange(key, shape, self._strides(parameter), start, values, shard_spec_of(parameter))

    def writes(self, parameter: torch.Tensor) -> bool:
        """Return True if this rank writes ``parameter``: its own shard or, of a parameter that is equal on all tensor
        ranks, the first."""
        return self.parts.topology.tensor.rank == 0 or shard_spec_of(parameter) is not None

    def _strides(self, parameter: torch.nn.Parameter) -> tuple[int, ...]:
        handle = sharded_param_of(parameter)
        return handle.strides if handle is not None else parameter.data.stride()

    def states(self, names: Sequence[str]) -> Iterator[tuple[OptimParamShard, str, dict[str, Any]]]:
        """Yield the optimizer shards that have states, with their parameter's name."""
        for param_shard in self.parts.optimizer.shards():
            if param_shard.fragment.numel:
                state = self.parts.optimizer.method.state_of(param_shard)
                if state:
                    yield param_shard, names[param_shard.index], state

    # ---------------------------------------------------------------- saving

    def shards(self, exclude_frozen: bool, elsewhere: Collection[str] = ()) -> tuple[list[Shard], Scalars]:
        """Return the parameters and states that this rank writes, and the states that are one number.

        Args:
            exclude_frozen: leave frozen parameters out.
            elsewhere: names of the parameters that another stage writes.
        """
        scalars: Scalars = {}
        names = self.names_by_index()
        chosen = {i for i, p in enumerate(self.parts.buffer.parameters) if names[i] not in elsewhere and self.writes(p)}
        sharded = [part for index, part in self._masters(names) if index in chosen]
        everywhere: list[FlatRange] = []  # ranges that all data-parallel ranks have, in the same order
        for param_shard, name, state in self.states(names):
            if param_shard.index not in chosen:
                continue
            for state_name, value in state.items():
                if not self.is_scalar(state_name, value, param_shard):
                    sharded.append(self._state_range(param_shard, name, state_name, value))
                elif self._writes_scalars(param_shard):
                    scalars.setdefault(state_name, {})[name] = _number(value)
        if not self.parts.buffer.shard:
            # Stage 0: every rank has all masters and states, so they are divided evenly like other full tensors.
            sharded, everywhere = everywhere, sharded
        groups = self.parts.groups
        written = sharded if groups.is_first_owner else []
        for name, parameter in () if exclude_frozen else self._frozen():
            handle = sharded_param_of(parameter)
            if name in elsewhere or not self.writes(parameter):
                continue
            if handle is None:
                everywhere.append(range_of(PARAMETERS + name, parameter.data, shard_spec_of(parameter)))
            elif groups.is_first_replica and (part := self._partitioned(PARAMETERS + name, parameter)).values.numel():
                # The user may have written into a gathered parameter; its shard does not have that value yet.
                written.append(replace(part, values=handle.local_shard()) if handle.status is AVAILABLE else part)
        alike = self.parts.topology.expert_data
        of_experts = [part for part in everywhere if part.is_of_experts]  # those ranks have, and not all
        of_all = [part for part in everywhere if not part.is_of_experts]
        written += split_evenly(of_experts, alike.rank, alike.world_size)
        ranges = (*written, *split_evenly(of_all, groups.mean.rank, groups.mean.world_size))
        shards = [shard for part in ranges for shard in part.shards()]
        trained = self.index_of()
        for name, parameter in self.named_parameters().items():
            if not math.prod(_full_shape(parameter)) and (id(parameter) in trained or not exclude_frozen):
                shards.append(Shard.whole(PARAMETERS + name, parameter.new_empty(_full_shape(parameter))))
        return shards, scalars

    def _writes_scalars(self, param_shard: OptimParamShard) -> bool:
        groups = self.parts.groups
        first_copy = groups.is_first_owner if self.parts.buffer.shard else groups.mean.rank == 0
        spec = shard_spec_of(self.parts.buffer.parameters[param_shard.index])
        first_copy = first_copy and (spec is None or spec.rank == 0)
        return first_copy and param_shard.fragment.param_start == 0 and self.parts.topology.tensor.rank == 0

    def shape_of(self, param_shard: OptimParamShard) -> torch.Size:
        """Return the shape of the states that have a value for each element."""
        if not param_shard.keeps_shape:
            return torch.Size((param_shard.fragment.numel,))
        return unpartitioned_shape(self.parts.buffer.parameters[param_shard.index])

    def is_scalar(self, state_name: str, value: object, param_shard: OptimParamShard) -> bool:
        """Return True if a state is one number for the parameter."""
        if not isinstance(value, torch.Tensor):
            return value is None or isinstance(value, (bool, int, float))
        return value.dim() == 0 and (bool(self.shape_of(param_shard)) or state_name in _COUNTS)

    def _state_range(self, param_shard: OptimParamShard, name: str, state_name: str, value: object) -> FlatRange:
        key = f"{OPTIMIZER}{state_name}/{name}"
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"optimizer state '{state_name}' of parameter '{name}': expected tensors and numbers, got "
                f"{type(value).__name__}, which cannot be saved"
            )
        if value.shape == self.shape_of(param_shard):
            index, keeps = param_shard.index, param_shard.keeps_shape
            flat = flattened(value, self._strides(self.parts.buffer.parameters[index])) if keeps else value
            return self.range(key, index, param_shard.fragment.param_start, flat)
        if not param_shard.keeps_shape:
            raise CheckpointError(
                f"optimizer state '{state_name}' of parameter '{name}': expected one value for each of this rank's "
                f"{param_shard.fragment.numel} elements, got shape {tuple(value.shape)}; it can be saved at stage 0, "
                "and with zero_optimization.whole_parameters"
            )
        if shard_spec_of(self.parts.buffer.parameters[param_shard.index]) is not None:
            raise CheckpointError(
                f"optimizer state '{state_name}' of parameter '{name}': expected one value for each element of the "
                f"part that tensor parallelism has given this rank, {tuple(self.shape_of(param_shard))}, got shape "
                f"{tuple(value.shape)}, which means nothing for another part; with tensor_parallel.size = 1 it can be "
                "saved"
            )
        return range_of(key, value)

    def _frozen(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters that are not trained and have elements."""
        trained = self.index_of()
        for name, parameter in self.named_parameters().items():
            if id(parameter) not in trained and unpartitioned_numel(parameter):
                yield name, parameter

    def _partitioned(self, key: str, parameter: torch.nn.Parameter) -> FlatRange:
        """Return this rank's shard of a partitioned parameter."""
        handle = sharded_param_of(parameter)
        assert handle is not None
        start = min(handle.groups.shard.rank * handle.shard.numel(), handle.numel)
        values = handle.shard[: min(handle.shard.numel(), handle.numel - start)]
        return FlatRange(key, tuple(handle.shape), handle.strides, start, values, shard_spec_of(parameter))

    # ---------------------------------------------------------------- loading

    def stored_parameters(self, stored_names: dict[str, str]) -> Iterator[Shard]:
        """Yield the shards of the stored parameters.

        Args:
            stored_names: stored names by the name here; other parameters stay as they are.
        """
        names = self.names_by_index()
        for index, part in self._masters(names):
            if names[index] in stored_names:
                yield from replace(part, key=PARAMETERS + stored_names[names[index]]).shards()
        for name, parameter in self._frozen():
            if name in stored_names:
                key = PARAMETERS + stored_names[name]
                if sharded_param_of(parameter) is None:
                    yield from shards_of(key, parameter.data, shard_spec_of(parameter))
                else:
                    yield from self._partitioned(key, parameter).shards()

    def stored_states(
        self,
        stored_names: dict[str, str],
        kinds: Kinds,
        scalars: Scalars,
    ) -> Iterator[Shard]:
        """Make the optimizer states of all parameters, and yield shards of the stored ones.

        Parameters without stored states are as if they had never been updated.
        """
        names = self.names_by_index()
        for param_shard in self.parts.optimizer.shards():
            if not param_shard.fragment.numel:
                continue
            index = param_shard.index
            stored = stored_names.get(names[index], "")
            numbers = {state_name: values[stored] for state_name, values in scalars.items() if stored in values}
            tensors = {state_name: of_names[stored] for state_name, of_names in kinds.items() if stored in of_names}
            parameter = self.parts.buffer.parameters[index]
            shape, keeps = _full_shape(parameter), param_shard.keeps_shape
            wanted: dict[str, tuple[torch.Size, torch.dtype]] = {}
            for state_name, (size, dtype) in tensors.items():
                if size != shape and (not keeps or shard_spec_of(parameter) is not None):
                    where = "with tensor_parallel.size = 1 only"
                    if not keeps:
                        where = "at stage 0, or with zero_optimization.whole_parameters, only"
                    raise CheckpointError(
                        f"optimizer state '{state_name}' of parameter '{names[index]}' has shape {size} and the "
                        f"parameter {shape}: such states can be loaded {where}"
                    )
                wanted[state_name] = (self.shape_of(param_shard) if size == shape else torch.Size(size), dtype)
            for state_name, out in self.parts.optimizer.method.make_state(param_shard, numbers, wanted).items():
                key = f"{OPTIMIZER}{state_name}/{stored}"
                if shard_spec_of(parameter) is not None:
                    out.zero_()  # padding, which no checkpoint has
                if tensors[state_name][0] != shape:
                    yield from shards_of(key, out)
                elif keeps:
                    yield from shards_of(key, out, shard_spec_of(parameter))
                else:
                    yield from self.range(key, index, param_shard.fragment.param_start, out).shards()

    def stored_buffers(self, stored: Iterable[str]) -> Iterator[Shard]:
        """Yield those of the ``stored`` buffers that are on this rank."""
        buffers = self.named_buffers()
        for name in stored:
            if name in buffers and buffers[name].numel():
                yield from shards_of(BUFFERS + name, buffers[name])

    @collective
    def after_loading(self, stored_names: dict[str, str]) -> None:
        """Refresh gathered copies of partitioned frozen parameters, and tell autograd of new values."""
        frozen = [parameter for name, parameter in self._frozen() if name in stored_names]
        handles = [handle for parameter in frozen if (handle := sharded_param_of(parameter)) is not None]
        gathered = [handle for handle in handles if handle.status is AVAILABLE]
        if gathered:
            refresh(gathered)
        torch.autograd.graph.increment_version([p for p in frozen if sharded_param_of(p) is None])


def _full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the parameter in the full model."""
    spec = shard_spec_of(parameter)
    return spec.full_shape if spec is not None else tuple(unpartitioned_shape(parameter))


def _number(value: object) -> object:
    """Return a copy: the next step changes torch's step counts in place, maybe before this one is written."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
