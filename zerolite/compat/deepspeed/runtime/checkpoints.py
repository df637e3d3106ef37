"""Checkpoints under DeepSpeed's names, and loading of checkpoints that DeepSpeed has written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerolite.checkpoint.directory import MANIFEST
from zerolite.checkpoint.errors import CheckpointError
from zerolite.comm import collective, raise_together
from zerolite.compat.deepspeed_import import import_deepspeed
from zerolite.compat.deepspeed_universal import find_checkpoint
from zerolite.engine.engine import Engine

IMPORTED = ".zerolite-import"
"""Temporary directory, in the one of the checkpoints, for a DeepSpeed checkpoint in zerolite's format."""

_SCRIPT = '''\
#!/usr/bin/env python
"""Write the fp32 weights of a checkpoint in this directory: zero_to_fp32.py CHECKPOINT_DIR OUTPUT."""

from zerolite.compat.deepspeed.utils.zero_to_fp32 import main

main()
'''


@collective
def on_rank0(engine: Engine, call: str, work: Callable[[], object]) -> None:
    """Run ``work`` on rank 0. If it raises, all ranks raise CheckpointError.

    Args:
        engine: the engine.
        call: the user's call, for the message.
        work: function without arguments.
    """
    error = None
    if engine.rank == 0:
        try:
            work()
        except Exception as caught:
            error = caught
    raise_together(engine.topology.world, engine.device, "checkpoint", error, call, CheckpointError)


def save(
    engine: Engine, save_dir: Any, tag: object, client_state: dict[str, Any] | None, latest: bool, without_frozen: bool
) -> None:
    """Save a checkpoint, and write the script that exports it."""

    def write_script() -> None:
        script = Path(save_dir, "zero_to_fp32.py")
        script.write_text(_SCRIPT, encoding="utf-8")
        script.chmod(0o755)

    engine.save_checkpoint(save_dir, None if tag is None else str(tag), client_state, latest, without_frozen)
    on_rank0(engine, "DeepSpeedEngine.save_checkpoint", write_script)


def load(
    engine: Engine, load_dir: Any, tag: object, flags: tuple[bool, bool, bool, bool]
) -> tuple[str | None, dict[str, Any]]:
    """Load a checkpoint. Rank 0 converts a checkpoint of DeepSpeed first.

    Args:
        engine: the engine.
        load_dir: directory of the checkpoints.
        tag: the checkpoint; default: the latest.
        flags: arguments of ``Engine.load_checkpoint`` from ``load_module_strict`` to ``load_module_only``.
    """
    directory, name = Path(load_dir), None if tag is None else str(tag)
    imported = False

    def convert() -> None:
        nonlocal imported
        if is_from_deepspeed(directory, name):
            import_deepspeed(directory, directory / IMPORTED, name)
            imported = True

    on_rank0(engine, "DeepSpeedEngine.load_checkpoint", convert)
    imported = bool(engine.reduce(int(imported), "max"))
    try:
        source = directory / IMPORTED if imported else directory
        path, client_state = engine.load_checkpoint(source, name, *flags, missing_ok=True)
        engine.reduce(0, "max")  # a barrier: afterwards rank 0 removes the files that all ranks read
    finally:
        if imported and engine.rank == 0:
            shutil.rmtree(directory / IMPORTED, ignore_errors=True)
    return None if path is None else str(directory / Path(path).name), client_state


def is_from_deepspeed(directory: Path, tag: str | None) -> bool:
    """Return True if the checkpoint that would be loaded was written by DeepSpeed."""
    try:
        path = find_checkpoint(directory, tag)
    except CheckpointError:
        return False
    return not (path / MANIFEST).is_file() and any(path.glob("*_model_states.pt"))
