"""Classes of a released parameter (stage 3) and of a parameter whose updated values are in flight (stages 1 and 2).

Both decide for each function of torch if it needs values: ``p.shape`` and ``p.grad`` do not, ``p.norm()`` does.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function

from zerolite.utils.nested import Arguments, Function, Keywords, find_tensors

Tensor = torch.Tensor


class ReleasedParameter(torch.nn.Parameter):
    """Class of a released parameter; the object stays the same.

    It has the dtype, device, layout and full shape of the parameter, but the memory of an empty tensor. torch would
    read nothing there and lose writes, without an error. So an operation that needs values gathers them (see
    gathered_operations.py), or raises RuntimeError where that is impossible.
    """

    def __reduce_ex__(self, protocol: object) -> Any:
        return vars(self)["_zero_handle"].__reduce__()  # raises an error that says what to do instead

    def as_subclass(self, cls: type) -> Any:
        """Raise RuntimeError through ``__torch_function__``, which torch's method does not call by itself."""
        return handle_torch_function(Tensor.as_subclass, (self,), self, cls)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Raise RuntimeError through ``__torch_function__``, which torch's method does not call by itself."""
        return handle_torch_function(Tensor.set_, (self,), self, *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function is Tensor.__repr__ or function is Tensor.__format__:
                return f"Parameter '{_name(args[0])}' of shape {tuple(args[0].ds_shape)}, partitioned"
            if function in SHAPE_FUNCTIONS or function in LIKE_FUNCTIONS:
                shown = args or (kwargs.pop("input", None),)
                if isinstance(shown[0], ReleasedParameter):
                    return function(vars(shown[0])["_zero_handle"].view, *shown[1:], **kwargs)
                args = shown
            if function == _SET_GRAD:
                set_grad(*args)
                return None
            if function in METADATA_FUNCTIONS:
                return function(*args, **kwargs)
            if function in _CASTS and "memory_format" not in kwargs:
                result = function(*args, **kwargs)
                if result is args[0] or isinstance(result, str):  # a cast to its own dtype; p.type() returns a name
                    return result
                if result.device != args[0].device and result.dtype == args[0].dtype and not _gathers(args[0]):
                    return args[0]  # Lightning ends with module.cpu(): its shard stays where it is
            if function == _SET_DATA and args[0] is args[1]:  # p.data = p, by a cast of the module to its own dtype
                return None
        released = find_tensors((args, kwargs), ReleasedParameter)
        if not released:
            raise no_values_error("?", f"and {function} does not show them")
        if function is Tensor.detach and sys._getframe(1).f_code is _NEW_PARAMETER:
            raise no_values_error(
                _name(released[0]), "and torch.nn.Parameter(p) would be a second parameter in its memory"
            )
        from zerolite.zero.stage3.gathered_operations import run_gathered  # here, because it imports this module

        return run_gathered(function, args, kwargs)


def no_values_error(name: str, why: str) -> RuntimeError:
    """Return the error of an operation that needs the values of a released parameter."""
    return RuntimeError(
        f"parameter '{name}' is partitioned over ranks and its values are not here, {why}; read it inside "
        "zerolite.zero.GatheredParameters(parameters), change it inside GatheredParameters(parameters, "
        "modifier_rank=0), both on all ranks. Casts, moves and parametrizations of a module are for before "
        "zerolite.initialize"
    )


def no_gather_error(name: str) -> RuntimeError:
    """Return the error of an operation on one rank alone, where operations do not gather."""
    return no_values_error(
        name, "and with DeepSpeed's interface nothing gathers them outside of forward, backward and GatheredParameters"
    )


class InFlightParameter(torch.nn.Parameter):
    """Class of a parameter whose updated values are being gathered (stages 1 and 2).

    An operation that needs the values waits for them, and gives the parameter its ordinary class back. Each parameter
    gatherer has a subclass whose ``wait_for`` waits for its own parameters.
    """

    wait_for: Callable[[Sequence[torch.Tensor]], None]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an ordinary parameter, because ``type(p)(values)`` makes one that no gatherer knows."""
        return torch.nn.Parameter(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        self.wait_for([self])
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: object) -> Any:
        self.wait_for([self])
        return self.__reduce_ex__(protocol)

    def as_subclass(self, cls: type) -> Any:
        """Return the values in another class after a wait: torch's method does not call ``__torch_function__``."""
        self.wait_for([self])
        return self.as_subclass(cls)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the memory after a wait: torch's method does not call ``__torch_function__`` by itself."""
        return handle_torch_function(Tensor.set_, (self,), self, *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if function in NEEDS_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        in_flight = find_tensors((args, kwargs), cls)
        cls.wait_for(in_flight)
        late = find_tensors(in_flight, cls)
        if late:
            raise RuntimeError(
                f"the updated values of a parameter of shape {tuple(late[0].shape)} never came: the engine that "
                "gathers them ended in the middle of a step. Call zerolite.destroy() before the engine goes out of use"
            )
        return function(*args, **kwargs)


def _getters(*names: str) -> list[object]:
    return [getattr(Tensor, name).__get__ for name in names]


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_SET_DATA = getattr(Tensor, "data").__set__  # noqa: B009
_SET_GRAD = getattr(Tensor, "grad").__set__  # noqa: B009
NUMEL_FUNCTIONS = frozenset([Tensor.numel, Tensor.nelement])
SHAPE_FUNCTIONS = frozenset(
    [
        *(*_getters("shape", "ndim", "nbytes"), *NUMEL_FUNCTIONS),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.stride),
        *(Tensor.is_contiguous, Tensor.__len__, torch.numel, Tensor.is_same_size, Tensor.dim_order),
    ]
)
# Functions that create a tensor in the shape of their first argument, here the full shape.
LIKE_FUNCTIONS = frozenset(
    getattr(torch, f"{name}_like") for name in "zeros ones empty full rand randn randint".split()
)
# Functions that read no values; autograd and optimizers call them on any parameter.
METADATA_FUNCTIONS = frozenset(
    [
        *_getters("shape", "dtype", "device", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad"),
        *_getters("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "ndim", "_version", "is_mkldnn"),
        *_getters("output_nr", "is_xpu", "is_mps", "is_nested", "_base", "itemsize", *_HOOKS),
        *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", *_HOOKS)),
        getattr(Tensor, "grad").__delete__,  # noqa: B009
        *(getattr(Tensor, f"new_{name}") for name in "empty empty_strided full ones tensor zeros".split()),
        Tensor.size,
        Tensor.dim,
        Tensor.ndimension,
        Tensor.stride,
        Tensor.element_size,
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.is_inference, Tensor.is_neg),
        *(Tensor.is_conj, Tensor.is_pinned, Tensor.storage_offset, Tensor._is_view, Tensor.retain_grad),
        *(torch.result_type, torch.is_signed, torch.is_inference, torch.is_neg, torch.is_conj),
        Tensor.is_contiguous,
        Tensor.requires_grad_,
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
        Tensor.get_device,
        Tensor.__hash__,
        torch._has_compatible_shallow_copy_type,
        torch.is_floating_point,
        torch.is_complex,
        torch.autograd.grad,
        torch.autograd.backward,
    ]
)
# The same without functions whose further arguments, or whose backward, may be parameters in flight.
NEEDS_NO_VALUES = (METADATA_FUNCTIONS | NUMEL_FUNCTIONS) - {
    *(Tensor.new_full, Tensor.new_tensor, torch.autograd.grad, torch.autograd.backward)
}
_CASTS = frozenset(getattr(Tensor, name) for name in "to cpu cuda float half double bfloat16 type contiguous".split())


_NEW_PARAMETER = torch.nn.Parameter.__new__.__code__


def _name(parameter: object) -> str:
    handle = getattr(parameter, "_zero_handle", None)
    return "?" if handle is None else handle.name


def _gathers(parameter: object) -> bool:
    """Return False for a parameter that operations must not gather."""
    return vars(parameter)["_zero_handle"].context.gathers_for_operations


def set_grad(parameter: Any, gradient: torch.Tensor | None) -> None:
    """Set ``parameter.grad`` to a gradient of the full shape, for a released parameter too."""
    handle = vars(parameter).get("_zero_handle")
    if handle is None and type(parameter) is torch.nn.Parameter:
        parameter.grad = gradient
        return
    with as_plain_tensors():
        if gradient is None or handle is None or parameter.shape == handle.view.shape:
            parameter.grad = gradient
            return
        # torch compares the shapes of gradient and parameter, so show the full shape for a moment.
        empty, parameter.data = parameter.data, handle.view
        try:
            parameter.grad = gradient
        finally:
            parameter.data = empty


def set_released_class(parameter: torch.Tensor) -> None:
    """Give a released parameter the class that gathers for operations, derived from the user's class if it has one."""
    own = type(parameter)
    if own is torch.nn.Parameter:
        parameter.__class__ = ReleasedParameter
    elif issubclass(own, torch.nn.Parameter) and not issubclass(own, ReleasedParameter):
        parameter.__class__ = _released_subclass(own)


def class_of(parameter: torch.Tensor) -> type:
    """Return the class that a parameter has while it is not released."""
    own = type(parameter)
    if own is ReleasedParameter:
        return torch.nn.Parameter
    return own.__mro__[2] if issubclass(own, ReleasedParameter) else own


def restore_class(parameter: torch.Tensor) -> None:
    """Undo :func:`set_released_class`."""
    own = class_of(parameter)
    if own is not type(parameter):
        parameter.__class__ = own


@functools.cache
def _released_subclass(own: type) -> type:
    """Return the class of released parameters for ``own``, a class of the user."""
    return type(f"Released{own.__name__}", (ReleasedParameter, own), {})


as_plain_tensors = torch._C.DisableTorchFunctionSubclass
"""Context for the engine's own work, in which torch treats a released parameter as a tensor without elements."""
