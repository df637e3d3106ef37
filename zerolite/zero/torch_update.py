"""Updates by any torch optimizer, whose parameters are the optimizer shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from zerolite.utils.accelerator import address
from zerolite.utils.dtypes import sync_master_from_param_
from zerolite.utils.memory_tags import DEVICE, DISK, HOST, STATES, listeners, tag_memory
from zerolite.zero.bucket import Bucket
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.stage3.partitioned_parameter import unpartitioned_shape
from zerolite.zero.update import OptimParamShard, SpanTensors, State, UpdateInputs, UpdateMethod


class TorchUpdate(UpdateMethod):
    """Update by the inner optimizer itself, which keeps the states of the shards.

    During an update its param groups contain the shards of some buckets only, and its states have them as keys. Master
    and gradient of each shard are views of flat tensors, so nothing is copied. If the update computes in another dtype
    than the masters', or if tensors are offloaded, the shards are views of copies during the update.

    States on disk are in ``Bucket.states``, and those of the shards are views of them.
    """

    def __init__(self, inner: Optimizer, buffer: ParameterBuffer) -> None:
        """
        Args:
            inner: optimizer over the tensors of the shards.
            buffer: buckets with the masters.
        """
        super().__init__(inner, buffer)
        # Every group runs a fused kernel that takes ``found_inf`` (torch's convention for GradScaler). A skipped first
        # update would leave SGD's momentum buffer uninitialised.
        takes_found_inf = getattr(inner, "_step_supports_amp_scaling", False) and not isinstance(inner, torch.optim.SGD)
        self.can_skip_on_device = bool(takes_found_inf) and self._is_fused()
        self._known: dict[int, State] = {}  # what the last update has left in `inner.state`, by index of the parameter
        # Other libraries count steps in param groups: the numbers before this step, by id of the group.
        self._counts: dict[int, dict[str, Any]] = {}
        self._stand_ins: dict[int, torch.Tensor] = {}  # by param group
        self._counts_in_groups = type(inner).__module__.split(".")[0] not in ("torch", "zerolite")
        step: Any = type(inner).step
        # Without torch's wrapper, which calls the user's hooks: one step may update several sub-groups.
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step
        self.add_buckets(buffer.buckets)

    def add_buckets(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if _updates_copy(bucket):
                _write_back_master(bucket, bucket.master)

    def begin(self, inputs: UpdateInputs | None) -> None:
        self._counts.clear()

    def _is_fused(self) -> bool:
        return all(group.get("fused") for group in self._inner.param_groups)

    def take_over(self) -> None:
        self._check_groups()
        if self.can_skip_on_device and not self._is_fused():
            raise ValueError(
                "optimizer.param_groups: expected 'fused' to stay True, as it was in zerolite.initialize, because the "
                "device decides whether a step is skipped, got a group without it; make the optimizer with fused=False"
            )
        replaced = [shard for shard in self.shards() if self._is_replaced(shard)]
        if replaced:
            self._move_states(replaced)
            self._buffer.placements.drop_reads()
            self._note_states(replaced)

    def _is_replaced(self, shard: OptimParamShard) -> bool:
        """Return True if the user has put other tensors into a shard's states. Raises ValueError if they do not fit."""
        state, known = self._state(shard), self._known.get(shard.index, {})
        if not state or (len(state) == len(known) and all(map(is_, state.values(), known.values()))):
            return False
        replaced = False
        for name, before in known.items():
            value: Any = state.get(name)
            if value is before or not isinstance(before, torch.Tensor):
                continue
            replaced, is_tensor = True, isinstance(value, torch.Tensor)
            if value is None and name in state and isinstance(self._inner, torch.optim.SGD):
                continue  # it begins with a new buffer
            if not is_tensor or value.shape != before.shape or (value.dtype != before.dtype and value.dim()):
                got = f"{tuple(value.shape)} in {value.dtype}" if is_tensor else repr(value)
                raise ValueError(
                    f"optimizer.state: expected '{name}' of parameter '{shard.fragment.slot.name}' to be "
                    f"{tuple(before.shape)} in {before.dtype}, as the last update has left it on this rank, got {got}; "
                    "zerolite.set_full_optimizer_state takes the full state"
                )
        return replaced

    def _note_states(self, shards: Iterable[OptimParamShard]) -> None:
        for shard in shards:
            self._known[shard.index] = dict(self._state(shard))

    @torch.no_grad()
    def update(self, sub_group: Sequence[SpanTensors], inputs: UpdateInputs) -> None:
        for tensors in sub_group:
            if tensors.out is not None:
                sync_master_from_param_(tensors.master, tensors.out)
        self._update(sub_group, inputs)

    def _update(self, sub_group: Sequence[SpanTensors], inputs: UpdateInputs) -> None:
        """Update the shards of ``inputs.used``."""
        used, factor = inputs.used, inputs.factor
        shards: list[OptimParamShard] = []
        bound: list[SpanTensors] = []
        gradients: list[torch.Tensor] = []
        for tensors in sub_group:
            bucket = tensors.span.bucket
            members = [shard for shard in bucket.shards if used is None or shard.index in used]
            if not members:
                continue
            self._bind(tensors)
            gradients.append(tensors.gradient.to(bucket.update_dtype))
            _set_grads(members, gradients[-1])
            shards += members
            bound.append(tensors)
        if gradients and (isinstance(factor, torch.Tensor) or factor != 1.0):
            torch._foreach_mul_(gradients, factor)
        chosen: dict[int, list[torch.Tensor]] = {}
        for shard in shards:
            chosen.setdefault(shard.group, []).append(shard.tensor)
        if self._counts_in_groups:
            self._restore_counts()
            self._add_stand_ins(chosen, used, sub_group[0].master)
        try:
            self._step_inner(sub_group, shards, chosen, inputs)
        finally:
            for shard in shards:
                shard.tensor.grad = None
            for tensors in bound:
                self._unbind(tensors)
        self._tag_states(shards)
        self._note_states(shards)
        for tensors in bound:
            if tensors.out is not None:
                tensors.out.copy_(tensors.master)

    def _step_inner(
        self,
        sub_group: Sequence[SpanTensors],
        shards: Sequence[OptimParamShard],
        chosen: dict[int, list[torch.Tensor]],
        inputs: UpdateInputs,
    ) -> None:
        """Let the inner optimizer update the tensors of ``chosen``, by param group: those of ``shards``, which are in
        ``sub_group``. The tensors have their gradients."""
        if chosen:
            with self._limited_to(shards, chosen), self._with_found_inf(inputs.found_inf):
                self._step(self._inner)

    def _restore_counts(self) -> None:
        """Let each call of a step begin with the numbers that the groups had before the step, so that they count it
        once."""
        for group in self._inner.param_groups:
            now = {key: value for key, value in group.items() if type(value) in (int, float, bool)}
            before = self._counts.setdefault(id(group), now)
            for key in now.keys() - before.keys():
                del group[key]
            group.update(before)

    def _add_stand_ins(
        self, chosen: dict[int, list[torch.Tensor]], used: frozenset[int] | None, like: torch.Tensor
    ) -> None:
        """Add a tensor of one element for each param group without a shard here, so that all ranks count its steps."""
        index_of = {id(parameter): index for index, parameter in enumerate(self._buffer.parameters)}
        for number, group in enumerate(self._inner.param_groups):
            trained = [parameter for parameter in group["params"] if id(parameter) in index_of]
            if number in chosen or not trained:
                continue
            if number not in self._stand_ins:
                slot = self._buffer.layout.slots[index_of[id(trained[0])]]
                bucket = self._buffer.buckets[slot.bucket]
                shape = unpartitioned_shape(trained[0]) if bucket.owners or not bucket.is_sharded else [1]
                self._stand_ins[number] = torch.zeros([1] * len(shape), dtype=like.dtype, device=like.device)
            stand_in = self._stand_ins[number]
            takes_part = used is None or any(index_of[id(parameter)] in used for parameter in trained)
            stand_in.grad = torch.zeros_like(stand_in) if takes_part else None
            chosen[number] = [stand_in]

    def _tag_states(self, shards: Iterable[OptimParamShard]) -> None:
        """Tag the memory of states for reports, if a report listens or it is offloaded."""
        for shard in shards:
            location = shard.bucket.placement.location
            if listeners or location != DEVICE:
                for value in self._state(shard).values():
                    if isinstance(value, torch.Tensor):
                        on_host = location == DISK and not _has_all_elements(value, shard)
                        tag_memory(value, STATES, HOST if on_host else location)

    # ---------------------------------------------------------------- states

    def _state(self, shard: OptimParamShard) -> State:
        """Return the dict with the states of a shard; an empty one if it was never updated."""
        state: State = self._inner.state.get(shard.parameter) or {}
        return state

    def memory(self) -> Iterable[torch.Tensor]:
        for shard in self.shards():
            yield from (value for value in self._state(shard).values() if isinstance(value, torch.Tensor))

    def load_state(self, shard: OptimParamShard, state: Mapping[str, object]) -> None:
        self._inner.state.pop(shard.parameter, None)
        if state:
            device = self._device_of(shard)
            self._inner.state[shard.parameter] = {
                key: value.detach().to(value.device if key == "step" else device, copy=True)
                if isinstance(value, torch.Tensor)
                else value
                for key, value in state.items()
            }
            self._move_states([shard])
        self._note_states([shard])

    def make_state(
        self, shard: OptimParamShard, numbers: Mapping[str, Any], tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> dict[str, torch.Tensor]:
        group, device = self._inner.param_groups[shard.group], self._device_of(shard)

        def allocate(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
            """Allocate a state. For a full parameter it has the parameter's strides, because torch's fused kernels go
            through both in the order of memory."""
            if not shard.keeps_shape or shape != unpartitioned_shape(shard.parameter):
                return torch.empty(shape, dtype=dtype, device=device)
            return torch.empty_strided(shape, shard.bucket.strides[shard.index], dtype=dtype, device=device)

        made = {name: allocate(shape, dtype) for name, (shape, dtype) in tensors.items()}
        # Torch keeps step counts on the device of the kernel that reads them.
        number_device = device if group.get("fused") or group.get("capturable") else torch.device("cpu")
        moved_numbers = {
            name: value.to(number_device, copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in numbers.items()
        }
        self._inner.state.pop(shard.parameter, None)
        if moved_numbers or made:
            state = self._inner.state[shard.parameter] = {**moved_numbers, **made}
            self._move_states([shard])
            made = {name: state[name] for name in made}
        self._note_states([shard])
        return made

    def _device_of(self, shard: OptimParamShard) -> torch.device:
        """Return the device on which the shard is updated."""
        return torch.device("cpu") if shard.bucket.updates_on_host else self._buffer.placements.device

    def _move_states(self, shards: Iterable[OptimParamShard]) -> None:
        """Move states with one value per element to the device of the update, or to the disk if they are offloaded to
        it."""
        for shard in shards:
            state = self._state(shard)
            for name, value in state.items():
                if not _has_all_elements(value, shard):
                    continue
                if shard.bucket.placement.location != DISK:
                    state[name] = value.to(self._device_of(shard))
                    continue
                view = shard.view(_flat_on_disk(shard.bucket, name, value.dtype))
                if address(view) != address(value):
                    state[name] = view.copy_(value)

    # ---------------------------------------------------------------- the inner optimizer during an update

    @contextlib.contextmanager
    def _limited_to(self, shards: Sequence[OptimParamShard], chosen: dict[int, list[torch.Tensor]]) -> Iterator[None]:
        """Return a context in which the inner optimizer has the tensors of ``chosen`` alone, by param group, and its
        states have these shards as keys. Before and after, both have the model's parameters."""
        everything, state = list(self._inner.param_groups), self._inner.state
        model_params = [group["params"] for group in everything]
        keys = [(shard.parameter, shard.tensor) for shard in shards]
        for parameter, tensor in keys:
            if parameter in state:
                state[tensor] = state.pop(parameter)
        try:
            for index, tensors in chosen.items():
                everything[index]["params"] = tensors
            # In place, because an optimizer around another one shares the list with it (Lookahead, SAM).
            self._inner.param_groups[:] = [everything[index] for index in sorted(chosen)]
            yield
        finally:
            self._inner.param_groups[:] = everything
            for group, parameters in zip(everything, model_params, strict=True):
                group["params"] = parameters
            for parameter, tensor in keys:
                if tensor in state:
                    state[parameter] = state.pop(tensor)
            for stand_in in self._stand_ins.values():
                state.pop(stand_in, None)

    @contextlib.contextmanager
    def _with_found_inf(self, found_inf: torch.Tensor | None) -> Iterator[None]:
        """Return a context in which torch's fused kernels skip the update if ``found_inf`` is not zero. As GradScaler
        does, it passes the tensor as an attribute of the optimizer."""
        if found_inf is None:
            yield
            return
        vars(self._inner).update(grad_scale=None, found_inf=found_inf)
        try:
            yield
        finally:
            for name in ("grad_scale", "found_inf"):
                del vars(self._inner)[name]

    # ---------------------------------------------------------------- updates of copies

    def _bind(self, tensors: SpanTensors) -> None:
        """Make the shards views of ``tensors.master``, or of a copy in the dtype of the update, and their states views
        of ``tensors.states``. Does nothing if the stored master is updated in place."""
        bucket, is_copy = tensors.span.bucket, _is_copy(tensors)
        if not is_copy and not _updates_copy(bucket):
            return
        master = tensors.master.to(bucket.update_dtype)
        for shard in bucket.shards:
            shard.tensor.data = shard.view(master)
            if is_copy:
                self._state(shard).update(_views_of(shard, self._state(shard), tensors.states))

    def _unbind(self, tensors: SpanTensors) -> None:
        """Undo :meth:`_bind`. Results that the update has not written in place are copied to ``tensors``."""
        bucket, is_copy = tensors.span.bucket, _is_copy(tensors)
        for shard in bucket.shards if is_copy else ():
            state = self._state(shard)
            for name, view in _views_of(shard, state, tensors.states).items():
                if address(state[name]) != address(view):
                    view.copy_(state[name])
                state[name] = shard.view(bucket.states[_key(name, view.dtype)])
        if _updates_copy(bucket):
            _write_back_master(bucket, tensors.master)
        elif is_copy:
            for shard in bucket.shards:
                shard.tensor.data = shard.view(bucket.master)
        if is_copy:
            self._move_states(bucket.shards)


def _updates_copy(bucket: Bucket) -> bool:
    """Return True if the update computes in more bits than the masters have, so that it updates a copy."""
    return bucket.update_dtype != bucket.master.dtype


def _is_copy(tensors: SpanTensors) -> bool:
    """Return True if ``tensors`` has a staging copy of the master, not the master itself."""
    return tensors.master is not tensors.span.bucket.master


def _write_back_master(bucket: Bucket, master: torch.Tensor) -> None:
    """Round the updated copies of the shards into ``master``, and free their memory."""
    for shard in bucket.shards:
        if shard.tensor.numel():
            shard.view(master).copy_(shard.tensor)
            shard.tensor.data = shard.tensor.new_empty(0)


def _has_all_elements(value: object, shard: OptimParamShard) -> bool:
    """Return True if a state has one value for each element of its shard."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == shard.fragment.numel


def _key(name: str, dtype: torch.dtype) -> str:
    """Return the key in ``Bucket.states``: parameters of one bucket may have a state in different dtypes."""
    return f"{name} in {dtype}"


def _flat_on_disk(bucket: Bucket, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the stored state of a bucket on disk, for the shards that have it in this dtype."""
    key = _key(name, dtype)
    if key not in bucket.states:
        bucket.states[key] = bucket.placement.zeros(bucket.master.numel(), dtype, STATES)
    return bucket.states[key]


def _views_of(shard: OptimParamShard, state: State, flats: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the shard's views, by name, of those of ``flats`` in which its states are stored."""
    stored = {name: flats.get(_key(name, v.dtype)) for name, v in state.items() if _has_all_elements(v, shard)}
    return {name: shard.view(flat) for name, flat in stored.items() if flat is not None}


def _set_grads(shards: Sequence[OptimParamShard], gradient: torch.Tensor) -> None:
    """Set the ``grad`` of shards of one bucket to views of ``gradient``."""
    if len(shards) > 1 and not shards[0].keeps_shape:
        sizes, position = [], 0  # gap, shard, gap, ..., gap
        for shard in shards[0].bucket.shards:
            sizes += [shard.fragment.shard_start - position, shard.fragment.numel]
            position = shard.fragment.shard_start + shard.fragment.numel
        parts = gradient.split_with_sizes([*sizes, gradient.numel() - position])[1::2]
        for shard in shards:
            shard.tensor.grad = parts[shard.position]
    else:
        for shard in shards:
            shard.tensor.grad = shard.view(gradient)
