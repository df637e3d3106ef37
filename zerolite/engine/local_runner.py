"""Whole steps of an engine whose ranks have all layers: `train_batch` and `eval_batch` as loops over micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zerolite.comm import Communicator
from zerolite.comm.flight_recorder import EVENTS
from zerolite.data.even_loader import EvenLoader
from zerolite.data.micro_batch import MicroBatch
from zerolite.engine.components import EngineRef
from zerolite.zero.accumulation import GradAccumulation


class LocalRunner:
    """Loops of `train_batch` and `eval_batch`, the two methods of every runner. ``comm``: over the data-parallel
    ranks."""

    def __init__(
        self,
        engine: EngineRef,
        accumulation: GradAccumulation,
        comm: Communicator,
        device: torch.device,
    ) -> None:
        self._engine_ref, self._accumulation, self._comm, self._device = engine, accumulation, comm, device

    @property
    def _engine(self) -> Any:
        engine = self._engine_ref()
        assert engine is not None, "it is the engine that calls"
        return engine

    def train_batch(self, batches: Iterator[object]) -> torch.Tensor:
        """Run ``Engine.train_batch``."""
        if not self._accumulation.empty:
            raise RuntimeError(
                "engine.train_batch: expected no gradients since the last step, got some; call engine.step(flush=True) "
                "or engine.zero_grad() first"
            )
        if self._accumulation.forced_boundary is not None or self._accumulation.sync_disabled:
            raise RuntimeError(
                "engine.train_batch: expected to count micro-batches itself, got engine.no_sync() or "
                "engine.set_gradient_accumulation_boundary() in force; leave them out, or use engine.backward and step"
            )
        engine, losses, weights = self._engine, list[torch.Tensor](), list[int]()
        for _ in range(self._accumulation.micro_batches):
            try:
                batch = next(batches)
            except StopIteration:
                EVENTS.append(
                    f"came to the end of its batches in engine.train_batch, in step {engine.global_steps + 1}"
                )
                raise
            micro = MicroBatch.of(batch, engine.loss_fn, self._device)
            loss = micro.loss(engine(*micro.args, **micro.kwargs), engine.loss_fn)
            weight = self._weight(batches)
            engine.backward(loss, weight=weight)
            losses.append(loss.detach().float().reshape(()))
            weights += [] if weight is None else [weight]
            engine.step()
        return self._mean_over_data(losses, weights)

    def eval_batch(
        self, batches: Iterator[object], return_logits: bool, compute_loss: bool, micro_batches: int | None
    ) -> Any:
        """Run ``Engine.eval_batch``. Called in eval mode and without gradients."""
        engine, losses, outputs, weights = self._engine, list[torch.Tensor](), [], list[int]()
        for _ in range(micro_batches or self._accumulation.micro_batches):
            micro = MicroBatch.of(next(batches), engine.loss_fn, self._device)
            made = engine(*micro.args, **micro.kwargs)
            outputs.append(made)
            if compute_loss:
                losses.append(micro.loss(made, engine.loss_fn).float().reshape(()))
                weight = self._weight(batches)
                weights += [] if weight is None else [weight]
        if not compute_loss:
            return outputs
        loss = self._mean_over_data(losses, weights)
        return (loss, outputs) if return_logits else loss

    def _weight(self, batches: Iterator[object]) -> int | None:
        """Return the weight of the micro-batch in hand; None if all batches count the same."""
        loader = self._engine.dataloader
        return loader.weight if isinstance(loader, EvenLoader) and self._engine.is_own(batches) else None

    def _mean_over_data(self, losses: list[torch.Tensor], weights: list[int]) -> torch.Tensor:
        """Return the mean over micro-batches and data-parallel ranks: 0-dim, fp32, the same on all these ranks.

        Args:
            losses: one for each micro-batch.
            weights: of the micro-batches; empty if all count the same.
        """
        if not weights:
            flat = torch.stack(losses).mean().reshape(1)
            return self._comm.all_reduce(flat, "loss", self._comm.world_size).wait().reshape(())
        # A loss without weight may be anything, NaN too.
        sums = sum(
            (loss * weight for loss, weight in zip(losses, weights, strict=True) if weight), losses[0].new_zeros(())
        )
        flat = torch.stack([sums, sums.new_full((), float(sum(weights)))])
        total, weight = self._comm.all_reduce(flat, "loss").wait()
        return total / weight
