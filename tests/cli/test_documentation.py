"""The README and docs work as shown: scripts run, configs load, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.helpers import ROOT, run_command
from zerolite.config import load_config

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "examples" / "README.md", ROOT / "examples" / "gpt" / "README.md"]


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def json_objects(block: str) -> list[str]:
    """A block holds one object over several lines, or one object a line."""
    lines = block.splitlines()
    return lines if all(line.startswith("{") and line.endswith("}") for line in lines) else [block]


CONFIGS = [
    pytest.param(text, id=f"{page.stem}-{number}")
    for page in (ROOT / "README.md", ROOT / "docs" / "getting-started.md")
    for number, text in enumerate(text for block in code_blocks(page, "json") for text in json_objects(block))
]


@pytest.mark.parametrize("text", CONFIGS)
def test_configs_load(text: str) -> None:
    load_config(text).resolve(world_size=8)


def test_there_are_configs() -> None:
    assert len(CONFIGS) >= 5


def test_first_script_trains(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(code_blocks(ROOT / "docs" / "getting-started.md", "python")[0])
    result = run_command("--nproc", "2", "train.py", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    losses = dict(line.split() for line in result.stdout.splitlines())
    assert list(losses) == ["0", "50", "100", "150"]
    assert float(losses["150"]) < float(losses["0"]) / 2


def test_links_lead_somewhere() -> None:
    missing = []
    for page in PAGES:
        targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        missing += [(page.name, t) for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert missing == []
