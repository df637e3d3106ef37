"""zerolite: a training runtime for PyTorch that shards a model's states over ranks, as a JSON config chooses.

    engine = zerolite.initialize(model, config)
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()

Names are loaded on first use, so that the ``zerolite`` command starts without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerolite.utils.lazy import lazy_names
from zerolite.version import __version__

if TYPE_CHECKING:
    from zerolite import checkpointing, comm, moe, nn, pipe, tensor_parallel, zero
    from zerolite.checkpoint.parameter_access import (
        get_full_grad,
        get_full_master,
        get_full_optimizer_state,
        set_full_grad,
        set_full_master,
        set_full_optimizer_state,
    )
    from zerolite.comm import destroy, init_distributed
    from zerolite.config import ConfigError, ZeroliteConfig
    from zerolite.data.dataloader import RepeatingLoader
    from zerolite.engine.engine import Engine
    from zerolite.engine.inference import gathered_for_generation, stream_full_weights
    from zerolite.engine.initialize import initialize
    from zerolite.planning import Plan, PlanError, plan

__all__ = [
    "ConfigError",
    "Engine",
    "Plan",
    "PlanError",
    "RepeatingLoader",
    "ZeroliteConfig",
    "__version__",
    "checkpointing",
    "comm",
    "destroy",
    "gathered_for_generation",
    "get_full_grad",
    "get_full_master",
    "get_full_optimizer_state",
    "init_distributed",
    "initialize",
    "moe",
    "nn",
    "pipe",
    "plan",
    "set_full_grad",
    "set_full_master",
    "set_full_optimizer_state",
    "stream_full_weights",
    "tensor_parallel",
    "zero",
]

__getattr__ = lazy_names(
    __name__,
    {
        "initialize": "zerolite.engine.initialize",
        "Engine": "zerolite.engine.engine",
        "gathered_for_generation": "zerolite.engine.inference",
        "stream_full_weights": "zerolite.engine.inference",
        "RepeatingLoader": "zerolite.data.dataloader",
        "Plan": "zerolite.planning.result",
        "PlanError": "zerolite.planning.result",
        "plan": "zerolite.planning.make",
        "init_distributed": "zerolite.comm",
        "destroy": "zerolite.comm",
        "ConfigError": "zerolite.config",
        "ZeroliteConfig": "zerolite.config",
        "get_full_grad": "zerolite.checkpoint.parameter_access",
        "get_full_master": "zerolite.checkpoint.parameter_access",
        "get_full_optimizer_state": "zerolite.checkpoint.parameter_access",
        "set_full_grad": "zerolite.checkpoint.parameter_access",
        "set_full_master": "zerolite.checkpoint.parameter_access",
        "set_full_optimizer_state": "zerolite.checkpoint.parameter_access",
        "checkpointing": "",
        "comm": "",
        "moe": "",
        "nn": "",
        "op_builder": "zerolite.utils.builder",
        "pipe": "",
        "tensor_parallel": "",
        "zero": "",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
