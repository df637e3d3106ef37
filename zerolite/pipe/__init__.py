"""Pipeline parallelism: consecutive layers of a model on different ranks.

``PipelineModule`` and its specs are for users. :mod:`zerolite.pipe.prepare` reduces a model to the stage of one rank,
and :mod:`zerolite.pipe.runner` runs its steps on the schedules of ``torch.distributed.pipelining``. Neither is imported
before there is a pipeline, because torch's part takes a while.
"""

from zerolite.pipe.modules import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
