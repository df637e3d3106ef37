"""Readers of the files that monitors write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_jsonl(folder: str) -> list[dict[str, Any]]:
    """The objects in the folder's file; nothing if there is none."""
    path = Path(folder, "job", "events.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def events_of(engine: Any, kind: type) -> list[str]:
    """The events of an engine's steps that observers of class ``kind`` are told of."""
    observers = vars(engine._pipeline._observers)
    return sorted(
        event
        for event, listeners in observers.items()
        if any(isinstance(getattr(listener, "__self__", None), kind) for listener in listeners)
    )
