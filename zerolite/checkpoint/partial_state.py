"""State dicts of modules of which this rank has a part: hooks that refuse them, and entries without values.

A module with tensor-parallel shards, or with some of the experts, is not the full model, and neither is a pipeline
stage. ``state_dict`` and ``load_state_dict`` raise there. Parameters that are not trained do not make ``state_dict``
raise: a :class:`PartialTensor` takes the place of each, so that adapters can be saved beside spread experts.

accelerate calls ``state_dict()`` on all ranks and copies what it returns by a function of DeepSpeed's. There, with
DeepSpeed's interface, all parts are entries without values, and the copy gathers them
(:func:`gather_partial_tensors`). In programs that do not use this function it raises: OpenRLHF, for instance, reads the
parameters one by one, of which it would save parts, and the names of the state dict behind them.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from zerolite.checkpoint.matching import listed
from zerolite.comm import Topology, collective
from zerolite.tensor_parallel.shard_spec import ShardSpec, shard_spec_of
from zerolite.utils.module_hook import ModuleHook
from zerolite.utils.nested import Arguments, Function, Keywords, find_tensors
from zerolite.utils.torch_private import as_plain_tensors

_COPY = "clone_tensors_for_torch_save"
Gather = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

_T = torch.Tensor
_GET_DATA = getattr(_T, "data").__get__  # noqa: B009
_SHOWING = frozenset([_T.__repr__, _T.__format__])
_ALIASING = frozenset([_T.detach, _GET_DATA])
_GEOMETRY = frozenset(
    [
        *(_T.size, _T.dim, _T.numel, _T.nelement, _T.element_size, _T.stride, _T.is_contiguous, _T.__len__),
        *(_T.is_floating_point, _T.is_complex, _T.get_device, _T.__hash__, _T.dim_order),
    ]
)

_allowed = 0  # calls in progress that may see a rank's part of the state
# By module, with DeepSpeed's interface. A copy of a module has none, and refuses its state dict.
_gathers: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakMethod[Gather]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def parts_in_state_dicts() -> Iterator[None]:
    """Context in which state dicts have this rank's parts."""
    global _allowed
    _allowed += 1
    try:
        yield
    finally:
        _allowed -= 1


