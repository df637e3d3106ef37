"""Copy of a model without memory, and its run, which records parameter dependencies and output shapes of modules.

The model's own forward runs on fake tensors, which have shapes and no memory. Every parameter has a label. Each tensor
has the labels of the parameters it is computed from, also through views, detached and integer tensors.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zerolite.utils.accelerator import FakeMode
from zerolite.utils.dtypes import is_castable
from zerolite.utils.nested import find_tensors, written_arguments
from zerolite.utils.torch_private import fake_mode

Labels = frozenset[str]
NO_LABELS: Labels = frozenset()


class Skeleton:
    """Copy of ``model`` without memory: modules of the same classes and names, and parameters and buffers without
    values.

    Hooks are left out. Other attributes are shared with the model, except that dicts, lists and sets are copied.
    Scripted and traced modules, which refer to themselves, become ordinary modules without a forward.
    """

    device = "meta"

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[int, Any] = {}
        self._modules: dict[int, nn.Module] = {}
        self.model = self._copy(model)

    def _copy(self, module: nn.Module) -> nn.Module:
        known = self._modules.get(id(module))
        if known is not None:
            return known
        scripted = isinstance(module, torch.jit.ScriptModule)
        copied: nn.Module = object.__new__(nn.Module if scripted else type(module))
        self._modules[id(module)] = copied
        attributes = {} if scripted else {name: _own(value) for name, value in vars(module).items()}
        vars(copied).update(attributes | vars(nn.Module()))  # dicts of hooks and tensors, all of them empty
        vars(copied)["training"] = module.training
        for name, child in module._modules.items():
            copied._modules[name] = None if child is None else self._copy(child)
        for tensor_dict in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, tensor_dict).items():
                getattr(copied, tensor_dict)[name] = None if tensor is None else self._without_memory(tensor, name)
        return copied

    def _without_memory(self, tensor: torch.Tensor, name: str) -> object:
        if id(tensor) not in self.tensors:
            self.tensors[id(tensor)] = self.make(tensor, name)
        return self.tensors[id(tensor)]

    def make(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the stand-in for a parameter or buffer."""
        if not isinstance(tensor, nn.Parameter):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        values = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        return nn.Parameter(values, tensor.requires_grad)


def _own(value: object) -> object:
    """Return an attribute for the copy. Containers are copied, so that entries that a forward adds stay in the copy."""
    return copy.copy(value) if type(value) in (dict, list, set) else value


