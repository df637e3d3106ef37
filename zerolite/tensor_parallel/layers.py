"""Tensor-parallel layers.

A layer is made in one of two ways: by its constructor, or from an existing layer by :func:`shard_column` and the like.
These functions change the class of the object. It stays the same object, with the same Parameters and hooks, in its
model. Each Parameter keeps only this rank's shard, which :func:`zerolite.tensor_parallel.shard_spec.shard_spec_of`
describes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerolite.comm import Communicator
from zerolite.comm.initial_sync import synchronize_tensors
from zerolite.tensor_parallel import functions
from zerolite.tensor_parallel.column_linear import column_linear
from zerolite.tensor_parallel.logits import VocabParallelLogits
from zerolite.tensor_parallel.plan import linear_shape
from zerolite.tensor_parallel.regions import Region, full_tensor
from zerolite.tensor_parallel.shard_spec import ShardSpec, mark_partial, set_shard_spec, shard_parameter, shard_spec_of

if TYPE_CHECKING:
    from zerolite.tensor_parallel.sequence import SequenceShards

_NOT_SHARDED = (
    "tensor_parallel.sequence_parallel: expected a call of the first block with sharded layers, where the sequence is "
    "sharded, got a call of a layer inside it alone; leave sequence_parallel out"
)


class TensorParallelLayer(nn.Module):
    """Base class of the sharded layers. A copy of a layer has the same shards and communicates with the same ranks.

    Attributes:
        comm: the tensor-parallel ranks.
        region: the region that this layer begins or ends.
        sequence: with sequence parallelism, the sharded sequence.
        sequence_dim: dimension along which its inputs or outputs are sharded outside of the region.
    """

    comm: Communicator
    region: Region | None = None
    sequence: SequenceShards | None = None
    sequence_dim: int | None = None

    def set_region(self, region: Region) -> None:
        self.region = region

    def set_sequence(self, dim: int, sequence: SequenceShards) -> None:
        """Shard the layer's inputs or outputs outside of its region along ``dim``, the sequence."""
        self.sequence_dim, self.sequence = dim, sequence

    def _unmerged_shape(self, x: Tensor) -> tuple[int, int, int] | None:
        """Return the shape [batch, sequence, width] of ``x`` if the block has merged its first two dimensions, as OPT
        does; otherwise None."""
        batch = None if self.sequence is None else self.sequence.batch_size
        return (batch, x.shape[0] // batch, x.shape[1]) if x.dim() == 2 and batch is not None else None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank {self.comm.rank} of {self.comm.world_size}"

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)], memo[id(self.comm)] = copied, self.comm  # a process group cannot be copied: share it
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for name, parameter in self._parameters.items():
            spec = None if parameter is None else shard_spec_of(parameter)
            if spec is not None:
                set_shard_spec(copied._parameters[name], spec)  # type: ignore[arg-type]
        return copied


