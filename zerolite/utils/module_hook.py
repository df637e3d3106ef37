"""Hooks that an engine registers on a user's modules, which copies drop; and clean-up that follows an object."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from zerolite.utils.torch_private import CALL, COMPILED_CALL

Owner = TypeVar("Owner")

# Takes any arguments and returns None, as every hook may; and it is pickled by a name of the standard library.
_DOES_NOTHING = contextlib.nullcontext().__exit__

_LEFT_OUT = "zerolite: hooks that the copy does without"  # a key of deepcopy's memo, whose others are integers


class ModuleHook:
    """A hook of an engine on one module.

    A deep copy of the module does not have it. A pickle of the module has a function of the standard library in its
    place, so that it can be loaded without zerolite.
    """

    handle: RemovableHandle | None = None
    runs_around_any_call = False  # it needs nothing of what the module returns, so that may be a loss

    def install(self, register: Callable[..., RemovableHandle], **options: Any) -> RemovableHandle:
        """Register the hook by ``register``, a method such as ``module.register_forward_hook``."""
        self.handle = register(self, **options)
        return self.handle

    def stays_in_copies(self) -> bool:
        """Return True if a deep copy of the module needs the hook too."""
        return False

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        if self.stays_in_copies():
            return self
        hooks = None if self.handle is None else self.handle.hooks_dict_ref()
        if self.handle is not None and hooks is not None and id(hooks) in memo:
            left_out = memo.setdefault(_LEFT_OUT, _LeftOut())
            for known in (self.handle.hooks_dict_ref, *self.handle.extra_dict_ref):
                left_out.entries.append((copy.deepcopy(known(), memo), self.handle.id))
        return _DOES_NOTHING

    def __reduce__(self) -> Any:
        return _DOES_NOTHING.__reduce__()


class _LeftOut:
    """Hooks to remove from the dicts of a copy.

    ``copy.deepcopy`` itself fills these dicts after __deepcopy__ has returned. So the hooks are removed when it frees
    its memo, in which this object is.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[Any, int]] = []

    def __del__(self) -> None:
        for hooks, key in self.entries:
            hooks.pop(key, None)


class ReplacedCall:
    """Attribute of a module that replaces the function behind ``module(...)``, hooks included.

    Copies of the module have their own call.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._replaced = getattr(module, COMPILED_CALL)
        self._name = CALL if self._replaced is None else COMPILED_CALL
        self._module = weakref.ref(module)
        module.__dict__[self._name] = self

    @property
    def module(self) -> torch.nn.Module:
        """The module."""
        module = self._module()
        assert module is not None  # the caller calls or copies it
        return module

    def inner(self) -> Any:
        """Return the module's own call."""
        if self._replaced is not None:
            return self._replaced
        return functools.partial(getattr(type(self.module), CALL), self.module)

    def __reduce__(self) -> Any:
        return self.inner().__reduce__()  # torch leaves compiled calls out of copies

    def remove(self) -> None:
        """Restore the module's own call."""
        module = self._module()
        if module is not None and vars(module).get(self._name) is self:
            del module.__dict__[self._name]
            if self._replaced is not None:
                module.__dict__[self._name] = self._replaced


def is_replaced(module: torch.nn.Module) -> bool:
    """Return True if a :class:`ReplacedCall` or the user has replaced the module's call."""
    return CALL in vars(module) or vars(module).get(COMPILED_CALL) is not None


def is_observed(module: torch.nn.Module) -> bool:
    """Return True if hooks on ``module`` need what it takes and returns, such as those of a user."""
    hooks: tuple[Any, ...] = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    if any(not (isinstance(hook, ModuleHook) and hook.runs_around_any_call) for hook in hooks):
        return True
    return bool(module._backward_hooks or module._backward_pre_hooks)


class WeakHook(ModuleHook, Generic[Owner]):
    """A module's hook with a weak reference to its owner, because the model may outlive the engine."""

    def __init__(self, owner: Owner) -> None:
        self.owner = weakref.ref(owner)


def is_compiled(module: torch.nn.Module) -> bool:
    """Return True if a module is compiled, together with everything inside it, hooks included."""
    return getattr(module, COMPILED_CALL, None) is not None or hasattr(module, "_orig_mod")


def finalize_before_exit(owner: object, function: Callable[..., object], *arguments: object) -> weakref.finalize:
    """Call ``function(*arguments)`` when ``owner`` is freed, but not at exit, when objects that it needs may be gone
    already."""
    finalizer = weakref.finalize(owner, function, *arguments)
    finalizer.atexit = False
    return finalizer
