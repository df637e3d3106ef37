"""Updates by any torch optimizer, whose parameters are the optimizer shards."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from zerolite.utils.accelerator import address
from zerolite.utils.memory_tags import DEVICE, DISK, HOST, STATES, listeners, tag_memory
from zerolite.utils.rounding import sync_master_from_param_
from zerolite.zero.bucket import Bucket
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.layout import Fragment
from zerolite.zero.optim_shards import OptimParamShard, SpanTensors, State
from zerolite.zero.stage3.partitioned_parameter import unpartitioned_shape


class TorchUpdate:
    """Update by the inner optimizer itself, which keeps the states of the shards.

    During an update its param groups contain the shards of some buckets only, and its states have them as keys. Master
    and gradient of each shard are views of flat tensors, so nothing is copied. If the update computes in another dtype
    than the masters', or if tensors are offloaded, the shards are views of copies during the update.
    """

    one_launch: ClassVar[bool] = False
    syncs_masters: ClassVar[bool] = False
    splits_buckets: ClassVar[bool] = False
    most_maybe_unused: ClassVar[int | None] = 32  # they are updated one by one

    def __init__(
        self,
        inner: Optimizer,
        buffer: ParameterBuffer,
        shards: list[list[OptimParamShard]],
        update_dtypes: Sequence[torch.dtype],
    ) -> None:
        """
        Args:
            inner: optimizer over the tensors of the shards.
            buffer: buffer with the masters.
            shards: optimizer shards of each bucket.
            update_dtypes: dtype in which each bucket is updated.
        """
        self._inner = inner
        self._takes_found_inf = bool(getattr(inner, "_step_supports_amp_scaling", False))
        self._buffer = buffer
        self._shards: list[list[OptimParamShard]] = []
        self._update_dtypes: list[torch.dtype] = []
        self._sizes: list[list[int]] = []
        self._maybe_unused: frozenset[int] = frozenset()  # parameters that the device may leave out of this update
        self._new_states: set[int] = set()  # those without a state yet
        # States on disk, by bucket and name, laid out like the masters. States of the shards are views of them.
        self._on_disk: dict[int, dict[str, torch.Tensor]] = {}
        # Memory for states that do not exist yet, by index of the parameter: see _reserve.
        self._reserved: dict[int, list[torch.Tensor]] = {}
        self._state_dtypes: dict[tuple[int, torch.dtype, int], dict[str, torch.dtype]] = {}
        # Other libraries count steps in param groups: the numbers before this step, by id of the group.
        self._counts: dict[int, dict[str, Any]] = {}
        self._stand_ins: dict[int, torch.Tensor] = {}  # by param group
        self._counts_in_groups = type(inner).__module__.split(".")[0] not in ("torch", "zerolite")
        step: Any = type(inner).step
        # Without torch's wrapper, which calls the user's hooks: one step may update several sub-groups.
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step
        self.extend(shards, update_dtypes)

    def extend(self, shards: Sequence[list[OptimParamShard]], update_dtypes: Sequence[torch.dtype]) -> None:
        """Add the shards of further buckets."""
        self._update_dtypes += update_dtypes
        for members in shards:
            bucket = len(self._shards)
            self._shards.append(members)
            fragments, master = self._buffer.buckets[bucket].fragments, self._buffer.buckets[bucket].master
            self._sizes.append(_split_sizes(fragments, master.numel()))
            if self._updates_copy(bucket):
                self._write_back_master(bucket, master)
            self._move_states(members)
            self._reserve(members)

    def begin(self, used: frozenset[int] | None, maybe_unused: frozenset[int] = frozenset()) -> None:
        """Begin the updates of a step. ``used`` is not needed: torch's optimizers count steps in their states."""
        self._maybe_unused = maybe_unused
        self._new_states.clear()
        self._counts.clear()
        if self._on_disk:  # the user may have put other tensors into `optimizer.state`
            written = [view for bucket in self._on_disk for view in self._move_states(self._shards[bucket])]
            if written:
                self._buffer.placements.drop_reads(written)

    def on_left_out(self, indices: Iterable[int]) -> None:
        """Drop the new states of parameters that the device has left out. Their step counts are on the device."""
        for index in self._new_states.intersection(indices):  # as in torch: no gradient, no state
            self._inner.state.pop(self._buffer.parameters[index], None)
        self._new_states.difference_update(indices)

    def states_of(self, bucket: Bucket) -> Mapping[str, torch.Tensor]:
        return self._on_disk.get(bucket.index, {})

    @torch.no_grad()
    def update(
        self,
        sub_group: Sequence[SpanTensors],
        factor: float | torch.Tensor,
        used: frozenset[int] | None,
        found_inf: torch.Tensor | None,
        uses: torch.Tensor | None = None,
    ) -> None:
        if uses is not None:
            assert used is not None
            for index in sorted(self._maybe_unused):
                bucket = self._buffer.layout.slots[index].bucket
                if own := [tensors for tensors in sub_group if tensors.span.bucket.index == bucket]:
                    left_out = uses[index] == 0 if found_inf is None else (uses[index] == 0) | (found_inf != 0)
                    self._update(own, factor, frozenset([index]), left_out.float())
            used -= self._maybe_unused
        self._update(sub_group, factor, used, found_inf)

    def _update(
        self,
        sub_group: Sequence[SpanTensors],
        factor: float | torch.Tensor,
        used: frozenset[int] | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        shards: list[OptimParamShard] = []
        bound: list[SpanTensors] = []
        gradients: list[torch.Tensor] = []
        for tensors in sub_group:
            members = [p for p in self._shards[tensors.span.bucket.index] if used is None or p.index in used]
            if not members:
                continue
            if tensors.out is not None:
                sync_master_from_param_(tensors.master, tensors.out)
            self._bind(tensors)
            # Parameters that the device may leave out are updated first, and share the gradient's memory with the
            # others. So their gradients are scaled in copies, and the last update scales the memory itself.
            if used is not None and used <= self._maybe_unused:
                self._set_scaled_grads(members, tensors.gradient, factor)
            else:
                gradients.append(tensors.gradient.to(self._update_dtypes[tensors.span.bucket.index]))
                self._set_grads(members, gradients[-1])
            shards += members
            bound.append(tensors)
        if self._reserved:  # the optimizer makes the states in this step, so their memory is freed for it
            for shard in shards:
                self._reserved.pop(shard.index, None)
        if gradients and (isinstance(factor, torch.Tensor) or factor != 1.0):
            torch._foreach_mul_(gradients, factor)
        chosen: dict[int, list[torch.Tensor]] = {}
        for shard in shards:
            chosen.setdefault(shard.group, []).append(shard.tensor)
        if self._counts_in_groups:
            self._restore_counts()
            self._add_stand_ins(chosen, used, sub_group[0].master)
        try:
            if chosen:
                with self._limited_to(shards, chosen), self._with_found_inf(found_inf):
                    self._step(self._inner)
        finally:
            for shard in shards:
                shard.tensor.grad = None
            for tensors in bound:
                self._unbind(tensors)
        self._tag_states(shards)
        for tensors in bound:  # the others may have values that the user has written and the masters have not
            if tensors.out is not None:
                tensors.out.copy_(tensors.master)

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
        buffer = self._buffer
        slot_of = {id(parameter): slot for parameter, slot in zip(buffer.parameters, buffer.layout.slots, strict=True)}
        for index, group in enumerate(self._inner.param_groups):
            slots = [slot_of[id(parameter)] for parameter in group["params"] if id(parameter) in slot_of]
            if index in chosen or not slots:
                continue
            if index not in self._stand_ins:
                shape = unpartitioned_shape(buffer.parameters[slots[0].index]) if buffer.keeps_shape(slots[0]) else [1]
                self._stand_ins[index] = torch.zeros([1] * len(shape), dtype=like.dtype, device=like.device)
            stand_in = self._stand_ins[index]
            takes_part = used is None or any(slot.index in used for slot in slots)
            stand_in.grad = torch.zeros_like(stand_in) if takes_part else None
            chosen[index] = [stand_in]

    def _set_grads(self, shards: Sequence[OptimParamShard], gradient: torch.Tensor) -> None:
        """Set the ``grad`` of shards of one bucket to views of ``gradient``."""
        first = shards[0].fragment.slot
        if len(shards) > 1 and not self._buffer.keeps_shape(first):
            parts = gradient.split_with_sizes(self._sizes[first.bucket])[1::2]
            for shard in shards:
                shard.tensor.grad = parts[shard.position]
        else:
            for shard in shards:
                shard.tensor.grad = self._buffer.view_of(shard.fragment, gradient)

    def _set_scaled_grads(
        self, shards: Sequence[OptimParamShard], gradient: torch.Tensor, factor: float | torch.Tensor
    ) -> None:
        """Set the ``grad`` of shards to scaled copies, for parameters that the device may leave out."""
        for shard in shards:
            dtype = self._update_dtypes[shard.bucket]
            shard.tensor.grad = self._buffer.view_of(shard.fragment, gradient).to(dtype) * factor
            if not self.state_of(shard):
                self._new_states.add(shard.index)

    def _tag_states(self, shards: Iterable[OptimParamShard]) -> None:
        """Tag the memory of states for reports, if a report listens or it is offloaded."""
        for shard in shards:
            location = self._buffer.placements.optimizer_placement(shard.bucket).location
            if listeners or location != DEVICE:
                for value in self.state_of(shard).values():
                    if isinstance(value, torch.Tensor):
                        tag_memory(value, STATES, HOST if location == DISK and not value.dim() else location)

    def on_update_skipped(self) -> None:
        """Drop states that the skipped update has made. Step counts need no correction: torch's fused kernels count on
        the device, where they see the skip."""
        self.on_left_out(tuple(self._new_states))

    @property
    def can_skip_on_device(self) -> bool:
        """True if every group runs a fused kernel that takes ``found_inf`` (torch's convention for GradScaler)."""
        if not self._takes_found_inf:
            return False
        if isinstance(self._inner, torch.optim.SGD):
            return False  # a skipped first update would leave its momentum buffer uninitialised
        return all(group.get("fused") for group in self._inner.param_groups)

    def state_of(self, shard: OptimParamShard) -> State:
        state: State = self._inner.state.get(self._buffer.parameters[shard.index]) or {}
        return state

    def memory(self) -> Iterable[torch.Tensor]:
        """Return the tensors of states, and the memory reserved for states that do not exist yet."""
        for tensors in self._reserved.values():
            yield from tensors
        for shards in self._shards:
            for shard in shards:
                yield from (value for value in self.state_of(shard).values() if isinstance(value, torch.Tensor))

    def load_state(self, shard: OptimParamShard, state: Mapping[str, object]) -> None:
        self._reserved.pop(shard.index, None)
        parameter = self._buffer.parameters[shard.index]
        self._inner.state.pop(parameter, None)
        if state:
            device = self._device_of(shard)
            self._inner.state[parameter] = {
                key: value.detach().to(value.device if key == "step" else device, copy=True)
                if isinstance(value, torch.Tensor)
                else value
                for key, value in state.items()
            }
            self._move_states([shard])

    state_names = None

    def make_state(
        self, shard: OptimParamShard, numbers: Mapping[str, Any], tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> dict[str, torch.Tensor]:
        self._reserved.pop(shard.index, None)
        group = self._inner.param_groups[shard.group]
        device = self._device_of(shard)
        parameter = self._buffer.parameters[shard.index]

        def allocate(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
            """Allocate a state. For a full parameter it has the parameter's strides, because torch's fused kernels go
            through both in the order of memory."""
            if not self._buffer.keeps_shape(shard.fragment.slot) or shape != parameter.shape:
                return torch.empty(shape, dtype=dtype, device=device)
            return torch.empty_strided(shape, parameter.data.stride(), dtype=dtype, device=device)

        made = {name: allocate(shape, dtype) for name, (shape, dtype) in tensors.items()}
        # Torch keeps step counts on the device of the kernel that reads them.
        number_device = device if group.get("fused") or group.get("capturable") else torch.device("cpu")
        moved_numbers = {
            name: value.to(number_device, copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in numbers.items()
        }
        self._inner.state.pop(parameter, None)
        if moved_numbers or made:
            state = self._inner.state[parameter] = {**moved_numbers, **made}
            self._move_states([shard])
            made = {name: state[name] for name in made}
        return made

    def _reserve(self, shards: Iterable[OptimParamShard]) -> None:
        """Reserve the memory of states that torch's optimizers make in their first update, so that a job that cannot
        fit fails at once.

        The memory is freed right before that update. The states themselves cannot be made early: some start from the
        first gradient, or from the learning rate of that step.
        """
        for shard in shards:
            numel, bucket = shard.fragment.numel, shard.bucket
            if not numel or self.state_of(shard):
                continue
            placement, device = self._buffer.placements.optimizer_placement(bucket), self._device_of(shard)
            for name, dtype in self._dtypes_of_states(shard, device).items():
                if placement.location == DISK:
                    self._disk_flat(bucket, name, dtype)  # kept: the state will be stored there
                else:
                    memory = tag_memory(torch.empty(numel, dtype=dtype, device=device), STATES, placement.location)
                    self._reserved.setdefault(shard.index, []).append(memory)

    def _dtypes_of_states(self, shard: OptimParamShard, device: torch.device) -> dict[str, torch.dtype]:
        """Return the dtypes of the states with one value per element, by name.

        They are learned from the update of a tiny tensor by a copy of the optimizer. For classes that are neither
        torch's nor zerolite's the result is empty: a step of the copy could change objects that the original shares.
        """
        inner, kind = self._inner, type(self._inner)
        slot = shard.fragment.slot
        dims = len(unpartitioned_shape(self._buffer.parameters[slot.index])) if self._buffer.keeps_shape(slot) else 1
        shape = [2] * max(1, dims)
        key = shard.group, self._update_dtypes[slot.bucket], len(shape)
        if key not in self._state_dtypes:
            tiny = torch.ones(shape, dtype=key[1], device=device).requires_grad_()
            tiny.grad = torch.zeros_like(tiny)
            copy = object.__new__(kind)
            vars(copy).update(vars(inner), state=defaultdict(dict))
            copy.param_groups = [{**inner.param_groups[shard.group], "params": [tiny]}]
            if kind.__module__.split(".")[0] in ("torch", "zerolite"):
                # An error is ignored: a check or the first update raises it again.
                with torch.no_grad(), contextlib.suppress(AssertionError, RuntimeError, TypeError, ValueError):
                    self._step(copy)
            states = copy.state[tiny].items()
            self._state_dtypes[key] = {
                name: state.dtype
                for name, state in states
                if isinstance(state, torch.Tensor) and state.shape == tiny.shape
            }
        return self._state_dtypes[key]

    def _device_of(self, shard: OptimParamShard) -> torch.device:
        """Return the device on which the shard is updated."""
        placements, bucket = self._buffer.placements, shard.bucket
        return torch.device("cpu") if placements.updates_on_host(bucket) else placements.device

    def _move_states(self, shards: Iterable[OptimParamShard]) -> list[torch.Tensor]:
        """Move states with one value per element to the device of the update, or to the disk if they are offloaded to
        it. Return the parts of the disk that were written."""
        written = []
        for shard in shards:
            bucket = shard.bucket
            placement, state = self._buffer.placements.optimizer_placement(bucket), self.state_of(shard)
            for name, value in state.items():
                if not isinstance(value, torch.Tensor) or not value.dim() or value.numel() != shard.fragment.numel:
                    continue
                if placement.location != DISK:
                    state[name] = value.to(self._device_of(shard))
                    continue
                view = self._buffer.view_of(shard.fragment, self._disk_flat(bucket, name, value.dtype))
                if address(view) != address(value):
                    state[name] = view.copy_(value)
                    written.append(view)
        return written

    def _disk_flat(self, bucket: int, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the stored state of a whole bucket on disk."""
        flats = self._on_disk.setdefault(bucket, {})
        if name not in flats or flats[name].dtype != dtype:
            numel = self._buffer.buckets[bucket].master.numel()
            flats[name] = self._buffer.placements.optimizer_placement(bucket).zeros(numel, dtype, STATES)
        return flats[name]

    @contextlib.contextmanager
    def _limited_to(self, shards: Sequence[OptimParamShard], chosen: dict[int, list[torch.Tensor]]) -> Iterator[None]:
        """Return a context in which the inner optimizer has the tensors of ``chosen`` alone, by param group, and its
        states have these shards as keys. Before and after, both have the model's parameters."""
        everything, state = list(self._inner.param_groups), self._inner.state
        model_params = [group["params"] for group in everything]
        keys = [(self._buffer.parameters[shard.index], shard.tensor) for shard in shards]
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

    def _updates_copy(self, bucket: int) -> bool:
        """Return True if the update computes in more bits than the masters have, so that it updates a copy."""
        return self._update_dtypes[bucket] != self._buffer.buckets[bucket].master.dtype

    def _bind(self, tensors: SpanTensors) -> None:
        """Make the shards views of ``tensors.master``, or of a copy in the dtype of the update, and their states views
        of ``tensors.states``. Does nothing if the stored master is updated in place."""
        bucket, staged = tensors.span.bucket.index, self._is_staged(tensors)
        if not staged and not self._updates_copy(bucket):
            return
        master = tensors.master.to(self._update_dtypes[bucket])
        for shard in self._shards[bucket]:
            shard.tensor.data = self._buffer.view_of(shard.fragment, master)
            if staged and tensors.states:
                state = self.state_of(shard)
                staged_states = {name: flat for name, flat in tensors.states.items() if name in state}
                state.update({name: self._buffer.view_of(shard.fragment, flat) for name, flat in staged_states.items()})

    def _unbind(self, tensors: SpanTensors) -> None:
        """Undo :meth:`_bind`. Results that the update has not written in place are copied to ``tensors``."""
        bucket, staged = tensors.span.bucket.index, self._is_staged(tensors)
        shards = self._shards[bucket]
        if staged:
            for shard in shards:
                self._write_back_state(shard, tensors.states)
        if self._updates_copy(bucket):
            self._write_back_master(bucket, tensors.master)
        elif staged:
            for shard in shards:
                shard.tensor.data = self._buffer.master_view(shard.fragment)
        if staged:
            self._move_states(shards)

    def _is_staged(self, tensors: SpanTensors) -> bool:
        """Return True if ``tensors`` has a staging copy of the master, not the master itself."""
        return tensors.master is not tensors.span.bucket.master

    def _write_back_master(self, bucket: int, master: torch.Tensor) -> None:
        """Round the updated copies of the shards into ``master``, and free their memory."""
        for shard in self._shards[bucket]:
            if shard.tensor.numel():
                self._buffer.view_of(shard.fragment, master).copy_(shard.tensor)
                shard.tensor.data = shard.tensor.new_empty(0)

    def _write_back_state(self, shard: OptimParamShard, staged_states: Mapping[str, torch.Tensor]) -> None:
        """Copy states that the update has made into the staging copies, and make the shard's states views of the disk
        again."""
        state = self.state_of(shard)
        for name, flat in staged_states.items():
            if name in state:
                view = self._buffer.view_of(shard.fragment, flat)
                if address(state[name]) != address(view):
                    view.copy_(state[name])
                state[name] = self._buffer.view_of(shard.fragment, self._on_disk[shard.bucket][name])


def _split_sizes(fragments: Sequence[Fragment], numel: int) -> list[int]:
    """Return the lengths of the parts of a bucket's shard of ``numel`` elements: gap, fragment, gap, …, gap."""
    sizes, position = [], 0
    for fragment in fragments:
        sizes += [fragment.shard_start - position, fragment.numel]
        position = fragment.shard_start + fragment.numel
    return [*sizes, numel - position]
