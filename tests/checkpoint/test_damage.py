"""Files that are not as they were written: said in a sentence, whatever it is, and nothing is executed."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import crafted, faults
from tests.checkpoint.crafted import FILES, RANK
from tests.toolkit.pool import Pool, Pools
from zerolite.checkpoint import inspect
from zerolite.checkpoint.directory import MANIFEST, find
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.export import export_checkpoint
from zerolite.checkpoint.manifest import INDEX, STATE
from zerolite.checkpoint.reader import CheckpointReader

CASES = "tests.checkpoint.cases.crashes"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Path]:
    """A directory with checkpoints of steps 1 and 2."""
    with faults.memory(tmp_path) as directory:
        faults.save(directory / "saved", 1)
        faults.save(directory / "saved", 2)
        yield directory / "saved"


def said(save_dir: Path, tag: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_all(save_dir, tag)
    return str(caught.value)


def read_all(save_dir: Path, tag: str | None = None) -> None:
    """Read everything as loading and exporting do."""
    reader = CheckpointReader(find(save_dir, tag))
    reader.check_sizes()
    _ = reader.state
    for key in reader.tensors:
        reader.read(key)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << (place % 8)
    path.write_bytes(content)


# -------------------------------------------------------------------- bytes


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("more", [-7, 1])
def test_another_length(two: Path, name: str, more: int) -> None:
    file = two / "global_step2" / name
    size = file.stat().st_size
    file.write_bytes((file.read_bytes() + b"x")[: size + more])
    message = said(two)
    assert str(file) in message and "is damaged" in message and "'global_step1'" in message
    if name != MANIFEST:
        assert f"expected {size} bytes, found {size + more}" in message
    assert faults.load(two, "global_step1") == 1


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(two: Path, name: str) -> None:
    """In the header and the payload of tensors, in each JSON; a manifest may be the same without some of its spaces."""
    file = two / "global_step2" / name
    original = file.read_bytes()
    spaces = {i for i, byte in enumerate(original) if byte in b" \n"} if name == MANIFEST else set()
    places = {0, 1, 7, 8, len(original) - 1, *range(0, len(original), 1 + len(original) // 100)}
    for place in sorted(places - spaces):
        flip(file, place)
        message = said(two)
        assert str(file) in message and "'global_step1'" in message
        if name != MANIFEST:
            assert "expected checksum" in message and "between bytes 0 and" in message
        file.write_bytes(original)
    assert faults.load(two) == 2


@pytest.mark.parametrize(
    ("what", "name"),
    [
        *(("missing", name) for name in FILES),
        *((what, name) for what in ("empty", "a directory", "a pipe", "a pickle") for name in (RANK, MANIFEST)),
        ("a link to nothing", STATE),
        ("too long", INDEX),
    ],
)
def test_something_else_in_its_place(two: Path, what: str, name: str) -> None:
    file = two / "global_step2" / name
    size = file.stat().st_size
    file.unlink()
    witness = two / "executed"
    if what == "empty":
        file.touch()
    elif what == "a directory":
        file.mkdir()
    elif what == "a pipe":
        os.mkfifo(file)
    elif what == "a pickle":
        content = pickle.dumps(Executed(witness))
        file.write_bytes(content + b"." * (size - len(content)))
    elif what == "a link to nothing":
        file.symlink_to("nothing")
    elif what == "too long":  # without taking room
        with file.open("wb") as sparse:
            sparse.truncate(1 << 33)
    message = said(two)
    assert not witness.exists()
    assert "'global_step1'" in message
    if what == "missing" and name == MANIFEST:
        assert "'global_step2'" in message and "has no manifest" in message
    else:
        assert str(file) in message
    assert faults.load(two, "global_step1") == 1


class Executed:
    """Unpickling it leaves a trace."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return Path.touch, (self.witness,)


