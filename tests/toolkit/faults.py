"""Gradients that are not finite, and the warnings about them."""

from __future__ import annotations

import logging
from typing import Any

import torch


class Warnings(logging.Handler):
    """Collects zerolite's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> Warnings:
        logging.getLogger("zerolite").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("zerolite").removeHandler(self)


def poison(engine: Any, parameter: str, value: float) -> Any:
    """From now on one element of the parameter's gradient is ``value`` on this rank. Returns the handle of the hook."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[gradient.numel() // 2] = value
        return gradient

    return dict(engine.module.named_parameters())[parameter].register_hook(spoil)
