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
    """Replacement for a module's ``forward``, which runs it in fp32 and without autocast.

    Floating 16-bit tensors among the arguments, at any depth, become fp32. fp32 tensors in the result become 16-bit if
    an argument was, and stay fp32 if all floating arguments were wider. Without floating arguments they become
    ``compute``.

    It replaces ``forward`` in the module's own attributes and is no hook. So an exception leaves nothing behind, and
    the module's hooks see the same dtypes as its neighbours. Copies of the module have a replacement of their own.
    """

    def __init__(
        self, module: torch.nn.Module, compute: torch.dtype | None, casts_back: bool, device_type: str
    ) -> None:
        """
        Args:
            module: the module.
            compute: dtype of the modules around it; None inside an fp32 module, where these are fp32 too.
            casts_back: cast results back to 16 bits; False under autocast, which takes fp32 everywhere.
            device_type: device type whose autocast is switched off.
        """
        self._module = module
        self._replaced = vars(module).get("forward")  # set by another wrapper; None: the class's
        self._compute = compute
        self._casts_back = casts_back
        self._device_type = device_type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        input_dtypes: list[torch.dtype] = []

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_floating_point():
                input_dtypes.append(tensor.dtype)
            return tensor.float() if tensor.dtype in HALF else tensor

        args, kwargs = map_tensors(widen, (args, kwargs))
        with self._without_autocast():
            outputs = self._forward(*args, **kwargs)
        dtype = self._dtype_of_outputs(input_dtypes)
        if dtype is None:
            return outputs
        return map_tensors(lambda t: t.to(dtype) if t.dtype is torch.float32 else t, outputs)

    def _dtype_of_outputs(self, input_dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
        if not self._casts_back:
            return None
        return next((dtype for dtype in input_dtypes if dtype in HALF), None if input_dtypes else self._compute)

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
        class_forward = types.MethodType(type(self._module).forward, self._module)
        return inspect.signature(self._replaced or class_forward)

    def __deepcopy__(self, memo: dict[int, object]) -> Fp32Forward:
        made = memo[id(self)] = Fp32Forward.__new__(Fp32Forward)
        # The modules around the copy may get another dtype.
        made.__dict__.update(copy.deepcopy(vars(self), memo), _compute=None)
        return made

    def __reduce__(self) -> Any:
        """Pickle the original forward instead, so that the pickle can be loaded without zerolite."""
        if self._replaced is not None:
            return copy.copy, (self._replaced,)
        return getattr, (self._module, "forward")  # the class's: a module that is being loaded has no attributes yet

    def remove(self) -> None:
        """Restore the module's original forward."""
        if vars(self._module).get("forward") is self:
            del self._module.__dict__["forward"]
            if self._replaced is not None:
                self._module.__dict__["forward"] = self._replaced


class _ModuleEntry(NamedTuple):
    """Module of the model.

    Attributes:
        name: its qualified name.
        module: the module.
        keeps_fp32: it stays in fp32.
        outermost: no fp32 module with a forward is around it, so its callers compute in 16 bits.
    """

    name: str
    module: torch.nn.Module
    keeps_fp32: bool
    outermost: bool


class Fp32Modules:
    """Modules of a model that stay in fp32: those whose qualified names match a pattern, and all inside of them."""

    def __init__(
        self,
        model: torch.nn.Module,
        patterns: Sequence[str],
        compute: torch.dtype | None,
        autocast: torch.dtype | None,
        device_type: str,
    ) -> None:
        """Find the modules; :meth:`attach` then changes them.

        Args:
            model: the model.
            patterns: patterns of qualified names.
            compute: 16-bit dtype of the parameters; None in fp32 and under autocast.
            autocast: dtype of autocast, or None. If both are None, nothing has to be done.
            device_type: device type of the model.

        Raises:
            ConfigError: a pattern matches no module, a parameter is shared with a module that does not stay in fp32, or
                a module is TorchScript.
        """
        self.handles: list[Any] = []  # installed forwards and hooks, with a method remove()
        self._model = model
        self._patterns = patterns
        self._compute = compute
        self._mixed = compute is not None or autocast is not None
        self._device_type = device_type
        self._tensors: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._check_patterns()
        self._collect_modules()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if a parameter stays in fp32, or a buffer keeps its dtype."""
        return tensor in self._tensors

    def attach(self) -> None:
        """Make the modules compute in fp32."""
        entries = self._collect_modules()
        for entry in entries:
            current = vars(entry.module).get("forward")
            if isinstance(current, Fp32Forward):
                if current in self.handles:
                    continue
                current.remove()  # it belongs to another engine: this model is a copy of that engine's model
            if entry.keeps_fp32 and self._mixed and _has_forward(entry.module):
                compute = self._compute if entry.outermost else None
                forward = Fp32Forward(entry.module, compute, self._compute is not None, self._device_type)
                entry.module.__dict__["forward"] = forward
                self.handles.append(forward)
        for entry in entries:
            layer = entry.module
            if isinstance(layer, torch.nn.TransformerEncoderLayer) and _calls_every_module not in _pre_hooks(layer):
                if not entry.keeps_fp32 and any(
                    isinstance(vars(m).get("forward"), Fp32Forward) for m in layer.modules()
                ):
                    self.handles.append(layer.register_forward_pre_hook(_calls_every_module))

    def _collect_modules(self) -> list[_ModuleEntry]:
        """Return all modules, each once, and note the tensors that stay in fp32.

        Raises:
            ConfigError: a parameter is shared with a module in 16 bits, or a module is TorchScript.
        """
        entries: dict[int, _ModuleEntry] = {}
        for entry in _iterate_modules(self._model, self._patterns):
            earlier = entries.get(id(entry.module))
            if earlier is not None:
                keeps_fp32, outermost = earlier.keeps_fp32 or entry.keeps_fp32, earlier.outermost and entry.outermost
                entry = earlier._replace(keeps_fp32=keeps_fp32, outermost=outermost)
            entries[id(entry.module)] = entry
        scripted = [p.name for p in entries.values() if p.keeps_fp32 and isinstance(p.module, torch.jit.ScriptModule)]
        if scripted and self._mixed:
            raise ConfigError([(KEY, _is_script(name)) for name in scripted])
        inside: dict[int, str] = {}
        outside: dict[int, str] = {}
        for entry in entries.values() if self._mixed else ():
            stays = entry.keeps_fp32 or (self._compute is not None and _mixes_dtypes(entry.module))
            for key, parameter in entry.module._parameters.items():
                if parameter is not None:
                    (inside if stays else outside)[id(parameter)] = f"{entry.name}.{key}" if entry.name else key
                    if stays:
                        self._tensors[parameter] = None
            for buffer in entry.module._buffers.values() if stays else ():
                if buffer is not None:
                    self._tensors[buffer] = None
        shared = [(inside[key], outside[key]) for key in inside if key in outside]
        if shared and self._compute is not None:
            raise ConfigError([(KEY, _on_both_sides(*names, self._compute)) for names in shared])
        return list(entries.values())

    def _check_patterns(self) -> None:
        names = list(dict.fromkeys(entry.name for entry in _iterate_modules(self._model, ()) if entry.name))
        missing = [pattern for pattern in self._patterns if not any(_matches(name, pattern) for name in names)]
        if missing:
            raise ConfigError([(KEY, matches_none(pattern, names)) for pattern in missing])


def _iterate_modules(model: torch.nn.Module, patterns: Sequence[str]) -> Iterator[_ModuleEntry]:
    """Yield every module by every path to it. A module that torch.compile wraps gets the name of its wrapper."""

    def visit(name: str, module: torch.nn.Module, keeps_fp32: bool, in_call: bool) -> Iterator[_ModuleEntry]:
        keeps_fp32 = keeps_fp32 or (name != "" and any(_matches(name, pattern) for pattern in patterns))
        yield _ModuleEntry(name, module, keeps_fp32, not in_call)
        in_call = in_call or (keeps_fp32 and _has_forward(module))
        for key, child in module._modules.items():
            if child is not None:
                inner = name if key == "_orig_mod" else f"{name}.{key}" if name else key
                yield from visit(inner, child, keeps_fp32, in_call)

    return visit("", model, False, False)


def _mixes_dtypes(module: torch.nn.Module) -> bool:
    """Return True for torch's batch norms with running statistics, whose parameters stay in fp32 in any case.

    Their kernels take fp32 weights with 16-bit inputs, so that no input must be cast, but they refuse 16-bit weights
    with fp32 statistics.
    """
    forward = getattr(type(module), "forward", None)  # TorchScript's classes have none
    return forward in _BATCH_NORMS and bool(module.affine) and bool(module.track_running_stats)


_BATCH_NORMS = (torch.nn.modules.batchnorm._BatchNorm.forward, torch.nn.SyncBatchNorm.forward)


def _has_forward(module: torch.nn.Module) -> bool:
    """Return True if a module has a forward of its own: containers and the wrapper of torch.compile have none."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return type(module).forward is not torch.nn.Module.forward and "_orig_mod" not in module._modules


def _pre_hooks(module: torch.nn.Module) -> Collection[object]:
    return module._forward_pre_hooks.values()


class _CallsEveryModule(ModuleHook):
    """Hook that does nothing, for torch's transformer layer.

    In evaluation that layer runs one fused operation, which reads the weights of all its modules without calling them
    and needs one dtype. With a hook on the layer, torch calls every module instead.
    """

    def __call__(self, module: torch.nn.Module, args: object) -> None: ...

    def stays_in_copies(self) -> bool:
        return True


_calls_every_module = _CallsEveryModule()


def _matches(name: str, pattern: str) -> bool:
    top = pattern.removeprefix("*.")
    return fnmatch.fnmatchcase(name, pattern) or (top != pattern and fnmatch.fnmatchcase(name, top))


def matches_none(pattern: str, names: Sequence[str], of_what: str = "names") -> str:
    """Return the sentence for a pattern that matches no module. ``names``: what it was compared with."""
    sentence = f'expected patterns of {of_what} of modules in the model, got "{pattern}", which matches none'
    near = difflib.get_close_matches(pattern, names, 1, cutoff=0.0)
    if not near:
        return f"{sentence}: the model has no modules in it; leave the key out"
    return f'{sentence}; the nearest name is "{near[0]}" (model.named_modules() lists all)'


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