def test_that_pickle_would_be_executed(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Executed(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", [RANK, MANIFEST, "latest"])
def test_no_permission(two: Path, name: str) -> None:
    file = two / name if name == "latest" else two / "global_step2" / name
    file.chmod(0)
    message = faults.as_nobody(two, lambda: said(two))
    assert str(file) in message and "cannot be read: Permission denied" in message
    if name != "latest":
        assert "'global_step1'" in message


def test_no_permission_for_the_directory(two: Path) -> None:
    """It is not as if there were nothing."""
    (two / "latest").unlink()
    two.chmod(0)
    try:
        message = faults.as_nobody(two.parent, lambda: said(two))
    finally:
        two.chmod(0o755)
    assert str(two) in message and "Permission denied" in message and "no checkpoint in" not in message


NONSENSE = {
    "nothing": b"",
    "the directory above": b"..",
    "one beside": b"../other",
    "a place": b"/etc",
    "bytes": b"\xff\xfe",
    "a zero": b"a\0b",
    "too long a name": b"x" * 300,
    "too long a file": b"x" * 10_000,
}


@pytest.mark.parametrize("what", NONSENSE)
def test_latest_is_nonsense(two: Path, what: str) -> None:
    content = NONSENSE[what]
    (two / "latest").write_bytes(content)
    message = said(two)
    if len(content) <= 255:
        assert "'latest'" in message or f"'{two / 'latest'}'" in message
        assert "'global_step2'" in message
    else:
        assert str(two) in message and "cannot be read: " in message
    assert faults.load(two, "global_step2") == 2
    (two / "latest").unlink()
    assert faults.load(two) == 2


def test_latest_is_something_else(two: Path) -> None:
    latest = two / "latest"
    for make in (latest.mkdir, lambda: os.mkfifo(latest)):
        (latest.rmdir if latest.is_dir() else latest.unlink)()
        make()
        assert str(latest) in said(two)


# -------------------------------------------------------------------- what was not written by zerolite


@pytest.mark.parametrize("name", [MANIFEST, INDEX, STATE])
def test_crafted(two: Path, name: str) -> None:
    path = two / "global_step2"
    kept = {file.name: file.read_bytes() for file in path.iterdir()}
    made = {what: change(json.loads(kept[name])) for what, change in crafted.BODIES[name].items()}
    for what, body in (made | crafted.TEXTS).items():
        crafted.craft(path, name, body)
        message = said(two)
        assert str(path / name) in message and "'global_step1'" in message and len(message) < 600, what
        for other, content in kept.items():
            (path / other).write_bytes(content)
    crafted.craft(path, name, made["a list"])
    assert faults.load(two, "global_step1") == 1
    faults.save(two, 3, keep_last=1)  # and the damaged one is in no one's way
    assert faults.load(two) == 3


def test_later_version_says_whose(two: Path) -> None:
    path = two / "global_step2"
    body = json.loads((path / MANIFEST).read_bytes())
    crafted.craft(path, MANIFEST, {**body, "version": 7, "versions": {"zerolite": "9.8"}})
    message = said(two)
    assert "format version 7" in message and "written by zerolite 9.8" in message and "versions up to 1" in message


@pytest.mark.slow
def test_every_mutation_is_an_error_or_harmless(two: Path) -> None:
    """A few hundred of each JSON, with checksums that fit."""
    random_ = random.Random(5)
    path = two / "global_step2"
    kept = path.with_name("kept")
    shutil.copytree(path, kept)
    refused = 0
    for number in range(600):
        name = (MANIFEST, INDEX, STATE)[number % 3]
        body = crafted.mutated(json.loads((kept / name).read_bytes()), random_)
        crafted.craft(path, name, body)
        try:
            read_all(two)
        except CheckpointError as error:
            assert str(path) in str(error)
            refused += 1
        for file in kept.iterdir():
            shutil.copy(file, path / file.name)
    assert 200 < refused < 600


def test_export_of_mutations(two: Path) -> None:
    random_ = random.Random(6)
    path = two / "global_step2"
    kept, out = path.with_name("kept"), path.with_name("out")
    shutil.copytree(path, kept)
    refused = 0
    for number in range(200):
        name = (STATE, INDEX)[number % 2]
        crafted.craft(path, name, crafted.mutated(json.loads((kept / name).read_bytes()), random_))
        try:
            export_checkpoint(path, out)
        except CheckpointError:
            refused += 1
        assert inspect.main([str(path), "--verify", "--json"]) in (0, 1)
        for file in kept.iterdir():
            shutil.copy(file, path / file.name)
    assert 50 < refused < 200
    export_checkpoint(path, out)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_engine_with_mutations(alone: Pool, ram: Path, seed: int) -> None:
    arguments = {"directory": ram / "saved", "seed": seed, "count": 300}
    (result,) = alone.run(f"{CASES}:mutations", arguments, timeout=200)
    assert result["examples"] == {}
    assert result["kinds"]["CheckpointError"] > 50 and result["kinds"]["loaded"] > 20
    assert result["right"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_engine_with_damage(pools: Pools, ram: Path, stage: int) -> None:
    """All ranks are told, also where only one has read the damaged file, and the engine goes on with another one."""
    ranks = pools(2).run(f"{CASES}:damaged", {"directory": ram / "saved", "stage": stage})
    assert len(ranks[0]) == 5 * 3
    for of_ranks in zip(*ranks, strict=True):
        for result in of_ranks:
            assert result["name"] in result["said"] or result["what"] == "gone", result
            assert "'global_step1'" in result["said"], result
            assert result["first"], result
            if result["name"].endswith(".json") or result["what"] != "bit":  # known before tensors are read
                assert result["unchanged"], result


def test_engine_with_another_shape_in_the_index(alone: Pool, ram: Path) -> None:
    (said,) = alone.run(f"{CASES}:shrunk", {"directory": ram / "saved"})
    for what, message in said.items():
        assert "up.weight" in message, what
