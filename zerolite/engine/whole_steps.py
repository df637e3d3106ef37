"""Whole steps of an engine whose ranks have all layers: `train_batch` and `eval_batch` as loops over micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from zerolite.comm.flight_recorder import EVENTS
from zerolite.data.micro_batch import MicroBatch

if TYPE_CHECKING:
    from zerolite.engine.engine import Engine


def train_batch(engine: Engine, batches: Iterator[object]) -> torch.Tensor:
    """Run ``Engine.train_batch``."""
    accumulation = engine._parts.accumulation
    if not accumulation.empty:
        raise RuntimeError(
            "engine.train_batch: expected no gradients since the last step, got some; call engine.step(flush=True) "
            "or engine.zero_grad() first"
        )
    if accumulation.forced_boundary is not None or accumulation.sync_disabled:
        raise RuntimeError(
            "engine.train_batch: expected to count micro-batches itself, got engine.no_sync() or "
            "engine.set_gradient_accumulation_boundary() in force; leave them out, or use engine.backward and step"
        )
    losses, weights = list[torch.Tensor](), list[int]()
    for _ in range(accumulation.micro_batches):
        try:
            batch = next(batches)
        except StopIteration:
            EVENTS.append(f"came to the end of its batches in engine.train_batch, in step {engine.global_steps + 1}")
            raise
        micro = MicroBatch.of(batch, engine.loss_fn, engine.device)
        loss = micro.loss(engine(*micro.args, **micro.kwargs), engine.loss_fn)
        weight = engine._batch_weight()
        engine.backward(loss, weight=weight)
        losses.append(loss.detach().float().reshape(()))
        weights += [] if weight is None else [weight]
        engine.step()
    return _mean_over_data(engine, losses, weights)


def eval_batch(
    engine: Engine, batches: Iterator[object], return_logits: bool, compute_loss: bool, micro_batches: int | None
) -> Any:
    """Run ``Engine.eval_batch``. Called in eval mode and without gradients."""
    losses, outputs, weights = list[torch.Tensor](), [], list[int]()
    for _ in range(micro_batches or engine._parts.accumulation.micro_batches):
        micro = MicroBatch.of(next(batches), engine.loss_fn, engine.device)
        made = engine(*micro.args, **micro.kwargs)
        outputs.append(made)
        if compute_loss:
            losses.append(micro.loss(made, engine.loss_fn).float().reshape(()))
            weight = engine._batch_weight()
            weights += [] if weight is None else [weight]
    if not compute_loss:
        return outputs
    loss = _mean_over_data(engine, losses, weights)
    return (loss, outputs) if return_logits else loss


def _mean_over_data(engine: Engine, losses: list[torch.Tensor], weights: list[int]) -> torch.Tensor:
    """Return the mean over micro-batches and data-parallel ranks: 0-dim, fp32, the same on all these ranks.

    Args:
        losses: one for each micro-batch.
        weights: of the micro-batches; empty if all count the same.
    """
    comm = engine._parts.topology.data
    if not weights:
        flat = torch.stack(losses).mean().reshape(1)
        return comm.all_reduce(flat, "loss", comm.world_size).wait().reshape(())
    # A loss without weight may be anything, NaN too.
    sums = sum((loss * weight for loss, weight in zip(losses, weights, strict=True) if weight), losses[0].new_zeros(()))
    flat = torch.stack([sums, sums.new_full((), float(sum(weights)))])
    total, weight = comm.all_reduce(flat, "loss").wait()
    return total / weight
