"""Operations on partitioned parameters between steps: ``p.norm()``, averaged weights, ``model.state_dict()``.

The parameters among an operation's arguments are gathered for it, into memory of their own, and released after it, on
all ranks. What it returns may share that memory (``p.data``, ``p.detach()``, ``p[0]``): that is a :class:`WholeValues`,
whose memory lives as long as it is referenced. Written to, it passes the change on to this rank's part; read after a
step, it is gathered again. What autograd saves is not kept but gathered again in the backward.

Changes are made alike on all ranks, so a write needs no collective.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from zerolite.utils.accelerator import address
from zerolite.utils.nested import Arguments, Function, Keywords, find_tensors, map_tensors
from zerolite.utils.user_line import warn_of_collective
from zerolite.zero.stage3.param_group import gather
from zerolite.zero.stage3.partitioned_parameter import AVAILABLE, PartitionedParameter
from zerolite.zero.stage3.released_parameter import (
    LIKE,
    NEEDS_NO_VALUES,
    SHAPES,
    ReleasedParameter,
    close,
    no_values,
    open_again,
    opened,
)

_T = torch.Tensor
# Functions of Python that look at the class.
_OF_PLAIN_TENSORS = frozenset([_T.__repr__, _T.__format__, _T.numpy, _T.__array__, _T.tolist])
_transform_level = torch._C._functorch.maybe_current_level  # None outside of torch.func's transforms


class _Memory:
    """The whole values of a parameter as of one moment (``age``), for the tensors that share them. ``period``: the
    number of times that ``p.data = values`` had put others in their place: then they stay what they are, and are the
    parameter's no more."""

    __slots__ = ("age", "full", "handle", "period")

    def __init__(self, handle: PartitionedParameter, full: torch.Tensor) -> None:
        self.handle, self.full, self.age, self.period = handle, full, handle.age, len(handle.replaced)

    @property
    def tied(self) -> bool:
        return self.period == len(self.handle.replaced)

    @property
    def stale(self) -> bool:
        """The parameter has changed since, or may have, because it is held gathered. Raises RuntimeError where
        that was before its values were replaced."""
        if self.tied:
            return self.age != self.handle.age or self.handle.held > 0
        if self.age != self.handle.replaced[self.period]:
            raise RuntimeError(
                f"values that were taken from parameter '{self.handle.name}' before an update were not looked at "
                "between that and p.data = values, which has replaced them: they are gone; clone what is to be kept"
            )
        return False

    def write(self) -> None:
        """They have been changed."""
        if self.tied:
            self.handle.write(self.full)
            self.age = self.handle.age


class _Memories:
    """Some of them, by their storage. On one rank those of several parameters may lie in one storage, the shards'."""

    def __init__(self, members: Iterable[_Memory]) -> None:
        self._by_storage: dict[int, list[_Memory]] = {}
        for memory in members:
            self._by_storage.setdefault(memory.full.untyped_storage()._cdata, []).append(memory)

    def forget(self) -> None:
        """Let go of all: autograd keeps the function that has packed what it saves."""
        self._by_storage.clear()

    def find(self, tensor: torch.Tensor) -> _Memory | None:
        """The one that ``tensor`` lies in."""
        if tensor.layout is not torch.strided:
            return None
        found = self._by_storage.get(tensor.untyped_storage()._cdata, [])
        if len(found) > 1:
            place = address(tensor)
            found = [m for m in found if 0 <= place - address(m.full) < max(1, m.full.nbytes)] or found
        return found[0] if found else None


