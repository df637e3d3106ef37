"""`load_config`: read any source into a frozen, checked configuration, or raise one error with all mistakes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from .batch import MICRO, TRAIN
from .errors import ConfigError
from .known_keys import ALIASES, OFF_IF_FALSE, RENAMED, TO_WRITE, UNSUPPORTED, Block, Key, same, unsupported_paths
from .models import ZeroliteConfig
from .nearest import nearest_keys
from .rules import IntegerOrAuto, shorten, show
from .source import read_source
from .without_effect import leave_out, needs_stage_3
from .zero import MAX_ZERO_STAGE

AUTO = "auto"

# "auto" without a default: resolve() derives the first two or raises; a missing type is an error there too, and the
# stage is chosen where the model and the device are known.
_AUTO_AT_RESOLVE = frozenset({TRAIN, MICRO})
_AUTO_KEPT = frozenset({"optimizer.type", "scheduler.type", "zero_optimization.stage"})

_MOST_HINTS = 20
"""Unknown keys for which the nearest known one is looked for."""

_LONGEST_HINT = 100
"""Characters: no known key is near a longer one."""

_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127

_PIN_MEMORY = "zero_optimization.cpu_offload_use_pin_memory"

_SURROGATE = re.compile("[\ud800-\udfff]")


def load_config(source: Mapping[str, Any] | str | os.PathLike[str] | ZeroliteConfig) -> ZeroliteConfig:
    """Load a configuration.

    Args:
        source: a dict, the path of a file, JSON text, hjson text, or a configuration that is loaded already.

    Raises:
        ConfigError: with every error at once; `.errors` lists (JSON path, sentence).
    """
    if isinstance(source, ZeroliteConfig):
        return source
    try:
        return _load(source)
    except RecursionError:
        raise ConfigError([("", "expected a configuration, got values nested too deeply to be one")]) from None


def _load(source: Mapping[str, Any] | str | os.PathLike[str]) -> ZeroliteConfig:
    raw = read_source(source)
    cleaner = _Cleaner(_stage(raw.values))
    clean = cleaner.block(ZeroliteConfig, raw.values, "")
    errors = list(cleaner.errors)
    config, found = _validate(clean, cleaner.auto, {path for path, _ in errors})
    errors = raw.duplicates + [(_as_spelled(path, raw.values), sentence) for path, sentence in errors + found]
    if errors or config is None:
        raise ConfigError(errors, raw.origin)
    return leave_out(config, cleaner.without_effect)


def _stage(values: Mapping[Any, Any]) -> int | None:
    """The ZeRO stage, None where the configuration leaves it open or says it wrongly."""
    zero = values.get("zero_optimization")
    try:
        stage = IntegerOrAuto(0, MAX_ZERO_STAGE)(zero.get("stage", 0) if isinstance(zero, Mapping) else 0)
    except ValueError:
        return None
    return stage if isinstance(stage, int) else None


def _validate(
    clean: dict[str, Any], auto: set[str], invalid: set[str]
) -> tuple[ZeroliteConfig | None, list[tuple[str, str]]]:
    """Validate; where values are wrong, drop them and look for contradictions among the rest."""
    try:
        return ZeroliteConfig.model_validate(clean, context={"auto": auto, "invalid": invalid}), []
    except ValidationError as error:
        errors = [(path, sentence) for path, sentence in _sentences(error) if path not in invalid]
        for details in error.errors(include_url=False, include_context=False):
            _drop(clean, details["loc"])
    try:
        ZeroliteConfig.model_validate(clean, context={"invalid": invalid | {path for path, _ in errors}})
    except ValidationError as error:
        errors += _sentences(error)
    return None, errors


def _drop(values: dict[str, Any], location: tuple[int | str, ...]) -> None:
    """Remove a wrong value, so that its default takes its place; the whole block where there is no default."""
    model: type[BaseModel] | None = ZeroliteConfig
    for depth, part in enumerate(location):
        name = str(part)
        info = model.model_fields.get(name) if model is not None else None
        model = block_model(info.annotation) if info is not None else None
        following = model.model_fields.get(str(location[depth + 1])) if model and depth + 1 < len(location) else None
        if following is None or following.is_required():
            values.pop(name, None)
            return
        values = values.get(name, {})


def _as_spelled(path: str, values: Mapping[str, Any]) -> str:
    """The path with the user's own spelling of the block."""
    head, dot, rest = path.partition(".")
    for alias, name in ALIASES.items():
        if head == name and name not in values and alias in values:
            return alias + dot + rest
    return path


def _sentences(error: ValidationError) -> list[tuple[str, str]]:
    sentences: list[tuple[str, str]] = []
    for details in error.errors(include_url=False):
        path = ".".join(str(part) for part in details["loc"])
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            sentences += cause.errors
        elif details["type"] == "missing":
            sentences.append((path, f"expected a name, got nothing; add the key, such as {_example(path)}"))
        else:
            sentences.append((path, str(cause) if cause is not None else details["msg"]))
    return sentences


def _example(path: str) -> str:
    return '"type": "WarmupLR"' if path.startswith("scheduler") else '"type": "AdamW"'


