"""docs/files.md is what the module docstrings say, docs/configuration.md what the models of the config say, and the
pages about the code name files and functions that exist."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

from zerolite.config.known_keys import OTHER_NAMES, RENAMED, UNSUPPORTED
from zerolite.config.load import supported_keys

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONFIGURATION = (DOCS / "configuration.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    rendered = runpy.run_path(str(DOCS / "files.py"))["render"]()
    assert (DOCS / "files.md").read_text(encoding="utf-8") == rendered, "run `make docs` (python docs/files.py)"


def test_the_pages_name_what_exists() -> None:
    """Every path in these pages is a file, and every name beside a path in a walk is in it."""
    missing, defined = [], ""
    for page in ("../CONTRIBUTING.md", "how-zero-works.md", "architecture.md", "internals.md"):
        for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
            for path in re.findall(r"(?<![\w./(])(?:\w+/)+\w+\.(?:py|h)\b", line):
                file = next((base / path for base in (ROOT / "zerolite", ROOT) if (base / path).is_file()), None)
                missing += [] if file else [path]
                defined = file.read_text(encoding="utf-8") if file else ""
            beside = re.search(r"\.py +(\w[\w.]*(?:, \.?\w+)*)|^[ │├└]+([A-Z]\w+\.\w+)$", line)
            for name in re.findall(r"\w+", beside[1] or beside[2]) if beside else ():
                if not re.search(rf"(?:def|class) {name}\b|^{name}\b", defined, re.MULTILINE):
                    missing.append(f"{name}: {line.strip()}")
    assert missing == []


def attributes(node: ast.ClassDef) -> Iterator[str]:
    """Names that a class defines: methods, fields, and what its methods assign to ``self``."""
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.ClassDef):
            yield part.name
        elif isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
            yield part.id if isinstance(part, ast.Name) else part.attr


PLAIN = ("ABC", "Any", "Enum", "Exception", "Generic", "NamedTuple", "Protocol", "T")  # bases without methods


def test_every_method_that_texts_name_exists() -> None:
    """``Class.method`` in the pages and in docstrings, for our own classes."""
    defined: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    code = [*(ROOT / "zerolite").rglob("*.py"), *(ROOT / "op_builder").glob("*.py")]
    for path in code:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, set()).update(attributes(node))
                bases.setdefault(node.name, []).extend(re.findall(r"\w+", " ".join(map(ast.unparse, node.bases))))
    named, missing = 0, []
    for path in [*code, *DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for name, method in re.findall(r"`~?(?:[\w.]*\.)?([A-Z]\w+)\.(\w+)", path.read_text(encoding="utf-8")):
            family, queue = set[str](), [name] if name in defined else []
            while queue:
                queue += [base for base in bases[queue[0]] if base in defined and base not in family]
                family.add(queue.pop(0))
            named += bool(family)
            inherits = any(base not in defined and base not in PLAIN for other in family for base in bases[other])
            if family and not inherits and not any(method in defined[other] for other in family):
                missing.append(f"{path.relative_to(ROOT)}: {name}.{method}")
    assert missing == [] and named > 40


def test_the_page_of_the_config_is_up_to_date() -> None:
    rendered = runpy.run_path(str(DOCS / "configuration.py"))["render"](CONFIGURATION)
    assert rendered == CONFIGURATION, "run `make docs` (python docs/configuration.py)"


def test_every_key_is_in_it() -> None:
    for path in (*supported_keys(), *UNSUPPORTED, *RENAMED, *OTHER_NAMES):
        assert f"\n| `{path}` | " in CONFIGURATION, path
    for path in ("fp16", "zero_optimization", "zero_optimization.leaf_module"):
        assert f"# `{path}`\n" in CONFIGURATION and f"](#{path.replace('.', '')})" in CONFIGURATION


def test_every_row_is_complete() -> None:
    """Each key and block has a sentence that says what it does."""
    rows = [line for line in CONFIGURATION.splitlines() if line.startswith("| `")]
    table = [line.replace("\\|", "") for line in rows if line.count(" | ") == 3]
    assert len(table) >= len(list(supported_keys())) and {line.count("|") for line in table} == {5}
    assert [line for line in table if not line.rstrip(" |").endswith((".", ")"))] == []
    assert [line for line in table if "||" in line.replace(" ", "") and "[object]" not in line] == []
