"""Hooks on a model that may outlive its engine."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

Owner = TypeVar("Owner")


class WeakHook(Generic[Owner]):
    """A module's hook that knows whom it serves weakly, and that a copied or pickled module does not take along: that
    module belongs to no engine."""

    def __init__(self, owner: Owner) -> None:
        self.owner = weakref.ref(owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return (InertHook, ())


class InertHook:
    """What a copied module has in the place of a :class:`WeakHook`."""

    def __call__(self, *args: Any) -> None:
        return None
