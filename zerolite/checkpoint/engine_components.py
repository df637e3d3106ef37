"""Components of the engine whose checkpoints are saved and loaded, and the barrier at the begin of each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.model_state import ModelState
from zerolite.comm import HostGroup, RaiseTogether
from zerolite.config import ZeroliteConfig
from zerolite.zero.step import StepPipeline


@dataclass(frozen=True)
class EngineComponents:
    """Components of one engine.

    Attributes:
        register_unfrozen_params: Trains parameters from now on that have been unfrozen since the last backward.
    """

    model: ModelState
    pipeline: StepPipeline
    config: ZeroliteConfig
    device: torch.device
    host: HostGroup
    register_unfrozen_params: Callable[[], None]

    def barrier(self, call: str) -> RaiseTogether:
        """Wait until all ranks are here. Returns the object that raises one rank's error on all ranks, as
        CheckpointError.

        Raises CheckpointError after checkpoint.timeout_s seconds, naming the missing ranks.
        """
        try:
            self.host.barrier(self.config.checkpoint.timeout_s, call)
        except RuntimeError as error:
            raise CheckpointError(str(error)) from error
        return RaiseTogether(self.host, call, CheckpointError, same=CheckpointError)


def one_request(what: str, requests: Mapping[int, Any]) -> Any:
    """Return the request of all ranks. Raises CheckpointError on all of them if the requests differ.

    Args:
        what: the call.
        requests: dataclasses by rank.
    """
    first = min(requests)
    for rank, request in requests.items():
        for name, value in asdict(requests[first]).items():
            if getattr(request, name) != value:
                raise CheckpointError(
                    f"{what}: expected the same arguments on all ranks, got {name}={value!r} on rank {first} and "
                    f"{name}={getattr(request, name)!r} on rank {rank}"
                )
    return requests[first]
