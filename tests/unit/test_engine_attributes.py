"""Attributes that an engine does not have are its module's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from zerolite.engine.engine import Engine


class Model(nn.Module):
    config = "the module's"

    def decode(self, text):
        return text.upper()


def engine_of(module, kind=Engine):
    """An engine before anything else about it exists."""
    engine = kind.__new__(kind)
    vars(engine).update(_module=module, _param_gatherer=SimpleNamespace(wait_all=lambda: None), config="the engine's")
    return engine


def test_the_modules_attributes_are_found_and_the_engines_come_first():
    engine = engine_of(Model())
    assert engine.decode("a") == "A" and engine.training is True
    assert engine.config == "the engine's"
    assert not hasattr(engine, "encode")


def test_a_property_that_fails_says_why():
    broken = type("Broken", (Engine,), {"dataset": property(lambda self: SimpleNamespace().rows)})
    module = Model()
    module.dataset = "must not stand in for the engine's"
    with pytest.raises(AttributeError, match="'rows'"):
        _ = engine_of(module, broken).dataset
