"""Checkpointing by the engine: the config's settings inside its model, and modules that the config names."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerolite.activation_checkpointing.checkpoint import Checkpointing
from zerolite.activation_checkpointing.configure import current, running
from zerolite.config import ActivationCheckpointingConfig, ConfigError
from zerolite.precision.fp32_modules import matches_none
from zerolite.utils.module_hook import ModuleHook, ReplacedCall, WeakHook

logger = logging.getLogger("zerolite")

KEY = "activation_checkpointing.modules"


@dataclass
class Attached:
    """Installed hooks and checkpointed modules.

    Attributes:
        checkpointing: the config's settings; None if it has none.
        handles: objects with ``remove()``.
    """

    checkpointing: Checkpointing | None
    handles: list[Any] = field(default_factory=list)

    def check_used(self) -> None:
        """Warn if the config has settings and no checkpoint was called. Called after the first step."""
        if self.checkpointing is not None and not self.checkpointing.used:
            logger.warning(
                "activation_checkpointing: the first step has called no checkpoint, so the block has no effect; name "
                "modules of the model in activation_checkpointing.modules, or call zerolite.checkpointing.checkpoint "
                "in its forward"
            )

    def memory(self) -> list[torch.Tensor]:
        """Return the buffers for inputs that are not in use."""
        return [] if self.checkpointing is None else self.checkpointing.memory()


def attach(model: torch.nn.Module, settings: ActivationCheckpointingConfig, device: torch.device) -> Attached:
    """Use ``settings`` for checkpoints inside ``model``'s forward, and checkpoint the modules that they name.

    Called before other hooks are registered. So these run as if the model itself called the checkpoint: in forward, and
    again inside backward.

    Args:
        model: the model.
        settings: the block of the config.
        device: the device that computes.

    Raises:
        ConfigError: a pattern matches no module, or a TorchScript module.
    """
    chosen = list(_chosen(model, settings.modules))
    differs = settings.model_copy(update={"modules": ()}) != type(settings)()
    attached = Attached(Checkpointing(settings, device) if differs else None)
    if attached.checkpointing is not None:
        enter = _Enter(attached.checkpointing)
        attached.handles.append(enter.install(model.register_forward_pre_hook, prepend=True))
        attached.handles.append(_Leave().install(model.register_forward_hook, always_call=True))
    for module in chosen:
        attached.handles.append(CheckpointedCall(module))
    return attached


class _Enter(WeakHook[Checkpointing]):
    """Hook before the model's forward, which begins to use its settings."""

    def __call__(self, module: torch.nn.Module, args: object) -> None:
        running.stack.append(self.owner() or current())


class _Leave(ModuleHook):
    """Hook after the model's forward, which ends the use of its settings."""

    def __call__(self, module: torch.nn.Module, args: object, outputs: object) -> None:
        if running.stack:
            running.stack.pop()


class CheckpointedCall(ReplacedCall):
    """Attribute of a module that replaces the function behind ``module(...)`` by a checkpoint of it.

    The module's hooks run inside the checkpoint, so again in backward. Copies of the module are not checkpointed.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return current().checkpoint(self.inner(), args, kwargs)


# -------------------------------------------------------------------- choice of modules


def _chosen(model: torch.nn.Module, patterns: Sequence[str]) -> Iterator[torch.nn.Module]:
    """Yield the outermost modules that match, each once."""
    if not patterns:
        return
    modules = [(name, module) for name, module in _named(model) if _is_called(module)]
    missing = [pattern for pattern in patterns if not any(_matches(*entry, pattern) for entry in modules)]
    if missing:
        names = list(dict.fromkeys(text for name, module in modules for text in (name, type(module).__name__)))
        raise ConfigError([(KEY, matches_none(pattern, names, "names or classes")) for pattern in missing])
    inside: set[int] = set()
    for name, module in modules:
        if id(module) in inside or not any(_matches(name, module, pattern) for pattern in patterns):
            continue
        if isinstance(module, torch.jit.ScriptModule):
            sentence = (
                f"expected modules that are written in Python, got '{name}', which is TorchScript, whose call cannot "
                "be replaced; leave it out, or use the module that it was compiled from"
            )
            raise ConfigError([(KEY, sentence)])
        inside.update(id(inner) for inner in module.modules())
        yield module


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules under all their names, outer ones first. A compiled module has the name of its wrapper."""
    for name, module in model.named_modules(remove_duplicate=False):
        parts = [part for part in name.split(".") if part != "_orig_mod"]
        if name and not name.endswith("_orig_mod"):
            yield ".".join(parts), module


def _is_called(module: torch.nn.Module) -> bool:
    """Return False for containers, whose children are called instead."""
    return isinstance(module, torch.jit.ScriptModule) or type(module).forward is not torch.nn.Module.forward


def _matches(name: str, module: torch.nn.Module, pattern: str) -> bool:
    cls = type(module)
    texts = (name, cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
    return any(fnmatch.fnmatchcase(text, pattern) for text in texts)
