"""`load_config`: read any source into a frozen, checked configuration, or raise one error with all mistakes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from .batch import MICRO, TRAIN
from .errors import ConfigError
from .known_keys import (
    ALIASES,
    GROUPS,
    OFF_IF_FALSE,
    RENAMED,
    TO_WRITE,
    UNSUPPORTED,
    Key,
    UnsupportedBlock,
    unsupported_paths,
)
from .models import ZeroliteConfig
from .nearest import nearest_keys
from .source import read_source
from .values import as_number, hint, sentence, shorten, show
from .without_effect import leave_out, needs_stage_3

# "auto" without a default: resolve() derives the first two or raises; a missing type is an error there too, and the
# stage is chosen where the model and the device are known.
_AUTO_AT_RESOLVE = frozenset({TRAIN, MICRO})
_AUTO_KEPT = frozenset({"optimizer.type", "scheduler.type", "zero_optimization.stage"})

_MOST_HINTS = 20
"""Unknown keys for which the nearest known one is looked for: each search takes milliseconds."""

_LONGEST_HINT = 100
"""Characters: no known key is near a longer one."""

_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127

_PIN_MEMORY = "zero_optimization.cpu_offload_use_pin_memory"

_SURROGATE = re.compile("[\ud800-\udfff]")

_NOT_YET = "known to zerolite but not supported yet"


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
        raw = read_source(source)
        loader = _Loader(raw.values)
        config = loader.load(raw.values)
    except RecursionError:
        raise ConfigError([("", "expected a configuration, got values nested too deeply to be one")]) from None
    if raw.duplicates or loader.errors or config is None:
        raise ConfigError(
            raw.duplicates + [(loader.as_spelled(path), text) for path, text in loader.errors], raw.origin
        )
    return leave_out(config, loader.without_effect)


class _Loader:
    """Walks the raw values beside the models, and has pydantic validate what is known by name and not "auto"."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self.errors: list[tuple[str, str]] = []
        self.without_effect: list[tuple[str, str]] = []
        self.auto: set[str] = set()
        self.hints = _MOST_HINTS
        self.spelled: dict[str, str] = {}  # blocks by another name
        # By path: the field, and the object that holds its value under that name.
        self.leaves: dict[str, tuple[FieldInfo, dict[str, Any], str]] = {}
        zero = values.get("zero_optimization")
        stage = as_number(zero.get("stage", 0)) if isinstance(zero, Mapping) else 0
        known = isinstance(stage, int) and not isinstance(stage, bool) and 0 <= stage <= 3
        self.stage: int | None = stage if known else None  # None where it is open, or wrong

    def load(self, values: Mapping[Any, Any]) -> ZeroliteConfig | None:
        """The configuration. Where values are wrong, contradictions are looked for among the rest."""
        clean = self._block(ZeroliteConfig, values, "")
        config = None
        for _ in range(2):
            context = {"auto": self.auto, "invalid": {path for path, _ in self.errors}}
            try:
                config = ZeroliteConfig.model_validate(clean, context=context)
                break
            except ValidationError as error:
                for details in error.errors(include_url=False, include_input=False):
                    self._invalid(details, clean)
        return config

    def _invalid(self, details: Mapping[str, Any], clean: dict[str, Any]) -> None:
        """Note an error, and drop the value, so that its default takes its place; the block if there is none."""
        parts = [str(part) for part in details["loc"]]
        paths = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        cause = details.get("ctx", {}).get("error")
        path = next((path for path in paths if path in self.leaves), None)
        if isinstance(cause, ConfigError):
            self.errors += cause.errors
        elif path is None:
            example = "WarmupLR" if parts[0] == "scheduler" else "AdamW"
            said = f'expected a name, got nothing; add the key, such as "type": "{example}"'
            clean.pop(parts[0], None)
            if all(known != paths[0] for known, _ in self.errors):
                self.errors.append((paths[0], said))
        else:
            info, holder, name = self.leaves[path]
            if name not in holder:  # another error of the same value
                return
            self.errors.append((path, sentence(info, holder.pop(name), details)))
            if info.is_required():
                clean.pop(parts[0], None)

    def as_spelled(self, path: str) -> str:
        """The path with the user's own spelling of the block."""
        head, dot, rest = path.partition(".")
        return self.spelled.get(head, head) + dot + rest

    # ---------------------------------------------------------------- the walk

    def _block(self, model: type[BaseModel], values: Mapping[Any, Any], path: str) -> dict[str, Any]:
        clean: dict[str, Any] = {}
        for key, value in values.items():
            if not isinstance(key, str):
                self.errors.append((_join(path, key), _not_a_key(key)))
                continue
            name = key if path else ALIASES.get(key, key)
            if name != key and name in values:
                said = f"expected one spelling, got {name} and {key}, which are the same block; keep {name}"
                self.errors.append((key, said))
                continue
            if name != key:
                self.spelled[name] = key
            if name in model.model_fields:
                self._known(model.model_fields[name], name, value, _join(path, name), clean)
            else:
                self._not_in_model(path, key, value)
        return clean

    def _known(self, info: FieldInfo, name: str, value: Any, here: str, clean: dict[str, Any]) -> None:
        if isinstance(value, str) and value == "auto" and here not in _AUTO_KEPT:
            if here in _AUTO_AT_RESOLVE:
                self.auto.add(here)
            return
        inner = block_model(info.annotation)
        if inner is not None:
            if isinstance(value, Mapping):
                clean[name] = self._block(inner, value, here)
            elif value is not None and value is not False:
                self.errors.append((here, _not_an_object(here, value)))
            return
        if name == "params" and isinstance(value, Mapping):
            value = self._params(value, here)
        elif problems := list(_problems(value, here, _unusable_text)):
            self.errors += problems
            return
        elif value is None and hint(info).null and type(None) not in get_args(info.annotation):
            value = info.default
        clean[name] = value
        self.leaves[here] = (info, clean, name)

    def _params(self, values: Mapping[Any, Any], path: str) -> dict[str, Any]:
        """Constructor arguments are free; only what no constructor can want is refused here."""
        clean: dict[str, Any] = {}
        for key, value in values.items():
            here = _join(path, key)
            if not isinstance(key, str):
                self.errors.append((here, _not_a_key(key)))
            elif here in RENAMED:
                self._renamed(here, value)
            elif not (isinstance(value, str) and value == "auto"):
                self.errors += _problems(key, here, _unusable_text)
                self.errors += _problems(value, here, lambda leaf: _unusable_number(leaf) or _unusable_text(leaf))
                clean[key] = value
        return clean

    # ---------------------------------------------------------------- keys that no model has

    def _not_in_model(self, block: str, key: Any, value: Any) -> None:
        here = _join(block, key)
        entry = UNSUPPORTED.get(here) if isinstance(key, str) and "." not in key else None
        off = value is None or value is False or (isinstance(value, str) and value == "auto")
        if here in RENAMED:
            self._renamed(here, value)
        elif isinstance(entry, Key):
            self._unsupported(entry, value, here)
        elif entry is None and (here not in GROUPS or not isinstance(key, str) or "." in key):
            self.errors.append((here, self._unknown(block, _name(key))))
        elif isinstance(value, Mapping):
            self._unsupported_block(entry, value, here)
        elif not off:
            note = _not_yet(entry.note if entry else "", ())
            self.errors.append((here, f"{_not_an_object(here, value)}; {note}"))

    def _renamed(self, here: str, value: Any) -> None:
        off = value is None or (here in OFF_IF_FALSE and isinstance(value, (bool, int, float)) and not value)
        to_write = TO_WRITE.get(here, {}).get(value) if isinstance(value, bool) else None
        if here == _PIN_MEMORY and value is False:  # DeepSpeed has no use for it either
            self.without_effect.append((here, f"got false under a deprecated name; {to_write}"))
        elif not off:
            remedy = to_write or f"use {RENAMED[here]}"
            self.errors.append((here, f"expected today's name of the key, got a deprecated one; {remedy}"))

    def _unsupported(self, entry: Key, value: Any, here: str) -> None:
        if value is None or entry.free or _inert(entry.inert, value):
            return
        if entry.stage3 and self.stage is not None and self.stage < 3:
            self.without_effect.append((here, needs_stage_3(self.stage, value)))
        elif entry.ignored:
            self.without_effect.append((here, f"got {show(value)}, which changes nothing: {entry.ignored}"))
        else:
            self.errors.append((here, _not_yet(entry.note, entry.inert)))

    def _unsupported_block(self, entry: UnsupportedBlock | None, value: Mapping[Any, Any], here: str) -> None:
        """entry: None where each key is judged by itself."""
        if entry is None:
            for key, item in value.items():
                self._not_in_model(here, key, item)
        elif value or not entry.off_if_empty:
            self._names(entry, value, here, "")
            switch = value.get(entry.switch)
            on = not _inert(entry.off, switch) if entry.switch in value else entry.on_by_default
            if on:
                self.errors.append((here, _not_yet(entry.note, entry.off, entry.switch)))

    def _names(self, entry: UnsupportedBlock, value: Mapping[Any, Any], path: str, prefix: str) -> None:
        """Check only that every key exists, at every depth that the table describes."""
        for key, item in value.items():
            name = prefix + _name(key)
            holds_keys = any(other.startswith(f"{name}.") for other in entry.names)
            if isinstance(key, str) and "." not in key and holds_keys:
                self._names(entry, item if isinstance(item, Mapping) else {}, _join(path, key), f"{name}.")
            elif name not in entry.names or "." in key:
                self.errors.append((_join(path, key), self._unknown(path, _name(key))))

    def _unknown(self, block: str, key: str) -> str:
        said = f"expected a key of {block or 'the configuration'}, got an unknown one"
        supported, unsupported = _all_paths()
        if not block and "." in key and key in supported:
            nested = key.replace(".", '": {"')
            return f'{said}; write it nested: "{nested}": ...' + "}" * key.count(".")
        if block in ("optimizer", "scheduler"):
            return f"{said}; arguments of the constructor belong into {block}.params"
        if block and key in supported:
            return f"{said}; did you mean {key}? It belongs to the top level: move it out of {block}"
        self.hints -= 1
        search = self.hints >= 0 and len(key) < _LONGEST_HINT
        near = nearest_keys(block, key, supported, unsupported) if search else []
        return f"{said}; did you mean {' or '.join(near)}?" if near else f"{said}; remove it"