class _Cleaner:
    """Walks the raw values beside the models: what is left is known by name and not "auto"."""

    def __init__(self, stage: int | None) -> None:
        self.stage = stage
        self.errors: list[tuple[str, str]] = []
        self.without_effect: list[tuple[str, str]] = []
        self.auto: set[str] = set()
        self.hints = _MOST_HINTS

    def block(self, model: type[BaseModel], values: Mapping[Any, Any], path: str) -> dict[str, Any]:
        clean: dict[str, Any] = {}
        for key, value in values.items():
            if not isinstance(key, str):
                self.errors.append((_join(path, key), _not_a_key(key)))
                continue
            name = key if path else ALIASES.get(key, key)
            here = _join(path, name)
            if name != key and name in values:
                sentence = f"expected one spelling, got {name} and {key}, which are the same block; keep {name}"
                self.errors.append((key, sentence))
            elif name in model.model_fields:
                self._known(model, name, value, here, clean)
            else:
                self._not_in_model(path, key, value, here)
        return clean

    def _known(self, model: type[BaseModel], name: str, value: Any, here: str, clean: dict[str, Any]) -> None:
        if value == AUTO and isinstance(value, str) and here not in _AUTO_KEPT:
            if here in _AUTO_AT_RESOLVE:
                self.auto.add(here)
            return
        inner = block_model(model.model_fields[name].annotation)
        if inner is not None:
            if value is None or value is False:
                return
            if isinstance(value, Mapping):
                clean[name] = self.block(inner, value, here)
            else:
                self.errors.append((here, _not_an_object(here, value)))
        elif name == "params" and isinstance(value, Mapping):
            clean[name] = self._params(value, here)
        else:
            problems = _unusable_texts(value, here)
            self.errors += problems
            if not problems:
                clean[name] = value

    def _params(self, values: Mapping[Any, Any], path: str) -> dict[str, Any]:
        """Constructor arguments are free; only what no constructor can want is refused here."""
        clean: dict[str, Any] = {}
        for key, value in values.items():
            here = _join(path, key)
            if not isinstance(key, str):
                self.errors.append((here, _not_a_key(key)))
            elif here in RENAMED:
                self._renamed(here, value)
            elif not (isinstance(value, str) and value == AUTO):
                self.errors += _non_finite(value, here) + _unusable_texts(key, here) + _unusable_texts(value, here)
                clean[key] = value
        return clean

    def _not_in_model(self, block: str, key: str, value: Any, here: str) -> None:
        entry = UNSUPPORTED.get(block, {}).get(key)
        if here in RENAMED:
            self._renamed(here, value)
        elif entry is not None:
            self._unsupported(entry, value, here)
        else:
            self.errors.append((here, self._unknown(block, key)))

    def _renamed(self, here: str, value: Any) -> None:
        off = value is None or (here in OFF_IF_FALSE and isinstance(value, (bool, int, float)) and not value)
        if here == _PIN_MEMORY and value is False:  # DeepSpeed has no use for it either
            self.without_effect.append((here, f"got false under a deprecated name; {TO_WRITE[here][False]}"))
        elif not off:
            self.errors.append((here, _renamed(here, value)))

    def _unknown(self, block: str, key: str) -> str:
        """The sentence, which looks for the key that was meant only so often: each search takes milliseconds."""
        self.hints -= 1
        return _unknown(block, key, hint=self.hints >= 0)

    def _unsupported(self, entry: Key | Block, value: Any, here: str) -> None:
        if isinstance(entry, Key):
            if value is None or entry.free or _inert(entry.inert, value):
                return
            below = entry.stage3 and self.stage is not None and self.stage < 3
            if below and self.stage is not None:
                self.without_effect.append((here, needs_stage_3(self.stage, value)))
            elif entry.ignored:
                self.without_effect.append((here, f"got {show(value)}, which changes nothing: {entry.ignored}"))
            else:
                self.errors.append((here, _not_yet(entry, entry.inert)))
            return
        if value is None or value is False or (isinstance(value, str) and value == AUTO):
            return
        if entry.off_if_empty and isinstance(value, Mapping) and not value:
            return
        if not isinstance(value, Mapping):
            self.errors.append((here, f"{_not_an_object(here, value)}; {_not_yet(entry, ())}"))
        elif entry.switch or entry.on_by_default:
            self._names(entry, value, here)
            on = not _inert(entry.off, value[entry.switch]) if entry.switch in value else entry.on_by_default
            if on:
                self.errors.append((here, _not_yet(entry, entry.off, entry.switch)))
        else:
            for key, item in value.items():
                inner = entry.keys.get(key)
                if inner is None:
                    self.errors.append((_join(here, key), self._unknown(here, _name(key))))
                else:
                    self._unsupported(inner, item, _join(here, key))

    def _names(self, entry: Block, value: Mapping[Any, Any], here: str) -> None:
        """Only that every key exists, at every depth that the table describes."""
        for key, item in value.items():
            inner = entry.keys.get(key)
            if inner is None:
                self.errors.append((_join(here, key), self._unknown(here, _name(key))))
            elif isinstance(inner, Block) and isinstance(item, Mapping):
                self._names(inner, item, _join(here, key))


