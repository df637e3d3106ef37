"""Tensor-parallel layers.

A layer is made in one of two ways: by its constructor, or by :func:`shard_column` and its siblings from an existing
layer. The latter changes the class of the object, which stays the same object with the same Parameters, hooks and place
in its model. Each Parameter keeps only this rank's shard; :func:`zerolite.tensor_parallel.shard_spec.shard_spec_of`
describes it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerolite.comm import Communicator
from zerolite.comm.initial_sync import synchronize_tensors
from zerolite.tensor_parallel import functions
from zerolite.tensor_parallel.logits import VocabParallelLogits
from zerolite.tensor_parallel.plan import linear_shape
from zerolite.tensor_parallel.regions import Region, seen_input
from zerolite.tensor_parallel.shard_spec import ShardSpec, mark_partial, set_shard_spec, shard_parameter, shard_spec_of


class Edge(Protocol):
    """Beginning or end of the sharded sequence: see sequence.py.

    Attributes:
        began: the sequence has been sharded in this forward.
        batch: batch size of the hidden states there.
    """

    began: bool
    batch: int


def _tokens_of(x: Tensor, edge: Edge | None) -> tuple[int, int, int] | None:
    """Return the shape [batch, sequence, width] of ``x`` if the block has merged batch and sequence, as OPT does; else
    None."""
    return (edge.batch, x.shape[0] // edge.batch, x.shape[1]) if x.dim() == 2 and edge is not None else None


_NOT_SHARDED = (
    "tensor_parallel.sequence_parallel: expected the first of the blocks whose layers are sharded to be called by the "
    "model, so that the sequence is sharded there, got a layer in it that was called without; leave sequence_parallel "
    "out"
)


class TensorParallelLayer(nn.Module):
    """Base class of the sharded layers. A copy of a layer communicates with the same ranks and holds the same
    shards."""

    comm: Communicator
    region: Region | None = None  # the region that this layer begins or ends
    edge: Edge | None = None  # where the sequence is sharded
    sequence: int | None = None  # dimension along which its inputs or outputs are sharded outside of the region

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank {self.comm.rank} of {self.comm.world_size}"

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)], memo[id(self.comm)] = made, self.comm  # a process group cannot be copied: share it
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for name, parameter in self._parameters.items():
            spec = None if parameter is None else shard_spec_of(parameter)
            if spec is not None:
                set_shard_spec(made._parameters[name], spec)  # type: ignore[arg-type]
        return made


class ColumnParallelLinear(TensorParallelLayer, nn.Linear):
    """``nn.Linear`` of which this rank computes some outputs: rows of the weight, [out_features / ranks, in_features].

    The input, [..., in_features], is the same on all ranks (with ``sequence``: a shard along that dimension). The
    output is this rank's [..., out_features / ranks], or with ``gather_output`` the full one, [..., out_features].
    """

    transposed = False  # the weight is [in_features, out_features]: Hugging Face's Conv1D
    gather_output = False
    shares: list[int]  # outputs of this rank in each fused part

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
        _take_first_ranks_values(self, comm)
        shard_column(self, comm, parts, gather_output)

    def forward(self, x: Tensor) -> Tensor:
        return self._column(x, self.weight, self.bias)

    def _column(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = seen_input(x)
        if self.sequence is not None:
            if self.edge is not None and not self.edge.began:
                raise RuntimeError(_NOT_SHARDED)
            x = self._whole_sequence(x)
        else:
            x = functions.shared_copy(x, self.comm)
        out = F.linear(x, weight.t() if self.transposed else weight, bias)
        if self.gather_output:
            return self._gathered(out)
        if self.region is not None:
            self.region.enter(out, self.training)
        return out

    def _whole_sequence(self, x: Tensor) -> Tensor:
        assert self.sequence is not None
        tokens = _tokens_of(x, self.edge)
        if tokens is None:
            return functions.shared_all_gather(x, self.comm, self.sequence)
        return functions.shared_all_gather(x.view(tokens), self.comm, self.sequence).flatten(0, 1)

    def _gathered(self, out: Tensor) -> Tensor:
        out = functions.gather(out, self.comm)
        if len(self.shares) == 1:
            return out
        # The gathered outputs are ordered by rank, and within it by part. Order them by part, as in the full layer.
        ranks = [rank.split(self.shares, -1) for rank in out.split(sum(self.shares), -1)]
        return torch.cat([rank[part] for part in range(len(self.shares)) for rank in ranks], -1)


class SharedColumnLinear(ColumnParallelLinear):
    """A column-parallel layer of which several ranks need the same outputs: key and value with fewer heads than ranks.

    The weight is whole on all ranks, and each computes some outputs. Its gradient is the sum of the ranks' gradients.
    """

    runs: list[tuple[int, int]]  # starts and lengths of the outputs that this rank computes

    def forward(self, x: Tensor) -> Tensor:
        return self._column(x, self._own(self.weight, int(self.transposed)), self._own(self.bias, 0))

    def _own(self, whole: Tensor | None, dim: int) -> Any:
        if whole is None:
            return None
        return torch.cat([whole.narrow(dim, start, length) for start, length in self.runs], dim)


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
    ``sequence``: a shard along that dimension).
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
        _take_first_ranks_values(self, comm)
        shard_row(self, comm, input_is_parallel)

    def forward(self, x: Tensor) -> Tensor:
        if self.region is not None:
            # The region ends before this layer computes: the sum over ranks is the same on all of them, as outside.
            self.region.leave()
        if not self.input_is_parallel:
            x = functions.scatter(seen_input(x), self.comm)
        out = F.linear(x, self.weight.t() if self.transposed else self.weight)
        if self.sequence is not None:
            tokens = _tokens_of(out, self.edge)
            out = out if tokens is None else out.view(tokens)
            out = functions.reduce_scatter(out, self.comm, self.sequence, in_place=True)
            out = out if tokens is None else out.flatten(0, 1)
            return out if self.bias is None else out + self.bias.to(out.dtype)
        out = functions.reduce(out, self.comm, in_place=True)
        return out if self.bias is None else out.add_(self.bias.to(out.dtype))


class VocabParallelEmbedding(TensorParallelLayer, nn.Embedding):
    """``nn.Embedding`` of which this rank holds a range of rows, [ceil(num_embeddings / ranks), embedding_dim].

    The last ranks are padded. It takes indices of any shape and returns their vectors, [..., embedding_dim], on all
    ranks.
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
        _take_first_ranks_values(self, comm)
        shard_embedding(self, comm)

    def forward(self, indices: Tensor) -> Tensor:
        """Look up ``indices``. Raises IndexError (on CUDA: a device assertion) for indices outside of the full
        vocabulary."""
        local = indices - self.start
        here = (local >= 0) & (local < self.rows)
        elsewhere = (indices >= 0) & (indices < self.vocabulary)
        # Row 0 takes the place of tokens of other ranks, and its vectors are zeroed below, so that the sum over ranks
        # has each vector once. Wrong indices get one that F.embedding refuses.
        beyond = self.weight.shape[0]
        local = torch.where(here, local, torch.where(elsewhere, 0, beyond))
        out = F.embedding(local, self.weight, self.padding_idx)
        out.masked_fill_(~here.unsqueeze(-1), 0.0)
        return functions.reduce(out, self.comm, in_place=True)


