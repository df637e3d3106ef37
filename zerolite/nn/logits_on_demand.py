"""Logits that are whole only when an operation needs them: the base of two kinds of tensors.

A model's own code stays as it is between its head and its loss. Casts, views, slices of tokens and multiplications by
numbers are passed on to what stands behind the logits, and ``F.cross_entropy`` is computed from that. Every other
operation makes the logits whole first, and continues with an ordinary tensor. So results are always those of whole
logits.

- :class:`zerolite.tensor_parallel.VocabParallelLogits`: behind it is this rank's part of the vocabulary.
- :class:`zerolite.nn.DeferredLogits`: behind it are the inputs of the head, which has not computed yet.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zerolite.utils.nested import Arguments, Function, Keywords
from zerolite.utils.torch_private import as_plain_tensors

Change = Callable[[Tensor], Tensor]


class LogitsState(ABC):
    """State behind logits that are not whole.

    Attributes:
        shape: of the whole logits; the last dimension is the vocabulary.
        dtype: of the whole logits.
        device: of the whole logits.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """True if an ordinary tensor has taken the place of these logits."""

    @abstractmethod
    def whole(self) -> Tensor:
        """Return an ordinary tensor with all logits, which takes their place from now on."""

    @abstractmethod
    def values(self) -> Tensor:
        """Return the values of the whole logits, below autograd."""

    @abstractmethod
    def change_elements(self, change: Change) -> Any:
        """Return logits of the same shape of which ``change`` computes each by itself; NotImplemented if that needs the
        whole logits."""

    @abstractmethod
    def change_rows(self, change: Change) -> LogitsOnDemand:
        """Return logits with other leading dimensions. ``change`` works for any size of the last dimension."""

    @abstractmethod
    def describe(self, function: Function, args: Arguments, kwargs: Keywords) -> object:
        """Return the answer of a function that asks for metadata, or registers a hook; NotImplemented if it needs the
        whole logits."""

    @abstractmethod
    def cross_entropy(self, target: Tensor, options: dict[str, Any]) -> Tensor | Any:
        """Return ``F.cross_entropy`` with one target for each token and no class weights; NotImplemented if it needs
        the whole logits.

        Args:
            target: of the shape of the logits without their last dimension.
            options: ignore_index, reduction and label_smoothing.
        """

    def before_write(self, name: str) -> None:  # noqa: B027
        """Called before the operation ``name`` writes into the whole logits."""


class LogitsOnDemand(Tensor):
    """Logits [..., vocabulary] that become whole when an operation needs all of them; see the module."""

    _state: LogitsState

    def __new__(cls, state: LogitsState) -> LogitsOnDemand:
        logits: LogitsOnDemand = Tensor._make_wrapper_subclass(
            cls, state.shape, dtype=state.dtype, device=state.device, layout=torch.strided
        )
        return logits

    def __init__(self, state: LogitsState) -> None:
        self._state = state

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with as_plain_tensors():
                return func(*args, **kwargs)
        if func in _BACKWARDS:
            with torch.enable_grad():  # reentrant checkpointing calls them without it
                args = made_whole(args)
        first = args[0] if args and isinstance(args[0], LogitsOnDemand) else None
        if first is not None and not first._state.is_whole:
            handler = _HANDLERS.get(func)
            result = NotImplemented if handler is None else handler(first._state, func, args[1:], kwargs)
            if result is not NotImplemented:
                return result
            if name := _writes(func):
                first._state.before_write(name)
        return func(*made_whole(args), **made_whole(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: object = (), kwargs: object = None) -> Any:  # type: ignore[override]
        return func(*made_whole(args, LogitsState.values), **made_whole(kwargs or {}, LogitsState.values))

    def __deepcopy__(self, memo: object) -> Tensor:
        return self._state.whole().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: object) -> Any:
        return self._state.whole().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self._state.dtype})"


def made_whole(value: Any, how: Callable[[LogitsState], Tensor] = lambda state: state.whole()) -> Any:
    """Return ``value`` with whole logits in the places of these tensors, in lists, tuples and dicts of any depth."""
    if isinstance(value, LogitsOnDemand):
        return how(value._state)
    if type(value) in (tuple, list):
        return type(value)(made_whole(element, how) for element in value)
    if type(value) is dict:
        return {key: made_whole(element, how) for key, element in value.items()}
    return value


def _writes(func: Function) -> str:
    """Return the name of a function that writes into its first argument; "" for others."""
    name = getattr(func, "__name__", "")
    return name if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) else ""


# -------------------------------------------------------------------- operations on what stands behind the logits

# Passes an operation on, or returns NotImplemented if this call needs the whole logits.
_Handler = Callable[["LogitsState", Function, Arguments, Keywords], object]
_HANDLERS: dict[Function, _Handler] = {}
# The wrapper itself answers these.
_METADATA: set[Function] = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "_base", "_backward_hooks")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.__hash__),
}


_BACKWARDS = (torch.autograd.backward, torch.autograd.grad)


def _handles(*functions: Function) -> Callable[[_Handler], _Handler]:
    def register(handler: _Handler) -> _Handler:
        _HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


@_handles(
    *(
        getattr(Tensor, name).__get__
        for name in "requires_grad grad_fn is_leaf dtype device is_cuda is_cpu is_meta layout is_sparse".split()
    ),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
    *(Tensor.element_size, Tensor.get_device, Tensor.is_inference, Tensor.register_hook, Tensor.is_contiguous),
)
def _describe(state: LogitsState, func: Function, args: Arguments, kwargs: Keywords) -> object:
    return state.describe(func, args, kwargs)


