"""Mutated and hostile configurations: each gives a configuration or a ConfigError that names the key, at once."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.test_config_off import CLIENTS
from zerolite.config import ConfigError, load_config
from zerolite.config.load import supported_keys

LIMIT_S = 1.0  # of the processor: others may use it at the same time
KEYS = sorted({path.rpartition(".")[2] for path in supported_keys()})
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 0.5, -0.0, 1e-320, 1e308, -1e308, 10**18, 2**63, 10**400, -(10**400), 10**5000,
    math.nan, math.inf, -math.inf, "", " ", "auto", "none", "cpu", "nvme", "1e9", "1e999", "٣", "²", "Infinity",
    "\ud800", "a\0b", "x" * 10_000, "1" * 60_000 + "x", "../../x", "/", "~", "*", "[", "fp16", b"bytes", [],
    [[]], [None], [0.9], [0.9, 0.999], [1] * 1000, {}, {"enabled": True}, {"enabled": False}, {"auto": "auto"}, (),
    object(), complex(1, 1), {1, 2}, {1: 2}, {None: {}}, {"\ud800": 1}, {"x" * 10_000: 1},
]  # fmt: skip
BAD_KEYS: list[Any] = [
    "", " ", "\ud800", "a\0", "x" * 10_000, "a.b", "zero_optimization.stage", 1, None, 1.5, (1, 2), 10**5000,
]  # fmt: skip


def deep(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"fp16": value}
    return value


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a nested one."""
    if len(path) > 5:
        return
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def mutate(draw: random.Random, source: dict[str, Any]) -> None:
    """Change one place: another value, another key, one key more or one less."""
    found = list(places(source))
    if not found:
        return
    *path, last = draw.choice(found)
    holder: Any = source
    for key in path:
        holder = holder[key]
    kind = draw.randrange(10)
    if kind == 0 and isinstance(holder, dict):
        del holder[last]
    elif kind == 1 and isinstance(holder, dict):
        holder[draw.choice(BAD_KEYS)] = copy.copy(draw.choice(HOSTILE))
    elif kind == 2 and isinstance(holder, dict):
        holder[draw.choice(KEYS)] = copy.copy(draw.choice(HOSTILE))
    elif kind == 3:
        holder[last] = deep(draw.choice([50, 500, 5000]))
    else:
        holder[last] = copy.copy(draw.choice(HOSTILE))


def full_config() -> dict[str, Any]:
    """Every key of the schema with its default."""
    dumped = load_config({}).model_dump(mode="json")
    return {**dumped, "optimizer": CLIENTS["DeepSpeed's documentation"].get("optimizer"), "scheduler": None}


def sources(seed: int) -> Iterator[Any]:
    """Mutated configurations without end: dicts, and texts where JSON can say them."""
    draw = random.Random(seed)
    bases = [*CLIENTS.values(), {}, full_config()]
    while True:
        source = copy.deepcopy(draw.choice(bases))
        for _ in range(draw.choice([1, 1, 2, 3, 8])):
            mutate(draw, source)
        yield source
        try:
            text = json.dumps(source)
        except (TypeError, ValueError, RecursionError):
            continue
        start, stop = sorted(draw.randrange(len(text) + 1) for _ in range(2))
        damage = draw.choice(["", "/*", "'''", "{", "}", "\\ud800", "\0", ",", "# ", '"'])
        yield draw.choice(
            [text, text[:start] + damage + text[start:], text[:start] + text[stop:], text[:start] + damage]
        )


def errors_of(source: Any, world: int = 6) -> dict[str, str]:
    """Load and resolve a configuration, in less than a second; return its errors, which can be printed."""
    began, errors = time.process_time(), {}
    try:
        load_config(source).resolve(world)
    except ConfigError as error:
        assert str(error).encode() and error.errors
        for path, sentence in error.errors:
            assert sentence and len(sentence) < 2000 and (path or not isinstance(source, dict) or "nested" in sentence)
        errors = dict(error.errors)
    assert time.process_time() - began < LIMIT_S
    return errors


@pytest.mark.fast("0")
@pytest.mark.parametrize("seed", range(3))
def test_mutated_configurations_load_or_name_the_key(seed: int) -> None:
    for number, source in enumerate(itertools.islice(sources(seed), 1000 if seed else 150)):
        try:
            errors_of(source)
        except Exception as error:
            shown = source if isinstance(source, str) else {key: repr(value)[:100] for key, value in source.items()}
            raise AssertionError(f"configuration {number} of seed {seed}: {shown!r:.3000}") from error


@pytest.mark.parametrize("block", ["csv_monitor", "jsonl_monitor", "tensorboard"])
def test_the_folder_of_a_job_stays_in_its_own(block: str) -> None:
    for name in ("..", "../x", "a/../../x", "/tmp/x"):
        (sentence,) = errors_of({block: {"job_name": name}}).values()
        assert "leads out of it" in sentence
    for name in ("job", "team/job", "a..b", "..."):
        assert errors_of({block: {"job_name": name}}) == {}
