"""The README, the docs and the site work as shown: scripts and commands run, configs load, links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import COMMAND, ROOT, output_of, run_command
from zerolite.config import load_config
from zerolite.planning.command import main as plan

SITE = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*SITE, ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", ROOT / "examples" / "gpt" / "README.md"]
FIRST_STEPS = ROOT / "docs" / "getting-started.md"
# Left out: commands that need another machine, a network, another launcher, or a process to send a signal to; and plans
# of models that users download, or that take minutes (tests/planning has smaller ones of their kind).
RUNNABLE = re.compile(
    r"^\$ zerolite (plan --model transformer:|report|export|--nproc 2 train\.py|--dry-run) ?.*$", re.MULTILINE
)


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def json_objects(block: str) -> list[str]:
    """A block holds one object over several lines, or one object a line."""
    lines = block.splitlines()
    return lines if all(line.startswith("{") and line.endswith("}") for line in lines) else [block]


CONFIGS = [
    pytest.param(text, id=f"{page.stem}-{number}")
    for page in (ROOT / "README.md", FIRST_STEPS)
    for number, text in enumerate(text for block in code_blocks(page, "json") for text in json_objects(block))
]
PYTHON = [
    pytest.param(text, id=f"{page.stem}-{n}") for page in SITE for n, text in enumerate(code_blocks(page, "python"))
]


@pytest.mark.parametrize("text", CONFIGS)
def test_configs_load(text: str) -> None:
    load_config(text).resolve(world_size=8)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the commands name: the README's script, the planner's models and configs; and the
    checkpoint that the script of the first steps saves."""
    directory = tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT / "examples" / "plan", directory, dirs_exist_ok=True)
    (directory / "zero2.json").write_text(code_blocks(FIRST_STEPS, "json")[0])
    (directory / "train.py").write_text(code_blocks(ROOT / "README.md", "python")[0])
    save = 'engine.save_checkpoint("checkpoints")\nzerolite.destroy()'
    (directory / "first.py").write_text(code_blocks(FIRST_STEPS, "python")[0].replace("zerolite.destroy()", save))
    check_losses(output_of(*COMMAND, "--nproc", "2", "first.py", cwd=directory, OMP_NUM_THREADS="1"))
    return directory


def check_losses(output: str) -> None:
    losses = dict(line.split() for line in output.splitlines())
    assert list(losses) == ["0", "50", "100", "150"]
    assert float(losses["150"]) < float(losses["0"]) / 2


def test_first_script_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, alone; two ranks that the command starts run it for the commands below."""
    exec(compile(code_blocks(FIRST_STEPS, "python")[0], "first.py", "exec"), {"__name__": "__main__"})
    check_losses(capsys.readouterr().out)


def test_links_lead_somewhere() -> None:
    missing = []
    for page in PAGES:
        targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        missing += [(page.name, t) for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert missing == []


@pytest.mark.parametrize("text", PYTHON)
def test_code_blocks_are_python(text: str) -> None:
    ast.parse(text)


@pytest.mark.slow
def test_site_has_no_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (pip install 'zerolite[docs]')")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed (pip install 'zerolite[docs]')")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    output_of(*build, cwd=ROOT, timeout=600)
    assert (tmp_path / "site" / "search" / "search_index.json").exists()
    for name in ("zerolite.engine.initialize.initialize", "zerolite.engine.engine.Engine.backward"):
        assert f'id="{name}"' in (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")


def commands() -> list[str]:
    """Return the commands of all consoles that run on one machine, each once."""
    blocks = [block.replace("\\\n", " ") for page in SITE for block in code_blocks(page, "console")]
    lines = [match[0][2:].partition(" && ")[0] for block in blocks for match in RUNNABLE.finditer(block)]
    return list(dict.fromkeys(shlex.join(shlex.split(line, comments=True)) for line in lines))


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_commands_run(
    command: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan is made in this process, and ends with 1 where the job does not fit, which is what some examples show."""
    _, name, *arguments = shlex.split(command)
    if name == "plan":
        monkeypatch.chdir(home)
        monkeypatch.setattr(sys, "path", list(sys.path))
        assert plan(arguments) in (0, 1)
        del sys.modules["transformer"]
        assert "Traceback" not in capsys.readouterr().err
    else:
        result = run_command(name, *arguments, cwd=home)
        assert result.returncode == 0, result.stderr
        assert "Traceback" not in result.stderr
