"""Layers of a model with adapters of PEFT, and such a layer without them.

PEFT merges and unloads by itself, in a copy of the layer around copies of its tensors. So every kind of adapter that
PEFT can merge has PEFT's own numbers, and the training weights keep their bits.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch

from zerolite.zero.stage3.absent_parameter import copy_with_values


def base_prefix(model: torch.nn.Module) -> str:
    """Return what PEFT puts in front of the names of its base model; "" for a model that is not PEFT's.

    Raises:
        ValueError: the adapters are outside of the base model (prompts), so they cannot be merged into it.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return ""
    base = model.get_base_model()
    prefix = next(f"{name}." for name, module in model.named_modules() if module is base)
    outside = [name for name, _ in model.named_parameters() if not name.startswith(prefix)]
    if outside:
        raise ValueError(
            f"expected adapters that can be merged into the base model, got parameter '{outside[0]}' outside of it; "
            "pass merge_lora=False"
        )
    return prefix


def adapted_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the outermost layers with adapters of PEFT, by name."""
    if "peft" not in sys.modules:
        return {}
    # A program with adapters has loaded these.
    layer, other = sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer, sys.modules["peft.utils.other"]
    kinds = (layer, getattr(other, "AuxiliaryTrainingWrapper", other.ModulesToSaveWrapper))
    layers: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, kinds) and not any(name.startswith(f"{outer}.") for outer in layers):
            layers[name] = module
    return layers


def without_adapters(
    layer: Any, values: Mapping[torch.Tensor, torch.Tensor], merge: bool
) -> Mapping[str, torch.Tensor]:
    """Return the state dict of the layer that the adapters of ``layer`` are around.

    Args:
        layer: the layer with its adapters, which stays as it is.
        values: full values of its parameters and buffers, by tensor. Merging writes into them.
        merge: False leaves the adapters out; the values may be without memory then.
    """
    memo: dict[int, Any] = {}
    for tensor, value in values.items():
        if isinstance(tensor, torch.nn.Parameter):
            copy_with_values(tensor, value, memo)
        else:
            memo[id(tensor)] = value
    copied = copy.deepcopy(layer, memo)
    if hasattr(copied, "unload_and_optionally_merge_module"):  # multi-head attention, modules that are saved whole
        plain = copied.unload_and_optionally_merge_module(merge=merge, safe_merge=False, adapter_names=None)
    else:
        if merge:
            copied.merge()
        plain = copied.get_base_layer()
    state: Mapping[str, torch.Tensor] = plain.state_dict()
    return state
