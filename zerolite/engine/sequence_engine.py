"""Engine whose ranks have parts of each sequence: the loss of a part is weighted by its labels."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch

from zerolite.comm import collective
from zerolite.data.micro_batch import LossFunction
from zerolite.engine.engine import Engine
from zerolite.engine.special_engines import EvaluationEngine
from zerolite.sequence_parallel.attention import (
    AttentionRanks,
    check_huggingface,
    install_attention,
    install_huggingface,
)
from zerolite.sequence_parallel.forward import SequenceForward, check_model
from zerolite.zero.engine_parts import EngineParts


def check_sequences(model: torch.nn.Module, size: int) -> None:
    """Raise ValueError for a model whose sequences ``size`` ranks cannot divide, before anything of it is changed."""
    if size > 1:
        check_model(model)
        check_huggingface(model, size)


def divide_sequences(parts: EngineParts) -> tuple[SequenceForward, list[Any]]:
    """Let the forward of an engine cut sequences, and attention join them.

    Returns:
        The forward, and handles that undo it.
    """
    forward = SequenceForward(parts, AttentionRanks(parts.topology.sequence))
    parts.observers.before_backward.append(forward.before_backward)
    handles = [*install_huggingface(parts.model), install_attention()]
    parts.call.replace(forward)
    return forward, handles


def _with_part(sequence: SequenceForward, loss_fn: LossFunction, outputs: Any, targets: Any) -> torch.Tensor:
    """Call ``loss_fn`` with this rank's part of the targets."""
    if not isinstance(targets, torch.Tensor):
        raise ValueError(
            f"sequence_parallel: expected a tensor as the target of the loss_fn, got {type(targets).__name__}; give a "
            "tensor, of which each rank takes its part"
        )
    return loss_fn(outputs, sequence.split(targets)[0])


class _DividedSequences(Engine):
    """Methods of an engine whose ranks have parts of each sequence."""

    _sequence: SequenceForward

    def use_sequence(self, sequence: SequenceForward) -> None:
        """Take weights and parts of labels from ``sequence``."""
        self._sequence = sequence
        if self.loss_fn is not None and not sequence.takes_parts:
            self.loss_fn = functools.partial(_with_part, sequence, self.loss_fn)

    @property
    def loss_weight(self) -> int:
        if self._sequence.takes_parts:
            return super().loss_weight
        return 0 if self._loaders.repeats else self._sequence.weight()

    def split_sequence(self, targets: torch.Tensor) -> torch.Tensor:
        return self._sequence.split(targets)[0]

    def _weight_of(self, batches: object) -> int | None:
        return super()._weight_of(batches) if self._sequence.takes_parts else self.loss_weight

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError: attention exchanges tokens in a way that torch.compile does not follow yet."""
        raise RuntimeError("engine.compile: expected sequence_parallel.size 1, got more; leave one of the two out")


class SequenceEngine(_DividedSequences):
    """Engine whose ranks have parts of each sequence. ``engine(...)`` is given whole sequences, and returns the
    outputs, or the loss, of this rank's part."""

    @collective
    def backward(
        self, loss: torch.Tensor, *args: Any, weight: float | torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Run the backward of ``loss``: see :meth:`Engine.backward`. Where the engine cuts sequences, the weight is the
        number of labels that are counted in this rank's part, unless ``weight`` is given. So the gradient is that of
        the joint batch."""
        known, attends = self._sequence.backward_of(weight)
        if weight is None and self._loaders.repeats and not self._sequence.takes_parts:
            known = 0
        with attends:
            return super().backward(loss, *args, weight=known, **kwargs)


class SequenceEvaluationEngine(_DividedSequences, EvaluationEngine):
    """The same without an optimizer."""
