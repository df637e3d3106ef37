"""Reads of an attribute that use its metadata alone, told by their source."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from zerolite.zero.stage3.metadata_reads import reads_metadata

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not say where in a line it is")


class Module:
    """Notes for each read of ``weight`` whether it is taken for a question."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        self.found.append(reads_metadata(sys._getframe(1)))
        return 1.0


def test_reads_that_only_ask_are_questions() -> None:
    module = Module()
    isinstance(module.weight, float) and module.weight is not None
    hasattr(module.weight, "dtype")
    _ = (getattr(module, "found"), [1 for _ in range(2) if module.weight is None])  # noqa: B009
    with pytest.raises(AttributeError):
        module.weight.dtype  # noqa: B018
    with pytest.raises(AttributeError):
        module.weight.new_zeros(2)
    assert module.found == [True] * 7


def test_reads_of_values_are_none() -> None:
    module = Module()
    weight = module.weight
    assert abs(module.weight) == 1.0 and module.weight * 2 == 2.0 and (weight, module.weight) == (1.0, 1.0)
    assert module.weight.real == 1.0
    assert getattr(module, "weight") == 1.0  # noqa: B009
    exec("module.weight.dtype if False else module.weight", {"module": module})  # a source that cannot be found
    assert not any(module.found) and len(module.found) == 7