class ColumnParallelLinear(TensorParallelLayer, nn.Linear):
    """``nn.Linear`` of which this rank computes some outputs: rows of the weight, [out_features / ranks, in_features].

    The input, [..., in_features], is the same on all ranks (with ``sequence_dim``: a shard along that dimension). The
    output is this rank's [..., out_features / ranks], or with ``gather_output`` the full one, [..., out_features].
    """

    transposed = False  # the weight is [in_features, out_features]: Hugging Face's Conv1D
    gather_output = False
    local_sizes: list[int]  # outputs of this rank in each fused part

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        comm: Communicator,
        gather_output: bool = False,
        parts: int | Sequence[int] = 1,
        device: object = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the full layer with nn.Linear's initial values of the first rank, then shard it.

        Called on all ranks of ``comm``. Raises ValueError for sizes that cannot be shared equally.

        Args:
            parts: number of equal layers that are fused in this one, or their sizes; each part is sharded by itself.
        """
        nn.Linear.__init__(self, in_features, out_features, bias, device=device, dtype=dtype)
        _broadcast_first_rank(self, comm)
        shard_column(self, comm, parts, gather_output)

    def forward(self, x: Tensor) -> Tensor:
        return self._column(x, self.weight, self.bias)

    def _column(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = full_tensor(x)
        if self.sequence is not None and not self.sequence.is_sharded:
            raise RuntimeError(_NOT_SHARDED)
        unmerged = self._unmerged_shape(x)
        x = x if unmerged is None else x.view(unmerged)
        out = column_linear(x, weight.t() if self.transposed else weight, bias, self.comm, self.sequence_dim)
        out = out if unmerged is None else out.flatten(0, 1)
        if self.gather_output:
            return self._gathered(out)
        if self.region is not None:
            self.region.enter(out, self.training)
        return out

    def _gathered(self, out: Tensor) -> Tensor:
        out = functions.gather(out, self.comm)
        if len(self.local_sizes) == 1:
            return out
        # The gathered outputs are ordered by rank, and within it by part. Order them by part, as in the full layer.
        ranks = [rank.split(self.local_sizes, -1) for rank in out.split(sum(self.local_sizes), -1)]
        return torch.cat([rank[part] for part in range(len(self.local_sizes)) for rank in ranks], -1)


class SharedColumnLinear(ColumnParallelLinear):
    """A column-parallel layer of which several ranks need the same outputs: key and value with fewer heads than ranks.

    All ranks have the full weight, and each computes some outputs. The gradient is the sum of the ranks' gradients.
    """

    runs: list[tuple[int, int]]  # starts and lengths of the outputs that this rank computes

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self._select(self.bias, 0)
        return self._column(x, self._select(self.weight, int(self.transposed)), bias)

    def _select(self, full: Tensor, dim: int) -> Tensor:
        return torch.cat([full.narrow(dim, start, length) for start, length in self.runs], dim)


class VocabParallelHead(ColumnParallelLinear):
    """An output layer that returns :class:`~zerolite.tensor_parallel.VocabParallelLogits`.

    Each rank computes the logits of a range of the vocabulary. The last ranks are padded.
    """

    vocabulary: int

    def forward(self, x: Tensor) -> Tensor:
        local = super().forward(x)
        return VocabParallelLogits.of(local, self.comm, self.vocabulary)


class RowParallelLinear(TensorParallelLayer, nn.Linear):
    """``nn.Linear`` of which this rank reads some inputs: columns of the weight, [out_features, in_features / ranks].

    The input is this rank's [..., in_features / ranks], or with ``input_is_parallel=False`` the full one. The output,
    [..., out_features], is the sum over ranks, to which the bias is added once. It is the same on all ranks (with
    ``sequence_dim``: a shard along that dimension).
    """

    transposed = False
    input_is_parallel = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        comm: Communicator,
        input_is_parallel: bool = True,
        device: object = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the full layer with nn.Linear's initial values of the first rank, then shard it.

        Called on all ranks of ``comm``. Raises ValueError for a size that cannot be shared equally.
        """
        nn.Linear.__init__(self, in_features, out_features, bias, device=device, dtype=dtype)
        _broadcast_first_rank(self, comm)
        shard_row(self, comm, input_is_parallel)

    def set_sequence(self, dim: int, sequence: SequenceShards) -> None:
        super().set_sequence(dim, sequence)
        # The bias is added after the reduce-scatter, to this rank's part of the sequence only.
        if self._parameters["bias"] is not None:
            mark_partial(self._parameters["bias"])

    def forward(self, x: Tensor) -> Tensor:
        if self.region is not None:
            # The region ends before this layer computes, because the sum over ranks is the same on all of them.
            self.region.leave()
        if not self.input_is_parallel:
            x = functions.scatter(full_tensor(x), self.comm)
        out = F.linear(x, self.weight.t() if self.transposed else self.weight)
        if self.sequence_dim is not None:
            shape = self._unmerged_shape(out)
            out = out if shape is None else out.view(shape)
            out = functions.reduce_scatter(out, self.comm, self.sequence_dim, in_place=True)
            out = out if shape is None else out.flatten(0, 1)
            return out if self.bias is None else out + self.bias.to(out.dtype)
        out = functions.reduce(out, self.comm, in_place=True)
        return out if self.bias is None else out.add_(self.bias.to(out.dtype))


