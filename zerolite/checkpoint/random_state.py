"""States of one process's random number generators: torch on the CPU and each device, NumPy and Python."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

from zerolite.checkpoint import json_codec


def save_random_state(device: torch.device) -> torch.Tensor:
    """Return the states of this process's random generators as bytes, uint8; NumPy's only if it has been imported."""
    state: dict[str, Any] = {"torch": _bytes(torch.get_rng_state()), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = _bytes(torch.cuda.get_rng_state(device))
    if "numpy" in sys.modules:
        generator, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [generator, keys.tolist(), *rest]
    text = json.dumps(json_codec.encode(state, "random state", []), separators=(",", ":")).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def load_random_state(saved: torch.Tensor, device: torch.device) -> None:
    """Restore the generators from :func:`save_random_state`. Generators whose state was not saved stay as they are.

    Raises ValueError for other bytes.
    """
    try:
        state = json_codec.decode(json.loads(bytes(saved.tolist())), _no_tensor)
        torch.set_rng_state(_tensor(state["torch"]))
        random.setstate(state["python"])
        if "cuda" in state and device.type == "cuda":
            torch.cuda.set_rng_state(_tensor(state["cuda"]), device)
        if "numpy" in state and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(tuple(state["numpy"]))
    except Exception as error:  # four libraries, each with exceptions of its own
        raise ValueError(f"expected the states of random number generators, got others ({error})") from error


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _no_tensor(index: int) -> torch.Tensor:
    raise ValueError("a random state has no tensors")
