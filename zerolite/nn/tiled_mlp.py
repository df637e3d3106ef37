"""MLPs, and norms that Python computes, over tiles of tokens, whose wide activations are never whole.

The MLP of a Llama widens each token to three times 14,336 numbers, and its backward needs them all: 2.6 GiB for 32
thousand tokens in bf16. A token's output depends on its own input alone. So the backward computes one tile again at a
time, and adds its gradients of the weights to those of the tiles before. They reach autograd, and hooks, once.

A Llama's RMSNorm is written in Python. It keeps its input in fp32 and again in 16 bits, and its backward makes three
more such tensors: over long sequences the most of all memory, once the MLPs are tiled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerolite.config import Tiles
from zerolite.utils.accelerator import is_fake
from zerolite.utils.dtypes import HALF
from zerolite.utils.module_hook import ReplacedCall, is_compiled, is_observed, is_replaced

TILE_NUMEL = 1 << 26
"""Elements of the widest activation of a tile by default: 128 MiB in 16 bits."""
AUTO_TILES = 4
"""Tiles from which "auto" computes a forward twice: below it, the memory is not worth the time."""

_LAYERS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("c_fc", "c_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
)


def find_mlps(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the MLPs that work on each token by itself, as their structure shows.

    They have the linear layers of a Llama, GPT-2 or GPT-NeoX by name, and beside these nothing but modules without
    parameters (activations, dropout).
    """
    for module in model.modules():
        children = dict(module.named_children())
        layers = next((names for names in _LAYERS if set(names) <= set(children)), None)
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if layers is None or own or is_compiled(module):
            continue
        others = [child for name, child in children.items() if name not in layers]
        if all(_is_linear(children[name]) for name in layers) and not any(map(_has_state, others)):
            yield module


