"""Saves that are killed, and saves into disks that fail, at every point where they write."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerolite
from tests.checkpoint import crafted, faults
from tests.checkpoint.block_layer import Change, Recorder
from tests.toolkit.configs import ADAMW, PARTITIONED, config
from tests.toolkit.training import BATCHES, LOSSES, counters, make_engine, snapshot
from zerolite.checkpoint.directory import MANIFEST, NoCheckpoint
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.manifest import INDEX, STATE

Scenario = tuple[Callable[[Path], Any], Callable[[Path], Any], set[int]]
"""What is there, the save that comes to grief, and the steps of the checkpoints that may be found then (0: none)."""


def _overwritten_halfway(save_dir: Path) -> None:
    """A save was killed while it replaced a checkpoint, and another while it removed one."""
    faults.save(save_dir, 1)
    faults.save(save_dir, 2, "best")
    os.rename(save_dir / "best", save_dir / ".replaced-best")
    shutil.copytree(save_dir / "global_step1", save_dir / ".removed-global_step0")
    shutil.copytree(save_dir / "global_step1", save_dir / ".incomplete-best-0123")


def _two(save_dir: Path) -> None:
    faults.save(save_dir, 1)
    faults.save(save_dir, 2)


SCENARIOS: dict[str, Scenario] = {
    "first": (lambda path: None, lambda path: faults.save(path, 3), {0, 3}),
    "second": (lambda path: faults.save(path, 2), lambda path: faults.save(path, 3), {2, 3}),
    "overwrite": (
        lambda path: faults.save(path, 2, "best"),
        lambda path: faults.save(path, 3, "best"),
        {2, 3},
    ),
    "overwrite without latest": (
        lambda path: faults.save(path, 2, "best", save_latest=False),
        lambda path: faults.save(path, 3, "best", save_latest=False),
        {2, 3},
    ),
    "pruning": (_two, lambda path: faults.save(path, 3, keep_last=1), {2, 3}),
    "after crashes": (_overwritten_halfway, lambda path: faults.save(path, 3, "best"), {2, 3}),
}


def _found(save_dir: Path) -> int:
    try:
        return faults.load(save_dir)
    except NoCheckpoint:
        return 0


KINDS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)


# -------------------------------------------------------------------- engines


def _config(stage: int = 1, **more: Any) -> dict[str, Any]:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    return config(stage, "bf16", optimizer=ADAMW, zero=PARTITIONED["moving"] if stage == 3 else None) | {
        "scheduler": schedule,
        "checkpoint": {"timeout_s": 20.0},
        **more,
    }


def _train(engine: Any, steps: int) -> None:
    for _ in range(steps * engine.gradient_accumulation_steps):
        engine.backward(LOSSES["OddModel"](engine, BATCHES["OddModel"](engine.micro_steps, 0, engine.rank)))
        engine.step()


def _held(engine: Any) -> dict[str, Any]:
    """Parameters, masters, states and counters. Called on all ranks."""
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    held: dict[str, Any] = {f"parameter {name}": value for name, value in snapshot(engine).items()}
    held |= zip((f"master {name}" for name in trained), zerolite.get_full_master(trained.values()), strict=True)
    for kind in ("exp_avg", "exp_avg_sq"):
        states = zerolite.get_full_optimizer_state(trained.values(), kind)
        held |= zip((f"{kind} {name}" for name in trained), states, strict=True)
    return held | counters(engine)


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
    )


def mutations(directory: Path, seed: int, count: int) -> dict[str, Any]:
    """An engine loads ``count`` checkpoints that were never written. Gives what was raised, by kind; of everything but
    CheckpointError, an example."""
    engine = make_engine(_config())
    _train(engine, 2)
    client = {"list": [1, (2, 3.5)], "tensor": torch.arange(5), "name": "x"}
    path = Path(engine.save_checkpoint(directory, client_state=client))
    wanted = _held(engine)
    kept = directory.with_name("kept")
    shutil.copytree(path, kept)
    choose = random.Random(seed)
    kinds: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for number in range(count):
        name = (STATE, STATE, STATE, INDEX, MANIFEST)[number % 5]
        crafted.craft(path, name, crafted.mutated(json.loads((kept / name).read_bytes()), choose))
        try:
            engine.load_checkpoint(directory)
            kinds["loaded"] += 1
        except CheckpointError:
            kinds["CheckpointError"] += 1
        except Exception as error:
            kinds[type(error).__name__] += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            examples[f"{where.filename}:{where.lineno} {type(error).__name__}"] = f"{number}: {str(error)[:200]}"
        for file in kept.iterdir():
            shutil.copy(file, path / file.name)
    _, loaded = engine.load_checkpoint(directory)
    right = _equal(wanted, _held(engine)) and loaded["list"] == client["list"]
    _train(engine, 1)
    return {"kinds": kinds, "examples": examples, "right": right}


def _begun(directory: Path, stage: int, **more: Any) -> Any:
    """An engine that has saved its first step and is about to save its second."""
    engine = make_engine(_config(stage, **more))
    _train(engine, 1)
    engine.save_checkpoint(directory)
    _train(engine, 1)
    return engine


def reference(directory: Path, stage: int) -> dict[str, Any]:
    """Return the state of an engine after its first and its second step, and the calls by which this rank saves
    them."""
    engine = make_engine(_config(stage))
    held, operations = [], []
    for _ in range(2):
        _train(engine, 1)
        held.append(_held(engine))
        with faults.recorded() as done:
            engine.save_checkpoint(directory)
        operations.append(done)
    return {"held": held, "operations": operations}


def save_and_die(directory: Path, stage: int, points: dict[int, int], background: bool, first: bool) -> None:
    """The second save (``first``: the first one), in which some ranks are killed, each at its point. The others
    raise."""
    engine = make_engine(_config(stage)) if first else _begun(directory, stage)
    if first:
        _train(engine, 1)
    at = points.get(engine.rank)
    with faults.Death(at).awaited() if at is not None else contextlib.nullcontext():
        engine.save_checkpoint(directory, async_save=background)
        engine.wait_for_checkpoint()


def recorded_save(root: Path, stage: int, background: bool) -> list[tuple[int, Change]]:
    """The system calls of this rank in the second save into ``root / "saved"``, each with its time. ``root.before`` is
    a copy of what was there."""
    engine = _begun(root / "saved", stage)
    if engine.rank == 0:
        shutil.copytree(root, root.with_suffix(".before"))
    _of_all(None)
    with Recorder(root) as recorder:
        engine.save_checkpoint(root / "saved", async_save=background)
        engine.wait_for_checkpoint()
    _of_all(None)
    return list(zip(recorder.times, recorder.changes, strict=True))


def resume(directory: Path, stage: int) -> dict[str, Any]:
    """Return what a new engine loads, and whether it saves, and loads, again."""
    engine = make_engine(_config(stage))
    path, _ = engine.load_checkpoint(directory, missing_ok=True)
    held = None if path is None else _held(engine)
    engine.wait_for_checkpoint()
    _train(engine, 3)
    after = _held(engine)
    engine.save_checkpoint(directory)
    _train(engine, 1)
    engine.load_checkpoint(directory)
    return {"held": held, "again": _equal(after, _held(engine)), "left": faults.hidden(directory)}


def failing_ranks(directory: Path, stage: int) -> list[dict[str, Any]]:
    """The disk of one rank fails, at each point, in turn. Gives what this rank is told, and whether the checkpoint
    before is loaded then."""
    engine = _begun(directory, stage)
    results: list[dict[str, Any]] = []
    with faults.recorded() as operations:
        engine.save_checkpoint(directory, "counted")
    points = [(rank, at) for rank, done in enumerate(_of_all(operations)) for at in range(len(done))]
    engine.save_checkpoint(directory, "before")
    before = _held(engine)
    _train(engine, 1)
    for number, (rank, at) in enumerate(points):
        kind = KINDS[number % len(KINDS)]
        broken = faults.failing(at if engine.rank == rank else 10**6, kind)
        said = ""
        with broken as done:
            try:
                engine.save_checkpoint(directory, "failed", async_save=number % 2 == 1)
                engine.wait_for_checkpoint()
            except CheckpointError as error:
                said = str(error)
        _of_all(None)
        left = faults.hidden(directory)
        result = {"operation": _of_all(done)[rank][at], "rank": rank, "said": said, "reason": os.strerror(kind)}
        engine.load_checkpoint(directory)
        results.append({**result, "before": _equal(before, _held(engine)), "left": left})
        if engine.rank == 0:
            shutil.rmtree(directory / "failed", ignore_errors=True)
            (directory / "latest").write_text("before\n")
        _of_all(None)
    engine.save_checkpoint(directory, "failed")
    _of_all(None)
    assert faults.hidden(directory) == []
    return results


def _of_all(value: Any) -> list[Any]:
    """Every rank's value; all ranks are here when it returns."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def full_disk(directory: Path, stage: int, background: bool) -> dict[str, Any]:
    """Save until there is no room. Gives how often that went well, what is said then, whether the checkpoint before is
    loaded, and what is hidden in the directory; then one is removed, and there is room again."""
    engine = make_engine(_config(stage), sizes={"width": 32, "hidden": 500})
    good = 0
    said = ""
    while not said:
        _train(engine, 1)
        held = _held(engine)
        try:
            engine.save_checkpoint(directory, async_save=background)
            engine.wait_for_checkpoint()
            good += 1
            before = held
        except CheckpointError as error:
            said = str(error)
    _of_all(None)
    left = faults.hidden(directory)
    if engine.rank == 0:
        shutil.rmtree(directory / "global_step1")
    engine.save_checkpoint(directory, "again")
    engine.load_checkpoint(directory, f"global_step{good}")
    intact = _equal(before, _held(engine))
    engine.load_checkpoint(directory)
    return {"good": good, "said": said, "left": left, "intact": intact, "again": _equal(held, _held(engine))}


