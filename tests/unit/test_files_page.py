"""docs/files.md is what the module docstrings say."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_up_to_date() -> None:
    rendered = runpy.run_path(str(DOCS / "files.py"))["render"]()
    assert (DOCS / "files.md").read_text(encoding="utf-8") == rendered, "run `make docs` (python docs/files.py)"
