"""Choice between zerolite's update kernels and torch's optimizers, equal on all ranks."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from zerolite.comm import Communicator, collective, largest
from zerolite.ops.library import unavailable_reason
from zerolite.optim.update_rules import ONLY_HERE, UpdateRule, rule_of, unsupported
from zerolite.utils.dtypes import FLOATS

logger = logging.getLogger("zerolite")


@collective
def kernel_chooser(
    comm: Communicator, device: torch.device, updates: Sequence[torch.device]
) -> Callable[[Optimizer, Sequence[torch.dtype]], UpdateRule | None]:
    """Return a function (optimizer, dtypes of its master weights) -> rule of the kernels.

    The function returns None if torch's own implementation makes the update. If one rank cannot load the kernels, no
    rank uses them, because at stage 0 all ranks must compute the same bits. It costs one small all-reduce.

    Args:
        comm: communicator of all ranks.
        device: device for collectives.
        updates: all devices on which parameters are updated.
    """
    reasons = {} if comm.is_dry else {on: unavailable_reason(on) for on in updates}  # a dry run launches none
    lacking, reason = next(((on, why) for on, why in reasons.items() if why is not None), (device, None))
    (somewhere,) = largest([0 if reason is None else comm.rank + 1], comm, device, "kernels")
    if somewhere == comm.rank + 1 and os.environ.get("ZEROLITE_KERNELS") != "0":
        _warn_once(_warning(lacking, reason or "", comm))

    def choose(optimizer: Optimizer, masters: Sequence[torch.dtype]) -> UpdateRule | None:
        rule = rule_of(optimizer)
        known = all(dtype in FLOATS for dtype in masters)
        if rule is not None and rule.only_here(optimizer.param_groups):
            if not known:
                raise ValueError(
                    f"optimizer.params: {' and '.join(ONLY_HERE)} can be false for parameters in fp32, bf16 or fp16, "
                    f"got {', '.join(sorted({str(dtype) for dtype in masters}))}; leave the keys out"
                )
            return rule
        if rule is not None and known and not somewhere:
            return rule
        _prefer_fused(optimizer)
        return None

    return choose


def _prefer_fused(optimizer: Optimizer) -> None:
    """Switch torch's Adam or AdamW to its fused implementation, unless the user has chosen one.

    Every torch that zerolite supports has it on CPU and CUDA. The others stay as they are: fused Adagrad exists on
    CUDA only in the newest torch. Fused SGD fails if only some parameters have a momentum buffer, which is the case
    after parameters were unfrozen.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or optimizer.state:
        return
    if not any(unsupported(group) for group in optimizer.param_groups):
        for group in optimizer.param_groups:
            group["fused"] = True
        optimizer.defaults["fused"] = True  # of groups that are added later
        # Torch's constructor sets this with fused=True; here the constructor has run already.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def _warning(device: torch.device, reason: str, comm: Communicator) -> str:
    where = f"rank {comm.rank}: " if comm.world_size > 1 else ""
    return (
        f"{where}zerolite's {device.type.upper()} kernels are not available: {reason} All ranks update with torch's "
        "optimizers instead. Its fused Adam and AdamW are as fast, but their bits depend on where an element lies, so "
        "stages and world sizes agree only closely; the others are slower."
    )
