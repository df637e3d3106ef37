"""The engine's part of tiled losses: finds the heads of a model and lets them defer their logits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zerolite.config import Tiles
from zerolite.nn.deferred_logits import DeferredLogits, HeadCall, LossTiling
from zerolite.nn.tiled_loss import tokens_per_tile
from zerolite.utils.accelerator import is_fake
from zerolite.utils.module_hook import ReplacedCall, WeakHook, is_observed, is_replaced
from zerolite.utils.nested import map_tensors
from zerolite.utils.torch_private import current_backward
from zerolite.zero.observers import StepObserver

logger = logging.getLogger("zerolite")

LEAST_VOCABULARY = 16_384
"""Outputs from which "auto" tiles a head: below it, other activations of a model are larger than its logits."""


def find_heads(model: torch.nn.Module) -> Iterator[torch.nn.Linear]:
    """Yield the linear layers that compute logits: the output embeddings of a Hugging Face model, and layers with as
    many outputs as an embedding of the model has rows."""
    modules = list(model.modules())  # each once
    rows = {module.num_embeddings for module in modules if isinstance(module, torch.nn.Embedding)}
    named = {id(head) for module in modules if (head := _output_embeddings(module)) is not None}
    for module in modules:
        if type(module) is torch.nn.Linear and (id(module) in named or module.out_features in rows):
            yield module


def _output_embeddings(module: torch.nn.Module) -> object:
    get = getattr(type(module), "get_output_embeddings", None)
    try:
        return None if get is None else get(module)
    except (AttributeError, NotImplementedError):  # models without a head inherit the method
        return None


def tile_losses(model: torch.nn.Module, setting: Tiles, tiling: LossTiling) -> list[Any]:
    """Let the heads of ``model`` defer their logits inside its forward.

    Args:
        setting: the config's ``tiled_loss``.

    Returns:
        Handles, whose ``remove()`` ends it; empty if there is nothing to tile.
    """
    least = LEAST_VOCABULARY if setting == "auto" else 0
    heads = [] if setting is False else [head for head in find_heads(model) if head.out_features >= least]
    handles: list[Any] = []
    for head in heads:
        if not is_replaced(head):
            tile = setting if type(setting) is int else tokens_per_tile(head.out_features)
            handles.append(_DeferringCall(head, tiling, tile))
    if handles:
        handles.append(_Enter(tiling).install(model.register_forward_pre_hook, prepend=True))
        handles.append(_Leave(tiling).install(model.register_forward_hook, always_call=True))
    return handles


class WeightChanges(StepObserver):
    """Observer of updates, after which logits that were not kept cannot be computed any more."""

    def __init__(self, tiling: LossTiling) -> None:
        self._tiling = tiling

    def on_update_begin(self) -> None:
        self._tiling.on_weights_changed()

    def on_weights_written(self, all_of_them: bool) -> None:
        self._tiling.on_weights_changed()


class _DeferringCall(ReplacedCall):
    """Call of a head, which returns :class:`DeferredLogits` inside a forward of the model."""

    def __init__(self, head: torch.nn.Linear, tiling: LossTiling, tile: int) -> None:
        super().__init__(head)
        self._tiling, self._tile = tiling, tile

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not self._defers(args[0]):
            return self.inner()(*args, **kwargs)
        head: Any = self.module
        return DeferredLogits.of(HeadCall(head, args[0], self._tile, self._tiling))

    def _defers(self, hidden: Any) -> bool:
        head: Any = self.module
        inside = self._tiling.depth or current_backward() != -1  # a checkpoint recomputes what the forward did
        if not inside or not (type(hidden) is Tensor or is_fake(hidden)):
            return False
        if hidden.shape[-1:] != (head.in_features,) or "forward" in vars(head):
            return False
        few = hidden.numel() <= self._tile * head.in_features
        return not ((few and not self._tiling.always) or torch.compiler.is_compiling() or is_observed(head))


class _Enter(WeakHook[LossTiling]):
    """Hook before the model's forward, in which heads defer their logits."""

    def __call__(self, module: torch.nn.Module, args: object) -> None:
        if (tiling := self.owner()) is not None:
            tiling.depth += 1


class _Leave(WeakHook[LossTiling]):
    """Hook after the model's forward. Logits without a loss become whole, as if nothing had been deferred."""

    def __call__(self, module: torch.nn.Module, args: object, outputs: object) -> Any:
        tiling = self.owner()
        if tiling is None:
            return None
        tiling.depth = max(tiling.depth - 1, 0)
        if tiling.depth:
            return None
        whole = map_tensors(lambda tensor: _left(tensor, tiling.always), outputs)
        return None if whole is outputs else whole


def _left(tensor: Tensor, always: bool) -> Tensor:
    """Return what leaves the model's forward in the place of ``tensor``."""
    if not isinstance(tensor, DeferredLogits):
        return tensor
    call, state = tensor.call, tensor.state
    # An evaluation at stage 3 may read logits on one rank alone, and later they would be gathered.
    stays = call.has_loss and not state.is_whole and (not always or torch.is_grad_enabled())
    call.end(with_loss=stays)
    return tensor if stays else state.whole()
