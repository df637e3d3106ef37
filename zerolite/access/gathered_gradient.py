"""Views of a gradient that was gathered for reading."""

from __future__ import annotations

import torch

from zerolite.utils.nested import Arguments, Function, Keywords, find_tensors


class GatheredGradient(torch.Tensor):
    """View of a gathered gradient, for reading. Writing to it raises RuntimeError, because the values would be lost."""

    @classmethod
    def __torch_function__(
        cls, function: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            views = find_tensors((args, kwargs), cls)
            before = [view._version for view in views]
            result = function(*args, **kwargs)
            if before != [view._version for view in views]:
                raise RuntimeError(
                    "a view of p.grad was written to, but it is a copy that was gathered for reading, so the gradient "
                    "has not changed; write to p.grad itself (p.grad[0] = 0, p.grad.mul_(mask)), or call "
                    "zerolite.set_full_grad(p, value) on all ranks"
                )
            return read_only(result) if type(result) is torch.Tensor and result._is_view() else result


def read_only(view: torch.Tensor) -> torch.Tensor:
    """Return ``view`` as a tensor that raises RuntimeError when it is written to."""
    return view if view.is_inference() else view.as_subclass(GatheredGradient)
