"""Access to full gradients, master weights and optimizer states by parameter, at every stage.

Each function takes one parameter or several. Several need one collective over the data-parallel ranks, and one more for
each parameter that tensor parallelism shards. Values are those of the full parameter. All ranks that have the
parameters (all, or those of a pipeline stage) call the functions, with the same parameters in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from zerolite.comm import Communicator, collective, largest
from zerolite.tensor_parallel.shard_spec import shard_spec_of
from zerolite.utils.dtypes import FLOATS
from zerolite.zero.bucket import Bucket
from zerolite.zero.engine_parts import EngineParts
from zerolite.zero.flat import flattened
from zerolite.zero.layout import Fragment
from zerolite.zero.stage3.partitioned_parameter import ZeroParamStatus, sharded_param_of, unpartitioned_shape
from zerolite.zero.update import OptimParamShard

Parameters = torch.nn.Parameter | Iterable[torch.nn.Parameter]

OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Weak reference to the engine that trains a parameter, by the parameter, which is referenced weakly too."""


@collective
def get_full_grad(parameters: Parameters) -> Any:
    """Return the pending gradient: the mean over ranks, without loss scale, before clipping.

    The call completes the reduction of pending gradients.

    Args:
        parameters: one trained parameter, or several of one engine.

    Returns:
        A copy on the parameter's device: fp32, in the full parameter's shape. None if no rank has a gradient for it.
        For several parameters, a list.

    Raises:
        ValueError: for a parameter that no engine trains.

    All ranks pass the same parameters.
    """
    return _read_all(parameters, lambda access, indices: access.gradients(indices))


@collective
def set_full_grad(parameters: Parameters, value: object) -> None:
    """Replace the pending gradient for the next step. The norm and clipping use the new one.

    Args:
        parameters: as in :func:`get_full_grad`.
        value: the full gradient without loss scale, the same on all ranks. None leaves the parameter out of the step.
            For several parameters, as many values.

    Raises:
        ValueError: for a wrong shape.
        RuntimeError: with a pipeline, whose steps leave no gradient pending.

    Called after the backwards of a gradient accumulation.
    """
    _set(parameters, value, lambda access, index, one: access.set_gradient(index, one))


@collective
def get_full_master(parameters: Parameters) -> Any:
    """Return copies of the full master weights, in their own dtype (fp32 in mixed precision).

    Arguments and errors are those of :func:`get_full_grad`.
    """
    return _read_all(parameters, lambda access, indices: access.masters(indices))


@collective
def set_full_master(parameters: Parameters, value: object) -> None:
    """Set the master weights to ``value``, full and the same on all ranks. The module's parameter is set at once, too.

    Raises ValueError for a wrong shape or None. Called between steps.
    """
    _set(parameters, value, lambda access, index, one: access.set_master(index, one))


@collective
def get_full_optimizer_state(parameters: Parameters, name: str) -> Any:
    """Return a copy of one full optimizer state, in its dtype.

    Args:
        parameters: as in :func:`get_full_grad`.
        name: torch's name of the state: ``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``, …, or ``step``.

    Returns:
        The state in the full parameter's shape; ``step`` as a 0-dim tensor. None before the parameter's first update.

    Raises:
        ValueError: on all ranks, if the parameter has states and none of them has that name.
    """
    return _read_all(parameters, lambda access, indices: access.states(indices, name))


@collective
def set_full_optimizer_state(parameters: Parameters, name: str, value: object) -> None:
    """Set one optimizer state.

    Args:
        parameters: as in :func:`get_full_grad`.
        name: torch's name of the state.
        value: the full state, the same on all ranks; a number for ``step``.

    Raises:
        ValueError: for a wrong shape, and before the parameter's first update.

    Called between steps.
    """
    _set(parameters, value, lambda access, index, one: access.set_state(index, name, one))


# -------------------------------------------------------------------- from parameters to an engine


def _access_of(parameters: Sequence[torch.nn.Parameter]) -> tuple[ParameterAccess, list[int]]:
    """Return the access to the engine of these parameters, and their indices there."""
    engines: list[ParameterAccess] = []
    for parameter in parameters:
        owner = OWNERS.get(parameter)
        access = None if owner is None else owner.access()
        if access is None:
            raise ValueError(
                f"expected a parameter that an engine trains, got one of shape {tuple(unpartitioned_shape(parameter))} "
                "that none does: it is frozen, or belongs to a model that was not given to zerolite.initialize"
            )
        engines.append(access)
    if len(set(map(id, engines))) > 1:
        raise ValueError("expected parameters of one engine, got some of several; call once for each engine")
    positions = engines[0].positions()
    return engines[0], [positions[id(parameter)] for parameter in parameters]


@torch.no_grad()
def _read_all(parameters: Parameters, get: Callable[[ParameterAccess, list[int]], list[Any]]) -> object:
    is_one = isinstance(parameters, torch.Tensor)
    params: list[Any] = [parameters] if is_one else list(parameters)
    results = get(*_access_of(params)) if params else []
    return results[0] if is_one else results


