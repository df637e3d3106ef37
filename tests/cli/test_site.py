"""The site builds without a broken link, and the commands and code blocks of the pages run."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import helpers
from tests.cli.helpers import ROOT, run_command
from tests.cli.test_documentation import code_blocks

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON = [
    pytest.param(text, id=f"{page.stem}-{n}") for page in PAGES for n, text in enumerate(code_blocks(page, "python"))
]
# Left out: commands that need another machine, a network, another launcher, or a process to send a signal to.
RUNNABLE = re.compile(r"^\$ zerolite (plan|report|inspect|export|--nproc 2 train\.py|--dry-run) ?.*$", re.MULTILINE)


def commands() -> list[str]:
    """Return the commands of all consoles that run on one machine, each once."""
    blocks = [block.replace("\\\n", " ") for page in PAGES for block in code_blocks(page, "console")]
    lines = [match[0][2:].partition(" && ")[0] for block in blocks for match in RUNNABLE.finditer(block)]
    return list(dict.fromkeys(shlex.join(shlex.split(line, comments=True)) for line in lines))


@pytest.mark.parametrize("text", PYTHON)
def test_code_blocks_are_python(text: str) -> None:
    ast.parse(text)


@pytest.mark.slow
def test_site_has_no_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (pip install 'zerolite[docs]')")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed (pip install 'zerolite[docs]')")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "site" / "search" / "search_index.json").exists()
    for name in ("zerolite.planning.initialize.initialize", "zerolite.engine.engine.Engine.backward"):
        assert f'id="{name}"' in (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the commands name: the README's script, the planner's models and configs, a checkpoint."""
    directory = tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT / "examples" / "plan", directory, dirs_exist_ok=True)
    (directory / "zero2.json").write_text(code_blocks(ROOT / "docs" / "getting-started.md", "json")[0])
    script = code_blocks(ROOT / "README.md", "python")[0]
    (directory / "train.py").write_text(script)
    (directory / "save.py").write_text(script + 'engine.save_checkpoint("checkpoints")\n')
    result = run_command("--nproc", "2", "save.py", cwd=directory, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_commands_run(command: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan ends with 1 where the job does not fit, which is what some examples show."""
    monkeypatch.setattr(helpers, "TIMEOUT_S", 900)  # four plans of 7.5 billion parameters on a busy machine
    result = run_command(*shlex.split(command)[1:], cwd=home)
    assert result.returncode in ((0, 1) if " plan " in command else (0,)), result.stderr
    assert "Traceback" not in result.stderr
