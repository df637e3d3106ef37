"""`load_config`: turn any source into a frozen, checked configuration, or raise one error with all mistakes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from .batch import MICRO, TRAIN
from .contradictions import find_contradictions
from .errors import ConfigError
from .known_keys import OTHER_NAMES, RENAMED, UNSUPPORTED, Key
from .models import ZeroliteConfig
from .source import read_source
from .values import Block, as_number, block_model, describe_error, join_path, show
from .without_effect import drop_ineffective, needs_stage_3

_MOST_HINTS = 20
"""Number of unknown keys that get a suggestion: each search takes milliseconds."""

_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127

_PARAMS = ("optimizer.params", "scheduler.params")


def load_config(source: Mapping[str, object] | str | os.PathLike[str] | ZeroliteConfig) -> ZeroliteConfig:
    """Load a configuration.

    Args:
        source: a dict, the path of a file, JSON or hjson text, or a loaded configuration, which is returned as it is.

    Raises:
        ConfigError: the configuration is wrong; `.errors` has all errors, as (JSON path, sentence).
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
            raw.duplicates + [(loader.as_written(path), loader.as_written(text)) for path, text in loader.errors],
            raw.origin,
        )
    config = drop_ineffective(config, loader.without_effect)
    config.note_without_effect([(loader.as_written(path), text) for path, text in config.without_effect])
    return config


class _Loader:
    """Checks of a config: the keys that pydantic cannot judge, then the rest by pydantic, in plain sentences."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self.errors: list[tuple[str, str]] = []
        self.without_effect: list[tuple[str, str]] = []
        self.hints = _MOST_HINTS
        self.written: dict[str, str] = {}  # the other name that the user has written, by the first one
        zero = values.get("zero_optimization")
        stage = as_number(zero.get("stage", 0)) if isinstance(zero, Mapping) else 0
        known = isinstance(stage, int) and not isinstance(stage, bool) and 0 <= stage <= 3
        self.stage: int | None = stage if known else None  # None if it is wrong

    def load(self, values: Mapping[Any, Any]) -> ZeroliteConfig | None:
        """Return the configuration, or None if it has no usable one, and collect all errors."""
        clean = self._check_values(values, "")
        # The second round runs without the wrong values, which have their defaults then. So contradictions among the
        # other values are found too.
        for _ in range(2):
            try:
                config = ZeroliteConfig.model_validate(clean)
            except ValidationError as error:
                for details in error.errors(include_url=False, include_input=False):
                    self._add_pydantic_error(details, clean)
                continue
            config.note_auto(key for key in (TRAIN, MICRO) if _is_auto(clean.get(key)))
            wrong = {path for path, _ in self.errors}
            for paths, contradiction in find_contradictions(config):
                if not wrong & set(paths):
                    self.errors.append((paths[0], contradiction))
            return config
        return None

    def as_written(self, text: str) -> str:
        """Return a path or a sentence with the names that the user has written, where keys have two."""
        for name, other in self.written.items():
            text = re.sub(rf'(?<![\w."]){re.escape(name)}(?![\w"])', other, text)  # not in quotes: a value
        return text

    # ---------------------------------------------------------------- the walk over the raw values

    def _check_values(self, values: Mapping[object, object], path: str) -> dict[str, object]:
        """Check unsupported keys and unusable values of a block, and return the rest for pydantic."""
        clean: dict[str, Any] = {}
        for name, value in self._without_other_names(values, path).items():
            key_path = join_path(path, name)
            known = isinstance(name, str) and "." not in name
            if not isinstance(name, str):
                self.errors.append((key_path, f"expected a string as the key, got {show(name)}; write it in quotes"))
            elif name.encode("utf-8", "ignore").decode() != name:  # pydantic takes no half of a character
                self.errors.append((key_path, self._describe_unknown(path, name)))
            elif known and key_path in RENAMED:
                self._check_renamed(key_path, value)
            elif known and key_path in UNSUPPORTED:
                is_off = not values.get("enabled", supported_keys().get(join_path(path, "enabled"), True))
                self._check_unsupported(UNSUPPORTED[key_path], value, key_path, is_off)
            elif isinstance(value, Mapping):
                clean[name] = self._check_values(value, key_path)
            elif key_path.startswith(_PARAMS) and (problems := list(_unusable_numbers(value, key_path))):
                self.errors += problems
            elif not (path in _PARAMS and _is_auto(value)):  # the constructor's default stands
                clean[name] = value
        return clean

    def _without_other_names(self, values: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        """Return the values of a block by the first names of their keys."""
        result = dict(values)
        for other, name in OTHER_NAMES.items():
            block, _, other_key = other.rpartition(".")
            if block != path or other_key not in result:
                continue
            value, key = result.pop(other_key), name.rpartition(".")[2]
            first = result.get(key)
            if as_number(value) in (None, 0, -1, "auto"):
                continue
            if first is None or _is_auto(first) or as_number(first) == as_number(value):
                result[key], self.written[name] = value, other
            else:
                sentence = f"expected the value of its other name, {name} = {show(first)}, got {show(value)}; "
                self.errors.append((other, f"{sentence}leave one of the two out"))
        return result

    def _check_renamed(self, key_path: str, value: object) -> None:
        """Accept a deprecated key only with the default of today's key, or null."""
        today = RENAMED[key_path]
        if value is not None and not _is_one_of((supported_keys().get(today, False),), value):
            self.errors.append((key_path, f"expected today's name of the key, got a deprecated one; use {today}"))

    def _check_unsupported(self, entry: Key, value: object, key_path: str, is_off: bool) -> None:
        """Check a key of UNSUPPORTED. is_off: its block is switched off."""
        asked = value
        if entry.switch and isinstance(value, Mapping):
            asked = value.get(entry.switch)
        elif entry.switch and value is False:
            return
        if asked is None or entry.free or _is_one_of(entry.accepted, asked):
            return
        if entry.stage3 and self.stage is not None and self.stage < 3:
            self.without_effect.append((key_path, needs_stage_3(self.stage, value)))
        elif entry.ignored and is_off:
            return
        elif entry.ignored:
            self.without_effect.append((key_path, f"got {show(value)}, which changes nothing: {entry.ignored}"))
        else:
            reason = f" ({entry.reason})" if entry.reason else ""
            switch = f"{entry.switch} = " if entry.switch else ""
            values = " or ".join(dict.fromkeys(show(value).removeprefix("the string ") for value in entry.accepted))
            sentence = (
                f"known to zerolite but not supported yet{reason}; leave it out (only {switch}{values} is accepted)"
            )
            self.errors.append((key_path, sentence))

    # ---------------------------------------------------------------- the errors of pydantic

    def _add_pydantic_error(self, details: Mapping[str, Any], clean: dict[str, Any]) -> None:
        """Add an error of pydantic, and drop the wrong value from ``clean``, so that its default takes its place.

        A missing required key has no default; its block is dropped.
        """
        model: type[Block] = ZeroliteConfig
        holder, block, path = clean, "", ""
        for name in details["loc"]:
            info, block, path = model.model_fields.get(name), path, join_path(path, name)
            inner = block_model(info) if info else None
            if inner is None or not isinstance(holder.get(name), dict):
                break
            model, holder = inner, holder[name]
        value = holder.pop(name, None)
        if info is None:
            sentence = self._describe_unknown(block, name)
        elif inner is not None:
            sentence = _not_an_object(path, value)
        elif details["type"] == "missing":
            clean.pop(block)
            sentence = f'expected a name, got nothing; add the key, such as "type": "{_EXAMPLES[block]}"'
        else:
            sentence = describe_error(info, value, details)
        # One error per value: none if _check_values has reported the value, or one inside of it, already.
        if not any(known == path or known.startswith(f"{path}.") for known, _ in self.errors):
            self.errors.append((path, sentence))

    def _describe_unknown(self, block: str, key: str) -> str:
        sentence, supported = f"expected a key of {block or 'the configuration'}, got an unknown one", supported_keys()
        if block in ("optimizer", "scheduler"):
            return f"{sentence}; arguments of the constructor belong into {block}.params"
        if block and key in supported:
            return f"{sentence}; did you mean {key}? It belongs to the top level: move it out of {block}"
        self.hints -= 1
        near = nearest_keys(block, key) if self.hints >= 0 else []
        return f"{sentence}; did you mean {' or '.join(near)}?" if near else f"{sentence}; remove it"