def damaged(directory: Path, stage: int) -> list[dict[str, Any]]:
    """One file at a time is damaged. Gives what this rank is told, whether the engine is as it was, and whether the
    checkpoint before is loaded then."""
    engine = _begun(directory, stage)
    path = Path(engine.save_checkpoint(directory))
    engine.load_checkpoint(directory, "global_step1")
    first = _held(engine)
    engine.load_checkpoint(directory)
    results: list[dict[str, Any]] = []
    for name in sorted(file.name for file in path.iterdir()):
        content = (path / name).read_bytes()
        for what, changed in (("bit", bytes([content[0] ^ 1]) + content[1:]), ("size", content[:-1]), ("gone", None)):
            _train(engine, 1)
            before = _held(engine)
            _of_all(None)
            if engine.rank == 0:
                (path / name).unlink() if changed is None else (path / name).write_bytes(changed)
            _of_all(None)
            said = ""
            try:
                engine.load_checkpoint(directory)
            except CheckpointError as error:
                said = str(error)
            result = {"name": name, "what": what, "said": said, "unchanged": _equal(before, _held(engine))}
            engine.load_checkpoint(directory, "global_step1")
            results.append({**result, "first": _equal(first, _held(engine))})
            _of_all(None)
            if engine.rank == 0:
                (path / name).write_bytes(content)
    _of_all(None)
    engine.load_checkpoint(directory)
    return results


def shrunk(directory: Path) -> dict[str, str]:
    """Loads checkpoints in which a tensor, as the index has it, is smaller or larger than the parameter, or there is
    none. Gives what is said."""
    engine = _begun(directory, 1)
    path = directory / "global_step1"
    kept = {name: (path / name).read_bytes() for name in (INDEX, MANIFEST)}
    said = {}
    for key in ("parameters/up.weight", "optimizer/exp_avg/up.weight"):
        for rows in (8, 10, 0) if key.startswith("parameters") else (8, 10):
            body = json.loads(kept[INDEX])
            file, start, offsets, sizes = body["tensors"][key]["boxes"][0]
            body["tensors"][key] |= {"shape": [rows, 5], "boxes": [[file, start, offsets, [rows, 5]]]}
            if not rows:
                del body["tensors"][key]
            crafted.craft(path, INDEX, body)
            try:
                engine.load_checkpoint(directory)
                said[f"{key} {rows}"] = ""
            except CheckpointError as error:
                said[f"{key} {rows}"] = str(error)
            for name, content in kept.items():
                (path / name).write_bytes(content)
    engine.load_checkpoint(directory)
    return said
