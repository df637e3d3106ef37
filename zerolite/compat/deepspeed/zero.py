"""``deepspeed.zero``: partitioned parameters."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import zerolite.zero
from zerolite.comm import collective
from zerolite.compat.deepspeed.runtime.config import read_config, with_accelerates_replicas
from zerolite.moe.experts import experts_on_every_rank
from zerolite.zero import (
    ZeroParamStatus,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]

_UNSUPPORTED = {
    "mpu": "tensor parallelism is set in the config",
    "data_parallel_group": "parameters are partitioned over all data-parallel ranks",
    "zero_param_parallel_group": "parameters are partitioned over all data-parallel ranks",
    "sequence_data_parallel_group": "parameters are partitioned over all data-parallel ranks",
    "zero_quantized_weights": "it is set in the config",
    "zero_quantized_nontrainable_weights": "weights are gathered in their own dtype",
}
_WITHOUT_EFFECT = ("mem_efficient_linear", "pin_memory", "param_swapper")


class Init(zerolite.zero.Init):
    """:class:`zerolite.zero.Init` with DeepSpeed's arguments.

    Without ``dtype`` parameters keep the dtype of their construction, so that master weights are exact.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        *,
        config_dict_or_path: object = None,
        config: object = None,
        remote_device: str | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if name not in _UNSUPPORTED and name not in _WITHOUT_EFFECT:
                raise TypeError(f"zero.Init got an unexpected argument {name!r}")
            if name in _UNSUPPORTED and value:
                raise ValueError(f"zero.Init: expected no {name}, got {value!r}: {_UNSUPPORTED[name]}; leave it out")
        source = config_dict_or_path if config_dict_or_path is not None else config
        cleaned = None if source is None or not enabled else with_accelerates_replicas(read_config(source).zerolite)
        super().__init__(module, cleaned, remote_device, dtype, enabled)


class GatheredParameters(zerolite.zero.GatheredParameters):
    """:class:`zerolite.zero.GatheredParameters` that drops changes without a ``modifier_rank`` with a warning.

    TRL merges an adapter in it, reads the weights and takes the adapter out again, which leaves rounding behind.
    """

    def _report_dropped(self, names: Sequence[str]) -> None:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"zero.GatheredParameters: changes of {names[0]}{more} inside the context are dropped, and the parameters "
            "have their values from before it; pass modifier_rank=0 (the rank whose values all ranks take) to keep "
            "changes",
            stacklevel=3,
        )


@collective
@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[torch.nn.Module]:
    """Context in which the parameters of an engine's module are gathered, experts of several ranks included. It yields
    the module."""
    module = getattr(model, "module", model)
    with GatheredParameters(module), experts_on_every_rank(module):
        yield module
