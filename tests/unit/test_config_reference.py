"""docs/configuration.md is what the models say."""

from __future__ import annotations

from pathlib import Path

from zerolite.config import reference
from zerolite.config.known_keys import RENAMED, UNSUPPORTED, Block
from zerolite.config.load import supported_paths
from zerolite.config.models import ZeroliteConfig

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
        for name in entry.names if isinstance(entry, Block) else ():
            assert f"`{name}`" in text, path
    for path in ("fp16", "zero_optimization", "zero_optimization.leaf_module"):
        assert f"# `{path}`\n" in text and f"](#{path.replace('.', '')})" in text
    for old in RENAMED:
        assert f"| `{old}` |" in text


def test_every_row_is_complete() -> None:
    for name in supported_paths():
        model: type = ZeroliteConfig
        *blocks, last = name.split(".")
        for block in blocks:
            inner = reference.block_model(model.model_fields[block].annotation)
            assert inner is not None
            model = inner
        said = (
            reference.descriptions(model).get(last)
            or reference.block_model(model.model_fields[last].annotation).__doc__
        )
        assert said.rstrip().endswith((".", ")")), name
    rows = [line for line in reference.render().splitlines() if line.startswith("| `")]
    assert len({line.replace("\\|", "").count("|") for line in rows if line.count(" | ") == 3}) == 1
    assert not any("||" in line.replace(" ", "") and line.count(" | ") == 3 and "[object]" not in line for line in rows)