@_handles(Tensor.contiguous, Tensor.clone, torch.clone, Tensor.tanh, torch.tanh)
def _each(state: LogitsState, func: Function, args: Arguments, kwargs: Keywords) -> object:
    return state.change_elements(func) if not args and not kwargs else NotImplemented


@_handles(Tensor.detach, torch.detach)
def _detach(state: LogitsState, func: Function, args: Arguments, kwargs: Keywords) -> object:
    return state.change_elements(Tensor.detach)


_DTYPES = {
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.double: torch.float64,
}


@_handles(*_DTYPES)
def _cast(state: LogitsState, func: Function, args: Arguments, kwargs: Keywords) -> object:
    return _to(state, _DTYPES[func], False) if not args and not kwargs else NotImplemented


@_handles(Tensor.to, Tensor.type_as, Tensor.cpu, Tensor.cuda)
def _move(state: LogitsState, func: Function, args: Arguments, kwargs: Keywords) -> object:
    """Cast the logits; moves to another device need the whole ones."""
    device, dtype = state.device, state.dtype
    if func in (Tensor.cpu, Tensor.cuda) and not args and not kwargs:
        device = torch.device("cpu" if func is Tensor.cpu else "cuda")
    options = {key: kwargs[key] for key in ("memory_format",) if kwargs.get(key) is not None}
    for value in (*args, *(kwargs.get(key) for key in ("device", "dtype", "other"))):
        if isinstance(value, Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, (str, torch.device)):
            device = torch.device(value)
        elif value is not None and not isinstance(value, bool):
            return NotImplemented
    elsewhere = device.type != state.device.type or device.index not in (None, state.device.index)
    if options or elsewhere or not dtype.is_floating_point:
        return NotImplemented
    return _to(state, dtype, bool(kwargs.get("copy") or args[3:4] == (True,)))


def _to(state: LogitsState, dtype: torch.dtype, copy: bool) -> object:
    return state.change_elements(Cast(dtype, copy))


class Cast:
    """Change of the dtype."""

    def __init__(self, dtype: torch.dtype, copy: bool) -> None:
        self.dtype, self._copy = dtype, copy

    def __call__(self, logits: Tensor) -> Tensor:
        return logits.to(self.dtype, copy=self._copy)


@_handles(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div, Tensor.__truediv__, torch.mul, torch.div)
@_handles(Tensor.true_divide, torch.true_divide)
def _scale(state: LogitsState, func: Function, args: Arguments, kwargs: Keywords) -> object:
    if kwargs or len(args) != 1 or not isinstance(args[0], (int, float)):
        return NotImplemented
    return state.change_elements(lambda logits: func(logits, args[0]))


@_handles(Tensor.view, Tensor.reshape, torch.reshape)
def _view(state: LogitsState, func: Function, args: Arguments, kwargs: Keywords) -> object:
    if kwargs or not args or isinstance(args[0], torch.dtype):
        return NotImplemented
    sizes = list(args[0]) if len(args) == 1 and not isinstance(args[0], int) else list(args)
    if not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    product, total = math.prod(size for size in sizes if size != -1), math.prod(state.shape)
    if sizes.count(-1) > 1 or not product or (total % product if -1 in sizes else total != product):
        return NotImplemented
    shape = [total // product if size == -1 else size for size in sizes]
    if shape[-1] != state.shape[-1]:
        return NotImplemented
    return state.change_rows(lambda behind: func(behind, (*shape[:-1], behind.shape[-1])))


@_handles(Tensor.view_as)
def _view_as(state: LogitsState, func: Function, args: Arguments, kwargs: Keywords) -> object:
    return _view(state, Tensor.view, (tuple(args[0].shape),), kwargs)


@_handles(Tensor.flatten, torch.flatten)
def _flatten(state: LogitsState, func: Function, args: Arguments, kwargs: Keywords) -> object:
    arguments = dict(zip(("start_dim", "end_dim"), args, strict=False)) | kwargs
    first, last = arguments.get("start_dim", 0), arguments.get("end_dim", -1)
    dims = len(state.shape)
    if not (-dims <= last < dims) or last % dims == dims - 1:
        return NotImplemented
    return state.change_rows(lambda behind: func(behind, first, last))


@_handles(Tensor.__getitem__)
def _slice(state: LogitsState, func: Function, args: Arguments, kwargs: Keywords) -> object:
    """Index leading dimensions; the last one must stay complete."""
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if not all(entry is Ellipsis or type(entry) in (int, slice) for entry in index) or index.count(Ellipsis) > 1:
        return NotImplemented
    named = len(index) - index.count(Ellipsis)
    reaches_last = named >= len(state.shape) or (Ellipsis in index and index[-1] is not Ellipsis)
    if reaches_last and index[-1] != slice(None):
        return NotImplemented
    return state.change_rows(lambda behind: behind[args[0]])


@_handles(F.cross_entropy)
def _cross_entropy(state: LogitsState, func: Function, args: Arguments, kwargs: Keywords) -> object:
    bound = _SIGNATURE.bind(None, *args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    target = arguments["target"]
    unusual = any(arguments[name] is not None for name in ("weight", "size_average", "reduce"))
    if unusual or isinstance(target, LogitsOnDemand) or target.is_floating_point():
        return NotImplemented
    if len(state.shape) > 2 or target.shape != state.shape[:-1]:
        return NotImplemented
    return state.cross_entropy(
        target, {name: arguments[name] for name in ("ignore_index", "reduction", "label_smoothing")}
    )


_SIGNATURE = inspect.signature(F.cross_entropy)
