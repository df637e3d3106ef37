"""docs/configuration.md is what the models say."""

from __future__ import annotations

from pathlib import Path

from zerolite.config import reference
from zerolite.config.known_keys import RENAMED, UNSUPPORTED
from zerolite.config.load import supported_keys

PAGE = (Path(__file__).resolve().parents[2] / reference.FILE).read_text(encoding="utf-8")


def test_the_file_is_up_to_date() -> None:
    assert reference.render(PAGE) == PAGE, "run `make docs` (python -m zerolite.config.reference)"


def test_every_key_is_in_it() -> None:
    for path in (*supported_keys(), *UNSUPPORTED, *RENAMED):
        assert f"\n| `{path}` | " in PAGE, path
    for path in ("fp16", "zero_optimization", "zero_optimization.leaf_module"):
        assert f"# `{path}`\n" in PAGE and f"](#{path.replace('.', '')})" in PAGE


def test_every_row_is_complete() -> None:
    """Each key and block has a sentence that says what it does."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    table = [line.replace("\\|", "") for line in rows if line.count(" | ") == 3]
    assert len(table) >= len(list(supported_keys())) and {line.count("|") for line in table} == {5}
    assert [line for line in table if not line.rstrip(" |").endswith((".", ")"))] == []
    assert [line for line in table if "||" in line.replace(" ", "") and "[object]" not in line] == []