def block_model(annotation: Any) -> type[BaseModel] | None:
    """The model behind a field's annotation (`Block` or `Block | None`), if it is one."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def supported_paths(model: type[BaseModel] = ZeroliteConfig, prefix: str = "") -> Iterator[str]:
    """The full path of every supported key, blocks before what they hold."""
    for name, info in model.model_fields.items():
        yield _join(prefix, name)
        inner = block_model(info.annotation)
        if inner is not None:
            yield from supported_paths(inner, _join(prefix, name))


@lru_cache(maxsize=1)
def _all_paths() -> tuple[tuple[str, ...], tuple[str, ...]]:
    supported = tuple(supported_paths())
    return supported, tuple(path for path in unsupported_paths() if path not in supported)


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


def _inert(accepted: tuple[object, ...], value: object) -> bool:
    """True if a value is one of these. Booleans and numbers differ, unlike in Python."""
    if isinstance(value, str) and value == "auto":
        return bool(accepted)
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in accepted)


def _not_an_object(path: str, value: object) -> str:
    if path == "zero_optimization" and value is True:
        return 'expected an object, got true, an old spelling; write {"stage": 1}'
    return f"expected an object, got {show(value)}; write {{...}} or leave the key out"


def _not_a_key(key: object) -> str:
    return f"expected a string as the key, got {show(key)}; write it in quotes"


def _not_yet(note: str, accepted: tuple[object, ...], switch: str = "") -> str:
    said = f"{_NOT_YET} ({note})" if note else _NOT_YET
    values = " or ".join(dict.fromkeys(show(value).removeprefix("the string ") for value in accepted))
    only = f" (only {switch + ' = ' if switch else ''}{values} is accepted)" if accepted else ""
    return f"{said}; leave it out{only}"


def _unusable_number(leaf: Any) -> str | None:
    """JSON has no NaN and no infinity, and no constructor argument is meant to be one. Beyond float32, torch's updates
    fail with an exception of their own."""
    if isinstance(leaf, float) and not math.isfinite(leaf):
        return f"expected a finite number, got {show(leaf)}; write one"
    if isinstance(leaf, (int, float)) and abs(leaf) > _LARGEST_FLOAT32:
        return f"expected a number that float32 can hold, at most 3.4e38, got {show(leaf)}; write a smaller one"
    return None


def _unusable_text(leaf: Any) -> str | None:
    """No name and no path holds a zero character, and a lone surrogate is half a character."""
    if isinstance(leaf, str) and "\0" in leaf:
        return f"expected text without zero characters, got {show(leaf)}; remove them"
    if isinstance(leaf, str) and not leaf.isascii() and _SURROGATE.search(leaf):
        return f"expected text that UTF-8 can hold, got {show(leaf)}; write the character itself"
    return None


def _problems(value: Any, path: str, problem: Callable[[Any], str | None]) -> Iterator[tuple[str, str]]:
    """(path, sentence) of every leaf and every key of a JSON value with a problem."""
    said = None if isinstance(value, (Mapping, list, tuple)) else problem(value)
    if said is not None:
        yield path, said
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _problems(key, _join(path, key), problem)
            yield from _problems(item, _join(path, key), problem)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _problems(item, f"{path}[{index}]", problem)
