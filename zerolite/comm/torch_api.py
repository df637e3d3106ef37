"""Functions of torch.distributed by name, for programs that expect them from another library."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def function(name: str) -> Any:
    """Return ``torch.distributed.<name>``. Raises AttributeError if there is none."""
    return getattr(dist, name)