def nearest_keys(block: str, key: str) -> list[str]:
    """Return the full paths of the known keys closest to `key`: one that is very close in `block` ("" is the top
    level), or else up to three of one name in any block, the supported ones first."""
    known = dict.fromkeys((*supported_keys(), *OTHER_NAMES, *UNSUPPORTED))
    in_block = [path for path in known if path.rpartition(".")[0] == block]
    for paths, similarity in ((in_block, 0.8), (list(known), 0.6)):
        names = [path.rpartition(".")[2] for path in paths]
        if near := get_close_matches(key.lower(), names, 1, similarity):
            return [path for path, name in zip(paths, names, strict=True) if name == near[0]][:3]
    return []


@lru_cache(maxsize=1)
def supported_keys() -> dict[str, Any]:
    """Return the default of every supported key by its full path, each block before its keys."""
    return dict(_defaults(ZeroliteConfig, ""))


def _defaults(model: type[Block], prefix: str) -> Iterator[tuple[str, object]]:
    for name, info in model.model_fields.items():
        yield join_path(prefix, name), info.get_default(call_default_factory=True)
        inner = block_model(info)
        if inner is not None:
            yield from _defaults(inner, join_path(prefix, name))


_EXAMPLES = {"optimizer": "AdamW", "scheduler": "WarmupLR"}


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def _is_one_of(accepted: tuple[object, ...], value: object) -> bool:
    """Return True if a value is one of these, or "auto". true and 1 differ, unlike in Python."""
    return _is_auto(value) or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in accepted
    )


def _not_an_object(path: str, value: object) -> str:
    if path == "zero_optimization" and value is True:
        return 'expected an object, got true, an old spelling; write {"stage": 1}'
    return f"expected an object, got {show(value)}; write {{...}} or leave the key out"


def _unusable_numbers(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield (path, sentence) of every number that no constructor argument can be: infinite, NaN, or beyond float32.

    torch's updates would fail later with an unclear error.
    """
    if isinstance(value, (list, tuple)):
        for index, element in enumerate(value):
            yield from _unusable_numbers(element, f"{path}[{index}]")
    elif isinstance(value, Mapping):
        for key, element in value.items():
            yield from _unusable_numbers(element, join_path(path, key))
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"expected a finite number, got {show(value)}; write one"
    elif isinstance(value, (int, float)) and abs(value) > _LARGEST_FLOAT32:
        yield path, f"expected a number that float32 can hold, at most 3.4e38, got {show(value)}; write a smaller one"
