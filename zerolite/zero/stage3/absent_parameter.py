"""The class of a parameter whose values are not here: released (stage 3), or still in flight after an update.

The object stays the same and keeps its dtype, device and full shape, so that autograd, optimizers and questions such as
``p.shape`` need nothing. A function of torch that touches values brings them: it waits for values in flight, and
gathers released ones (zero/stage3/live_view.py).

At stage 3 its ``data`` has the memory of one element, which is not a number. Code that goes past torch's functions
(``torch.tensor(p)``, a C++ extension) and reads it computes NaN. Below stage 3 its ``data`` has no memory
(``deferred_tensor``): operators of all code wait for the values too, and a pointer to it cannot be had.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.overrides import handle_torch_function

from zerolite.utils.nested import Arguments, Function, Keywords, find_tensors
from zerolite.utils.torch_private import as_plain_tensors

Tensor = torch.Tensor


class Source(Protocol):
    """Source of the values of absent parameters: a sharded parameter, or the gather of an updated bucket."""

    def run(self, function: Function, args: Arguments, kwargs: Keywords, absent: Sequence[Tensor]) -> Any:
        """Return the result of ``function``, which touches the values of ``absent``, with the values."""


class AbsentParameter(torch.nn.Parameter):
    """Class of a parameter whose values are not here; see the module.

    Each bucket has a subclass of it with its ``source``. Released parameters have a source each.
    """

    source: Source | None = None
    _sharded_param: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an ordinary parameter, because ``type(p)(values)`` makes one that no source knows."""
        return torch.nn.Parameter(*args, **kwargs)

    @property
    def ds_status(self) -> Any:
        """State of a partitioned parameter, for programs written for DeepSpeed."""
        return self._sharded_param.status

    @property
    def ds_tensor(self) -> Any:
        """This rank's shard of a partitioned parameter."""
        return self._sharded_param.current_shard()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _source_of(self).run(copy.deepcopy, (self, memo), {}, [self])

    def __reduce_ex__(self, protocol: object) -> Any:
        return _source_of(self).run(reduce_parameter, (self, protocol), {}, [self])

    def as_subclass(self, cls: type) -> Any:
        """Run through ``__torch_function__``, which torch's method does not call by itself."""
        return handle_torch_function(Tensor.as_subclass, (self,), self, cls)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Run through ``__torch_function__``, which torch's method does not call by itself."""
        return handle_torch_function(Tensor.set_, (self,), self, *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if function in NEEDS_NO_VALUES:
            with as_plain_tensors():
                return function(*args, **kwargs)
        absent = find_tensors((args, kwargs), AbsentParameter)
        source = _source_of(absent[0]) if absent else cls.source
        if source is None:
            raise no_values_error("?", f"and {function} does not show them")
        return source.run(function, args, kwargs, absent)


def reduce_parameter(parameter: Tensor, protocol: Any) -> Any:
    """Return what pickles a parameter whose values are here."""
    return parameter.__reduce_ex__(protocol)


def _source_of(parameter: Any) -> Source:
    """Return the source of an absent parameter."""
    source: Source = type(parameter).source or vars(parameter)["_sharded_param"]
    return source


def no_values_error(name: str, why: str) -> RuntimeError:
    """Return the error of an operation that needs the values of a released parameter."""
    return RuntimeError(
        f"parameter '{name}' is partitioned over ranks and its values are not here, {why}; read it inside "
        "zerolite.zero.GatheredParameters(parameters), change it inside GatheredParameters(parameters, "
        "modifier_rank=0), both on all ranks. Casts, moves and parametrizations of a module are for before "
        "zerolite.initialize"
    )


def in_flight_error(name: str) -> str:
    """Return the error of code that asks for a pointer to the memory of a parameter in flight."""
    return (
        f"parameter '{name}': expected a read that waits for its new values, which are on their way from the other "
        "ranks, got a pointer that C++ or Triton code asks for past PyTorch's operators. Give that code p.data, or "
        'access engine.module first, which waits for all parameters; with "overlap_comm": false nothing is on its '
        "way after a step"
    )


def not_a_number(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a 0-dim tensor of which all bits are 1: NaN in every floating dtype. Absent values are it, expanded."""
    return torch.full((dtype.itemsize,), 255, dtype=torch.uint8, device=device).view(dtype).reshape(())


# ---------------------------------------------------------------- classes


def set_absent_class(parameter: Tensor) -> None:
    """Give a sharded parameter the class of absent ones, derived from the user's class if it has one."""
    present = type(parameter)
    if present is torch.nn.Parameter:
        parameter.__class__ = AbsentParameter
    elif issubclass(present, torch.nn.Parameter) and not issubclass(present, AbsentParameter):
        parameter.__class__ = _absent_subclass(present)


def present_class(parameter: Tensor) -> type:
    """Return the class that a parameter has while its values are here."""
    absent = type(parameter)
    if absent is AbsentParameter:
        return torch.nn.Parameter
    return absent.__mro__[2] if issubclass(absent, AbsentParameter) else absent


def restore_class(parameter: Tensor) -> None:
    """Undo :func:`set_absent_class`."""
    absent = type(parameter)
    if absent is AbsentParameter:
        parameter.__class__ = torch.nn.Parameter
    elif absent is not torch.nn.Parameter:
        parameter.__class__ = present_class(parameter)


@functools.cache
def _absent_subclass(present: type) -> type:
    """Return the class of absent parameters for ``present``, a class of the user."""
    return type(f"Absent{present.__name__}", (AbsentParameter, present), {})


# ---------------------------------------------------------------- copies


_OURS = ("partition", "all_gather", "partition_numel", "__deepcopy__", "_sharded_param")


def user_attributes(parameter: torch.nn.Parameter) -> dict[str, Any]:
    """Return the attributes that a user has set on a partitioned parameter."""
    return {k: value for k, value in vars(parameter).items() if not (k.startswith("ds_") or k in _OURS)}


def copy_with_values(parameter: torch.nn.Parameter, values: torch.Tensor, memo: dict[int, Any]) -> torch.nn.Parameter:
    """Return an ordinary parameter with the memory of ``values`` and the class and attributes of ``parameter``, for
    ``copy.deepcopy``."""
    user_class = present_class(parameter)
    attributes = user_attributes(parameter)
    if user_class is not torch.nn.Parameter:  # the attributes may say how to read the values
        attributes = copy.deepcopy(attributes, memo)
    copied: torch.nn.Parameter = torch.Tensor._make_subclass(user_class, values, parameter.requires_grad)
    vars(copied).update(attributes)
    memo[id(parameter)] = copied
    return copied


# ---------------------------------------------------------------- functions that need no values


def _getters(*names: str) -> list[object]:
    return [getattr(Tensor, name).__get__ for name in names]


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")

# Autograd and optimizers call them on any parameter. Their further arguments are no parameters.
NEEDS_NO_VALUES = frozenset(
    [
        *_getters("shape", "dtype", "device", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad"),
        *_getters("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "ndim", "nbytes", "_version"),
        *_getters("is_mkldnn", "output_nr", "is_xpu", "is_mps", "is_nested", "_base", "itemsize", *_HOOKS),
        *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", *_HOOKS)),
        getattr(Tensor, "grad").__delete__,  # noqa: B009
        *(getattr(Tensor, f"new_{name}") for name in "empty empty_strided ones zeros".split()),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.is_inference, Tensor.is_neg),
        *(Tensor.is_conj, Tensor.is_pinned, Tensor.storage_offset, Tensor._is_view, Tensor.retain_grad),
        *(Tensor.requires_grad_, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
        *(Tensor.get_device, Tensor.__hash__, Tensor.__len__, Tensor.is_same_size),
        *(torch.result_type, torch.is_signed, torch.is_inference, torch.is_neg, torch.is_conj, torch.numel),
        *(torch.is_floating_point, torch.is_complex, torch._has_compatible_shallow_copy_type),
    ]
)
