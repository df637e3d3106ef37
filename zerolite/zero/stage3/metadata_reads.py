"""Recognition of reads of a parameter that need its metadata alone, from their source. Standard library only.

``if self.wo.weight.dtype != x.dtype`` reads a parameter and needs no values. Waiting for a use of the values at run
time would not work: perhaps only some ranks use them, and all ranks must gather the same. The source is the same on
all.
"""

from __future__ import annotations

import ast
import functools
import linecache
from types import CodeType, FrameType

ATTRIBUTES = frozenset("device dtype is_cpu is_cuda is_meta is_sparse itemsize layout ndim requires_grad shape".split())
METHODS = frozenset(
    "dim element_size is_complex is_floating_point ndimension nelement numel size "
    "new_empty new_full new_ones new_tensor new_zeros".split()
)
_FUNCTIONS = frozenset("hasattr id isinstance".split())

# First and last line, from 1; first and last column, in bytes.
_Position = tuple[int, int, int, int]


def reads_metadata(frame: FrameType) -> bool:
    """Return True if the expression uses nothing but the dtype, shape or other metadata of the attribute that ``frame``
    is reading. Return False where that is unknown: without the source, and in Python 3.10."""
    return _reads_metadata(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def _reads_metadata(code: CodeType, instruction: int) -> bool:
    if not hasattr(code, "co_positions"):
        return False
    line, last_line, column, last_column = list(code.co_positions())[instruction // 2]
    return (line, last_line, column, last_column) in _metadata_reads(code.co_filename)


@functools.lru_cache(maxsize=64)
def _metadata_reads(filename: str) -> frozenset[_Position]:
    """Return the positions of such reads in a file: ``a.b`` in ``a.b.dtype`` and in ``isinstance(a.b, c)``."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return frozenset()
    found = set()
    for node in ast.walk(tree):
        for read in _read_in(node):
            if isinstance(read, ast.Attribute):
                found.add((read.lineno, read.end_lineno or 0, read.col_offset, read.end_col_offset or 0))
    return frozenset(found)


def _read_in(node: ast.AST) -> list[ast.expr]:
    """Return the operands of which ``node`` uses nothing but metadata."""
    if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
        return [node.value]
    if isinstance(node, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            return [node.func.value]
        if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            return list(node.args[:1])
    return []
