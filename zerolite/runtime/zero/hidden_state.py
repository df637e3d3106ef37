"""What stands in ``optimizer.state`` while an engine keeps the states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NoReturn

import torch


class HiddenState(defaultdict[Any, Any]):
    """The states of pieces, by piece, for the optimizer that makes them. Whoever asks for a parameter's, or for all,
    gets a sentence: an empty answer would look like an optimizer that has not stepped yet."""

    def __init__(self, known: Any = (), parameters: Iterable[torch.Tensor] = ()) -> None:
        """parameters: those of the model; any other key is a piece."""
        super().__init__(dict, known)
        self._hidden = {id(parameter) for parameter in parameters}

    def hide(self, parameters: Iterable[torch.Tensor]) -> None:
        """There are further parameters."""
        self._hidden.update(id(parameter) for parameter in parameters)

    def _check(self, key: Any) -> None:
        if id(key) in self._hidden:
            _refuse()

    def __getitem__(self, key: Any) -> Any:
        self._check(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._check(key)
        super().__delitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._check(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._check(key)
        return super().pop(key, *default)

    def _refuse_all(self, *ignored: Any, **more: Any) -> NoReturn:
        _refuse()

    __iter__ = __len__ = keys = values = items = clear = popitem = update = setdefault = copy = _refuse_all


def _refuse() -> NoReturn:
    raise RuntimeError(
        "optimizer.state is not kept here: the engine has the states, in parts on all ranks. To read or change them, "
        "call zerolite.get_full_optimizer_state(p, name) and zerolite.set_full_optimizer_state(p, name, value) on all "
        "ranks; to save and restore them, engine.optimizer.state_dict() and load_state_dict()"
    )