def _name(key: object) -> str:
    """The key as messages show it."""
    if isinstance(key, str):
        return shorten(key) or '""'
    try:
        return shorten(str(key))
    except ValueError:  # an integer of more digits than Python converts
        return show(key)


def _join(path: str, key: object) -> str:
    return f"{path}.{_name(key)}" if path else _name(key)


def block_model(annotation: Any) -> type[BaseModel] | None:
    """The model behind a field's annotation (`Block` or `Block | None`), if it is one."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def supported_paths(model: type[BaseModel] = ZeroliteConfig, prefix: str = "") -> Iterable[str]:
    """The full path of every supported key, blocks before what they hold."""
    for name, info in model.model_fields.items():
        path = _join(prefix, name)
        yield path
        inner = block_model(info.annotation)
        if inner is not None:
            yield from supported_paths(inner, path)


@lru_cache(maxsize=1)
def _all_paths() -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(supported_paths()), tuple(path for path, _ in unsupported_paths())


def _inert(accepted: tuple[object, ...], value: object) -> bool:
    if isinstance(value, str) and value == AUTO:
        return bool(accepted)
    return any(same(value, other) for other in accepted)


def _not_an_object(path: str, value: object) -> str:
    if path == "zero_optimization" and value is True:
        return f'expected an object, got {show(value)}, an old spelling; write {{"stage": {int(value)}}}'
    return f"expected an object, got {show(value)}; write {{...}} or leave the key out"


def _renamed(path: str, value: Any) -> str:
    to_write = TO_WRITE.get(path, {}).get(value) if isinstance(value, bool) else None
    return f"expected today's name of the key, got a deprecated one; {to_write or f'use {RENAMED[path]}'}"


def _not_yet(entry: Key | Block, accepted: tuple[object, ...], switch: str = "") -> str:
    sentence = "known to zerolite but not supported yet"
    if entry.note:
        sentence += f" ({entry.note})"
    if not accepted:
        return f"{sentence}; leave it out"
    values = " or ".join(dict.fromkeys(show(value).removeprefix("the string ") for value in accepted))
    subject = f"{switch} = {values}" if switch else values
    return f"{sentence}; leave it out (only {subject} is accepted)"


def _not_a_key(key: object) -> str:
    return f"expected a string as the key, got {show(key)}; write it in quotes"


def _unknown(block: str, key: str, hint: bool) -> str:
    where = f"a key of {block}" if block else "a key of the configuration"
    sentence = f"expected {where}, got an unknown one"
    supported, unsupported = _all_paths()
    if not block and "." in key and key in supported:
        nested = key.replace(".", '": {"')
        return f'{sentence}; write it nested: "{nested}": ...' + "}" * key.count(".")
    if block in ("optimizer", "scheduler"):
        return f"{sentence}; arguments of the constructor belong into {block}.params"
    if block and key in supported:
        return f"{sentence}; did you mean {key}? It belongs to the top level: move it out of {block}"
    near = nearest_keys(block, key, supported, unsupported) if hint and len(key) <= _LONGEST_HINT else []
    return f"{sentence}; did you mean {' or '.join(near)}?" if near else f"{sentence}; remove it"


def _non_finite(value: Any, path: str) -> list[tuple[str, str]]:
    """JSON has no NaN and no infinity, and no constructor argument is meant to be one. Beyond float32, torch's updates
    fail with an exception of their own."""

    def problem(leaf: Any) -> str | None:
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return f"expected a finite number, got {show(leaf)}; write one"
        if isinstance(leaf, (int, float)) and abs(leaf) > _LARGEST_FLOAT32:
            return f"expected a number that float32 can hold, at most 3.4e38, got {show(leaf)}; write a smaller one"
        return None

    return _problems(value, path, problem)


def _unusable_texts(value: Any, path: str) -> list[tuple[str, str]]:
    """No name and no path holds a zero character, and a lone surrogate is half a character."""

    def problem(leaf: Any) -> str | None:
        if not isinstance(leaf, str):
            return None
        if "\0" in leaf:
            return f"expected text without zero characters, got {show(leaf)}; remove them"
        if not leaf.isascii() and _SURROGATE.search(leaf):
            return f"expected text that UTF-8 can hold, got {show(leaf)}; write the character itself"
        return None

    return _problems(value, path, problem)


def _problems(value: Any, path: str, problem: Callable[[Any], str | None]) -> list[tuple[str, str]]:
    """(path, sentence) of every leaf and every key of a JSON value with a problem."""
    if isinstance(value, Mapping):
        inner = [(_join(path, key), item) for key, item in value.items()]
        found = [(_join(path, key), sentence) for key in value if (sentence := problem(key)) is not None]
    elif isinstance(value, (list, tuple)):
        inner, found = [(f"{path}[{index}]", item) for index, item in enumerate(value)], []
    else:
        sentence = problem(value)
        return [] if sentence is None else [(path, sentence)]
    return found + [error for where, item in inner for error in _problems(item, where, problem)]
