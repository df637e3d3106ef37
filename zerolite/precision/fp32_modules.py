"""Modules that stay in fp32 in a 16-bit model, and the casts around them."""

from __future__ import annotations

import contextlib
import copy
import difflib
import fnmatch
import inspect
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from zerolite.config import ConfigError
from zerolite.utils.dtypes import HALF
from zerolite.utils.module_hook import ModuleHook
from zerolite.utils.nested import map_tensors

KEY = "fp32_modules"


class Fp32Forward:
    """A module's ``forward``, in fp32 and without autocast. Stands in the module's own attributes, not in its hooks: so
    an exception leaves nothing behind, hooks see what neighbours see, and copies of the module have their own.

    Floating 16-bit tensors among the arguments, at any depth, become fp32. fp32 tensors in the result become what the
    arguments were: 16-bit if any was; fp32 if there were only wider ones; without floating arguments ``compute``.
    """

    def __init__(
        self, module: torch.nn.Module, compute: torch.dtype | None, casts_back: bool, device_type: str
    ) -> None:
        """
        Args:
            compute: dtype of the neighbours of a module that they call; None for one inside an fp32 module, whose
                neighbours are fp32.
            casts_back: False under autocast, which takes fp32 everywhere.
        """
        self._module = module
        self._replaced = vars(module).get("forward")  # another wrapper's, instead of the class's
        self._compute = compute
        self._casts_back = casts_back
        self._device_type = device_type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        came: list[torch.dtype] = []

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_floating_point():
                came.append(tensor.dtype)
            return tensor.float() if tensor.dtype in HALF else tensor

        args, kwargs = map_tensors(widen, (args, kwargs))
        with self._without_autocast():
            outputs = self._forward(*args, **kwargs)
        dtype = self._dtype_of_outputs(came)
        if dtype is None:
            return outputs
        return map_tensors(lambda t: t.to(dtype) if t.dtype is torch.float32 else t, outputs)

    def _dtype_of_outputs(self, came: Sequence[torch.dtype]) -> torch.dtype | None:
        if not self._casts_back:
            return None
        return next((dtype for dtype in came if dtype in HALF), None if came else self._compute)

    def _without_autocast(self) -> contextlib.AbstractContextManager[object]:
        if torch.is_autocast_enabled(self._device_type):
            return torch.autocast(self._device_type, enabled=False)
        return contextlib.nullcontext()

    def _forward(self, *args: Any, **kwargs: Any) -> object:
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        own = types.MethodType(type(self._module).forward, self._module)
        return inspect.signature(self._replaced or own)

    def __deepcopy__(self, memo: dict[int, object]) -> Fp32Forward:
        made = memo[id(self)] = Fp32Forward.__new__(Fp32Forward)
        # The copy's neighbours may be given another dtype.
        made.__dict__.update(copy.deepcopy(vars(self), memo), _compute=None)
        return made

    def __reduce__(self) -> Any:
        """The forward that the module had, so that the pickle can be loaded without zerolite."""
        if self._replaced is not None:
            return copy.copy, (self._replaced,)
        return getattr, (self._module, "forward")  # the class's: the module that is loaded has no attributes yet

    def remove(self) -> None:
        """Give the module its forward back."""
        if vars(self._module).get("forward") is self:
            del self._module.__dict__["forward"]
            if self._replaced is not None:
                self._module.__dict__["forward"] = self._replaced


class _Place(NamedTuple):
    """A module where it stands in the model.

    Attributes:
        kept: in fp32.
        outermost: no module around it is in fp32 and has a forward, so it is called by those that are not.
    """

    name: str
    module: torch.nn.Module
    kept: bool
    outermost: bool


