"""Chunk of consecutive layers: the computation of one pipeline stage for a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from zerolite.data.micro_batch import LossFunction, MicroBatch
from zerolite.pipe.modules import run_layers
from zerolite.precision.dtypes import Precision

ONE_STAGE_ONLY = (
    "expected engine.train_batch or engine.eval_batch, which run all stages, got a call of the model: this rank has "
    "only one stage, and the other layers are on other ranks"
)


class Chunk(Protocol):
    """One part of the model on this rank.

    Attributes:
        index: its number among all parts.
        module: module with its parameters.
    """

    index: int
    module: nn.Module

    def parameters(self) -> list[nn.Parameter]:
        """Return this rank's parameters to which the chunk's backward may give gradients."""
        return list(self.module.parameters())

    def connect(self, precision: Precision, device: torch.device, loss_fn: LossFunction | None) -> None:
        """Set precision, device and loss. Called once, by the runner."""
        return

    def prepare(self, batch: MicroBatch) -> None:
        """Prepare for micro-batches of these shapes. Raises ValueError for a model that cannot run as a pipeline."""

    def forward(self, received: tuple[torch.Tensor, ...], single: bool, batch: MicroBatch) -> Any:
        """Run the chunk. Returns the next part's input, or in the last part the model's outputs.

        Args:
            received: tensors from the part before; empty in the first part.
            single: the part before sends one tensor and not a tuple.
            batch: the micro-batch, with floating tensors in the compute dtype.
        """


class LayerChunk(Chunk):
    """Consecutive layers of a sequence: see :class:`~zerolite.pipe.modules.PipelineModule`."""

    def __init__(
        self,
        index: int,
        layers: Sequence[Callable[[Any], Any]],
        owners: Sequence[nn.Module],
        interval: int = 0,
        checkpointable: Sequence[str] | None = None,
    ) -> None:
        """
        Args:
            owners: the modules among ``layers``, and the modules that functions of tied layers use.
        """
        self.index = index
        self.module = nn.ModuleList(owners)
        self._layers, self._interval, self._checkpointable = list(layers), interval, checkpointable

    def prepare(self, batch: MicroBatch) -> None:
        if batch.kwargs:
            raise ValueError(
                "expected a tensor or a tuple as the input of a sequence of layers, which is the argument of the first "
                f"layer, got keyword arguments {', '.join(batch.kwargs)}"
            )

    def forward(self, received: tuple[torch.Tensor, ...], single: bool, batch: MicroBatch) -> Any:
        value: Any = batch.args if self.index == 0 else received
        single = len(value) == 1 if self.index == 0 else single
        return run_layers(self._layers, value[0] if single else value, self._interval, self._checkpointable)
