"""Quantized weights that consist of other tensors, as torchao's do: their inner tensors become frozen parameters.

A wrapper subclass of torch.Tensor has no memory that a bucket or a shard could hold. Its inner tensors have::

    linear._parameters["weight"]            linear._parameters["_weight_qdata"]    int8, frozen
      Int8Tensor(qdata, scale)      ───▶    linear._parameters["_weight_scale"]    fp32, frozen
                                            linear.__dict__["weight"]              Int8Tensor(these two parameters)

So they are broadcast, sharded, gathered, counted and saved as any frozen parameter of their module, and the weight that
the module computes with refers to them. The names are those of torchao's safetensors files. ``state_dict()`` shows the
weight itself, and ``load_state_dict`` takes both.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from zerolite.utils.dtypes import is_quantized
from zerolite.zero.flat import flattened as flattened_values
from zerolite.zero.stage3.partitioned_parameter import sharded_param_of

Tensor = torch.Tensor

_WRAPPERS = "_zerolite_wrappers"  # attribute of a module: its wrappers by the weight's name
_JOINS = "_zerolite_joins"  # attribute of a module: the handle of its hook that joins them
_COPY = "__deepcopy__"
_made = WeakTensorKeyDictionary()  # the parameter of an inner tensor, while the weight from before is there
_inner_only = False  # state dicts have the inner tensors now


@dataclass(frozen=True)
class Wrapper:
    """A wrapper subclass's tensor without its inner tensors.

    Attributes:
        cls: its class.
        context: what ``__tensor_flatten__`` says beside the inner tensors.
        shape, strides: of the tensor.
        attributes: its other attributes.
        inner: keys of the inner tensors by attribute, or their wrappers.
    """

    cls: Any
    context: Any
    shape: torch.Size
    strides: tuple[int, ...]
    attributes: dict[str, Any]
    inner: dict[str, str | Wrapper]

    @classmethod
    def of(cls, tensor: Any, tensors: dict[str, Tensor], prefix: str = "") -> Wrapper:
        """Return the wrapper of ``tensor``, and put its inner tensors into ``tensors``."""
        names, context = tensor.__tensor_flatten__()
        inner: dict[str, str | Wrapper] = {}
        for name in names:
            value, key = getattr(tensor, name), f"{prefix}_{name}"
            if consists_of_tensors(value):
                inner[name] = cls.of(value, tensors, key)
            else:
                inner[name] = key
                tensors[key] = value
        attributes = {name: value for name, value in vars(tensor).items() if name not in (*names, _COPY)}
        return cls(type(tensor), context, tensor.shape, tensor.stride(), attributes, inner)

    def keys(self) -> Iterator[str]:
        """Yield the keys of the inner tensors."""
        for key in self.inner.values():
            yield from (key,) if isinstance(key, str) else key.keys()

    def build(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor that consists of these inner tensors."""
        inner = {name: tensors[key] if isinstance(key, str) else key.build(tensors) for name, key in self.inner.items()}
        made: Tensor = self.cls.__tensor_unflatten__(inner, self.context, self.shape, self.strides)
        vars(made).update({name: value for name, value in self.attributes.items() if name not in vars(made)})
        # torch's copy would have inner tensors of its own, beside the parameters of the copied module.
        vars(made)[_COPY] = functools.partial(self._copy, dict(tensors))
        return made

    def _copy(self, tensors: Mapping[str, Tensor], memo: dict[int, Any]) -> Tensor:
        return self.build({key: copy.deepcopy(inner, memo) for key, inner in tensors.items()})


def consists_of_tensors(tensor: object) -> bool:
    """Return True for a wrapper subclass, which has no memory of its own."""
    return is_traceable_wrapper_subclass(tensor)


def inner_tensors(tensor: Tensor) -> Iterable[Tensor]:
    """Return the inner tensors of a wrapper subclass, of any other tensor itself."""
    tensors: dict[str, Tensor] = {}
    if not consists_of_tensors(tensor):
        return (tensor,)
    Wrapper.of(tensor, tensors)
    return tensors.values()


# -------------------------------------------------------------------- modules


def separate(modules: Iterable[torch.nn.Module]) -> None:
    """Replace frozen quantized weights that consist of other tensors by these, as parameters of the same module.

    Other parameters stay, also those that consist of other tensors: trained ones, and DTensors.
    """
    for module in modules:
        for name, weight in list(module._parameters.items()):
            if weight is None or weight.requires_grad or not consists_of_tensors(weight):
                continue
            tensors: dict[str, Tensor] = {}
            wrapper = Wrapper.of(weight, tensors)
            is_dtensor = type(weight).__module__.startswith("torch.")
            if is_dtensor or not any(is_quantized(inner.dtype) for inner in tensors.values()):
                continue
            made = {key: _as_parameter(inner) for key, inner in tensors.items()}
            del module._parameters[name]
            module._parameters.update({f"_{name}{key}": parameter for key, parameter in made.items()})
            vars(module)[name] = wrapper.build(made)
            vars(module).setdefault(_WRAPPERS, {})[name] = wrapper


def _as_parameter(inner: Tensor) -> torch.nn.Parameter:
    """Return the parameter that an inner tensor is, or becomes: one for all modules that have its weight."""
    if isinstance(inner, torch.nn.Parameter):  # the weight of another module, which has been separated
        return inner
    made: torch.nn.Parameter = _made.setdefault(inner, torch.nn.Parameter(inner.detach(), False))
    return made


