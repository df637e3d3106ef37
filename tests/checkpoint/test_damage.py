"""Files that are not as they were written: said in a sentence, whatever it is, and nothing is executed."""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import crafted, faults
from tests.checkpoint.crafted import FILES, RANK
from tests.checkpoint.runs import differences, facts, on_rank_0
from tests.checkpoint.test_crashes import about_to_save, engine_after, go_on
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import raised
from zerolite.checkpoint.directory import MANIFEST, find
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.export import export_checkpoint
from zerolite.checkpoint.manifest import INDEX, STATE
from zerolite.checkpoint.reader import CheckpointReader


@pytest.fixture
def two(ram: Path) -> Path:
    """A directory with checkpoints of steps 1 and 2."""
    for step in (1, 2):
        faults.save(ram / "saved", step)
    return ram / "saved"


def said(save_dir: Path, tag: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_all(save_dir, tag)
    return str(caught.value)


def read_all(save_dir: Path, tag: str | None = None) -> None:
    reader = CheckpointReader(find(save_dir, tag))
    for problem in reader.problems(sizes_only=True):
        raise problem
    _ = reader.state
    for key in reader.tensors:
        reader.read(key)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("more", [-7, 1])
def test_a_file_of_another_length_is_damaged(two: Path, name: str, more: int) -> None:
    file = two / "global_step2" / name
    size = file.stat().st_size
    file.write_bytes((file.read_bytes() + b"x")[: size + more])
    text = said(two)
    assert str(file) in text and "is damaged" in text and "'global_step1'" in text
    if name != MANIFEST:
        assert f"expected {size} bytes, found {size + more}" in text
    assert faults.load(two, "global_step1") == 1


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(two: Path, name: str) -> None:
    """Bits of headers, payloads and every JSON are flipped; a manifest may be the same without some of its spaces."""
    file = two / "global_step2" / name
    original = file.read_bytes()
    spaces = {i for i, byte in enumerate(original) if byte in b" \n"} if name == MANIFEST else set()
    places = {0, 1, 7, 8, len(original) - 1, *range(0, len(original), 1 + len(original) // 100)}
    for place in sorted(places - spaces):
        crafted.flip(file, place)
        text = said(two)
        assert str(file) in text and "'global_step1'" in text
        if name != MANIFEST:
            assert "expected checksum" in text and "between bytes 0 and" in text
        file.write_bytes(original)
    assert faults.load(two) == 2


class Executed:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return Path.touch, (self.witness,)


INSTEAD: dict[str, Callable[[Path, int], Any]] = {  # of a file, and of so many bytes
    "nothing": lambda file, size: None,
    "an empty file": lambda file, size: file.touch(),
    "a directory": lambda file, size: file.mkdir(),
    "a pipe": lambda file, size: os.mkfifo(file),
    "a pickle": lambda file, size: file.write_bytes(pickle.dumps(Executed(file.parent / "executed")).ljust(size, b".")),
    "a link to nothing": lambda file, size: file.symlink_to("nothing"),
    "a file that is too long": lambda file, size: (file.touch(), os.truncate(file, 1 << 33)),  # without taking room
}


@pytest.mark.parametrize("what", INSTEAD)
@pytest.mark.parametrize("name", FILES)
def test_something_else_in_its_place(two: Path, what: str, name: str) -> None:
    file = two / "global_step2" / name
    size = file.stat().st_size
    file.unlink()
    INSTEAD[what](file, size)
    text = said(two)
    assert not (file.parent / "executed").exists()
    assert "'global_step1'" in text
    without_manifest = name == MANIFEST and what == "nothing"
    assert ("'global_step2' in" if without_manifest else str(file)) in text
    assert ("has no manifest" in text) == without_manifest
    assert faults.load(two, "global_step1") == 1


@pytest.mark.parametrize("name", [RANK, MANIFEST, "latest"])
def test_a_file_without_permission_is_named(two: Path, name: str) -> None:
    file = two / name if name == "latest" else two / "global_step2" / name
    file.chmod(0)
    text = faults.as_nobody(two, lambda: said(two))
    assert str(file) in text and "cannot be read: Permission denied" in text
    if name != "latest":
        assert "'global_step1'" in text


def test_no_permission_for_the_directory(two: Path) -> None:
    """The error is not that of an empty directory."""
    (two / "latest").unlink()
    two.chmod(0)
    try:
        text = faults.as_nobody(two.parent, lambda: said(two))
    finally:
        two.chmod(0o755)
    assert str(two) in text and "Permission denied" in text and "no checkpoint in" not in text


NONSENSE = [b"", b"..", b"../other", b"/etc", b"\xff\xfe", b"a\0b", b"x" * 300, b"x" * 10_000]


@pytest.mark.parametrize("content", NONSENSE, ids=lambda content: repr(content[:9]))
def test_a_nonsensical_latest_is_named(two: Path, content: bytes) -> None:
    (two / "latest").write_bytes(content)
    text = said(two)
    if len(content) <= 255:
        assert "'latest'" in text or f"'{two / 'latest'}'" in text
        assert "'global_step2'" in text
    else:
        assert str(two) in text and "cannot be read: " in text
    assert faults.load(two, "global_step2") == 2
    (two / "latest").unlink()
    assert faults.load(two) == 2


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_latest_is_something_else(two: Path, make: Callable[[Path], None]) -> None:
    (two / "latest").unlink()
    make(two / "latest")
    assert str(two / "latest") in said(two)


@pytest.mark.parametrize("name", [MANIFEST, INDEX, STATE])
def test_crafted_files_are_refused(two: Path, name: str) -> None:
    path = two / "global_step2"
    kept = crafted.files_of(path)
    made = {what: change(json.loads(kept[name])) for what, change in crafted.BODIES[name].items()}
    for what, body in (made | crafted.TEXTS).items():
        crafted.craft(path, name, body)
        text = said(two)
        assert str(path / name) in text and "'global_step1'" in text and len(text) < 600, what
        crafted.put_back(path, kept)
    crafted.craft(path, name, made["a list"])
    assert faults.load(two, "global_step1") == 1
    faults.save(two, 3)  # and the damaged one is in no one's way
    assert faults.load(two) == 3


def test_later_version_says_whose(two: Path) -> None:
    path = two / "global_step2"
    body = json.loads((path / MANIFEST).read_bytes())
    crafted.craft(path, MANIFEST, {**body, "version": 7, "versions": {"zerolite": "9.8"}})
    text = said(two)
    assert "format version 7" in text and "written by zerolite 9.8" in text and "reads version 2" in text


@pytest.mark.parametrize(("seed", "count"), [(6, 150), pytest.param(5, 600, marks=pytest.mark.slow)])
def test_every_mutation_is_an_error_or_harmless(two: Path, seed: int, count: int) -> None:
    """Each JSON is changed by chance, with checksums that fit, and read and exported."""
    choose, path, out = random.Random(seed), two / "global_step2", two / "out"
    kept = crafted.files_of(path)
    refused = exports_refused = 0
    for number in range(count):
        name = (MANIFEST, INDEX, STATE)[number % 3]
        crafted.craft(path, name, crafted.mutated(json.loads(kept[name]), choose))
        try:
            read_all(two)
        except CheckpointError as error:
            assert str(path) in str(error)
            refused += 1
        try:
            export_checkpoint(path, out)
        except CheckpointError:
            exports_refused += 1
        crafted.put_back(path, kept)
    assert count > refused > count / 3 and count > exports_refused > count / 4
    export_checkpoint(path, out)


@pytest.mark.slow
@on_ranks(1, timeout=200)
def test_an_engine_loads_a_mutated_checkpoint_or_refuses_it(ram: Path) -> None:
    engine = engine_after(2, stage=1)
    client = {"list": [1, (2, 3.5)], "tensor": torch.arange(5), "name": "x"}
    path = Path(engine.save_checkpoint(ram, client_state=client))
    wanted, kept, choose = facts(engine), crafted.files_of(path), random.Random(0)
    loaded = 0
    for number in range(300):
        name = (STATE, STATE, STATE, INDEX, MANIFEST)[number % 5]
        crafted.craft(path, name, crafted.mutated(json.loads(kept[name]), choose))
        told = raised(engine.load_checkpoint, ram)
        assert told == "" or told.startswith("CheckpointError"), f"{number}: {told}"
        loaded += told == ""
        crafted.put_back(path, kept)
    assert 20 < loaded < 250
    assert engine.load_checkpoint(ram)[1]["list"] == client["list"]
    assert differences(wanted, facts(engine)) == []
    go_on(engine)


@pytest.mark.slow
@on_ranks(2)
def test_damage_that_one_rank_reads_is_told_on_all(ram: Path) -> None:
    """The engine goes on with another checkpoint."""
    engine = about_to_save(ram)
    path = Path(engine.save_checkpoint(ram))
    engine.load_checkpoint(ram, "global_step1")
    first, kept = facts(engine), crafted.files_of(path)
    assert len(kept) == 5
    for name, what in itertools.product(sorted(kept), ("bit", "size", "gone")):
        file, content = path / name, kept[name]
        engine.load_checkpoint(ram)
        before = facts(go_on(engine))
        changed = bytes([content[0] ^ 1]) + content[1:] if what == "bit" else content[:-1]
        on_rank_0(engine, file.unlink if what == "gone" else functools.partial(file.write_bytes, changed))
        told = raised(engine.load_checkpoint, ram)
        assert told.startswith("CheckpointError") and "'global_step1'" in told, told
        assert name in told or what == "gone", told
        if name.endswith(".json") or what != "bit":  # known before tensors are read
            assert differences(before, facts(engine)) == [], (name, what)
        engine.load_checkpoint(ram, "global_step1")
        assert differences(first, facts(engine)) == [], (name, what)
        on_rank_0(engine, functools.partial(file.write_bytes, content))
    engine.load_checkpoint(ram)


@on_ranks(1)
def test_a_parameter_that_is_renamed_in_the_state_alone(ram: Path) -> None:
    """Among the parameters or in a param group: named on load and export, and nothing is loaded."""
    engine = about_to_save(ram, stage=1)
    path, before = ram / "global_step1", facts(engine)
    for place in ("parameters", "groups"):
        body = json.loads(crafted.files_of(path)[STATE])
        if place == "parameters":
            body["parameters"]["up.waight"] = body["parameters"].pop("up.weight")
        else:
            body["optimizer"]["groups"][0]["names"][0] = "up.waight"
        kept = crafted.files_of(path)
        crafted.craft(path, STATE, body)
        for more in ({}, {"load_module_strict": False}):
            told = raised(lambda more=more: engine.load_checkpoint(ram, **more))
            assert "state.json' is damaged" in told and "'up.waight'" in told, told
        if place == "parameters":
            with pytest.raises(CheckpointError, match=r"state.json' is damaged.*'up.waight'"):
                export_checkpoint(path, ram / "out")
        assert differences(before, facts(engine)) == []
        crafted.put_back(path, kept)


@on_ranks(1)
def test_a_shape_that_is_not_the_models_is_named(ram: Path) -> None:
    """A tensor is smaller or larger than the parameter, or there is none: named, and nothing is loaded."""
    engine = about_to_save(ram, stage=1)
    path, before = ram / "global_step1", facts(engine)
    kept = crafted.files_of(path)
    for key, rows in itertools.product(("parameters/up.weight", "optimizer/exp_avg/up.weight"), (8, 10, 0)):
        body = json.loads(kept[INDEX])
        file, start, offsets, _ = body["tensors"][key]["boxes"][0]
        body["tensors"][key] |= {"shape": [rows, 5], "boxes": [[file, start, offsets, [rows, 5]]]}
        if not rows:
            del body["tensors"][key]
        crafted.craft(path, INDEX, body)
        told = raised(engine.load_checkpoint, ram)
        assert "up.weight" in told, (key, rows)
        if key.startswith("optimizer") and not rows:
            assert "tensors.json' is damaged: it lacks state 'exp_avg' of parameter 'up.weight'" in told, told
            assert differences(before, facts(engine)) == [] and "load_optimizer_states=False" in told
            engine.load_checkpoint(ram, load_optimizer_states=False)
        crafted.put_back(path, kept)
        engine.load_checkpoint(ram)
        before = facts(engine)
