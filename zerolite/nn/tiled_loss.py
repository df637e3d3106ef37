"""Cross entropy of a linear head over tiles of tokens, whose logits are never whole.

The head is the widest layer of a language model: 32 thousand tokens with a vocabulary of 128 thousand have 16 GiB of
logits in fp32, and as many gradients. But each token's loss depends on its own logits alone. So a tile of tokens goes
through head, loss and their backward at once, and leaves behind its part of the gradients::

    hidden                logits                       gradients
    ┌──────┐   weight   ┌──────────────┐
    │ tile │ ─────────▶ │ one tile     │ ──▶ loss     hidden: this tile's rows
    ├──────┤            └──────────────┘              weight: added to those of the tiles before
    │ ...  │             memory of the next tile
    └──────┘

This works if the gradient of each token's loss is known but for a common factor, as with "mean" and "sum": backward
multiplies by that. With "none" the backward computes each tile's logits again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zerolite.utils.accelerator import host_value, is_fake
from zerolite.utils.dtypes import HALF
from zerolite.zero.stage3.absent_parameter import AbsentParameter
from zerolite.zero.stage3.live_view import LiveView

TILE_NUMEL = 1 << 26
"""Logits of a tile by default: 256 MiB in fp32."""
_LEAST_TOKENS = 256  # of a tile by default: with fewer, each product waits for the weight's memory
_MOST_TOKENS = 8192  # of a tile by default
_GRADIENT_NUMEL = 1 << 24  # elements of a 16-bit product before it is added to the fp32 gradient of the weight

Elementwise = Callable[[Tensor], Tensor]


def tokens_per_tile(vocabulary: int) -> int:
    """Return the number of tokens of a tile by default."""
    tokens = TILE_NUMEL // max(vocabulary, 1) // 128 * 128
    return min(max(tokens, _LEAST_TOKENS), _MOST_TOKENS)


def tiled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    soft_cap: float | None = None,
    num_items: float | Tensor | None = None,
    weights: Tensor | None = None,
    tile: int | None = None,
) -> Tensor:
    """Return ``F.cross_entropy(F.linear(hidden, weight, bias).float(), labels)``, without the logits in memory.

    Labels are not shifted: ``labels[i]`` is the class of token ``i``. Gradients may be taken once
    (``create_graph=True`` gives none of second order).

    Args:
        hidden: floating [..., width].
        weight: [vocabulary, width].
        labels: integers of the shape of ``hidden`` without its last dimension.
        bias: [vocabulary].
        ignore_index: label of tokens without a loss.
        label_smoothing: as in ``F.cross_entropy``.
        reduction: "mean" over the tokens with a loss, "sum", or "none".
        soft_cap: logits are first replaced by ``soft_cap * tanh(logits / soft_cap)``.
        num_items: divide the sum by this number, such as the tokens of all micro-batches of a step. Then ``reduction``
            has no effect.
        weights: factors of the tokens' losses, of the shape of ``labels``; "mean" divides by their sum. They get no
            gradient.
        tile: tokens of a tile; None: as many as have 2^26 logits, from 256 to 8192.

    Returns:
        A scalar, or with "none" a tensor of the shape of ``labels``; fp32, or fp64 for fp64. NaN for a mean over
        nothing.

    Raises:
        ValueError: for shapes that do not fit, or an unknown reduction.
        IndexError: for a label that is neither a class nor ``ignore_index`` (on CUDA: a device assertion).
    """
    _check(hidden, weight, labels, reduction, weights, tile)
    capped = None if soft_cap is None else lambda logits: soft_cap * torch.tanh(logits / soft_cap)
    options = LossOptions(ignore_index, label_smoothing, "sum" if num_items is not None else reduction)
    loss = cross_entropy_of_head(
        hidden, Head(weight, bias), labels, options, weights, capped, tile or tokens_per_tile(weight.shape[0])
    )
    return loss if num_items is None else loss / num_items


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, weights: Tensor | None, tile: int | None
) -> None:
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            "tiled_cross_entropy: expected hidden [..., width] and weight [vocabulary, width], got "
            f"{list(hidden.shape)} and {list(weight.shape)}; for a head of shape [width, vocabulary] pass weight.t()"
        )
    for name, tensor in (("labels", labels), ("weights", weights)):
        if tensor is not None and tensor.shape != hidden.shape[:-1]:
            raise ValueError(
                f"tiled_cross_entropy: expected {name} of shape {list(hidden.shape[:-1])}, one for each token, got "
                f"{list(tensor.shape)}"
            )
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f'tiled_cross_entropy: expected reduction "none", "mean" or "sum", got {reduction!r}')
    if tile is not None and tile < 1:
        raise ValueError(f"tiled_cross_entropy: expected at least 1 token in a tile, got {tile}")


class Head(NamedTuple):
    """Weight, [vocabulary, width], and bias of a linear head."""

    weight: Tensor
    bias: Tensor | None


class LossOptions(NamedTuple):
    """Options of ``F.cross_entropy``."""

    ignore_index: int
    label_smoothing: float
    reduction: str


def cross_entropy_of_head(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    options: LossOptions,
    weights: Tensor | None,
    elementwise: Elementwise | None,
    tile: int,
) -> Tensor:
    """Return the loss of :func:`tiled_cross_entropy`, in fp32 (fp64 for fp64), with checked arguments.

    Args:
        elementwise: applied to a tile's logits before the loss; torch differentiates it.
    """
    hidden, weight, bias = _as_autocast_would(hidden, *map(_with_values, head))
    exact = torch.float32 if hidden.dtype in HALF else hidden.dtype
    rows, classes = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    valid = classes != options.ignore_index
    index = _indices(classes, valid, weight.shape[0])
    coefficient = valid.to(exact)
    if weights is not None:
        coefficient = torch.where(valid, weights.detach().reshape(-1).to(exact), 0.0)
    differentiated = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (rows, weight, bias))
    settings = _Settings(tile, options.label_smoothing, exact, elementwise, differentiated)
    with torch.autocast(hidden.device.type, enabled=False) if _autocasts(hidden) else contextlib.nullcontext():
        if options.reduction == "none":
            losses: Tensor = _LossOfEach.apply(rows, weight, bias, index, coefficient, settings)
            return losses.view(labels.shape)
        divisor = coefficient.sum() if options.reduction == "mean" else None
        loss: Tensor = _SummedLoss.apply(rows, weight, bias, index, coefficient, divisor, settings)
        return loss


def _with_values(parameter: Tensor | None) -> Any:
    """Return a parameter whose values are gathered once for all tiles, where stage 3 has released it.

    An autograd function gets its arguments past ``__torch_function__``, which would gather them.
    """
    if not isinstance(parameter, AbsentParameter):
        return parameter
    view = parameter.view_as(parameter)  # inside a forward this gathers the parameter for the module under way
    return view.clone() if isinstance(view, LiveView) else view


def _autocasts(tensor: Tensor) -> bool:
    return torch.is_autocast_enabled(tensor.device.type)


def _as_autocast_would(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the arguments of the head's product in the dtype of autocast, once for all tiles."""
    if not _autocasts(hidden) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(hidden.device.type)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _indices(classes: Tensor, valid: Tensor, vocabulary: int) -> Tensor:
    """Return int64 indices of the labels' logits; 0 for ignored ones."""
    wrong = valid & ((classes < 0) | (classes >= vocabulary))
    if classes.device.type == "cpu" and not is_fake(classes) and host_value(wrong.any()):
        value = int(host_value(classes[wrong][0]))
        raise IndexError(f"Target {value} is out of bounds: expected 0 to {vocabulary - 1}, or ignore_index")
    return torch.where(valid, classes, 0).to(torch.int64)  # on CUDA the device refuses wrong ones


