"""What of an engine is tensors: parameters, buffers and optimizer states, by name, to shards and back.

A trained parameter is stored once, as its master weights: what computes is rounded from them. A rank's part of it, and
of every state, is a range of the flattened parameter (:class:`FlatRange`); what all ranks hold whole is cut evenly over
them, so that each writes the same share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.names import clean
from zerolite.checkpoint.pieces import FlatRange, cut_evenly, empty_shard, whole
from zerolite.checkpoint.planner import Scalars, Shard, Target
from zerolite.checkpoint.safetensors import dtype_name
from zerolite.comm import Communicator
from zerolite.runtime.zero.buffer import ParameterBuffer, flattened
from zerolite.runtime.zero.partitioned_parameter import AVAILABLE, handle_of, refresh, whole_numel, whole_shape
from zerolite.runtime.zero.pieces import Piece
from zerolite.runtime.zero.sharded_optimizer import ShardedOptimizer

PARAMETERS, BUFFERS, OPTIMIZER, GRADIENTS, RANKS = "parameters/", "buffers/", "optimizer/", "gradients/", "ranks/"
_COUNTS = frozenset(("step", "eta", "mu", "mu_product"))  # what torch's optimizers keep once for a whole parameter


class ModelState:
    """The tensors of one engine. Reads and writes them between steps only."""

    def __init__(
        self,
        model: torch.nn.Module,
        buffer: ParameterBuffer,
        optimizer: ShardedOptimizer,
        comm: Communicator,
    ) -> None:
        self.model = model
        self.buffer = buffer
        self.optimizer = optimizer
        self._comm = comm

    # ---------------------------------------------------------------- names

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Each once, by the first of its names."""
        return {clean(name): parameter for name, parameter in self.model.named_parameters()}

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """Those that belong to a state dict, each once."""
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for prefix, module in self.model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                    seen.add(id(buffer))
                    found[clean(f"{prefix}.{name}" if prefix else name)] = buffer
        return found

    def extra_state(self) -> dict[str, Any]:
        """What modules add to their state dict by ``get_extra_state``."""
        return {clean(name): module.get_extra_state() for name, module in self._with_extra_state()}

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        for name, module in self._with_extra_state():
            if clean(name) in extra:
                module.set_extra_state(extra[clean(name)])

    def _with_extra_state(self) -> Iterator[tuple[str, torch.nn.Module]]:
        plain = torch.nn.Module.get_extra_state
        return ((n, m) for n, m in self.model.named_modules() if type(m).get_extra_state is not plain)

    def index_of(self) -> dict[int, int]:
        """From the id of a trained parameter to its index in the layout."""
        return {id(parameter): index for index, parameter in enumerate(self.buffer.parameters)}

    def names_by_index(self) -> list[str]:
        """Of the trained parameters. Raises CheckpointError if the model has lost one."""
        names = {id(parameter): name for name, parameter in self.named_parameters().items()}
        slots = self.buffer.layout.slots
        lost = [slots[i].name for i, p in enumerate(self.buffer.parameters) if id(p) not in names]
        if lost:
            raise CheckpointError(
                f"parameter '{lost[0]}' is trained, but is not in the model any more ({len(lost)} in all); it was "
                "replaced or removed after zerolite.initialize. Make a new engine for the changed model"
            )
        return [names[id(parameter)] for parameter in self.buffer.parameters]

    def described(self) -> dict[str, dict[str, Any]]:
        """For each parameter: shape, compute dtype, whether it is trained, and its other names."""
        trained = self.index_of()
        others: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            others.setdefault(id(parameter), []).append(clean(name))
        return {
            name: {
                "shape": list(whole_shape(parameter)),
                "dtype": dtype_name(parameter.dtype, name),
                "trained": id(parameter) in trained,
                "aliases": [other for other in others[id(parameter)] if other != name],
            }
            for name, parameter in self.named_parameters().items()
        }

    # ---------------------------------------------------------------- ranges

    def masters(self, names: Sequence[str]) -> Iterator[FlatRange]:
        """This rank's, or the whole ones where every rank has them."""
        for bucket, fragments in enumerate(self.buffer.fragments):
            for fragment in fragments:
                index = fragment.slot.index
                values = self.buffer.master[bucket].narrow(0, fragment.shard_start, fragment.numel)
                yield self.range(PARAMETERS + names[index], index, fragment.param_start, values)

    def range(self, key: str, index: int, start: int, values: torch.Tensor) -> FlatRange:
        """A range of something of the size of the trained parameter ``index``."""
        parameter = self.buffer.parameters[index]
        return FlatRange(key, tuple(whole_shape(parameter)), self._strides(parameter), start, values)

    def _strides(self, parameter: torch.nn.Parameter) -> tuple[int, ...]:
        handle = handle_of(parameter)
        return handle.strides if handle is not None else parameter.data.stride()

    def states(self, names: Sequence[str]) -> Iterator[tuple[Piece, str, dict[str, Any]]]:
        """The pieces that have states, with their parameter's name."""
        for piece in self.optimizer.pieces():
            if piece.fragment.numel:
                state = self.optimizer.method.state_of(piece)
                if state:
                    yield piece, names[piece.fragment.slot.index], state

    # ---------------------------------------------------------------- saving

    def shards(self, exclude_frozen: bool) -> tuple[list[Shard], Scalars]:
        """What this rank writes of parameters and states, and the states that are one number."""
        names = self.names_by_index()
        scalars: Scalars = {}
        sharded = list(self.masters(names))
        everywhere: list[FlatRange] = []  # what all ranks have, in the same order
        for piece, name, state in self.states(names):
            for kind, value in state.items():
                if self._is_scalar(kind, value, piece):
                    if piece.fragment.param_start == 0 and (self.buffer.shard or self._comm.rank == 0):
                        scalars.setdefault(kind, {})[name] = _number(value)
                    continue
                sharded.append(self._state_range(piece, name, kind, value))
        if not self.buffer.shard:
            sharded, everywhere = everywhere, sharded
        own, common = self._frozen() if not exclude_frozen else ([], [])
        sharded += own
        everywhere += common
        shards = [shard for part in sharded for shard in part.shards()]
        for part in cut_evenly(everywhere, self._comm.rank, self._comm.world_size):
            shards += part.shards()
        return shards + self._empty(exclude_frozen), scalars

    def _shape_of(self, piece: Piece) -> torch.Size:
        """Of the states that have a value for each element."""
        if self.buffer.shard:
            return torch.Size((piece.fragment.numel,))
        return whole_shape(self.buffer.parameters[piece.fragment.slot.index])

    def _is_scalar(self, kind: str, value: Any, piece: Piece) -> bool:
        """Whether a state is one number for a whole parameter."""
        if not isinstance(value, torch.Tensor):
            return value is None or isinstance(value, (bool, int, float))
        return value.dim() == 0 and (bool(self._shape_of(piece)) or kind in _COUNTS)

    def _state_range(self, piece: Piece, name: str, kind: str, value: Any) -> FlatRange:
        key = f"{OPTIMIZER}{kind}/{name}"
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"optimizer state '{kind}' of parameter '{name}': expected tensors and numbers, got "
                f"{type(value).__name__}, which cannot be saved"
            )
        if value.shape == self._shape_of(piece):
            index = piece.fragment.slot.index
            flat = value if self.buffer.shard else flattened(value, self._strides(self.buffer.parameters[index]))
            return self.range(key, index, piece.fragment.param_start, flat)
        if self.buffer.shard:
            raise CheckpointError(
                f"optimizer state '{kind}' of parameter '{name}': expected one value for each of this rank's "
                f"{piece.fragment.numel} elements, got shape {tuple(value.shape)}; at stage 0 it can be saved"
            )
        return whole(key, value)

    def _frozen(self) -> tuple[list[FlatRange], list[FlatRange]]:
        """Parameters that are not trained: this rank's parts of those that are partitioned, and those that are
        whole."""
        trained = self.index_of()
        own, common = [], []
        for name, parameter in self.named_parameters().items():
            if id(parameter) in trained or not whole_numel(parameter):
                continue
            handle = handle_of(parameter)
            if handle is None:
                common.append(whole(PARAMETERS + name, parameter.data))
                continue
            start = min(self._comm.rank * handle.shard.numel(), handle.numel)
            numel = min(handle.shard.numel(), handle.numel - start)
            values = handle.own_part() if handle.status is AVAILABLE else handle.shard[:numel]
            if numel:
                own.append(FlatRange(PARAMETERS + name, tuple(handle.shape), handle.strides, start, values))
        return own, common

    def _empty(self, exclude_frozen: bool) -> list[Shard]:
        trained = self.index_of()
        return [
            empty_shard(PARAMETERS + name, whole_shape(parameter), parameter.dtype)
            for name, parameter in self.named_parameters().items()
            if not whole_numel(parameter) and (id(parameter) in trained or not exclude_frozen)
        ]

    # ---------------------------------------------------------------- loading

    def targets(self, stored_names: dict[str, str]) -> Iterator[Target]:
        """Where the stored parameters go. stored_names: by name here; the others stay as they are."""
        for part in self.masters(self.names_by_index()):
            yield from _renamed(part, PARAMETERS, stored_names)
        trained = self.index_of()
        for name, parameter in self.named_parameters().items():
            if id(parameter) in trained or name not in stored_names or not whole_numel(parameter):
                continue
            key = PARAMETERS + stored_names[name]
            handle = handle_of(parameter)
            if handle is None:
                yield Target(key, _all_of(parameter.data), parameter.data)
                continue
            start = min(self._comm.rank * handle.shard.numel(), handle.numel)
            values = handle.shard[: min(handle.shard.numel(), handle.numel - start)]
            yield from FlatRange(key, tuple(handle.shape), handle.strides, start, values).targets()

    def state_targets(
        self,
        stored_names: dict[str, str],
        kinds: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]],
        scalars: Scalars,
    ) -> Iterator[Target]:
        """Make the optimizer's states of all parameters, and say where what is stored goes. kinds: shape and dtype by
        state and stored name. Parameters without stored ones are as if never updated."""
        names = self.names_by_index()
        for piece in self.optimizer.pieces():
            if not piece.fragment.numel:
                continue
            index = piece.fragment.slot.index
            stored = stored_names.get(names[index], "")
            numbers = {kind: values[stored] for kind, values in scalars.items() if stored in values}
            tensors = {kind: of_names[stored] for kind, of_names in kinds.items() if stored in of_names}
            shape = tuple(whole_shape(self.buffer.parameters[index]))
            wanted: dict[str, tuple[torch.Size, torch.dtype]] = {}
            for kind, (size, dtype) in tensors.items():
                if size != shape and self.buffer.shard:
                    raise CheckpointError(
                        f"optimizer state '{kind}' of parameter '{names[index]}' has shape {size} and the parameter "
                        f"{shape}: such states can be loaded at stage 0 only"
                    )
                wanted[kind] = (self._shape_of(piece) if size == shape else torch.Size(size), dtype)
            for kind, place in self.optimizer.method.make_state(piece, numbers, wanted).items():
                key = f"{OPTIMIZER}{kind}/{stored}"
                if tensors[kind][0] != shape or not self.buffer.shard:
                    yield Target(key, _all_of(place), place)
                else:
                    yield from self.range(key, index, piece.fragment.param_start, place).targets()

    def buffer_targets(self, stored: Iterable[str]) -> Iterator[Target]:
        buffers = self.named_buffers()
        for name in stored:
            if buffers[name].numel():
                yield Target(BUFFERS + name, _all_of(buffers[name]), buffers[name])

    def after_loading(self, stored_names: dict[str, str]) -> None:
        """Whole copies of partitioned parameters that are not trained follow; autograd learns of new values. Called
        on all ranks."""
        trained = self.index_of()
        frozen = [
            parameter
            for name, parameter in self.named_parameters().items()
            if id(parameter) not in trained and name in stored_names
        ]
        handles = [handle for parameter in frozen if (handle := handle_of(parameter)) is not None]
        gathered = [handle for handle in handles if handle.status is AVAILABLE]
        if gathered:
            refresh(gathered)
        torch.autograd.graph.increment_version([p for p in frozen if handle_of(p) is None])


def _renamed(part: FlatRange, prefix: str, stored_names: dict[str, str]) -> Iterator[Target]:
    name = part.key.removeprefix(prefix)
    if name in stored_names:
        key = prefix + stored_names[name]
        yield from FlatRange(key, part.shape, part.strides, part.start, part.values).targets()


def _all_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (0,) * tensor.dim(), tuple(tensor.shape)


def _number(value: Any) -> Any:
    """A copy: the next step changes torch's counts in place, while this one may not be written yet."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
