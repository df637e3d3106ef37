"""Generator of the tables in docs/configuration.md: `python docs/configuration.py`."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from zerolite.config.known_keys import OTHER_NAMES, RENAMED, UNSUPPORTED
from zerolite.config.models import ZeroliteConfig
from zerolite.config.values import Block, block_model, describe_type, join_path

FILE = Path(__file__).with_suffix(".md")


def render(text: str) -> str:
    """Return the page with new text between each `<!-- generated: NAME -->` and its `<!-- end -->`."""
    others = [f"| `{other}` | `{name}` |" for other, name in OTHER_NAMES.items()]
    renamed = [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]
    parts = {
        "keys": "\n".join([_table("", ZeroliteConfig), *_blocks("", ZeroliteConfig)]),
        "unsupported": _rows("key | accepted | note", _unsupported_rows()),
        "deprecated": _rows("key | today", renamed),
        "others": _rows("another name | of", others),
    }
    for name, part in parts.items():
        begin, end = f"<!-- generated: {name} -->", "<!-- end -->"
        before, found, rest = text.partition(begin)
        assert found, f"{FILE.name} has no {begin}"
        text = f"{before}{begin}\n\n{part}\n{end}{rest.partition(end)[2]}"
    return text


def _blocks(prefix: str, model: type[Block]) -> Iterator[str]:
    """Yield a section for each block in the model, followed by those of the blocks in it."""
    for name, info in model.model_fields.items():
        inner = block_model(info)
        if inner is not None:
            path = join_path(prefix, name)
            heading = "#" * (3 + path.count("."))
            about = " ".join((inner.__doc__ or "").split())
            about = textwrap.fill(about, 100, break_long_words=False, break_on_hyphens=False)
            yield f"{heading} `{path}`\n\n{about}\n\n{_table(path, inner)}"
            yield from _blocks(path, inner)


def _table(prefix: str, model: type[Block]) -> str:
    return _rows("key | type | default | meaning", _key_rows(prefix, model))


def _rows(head: str, rows: Iterator[str] | list[str]) -> str:
    columns = "|".join(["---"] * (head.count("|") + 1))
    return "\n".join([f"| {head} |", f"|{columns}|", *rows]) + "\n"


def _key_rows(prefix: str, model: type[Block]) -> Iterator[str]:
    meanings = descriptions(model)
    for name, info in model.model_fields.items():
        path, inner = join_path(prefix, name), block_model(info)
        kind = f"[object](#{path.replace('.', '')})" if inner else _cell(describe_type(info))
        meaning = meanings.get(name) or re.split(r"(?<=[.)])\s", ((inner and inner.__doc__) or "").strip())[0]
        yield f"| `{path}` | {kind} | {_default(info)} | {_cell(meaning)} |"


def descriptions(model: type[Block]) -> dict[str, str]:
    """Return the string below each field in the source code, by field name."""
    found: dict[str, str] = {}
    for parent in reversed(model.__mro__):
        if issubclass(parent, BaseModel) and parent is not BaseModel:
            (source,) = ast.parse(textwrap.dedent(inspect.getsource(parent))).body
            assert isinstance(source, ast.ClassDef)
            for field, below in pairwise(source.body):
                text = below.value if isinstance(below, ast.Expr) else None
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Constant):
                    found[ast.unparse(field.target)] = str(text.value)
    return found


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True)
    return "" if isinstance(default, BaseModel) else f"`{json.dumps(default)}`"


def _unsupported_rows() -> Iterator[str]:
    for path, entry in sorted(UNSUPPORTED.items()):
        accepted = " or ".join(f"`{json.dumps(value)}`" for value in entry.accepted)
        accepted = f"`{entry.switch}`: {accepted}" if entry.switch else accepted
        accepted = "any value" if entry.free else f"{accepted} (others: no effect)" if entry.ignored else accepted
        notes = [entry.reason] if entry.reason else []
        notes += [f"no effect: {entry.ignored}"] if entry.ignored else []
        notes += ["no effect below stage 3"] if entry.stage3 else []
        yield f"| `{path}` | {accepted} | {_cell('; '.join(notes))} |"


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


if __name__ == "__main__":
    FILE.write_text(render(FILE.read_text(encoding="utf-8")), encoding="utf-8")
