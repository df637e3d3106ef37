"""Vocabulary-parallel cross entropy (Shoeybi et al., 2019, section 3).

Only numbers for each token are sent: the largest logit, then the sum of exponentials and the target's logit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerolite.comm import Communicator
from zerolite.tensor_parallel.functions import TAG, sends
from zerolite.utils.accelerator import host_value, is_fake
from zerolite.utils.dtypes import HALF


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    comm: Communicator,
    vocabulary: int,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return ``F.cross_entropy`` of the full logits on every rank, although each rank has only a range of them.

    It and its backward, which sends nothing, are called on all ranks of ``comm``.

    Args:
        logits: floating [tokens, ceil(vocabulary / ranks)], this rank's range of the vocabulary. Logits beyond the end
            of the vocabulary are padding and are ignored. For 16-bit logits the loss is computed in fp32.
        target: integers [tokens], the same on all ranks.
        comm: the ranks that share the vocabulary.
        vocabulary: size of the full vocabulary.

    Returns:
        A scalar, or [tokens] with reduction "none", in the dtype of ``logits`` (fp32 under autocast).

    Raises:
        IndexError: a target is neither in the vocabulary nor ``ignore_index`` (on CUDA: a device assertion).
        ValueError: the reduction is unknown.
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f'expected reduction "none", "mean" or "sum", got {reduction!r}')
    if target.shape != logits.shape[:1]:
        raise ValueError(f"expected one target for each of {logits.shape[0]} tokens, got shape {list(target.shape)}")
    start = min(comm.rank * logits.shape[1], vocabulary)
    rows = min(logits.shape[1], vocabulary - start)
    valid = target != ignore_index
    index, in_shard = _local_targets(target, valid, start, rows, vocabulary)
    losses = _CrossEntropy.apply(logits, index, in_shard, valid, comm, rows, vocabulary, label_smoothing)
    dtype = losses.dtype if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    if reduction == "none":
        return losses.to(dtype)
    total = losses.sum()
    return (total / valid.sum() if reduction == "mean" else total).to(dtype)


def _local_targets(target: Tensor, valid: Tensor, start: int, rows: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the index of each target in this rank's logits, int64 [tokens], and a mask of the targets in its range."""
    wrong = valid & ((target < 0) | (target >= vocabulary))
    if target.device.type == "cpu" and not is_fake(target) and host_value(wrong.any()):
        value = int(host_value(target[wrong][0]))
        raise IndexError(f"Target {value} is out of bounds: expected 0 to {vocabulary - 1}, or ignore_index")
    local = target - start
    in_shard = valid & (local >= 0) & (local < rows)
    # On CUDA a wrong target gets an index that gather refuses, so the host does not wait for the device to check it.
    index = torch.where(in_shard, local, torch.where(wrong, max(rows, 1), 0))
    return index.to(torch.int64), in_shard


class _CrossEntropy(torch.autograd.Function):
    """Loss of each token, [tokens] in fp32 (fp64 for fp64 logits); 0 for ignored targets."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        index: Tensor,
        in_shard: Tensor,
        valid: Tensor,
        comm: Communicator,
        rows: int,
        vocabulary: int,
        smoothing: float,
    ) -> Tensor:
        tokens = logits.shape[0]
        exact = torch.float32 if logits.dtype in HALF else logits.dtype
        shard = logits.detach()[:, :rows]
        # Subtract the largest logit of all ranks first: exp() would overflow otherwise.
        largest = shard.amax(1).to(exact) if rows else shard.new_full((tokens,), -float("inf"), dtype=exact)
        if sends(largest, comm):
            comm.all_reduce_max(largest, TAG)
        shifted = shard.to(exact) - largest.unsqueeze(1)
        sums = shifted.new_zeros((3 if smoothing else 2, tokens))
        if rows:
            sums[1] = torch.where(in_shard, shifted.gather(1, index.unsqueeze(1)).squeeze(1), 0.0)
        if smoothing:
            sums[2] = shifted.sum(1)
        probabilities = shifted.exp_()
        sums[0] = probabilities.sum(1)
        if sends(sums, comm):
            comm.all_reduce(sums.view(-1), TAG).wait()
        losses = sums[0].log() - sums[1]
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (sums[0].log() - sums[2] / vocabulary)
        # Backward needs only the probabilities of this rank's logits. They overwrite the exponentials.
        probabilities /= sums[0].unsqueeze(1)
        ctx.save_for_backward(probabilities, index, in_shard, valid)
        ctx.smoothing, ctx.vocabulary, ctx.like = smoothing, vocabulary, (logits.shape, logits.dtype)
        return torch.where(valid, losses, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        probabilities, index, in_shard, valid = ctx.saved_tensors
        shape, dtype = ctx.like
        rows = probabilities.shape[1]
        gradient = torch.where(valid, gradient, 0.0)
        result = probabilities.new_zeros(shape) if rows < shape[1] else torch.empty_like(probabilities)
        local_result = result[:, :rows]
        if rows:
            torch.mul(probabilities, gradient.unsqueeze(1), out=local_result)
            if ctx.smoothing:
                local_result -= (gradient * (ctx.smoothing / ctx.vocabulary)).unsqueeze(1)
            target = torch.where(in_shard, gradient * (ctx.smoothing - 1.0), 0.0)
            local_result.scatter_add_(1, index.unsqueeze(1), target.unsqueeze(1))
        return result.to(dtype), None, None, None, None, None, None, None
