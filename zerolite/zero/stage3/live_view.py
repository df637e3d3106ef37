"""Operations on released parameters: ``p.norm()``, ``p.data.clamp_()``, averages, ``nn.init``, a penalty in the loss.

``p.data`` and ``p.detach()`` of a released parameter are a :class:`LiveView`: a tensor without values, of which views
can be taken. An operation on it runs in three steps:

1. Gather the parameters among the arguments into temporary copies.
2. Run the operation on them.
3. Copy what it has changed into this rank's shard.

All ranks run the same operations, so they make the same changes and a write needs no collective. Autograd saves the
view, which takes no memory, and the backward gathers again.

Programs for DeepSpeed read parameters on one rank alone: a save of PEFT calls ``state_dict()`` on rank 0 for its names.
So with DeepSpeed's interface nothing is gathered outside of forward and backward: there an operation raises.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from zerolite.comm.initial_sync import broadcast_flat
from zerolite.utils.module_hook import WeakHook
from zerolite.utils.nested import Arguments, Function, Keywords, find_tensors, map_tensors, written_arguments
from zerolite.utils.torch_private import as_plain_tensors, current_backward, transform_level
from zerolite.zero.grads import warn_of_collective
from zerolite.zero.stage3.absent_parameter import AbsentParameter, no_values_error, reduce_parameter

if TYPE_CHECKING:
    from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator
    from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter

_T = torch.Tensor
_GET_DATA, _SET_DATA = getattr(_T, "data").__get__, getattr(_T, "data").__set__  # noqa: B009
_ALIASING = frozenset([_T.detach, torch.detach, _GET_DATA])
_SHOWING = frozenset([_T.__repr__, _T.__format__])
_GEOMETRY = frozenset([_T.stride, _T.is_contiguous, _T.dim_order])
# They make a tensor like their first argument, without its values.
_LIKE = frozenset(getattr(torch, f"{name}_like") for name in "zeros ones empty full rand randn randint".split())
_CASTS = frozenset(getattr(_T, name) for name in "to cpu cuda float half double bfloat16 type".split())
_BACKWARDS = (torch.autograd.grad, torch.autograd.backward)
# Functions in C that read or hand out the memory of a tensor, past its dispatch.
_COPYING = frozenset([_T.numpy, _T.__array__, _T.tolist])
_MEMORY_FUNCTIONS = frozenset(
    [
        *(_T.data_ptr, _T.untyped_storage, _T.storage, _T.share_memory_, _T.set_, _T.resize_, _T.as_subclass),
        *(_T.__dlpack__, _T.__dlpack_device__, _T.is_shared, _T.pin_memory),
    ]
)
_FACTORIES = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    )
)


class LiveView(torch.Tensor):
    """View of a parameter, which shows the values of the moment in which an operation uses it; see the module.

    Attributes:
        sharded_param: the parameter.
        version: the parameter's version when the view was taken. A backward raises if that has changed.
        is_detached: True for ``p.detach()`` itself.
    """

    sharded_param: PartitionedParameter
    version: tuple[int, int]
    is_detached = False

    @staticmethod
    def __new__(cls, sharded_param: PartitionedParameter, like: torch.Tensor, start: int = 0) -> LiveView:
        """
        Args:
            like: a tensor with the view's shape and strides.
            start: the view's first element in the parameter.
        """
        with torch.inference_mode(False):  # the view may outlive the user's inference mode
            view: LiveView = torch.Tensor._make_wrapper_subclass(
                cls,
                like.shape,
                like.stride(),
                start,
                dtype=sharded_param.shard.dtype,
                device=sharded_param.context.device,
            )
        view.sharded_param, view.version = sharded_param, sharded_param.version
        return view

    def in_memory_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return the same view of ``full``, flat values of the whole parameter."""
        return full.as_strided(self.shape, self.stride(), full.storage_offset() + self.storage_offset())

    def shows_all_of(self, other: PartitionedParameter) -> bool:
        """Return True if this is a whole parameter, and that is ``other``."""
        geometry = (self.shape, self.stride(), self.storage_offset())
        return self.sharded_param is other and geometry == (other.shape, other.strides, 0)

    @classmethod
    def __torch_function__(
        cls, function: Function, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if any(issubclass(other, AbsentParameter) for other in types):
            return NotImplemented  # it replaces itself by a view
        with as_plain_tensors():
            view = next(iter(find_tensors((args, kwargs), LiveView)), None)
            name = "?" if view is None else view.sharded_param.name
            if function in _SHOWING:  # a debugger calls them on one rank alone
                return f"tensor(of parameter '{name}', whose current values are not here)"
            if function in _MEMORY_FUNCTIONS:
                raise no_values_error(name, f"Tensor.{function.__name__} hands out memory that it does not have")
            if function == _SET_DATA:
                raise _assignment_error(name)
            if function is _T.requires_grad_ and view is not None and view.is_detached:
                return _alias_of(view.sharded_param).requires_grad_(*args[1:], **kwargs)
            if function in _COPYING and view is not None:
                return _copied_out(function, view, args[1:], kwargs)
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: OpOverload, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        if any(other is not LiveView for other in types):
            return NotImplemented  # another class, such as that of p.grad, brings its values first
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # which does not take functions apart by itself
            parts = function.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        return _run(function, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an ordinary tensor."""
        return self.detach().clone().__reduce_ex__(protocol)

    def __copy__(self) -> torch.Tensor:
        return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return an ordinary tensor with memory of its own."""
        copied = memo[id(self)] = self.detach().clone()
        return copied.requires_grad_(self.requires_grad)


class _Show(torch.autograd.Function):
    """A view of a parameter, in the graph: its gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        return _view_of(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _view_of(parameter: Any) -> LiveView:
    sharded_param: PartitionedParameter = vars(parameter)["_sharded_param"]
    return LiveView(sharded_param, sharded_param.view)


def _alias_of(sharded_param: PartitionedParameter) -> torch.Tensor:
    """Return another absent parameter with the same values, because ``torch.nn.Parameter(p)`` asks for the class of
    ``p.detach().requires_grad_()`` to be that of ``p``."""
    alias = torch.Tensor._make_subclass(type(sharded_param.parameter), sharded_param.absent, False)
    vars(alias)["_sharded_param"] = sharded_param
    return alias


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory of the geometry of ``tensor``, if that is a view; others as they are."""
    if not isinstance(tensor, LiveView):
        return tensor
    start = tensor.storage_offset()
    end = start + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.empty(max(end, 0), dtype=tensor.dtype, device="meta")
    return memory.as_strided(tensor.shape, tensor.stride(), start)


# ---------------------------------------------------------------- released parameters


def run_released(function: Function, args: Arguments, kwargs: Keywords, released: Sequence[Any]) -> Any:
    """Call ``function`` with released parameters among its arguments. Called on all ranks, if values are needed.

    Inside a forward they are gathered for the module that is executing, and for its backward. Elsewhere views take
    their places.
    """
    first: PartitionedParameter = vars(released[0])["_sharded_param"]
    with as_plain_tensors():
        if function in _SHOWING:
            return f"Parameter '{first.name}' of shape {tuple(first.shape)}, partitioned"
        if function is reduce_parameter:
            return first.__reduce__()
        if function in _GEOMETRY or (function in _LIKE and args[:1] == (released[0],)):
            return function(first.view, *args[1:], **kwargs)
        if function in _ALIASING:
            view = _view_of(released[0])
            view.is_detached = function is _T.detach
            return view
        if function in _COPYING:
            return _copied_out(function, _view_of(released[0]), args[1:], kwargs)
        if function is _T.to and not first.context.initialising:  # a shard keeps its strides
            kwargs.pop("memory_format", None)
        if function in _CASTS and _stays(function, args, kwargs, first):
            return released[0]
        if function is _T.set_ and not first.context.initialising:
            raise no_values_error(
                first.name,
                "so it cannot be parametrized in a forward, as torch.nn.utils.parametrize and PEFT's "
                "target_parameters do by Tensor.set_: use stage 2",
            )
        if function in _MEMORY_FUNCTIONS and function is not _T.set_:
            raise no_values_error(first.name, f"Tensor.{function.__name__} hands out memory that it does not have")
        if function == _SET_DATA or function is _T.set_:
            return _assign(first, args[1])
    if function in _BACKWARDS:  # whose inputs need no values; what runs in the backward may
        return function(*map_tensors(_edge_of, args), **map_tensors(_edge_of, kwargs))
    for parameter in released:
        sharded_param: PartitionedParameter = vars(parameter)["_sharded_param"]
        if sharded_param.coordinator is not None:
            sharded_param.coordinator.pin_in_forward(sharded_param)
    graph = torch.is_grad_enabled() and getattr(function, "__module__", "") != "torch.nn.init"  # which needs none
    views = {id(p): _replacement(p, graph) for p in released if isinstance(p, AbsentParameter)}
    if not views:
        return function(*args, **kwargs)
    with as_plain_tensors():
        args, kwargs = map_tensors(lambda tensor: views.get(id(tensor), tensor), (list(args), kwargs))
        result = function(*args, **kwargs)
    changed = {id(views[id(p)]): p for p in released if id(p) in views}  # in place: such a function returns `p`
    return changed.get(id(result), result)


def _replacement(parameter: torch.Tensor, graph: bool) -> torch.Tensor:
    if not (graph and parameter.requires_grad):
        return _view_of(parameter)
    sharded_param: PartitionedParameter = vars(parameter)["_sharded_param"]
    if sharded_param.coordinator is not None:
        sharded_param.coordinator.on_use_outside_groups()
    view: torch.Tensor = _Show.apply(parameter)
    return view


def _edge_of(tensor: torch.Tensor) -> object:
    if not isinstance(tensor, AbsentParameter):
        return tensor
    with as_plain_tensors():
        return torch.autograd.graph.get_gradient_edge(tensor)


def _copied_out(function: Function, view: LiveView, args: Arguments, kwargs: Keywords) -> Any:
    """Return what a function in C makes of the values. A numpy array of them is read-only, because it is a copy."""
    result = function(view.detach().clone(), *args, **kwargs)
    if hasattr(result, "__array_interface__"):
        result.flags.writeable = False
    return result


def _stays(function: Function, args: Arguments, kwargs: Keywords, sharded_param: PartitionedParameter) -> bool:
    """Return True if ``function`` moves a parameter that operations do not gather: its shard stays where it is.
    Lightning ends with ``module.cpu()``."""
    if sharded_param.context.shared.gathers_for_operations:
        return False
    probe = sharded_param.shard.new_empty(0, device=sharded_param.context.device)
    result = function(probe, *args[1:], **kwargs)
    return isinstance(result, torch.Tensor) and result.dtype == probe.dtype


def _assign(sharded_param: PartitionedParameter, values: torch.Tensor) -> None:
    """Take over ``p.data = values``, where they are the parameter's own, as after ``p.data += 1``.

    Raises:
        RuntimeError: for other values, unless the model is being initialised.
    """
    is_view = isinstance(values, LiveView) and values.shows_all_of(sharded_param)
    if is_view or values is sharded_param.ref():
        return
    if not sharded_param.context.initialising:
        raise _assignment_error(sharded_param.name)
    sharded_param.context.initialising.replace_values(sharded_param, values)


def _assignment_error(name: str) -> RuntimeError:
    return RuntimeError(
        f"parameter '{name}': expected its values to be changed by p.copy_(values) under torch.no_grad(), got "
        "p.data = values, which at stage 3 has no memory to replace. Casts and moves of a module are for before "
        "zerolite.initialize"
    )


# ---------------------------------------------------------------- operations on views


def _run(function: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Call ``function`` with views among its arguments. Called on all ranks, in the same order, if it needs values."""
    views = find_tensors((args, kwargs), LiveView)
    first = views[0].sharded_param
    if function.namespace == "c10d":
        raise no_values_error(first.name, "and torch.distributed would write into a copy: send a clone")
    if function.overloadpacket in _FACTORIES:
        kwargs = {**kwargs, "device": kwargs.get("device") or first.context.device}
        return function(*map_tensors(_without_memory, args), **map_tensors(_without_memory, kwargs))
    if function.is_view:
        result = function(*map_tensors(_without_memory, args), **kwargs)
        return map_tensors(lambda tensor: _as_view(first, tensor), result)
    _check(views)
    sharded_params = list(dict.fromkeys(view.sharded_param for view in views))
    fulls = dict(zip(sharded_params, _values_of(sharded_params), strict=True))
    in_memory = {id(view): view.in_memory_of(fulls[view.sharded_param]) for view in views}
    written = [tensor for tensor in written_arguments(function, args, kwargs) if isinstance(tensor, LiveView)]
    for view in written:
        if view.grad_fn is not None:
            raise RuntimeError(
                f"parameter '{view.sharded_param.name}' requires a gradient and is changed in place by "
                f"{function.overloadpacket}; change it under torch.no_grad(), or change p.data"
            )
    result = function(*map_tensors(lambda t: in_memory.get(id(t), t), list(args)), **_replaced(kwargs, in_memory))
    for view in written:
        if in_memory[id(view)].shape != view.shape or in_memory[id(view)].stride() != view.stride():
            raise no_values_error(view.sharded_param.name, f"and {function.overloadpacket} would give it another shape")
    for sharded_param in dict.fromkeys(view.sharded_param for view in written):
        _write(sharded_param, fulls[sharded_param])
    back = {id(in_memory[id(view)]): view for view in views}
    return map_tensors(lambda tensor: back.get(id(tensor), tensor), result)


def _write(sharded_param: PartitionedParameter, full: torch.Tensor) -> None:
    """Take over values that an operation has written into ``full``, the same on all ranks. While ``zero.Init`` builds a
    model they are rank 0's."""
    parameter = sharded_param.ref()
    if parameter is not None and not parameter.is_inference():
        torch.autograd.graph.increment_version(parameter)  # a graph may have saved it
    if sharded_param.context.initialising:
        broadcast_flat(full[: sharded_param.numel], sharded_param.groups.mean, "initial_sync", 0)
    if not sharded_param.pin_count:  # otherwise the end of the gather context looks for changes
        sharded_param.write(full)
        sharded_param.mark_seen()


def _replaced(kwargs: Keywords, in_memory: dict[int, torch.Tensor]) -> Keywords:
    replaced: Keywords = map_tensors(lambda tensor: in_memory.get(id(tensor), tensor), kwargs)
    return replaced


def _as_view(sharded_param: PartitionedParameter, tensor: torch.Tensor) -> LiveView:
    """Return the view of a parameter that has the geometry of ``tensor``, which has no memory."""
    if tensor.dtype != sharded_param.shard.dtype:
        raise no_values_error(sharded_param.name, "and it cannot be viewed in another dtype")
    return LiveView(sharded_param, tensor, int(tensor.storage_offset()))


def _check(views: Sequence[LiveView]) -> None:
    """Raise RuntimeError for a view that a backward uses after its parameter has changed."""
    if current_backward() == -1:
        return
    for view in views:
        if view.version != view.sharded_param.version:
            raise changed_error(view.sharded_param.name)


def changed_error(name: str) -> RuntimeError:
    """Return the error of a backward that needs values of a parameter from before its last change."""
    return RuntimeError(
        f"parameter '{name}' has changed since it was used in the forward whose backward this is; call backward before "
        "the step, or use a clone of it"
    )


def _values_of(sharded_params: Sequence[PartitionedParameter]) -> list[torch.Tensor]:
    """Return the full values, flat: the parameters' own memory where it has them, and gathered copies elsewhere."""
    missing = [sharded_param for sharded_param in sharded_params if not sharded_param.has_full_values]
    for sharded_param in missing:
        _check_gather(sharded_param)
    copies: dict[PartitionedParameter, torch.Tensor] = {}
    contexts = dict.fromkeys(sharded_param.context for sharded_param in missing)
    for context in contexts:
        members = [sharded_param for sharded_param in missing if sharded_param.context is context]
        copies.update(zip(members, context.gather_copies(members), strict=True))
    if missing and missing[0].groups.mean.world_size > 1 and missing[0].groups.mean.is_rank0:
        # After the gather: if warnings are errors, this one is raised on one rank alone.
        warn_of_collective(
            f"this line uses the values of parameter '{missing[0].name}', of which each rank owns a part: they are "
            "gathered for it, in a collective that all ranks must call. Inside "
            "zerolite.zero.GatheredParameters(parameters) parameters are gathered together and once"
        )
    return [copies.get(sharded_param, sharded_param.full) for sharded_param in sharded_params]


def _check_gather(sharded_param: PartitionedParameter) -> None:
    """Raise RuntimeError where an operation must not gather: on one rank alone, or on another thread."""
    coordinator = sharded_param.coordinator
    if not sharded_param.context.shared.gathers_for_operations and (coordinator is None or not coordinator.busy):
        raise no_gather_error(sharded_param.name)
    if transform_level() is not None:
        raise no_values_error(
            sharded_param.name,
            "stage 3 cannot gather inside a transform of torch.func (grad, vmap, …): use copy.deepcopy(engine.module)",
        )
    if coordinator is None or current_backward() != -1:  # autograd has threads of its own
        return
    if threading.get_ident() != coordinator.thread:
        raise no_values_error(sharded_param.name, "and this thread is not the one that trains")


def refuse_operations(parameters: Iterable[Any]) -> None:
    """Let operations on released parameters raise on the rank that calls them, for the life of their engine."""
    for parameter in parameters:
        sharded_param: PartitionedParameter | None = vars(parameter).get("_sharded_param")
        if sharded_param is not None:
            sharded_param.context.set_gathers_for_operations(False)


def no_gather_error(name: str) -> RuntimeError:
    """Return the error of an operation on one rank alone, where operations do not gather."""
    return no_values_error(
        name, "and with DeepSpeed's interface nothing gathers them outside of forward, backward and GatheredParameters"
    )


# ---------------------------------------------------------------- state dicts


class GatheredStateDict(WeakHook[Any]):
    """Hook that puts full copies of a module's own released parameters into its ``state_dict()``, so that one rank may
    go on with it alone. With DeepSpeed's interface, where one rank alone may call that, it holds the views."""

    def __call__(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        coordinator: PartitionedParameterCoordinator | None = self.owner()
        if coordinator is None or not coordinator.context.shared.gathers_for_operations:
            return
        views = {key: view for key, view in state.items() if isinstance(view, LiveView)}
        sharded_params = list(dict.fromkeys(view.sharded_param for view in views.values()))
        fulls = dict(zip(sharded_params, _values_of(sharded_params), strict=True))
        for key, view in views.items():
            full = fulls[view.sharded_param]
            values = view.in_memory_of(full)
            state[key] = values.clone() if full is view.sharded_param.full else values
