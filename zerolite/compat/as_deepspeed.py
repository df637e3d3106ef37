"""Switch that lets ``import deepspeed`` find ``zerolite.compat.deepspeed``, in this process and its children.

The folder ``alias`` beside this file contains a package ``deepspeed`` and its metadata. If it is on ``sys.path``, and
for child processes on PYTHONPATH, then ``import``, ``importlib.util.find_spec`` and ``importlib.metadata`` find it. It
takes precedence over an installed DeepSpeed, whose files stay unchanged. This module does not import torch.
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
"""Environment variable that switches it on if it is 1."""

PACKAGE = "zerolite.compat.deepspeed"
FOLDER = str(Path(__file__).resolve().with_name("alias"))


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for child processes of a process with this environment."""
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != FOLDER]
    return {SWITCH: "1", "PYTHONPATH": os.pathsep.join([FOLDER, *paths])}


def activate() -> None:
    """Let ``import deepspeed`` find this package from now on. Raises ImportError after an import of another one."""
    loaded = sys.modules.get("deepspeed")
    if loaded is not None and loaded.__name__ != PACKAGE:
        raise ImportError(
            f"expected zerolite's deepspeed to be switched on before another one is imported, got {loaded!r}; set "
            f"{SWITCH}=1 before Python starts"
        )
    os.environ.update(variables(os.environ))
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    importlib.invalidate_caches()


class AliasFinder(importlib.abc.MetaPathFinder):
    """Finder that returns ``zerolite.compat.deepspeed.x`` itself for ``deepspeed.x``, so that classes exist once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        from zerolite.compat.deepspeed.absent import sentence_for

        if fullname.startswith(f"{PACKAGE}."):  # what `from deepspeed import name` looks for at last
            sentence = sentence_for(fullname.removeprefix(f"{PACKAGE}."))
            if sentence is not None and importlib.machinery.PathFinder.find_spec(fullname, path) is None:
                raise ImportError(sentence, name=fullname)
        if not fullname.startswith("deepspeed."):
            return None
        original = PACKAGE + fullname.removeprefix("deepspeed")
        try:
            original_spec = importlib.util.find_spec(original)
        except ModuleNotFoundError:
            original_spec = None
        if original_spec is None:
            sentence = sentence_for(fullname.removeprefix("deepspeed."))
            if sentence is not None:  # no ModuleNotFoundError, which `from deepspeed import name` drops
                raise ImportError(sentence, name=fullname)
            message = f"zerolite's deepspeed has no module {fullname!r}; docs/deepspeed.md lists its modules"
            raise ModuleNotFoundError(message, name=fullname)
        return importlib.machinery.ModuleSpec(
            fullname, _SameModule(original), is_package=original_spec.submodule_search_locations is not None
        )


class _SameModule(importlib.abc.Loader):
    """Loader that returns a module that is already imported under another name."""

    def __init__(self, original: str) -> None:
        self._original = original

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._original)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec  # the import system has replaced it by the alias's spec
