"""`Checkpointer`: the engine's entry points for saving and loading."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zerolite.checkpoint.loading import Loader, LoadRequest
from zerolite.checkpoint.model_state import ModelState
from zerolite.checkpoint.saving import Saver, SaveRequest, UserState
from zerolite.checkpoint.training_run import run_of_this_job
from zerolite.comm import HostGroup, collective
from zerolite.data.dataloader import Loaders
from zerolite.utils.lazy import collector_off
from zerolite.zero.engine_parts import EngineParts


@collective
class Checkpointer:
    """The checkpoints of one engine. Its methods are called between the engine's other calls."""

    def __init__(self, parts: EngineParts, loaders: Loaders, register_unfrozen_params: Callable[[], None]) -> None:
        """
        Args:
            parts: of the engine.
            loaders: they return and accept the positions of the engine's data loaders.
            register_unfrozen_params: trains parameters from now on that have been unfrozen since the last backward.
        """
        self.model_state = ModelState(parts)
        self._loaders = loaders
        shared = self.model_state, HostGroup(parts.topology.world, "checkpoint"), register_unfrozen_params
        run = run_of_this_job()
        self._saver = Saver(*shared, run)
        self._loader = Loader(*shared, run)

    def save(
        self, scheduler: object, client_state: object, save_dir: str | os.PathLike[str], tag: str | None, *flags: Any
    ) -> str:
        """Save as ``Engine.save_checkpoint`` says.

        Args:
            flags: the other fields of :class:`SaveRequest`, in their order.
        """

        def user() -> UserState:
            if client_state is not None and not isinstance(client_state, dict):
                raise TypeError(f"expected client_state to be a dict, got {type(client_state).__name__}")
            return UserState(dict(client_state or {}), self._loaders.state_dict())

        request = SaveRequest(directory_of(save_dir, "save_dir"), tag, *map(bool, flags))
        with _undisturbed():
            return self._saver.save(request, user, scheduler)

    def load(
        self, scheduler: Any, load_dir: str | os.PathLike[str], tag: str | None, *flags: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """Load as ``Engine.load_checkpoint`` says.

        Args:
            flags: the other fields of :class:`LoadRequest`, in their order.
        """
        request = LoadRequest(directory_of(load_dir, "load_dir"), tag, *map(bool, flags))
        self._saver.wait_for_all()
        with _undisturbed():
            return self._loader.load(request, scheduler, self._loaders)

    def nbytes(self) -> int:
        """Return the bytes of parameters, masters and states that this rank writes."""
        return self._saver.nbytes()

    def wait(self) -> None:
        """Wait until a save in the background is on the disk. Raises CheckpointError if it has failed."""
        self._saver.wait()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Context without ``torch.inference_mode`` and without the cyclic garbage collector.

    Tensors made in inference mode could not be changed outside of it. And the plans of a save are many small objects
    without cycles. A collection looks at all objects of the program, which can take 0.2 s.
    """
    with collector_off(), torch.inference_mode(False), torch.no_grad():
        yield


def directory_of(path: str | os.PathLike[str], what: str) -> str:
    """Return an absolute path. Raises ValueError, calling it ``what``, if it is not a path."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ValueError(f"expected {what} to be a directory, got {path!r}")
    return os.path.abspath(os.fspath(path))
