"""Switch that lets ``import deepspeed`` find ``zerolite.compat.deepspeed``, in this process and its children.

The folder ``alias`` beside this file has a package ``deepspeed`` and its metadata. When it is on ``sys.path``, and on
PYTHONPATH for child processes, ``import``, ``importlib.util.find_spec`` and ``importlib.metadata`` all find it. It
takes precedence over an installed DeepSpeed, whose files stay unchanged. Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

SWITCH = "ZEROLITE_DEEPSPEED_COMPAT"
"""Environment variable that asks for it, if set to 1."""

PACKAGE = "zerolite.compat.deepspeed"
FOLDER = str(Path(__file__).resolve().with_name("alias"))


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that child processes of a process with this environment need."""
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != FOLDER]
    return {SWITCH: "1", "PYTHONPATH": os.pathsep.join([FOLDER, *paths])}


def activate() -> None:
    """Let ``import deepspeed`` find this package from now on. Raises ImportError if another one has been imported
    already."""
    loaded = sys.modules.get("deepspeed")
    if loaded is not None and loaded.__name__ != PACKAGE:
        raise ImportError(
            f"expected zerolite's deepspeed to be asked for before any other is imported, got {loaded!r}; set "
            f"{SWITCH}=1 before Python starts"
        )
    os.environ.update(variables(os.environ))
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    importlib.invalidate_caches()


class AliasFinder(importlib.abc.MetaPathFinder):
    """Finds ``deepspeed.x`` as the module ``zerolite.compat.deepspeed.x`` itself, so that every class exists once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("deepspeed."):
            return None
        home = PACKAGE + fullname.removeprefix("deepspeed")
        try:
            found = importlib.util.find_spec(home)
        except ModuleNotFoundError:
            found = None
        if found is None:
            sentence = f"zerolite's deepspeed has no module {fullname!r}: docs/deepspeed.md lists those that it has"
            raise ModuleNotFoundError(sentence, name=fullname)
        return importlib.machinery.ModuleSpec(
            fullname, _SameModule(home), is_package=found.submodule_search_locations is not None
        )


class _SameModule(importlib.abc.Loader):
    """Loader that returns a module that is imported under another name already."""

    def __init__(self, home: str) -> None:
        self._home = home

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._home)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec  # the import system has replaced it by that of the alias
