"""docs/configuration.md is what the models say."""

from __future__ import annotations

from pathlib import Path

from zerolite.config import reference
from zerolite.config.known_keys import RENAMED, UNSUPPORTED, UnsupportedBlock
from zerolite.config.load import supported_paths

ROOT = Path(__file__).resolve().parents[2]


def test_the_file_is_up_to_date() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == reference.render(), "run `make docs` (python -m zerolite.config.reference)"


def test_every_key_is_in_it() -> None:
    text = reference.render()
    for path in supported_paths():
        assert f"\n| `{path}` | " in text, path
    for path, entry in UNSUPPORTED.items():
        assert f"\n| `{path}` | " in text, path
        for name in entry.names if isinstance(entry, UnsupportedBlock) else ():
            assert f"`{name}`" in text, path
    for path in ("fp16", "zero_optimization", "zero_optimization.leaf_module"):
        assert f"# `{path}`\n" in text and f"](#{path.replace('.', '')})" in text
    for old in RENAMED:
        assert f"| `{old}` |" in text


def test_every_row_is_complete() -> None:
    """Each key and block has a sentence that says what it does."""
    rows = [line for line in reference.render().splitlines() if line.startswith("| `")]
    table = [line.replace("\\|", "") for line in rows if line.count(" | ") == 3]
    assert len(table) >= len(list(supported_paths())) and {line.count("|") for line in table} == {5}
    assert [line for line in table if not line.rstrip(" |").endswith((".", ")"))] == []
    assert [line for line in table if "||" in line.replace(" ", "") and "[object]" not in line] == []
