"""User interface of partitioning: ``zero.GatheredParameters``, external parameters, partitioning a model."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from zerolite.comm import Communicator
from zerolite.comm.initial_sync import broadcast_into, content_hash, differing
from zerolite.utils.accelerator import address, host_values
from zerolite.zero.buffer import dense_strides, flattened
from zerolite.zero.stage3.between_steps import bring_home, hold, unhold, use_whole
from zerolite.zero.stage3.partitioned_parameter import (
    AVAILABLE,
    NOT_AVAILABLE,
    Home,
    PartitionedParameter,
    gather,
    handle_of,
    refresh,
    users_attributes,
)
from zerolite.zero.stage3.units import external_parameters

_off: Callable[[], Any] = torch._C.DisableTorchFunction  # no mode sees the torch functions that run inside
_Function = TypeVar("_Function", bound=Callable[..., Any])


def unseen(function: _Function) -> _Function:
    """Run ``function`` without gradients, and so that no function mode sees what it calls.

    The order matters: entering and leaving ``no_grad`` is itself a torch function that a mode would see.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _off(), torch.no_grad():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


@unseen
def partition(
    parameter: torch.nn.Parameter,
    name: str,
    comm: Communicator,
    device: torch.device,
    dtype: torch.dtype | None = None,
    home: Home | None = None,
) -> PartitionedParameter:
    """Cut a plain parameter, equal on all ranks, into parts for use on ``device``, in ``dtype`` if it is floating. Its
    identity, attributes and strides stay. home: where the parts rest, by default on ``device``. Called on all ranks,
    in the same order."""
    if dtype is not None and parameter.is_floating_point():
        parameter.data = parameter.data.to(dtype)
    handle = PartitionedParameter(parameter, name, comm, device, home)
    handle.use_whole = use_whole
    parameter.__deepcopy__ = functools.partial(_deepcopy, handle)  # type: ignore[method-assign]
    return handle


def builds_partitioned() -> bool:
    """True inside ``zero.Init``, where copies of partitioned parameters are partitioned too."""
    return bool(_modes)


def _deepcopy(handle: PartitionedParameter, memo: dict[int, Any]) -> torch.nn.Parameter:
    """``copy.deepcopy``: an ordinary whole parameter; a partitioned one where modules are being built partitioned.
    Called on all ranks, in the same order."""
    if not builds_partitioned():
        return handle.whole_copy(memo)
    with _off():
        _commit_all()
        parameter = handle.parameter
        values = torch.empty_strided(handle.shape, handle.strides, dtype=handle.shard.dtype, device=handle.device)
        copied = torch.nn.Parameter(values, parameter.requires_grad)
        del values
        vars(copied).update(users_attributes(parameter))
        partition(copied, handle.name, handle.comm, handle.device, home=handle.home).shard.copy_(handle.shard)
    memo[id(parameter)] = copied
    return copied


@unseen
def take_rank0(parameter: torch.nn.Parameter, comm: Communicator, device: torch.device) -> None:
    """Rank 0's values into a plain parameter, in place where it lies on ``device``. Called on all ranks."""
    data = parameter.data
    if data.device == device and data.stride() == dense_strides(data):
        _broadcast(flattened(data), comm, "initial_sync", 0)
    else:
        broadcast_into(data, comm, device, "initial_sync")


def _broadcast(flat: torch.Tensor, comm: Communicator, tag: str, source: int) -> None:
    """Rank ``source``'s values into everybody's ``flat`` [n], of any dtype. Called on all ranks."""
    if flat.numel():
        comm.broadcast(flat.view(torch.uint8), tag, source)