# -------------------------------------------------------------------- one tile


class _Settings(NamedTuple):
    """Settings of the tiles.

    Attributes:
        tile: tokens of a tile.
        smoothing: label smoothing.
        exact: dtype of the losses.
        elementwise: function of the logits before the loss.
        differentiated: hidden, weight and bias: True for those that need a gradient.
    """

    tile: int
    smoothing: float
    exact: torch.dtype
    elementwise: Elementwise | None
    differentiated: tuple[bool, ...]


def _losses_of_tile(
    logits: Tensor, index: Tensor, coefficient: Tensor, settings: _Settings, backward: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the losses of a tile's tokens and the gradient of its logits.

    Args:
        logits: [tokens, vocabulary], in memory that is overwritten.
        index: label of each token.
        coefficient: gradient of each token's loss, 0 for ignored ones.
        backward: compute the gradient.
    """
    changed, values = None, logits
    if settings.elementwise is not None:
        logits.requires_grad_(backward)
        with torch.set_grad_enabled(backward):
            changed = settings.elementwise(logits)
        values = changed.detach().clone() if backward else changed
    values = values.to(settings.exact)
    # Subtract the largest logit first: exp() would overflow otherwise.
    values -= values.amax(1, keepdim=True)
    picked = values.gather(1, index.unsqueeze(1)).squeeze(1)
    mean = values.sum(1) / values.shape[1] if settings.smoothing else None
    sums = values.exp_().sum(1)
    log_sums = sums.log()
    losses = log_sums - picked
    if mean is not None:
        losses = (1 - settings.smoothing) * losses + settings.smoothing * (log_sums - mean)
    if not backward:
        return losses, None
    values *= (coefficient / sums).unsqueeze(1)
    if settings.smoothing:
        values -= (coefficient * (settings.smoothing / values.shape[1])).unsqueeze(1)
    values.scatter_add_(1, index.unsqueeze(1), (coefficient * (settings.smoothing - 1.0)).unsqueeze(1))
    if changed is None:
        return losses, values
    (gradient,) = torch.autograd.grad(changed, logits, values.to(changed.dtype))
    return losses, gradient


class _Gradients:
    """Gradients of hidden, weight and bias, to which each tile adds its part.

    Those of weight and bias are added in fp32 for 16 bits: a sum in 16 bits would lose what a tile adds.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings) -> None:
        of_hidden, of_weight, of_bias = settings.differentiated
        self._weight = weight
        self.hidden = torch.empty_like(hidden) if of_hidden else None
        self.weight = torch.zeros_like(weight, dtype=settings.exact) if of_weight else None
        self.bias = torch.zeros_like(bias, dtype=settings.exact) if of_bias and bias is not None else None

    def add(self, tokens: slice, hidden: Tensor, of_logits: Tensor) -> None:
        """Add a tile.

        Args:
            tokens: its rows.
            hidden: these rows.
            of_logits: the gradient of its logits.
        """
        if self.hidden is not None:
            torch.mm(of_logits, self._weight, out=self.hidden[tokens])
        if self.bias is not None:
            self.bias += of_logits.sum(0, dtype=self.bias.dtype)
        if self.weight is None:
            return
        if self.weight.dtype == of_logits.dtype:
            self.weight.addmm_(of_logits.t(), hidden)
            return
        step = max(1, _GRADIENT_NUMEL // hidden.shape[1])
        for start in range(0, self.weight.shape[0], step):
            self.weight[start : start + step] += of_logits[:, start : start + step].t() @ hidden

    def all(self) -> tuple[Tensor | None, ...]:
        return self.hidden, self.weight, self.bias


def _run_tiles(
    hidden: Tensor, head: Head, index: Tensor, coefficient: Tensor, settings: _Settings, backward: bool
) -> tuple[Tensor, _Gradients | None]:
    """Return the losses of all tokens, in fp32 or fp64, and the gradients of their sum with these coefficients."""
    weight, bias = head
    gradients = _Gradients(hidden, weight, bias, settings) if backward else None
    losses = hidden.new_empty(len(hidden), dtype=settings.exact)
    for start in range(0, len(hidden), settings.tile):
        tokens = slice(start, start + settings.tile)
        rows = hidden[tokens]
        logits = F.linear(rows, weight, bias)
        if settings.elementwise is None:
            logits = logits.to(settings.exact)  # here, where the product in 16 bits is freed at once
        losses[tokens], of_logits = _losses_of_tile(logits, index[tokens], coefficient[tokens], settings, backward)
        del logits
        if gradients is not None and of_logits is not None:
            gradients.add(tokens, rows, of_logits.to(hidden.dtype))
        del of_logits
    return losses, gradients


# -------------------------------------------------------------------- autograd


class _SummedLoss(torch.autograd.Function):
    """Sum of coefficient × loss, divided by ``divisor``. Its forward computes the gradients of the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        index: Tensor,
        coefficient: Tensor,
        divisor: Tensor | None,
        settings: _Settings,
    ) -> Tensor:
        backward = any(settings.differentiated)
        losses, gradients = _run_tiles(hidden, Head(weight, bias), index, coefficient, settings, backward)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.tile = settings.tile
        if gradients is not None:
            ctx.save_for_backward(divisor, *gradients.all())
        total = torch.where(coefficient != 0, losses * coefficient, 0.0).sum()
        return total if divisor is None else total / divisor

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        divisor, *sums = ctx.saved_tensors
        # No token has a loss: NaN, whose gradients torch defines as 0.
        factor = gradient if divisor is None else torch.where(divisor == 0, 0.0, gradient / divisor)
        scaled = [_scaled(of, factor, dtype, ctx.tile) for of, dtype in zip(sums, ctx.dtypes, strict=True)]
        return (*scaled, None, None, None, None)


def _scaled(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype | None, rows: int) -> Tensor | None:
    """Return ``gradient * factor`` in ``dtype``, computed in the dtype of ``factor``, some rows at a time."""
    if gradient is None:
        return None
    result = torch.empty_like(gradient, dtype=dtype)
    for source, target in zip(gradient.split(rows), result.split(rows), strict=True):
        # Not in 16 bits: the factor itself would be rounded, and every gradient would have its error.
        target.copy_(source.to(factor.dtype) * factor)
    return result


class _LossOfEach(torch.autograd.Function):
    """Coefficient × loss of each token. Its backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        index: Tensor,
        coefficient: Tensor,
        settings: _Settings,
    ) -> Tensor:
        losses, _ = _run_tiles(hidden, Head(weight, bias), index, coefficient, settings, backward=False)
        ctx.settings = settings
        ctx.save_for_backward(hidden, weight, bias, index, coefficient)
        return torch.where(coefficient != 0, losses * coefficient, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight, bias, index, coefficient = ctx.saved_tensors
        _, gradients = _run_tiles(hidden, Head(weight, bias), index, gradient * coefficient, ctx.settings, True)
        assert gradients is not None
        dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        cast = [None if of is None else of.to(dtype) for of, dtype in zip(gradients.all(), dtypes, strict=True)]
        return (*cast, None, None, None)