@torch.no_grad()
def _set(parameters: Parameters, value: Any, put: Callable[[ParameterAccess, int, Any], None]) -> None:
    is_one = isinstance(parameters, torch.Tensor)
    params: list[Any] = [parameters] if is_one else list(parameters)
    values = [value] if is_one else list(value)
    if len(values) != len(params):
        raise ValueError(f"expected a value for each of {len(params)} parameters, got {len(values)}")
    if params:
        access, indices = _access_of(params)
        for index, single in zip(indices, values, strict=True):
            put(access, index, single)


# -------------------------------------------------------------------- access to one engine


class ParameterAccess:
    """Access to one engine's gradients, masters and states, by the index of the parameter in the layout."""

    def __init__(self, parts: EngineParts) -> None:
        self._pipeline, self._buffer, self._optimizer = parts.pipeline, parts.buffer, parts.optimizer
        self._reducer, self._topology = parts.reducer, parts.topology

    def positions(self) -> dict[int, int]:
        """Return the index that the methods below take, by the id of each trained parameter."""
        return {id(parameter): index for index, parameter in enumerate(self._buffer.parameters)}

    # ---------------------------------------------------------------- gradients

    def gradients(self, indices: list[int]) -> list[torch.Tensor | None]:
        used = self._pipeline.pending_parameters()
        flags = self._agree([float(index in used) for index in indices], self._topology.tensor)
        wanted = [index for index, flag in zip(indices, flags, strict=True) if flag]
        factor = 1.0 / self._pipeline.divisor()
        shards = {i: b.view_of(f, b.mean()).float() * factor for i, b, f in self._fragments(wanted)}
        full = dict(zip(wanted, self._full(wanted, self._buffer.gather(wanted, shards, torch.float32)), strict=True))
        return [full.get(index) for index in indices]

    def set_gradient(self, index: int, value: torch.Tensor | None) -> None:
        if self._topology.pipe.world_size > 1:
            raise RuntimeError(
                "set_full_grad: with a pipeline engine.train_batch() uses a step's gradients before it returns, and "
                "none are pending between its calls; clip by gradient_clipping in the config"
            )
        values = None if value is None else self._flat(index, value)
        self._pipeline.reduce()
        for _, bucket, fragment in self._fragments([index]):
            part = bucket.view_of(fragment, bucket.mean())
            if values is None:
                part.zero_()
            else:
                _copy(bucket, fragment, part, values * self._pipeline.divisor())
        self._reducer.drop_reads()
        self._pipeline.grads.set_by_call(index, values is not None)

    # ---------------------------------------------------------------- masters

    def masters(self, indices: list[int]) -> list[torch.Tensor]:
        return self._full(indices, self.tensor_parallel_masters(indices))

    def tensor_parallel_masters(self, indices: list[int]) -> list[torch.Tensor]:
        """Return the masters that this rank's data-parallel ranks have together: without tensor parallelism the full
        ones, otherwise this rank's shards."""
        self._pipeline.check_available()
        self._pipeline.written.collect_all()
        shards = {index: bucket.master_view(fragment) for index, bucket, fragment in self._fragments(indices)}
        dtypes = [self._reducer.bucket_of[index].master.dtype for index in indices]
        if len(set(dtypes)) == 1:
            return self._buffer.gather(indices, shards, dtypes[0])
        return [self._buffer.gather([i], shards, dtype)[0] for i, dtype in zip(indices, dtypes, strict=True)]

    def set_master(self, index: int, value: torch.Tensor) -> None:
        values = self._flat(index, value)
        self._pipeline.check_available()
        self._pipeline.written.collect_all()
        for _, bucket, fragment in self._fragments([index]):
            master = bucket.master_view(fragment)
            _copy(bucket, fragment, master, values)
            self._buffer.placements.drop_reads()
        parameter = self._buffer.parameters[index]
        sharded_param = sharded_param_of(parameter)
        if sharded_param is None:
            strides = self._reducer.bucket_of[index].strides[index]
            parameter.data.copy_(values.as_strided(parameter.shape, strides))
        else:
            sharded_param.write(values)  # its shard, of which this rank may update a part only
        if sharded_param is None or sharded_param.status is ZeroParamStatus.AVAILABLE:
            torch.autograd.graph.increment_version([parameter])

    # ---------------------------------------------------------------- states

    def states(self, indices: list[int], name: str) -> list[torch.Tensor | None]:
        states = self._states_here(indices)
        contents = self._contents(indices, states, name)
        if _OTHER in contents:
            self._refuse_name(indices[contents.index(_OTHER)], name, states)
        if name == "step":
            steps = self._agree([float(states[i]["step"]) if states.get(i) else 0.0 for i in indices])
            tensors = [torch.tensor(step, dtype=torch.float32, device="cpu") for step in steps]
            return [t if content != _NOTHING else None for t, content in zip(tensors, contents, strict=True)]
        full_states: dict[int, torch.Tensor] = {}
        for content in sorted(set(contents) - {_NOTHING}):
            same = [index for index, other in zip(indices, contents, strict=True) if other == content]
            shards = {index: states[index][name] for index in same if states.get(index)}
            full = self._full(same, self._buffer.gather_states(same, shards, _DTYPES[int(content) - _TENSOR]))
            full_states.update(zip(same, full, strict=True))
        return [full_states.get(index) for index in indices]

    def _states_here(self, indices: list[int]) -> dict[int, dict[str, Any]]:
        """Return this rank's part of the states, by index and name."""
        self._pipeline.check_available()
        self._pipeline.state.settle()
        return {index: self._optimizer.method.state_of(shard) or {} for index, shard in self._shards(indices)}

    def set_state(self, index: int, name: str, value: Any) -> None:
        local_states = self._states_here([index])
        (content,) = self._contents([index], local_states, name)
        if content in (_NOTHING, _OTHER):
            self._refuse_name(index, name, local_states)
        is_step, method = name == "step", self._optimizer.method
        new = torch.tensor(float(value), dtype=torch.float32, device="cpu") if is_step else self._flat(index, value)
        for _, shard in self._shards([index]) if local_states.get(index) else ():
            part = new if is_step else local_states[index][name].clone()
            if not is_step:
                _copy(shard.bucket, shard.fragment, part, new)
            method.load_state(shard, {**local_states[index], name: part})
            self._buffer.placements.drop_reads()

    def _contents(self, indices: list[int], states: dict[int, dict[str, Any]], name: str) -> list[float]:
        """Return what all ranks know together of the state ``name`` of these parameters."""
        sizes = {index: shard.fragment.numel for index, shard in self._shards(indices)}
        return self._agree([_content(states.get(index), name, sizes.get(index, 0)) for index in indices])

    def _refuse_name(self, index: int, name: str, states: dict[int, dict[str, Any]]) -> None:
        made = states.get(index)
        remedy = f"expected one of {sorted(made)}" if made else "states are made by the first update"
        parameter = self._buffer.layout.slots[index].name
        raise ValueError(f"parameter '{parameter}' has no optimizer state '{name}' of its elements; {remedy}")

    # ---------------------------------------------------------------- shards and full tensors

    def _shards(self, indices: Iterable[int]) -> list[tuple[int, OptimParamShard]]:
        """Return what this rank has states for of these parameters, with their indices."""
        wanted = set(indices)
        return [(shard.index, shard) for shard in self._optimizer.shards() if shard.index in wanted]

    def _fragments(self, indices: Iterable[int]) -> list[tuple[int, Bucket, Fragment]]:
        """Return what this rank has of the gradients and masters of these parameters, with their indices."""
        wanted = set(indices)
        every = ((bucket, fragment) for bucket in self._buffer.buckets for fragment in bucket.fragments)
        return [(f.slot.index, bucket, f) for bucket, f in every if f.slot.index in wanted]

    def _flat(self, index: int, value: object) -> torch.Tensor:
        """Check the shape of ``value``, and return it flat, in the parameter's order in memory. With tensor parallelism
        only this rank's shard of it is returned."""
        parameter, bucket = self._buffer.parameters[index], self._reducer.bucket_of[index]
        spec = shard_spec_of(parameter)
        shape = unpartitioned_shape(parameter) if spec is None else torch.Size(spec.full_shape)
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            name = self._buffer.layout.slots[index].name
            raise ValueError(f"parameter '{name}': expected a tensor of {tuple(shape)}, got {got}")
        part = value.detach() if spec is None else spec.of(value.detach())
        return flattened(part.to(bucket.master.device), bucket.strides[index])

    def _agree(self, values: list[float], comm: Communicator | None = None) -> list[float]:
        """Return the maximum of each value over ranks, by default over the data-parallel ones."""
        device = self._buffer.placements.device
        return largest(values, comm or self._topology.data, device, "access", torch.float64)

    def _full(self, indices: list[int], shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the full tensors of ``shards``, which are this rank's tensor-parallel shards where layers are
        sharded."""
        results = []
        for index, part in zip(indices, shards, strict=True):
            full, spec = part, shard_spec_of(self._buffer.parameters[index])
            if spec is not None:
                full = part.new_zeros(spec.full_shape)
                spec.into(full, part)
                # A sum puts the shards together: each rank has zeros outside of its own.
                self._topology.sharing(spec.dimension).all_reduce(full.view(-1), tag="access").wait()
            results.append(full)
        return results


def _copy(bucket: Bucket, fragment: Fragment, target: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy this rank's part of ``flat``, all elements of a parameter, to ``target``."""
    part = flat.narrow(0, fragment.param_start, fragment.numel)
    if target.shape != part.shape:  # this rank has the full parameter, in its shape
        part = flat.as_strided(target.shape, bucket.strides[fragment.slot.index])
    target.copy_(part)


# What a rank knows of a state. The order matters: ranks without elements of a parameter have no state of it, so the
# maximum over ranks is what all know together.
_NOTHING, _OTHER, _TENSOR = 0.0, 1.0, 2
_DTYPES = (*FLOATS, torch.float64)


def _content(state: dict[str, Any] | None, name: str, numel: int) -> float:
    if not state:
        return _NOTHING
    value = state.get(name)
    if not isinstance(value, torch.Tensor) or (value.dim() and value.numel() != numel):
        return _OTHER
    return float(_TENSOR + _DTYPES.index(value.dtype))
