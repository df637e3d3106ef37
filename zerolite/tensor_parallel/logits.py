"""Vocabulary-parallel logits: a sharded tensor that behaves like the full one.

An operation that needs all logits of a token gathers them first; other operations work on the shard. See
:class:`VocabParallelLogits`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zerolite.comm import Communicator, collective
from zerolite.nn.logits_on_demand import Change, LogitsOnDemand, LogitsState
from zerolite.tensor_parallel import functions
from zerolite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from zerolite.utils.nested import Arguments, Function, Keywords


@collective
class VocabParallelLogits(LogitsOnDemand):
    """Logits [..., vocabulary], of which this rank has [..., ceil(vocabulary / ranks)].

    ``F.cross_entropy`` (nn.CrossEntropyLoss) with one target for each token is computed on the shards. The dtype or the
    leading dimensions may change before, and the logits may be multiplied by a number. Every other operation first
    gathers the logits, once, and continues with an ordinary tensor. So results are always those of the full logits.
    """

    _state: _Shard

    @staticmethod
    def of(local: Tensor, comm: Communicator, vocabulary: int) -> VocabParallelLogits:
        """Return the logits with this rank's shard ``local``, [..., ceil(vocabulary / ranks)], padded at the end."""
        return _wrapped(_Shard(local, comm, vocabulary))

    @collective
    def gathered(self) -> Tensor:
        """Return an ordinary tensor with all logits."""
        return self._state.whole()


class _Shard(LogitsState):
    """This rank's part of one VocabParallelLogits.

    Attributes:
        local: this rank's logits.
        full: the gathered logits, which replace ``local`` as soon as they exist.
        aliased: the ``local`` of another object shares this memory.
    """

    def __init__(self, local: Tensor, comm: Communicator, vocabulary: int, aliased: bool = False) -> None:
        self.local, self.comm, self.vocabulary, self.aliased = local, comm, vocabulary, aliased
        self.shape, self.dtype, self.device = (*local.shape[:-1], vocabulary), local.dtype, local.device
        self.full: Tensor | None = None

    @property
    def is_whole(self) -> bool:
        return self.full is not None

    def whole(self) -> Tensor:
        if self.full is None and self.local.requires_grad and not torch.is_grad_enabled():
            return self.values()  # without a graph they must not take the place of these logits
        if self.full is None:
            self.full = _without_padding(functions.gather(self.local, self.comm), self.vocabulary)
        return self.full

    def values(self) -> Tensor:
        full = functions.gather(self.local.detach(), self.comm) if self.full is None else self.full.detach()
        return _without_padding(full, self.vocabulary)

    def change_elements(self, change: Change) -> VocabParallelLogits:
        return self.change_rows(change)

    def change_rows(self, change: Change) -> VocabParallelLogits:
        local = change(self.local)
        # A view shares memory with these logits: a write into one of them would have to reach the other.
        same = local.untyped_storage() is self.local.untyped_storage()
        self.aliased = self.aliased or same
        return _wrapped(_Shard(local, self.comm, self.vocabulary, same))

    def describe(self, function: Function, args: Arguments, kwargs: Keywords) -> object:
        return function(self.local, *args, **kwargs)

    def cross_entropy(self, target: Tensor, options: dict[str, Any]) -> Tensor:
        rows = self.local.reshape(-1, self.local.shape[-1])
        losses = vocab_parallel_cross_entropy(rows, target.reshape(-1), self.comm, self.vocabulary, **options)
        return losses.reshape(target.shape) if options["reduction"] == "none" else losses

    def before_write(self, name: str) -> None:
        """Raise RuntimeError for a write to memory that another object shares: it would go to the gathered copy."""
        if self.aliased:
            raise RuntimeError(
                f"expected no {name} on a view of logits that are sharded over tensor-parallel ranks; write to a copy, "
                "logits.gathered().clone()"
            )


def _wrapped(state: _Shard) -> VocabParallelLogits:
    logits: VocabParallelLogits = _FullLogits.apply(state.local, state)
    return logits


class _FullLogits(torch.autograd.Function):
    """Autograd function that returns the full logits as a tensor without memory.

    So code that ignores ``__torch_function__``, such as an autograd function, is differentiated as with ordinary
    logits.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, state: _Shard) -> Tensor:
        ctx.shard = state.comm.rank * local.shape[-1], local.shape[-1], state.vocabulary
        return VocabParallelLogits(state)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> object:
        start, length, vocabulary = ctx.shard
        start = min(start, vocabulary)
        local_gradient = gradient.narrow(-1, start, min(length, vocabulary - start))
        return F.pad(local_gradient, (0, length - local_gradient.shape[-1])), None


def _without_padding(full: Tensor, vocabulary: int) -> Tensor:
    return full if full.shape[-1] == vocabulary else full.narrow(-1, 0, vocabulary).contiguous()
