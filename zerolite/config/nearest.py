"""Suggestions of known keys for an unknown key."""

from __future__ import annotations

from collections.abc import Iterable

_SHARED_ENOUGH = 0.6
_OTHER_BLOCK = 0.1
_UNSUPPORTED = 0.05


def nearest_keys(block: str, key: str, supported: Iterable[str], unsupported: Iterable[str]) -> list[str]:
    """Full paths of the known keys closest to `key` in `block` ("" is the top level), at most three, best first.

    Keys of the same block are preferred to those of another one, supported keys to unsupported ones. More than one is
    returned only where they are equally close.
    """
    from difflib import SequenceMatcher

    matcher = SequenceMatcher(b=key.lower(), autojunk=False)
    scored: list[tuple[float, str]] = []
    ratios: dict[str, float] = {}
    for penalty, paths in ((0.0, supported), (_UNSUPPORTED, unsupported)):
        for path in paths:
            home, _, name = path.rpartition(".")
            away = 0.0 if home == block else _OTHER_BLOCK
            if name not in ratios:
                matcher.set_seq1(name.lower())
                near = matcher.real_quick_ratio() >= _SHARED_ENOUGH and matcher.quick_ratio() >= _SHARED_ENOUGH
                ratios[name] = matcher.ratio() if near else 0.0
            score = ratios[name] - away - penalty
            if score >= _SHARED_ENOUGH:
                scored.append((score, path))
    best = max((score for score, _ in scored), default=0.0)
    return [path for score, path in scored if score > best - 1e-9][:3]
