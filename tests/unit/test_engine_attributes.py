"""Attributes that an engine does not have are its module's."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
from torch import nn

from zerolite.engine.engine import Engine


class Model(nn.Module):
    config = "the module's"

    def __deepcopy__(self, memo):
        raise AssertionError("an engine is not copied as its module is")

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


def test_copies_are_refused_by_the_engine():
    for refused in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be copied"):
            refused(engine_of(Model()))
