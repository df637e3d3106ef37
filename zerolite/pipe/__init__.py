"""Pipeline parallelism: a model's layers on several ranks, one after the other.

``PipelineModule`` and its specs are what users write. :mod:`zerolite.pipe.prepare` makes of a model the stage of one
rank, and :mod:`zerolite.pipe.runner` runs steps of it, on the schedules of ``torch.distributed.pipelining``; neither is
imported before there is a pipeline, since torch's part takes a while.
"""

from zerolite.pipe.modules import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
