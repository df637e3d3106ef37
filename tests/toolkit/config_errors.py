"""Helpers for tests of configurations."""

from __future__ import annotations

from typing import Any

import pytest

from zerolite.config import ConfigError, load_config


def errors_of(source: Any) -> dict[str, str]:
    """Load a configuration that must be refused, and return the sentence of each key."""
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return dict(caught.value.errors)


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return ``{"a": {"b": value}}`` for ``"a.b"``, with what else the block needs."""
    *blocks, key = path.split(".")
    source: dict[str, Any] = {key: value}
    if blocks and blocks[-1].startswith("offload_") and key != "device":
        source["device"] = "none"
    for block in reversed(blocks):
        source = {block: source}
    if blocks and blocks[0] in ("optimizer", "scheduler"):
        source[blocks[0]].setdefault("type", "Adam")
    return source
