"""Full weights in buckets of whole tensors, for an inference engine that takes them from a model in training.

::

    the caller          | uses bucket 0 | uses bucket 1 | uses bucket 2 |
    collectives    | 0  | 1             | 2             |

A bucket is one gather over the data-parallel ranks (stage 3), and one more over the ranks that have other shards of
layers, or other experts. While the caller uses a bucket, the next one is gathered: so there are two, and never a third.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zerolite.checkpoint.full_model import TAG, FullModel, FullTensor
from zerolite.checkpoint.huggingface import exported_dtype
from zerolite.checkpoint.matching import listed
from zerolite.checkpoint.state import clean
from zerolite.comm import Pending, Topology, collective
from zerolite.utils.dtypes import FLOATS, is_quantized
from zerolite.zero.engine_parts import EngineParts
from zerolite.zero.inner_tensors import flattened
from zerolite.zero.stage3.absent_parameter import copy_with_values
from zerolite.zero.stage3.param_group import AllGather, group_by_context
from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter, sharded_param_of

Names = Mapping[str, str] | Iterable[str] | Callable[[str], str | None] | None


# -------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Piece:
    """Tensors of a bucket that are made of the same gathered ones: one tensor, or a layer with adapters.

    Attributes:
        sources: descriptions of the gathered tensors, by their owner.
        names: names under which tensors are yielded: of a layer by the names in the layer without adapters, of one
            tensor by its owner.
        nbytes: bytes of the gathered tensors, or of the yielded ones if they are more.
        layer: the layer whose adapters are merged; None for one tensor.
    """

    sources: dict[str, FullTensor]
    names: dict[str, str]
    nbytes: int
    layer: torch.nn.Module | None = None


@dataclass(frozen=True)
class StreamOptions:
    """Arguments of ``zerolite.stream_full_weights``."""

    bucket_bytes: int
    names: Names
    dtype: torch.dtype | None
    merge_lora: bool

    def check(self) -> None:
        """Raise ValueError for a wrong argument."""
        if isinstance(self.bucket_bytes, bool) or not isinstance(self.bucket_bytes, int) or self.bucket_bytes < 1:
            raise ValueError(f"expected bucket_bytes to be a positive integer, got {self.bucket_bytes!r}")
        if self.dtype is not None and self.dtype not in FLOATS:
            raise ValueError(f"expected dtype to be None or one of {', '.join(map(str, FLOATS))}, got {self.dtype!r}")


class StreamPlan:
    """Tensors of a model that a stream gathers, by piece. It serves later streams too, which it :meth:`fits`.

    Attributes:
        full: the full model.
        pieces: in the order of the state dict. They are made on first use.
    """

    def __init__(self, full: FullModel, model: torch.nn.Module, options: StreamOptions) -> None:
        self.full, self._model, self._options = full, model, options
        self._names = _names_of_tensors(model)

    @functools.cached_property
    def pieces(self) -> list[Piece]:
        """Raises ValueError for adapters that cannot be merged."""
        return list(_pieces(self.full, self._model, self._options))

    def fits(self, options: StreamOptions) -> bool:
        """Return True if the model has the same tensors under the same names, and nothing else is in its state dict."""
        same = (options.merge_lora, options.dtype) == (self._options.merge_lora, self._options.dtype)
        return same and self.full.in_place and _names_of_tensors(self._model) == self._names


def _names_of_tensors(model: torch.nn.Module) -> list[tuple[str, str, int]]:
    """Return the name of each module with those of its own parameters and buffers, and their ids."""
    named = model.named_modules(remove_duplicate=False)
    owned = ((prefix, own) for prefix, module in named for own in (module._parameters, module._buffers))
    return [(prefix, name, id(tensor)) for prefix, tensors in owned for name, tensor in tensors.items()]


def plan_buckets(plan: StreamPlan, options: StreamOptions) -> list[list[Piece]]:
    """Divide the tensors of a model, in the order of its state dict, into buckets; the same on all ranks.

    Raises:
        ValueError: for a wrong argument.
    """
    options.check()
    pieces = plan.pieces
    chosen = _chosen(options.names, [name for piece in pieces for name in piece.names.values()])
    buckets: list[list[Piece]] = []
    filled = 0
    for piece in pieces:
        names = {key: chosen[name] for key, name in piece.names.items() if name in chosen}
        if names:
            if not buckets or filled + piece.nbytes > options.bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(piece if names == piece.names else replace(piece, names=names))
            filled += piece.nbytes
    return buckets


def fingerprint(buckets: Sequence[Sequence[Piece]], dtype: torch.dtype | None) -> int:
    """Return a hash of what a stream gathers and yields."""
    content = [[(sorted(piece.sources), piece.names, piece.nbytes) for piece in bucket] for bucket in buckets]
    return zlib.crc32(repr((content, dtype)).encode())


def _pieces(full: FullModel, model: torch.nn.Module, options: StreamOptions) -> Iterator[Piece]:
    prefix, layers = ("", {}) if not options.merge_lora else (_base_prefix(model), _adapted_layers(model))
    owners = {id(full.local(entry)[0]): entry for _, entry in full.tensors()}
    layer_of = {id(tensor): name for name, layer in layers.items() for tensor in _tensors_of(layer)}
    done: set[str] = set()
    for _, entry in full.tensors():
        tensor = full.local(entry)[0]
        outer = layer_of.get(id(tensor), "")
        if not entry.in_model and any(clean(entry.owner).startswith(f"{clean(name)}.") for name in layers):
            continue  # scales of bitsandbytes, which the layer's state dict makes: merging makes others
        key = f"layer {outer}" if outer else entry.owner
        if key in done:
            continue
        done.add(key)
        if not outer:
            name = clean(entry.owner).removeprefix(prefix)
            yield _piece({entry.owner: entry}, {entry.owner: name}, {entry.owner: entry}, options.dtype)
            continue
        layer = layers[outer]
        tensors = {id(t): t for t in _tensors_of(layer) if id(t) in owners}
        sources = {owners[key].owner: owners[key] for key in tensors}
        without_memory = {
            t: torch.empty(owners[key].shape, dtype=owners[key].dtype, device="meta") for key, t in tensors.items()
        }
        plain = _without_adapters(layer, without_memory, merge=False)
        names = {name: f"{clean(outer)}.{name}".removeprefix(prefix) for name in plain}
        yield _piece(sources, names, plain, options.dtype, layer)


def _piece(
    sources: dict[str, FullTensor],
    names: dict[str, str],
    yielded: Mapping[str, FullTensor | torch.Tensor],
    dtype: torch.dtype | None,
    layer: torch.nn.Module | None = None,
) -> Piece:
    gathered = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in sources.values())
    dtypes = _dtypes(yielded, dtype)
    cast = sum(math.prod(yielded[name].shape) * dtypes[name].itemsize for name in yielded)
    return Piece(sources, names, max(gathered, cast), layer)


def _dtypes(tensors: Mapping[str, FullTensor | torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the dtypes in which ``tensors`` are yielded if ``dtype`` was asked for. A layer's quantized tensors and
    their scales, which are all others but a bias, keep their own."""
    keeps = any(is_quantized(tensor.dtype) for tensor in tensors.values() if isinstance(tensor, torch.Tensor))
    dtypes = {}
    for name, entry in tensors.items():
        if isinstance(entry, FullTensor):
            dtypes[name] = entry.exported_dtype(dtype)
        else:
            is_scale = keeps and name.rpartition(".")[2] != "bias"
            dtypes[name] = entry.dtype if is_scale else exported_dtype(entry.dtype, dtype)
    return dtypes