def _take_first_ranks_values(module: nn.Module, comm: Communicator) -> None:
    parameters = list(module.parameters())
    synchronize_tensors(parameters, comm, parameters[0].device, "initial_sync")


def part_sizes(length: int, parts: int | Sequence[int]) -> list[int]:
    """Return the sizes of the ``parts`` that a layer of ``length`` outputs fuses. Raises ValueError if it cannot be."""
    if not isinstance(parts, int):
        return list(parts)
    if parts < 1 or length % parts:
        raise ValueError(f"expected outputs of {parts} parts of equal size, got {length} outputs")
    return [length // parts] * parts


def shard_column(
    module: nn.Module, comm: Communicator, parts: int | Sequence[int] = 1, gather_output: bool = False
) -> None:
    """Make an nn.Linear, or Hugging Face's Conv1D, a :class:`ColumnParallelLinear` in place."""
    transposed, inputs, outputs = linear_shape(module)
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    sizes = part_sizes(outputs, parts)
    spec = ShardSpec.of_parts((inputs, outputs) if transposed else (outputs, inputs), int(transposed), sizes, comm)
    shard_parameter(weight, spec)
    shard_parameter(bias, ShardSpec.of_parts((outputs,), 0, sizes, comm))
    _become(module, ColumnParallelLinear, comm, inputs, spec.length, transposed)
    module.gather_output = gather_output  # type: ignore[assignment]
    module.shares = [size // comm.world_size for size in sizes]  # type: ignore[assignment]


def share_column(
    module: nn.Module, comm: Communicator, sizes: Sequence[int], shared: Sequence[bool], width: int
) -> None:
    """Make an nn.Linear, or Hugging Face's Conv1D, a :class:`SharedColumnLinear` in place.

    Args:
        sizes: outputs of each fused part.
        shared: which of these parts have fewer heads than there are ranks.
        width: outputs of a head.
    """
    transposed, inputs, _ = linear_shape(module)
    runs, start = [], 0
    for length, several in zip(sizes, shared, strict=True):
        own = width if several else length // comm.world_size
        runs.append((start + comm.rank * length // (comm.world_size * own) * own, own))
        start += length
    for parameter in module.parameters(recurse=False):
        mark_partial(parameter)
    _become(module, SharedColumnLinear, comm, inputs, sum(length for _, length in runs), transposed)
    module.runs, module.shares = runs, [length for _, length in runs]  # type: ignore[assignment]


def shard_last_dim(module: nn.Module, key: str, comm: Communicator) -> None:
    """Shard the last dimension of a parameter that ``module`` uses directly, such as a bias with one number for each
    head."""
    parameter = module._parameters[key]
    assert parameter is not None
    shape = tuple(parameter.shape)
    shard_parameter(parameter, ShardSpec.of_parts(shape, len(shape) - 1, [shape[-1]], comm))
    if not isinstance(module, TensorParallelLayer):
        kind = type(module)
        module.__class__ = type(
            f"ShardedByHeads{kind.__name__}", (kind, ShardedByHeads), {"__module__": kind.__module__}
        )
        module.comm = comm  # type: ignore[assignment]


class ShardedByHeads(TensorParallelLayer):
    """Mixin for a module with a parameter that has a number for each head, of which this rank has some."""


def shard_head(module: nn.Module, comm: Communicator) -> None:
    """Make an nn.Linear a :class:`VocabParallelHead` in place."""
    transposed, inputs, outputs = linear_shape(module)
    spec = ShardSpec.of_rows((inputs, outputs) if transposed else (outputs, inputs), int(transposed), comm)
    shard_parameter(module._parameters["weight"], spec)
    shard_parameter(module._parameters["bias"], ShardSpec.of_rows((outputs,), 0, comm))
    _become(module, VocabParallelHead, comm, inputs, spec.length, transposed)
    module.vocabulary = outputs  # type: ignore[assignment]


def shard_row(module: nn.Module, comm: Communicator, input_is_parallel: bool = True) -> None:
    """Make an nn.Linear, or Hugging Face's Conv1D, a :class:`RowParallelLinear` in place."""
    transposed, inputs, outputs = linear_shape(module)
    spec = ShardSpec.of_parts(
        (inputs, outputs) if transposed else (outputs, inputs), int(not transposed), [inputs], comm
    )
    shard_parameter(module._parameters["weight"], spec)
    _become(module, RowParallelLinear, comm, spec.length, outputs, transposed)
    module.input_is_parallel = input_is_parallel  # type: ignore[assignment]


def shard_embedding(module: nn.Module, comm: Communicator) -> None:
    """Make an nn.Embedding a :class:`VocabParallelEmbedding` in place."""
    assert isinstance(module, nn.Embedding)
    whole = (module.num_embeddings, module.embedding_dim)
    spec = ShardSpec.of_rows(whole, 0, comm)
    shard_parameter(module._parameters["weight"], spec)
    kind = type(module)
    if kind.forward in (nn.Embedding.forward, VocabParallelEmbedding.forward):
        module.__class__ = VocabParallelEmbedding
    else:  # its own forward calls super().forward, which then is VocabParallelEmbedding's
        module.__class__ = type(f"VocabParallel{kind.__name__}", (kind, VocabParallelEmbedding), {})
    assert isinstance(module, VocabParallelEmbedding)
    module.comm, module.vocabulary, module.num_embeddings = comm, whole[0], spec.length
    module.start = min(comm.rank * spec.length, whole[0])
    module.rows = sum(length for _, _, length in spec.ranges)
    if module.padding_idx is not None:
        local = module.padding_idx % whole[0] - module.start
        module.padding_idx = local if 0 <= local < module.rows else None


def _become(
    module: nn.Module, kind: type[nn.Module], comm: Communicator, inputs: int, outputs: int, transposed: bool
) -> None:
    module.__class__ = kind
    module.comm, module.transposed = comm, transposed  # type: ignore[assignment]
    module.in_features, module.out_features = inputs, outputs  # type: ignore[assignment]
    if transposed:
        module.nx, module.nf = inputs, outputs  # type: ignore[assignment]


def along_sequence(module: TensorParallelLayer, dim: int, edge: Edge) -> None:
    """Shard the layer's inputs or outputs outside of its region along ``dim``, the sequence.

    Args:
        edge: where the sequence is sharded.
    """
    module.sequence, module.edge = dim, edge
    bias = module._parameters.get("bias")
    # The bias is added after the reduce-scatter, to this rank's part of the sequence only.
    if isinstance(module, RowParallelLinear) and bias is not None:
        mark_partial(bias)
