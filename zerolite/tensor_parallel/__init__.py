"""Tensor parallelism: layers whose weights are sharded over the ranks of a group.

:func:`parallelize_module` shards a model that is written without it; the layers can also be used directly.
"""

from zerolite.comm import Communicator, collective, create_communicator, create_topology, init_distributed, local_rank
from zerolite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from zerolite.tensor_parallel.functions import all_gather, copy, gather, reduce, reduce_scatter, scatter
from zerolite.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from zerolite.tensor_parallel.logits import VocabParallelLogits
from zerolite.tensor_parallel.parallelize import parallelize_module
from zerolite.tensor_parallel.plan import TensorPlanError
from zerolite.utils.accelerator import default_device


@collective
def tensor_ranks(size: int) -> Communicator:
    """Return the communicator of the ``size`` ranks that share layers with this one.

    Use it for layers that are made before ``zerolite.initialize`` is called with that ``tensor_parallel.size``. It
    starts torch.distributed if necessary. Raises ValueError if ``size`` does not divide the number of ranks.
    """
    init_distributed()
    device = default_device(local_rank())
    return create_topology(create_communicator(device), device, tensor=size).tensor


__all__ = [
    "ColumnParallelLinear",
    "TensorPlanError",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "VocabParallelLogits",
    "all_gather",
    "copy",
    "gather",
    "parallelize_module",
    "reduce",
    "reduce_scatter",
    "scatter",
    "tensor_ranks",
    "vocab_parallel_cross_entropy",
]
