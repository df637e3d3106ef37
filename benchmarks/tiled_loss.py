"""Head and loss of a language model over tiles of tokens, beside whole logits: peak memory and processor time.

    python benchmarks/tiled_loss.py --tokens 8192 --vocabulary 32000 --width 512

The peak is that of all tensors that forward and backward make, hidden and weight left out, counted on the CPU.
"""

from __future__ import annotations

import argparse
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zerolite.nn import tiled_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Peak(TorchDispatchMode):
    """Most bytes at a time of the memory that operations have made."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def ignore(self, *tensors: Tensor) -> None:
        """Leave out tensors that exist already."""
        self._known.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def ignore_like(self, other: Peak) -> None:
        """Leave out what ``other`` has seen and is still there."""
        self._known.update(other._known)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += nbytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, key, nbytes)

    def _remove(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def checkpointed(tile: int) -> Loss:
    """Return what a loop can do with torch alone: a checkpoint for each tile."""

    def part(rows: Tensor, weight: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(rows, weight).float(), classes, reduction="sum")

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        parts = zip(hidden.split(tile), labels.split(tile), strict=True)
        losses = [checkpoint(part, rows, weight, classes, use_reentrant=False) for rows, classes in parts]
        return torch.stack(losses).sum() / len(labels)

    return loss


def measure(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[float, float, float]:
    """Return the loss, the peak in MiB, and the shortest processor time of three runs, in seconds."""
    with Peak() as peak:
        peak.ignore(hidden, weight, labels)
        value = loss(hidden, weight, labels)
        value.backward()
        del value
    seconds = []
    for _ in range(3):
        hidden.grad = weight.grad = None
        begin = time.process_time()
        value = loss(hidden, weight, labels)
        value.backward()
        seconds.append(time.process_time() - begin)
    hidden.grad = weight.grad = None
    return value.item(), peak.peak / 2**20, min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 2048), ("vocabulary", 16000), ("width", 256), ("tile", 256)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.width, dtype=dtype).requires_grad_()
    weight = (torch.randn(args.vocabulary, args.width) / args.width**0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, args.vocabulary, (args.tokens,))
    ways: dict[str, Loss] = {
        "whole logits": whole,
        "a checkpoint per tile": checkpointed(args.tile),
        "zerolite": lambda h, w, y: tiled_cross_entropy(h, w, y, tile=args.tile),
    }
    print(f"{args.tokens} tokens, vocabulary {args.vocabulary}, width {args.width}, {args.dtype}, tiles of {args.tile}")
    print("| | loss | peak, MiB | processor time, s |\n|---|---|---|---|")
    for name, loss in ways.items():
        value, peak, seconds = measure(loss, hidden, weight, labels)
        print(f"| {name} | {value:.6f} | {peak:.0f} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
