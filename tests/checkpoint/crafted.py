"""Files of a checkpoint that was never written: changed by hand or by chance, with checksums that fit."""

from __future__ import annotations

import functools
import json
import operator
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zerolite.checkpoint import manifest
from zerolite.checkpoint.directory import MANIFEST
from zerolite.checkpoint.filesystem import BLOCK_BYTES
from zerolite.checkpoint.manifest import INDEX, STATE

RANK = "rank_00000.safetensors"
FILES = (RANK, INDEX, STATE, MANIFEST)


def craft(path: Path, name: str, body: Any) -> None:
    """Write ``body`` (bytes as they are, anything else as JSON) in place of a file of the checkpoint in ``path``, and
    make the checksums fit."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    if name == MANIFEST:
        if isinstance(body, dict):
            body = {key: value for key, value in body.items() if key != "crc32"}
            text = json.dumps({**body, "crc32": manifest._checksum(body)}).encode()
        (path / MANIFEST).write_bytes(text)
        return
    (path / name).write_bytes(text)
    about = json.loads((path / MANIFEST).read_bytes())
    sums = (zlib.crc32(text[start : start + BLOCK_BYTES]) for start in range(0, len(text), BLOCK_BYTES))
    about["files"][name] = {"bytes": len(text), "crc32": "".join(f"{value:08x}" for value in sums)}
    craft(path, MANIFEST, about)


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def put_back(path: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (path / name).write_bytes(content)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << (at % 8)
    path.write_bytes(content)


NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**30, 0.5, float("inf"), float("nan"), 1e300),
    *("", ".", "..", "/etc/passwd", "a\0b", "\ud800", "x" * 300, "F32", "0", "lr", "parameters/weight"),
    *([], {}, [[]], [{}], {"": None}, [None], [-1], [0], [10**30], {"$tensor": 0}, {"$tuple": [1]}, {"$size": [-1]}),
)


def mutated(body: Any, choose: random.Random) -> Any:
    """The same with one thing changed, left out, put twice or put elsewhere."""
    places = list(_places(body))
    inner, key = choose.choice(places)
    how = choose.randrange(8)
    if how == 0:
        del inner[key]
    elif how == 1:
        other, place = choose.choice(places)
        inner[key] = json.loads(json.dumps(other[place]))
    elif how == 2 and isinstance(inner, list):
        inner.append(inner[key])
    elif how == 2:
        inner[str(choose.choice(NASTY))] = inner.pop(key)
    elif how == 3 and isinstance(inner[key], int):
        inner[key] += choose.choice((-1, 1, 7))
    elif how == 4:
        inner[key] = [inner[key]]
    else:
        inner[key] = choose.choice(NASTY)
    return body


def _places(body: Any) -> Iterator[tuple[Any, Any]]:
    """Every value, as what it is in and its key there."""
    if isinstance(body, (dict, list)):
        for key, value in body.items() if isinstance(body, dict) else enumerate(body):
            yield body, key
            yield from _places(value)


Change = Callable[[Any], Any]


def put(*path: Any, value: Any) -> Change:
    """Write ``value``, or nothing, at this place of a body."""

    def change(body: Any) -> Any:
        inner = functools.reduce(operator.getitem, path[:-1], body)
        if value is NOTHING:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value
        return body

    return change


NOTHING = object()


def removed(*path: Any) -> Change:
    return put(*path, value=NOTHING)


WEIGHT = ("tensors", "parameters/weight")
MANIFESTS: dict[str, Change] = {
    "a list": lambda body: [],
    "another format": put("format", value="safetensors"),
    "a later version": put("version", value=3),
    "a later version of nothing": lambda body: {"format": body["format"], "version": 9, "versions": []},
    "no files": removed("files"),
    "no index": removed("files", INDEX),
    "a size that is huge": put("files", RANK, "bytes", value=10**100),
    "too few checksums": put("files", RANK, "crc32", value=""),
    "a file above": put("files", "../x", value={"bytes": 0, "crc32": ""}),
    "steps that are a text": put("global_steps", value="2"),
    "a grid below zero": put("grid", "pipe", value=-1),
    "a grid of one number": put("grid", value={"pipe": 2}),
}
MANY = [[0, 0, [row, 0], [1, 999]] for row in range(10**5)]
INDICES: dict[str, Change] = {
    "a list": lambda body: [],
    "a file above": put("files", value=["../../other"]),
    "a tensor that is none": put(*WEIGHT, value=None),
    "another dtype": put(*WEIGHT, "dtype", value="F33"),
    "a shape below zero": put(*WEIGHT, "shape", value=[-4, -700]),
    "another shape": put(*WEIGHT, "shape", value=[700, 4]),
    "a huge empty tensor": put(*WEIGHT, value={"dtype": "F32", "shape": [10**30, 0], "boxes": []}),
    "a huge tensor": put(*WEIGHT, value={"dtype": "F32", "shape": [10**30], "boxes": [[0, 0, [0], [10**30]]]}),
    "a place below zero": put(*WEIGHT, "boxes", 0, value=[0, -8, [0, 0], [4, 700]]),
    "a place behind the end": put(*WEIGHT, "boxes", 0, value=[0, 10**6, [0, 0], [4, 700]]),
    "boxes that overlap": put(*WEIGHT, "boxes", value=[[0, 0, [0, 0], [2, 700]], [0, 0, [1, 0], [2, 700]]]),
    "bytes twice": put("tensors", "another", value={"dtype": "F32", "shape": [5600], "boxes": [[0, 0, [0], [5600]]]}),
    "bytes often": put("tensors", "a", value={"dtype": "U8", "shape": [10**5, 999], "boxes": MANY}),
}
STATES: dict[str, Change] = {  # every tag of plain data with what it cannot hold: tests/unit/test_json_codec.py
    "a list": lambda body: [],
    "an unknown tag": put("step", value={"$function": "os.system"}),
    "a tensor that is not there": put("step", value={"$tensor": 7}),
    "a tensor of another place": put("step", value={"$tensor": "../parameters/weight"}),
}
BODIES = {MANIFEST: MANIFESTS, INDEX: INDICES, STATE: STATES}
TEXTS = {
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "two bytes each": b"\xff\xfe{}",
    "almost": b'{"a":1,}',
    "a long number": b'{"global_steps":' + b"9" * 5000 + b"}",
}