class VocabParallelEmbedding(TensorParallelLayer, nn.Embedding):
    """``nn.Embedding`` of which this rank holds a range of rows, [ceil(num_embeddings / ranks), embedding_dim].

    The last ranks are padded. For indices of any shape it returns the vectors, [..., embedding_dim], on all ranks.
    """

    start: int  # first row of this rank in the full weight
    rows: int  # rows of this rank, without padding
    vocabulary: int

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        comm: Communicator,
        device: object = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the full layer with nn.Embedding's initial values of the first rank, then shard it.

        Called on all ranks of ``comm``.
        """
        nn.Embedding.__init__(self, num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        _broadcast_first_rank(self, comm)
        shard_embedding(self, comm)

    def forward(self, indices: Tensor) -> Tensor:
        """Look up ``indices``.

        Raises IndexError (on CUDA: a device assertion) for indices outside of the full vocabulary.
        """
        local = indices - self.start
        in_shard = (local >= 0) & (local < self.rows)
        valid = (indices >= 0) & (indices < self.vocabulary)
        # Tokens of other ranks read row 0, and their vectors are zeroed below, so that the sum over ranks has each
        # vector once. Wrong indices become an index that F.embedding refuses.
        beyond = self.weight.shape[0]
        local = torch.where(in_shard, local, torch.where(valid, 0, beyond))
        out = F.embedding(local, self.weight, self.padding_idx)
        out.masked_fill_(~in_shard.unsqueeze(-1), 0.0)
        return functions.reduce(out, self.comm, in_place=True)


def _broadcast_first_rank(module: nn.Module, comm: Communicator) -> None:
    parameters = list(module.parameters())
    synchronize_tensors(parameters, comm, parameters[0].device, "initial_sync")


def part_sizes(length: int, parts: int | Sequence[int]) -> list[int]:
    """Return the sizes of the parts that a layer of ``length`` outputs fuses.

    Args:
        length: number of outputs.
        parts: number of equal parts, or their sizes.

    Raises:
        ValueError: ``length`` is not a multiple of the number of parts.
    """
    if not isinstance(parts, int):
        return list(parts)
    if parts < 1 or length % parts:
        raise ValueError(f"expected {parts} parts of equal size, got {length} outputs, which they do not divide")
    return [length // parts] * parts


def shard_column(
    module: nn.Module, comm: Communicator, parts: int | Sequence[int] = 1, gather_output: bool = False
) -> None:
    """Turn an nn.Linear or Hugging Face's Conv1D into a :class:`ColumnParallelLinear` in place."""
    transposed, inputs, outputs = linear_shape(module)
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    sizes = part_sizes(outputs, parts)
    spec = ShardSpec.of_parts((inputs, outputs) if transposed else (outputs, inputs), int(transposed), sizes, comm)
    shard_parameter(weight, spec)
    shard_parameter(bias, ShardSpec.of_parts((outputs,), 0, sizes, comm))
    _change_class(module, ColumnParallelLinear, comm, inputs, spec.length, transposed)
    module.gather_output = gather_output  # type: ignore[assignment]
    module.local_sizes = [size // comm.world_size for size in sizes]  # type: ignore[assignment]


def share_column(
    module: nn.Module, comm: Communicator, sizes: Sequence[int], shared: Sequence[bool], width: int
) -> None:
    """Turn an nn.Linear or Hugging Face's Conv1D into a :class:`SharedColumnLinear` in place.

    Args:
        sizes: outputs of each fused part.
        shared: for each part, True if it has fewer heads than there are ranks.
        width: outputs of a head.
    """
    transposed, inputs, _ = linear_shape(module)
    runs, start = [], 0
    for length, is_shared in zip(sizes, shared, strict=True):
        part = width if is_shared else length // comm.world_size
        runs.append((start + comm.rank * length // (comm.world_size * part) * part, part))
        start += length
    for parameter in module.parameters(recurse=False):
        mark_partial(parameter)
    _change_class(module, SharedColumnLinear, comm, inputs, sum(length for _, length in runs), transposed)
    module.runs, module.local_sizes = runs, [length for _, length in runs]  # type: ignore[assignment]


def shard_last_dim(module: nn.Module, key: str, comm: Communicator) -> None:
    """Shard the last dimension of a parameter that ``module`` uses directly, such as a bias with a number per head."""
    parameter = module._parameters[key]
    assert parameter is not None
    shape = tuple(parameter.shape)
    shard_parameter(parameter, ShardSpec.of_parts(shape, len(shape) - 1, [shape[-1]], comm))
    if not isinstance(module, TensorParallelLayer):
        module_class = type(module)
        module.__class__ = type(
            f"ShardedByHeads{module_class.__name__}",
            (module_class, ShardedByHeads),
            {"__module__": module_class.__module__},
        )
        module.comm = comm  # type: ignore[assignment]


class ShardedByHeads(TensorParallelLayer):
    """Mixin for a module with a parameter of one number per head. This rank has the numbers of its heads."""


def shard_head(module: nn.Module, comm: Communicator) -> None:
    """Turn an nn.Linear into a :class:`VocabParallelHead` in place."""
    transposed, inputs, outputs = linear_shape(module)
    spec = ShardSpec.of_rows((inputs, outputs) if transposed else (outputs, inputs), int(transposed), comm)
    shard_parameter(module._parameters["weight"], spec)
    shard_parameter(module._parameters["bias"], ShardSpec.of_rows((outputs,), 0, comm))
    _change_class(module, VocabParallelHead, comm, inputs, spec.length, transposed)
    module.vocabulary = outputs  # type: ignore[assignment]


def shard_row(module: nn.Module, comm: Communicator, input_is_parallel: bool = True) -> None:
    """Turn an nn.Linear or Hugging Face's Conv1D into a :class:`RowParallelLinear` in place."""
    transposed, inputs, outputs = linear_shape(module)
    spec = ShardSpec.of_parts(
        (inputs, outputs) if transposed else (outputs, inputs), int(not transposed), [inputs], comm
    )
    shard_parameter(module._parameters["weight"], spec)
    _change_class(module, RowParallelLinear, comm, spec.length, outputs, transposed)
    module.input_is_parallel = input_is_parallel  # type: ignore[assignment]


def shard_embedding(module: nn.Module, comm: Communicator) -> None:
    """Turn an nn.Embedding into a :class:`VocabParallelEmbedding` in place."""
    assert isinstance(module, nn.Embedding)
    vocabulary = module.num_embeddings
    spec = ShardSpec.of_rows((vocabulary, module.embedding_dim), 0, comm)
    shard_parameter(module._parameters["weight"], spec)
    module_class = type(module)
    if module_class.forward in (nn.Embedding.forward, VocabParallelEmbedding.forward):
        module.__class__ = VocabParallelEmbedding
    else:  # the class's own forward calls super().forward, which is then VocabParallelEmbedding's
        module.__class__ = type(f"VocabParallel{module_class.__name__}", (module_class, VocabParallelEmbedding), {})
    assert isinstance(module, VocabParallelEmbedding)
    module.comm, module.vocabulary, module.num_embeddings = comm, vocabulary, spec.length
    module.start = min(comm.rank * spec.length, vocabulary)
    module.rows = sum(length for _, _, length in spec.ranges)
    if module.padding_idx is not None:
        local = module.padding_idx % vocabulary - module.start
        module.padding_idx = local if 0 <= local < module.rows else None


def _change_class(
    module: nn.Module, new_class: type[nn.Module], comm: Communicator, inputs: int, outputs: int, transposed: bool
) -> None:
    module.__class__ = new_class
    module.comm, module.transposed = comm, transposed  # type: ignore[assignment]
    module.in_features, module.out_features = inputs, outputs  # type: ignore[assignment]
    if transposed:
        module.nx, module.nf = inputs, outputs  # type: ignore[assignment]
