"""Attributes that an engine does not have are its module's."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from zerolite.engine.engine import Engine


class Model(nn.Module):
    config = "the module's"

    def decode(self, text):
        return text.upper()


def engine_of(module, kind=Engine, compute=None):
    """An engine before anything else about it exists."""
    engine = kind.__new__(kind)
    gatherer, precision = SimpleNamespace(wait_all=lambda: None), SimpleNamespace(compute=compute)
    parts = SimpleNamespace(model=module, param_gatherer=gatherer, precision=precision)
    vars(engine).update(_parts=parts, config="the engine's")
    return engine


def test_the_modules_attributes_are_found_and_the_engines_come_first():
    engine = engine_of(Model())
    assert engine.decode("a") == "A" and engine.training is True
    assert engine.config == "the engine's"
    assert not hasattr(engine, "encode")


def test_a_method_of_the_module_explains_errors_of_dtypes_as_a_forward_does():
    class Acting(nn.Linear):
        def act(self, x, *, scale=1):
            return self.forward(x * scale)

    module = Acting(2, 2).bfloat16()
    engine = engine_of(module, compute=torch.bfloat16)
    assert engine.act(torch.ones(1, 2, dtype=torch.bfloat16), scale=2).dtype is torch.bfloat16
    assert engine.act.__self__ is module and str(inspect.signature(engine.act)) == "(x, *, scale=1)"
    with pytest.raises(RuntimeError, match=r"casts parameters, and floating inputs of engine.*\.to\(torch.bfloat16\)"):
        engine.act(torch.ones(1, 2))
    assert engine.forward.__func__ is Engine.forward


def test_a_property_that_fails_says_why():
    broken = type("Broken", (Engine,), {"dataset": property(lambda self: SimpleNamespace().rows)})
    module = Model()
    module.dataset = "must not stand in for the engine's"
    with pytest.raises(AttributeError, match="'rows'"):
        _ = engine_of(module, broken).dataset
