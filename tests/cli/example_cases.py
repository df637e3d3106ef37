"""Modules, configs and scripts of the examples, for their tests and on workers."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.cli.helpers import ROOT

EXAMPLES = ROOT / "examples"


def load(example: str, name: str = "train") -> ModuleType:
    """A module of an example, which finds the modules beside it."""
    directory = EXAMPLES / example
    spec = importlib.util.spec_from_file_location(f"examples_{example}_{name}", directory / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(directory))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(directory))
    return module


def read_config(example: str, name: str, **params: Any) -> dict[str, Any]:
    """A config of an example, with further parameters of its optimizer."""
    config: dict[str, Any] = json.loads((EXAMPLES / example / f"{name}.json").read_text())
    config["optimizer"]["params"].update(params)
    return config


def run_script(path: str, arguments: list[str], port: int) -> str:
    """Run a script as a launcher would, in this process, and return what it printed."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    directory = str(Path(path).parent)
    modules = set(sys.modules)
    argv, sys.argv = sys.argv, [path, *arguments]
    sys.path.insert(0, directory)
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = argv
        sys.path.remove(directory)
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(directory):
                del sys.modules[name]
    return output.getvalue()