class PartialTensor(torch.Tensor):
    """Entry of a state dict for a parameter of which this rank has a part.

    It has the name, shape and dtype of the whole parameter, and no values: an operation that needs some raises
    RuntimeError.

    Attributes:
        entry_name: its name in the state dict.
        parameter: this rank's part.
        gather_full: returns the full values of such parameters, called on all ranks; None without DeepSpeed's
            interface.
    """

    entry_name: str
    parameter: torch.Tensor
    gather_full: weakref.WeakMethod[Gather] | None

    @staticmethod
    def __new__(
        cls, name: str, parameter: torch.Tensor, spec: ShardSpec, gather: weakref.WeakMethod[Gather] | None
    ) -> PartialTensor:
        with torch.inference_mode(False):  # the entry may outlive the user's inference mode
            made: PartialTensor = torch.Tensor._make_wrapper_subclass(
                cls, spec.full_shape, dtype=parameter.dtype, device=parameter.device
            )
        made.entry_name, made.parameter, made.gather_full = name, parameter, gather
        return made

    @classmethod
    def __torch_function__(
        cls, function: Function, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        with as_plain_tensors():
            if function in _ALIASING:
                return args[0]
            if function in _GEOMETRY or getattr(function, "__name__", "") == "__get__":
                return function(*args, **kwargs)
            one = next(iter(find_tensors((args, kwargs), cls)))
            if function in _SHOWING:  # a debugger calls them on one rank alone
                return f"tensor(of parameter '{one.entry_name}', of which this rank has a part)"
            raise _no_values(one, getattr(function, "__name__", str(function)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        raise _no_values(next(iter(find_tensors((args, kwargs or {}), cls))), str(function))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _no_values(self, "pickle")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise _no_values(self, "deepcopy")


def _no_values(one: PartialTensor, operation: str) -> RuntimeError:
    return RuntimeError(
        f"{operation}: this rank has a part of parameter '{one.entry_name}', whose entry in a state dict has no "
        "values. Call engine.full_state_dict() on all ranks (with DeepSpeed's interface "
        "accelerator.get_state_dict(model_engine) or model_engine.zerolite.full_state_dict())"
    )


@collective
def gather_partial_tensors(item: object) -> dict[int, torch.Tensor]:
    """Return copies of the full values of the :class:`PartialTensor` objects in nested containers, on the CPU of all
    ranks, by their ids. Nothing is launched where there are none. Raises RuntimeError if one cannot be gathered."""
    by_engine: dict[Gather, list[PartialTensor]] = {}
    for one in find_tensors(item, PartialTensor):
        gather = None if one.gather_full is None else one.gather_full()
        if gather is None:
            raise _no_values(one, _COPY)
        by_engine.setdefault(gather, []).append(one)
    found: dict[int, torch.Tensor] = {}
    for gather, parts in by_engine.items():
        first = {id(one.parameter): one for one in parts}  # tied names have one parameter
        values = gather([one.parameter for one in first.values()])
        full = dict(zip(first, values, strict=True))
        for one in parts:
            value = full[id(one.parameter)]
            found[id(one)] = value if first[id(one.parameter)] is one else value.clone()
    return found


class _Refusal(ModuleHook):
    """Hook that raises RuntimeError where a rank's part of a model would be taken for the full one.

    A copy of the module keeps the hook if it is such a part too.
    """

    def __init__(self, module: torch.nn.Module, stage: str) -> None:
        """
        Args:
            stage: what this rank has of a pipeline; "" if the module may only have tensor-parallel shards or experts.
        """
        self._module, self._stage = weakref.ref(module), stage

    def stays_in_copies(self) -> bool:
        module = self._module()
        return module is None or bool(self._stage or _parts_of(module))

    def _raise(self, call: str, parts: dict[str, ShardSpec], instead: str) -> None:
        has = self._stage
        if not has and parts:
            of_experts = any(spec.dimension == "expert" for spec in parts.values())
            what = "parts of parameters of experts" if of_experts else "tensor-parallel shards of parameters"
            has = f"{what}: {listed(list(parts))}"
        if has and not _allowed:
            raise RuntimeError(f"{call}: this rank has {has}. Call engine.{instead} on all ranks")


class _SaveRefusal(_Refusal):
    """Hook before ``state_dict``: raises for parts that are trained, unless a copy of the state gathers them."""

    def __call__(self, module: torch.nn.Module, *args: Any) -> None:
        is_gathered = module in _gathers and _is_copied()
        parts = {} if is_gathered or _allowed else _parts_of(module, trained=True)
        self._raise("state_dict", parts, "full_state_dict()")


class _Marking(_Refusal):
    """Hook after ``state_dict``: puts entries without values in the places of the module's own parts."""

    def __call__(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        if _allowed:
            return
        for name, parameter in module._parameters.items():
            spec = None if parameter is None else shard_spec_of(parameter)
            if parameter is not None and spec is not None and prefix + name in state:
                state[prefix + name] = PartialTensor(prefix + name, parameter, spec, _gathers.get(module))


class _LoadRefusal(_Refusal):
    """Hook before ``load_state_dict``: raises for a state that has some of the parts."""

    def __call__(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        parts = {name: spec for name, spec in _parts_of(module).items() if prefix + name in state}
        self._raise("load_state_dict", parts, "load_full_state_dict(state)")


def _is_copied() -> bool:
    """Return True if a function that has called this one, however deep, copies state dicts by DeepSpeed's function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _COPY not in frame.f_code.co_names:
        frame = frame.f_back
    return frame is not None


def _parts_of(module: torch.nn.Module, trained: bool = False) -> dict[str, ShardSpec]:
    """Return the shards of parameters below ``module``, by name."""
    named = module.named_parameters(remove_duplicate=False)
    specs = {name: shard_spec_of(p) for name, p in named if p.requires_grad or not trained}
    return {name: spec for name, spec in specs.items() if spec is not None}


def forbid_partial_state_dicts(model: torch.nn.Module, topology: Topology) -> None:
    """Let ``state_dict`` and ``load_state_dict`` raise RuntimeError where a part would be taken for the full model.

    This holds for all modules with tensor-parallel shards or experts, and for the model of a pipeline stage. The hooks
    are never removed, because the model stays a part of the full one when its engine is deleted.
    """
    pipe = topology.pipe
    stage = f"stage {pipe.rank + 1} of {pipe.world_size} of the model only" if pipe.world_size > 1 else ""
    parts = list(model.modules()) if topology.divides_layers else [model] if stage else []
    for module in parts:
        if not any(isinstance(hook, _Refusal) for hook in module._state_dict_pre_hooks.values()):
            of_stage = stage if module is model else ""
            _SaveRefusal(module, of_stage).install(module.register_state_dict_pre_hook)
            _LoadRefusal(module, of_stage).install(module.register_load_state_dict_pre_hook)
            if any(True for _ in module.parameters(recurse=False)):
                _Marking(module, "").install(module.register_state_dict_post_hook)


def gather_in_copies(model: torch.nn.Module, gather: Gather) -> None:
    """Let ``state_dict`` of ``model`` return entries without values for all parts, which
    :func:`gather_partial_tensors` gathers.

    Args:
        gather: a method, called on all ranks with parts of parameters. Returns the full values, on the CPU.
    """
    for module in model.modules():
        _gathers[module] = weakref.WeakMethod(gather)
