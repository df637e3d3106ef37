"""Reader of a configuration from a dict, path, JSON text or hjson text, which finds duplicate keys."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import ConfigError
from .values import join_path, shorten, show

_PATH_SUFFIXES = (".json", ".hjson", ".json5", ".jsonc", ".yaml", ".yml", ".txt")


class RawConfig(NamedTuple):
    """Contents of a source.

    Attributes:
        values: the values; for a duplicate key the last one.
        duplicates: (path, sentence) of each duplicate key.
        origin: path of the file, or None.
    """

    values: dict[str, Any]
    duplicates: list[tuple[str, str]]
    origin: str | None


class _Pairs(list[tuple[str, Any]]):
    """Pairs of one object in the text, with duplicates, which a dict would drop."""


def read_source(source: Mapping[str, object] | str | os.PathLike[str]) -> RawConfig:
    """Read a configuration.

    Raises:
        ConfigError: the file cannot be read, the text is neither JSON nor hjson, or it is not an object.
    """
    if isinstance(source, Mapping):
        return RawConfig(dict(source), [], None)
    if isinstance(source, str) and _is_text(source):
        return _parse(source, None)
    if isinstance(source, (str, os.PathLike)):
        return _parse(_read_file(os.fspath(source)), os.fsdecode(source))
    raise ConfigError([("", f"expected a dict, a path, or JSON or hjson text, got {type(source).__name__}; pass one")])


def _is_text(source: str) -> bool:
    """Return True if the string is a configuration itself, not the path of one."""
    stripped = source.lstrip("\ufeff \t\r\n")
    if not stripped or stripped[0] in "{[" or "\n" in stripped or "\0" in stripped:
        return True
    if stripped.lower().endswith(_PATH_SUFFIXES) or os.path.exists(source):
        return False
    return ":" in stripped


def _read_file(path: str | bytes) -> str:
    name = shorten(os.fsdecode(path), 1000)
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        sentence = (
            f'expected a configuration file in UTF-8 at "{name}" (the working folder is "{os.getcwd()}"), got: '
            f"{reason}; check the path"
        )
        raise ConfigError([("", sentence)]) from None


def _parse(text: str, origin: str | None) -> RawConfig:
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise ConfigError([("", "expected an object, got empty text; write at least {}")], origin)
    duplicates: list[tuple[str, str]] = []
    values = _pairs_to_dicts(_parse_json_or_hjson(text, origin), "", duplicates)
    if not isinstance(values, dict):
        raise ConfigError([("", f"expected an object such as {{...}}, got {show(values)}")], origin)
    return RawConfig(values, duplicates, origin)


def _parse_json_or_hjson(text: str, origin: str | None) -> object:
    try:
        return json.loads(text, object_pairs_hook=_Pairs)
    except ValueError as error:
        json_problem = _syntax_problem(error)
    import hjson

    try:
        return hjson.loads(text, object_pairs_hook=_Pairs)
    except IndexError:  # hjson reads past the end of text that ends inside a token
        hjson_problem = "the text ends within a comment, or within a text that begins with '''"
    except ValueError as error:
        hjson_problem = _syntax_problem(error)
    sentence = f"expected JSON or hjson; as JSON: {json_problem}; as hjson: {hjson_problem}"
    raise ConfigError([("", sentence)], origin) from None


def _syntax_problem(error: ValueError) -> str:
    line, column = getattr(error, "lineno", None), getattr(error, "colno", None)
    message = shorten(str(getattr(error, "msg", error)), 200)
    return message if line is None else f"{message} at line {line} column {column}"


def _pairs_to_dicts(value: object, path: str, duplicates: list[tuple[str, str]]) -> object:
    """Turn pairs into dicts, and add an error to ``duplicates`` for every key that an object has more than once."""
    if isinstance(value, _Pairs):
        for key, count in Counter(key for key, _ in value).items():
            if count > 1:
                duplicates.append(
                    (join_path(path, key), f"expected the key once, got it {count} times; keep one of them")
                )
        return {key: _pairs_to_dicts(element, join_path(path, key), duplicates) for key, element in value}
    if isinstance(value, list):
        return [_pairs_to_dicts(element, f"{path}[{index}]", duplicates) for index, element in enumerate(value)]
    return value