def find_norms(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the RMS norms that are written in Python, as in Hugging Face's models: torch's own is one operation."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if "RMSNorm" not in type(module).__name__ or isinstance(module, torch.nn.RMSNorm) or is_compiled(module):
            continue
        is_leaf = not any(True for _ in module.children()) and not any(True for _ in module.buffers())
        if is_leaf and len(own) == 1 and own[0].dim() == 1:
            yield module


def _is_linear(module: torch.nn.Module) -> bool:
    """Return True for nn.Linear and Hugging Face's Conv1D."""
    return type(module) is torch.nn.Linear or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def _has_state(module: torch.nn.Module) -> bool:
    tensors = [*module.parameters(), *module.buffers()]
    return bool(tensors) or any(True for _ in module.children())


def _width(module: torch.nn.Module) -> int:
    """Return the number of elements of a token's widest activation."""
    return max(parameter.shape[0] for parameter in module.parameters() if parameter.dim())


def tile_mlps(
    model: torch.nn.Module, setting: Tiles, is_divided: Callable[[torch.nn.Module], bool]
) -> list[ReplacedCall]:
    """Let the MLPs and norms of ``model`` compute over tiles of tokens.

    Args:
        setting: the config's ``tiled_mlp``.
        is_divided: returns True for an MLP whose layers stage 3 gathers apart: every tile would gather them again.

    Returns:
        Handles, whose ``remove()`` ends it.
    """
    if setting is False:
        return []
    handles: list[ReplacedCall] = []
    for mlp in (*find_mlps(model), *find_norms(model)):
        if is_replaced(mlp) or is_divided(mlp):
            continue
        tile = setting if type(setting) is int else max(256, TILE_NUMEL // _width(mlp) // 128 * 128)
        handles.append(_TiledCall(mlp, tile, AUTO_TILES * tile if setting == "auto" else tile))
    return handles


class _TiledCall(ReplacedCall):
    """Call of an MLP or a norm, whose forward goes over tiles if there are many tokens. Its hooks see whole tensors."""

    def __init__(self, mlp: torch.nn.Module, tile: int, most: int) -> None:
        """most: tokens of a call that is not tiled."""
        super().__init__(mlp)
        self._tile, self._most = tile, most

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not self._tiles(args[0]):
            return self.inner()(*args, **kwargs)
        mlp = self.module
        forward = functools.partial(type(mlp).forward, mlp)
        mlp.__dict__["forward"] = functools.partial(_tiled, mlp, forward, self._tile)
        try:
            return self.inner()(*args)
        finally:
            del mlp.__dict__["forward"]

    def _tiles(self, x: Any) -> bool:
        mlp = self.module
        if not (type(x) is Tensor or is_fake(x)) or x.dim() < 2 or x.shape[:-1].numel() <= self._most:
            return False
        if torch.compiler.is_compiling() or "forward" in vars(mlp):
            return False
        if any(weight.shape[0] != x.shape[-1] for weight in mlp.parameters(recurse=False)):
            return False  # a norm over other dimensions than a token's own, whatever its name
        return not (_drops_out(mlp) or any(map(_differs_in_tiles, mlp.children())))


def _drops_out(mlp: torch.nn.Module) -> bool:
    """Return True for an MLP that calls dropout itself, as its attributes say: its backward would draw others."""
    return mlp.training and any("dropout" in name and value for name, value in vars(mlp).items())


def _differs_in_tiles(module: torch.nn.Module) -> bool:
    """Return True for a layer that would do something else with tiles: dropout, and hooks of the user."""
    if module.training and getattr(module, "p", False) and "Dropout" in type(module).__name__:
        return True  # its random numbers would come in another order
    return is_observed(module) or is_replaced(module)


def _tiled(mlp: torch.nn.Module, forward: Callable[[Tensor], Tensor], tile: int, x: Tensor) -> Tensor:
    result: Tensor = _TiledTokens.apply(x, forward, tile, *mlp.parameters())
    return result


class _TiledTokens(torch.autograd.Function):
    """``forward(x)`` over tiles of tokens; its backward computes each tile again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], tile: int, *parameters: Tensor) -> Tensor:
        rows, result = _rows(x), None
        for start in range(0, len(rows), tile):
            part = _rows(forward(_as_input(rows[start : start + tile], x)))
            if result is None:
                result = part.new_empty((len(rows), part.shape[-1]))
            result[start : start + tile] = part
        assert result is not None
        kind = x.device.type
        ctx.forward, ctx.tile, ctx.parameters = forward, tile, parameters
        ctx.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        ctx.save_for_backward(x)
        return result.view(*x.shape[:-1], result.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        of_x, _, _, *needed = ctx.needs_input_grad
        trained = [parameter for parameter, need in zip(ctx.parameters, needed, strict=True) if need]
        sums = [torch.zeros_like(p, dtype=torch.float32 if p.dtype in HALF else p.dtype) for p in trained]
        rows, gradients = _rows(x), _rows(gradient)
        result = torch.empty_like(rows) if of_x else None
        autocast = torch.autocast(x.device.type, dtype=ctx.autocast, enabled=ctx.autocast is not None)
        with _without_hooks(trained):
            for start in range(0, len(rows), ctx.tile):
                tokens = slice(start, start + ctx.tile)
                inputs = rows[tokens].detach().requires_grad_(of_x)
                with torch.enable_grad(), autocast:
                    output = _rows(ctx.forward(_as_input(inputs, x)))
                wanted = [*([inputs] if of_x else []), *trained]
                parts = list(torch.autograd.grad(output, wanted, gradients[tokens], allow_unused=True))
                del output
                if result is not None:
                    result[tokens] = parts.pop(0)
                for total, part in zip(sums, parts, strict=True):
                    if part is not None:
                        total += part
        cast = iter([total.to(parameter.dtype) for total, parameter in zip(sums, trained, strict=True)])
        of_parameters = [next(cast) if need else None for need in needed]
        return None if result is None else result.view(x.shape), None, None, *of_parameters


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _as_input(rows: Tensor, like: Tensor) -> Tensor:
    """Return rows with as many dimensions as the whole input has."""
    return rows.view(*(1,) * (like.dim() - 2), *rows.shape)


@contextlib.contextmanager
def _without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Context in which hooks on gradients of parameters do not run: they get the sum over tiles, later."""
    hooks: list[tuple[Any, dict[Any, Any]]] = []
    for parameter in parameters:
        if parameter._backward_hooks:
            hooks.append((parameter._backward_hooks, dict(parameter._backward_hooks)))
            parameter._backward_hooks.clear()
    try:
        yield
    finally:
        for current, before in hooks:
            current.update(before)
