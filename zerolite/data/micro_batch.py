"""Micro-batches as calls of the model and the loss function, for ``engine.train_batch``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zerolite.utils.nested import map_tensors

LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch.

    Attributes:
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        target: second argument of the loss function; None without one.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None

    @classmethod
    def of(cls, batch: Any, loss_fn: LossFunction | None, device: torch.device) -> MicroBatch:
        """Bring ``batch`` to ``device`` and divide it into the model's arguments and the target.

        With a loss function, ``batch`` is a pair (inputs, targets); without, it is the model's arguments. A mapping
        becomes keyword arguments, a tuple or list positional ones, and any other value a single argument. Raises
        ValueError if there is a loss function and ``batch`` is no pair.
        """
        batch = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
        target = None
        if loss_fn is not None:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                got = f"{len(batch)} items" if isinstance(batch, (tuple, list)) else type(batch).__name__
                raise ValueError(
                    f"engine.train_batch: with a loss_fn, expected a micro-batch to be a pair (inputs, targets), got "
                    f"{got}; give initialize no loss_fn if the model computes its loss itself"
                )
            batch, target = batch
        if isinstance(batch, Mapping):
            return cls((), dict(batch), target)
        return cls(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}, target)

    def loss(self, outputs: Any, loss_fn: LossFunction | None) -> torch.Tensor:
        """Return the loss: that of ``loss_fn``, or the one that the model has returned.

        A model may return a scalar, or an object or mapping with a ``loss``. It may also return a tuple that contains
        exactly one scalar or begins with one. Raises ValueError for any other output.
        """
        if loss_fn is not None:
            return _scalar(loss_fn(outputs, self.target), "the loss_fn")
        if isinstance(outputs, Mapping) and "loss" in outputs:
            outputs = outputs["loss"]
        elif not isinstance(outputs, torch.Tensor) and getattr(outputs, "loss", None) is not None:
            outputs = outputs.loss
        elif isinstance(outputs, (tuple, list)) and outputs:
            scalars = [output for output in outputs if isinstance(output, torch.Tensor) and output.numel() == 1]
            outputs = scalars[0] if len(scalars) == 1 else outputs[0]
        return _scalar(outputs, "the model")


def _scalar(loss: object, who: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        remedy = "reduce it with .mean()" if who == "the loss_fn" else "give initialize a loss_fn"
        raise ValueError(f"engine.train_batch: expected {who} to give a loss with one element, got {got}; {remedy}")
    return loss


def check_batches(data_iter: object, dataloader: object, call: str) -> None:
    """Raise ValueError if ``engine.<call>`` was given no iterator of micro-batches, and has no loader of its own."""
    if data_iter is None and dataloader is None:
        raise ValueError(
            f"engine.{call}: expected an iterator of micro-batches, got none, and initialize was given no "
            "training_data; pass one"
        )
    if data_iter is not None and not hasattr(data_iter, "__next__"):
        raise ValueError(
            f"engine.{call}: expected an iterator, got {type(data_iter).__name__}; pass iter(loader), and the "
            "same iterator in every step"
        )