class WholeValues(torch.Tensor):
    """A tensor that shares the memory of a partitioned parameter's values. See the module."""

    memory: _Memory

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: OpOverload, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        """Run what :func:`use_whole` has let through; C++ comes here alone."""
        if any(kind is not WholeValues for kind in types):
            return NotImplemented  # another class, p.grad's for one, has no memory to be read
        if function.namespace == "c10d":
            alias = find_tensors((args, kwargs), WholeValues)[0]
            raise no_values(alias.memory.handle.name, "and torch.distributed writes where no one sees it: send a clone")
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_function__(
        cls, function: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        return use_whole(function, args, kwargs or {})

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickle an ordinary tensor."""
        use_whole(_T.detach, (self,), {})
        with opened():
            return self.detach().__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        return use_whole(_T.detach, (self,), {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return an ordinary tensor with memory of its own."""
        copied = memo[id(self)] = use_whole(_T.clone, (self,), {}).detach()
        return copied.requires_grad_(self.requires_grad)


class _Saved:
    """A tensor in a parameter's memory that autograd has saved: gathered again when its backward wants it."""

    __slots__ = ("age", "geometry", "handle")

    def __init__(self, handle: PartitionedParameter, full: torch.Tensor, tensor: torch.Tensor) -> None:
        self.handle, self.age = handle, handle.age
        self.geometry = tensor.shape, tensor.stride(), tensor.storage_offset() - full.storage_offset()

    def unpack(self) -> torch.Tensor:
        """Return the values. Called on all ranks, in the order of their backwards, which is the same."""
        handle = self.handle
        if handle.age != self.age:
            raise RuntimeError(
                f"parameter '{handle.name}' has changed since it was used in the forward whose backward this is; call "
                "backward before the step, or use a clone of it"
            )
        with opened(), torch.no_grad():
            shape, strides, start = self.geometry
            return _gathered([handle])[0].as_strided(shape, strides, start)


def use_whole(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Call ``function``, with partitioned parameters and :class:`WholeValues` among its arguments. Called on all ranks,
    in the same order, where one of them is not here or stale. Raises RuntimeError inside a forward or backward, on
    another thread than the engine's, and for what hands out memory."""
    if function is _T.__iter__:
        return iter(use_whole(_T.unbind, args, kwargs))
    aliases = find_tensors((args, kwargs), WholeValues)
    with opened():
        like = function in LIKE and isinstance(next(iter(args), None), WholeValues)
        if like or function in NEEDS_NO_VALUES or function in SHAPES:
            return function(*args, **kwargs)
        released = find_tensors((args, kwargs), ReleasedParameter)
        used = list(dict.fromkeys(vars(parameter)["_zero_handle"] for parameter in released))
        memories = list({id(alias.memory): alias.memory for alias in aliases}.values())
        if function in (_T.__repr__, _T.__format__):
            stale_one = next((memory for memory in memories if memory.stale), None)
            if stale_one is not None:
                return f"tensor(of parameter '{stale_one.handle.name}', which has changed since)"
        stale = list(dict.fromkeys(memory.handle for memory in memories if memory.stale))
        missing = list(dict.fromkeys([*used, *stale]))
        _check(function, missing or [memory.handle for memory in memories], bool(missing))
        wholes = dict(zip(missing, _gathered(missing), strict=True))
        _warn(missing)
        with torch.no_grad():
            own = _unite(wholes, aliases)
        return _call(function, args, kwargs, {handle: own[handle] for handle in used}, aliases)


@torch.inference_mode(False)  # the memory may outlive the user's
def _gathered(handles: Sequence[PartitionedParameter]) -> list[torch.Tensor]:
    """The whole values, flat, in memory of their own: a graph may hold that in which the engine gathers. Called on all
    ranks, in the same order."""
    for handle in handles:
        if handle.pending is not None:
            handle.pending.wait()
        listener = handle.group.listener
        if handle.storage is None and listener is not None:  # no gather asks it: whole values are the shard
            listener.before_launch([handle.index])
    here = {handle: handle.full.clone() for handle in handles if handle.is_here}
    missing = [handle for handle in handles if handle not in here]
    with contextlib.ExitStack() as stack:
        for handle in missing:
            stack.callback(handle.release)
            stack.callback(handle.take_memory())
        gather(missing)
        here.update((handle, handle.full) for handle in missing)
    return [here[handle] for handle in handles]


def _unite(
    wholes: dict[PartitionedParameter, torch.Tensor], aliases: Sequence[WholeValues]
) -> dict[PartitionedParameter, _Memory]:
    """One memory for each parameter, with the values of today: what changes one of its aliases changes all of them."""
    found = {handle: _Memory(handle, full) for handle, full in wholes.items()}
    for alias in aliases:
        memory = alias.memory
        if not memory.tied:
            continue
        first = found.setdefault(memory.handle, memory)
        if first is memory:
            continue
        if memory.stale:
            memory.full.copy_(first.full)
            memory.age = first.age
        if alias.grad_fn is None and alias.dtype == first.full.dtype:
            start = alias.storage_offset() - memory.full.storage_offset() + first.full.storage_offset()
            alias.data = first.full.as_strided(alias.shape, alias.stride(), start).as_subclass(WholeValues)
            alias.memory = first
    return found


def _call(
    function: Function,
    args: Arguments,
    kwargs: Keywords,
    used: dict[PartitionedParameter, _Memory],
    aliases: Sequence[WholeValues],
) -> Any:
    """The call, in which the parameters in ``used`` have their values."""
    parameters = {handle: handle.parameter for handle in used}
    for handle, parameter in parameters.items():
        open_again(parameter)
        parameter.data = used[handle].full.as_strided(handle.shape, handle.strides)
    changed = _written(function, args)
    versions = {id(tensor): _version(tensor, changed) for tensor in (*parameters.values(), *aliases)}
    memories = _Memories([*used.values(), *(alias.memory for alias in aliases)])
    if function in _OF_PLAIN_TENSORS:
        args = [arg.detach() if isinstance(arg, WholeValues) else arg for arg in args]
    try:
        if torch.is_grad_enabled():
            nodes = [_expect_gradient(handle) for handle in used]  # which live as long as a graph has them
            with _saving(memories):
                result = function(*args, **kwargs)
            del nodes
        else:
            result = function(*args, **kwargs)
        return _marked(result, memories)
    finally:
        memories.forget()
        with torch.no_grad():
            _settle(used, parameters, aliases, versions, changed)


def _settle(
    used: dict[PartitionedParameter, _Memory],
    parameters: dict[PartitionedParameter, torch.nn.Parameter],
    aliases: Sequence[WholeValues],
    versions: dict[int, float],
    changed: set[int],
) -> None:
    """Release the parameters; what a function has changed reaches their parts."""
    written: dict[int, _Memory] = {}
    replaced: list[tuple[PartitionedParameter, torch.Tensor]] = []
    for handle, parameter in parameters.items():
        data, memory = parameter.data, used[handle]
        differs = _version(parameter, changed) != versions[id(parameter)]
        parameter.data = handle.view if handle.status is AVAILABLE else handle.empty
        close(parameter)
        if address(data) != address(memory.full) or (data.shape, data.stride()) != (handle.shape, handle.strides):
            replaced.append((handle, data))
        elif differs:
            written[id(memory)] = memory
    for handle, data in replaced:
        _replace(handle, data)
    for alias in aliases:
        if _version(alias, changed) != versions[id(alias)]:
            written[id(alias.memory)] = alias.memory
    for memory in written.values():
        memory.write()


def _replace(handle: PartitionedParameter, data: torch.Tensor) -> None:
    """Take the values of ``p.data = data``. What has been taken from the parameter before keeps the old ones."""
    view = handle.view
    if (data.shape, data.dtype, data.device) != (view.shape, view.dtype, view.device):
        raise RuntimeError(
            f"parameter '{handle.name}': expected .data of shape {tuple(view.shape)}, {view.dtype} on {view.device}, "
            f"got {tuple(data.shape)}, {data.dtype} on {data.device}. Casts and moves of a module are for before "
            "zerolite.initialize"
        )
    full = data.new_zeros(handle.full.numel())
    full.as_strided(handle.shape, handle.strides).copy_(data)
    handle.replace(full)


def _written(function: Function, args: Arguments) -> set[int]:
    """The ids of arguments that a function changes by its name. With p.grad among its arguments it runs where torch
    does not count changes."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return {id(tensor) for tensor in find_tensors(args[:1])} if in_place else set()


def _version(tensor: torch.Tensor, written: set[int]) -> float:
    """The number of changes in place so far; one that equals no other where they are not counted."""
    return math.nan if id(tensor) in written or tensor.is_inference() else tensor._version


def _saving(memories: _Memories) -> Any:
    """Inside, autograd saves where its tensors come from, and not their memory."""

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Saved:
        memory = memories.find(tensor)
        if memory is None or not memory.tied or tensor.dtype != memory.full.dtype:
            return tensor
        return _Saved(memory.handle, memory.full, tensor)

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


def _expect_gradient(handle: PartitionedParameter) -> Any:
    """Gradients may come to the parameter while its values are not here: autograd compares shapes. Returns the node
    that they come to."""
    parameter = handle.parameter
    if not parameter.requires_grad:
        return None
    coordinator = handle.group.coordinator
    if coordinator is not None:
        coordinator.note_use_outside()
    accumulator: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    if _SHOWS not in accumulator.metadata:
        accumulator.metadata[_SHOWS] = True

        def show(gradients: object) -> None:
            coordinator = handle.group.coordinator
            (handle.show_shape if coordinator is None else functools.partial(coordinator.show_shape, handle))()

        accumulator.register_prehook(show)
    return accumulator


_SHOWS = "zerolite shows the shape"


def _unpack(saved: Any) -> torch.Tensor:
    return saved.unpack() if isinstance(saved, _Saved) else saved


def _marked(result: Any, memories: _Memories) -> object:
    """``result``, in which tensors in a parameter's memory know it. An array in it cannot be written to."""

    def mark(value: torch.Tensor) -> torch.Tensor:
        memory = memories.find(value) if type(value) is torch.Tensor else None
        if memory is None:
            return value
        alias: Any = value.as_subclass(WholeValues)
        alias.memory = memory
        return alias

    if not isinstance(result, torch.Tensor) and hasattr(result, "__array_interface__"):
        result.flags.writeable = False
    return map_tensors(mark, result)


# -------------------------------------------------------------------- where it is refused

# What hands out memory: it ends with the operation, and what is written there would be lost.
_MEMORY = frozenset(
    [
        *(_T.data_ptr, _T.untyped_storage, _T.storage, _T.share_memory_, _T.set_, _T.resize_, _T.as_subclass),
        *(_T.__dlpack__, _T.__dlpack_device__, _T.is_shared, _T.pin_memory),
    ]
)


def _check(function: Function, handles: Sequence[PartitionedParameter], gathers: bool) -> None:
    first = handles[0]
    if function in _MEMORY:
        raise no_values(first.name, f"Tensor.{function.__name__} hands out memory that it does not have")
    if not gathers:
        return
    if _transform_level() is not None:
        raise no_values(
            first.name,
            "stage 3 cannot gather inside a transform of torch.func (grad, vmap, …): use copy.deepcopy(model)",
        )
    for handle in handles:
        coordinator = handle.group.coordinator
        if coordinator is not None and coordinator.busy and handle.status is not AVAILABLE:
            raise no_values(handle.name, "and a forward or backward is under way")
        if coordinator is not None and threading.get_ident() != coordinator.thread:
            raise no_values(handle.name, "and this thread is not the one that trains")


def _warn(handles: Sequence[PartitionedParameter]) -> None:
    """After the gather: an error in the place of the warning is of one rank alone."""
    if handles and handles[0].comm.world_size > 1 and handles[0].comm.main:
        warn_of_collective(
            f"this line uses the values of parameter '{handles[0].name}', of which each rank owns a part: they are "
            "gathered for it, a collective that all ranks must call. Inside "
            "zerolite.zero.GatheredParameters(parameters) parameters are gathered together and once"
        )