class Fp32Modules:
    """The modules of a model whose qualified names match one of ``patterns``, with all that is in them."""

    def __init__(
        self,
        model: torch.nn.Module,
        patterns: Sequence[str],
        compute: torch.dtype | None,
        autocast: torch.dtype | None,
        device_type: str,
    ) -> None:
        """compute, autocast: of the precision; both None in fp32, where nothing has to be done. Changes nothing yet.
        Raises ConfigError for a pattern that matches no module, for a parameter that belongs to a module that is kept
        and to one that is not, and for TorchScript."""
        self.handles: list[Any] = []  # of what is installed
        self._model = model
        self._patterns = patterns
        self._compute = compute
        self._mixed = compute is not None or autocast is not None
        self._device_type = device_type
        self._tensors: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._check_patterns()
        self._look()

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if a parameter stays in fp32, or a buffer in the dtype that it has."""
        return tensor in self._tensors

    def attach(self) -> None:
        """Let the modules compute in fp32; those too that the model has got since the last call."""
        places = self._look()
        for place in places:
            there = vars(place.module).get("forward")
            if isinstance(there, Fp32Forward):
                if there in self.handles:
                    continue
                there.remove()  # an engine's that is gone: the model is a copy of its model
            if place.kept and self._mixed and _has_forward(place.module):
                compute = self._compute if place.outermost else None
                forward = Fp32Forward(place.module, compute, self._compute is not None, self._device_type)
                place.module.__dict__["forward"] = forward
                self.handles.append(forward)
        for place in places:
            layer = place.module
            if isinstance(layer, torch.nn.TransformerEncoderLayer) and _calls_every_module not in _pre_hooks(layer):
                if not place.kept and any(isinstance(vars(m).get("forward"), Fp32Forward) for m in layer.modules()):
                    self.handles.append(layer.register_forward_pre_hook(_calls_every_module))

    def _look(self) -> list[_Place]:
        """All modules, each once. Notes their parameters; raises ConfigError for those on both sides."""
        places: dict[int, _Place] = {}
        for place in _walk(self._model, self._patterns):
            known = places.get(id(place.module))
            if known is not None:
                kept, outermost = known.kept or place.kept, known.outermost and place.outermost
                place = known._replace(kept=kept, outermost=outermost)
            places[id(place.module)] = place
        scripts = [p.name for p in places.values() if p.kept and isinstance(p.module, torch.jit.ScriptModule)]
        if scripts and self._mixed:
            raise ConfigError([(KEY, _is_script(name)) for name in scripts])
        inside: dict[int, str] = {}
        outside: dict[int, str] = {}
        for place in places.values() if self._mixed else ():
            stays = place.kept or (self._compute is not None and _mixes_dtypes(place.module))
            for key, parameter in place.module._parameters.items():
                if parameter is not None:
                    (inside if stays else outside)[id(parameter)] = f"{place.name}.{key}" if place.name else key
                    if stays:
                        self._tensors[parameter] = None
            for buffer in place.module._buffers.values() if stays else ():
                if buffer is not None:
                    self._tensors[buffer] = None
        shared = [(inside[key], outside[key]) for key in inside if key in outside]
        if shared and self._compute is not None:
            raise ConfigError([(KEY, _on_both_sides(*names, self._compute)) for names in shared])
        return list(places.values())

    def _check_patterns(self) -> None:
        names = list(dict.fromkeys(place.name for place in _walk(self._model, ()) if place.name))
        missing = [pattern for pattern in self._patterns if not any(_matches(name, pattern) for name in names)]
        if missing:
            raise ConfigError([(KEY, _matches_none(pattern, names)) for pattern in missing])


def _walk(model: torch.nn.Module, patterns: Sequence[str]) -> Iterator[_Place]:
    """Every module by every path that leads to it. What torch.compile wraps has the name of the wrapper."""

    def visit(name: str, module: torch.nn.Module, kept: bool, in_call: bool) -> Iterator[_Place]:
        kept = kept or (name != "" and any(_matches(name, pattern) for pattern in patterns))
        yield _Place(name, module, kept, not in_call)
        in_call = in_call or (kept and _has_forward(module))
        for key, child in module._modules.items():
            if child is not None:
                inner = name if key == "_orig_mod" else f"{name}.{key}" if name else key
                yield from visit(inner, child, kept, in_call)

    return visit("", model, False, False)


def _mixes_dtypes(module: torch.nn.Module) -> bool:
    """True for torch's batch norms with fp32 statistics: their kernels take 16-bit inputs beside fp32 weights, and no
    16-bit weights beside fp32 statistics. Their parameters stay in fp32, and no input has to be cast."""
    forward = getattr(type(module), "forward", None)  # TorchScript's classes have none
    return forward in _BATCH_NORMS and bool(module.affine) and bool(module.track_running_stats)


_BATCH_NORMS = (torch.nn.modules.batchnorm._BatchNorm.forward, torch.nn.SyncBatchNorm.forward)


def _has_forward(module: torch.nn.Module) -> bool:
    """False for containers, and for what torch.compile puts around a module."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return type(module).forward is not torch.nn.Module.forward and "_orig_mod" not in module._modules


def _pre_hooks(module: torch.nn.Module) -> Collection[object]:
    return module._forward_pre_hooks.values()


class _CallsEveryModule(ModuleHook):
    """A hook that does nothing, on a transformer layer of torch: in evaluation one operation would read the weights of
    all modules in it, of one dtype, without calling those; not where there are hooks."""

    def __call__(self, module: torch.nn.Module, args: object) -> None: ...

    def stays_in_copies(self) -> bool:
        return True


_calls_every_module = _CallsEveryModule()


def _matches(name: str, pattern: str) -> bool:
    top = pattern.removeprefix("*.")
    return fnmatch.fnmatchcase(name, pattern) or (top != pattern and fnmatch.fnmatchcase(name, top))


def _matches_none(pattern: str, names: Sequence[str]) -> str:
    def likeness(name: str) -> tuple[float, float]:
        last, wanted = name.rpartition(".")[2], pattern.rpartition(".")[2]
        return difflib.SequenceMatcher(None, last, wanted).ratio(), difflib.SequenceMatcher(None, name, pattern).ratio()

    sentence = f'expected patterns of names of modules in the model, got "{pattern}", which matches none'
    if not names:
        return f"{sentence}: the model has no modules in it; leave the key out"
    return f'{sentence}; the nearest name is "{max(names, key=likeness)}" (model.named_modules() lists all)'


def _is_script(name: str) -> str:
    return (
        f"expected modules that are written in Python, got '{name}', which is TorchScript: no casts can be put around "
        "it; leave it out, or use the module that it was made from"
    )


def _on_both_sides(inside: str, outside: str, compute: torch.dtype) -> str:
    return (
        f"expected modules that share no parameter with the rest of the model, got '{inside}', which is also "
        f"'{outside}', where it would be {str(compute).removeprefix('torch.')}; name both modules, or neither"
    )
