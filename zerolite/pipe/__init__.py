"""Pipeline parallelism: a model's layers on several ranks, one after the other.

``PipelineModule`` and its specs are what users write; :func:`prepare` makes of a model the stage of one rank, and
``PipelineRunner`` runs steps of it, on the schedules of ``torch.distributed.pipelining``.
"""

from zerolite.pipe.modules import LayerSpec, PipelineModule, TiedLayerSpec
from zerolite.pipe.prepare import Staged, Tie, prepare
from zerolite.pipe.runner import PipelineRunner, RunnerParts

__all__ = [
    "LayerSpec",
    "PipelineModule",
    "PipelineRunner",
    "RunnerParts",
    "Staged",
    "Tie",
    "TiedLayerSpec",
    "prepare",
]
