"""Hooks of mkdocs: pages from outside docs/, and links that leave the site."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the site that lie at the top of the repository, so that its hosts show them."""

LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of OUTSIDE."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite relative links. A link to a file that is no page becomes its text (tests check that such files exist)."""
    folder = ROOT if page.file.src_uri in OUTSIDE.values() else ROOT / "docs"

    def rewrite(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = os.path.relpath(os.path.join(folder, target), ROOT)
        inside = OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        return f"[{text}]({inside}{anchor})" if inside else text

    return LINK.sub(rewrite, markdown)
