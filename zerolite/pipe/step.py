"""One step of a pipeline on one rank: its micro-batches, forwards, losses and the first failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from zerolite.comm.flight_recorder import blocked
from zerolite.data.micro_batch import LossFunction, MicroBatch
from zerolite.pipe.chunks import Chunk
from zerolite.utils.accelerator import is_fake
from zerolite.utils.dtypes import HALF
from zerolite.utils.nested import find_tensors, map_tensors
from zerolite.utils.torch_private import fake_mode
from zerolite.zero.engine_parts import EngineParts

TAG = "pipe"
Key = tuple[int, bool]  # a hash of the shapes of a step's micro-batches, and True for training
CACHED_FAKE_TENSOR = (
    "pipeline.split: expected a model that keeps no tensors outside of its modules, got one that has cached a tensor "
    "of the run without values (in a global cache); compute it in each forward, or keep it in a buffer"
)


class Step:
    """One step of a rank: its micro-batches, forwards, losses and first failure.

    Attributes:
        key: identifies the shapes of this step's micro-batches.
        failure: the first failure on this rank; computations are skipped from then on.
    """

    def __init__(
        self,
        parts: EngineParts,
        loss_fn: LossFunction | None,
        batches: list[MicroBatch],
        key: Key,
        keeps_outputs: bool,
        computes_loss: bool,
    ) -> None:
        self.training = key[1]
        self.key = key
        self.failure: Exception | None = None
        self.waiting: contextlib.AbstractContextManager[None] | None = None  # context of a wait for messages
        self.losses: list[torch.Tensor] = []
        self.outputs: list[Any] = []
        self._keeps_outputs, self._computes_loss = keeps_outputs, computes_loss
        self._parts, self._loss_fn, self._batches = parts, loss_fn, batches
        scale, micro_batches = parts.pipeline.state, parts.config.gradient_accumulation_steps or 1
        self._factor = scale.loss_scale() / micro_batches if self.training else 1.0

    def forward(self, chunk: Chunk, received: tuple[torch.Tensor, ...], single: bool, index: int) -> Any:
        """Return the outputs of ``chunk`` for micro-batch ``index``."""
        with self._parts.precision.autocast_context(self._parts.device):
            outputs = chunk.forward(received, single, self._batches[index])
        if fake_mode() is None and any(map(is_fake, find_tensors(outputs))):
            raise RuntimeError(CACHED_FAKE_TENSOR)
        return outputs

    def loss(self, outputs: Any, index: int) -> torch.Tensor | None:
        """Return the scaled loss with which backward begins in the last part; None if there is no loss."""
        widens = self._parts.precision.widens(outputs)
        outputs = map_tensors(lambda tensor: tensor.float() if widens(tensor) else tensor, outputs)
        if self._keeps_outputs:
            # Gather sharded logits here, on all ranks: the user may look at them on some ranks only.
            self.outputs.append(map_tensors(lambda t: t.gathered() if hasattr(t, "gathered") else t, outputs))
        if not self._computes_loss:
            return None
        loss = self._batches[index].loss(outputs, self._loss_fn)
        loss = loss.float() if loss.dtype in HALF else loss
        self.losses.append(loss.detach().float().reshape(()))
        if not self.training:
            return None
        self._parts.reducer.losses.append(self.losses[-1])
        if not loss.requires_grad:
            raise ValueError(
                "engine.train_batch: expected a loss that needs a gradient, got one that depends neither on a trained "
                "parameter of the last part of the pipeline nor on the tensors that this part receives"
            )
        return loss * self._factor

    def fail(self, error: Exception) -> None:
        """Record a failed computation. Only the first failure is kept."""
        if self.failure is None:
            self.failure = error

    def begin_backward(self) -> None:
        self._parts.pipeline.begin_backward(engine_scaled=True)
        self._parts.boundary.note_scaled()

    def end_backward(self, complete: bool) -> None:
        self._parts.reducer.end_backward(complete=complete)
        self._parts.accumulation.on_engine_step()

    @contextlib.contextmanager
    def communicating(self) -> Iterator[None]:
        """Context of a schedule. It counts all time outside of computations as a wait for other ranks."""
        self.begin_wait()
        try:
            yield
        except RuntimeError as error:
            waiting, self.waiting = self.waiting, None
            if waiting is not None:
                waiting.__exit__(type(error), error, error.__traceback__)  # raises it with an explanation
            raise
        finally:
            self.end_wait()

    def begin_wait(self) -> None:
        """Tell the watchdog that this rank waits for messages from now on."""
        self.waiting = blocked(("message", TAG, 0, None, 0))
        self.waiting.__enter__()

    def end_wait(self) -> None:
        if self.waiting is not None:
            self.waiting.__exit__(None, None, None)
        self.waiting = None