def _tensors_of(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from layer.parameters()
    yield from layer.buffers()


def _chosen(names: Names, known: Collection[str]) -> dict[str, str]:
    """Return the names under which tensors are yielded, by their own. Raises ValueError for an unknown name."""
    if names is None:
        return {name: name for name in known}
    if callable(names):
        renamed = {name: names(name) for name in known}
        wrong = next((new for new in renamed.values() if not isinstance(new, str | None)), None)
        if wrong is not None:
            raise ValueError(f"expected names to return a name, or None to leave a tensor out, got {wrong!r}")
        return {name: new for name, new in renamed.items() if new is not None}
    if isinstance(names, str):
        raise ValueError(f"expected names to be a collection of names, a mapping or a function, got {names!r}")
    asked = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
    unknown = sorted(asked.keys() - set(known))
    if unknown:
        raise ValueError(
            f"expected names of the model, got {listed(unknown)}; the names are those of engine.module.state_dict(), "
            "without what adapters add to them where these are merged"
        )
    return asked


# -------------------------------------------------------------------- one bucket


class WeightBucket(Sequence[tuple[str, torch.Tensor]]):
    """Some whole tensors of a model with their names: a sequence of (name, tensor).

    They are copies, on the engine's device. The bucket has them until the next one is asked for, so that there is
    memory for two; a tensor that the caller keeps stays valid.
    """

    def __init__(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self._tensors: list[tuple[str, torch.Tensor]] | None = tensors

    def release(self) -> None:
        """Release the memory of the tensors, as far as the bucket has it."""
        self._tensors = None

    def _present(self) -> list[tuple[str, torch.Tensor]]:
        if self._tensors is None:
            raise RuntimeError(
                "zerolite.stream_full_weights: expected a bucket to be used before the next one is asked for, got a "
                "use after it; keep its tensors: dict(bucket)"
            )
        return self._tensors

    def __len__(self) -> int:
        return len(self._present())

    def __getitem__(self, index: Any) -> Any:
        return self._present()[index]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._present())


class BucketGather:
    """Gather of the tensors of one bucket, in flight; made on all ranks.

    Attributes:
        tensors: the model's own tensors, by owner.
    """

    @collective
    def __init__(self, full: FullModel, parts: EngineParts, bucket: Sequence[Piece]) -> None:
        """Launch it."""
        self._topology: Topology = parts.topology
        self._entries = {owner: entry for piece in bucket for owner, entry in piece.sources.items()}
        self.tensors = {owner: full.local(entry)[0] for owner, entry in self._entries.items()}
        sharded_params = {owner: sharded_param_of(tensor) for owner, tensor in self.tensors.items()}
        self._sharded = {owner: p for owner, p in sharded_params.items() if p is not None}
        self._values = {
            owner: full.local(entry)[1].detach().clone()
            for owner, entry in self._entries.items()
            if owner not in self._sharded
        }
        self._copies: dict[PartitionedParameter, torch.Tensor] = {}
        self._all_gathers: list[AllGather] = []
        for context, members in group_by_context(self._sharded.values()):  # experts have ranks of their own
            copies, all_gather = context.launch_copies(members)
            self._copies.update(zip(members, copies, strict=True))
            self._all_gathers += [] if all_gather is None else [all_gather]
        self._of_shards: list[tuple[Pending, dict[str, torch.Tensor]]] = []
        if not self._all_gathers:  # otherwise these ranks have nothing to send yet
            self._gather_shards()

    @collective
    def wait(self) -> dict[str, torch.Tensor]:
        """Return the full values by owner. On CUDA the current stream waits, not the host."""
        for all_gather in self._all_gathers:
            all_gather.wait_for_values()
        if self._all_gathers:
            self._gather_shards()
        for pending, gathered in self._of_shards:
            pending.wait()
            for owner in list(gathered):
                self._values[owner] = self._assembled(self._entries[owner], gathered.pop(owner))
        values, self._values = self._values, {}
        return values

    def _gather_shards(self) -> None:
        """Take the values of this rank's data-parallel ranks, and launch the gathers over the ranks that have other
        shards: of layers, or other experts."""
        for owner, sharded_param in self._sharded.items():
            flat = self._copies.pop(sharded_param)
            self._values[owner] = flat.as_strided(sharded_param.shape, sharded_param.strides)
        for ranks in (self._topology.tensor, self._topology.expert):
            parts = {
                owner: self._values.pop(owner)
                for owner, entry in self._entries.items()
                if entry.shards and (entry.shards[0].dimension == "expert") == (ranks is self._topology.expert)
            }
            if parts:
                shards = [part.contiguous().view(-1) for part in parts.values()]
                fulls = [shard.new_empty(ranks.world_size * shard.numel()) for shard in shards]
                self._of_shards.append((ranks.gather_shards(fulls, shards, TAG), dict(zip(parts, fulls, strict=True))))

    def _assembled(self, entry: FullTensor, gathered: torch.Tensor) -> torch.Tensor:
        """Put the shards of the tensor-parallel ranks together."""
        full = gathered.new_empty(entry.shape)
        for spec, part in zip(entry.shards, gathered.chunk(len(entry.shards)), strict=True):
            spec.into(full, part.view(spec.local_shape))
        return full


# -------------------------------------------------------------------- the stream


class WeightStream(Iterator[WeightBucket]):
    """Iterator over the buckets of a model; see ``zerolite.stream_full_weights``.

    Ranks may stop at different buckets. A rank that stops takes part in the gathers of the others when its stream is
    closed: by :meth:`close`, or when nothing refers to it any more, as after a ``break`` or an exception in a loop.
    """

    def __init__(
        self, full: FullModel, parts: EngineParts, buckets: Sequence[Sequence[Piece]], dtype: torch.dtype | None
    ) -> None:
        self._full, self._parts, self._dtype = full, parts, dtype
        self._steps = parts.pipeline.state.global_steps
        self._buckets = deque(buckets)
        self._next: tuple[Sequence[Piece], BucketGather] | None = None
        self._yielded: WeightBucket | None = None
        self._launch()

    @collective
    @torch.no_grad()
    def __next__(self) -> WeightBucket:
        if self._yielded is not None:
            self._yielded.release()
            self._yielded = None
        if self._next is None:
            raise StopIteration
        if self._parts.pipeline.state.global_steps != self._steps:
            self.close()
            raise RuntimeError(
                "zerolite.stream_full_weights: expected the weights to stay as they are until the stream has ended, "
                "got a step of the engine; use the buckets first, and call it again for the new weights"
            )
        (bucket, gather), self._next = self._next, None
        values = gather.wait()
        tensors = [pair for piece in bucket for pair in self._made(piece, values, gather.tensors)]
        del values, gather  # before there is memory for another bucket
        self._launch()
        self._yielded = WeightBucket(tensors)
        return self._yielded

    @collective
    @torch.no_grad()
    def close(self) -> None:
        """End the stream: take part in the gathers that are left, for ranks that still iterate."""
        if self._yielded is not None:
            self._yielded.release()
        if self._next is None:  # the tensors of a bucket could not be made here, and its successor was not launched
            self._launch()
        while self._next is not None:
            (_, gather), self._next = self._next, None
            gather.wait()
            self._launch()

    def __del__(self) -> None:
        if vars(self).get("_next") is not None or vars(self).get("_buckets"):
            self.close()

    def _launch(self) -> None:
        if self._buckets:
            bucket = self._buckets.popleft()
            self._next = bucket, BucketGather(self._full, self._parts, bucket)

    def _made(
        self, piece: Piece, values: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a piece."""
        entries: Mapping[str, FullTensor | torch.Tensor] = piece.sources
        if piece.layer is not None:
            of_layer = {tensors[owner]: values[owner] for owner in piece.sources}
            entries = values = _without_adapters(piece.layer, of_layer, merge=True)
        dtypes = _dtypes(entries, self._dtype)
        for key, name in piece.names.items():
            yield name, values[key].to(dtypes[key]).contiguous()


# -------------------------------------------------------------------- adapters

# PEFT merges and unloads by itself, in a copy of the layer around copies of its tensors. So every kind of adapter that
# PEFT can merge has PEFT's own numbers, and the training weights keep their bits.


def _base_prefix(model: torch.nn.Module) -> str:
    """Return what PEFT puts in front of the names of its base model; "" for a model that is not PEFT's.

    Raises:
        ValueError: the adapters are outside of the base model (prompts), so they cannot be merged into it.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return ""
    base = model.get_base_model()
    prefix = next(f"{name}." for name, module in model.named_modules() if module is base)
    outside = [name for name, _ in model.named_parameters() if not name.startswith(prefix)]
    if outside:
        raise ValueError(
            f"expected adapters that can be merged into the base model, got parameter '{outside[0]}' outside of it; "
            "pass merge_lora=False"
        )
    return prefix


def _adapted_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the outermost layers with adapters of PEFT, by name."""
    if "peft" not in sys.modules:
        return {}
    # A program with adapters has loaded these.
    layer, other = sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer, sys.modules["peft.utils.other"]
    kinds = (layer, getattr(other, "AuxiliaryTrainingWrapper", other.ModulesToSaveWrapper))
    layers: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, kinds) and not any(name.startswith(f"{outer}.") for outer in layers):
            layers[name] = module
    return layers


def _without_adapters(
    layer: Any, values: Mapping[torch.Tensor, torch.Tensor], merge: bool
) -> Mapping[str, torch.Tensor]:
    """Return the state dict of the layer that the adapters of ``layer`` are around.

    Args:
        layer: the layer with its adapters, which stays as it is.
        values: full values of its parameters and buffers, by tensor. Merging writes into them.
        merge: False leaves the adapters out; the values may be without memory then.
    """
    memo: dict[int, Any] = {}
    for tensor, value in values.items():
        if isinstance(tensor, torch.nn.Parameter):
            copy_with_values(tensor, value, memo)
        else:
            memo[id(tensor)] = value
    copied = copy.deepcopy(layer, memo)
    if hasattr(copied, "unload_and_optionally_merge_module"):  # multi-head attention, modules that are saved whole
        plain = copied.unload_and_optionally_merge_module(merge=merge, safe_merge=False, adapter_names=None)
    else:
        if merge:
            copied.merge()
        plain = copied.get_base_layer()
    return flattened(plain.state_dict())
