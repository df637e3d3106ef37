"""The words of docstrings and docs: rules of CONTRIBUTING.md that can be counted."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = [path for folder in ("zerolite", "op_builder") for path in (ROOT / folder).rglob("*.py")]
TESTS = list((ROOT / "tests").rglob("*.py"))
DOCS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
CLAUSE = re.compile(r"(What|Of|Whether|Those|Whoever|Where|Which|Whose)\b")
PERSON = re.compile(r"\b(whoever|somebody|nobody|everybody)\b", re.IGNORECASE)
SECTIONS = re.compile(r"^ *(Args|Attributes|Raises):\n", re.MULTILINE)


@functools.cache
def docstrings() -> list[tuple[str, list[str], str]]:
    """Every docstring, with its place and the names of the arguments or fields that it may describe."""
    found = []
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
                text = ast.get_docstring(node)
                place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                if text:
                    found.append((place, _names(node), text))
    return found


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]]
    if isinstance(node, ast.ClassDef):
        init = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        fields = [
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
        return fields + [name for item in init for name in _names(item)]
    return []


def test_docstrings_say_what_a_thing_is_or_does() -> None:
    assert [place for place, _, text in docstrings() if CLAUSE.match(text)] == []
    clause = re.compile(rf'(\A|:\n) *"""{CLAUSE.pattern}')
    assert [path.name for path in TESTS if clause.search(path.read_text(encoding="utf-8"))] == []


def test_arguments_stand_one_per_line() -> None:
    """Two arguments described in running text are a section that is missing."""
    running = []
    for place, names, text in docstrings():
        prose = re.split(SECTIONS, text)[0]
        described = [name for name in names if re.search(rf"(?:^|[.;)] |\n){name}: \w", prose)]
        if len(described) > 1:
            running.append(f"{place}: {described}")
    assert running == []


def test_subjects_are_things_of_the_code() -> None:
    texts = [(path, path.read_text(encoding="utf-8")) for path in [*CODE, *DOCS]]
    assert [str(path.relative_to(ROOT)) for path, text in texts if PERSON.search(text)] == []