@contextlib.contextmanager
def fake_parameters(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> Iterator[FakeMode | None]:
    """Context in which the parameters and buffers of a skeleton's ``model`` are fake tensors.

    It yields the fake mode, or None if a dry run has already activated one.

    Args:
        model: the skeleton's model.
        device: device of the fake tensors.
        dtype: dtype of floating parameters; None: their own.
    """
    mode = None if fake_mode() is not None else FakeMode()
    tensor_dicts = [tensors for module in model.modules() for tensors in (module._parameters, module._buffers)]
    before = [dict(tensors) for tensors in tensor_dicts]
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            cast = dtype is not None and isinstance(tensor, nn.Parameter) and is_castable(tensor)
            value = torch.empty(tensor.shape, dtype=dtype if cast else tensor.dtype, device=device)
            fakes[id(tensor)] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
        return fakes[id(tensor)]

    with mode or contextlib.nullcontext():
        try:
            for tensors in tensor_dicts:
                tensors.update({name: fake(t) for name, t in tensors.items() if t is not None})  # type: ignore
            yield mode
        finally:
            for tensors, old in zip(tensor_dicts, before, strict=True):
                tensors.update(old)  # type: ignore[arg-type]


@contextlib.contextmanager
def caches_cleared() -> Iterator[None]:
    """Context that clears every functools.lru_cache and cache that got new entries inside.

    The entries hold tensors without memory, for example a cached mask. Later calls with real tensors must not get them.
    """
    # A cache may be an attribute of anything, or inside a closure: nothing but the collector knows all of them. The
    # search takes a fraction of a second, once for each shape of micro-batches.
    caches = [cache for cache in gc.get_objects() if type(cache) is functools._lru_cache_wrapper]
    before = [cache.cache_info().currsize for cache in caches]
    try:
        yield
    finally:
        for cache, size in zip(caches, before, strict=True):
            library = str(getattr(cache, "__module__", "")).partition(".")[0]
            if library not in ("torch", "zerolite", "sympy") and cache.cache_info().currsize > size:
                cache.cache_clear()


# These operators read only the shape of their argument, so their results depend on no parameter.
_SHAPE_ONLY = {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"}
_SHAPE_ONLY |= {"new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"}


class DependencyMode(TorchDispatchMode):
    """Dispatch mode that records from which parameters each tensor was computed.

    Labels are stored by storage. So a view and its base have the same labels, and a write into a view reaches the base.
    """

    def __init__(self) -> None:
        super().__init__()
        self._labels: dict[int, Labels] = {}
        self._alive: dict[int, Any] = {}  # storages, kept alive so that no new one gets the same address

    def labels_of(self, tensor: torch.Tensor) -> Labels:
        return self._labels.get(id(tensor.untyped_storage()), NO_LABELS)

    def add_labels(self, tensor: torch.Tensor, labels: Labels) -> None:
        storage = tensor.untyped_storage()
        self._alive[id(storage)] = storage
        self._labels[id(storage)] = self._labels.get(id(storage), NO_LABELS) | labels

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        labels = NO_LABELS.union(*(self.labels_of(tensor) for tensor in find_tensors([args, kwargs])))
        if str(getattr(func, "overloadpacket", func)).split(".")[-1] not in _SHAPE_ONLY:
            for tensor in find_tensors(outputs):
                self.add_labels(tensor, labels)
            if labels and func._schema.is_mutable:
                for tensor in written_arguments(func, args, kwargs):
                    self.add_labels(tensor, labels)
        return outputs


@dataclass
class Call:
    """One call of a module with parameters or buffers.

    Attributes:
        path: name of the module.
        began: part of the model in which the call began.
        ended: part in which it ended; -1 if it did not end.
        template: its outputs, with :class:`Zeros` for tensors.
        static: the outputs contain only such tensors and plain values, so zeros can replace them.
        inner: calls inside of this one.
    """

    path: str
    began: int
    ended: int = -1
    template: Any = None
    static: bool = False
    inner: list[Call] = field(default_factory=list)

    def end(self, part: int, static: bool, template: object) -> None:
        self.ended, self.static, self.template = part, static, template


@dataclass(frozen=True)
class Zeros:
    """Stand-in for a tensor whose values do not matter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class CallRecorder:
    """Hooks that record the calls of all modules with parameters or buffers, until they are removed."""

    def __init__(self, model: nn.Module, dependencies: DependencyMode, part: Callable[[], int]) -> None:
        self.root = Call("", 0)
        self._open = [self.root]
        self._dependencies, self._part = dependencies, part
        self._handles: list[Any] = []
        for path, module in model.named_modules():
            if path and any(True for _ in (*module.parameters(), *module.buffers())):
                self._watch(path, module)

    def _watch(self, path: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: object) -> None:
            call = Call(path, self._part())
            self._open[-1].inner.append(call)
            self._open.append(call)

        def after(module: nn.Module, args: object, outputs: object) -> None:
            self._open.pop().end(self._part(), *self._template(outputs))

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after))

    def _template(self, value: Any) -> tuple[bool, object]:
        """Return ``value`` with :class:`Zeros` for its tensors, and True if that is possible."""
        if isinstance(value, torch.Tensor):
            if not self._dependencies.labels_of(value):
                return False, None
            return True, Zeros(tuple(value.shape), value.dtype)
        if type(value) in (list, tuple):
            inner = [self._template(element) for element in value]
            return all(static for static, _ in inner), type(value)(element for _, element in inner)
        if type(value) is dict:
            named = {key: self._template(element) for key, element in value.items()}
            return all(static for static, _ in named.values()), {key: element for key, (_, element) in named.items()}
        return isinstance(value, (type(None), bool, int, float, str, torch.dtype)), value

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def materialize(template: Any, device: torch.device) -> Any:
    """Return ``template`` with tensors of zeros in place of :class:`Zeros`."""
    if isinstance(template, Zeros):
        return torch.zeros(template.shape, dtype=template.dtype, device=device)
    if type(template) in (list, tuple):
        return type(template)(materialize(element, device) for element in template)
    if type(template) is dict:
        return {key: materialize(element, device) for key, element in template.items()}
    return template
