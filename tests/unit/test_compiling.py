"""Warnings about models that are compiled at their root."""

from __future__ import annotations

import logging
import re
from unittest import mock

import pytest
import torch

from zerolite.engine import compiling


@pytest.mark.parametrize(
    ("is_sharded", "effect"),
    [(True, "stage 3 gathers all of its 20 parameters at once"), (False, "its backward is one graph: .* no reduction")],
)
def test_a_large_model_compiled_at_its_root_is_told_what_it_loses(
    is_sharded: bool, effect: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(4, 4)
    with caplog.at_level(logging.WARNING, "zerolite"), mock.patch.object(compiling, "AUTO_GRANULARITY", 10):
        compiling.warn_if_compiled_whole(model, is_sharded)
        assert not caplog.records
        compiling.warn_if_compiled_whole(torch.compile(model), is_sharded)
        with mock.patch.object(compiling, "AUTO_GRANULARITY", 20):
            compiling.warn_if_compiled_whole(torch.compile(model), is_sharded)
    (record,) = caplog.records
    assert compiling._REMEDY in record.getMessage()
    assert re.search(effect, record.getMessage())
