"""Engine whose ranks have parts of each sequence: the loss of a part is weighted by its labels."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from zerolite.comm import collective
from zerolite.config.parallelism import SequenceParallelConfig
from zerolite.data.micro_batch import LossFunction
from zerolite.engine.engine import Engine
from zerolite.engine.special_engines import EvaluationEngine
from zerolite.sequence_parallel.attention import attention_ranks, install_attention
from zerolite.sequence_parallel.forward import SequenceForward, check_model
from zerolite.sequence_parallel.huggingface import check_huggingface, chosen_attention, heads_of, install_huggingface
from zerolite.utils.memory_tags import BUCKETS
from zerolite.zero.engine_parts import EngineParts


@dataclass(frozen=True)
class DividedModel:
    """A model whose sequences several ranks can divide, before anything of it is changed.

    Attributes:
        model: the model.
        chosen: see :func:`~zerolite.sequence_parallel.huggingface.chosen_attention`.
        setting: the config's ``sequence_parallel.attention``.
    """

    model: torch.nn.Module
    chosen: dict[int, tuple[Any, str]]
    setting: str

    @collective
    def make_forward(self, parts: EngineParts) -> SequenceForward:
        """Return the function that cuts sequences, in the place of the model."""
        topology, device = parts.topology, parts.device
        ranks = attention_ranks(topology, device, self.setting, heads_of(self.chosen))
        made = [comm for comm in (ranks.heads, ranks.ring) if comm not in (None, ranks.comm)]
        parts.memory_sources.append(lambda: ((BUCKETS, t) for comm in made if comm is not None for t in comm.memory()))
        forward = SequenceForward(parts, ranks)
        parts.observers.before_backward.append(forward.before_backward)
        parts.call.replace(forward)
        return forward

    def install(self) -> list[Any]:
        """Let attention join the parts. Returns handles that undo it."""
        return [*install_huggingface(self.chosen), install_attention()]


def check_sequences(model: torch.nn.Module, config: SequenceParallelConfig) -> DividedModel | None:
    """Return what divides the sequences of ``model``; None if nothing does.

    Raises ValueError for a model whose sequences cannot be divided.
    """
    if config.size == 1:
        return None
    check_model(model)
    chosen = chosen_attention(model)
    check_huggingface(chosen, config.size, config.attention)
    return DividedModel(model, chosen, config.attention)


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
        return self._sequence.weight()

    def split_sequence(self, targets: torch.Tensor) -> torch.Tensor:
        return self._sequence.split(targets)[0]

    def _batch_weight(self) -> int | None:
        return None if self._sequence.takes_parts else self.loss_weight

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
        with attends:
            return super().backward(loss, *args, weight=known, **kwargs)


class SequenceEvaluationEngine(_DividedSequences, EvaluationEngine):
    """The same without an optimizer."""