def weights_of(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights whose inner tensors are parameters of ``model``, with their names."""
    for prefix, module in model.named_modules():
        for name, _ in _wrappers_of(module):
            yield f"{prefix}.{name}" if prefix else name, vars(module)[name]


def take_in_replaced(model: torch.nn.Module) -> None:
    """Write weights that a user has put in the places of separated ones since, as PEFT's merge does, into the inner
    tensors, which are parameters of the model still. All ranks have the same ones.

    Raises:
        ValueError: a weight has other inner tensors than the one before.
    """
    for prefix, module in model.named_modules():
        wrappers: dict[str, Wrapper] = vars(module).get(_WRAPPERS, {})
        for name in list(wrappers):
            weight, values = module._parameters.get(name), dict[str, Tensor]()
            if weight is None or not consists_of_tensors(weight):
                continue
            wrapper = Wrapper.of(weight, values)
            inner = {key: module.get_parameter(f"_{name}{key}") for key in wrappers[name].keys()}
            before, after = ({key: _kept(tensor) for key, tensor in of.items()} for of in (inner, values))
            if before != after:
                raise ValueError(
                    f"zerolite: expected '{prefix + '.' * bool(prefix)}{name}' to have inner tensors like those of the "
                    f"weight before, {before}, got {after} in a {type(weight).__name__}; quantize it in the same way"
                )
            for key, parameter in inner.items():
                sharded_param, value = sharded_param_of(parameter), values[key].detach()
                if sharded_param is None:
                    parameter.data.copy_(value)
                else:
                    sharded_param.write(flattened_values(value, sharded_param.strides))
            del module._parameters[name]
            wrappers[name] = wrapper
            vars(module)[name] = wrapper.build(inner)


def _kept(inner: Tensor) -> tuple[object, ...]:
    """Return what an inner tensor has in common with one that takes its place: its shape, and a quantized dtype."""
    return (*inner.shape, *([inner.dtype] if is_quantized(inner.dtype) else ()))


def attach(model: torch.nn.Module) -> None:
    """Let the weights follow their inner tensors to the engine's device, and install the hooks on state dicts. Called
    after other hooks on them, whose values the weights take."""
    for module in model.modules():
        for name, wrapper in _wrappers_of(module):
            inner = {key: module.get_parameter(f"_{name}{key}") for key in wrapper.keys()}
            if any(parameter.device != vars(module)[name].device for parameter in inner.values()):
                vars(module)[name] = wrapper.build(inner)
        if _WRAPPERS in vars(module):
            before: RemovableHandle | None = vars(module).get(_JOINS)
            if before is None:
                module.register_load_state_dict_pre_hook(split)
            else:  # of an earlier engine
                before.remove()
            vars(module)[_JOINS] = module.register_state_dict_post_hook(join)


def _wrappers_of(module: torch.nn.Module) -> Iterator[tuple[str, Wrapper]]:
    """Yield the wrappers of a module by the weight's name, without those of weights that a user has replaced."""
    for name, wrapper in vars(module).get(_WRAPPERS, {}).items():
        if name not in module._parameters:
            yield name, wrapper


def check_has_memory(name: str, parameter: Tensor) -> None:
    """Raise ValueError for a parameter that consists of other tensors, which no bucket and no shard can hold."""
    if consists_of_tensors(parameter):
        raise ValueError(
            f"zerolite: expected parameters with memory of their own, got '{name}' of class "
            f"{type(parameter).__name__}, which consists of other tensors. Quantized weights such as torchao's work "
            "if they are frozen, without pipeline, tensor_parallel and expert_parallel; give others as "
            "torch.nn.Parameter or a class derived from it"
        )


# -------------------------------------------------------------------- state dicts


def join(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Put the weights of ``module`` into its state dict, in the places of their inner tensors."""
    for name, wrapper in () if _inner_only else vars(module).get(_WRAPPERS, {}).items():
        keys = {key: f"{prefix}_{name}{key}" for key in wrapper.keys()}
        if all(key in state for key in keys.values()):
            tensors = {key: state.pop(full_key) for key, full_key in keys.items()}
            if name not in module._parameters:  # otherwise a user has replaced the weight, as adapters do that merge
                state[prefix + name] = wrapper.build(tensors)


def join_all(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Apply :func:`join` to the state dict of a whole model, and return it."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        join(module, state, f"{prefix}." if prefix else "")
    return state


def split(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: object) -> None:
    """Put the inner tensors of the weights of ``module`` into a state dict that is loaded, in the places of these."""
    for name, _wrapper in _wrappers_of(module):
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                f"load_state_dict: expected values for the quantized weight '{prefix}{name}' to be copied, got "
                "assign=True, after which the layer would go on with its old tensors; leave it out, or call "
                "engine.load_full_state_dict(state)"
            )
        if consists_of_tensors(state.get(prefix + name)):
            state.update(flattened({prefix + name: state.pop(prefix + name)}))


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with the inner tensors in the places of what consists of them."""
    flat: dict[str, Any] = {}
    for name, value in state.items():
        tensors: dict[str, Tensor] = {}
        if consists_of_tensors(value):
            Wrapper.of(value, tensors)
        prefix, dot, weight = name.rpartition(".")
        flat.update({f"{prefix}{dot}_{weight}{key}": inner for key, inner in tensors.items()} or {name: value})
    return flat


@contextlib.contextmanager
def inner_only() -> Iterator[None]:
    """Context in which state dicts have the inner tensors."""
    global _inner_only
    before, _inner_only = _inner_only, True
    try:
        yield
    finally:
        _inner_only = before
