"""Engine methods that take a whole step's micro-batches from an iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from zerolite.data.micro_batch import LossFunction, MicroBatch

if TYPE_CHECKING:
    from zerolite.engine.engine import Engine


class BatchMethods:
    """Mixed into :class:`~zerolite.engine.engine.Engine`."""

    runner: Any  # of a pipeline (zerolite.pipe); None where every rank has all layers
    loss_fn: LossFunction | None
    dataloader: Any
    _batches: Iterator[Any] | None = None

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One whole step: ``gradient_accumulation_steps`` micro-batches from ``data_iter``, forward, backward, update.
        With a pipeline this is how an engine trains.

        data_iter: gives this data-parallel rank's micro-batches: (inputs, targets) where ``initialize`` was given a
        loss_fn, the model's arguments otherwise (a tuple, or a dict of keywords). Ranks with other parts of the same
        model need the same ones. None: over ``engine.dataloader``, again from its start when it ends. Returns the mean
        loss over micro-batches and data-parallel ranks, 0-dim fp32, the same on every rank. Raises StopIteration if
        the iterator ends, RuntimeError inside :meth:`~zerolite.Engine.join` and in the middle of a window. Called on
        all ranks.
        """
        batches = self._batches_of(data_iter, "train_batch")
        if self.runner is not None:
            return self.runner.train_batch(batches)
        engine = cast("Engine", self)
        if not engine._window.empty:
            raise RuntimeError(
                "engine.train_batch: expected no gradients since the last step, got some; call engine.step(flush=True) "
                "or engine.zero_grad() first"
            )
        if engine._window.forced_boundary is not None or engine._window.sync_disabled:
            raise RuntimeError(
                "engine.train_batch: expected to count micro-batches itself, got engine.no_sync() or "
                "engine.set_gradient_accumulation_boundary() in force; leave them out, or use engine.backward and step"
            )
        steps = engine.gradient_accumulation_steps
        losses = []
        for _ in range(steps):
            loss = self._loss(next(batches))
            engine.backward(loss)
            losses.append(loss.detach().float().reshape(()))
            engine.step()
        return engine.mean_over_data(torch.stack(losses).mean())

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any], return_logits: bool = False, compute_loss: bool = True) -> Any:
        """The mean loss of as many micro-batches as a step has, without gradients, in eval mode: as
        :meth:`train_batch` gives it. return_logits: also the model's outputs, a list over micro-batches (None on ranks
        that do not have the last layers). compute_loss: False gives the outputs alone. Called on all ranks."""
        batches = self._batches_of(data_iter, "eval_batch")
        engine = cast("Engine", self)
        training = [module for module in engine._module.modules() if module.training]
        engine._module.eval()
        try:
            if self.runner is not None:
                return self.runner.eval_batch(batches, return_logits, compute_loss)
            losses, outputs = [], []
            for _ in range(engine.gradient_accumulation_steps):
                micro = MicroBatch.of(next(batches), self.loss_fn, engine.device)
                made = engine(*micro.args, **micro.kwargs)
                outputs.append(made)
                if compute_loss:
                    losses.append(micro.loss(made, self.loss_fn).float().reshape(()))
        finally:
            for module in training:  # those that the user has put in eval mode stay there
                module.training = True
        if not compute_loss:
            return outputs
        loss = engine.mean_over_data(torch.stack(losses).mean())
        return (loss, outputs) if return_logits else loss

    def _loss(self, batch: Any) -> torch.Tensor:
        engine = cast("Engine", self)
        micro = MicroBatch.of(batch, self.loss_fn, engine.device)
        return micro.loss(engine(*micro.args, **micro.kwargs), self.loss_fn)

    def _batches_of(self, data_iter: Iterator[Any] | None, call: str) -> Iterator[Any]:
        if data_iter is not None:
            if not hasattr(data_iter, "__next__"):
                raise ValueError(
                    f"engine.{call}: expected an iterator, got {type(data_iter).__name__}; pass iter(loader), and the "
                    "same iterator in every step"
                )
            return data_iter
        if self.dataloader is None:
            raise ValueError(
                f"engine.{call}: expected an iterator of micro-batches, got none, and initialize was given no "
                "training_data; pass one"
            )
        if self._batches is None:
            from zerolite.data.dataloader import RepeatingLoader

            self._batches = iter(RepeatingLoader(self.dataloader))
        return self._batches
