"""Real tensors, and those on the meta device, to tensors without memory on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from zerolite.accelerator import is_fake
from zerolite.runtime.zero.partitioned_parameter import handle_of


def without_memory(values: Any) -> Any:
    """``values`` (nested) with fake tensors on the CPU in place of all others. Inside a FakeTensorMode."""
    return tree_map_only(torch.Tensor, _fake, values)


def on_the_cpu(model: torch.nn.Module) -> None:
    """Fake parameters and buffers of ``model`` that are on the meta device, to the CPU. Tied ones stay tied. Inside a
    FakeTensorMode."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and handle_of(parameter) is None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = torch.nn.Parameter(_fake(parameter), parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = made.setdefault(id(buffer), _fake(buffer))
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:  # what was made of numbers (torch.tensor(0.5)) remembers them, with the dtype that it had
        tensor.constant = None


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    if is_fake(tensor) and tensor.device.type == "cpu":
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