@torch.no_grad()
def partition_model(
    model: torch.nn.Module,
    comm: Communicator,
    device: torch.device,
    dtype: torch.dtype | None = None,
    home: Home | None = None,
) -> None:
    """Partition every plain parameter of ``model``; rank 0's values are everyone's. Modules on the meta device are
    materialised one by one, children first. home: where the parts rest, by default on ``device``. Called on all ranks,
    with equal models."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    plain = [p for p in model.parameters() if handle_of(p) is None and not p.is_meta]
    different = differing(plain, comm, device)
    for parameter, differs in zip(plain, different, strict=True):
        if differs:
            take_rank0(parameter, comm, device)
        partition(parameter, names[id(parameter)], comm, device, dtype, home)
    for name, module in _children_first(model):
        _materialise(name, module, names, comm, device, dtype, home)


def _children_first(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Every module once, after those inside it: a module may set what its children have set before."""
    found: list[tuple[str, torch.nn.Module]] = []
    seen: set[int] = set()

    def walk(name: str, module: torch.nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        for child_name, child in module.named_children():
            walk(f"{name}.{child_name}" if name else child_name, child)
        found.append((name, module))

    walk("", model)
    return found


def _materialise(
    name: str,
    module: torch.nn.Module,
    names: dict[int, str],
    comm: Communicator,
    device: torch.device,
    dtype: torch.dtype | None,
    home: Home | None,
) -> None:
    """Give a module's own meta parameters and buffers memory and values, then partition them. Own parameters that
    have values (tied ones, from their first owner) keep them."""
    own = list(module.parameters(recurse=False))
    meta = [p for p in own if p.is_meta]
    if not meta and not any(b.is_meta for b in module.buffers(recurse=False)):
        return
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        raise RuntimeError(
            f"zerolite: module '{name}' ({type(module).__name__}) is on the meta device and has no reset_parameters() "
            "method to give its parameters and buffers values; add one, or build the module inside zero.Init instead"
        )
    for parameter in meta:
        # The same Parameter object, wherever it is used. torch.utils.swap_tensors would swap attributes too, and
        # refuse where a weak reference exists (recurrent layers keep some).
        fresh = torch.nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        torch._C._swap_tensor_impl(parameter, fresh)
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = torch.empty_like(buffer, device=device)
    kept = GatheredParameters([p for p in own if handle_of(p) is not None])
    with GatherOnUse(dtype=dtype), kept:
        reset()
        kept.drop_changes()
    for buffer in module.buffers(recurse=False):
        broadcast_into(buffer, comm, device, "initial_sync")
    for parameter in meta:
        take_rank0(parameter, comm, device)
        partition(parameter, names[id(parameter)], comm, device, dtype, home)


# -------------------------------------------------------------------- parameters that initialisation code touches


_modes: list[GatherOnUse] = []  # entered, the innermost last

# What can be read of a partitioned parameter without its values: as of the whole one, and as of any.
_OF_THE_SHAPE = frozenset(
    "shape size ndim dim ndimension numel nelement stride is_contiguous element_size nbytes itemsize __len__".split()
)
_OF_ANY = frozenset(
    "requires_grad requires_grad_ grad grad_fn is_leaf dtype device layout is_meta is_cuda is_sparse is_quantized "
    "is_floating_point is_complex retain_grad register_hook register_post_accumulate_grad_hook _version".split()
)


class GatherOnUse(TorchFunctionMode):
    """Inside, a partitioned parameter that belongs to no engine is whole for the torch function that touches it, and
    until one touches another. Then rank 0's values are everyone's, and it is partitioned again; in its new dtype,
    shape and strides if ``.data`` was set to something else.

    ``dtype``: of the parts; None: what a parameter has. ``before_creation``: called before a function that takes no
    tensor. Torch functions that touch values must be called on all ranks, in the same order.
    """

    def __init__(self, dtype: torch.dtype | None = None, before_creation: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._dtype = dtype
        self._before_creation = before_creation
        # With the parameter, so that it lives on all ranks until it is partitioned again.
        self._open: dict[int, tuple[PartitionedParameter, torch.nn.Parameter]] = {}
        # By the storage of the whole values, for tensors that share it (`p.data`, views).
        self._seen: weakref.WeakValueDictionary[int, PartitionedParameter] = weakref.WeakValueDictionary()

    def __enter__(self) -> GatherOnUse:
        with _off():
            _commit_all()
        super().__enter__()
        _modes.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _modes.remove(self)
        super().__exit__(kind, error, trace)
        with _off():
            if kind is None:
                self.commit()
            for handle, _ in self._open.values():
                handle.release()
            self._open.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            name = getattr(func.__self__, "__name__", "")
        with _off():
            if name in _OF_THE_SHAPE:
                args = [handle.view if (handle := self._hidden(value)) is not None else value for value in args]
            elif name not in _OF_ANY:
                self._prepare([*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))

    def _hidden(self, value: Any) -> PartitionedParameter | None:
        """What stands behind ``value`` if it is a parameter that is not available and nobody else's affair, or shares
        its memory."""
        handle = handle_of(value) if isinstance(value, torch.nn.Parameter) else None
        if handle is None and isinstance(value, torch.Tensor):
            handle = self._sharing(value)
        if handle is None or handle.status is not NOT_AVAILABLE or handle.ref() is None:
            return None
        return handle if handle.manager is None or handle.manager() is None else None

    def _sharing(self, tensor: torch.Tensor) -> PartitionedParameter | None:
        """The partitioned parameter whose memory ``tensor`` shares; None if there is none."""
        if not self._seen or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()._cdata
        handle = self._seen.get(storage)
        if handle is None or handle.storage is None or handle.storage._cdata != storage:
            return None  # the handle has taken other memory since
        return handle

    @unseen
    def separate(self, parameter: torch.nn.Parameter) -> None:
        """Give a plain parameter that was made from the values of a partitioned one, as parametrizations do, memory of
        its own. Called on all ranks, in the same order."""
        handle = self._sharing(parameter)
        if handle is not None:
            whole = handle.status is AVAILABLE
            gather([handle])
            parameter.data = parameter.data.clone()
            if not whole:
                handle.release()

    def _prepare(self, values: Iterable[Any]) -> None:
        flat = [v for value in values for v in (value if isinstance(value, (list, tuple)) else (value,))]
        if self._before_creation is not None and not any(isinstance(v, torch.Tensor) for v in flat):
            self._before_creation()
        hidden = {id(handle): handle for v in flat if (handle := self._hidden(v)) is not None}
        if not hidden:
            return
        touched = {id(handle) for v in flat if (handle := handle_of(v)) is not None}
        self.commit(but=touched)
        for handle in hidden.values():
            self._open[id(handle)] = (handle, handle.parameter)
            if handle.storage is not None:
                self._seen[handle.storage._cdata] = handle
        gather(list(hidden.values()))

    @unseen
    def commit(self, but: Iterable[int] = ()) -> None:
        """Partition again what was gathered, except for these handles' ids. Called on all ranks, at the same place of
        the model's construction."""
        kept = {key: self._open[key] for key in but if key in self._open}
        done = [both for key, both in self._open.items() if key not in kept]
        self._open = kept
        for handle, parameter in done:
            if handle.status is not AVAILABLE:
                continue  # its partition() was called
            data = parameter.data
            if (data.shape, data.dtype, dense_strides(data)) != (handle.shape, handle.shard.dtype, handle.strides):
                if handle.numel and not data.numel():
                    raise RuntimeError(
                        f"zero.Init: expected parameter '{handle.name}' of shape {tuple(handle.shape)} to keep values, "
                        f"got .data of shape {tuple(data.shape)}; set .data to a tensor that has elements, or put "
                        "another parameter in its place"
                    )
                handle.make_whole()
                parameter.data = data
                take_rank0(parameter, handle.comm, handle.device)
                partition(parameter, handle.name, handle.comm, handle.device, self._dtype, handle.home)
                continue
            bring_home(handle)
            _broadcast(handle.full[: handle.numel], handle.comm, "initial_sync", 0)
            handle.write()
            handle.release()


def _commit_all() -> None:
    """Partition again what initialisation code has touched, so that ranks agree on it. Called on all ranks."""
    for mode in _modes:
        mode.commit()


# -------------------------------------------------------------------- parameters whole for a while


_contexts: list[GatheredParameters] = []  # entered, the innermost last


class GatheredParameters:
    """Inside, the given partitioned parameters are whole.

    params: a parameter, any iterable of them, a module, or None. modifier_rank: that rank of the group may change
    values; when the context ends the change reaches every rank's part and the master weights. Without it changes are
    refused when the context ends: RuntimeError on all ranks, naming the parameter. fwd_module: register the
    parameters as external ones of this module. enabled: False for a context that does nothing. check: False to trust
    that nothing is changed, which saves reading every value twice. Contexts nest; what is not partitioned is left
    alone.

    If the block raises, the parameters are released and changes are dropped. A tensor that shares a parameter's memory
    (``p.data``, a view) keeps that memory alive beyond the context. Entered and left on all ranks, in the same order.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
        check: bool = True,
    ) -> None:
        self._check = check
        self._modifier = modifier_rank
        self._handles: list[PartitionedParameter] = []
        self._digests: dict[int, torch.Tensor] = {}  # of what must not change
        self._saved: dict[int, torch.Tensor] = {}  # whole values that do not end with the context
        if not enabled:
            return
        self._parameters = list(_parameters_in(params))  # kept alive
        handles = [handle_of(parameter) for parameter in self._parameters]
        self._handles = list(dict.fromkeys(handle for handle in handles if handle is not None))
        if modifier_rank is not None and self._handles:
            world_size = self._handles[0].comm.world_size
            whole_number = isinstance(modifier_rank, int) and not isinstance(modifier_rank, bool)
            if not whole_number or not 0 <= modifier_rank < world_size:
                raise ValueError(
                    f"zero.GatheredParameters: expected modifier_rank from 0 to {world_size - 1} or None, got "
                    f"{modifier_rank!r}"
                )
        if fwd_module is not None:
            for handle in self._handles:
                register_external_parameter(fwd_module, handle.parameter)

    def __enter__(self) -> GatheredParameters:
        with _off():
            _commit_all()
            lasting = [h for h in self._handles if h.storage is None or h.status is not NOT_AVAILABLE]
            hold(self._handles)
            for handle in self._handles:
                handle.exposed = True  # the block may keep aliases of the values
            if self._check:
                self._saved = {id(handle): handle.full.clone() for handle in lasting}
                if self._modifier is None:
                    self._digests = {id(handle): content_hash(handle.view) for handle in self._handles}
            _contexts.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _off():
            _contexts.remove(self)
            refused: str | None = None
            guilty: list[PartitionedParameter] = []
            try:
                if kind is not None:
                    self.drop_changes()
                elif self._modifier is not None:
                    refused = self._write_changes(self._modifier)
                else:
                    guilty = self._changed()
            finally:
                unhold(self._handles)
                saved, self._saved = self._saved, {}
                self._digests = {}
            if guilty:
                # What an engine goes on using has the changes still.
                refresh([h for h in guilty if h.status is AVAILABLE and id(h) not in saved])
                refused = (
                    "parameters were changed inside a read-only context, so ranks would disagree: "
                    f"{', '.join(handle.name for handle in guilty)}. The changes are dropped; pass modifier_rank=0 "
                    "(the rank whose values everybody takes) to make some."
                )
        if refused:
            raise RuntimeError(f"zero.GatheredParameters: {refused}")

    @torch.no_grad()
    def drop_changes(self) -> None:
        """Take back what was written into the parameters since the context was entered, now or when they are released
        at its end. Called on all ranks."""
        for handle in self._handles:
            if id(handle) in self._saved:
                handle.full.copy_(self._saved[id(handle)])
            else:
                self._digests.pop(id(handle), None)
            if handle.status is AVAILABLE:
                handle.parameter.data = handle.view

    @torch.no_grad()
    def _write_changes(self, source: int) -> str | None:
        """Rank ``source``'s values everywhere; or, on all ranks, what is wrong with them."""
        if not self._handles:
            return None
        comm = self._handles[0].comm
        fits = [handle.parameter.data.shape == handle.shape for handle in self._handles]
        bad = torch.tensor([not fit for fit in fits], dtype=torch.int64, device=self._handles[0].device)
        comm.broadcast(bad, "parameters", source)
        wrong = [handle for handle, flag in zip(self._handles, host_values(bad), strict=True) if flag]
        if wrong:
            self.drop_changes()
            names = ", ".join(f"{handle.name} {tuple(handle.shape)}" for handle in wrong)
            return f"expected parameters to keep their shapes, rank {source} gave others to {names}. Nothing is changed"
        for handle, fit in zip(self._handles, fits, strict=True):
            if fit:
                bring_home(handle)
            else:
                handle.parameter.data = handle.view
            _broadcast(handle.full[: handle.numel], handle.comm, "parameters", source)
            handle.write()
            for context in _contexts:  # around this one
                if id(handle) in context._digests:
                    context._digests[id(handle)] = content_hash(handle.view)
                if id(handle) in context._saved:
                    context._saved[id(handle)].copy_(handle.full)
        return None

    def _changed(self) -> list[PartitionedParameter]:
        """The parameters that some rank has changed; they are taken back."""
        if not self._digests:
            return []
        device = self._handles[0].device
        flags = torch.zeros(len(self._handles), dtype=torch.int64, device=device)
        for position, handle in enumerate(self._handles):
            if id(handle) not in self._digests:
                continue
            data = handle.parameter.data
            same = data.shape == handle.shape and data.dtype == handle.shard.dtype
            changed = content_hash(data) != self._digests[id(handle)] if same else torch.ones_like(flags[0])
            flags[position] = changed.to(torch.int64)
            if same and address(data) != address(handle.view):
                handle.parameter.data = handle.view
        # All ranks make the same message of the same flags, so there is no text to exchange.
        self._handles[0].comm.all_reduce_max(flags, "parameters")
        guilty = [handle for handle, flag in zip(self._handles, host_values(flags), strict=True) if flag]
        if guilty:
            self.drop_changes()
        return guilty


def _parameters_in(params: Any) -> Iterator[torch.Tensor]:
    if params is None:
        return
    if isinstance(params, torch.nn.Module):
        yield from params.parameters()
    elif isinstance(params, torch.Tensor):
        yield params
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes)):
        for item in params.values() if isinstance(params, Mapping) else params:
            yield from _parameters_in(item)
    else:
        raise ValueError(
            "zero.GatheredParameters: expected a parameter, an iterable of parameters, a module or None, got "
            f"{type(params).__name__}"
        )


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Gather ``parameter`` with ``module``, which uses it in its forward without owning it. Uses through another
    module's attribute are found without this. Called on all ranks."""
    if not isinstance(module, torch.nn.Module) or not isinstance(parameter, torch.nn.Parameter):
        raise ValueError(
            "zero.register_external_parameter: expected a module and a parameter, got "
            f"{type(module).__name__} and {type(parameter).__name__}"
        )
    known = module.__dict__.setdefault("_zero_external_parameters", [])
    if all(parameter is not other for other in known):
        known.append(parameter)
    handle = handle_of(parameter)
    coordinator = handle.manager() if handle is not None and handle.manager is not None else None
    if coordinator is not None:
        coordinator.add_external(module, handle)


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Undo :func:`register_external_parameter`. Raises ValueError if it was not registered. An engine that exists
    goes on gathering the two together; the next one does not."""
    known = external_parameters(module)
    rest = [other for other in known if other is not parameter]
    if len(rest) == len(known):
        raise ValueError(
            f"zero.unregister_external_parameter: the parameter of shape {tuple(getattr(parameter, 'ds_shape', ()))} "
            f"was not registered with this {type(module).__name__}"
        )
    module.__dict__["_zero_external_parameters"] = rest
