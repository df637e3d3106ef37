"""Shards of parameters, spans of buckets, and the interface of the methods that update them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.optim import Optimizer

from zerolite.zero.flat import flattened
from zerolite.zero.layout import Fragment
from zerolite.zero.stage3.partitioned_parameter import unpartitioned_shape

if TYPE_CHECKING:
    from zerolite.zero.bucket import Bucket
    from zerolite.zero.buffer import ParameterBuffer

Groups = list[dict[str, Any]]  # as torch's optimizer.param_groups
State = dict[str, Any]  # of one parameter, as torch's optimizer.state[parameter]
Key = TypeVar("Key")


@dataclass
class OptimParamShard:
    """The part of one parameter that this rank updates. It is a fragment of the bucket, or the whole parameter if the
    bucket has owners: fragments of its master are on all ranks then.

    Attributes:
        bucket: bucket of the parameter.
        fragment: its ranges.
        group: index of its param group.
        tensor: its master weights, which are a parameter of the inner optimizer. They are flat, or have the parameter's
            shape if the rank owns the full parameter. A view of the master bucket, or a copy in the dtype of the
            update if that has more bits.
        position: position among the shards of its bucket.
        parameter: the parameter.
    """

    bucket: Bucket
    fragment: Fragment
    group: int
    tensor: torch.Tensor
    position: int
    parameter: torch.nn.Parameter

    @property
    def index(self) -> int:
        """Index of the parameter."""
        return self.fragment.slot.index

    @property
    def keeps_shape(self) -> bool:
        """True if it is the full parameter, in its shape."""
        return bool(self.bucket.owners) or not self.bucket.is_sharded

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return its elements of a tensor that is laid out like the master of its bucket."""
        return self.bucket.view_of(self.fragment, flat)

    def part_of(self, value: Any) -> Any:
        """Return its part of a state of the full parameter, on its device and in its dtype. A state without a value
        for each element is copied."""
        if not isinstance(value, torch.Tensor):
            return value
        shape = unpartitioned_shape(self.parameter)
        if value.shape != shape or not shape:
            return value.clone()
        if not self.keeps_shape:
            value = flattened(value).narrow(0, self.fragment.param_start, self.fragment.numel)
        return value.to(self.tensor.device, self.tensor.dtype, copy=True)


class Span(NamedTuple):
    """Elements [low, high) of this rank's shard of a bucket. last: True if the shard ends at ``high``."""

    bucket: Bucket
    low: int
    high: int
    last: bool


class SpanTensors(NamedTuple):
    """Tensors that the update of one span reads and writes: the stored ones, or staging copies. All have the shape
    [elements of the span].

    Attributes:
        span: the span.
        gradient: reduced gradient, in any floating dtype. The update may scale it in place.
        master: master weights.
        states: states of the bucket, by name.
        out: this rank's range of the compute parameters. The update first copies values that the user has written there
            to the master, and then rounds the updated master into it. None if the caller does both, or if the master
            is the compute parameter itself.
    """

    span: Span
    gradient: torch.Tensor
    master: torch.Tensor
    states: Mapping[str, torch.Tensor]
    out: torch.Tensor | None


@dataclass(frozen=True)
class UpdateInputs:
    """Arguments of the update of a step, beside the tensors of its spans.

    Attributes:
        factor: multiplies every gradient: a number, or one fp32 element on the device of the update.
        used: parameters that are updated (None: all). The others stay as they are, like parameters of torch whose
            ``grad`` is None.
        found_inf: fp32 of shape [] on the device; if it is not zero, the device skips the update. None: never.
    """

    factor: float | torch.Tensor
    used: frozenset[int] | None = None
    found_inf: torch.Tensor | None = None


class UpdateMethod(ABC):
    """Method that updates the optimizer shards of all buckets, by our kernels or by the inner optimizer itself.

    Between updates the keys of ``inner.state`` are the model's parameters.

    Attributes:
        one_launch: one call updates all buckets in one launch, so the caller makes as few calls as it can.
        syncs_masters: True: ``update`` itself takes over what the user has written into ``out``. False: call
            ``sync_master_from_param`` before the first update of a bucket, and never after it.
        splits_buckets: a span may be a part of a bucket.
        can_skip_on_device: ``update`` takes ``found_inf``. The engine sets it to what holds on all ranks.
        least_numel: elements below which a call of ``update`` does less than it could at once.
        state_names: names of the states with one value per element; None if they are known only from states that
            exist.
    """

    one_launch = False
    syncs_masters = False
    splits_buckets = False
    can_skip_on_device = True
    least_numel = 0
    state_names: tuple[str, ...] | None = None

    def __init__(self, inner: Optimizer, buffer: ParameterBuffer) -> None:
        self._inner, self._buffer = inner, buffer
        self._group_sizes: list[int] = []  # of the param groups, when they were last checked
        # Of new param groups. Lists are copied, because torch gives the same one to all groups, and users change it.
        self._defaults = {k: tuple(v) if isinstance(v, list) else v for k, v in inner.defaults.items()}

    def shards(self) -> Iterator[OptimParamShard]:
        """Yield the shards that this rank updates."""
        return (shard for bucket in self._buffer.buckets for shard in bucket.shards)

    # ---------------------------------------------------------------- one step

    @abstractmethod
    def take_over(self) -> None:
        """Take over what the user has changed in the optimizer. Called once per step, between two updates, before what
        all ranks share.

        Raises:
            Exception: it cannot be followed. All ranks get to know before one of them raises it.
        """

    def _check_groups(self) -> None:
        """Check the param groups: in its update one rank alone would find what is wrong with them.

        Raises:
            ValueError: a value is gone, or has become what its default is not.
            RuntimeError: the user has taken a parameter out of its param group since the last call.
        """
        for number, group in enumerate(self._inner.param_groups):
            for key, default in self._defaults.items():
                value = group.get(key, _GONE)
                if (type(value) is not type(default) or type(value) is tuple) and not _fits(key, value, default):
                    raise ValueError(
                        f"optimizer.param_groups[{number}]: expected '{key}' as a value like {default!r}, got "
                        f"{'none at all' if value is _GONE else repr(value)}"
                    )
        sizes = [len(group["params"]) for group in self._inner.param_groups]
        if sizes == self._group_sizes:
            return
        index_of = {id(p): index for index, group in enumerate(self._inner.param_groups) for p in group["params"]}
        began_in = {id(shard.parameter): shard.group for shard in self.shards()}
        for bucket in self._buffer.buckets:
            for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
                index = index_of.get(id(parameter))
                if index is None or index != began_in.get(id(parameter), index):
                    raise RuntimeError(
                        f"expected '{slot.name}' in the param group of the optimizer in which its training began, and "
                        "it was taken out; to stop training a parameter call requires_grad_(False) on it"
                    )
        self._group_sizes = sizes

    @abstractmethod
    def begin(self, inputs: UpdateInputs | None) -> None:
        """Begin the updates of a step. Called once per step. None: no update follows."""

    @abstractmethod
    def update(self, sub_group: Sequence[SpanTensors], inputs: UpdateInputs) -> None:
        """Update the shards in ``sub_group``, spans whose tensors are on one device."""

    def leave_out(self, sub_group: Sequence[SpanTensors]) -> None:  # noqa: B027  most updates communicate nothing
        """Launch what ``update`` launches on other ranks, where this rank alone leaves the update out."""

    def on_update_skipped(self) -> None:  # noqa: B027  torch's fused kernels count on the device, which sees the skip
        """Note that the device has skipped the last update, if there was one."""

    # ---------------------------------------------------------------- states

    def state_of(self, shard: OptimParamShard) -> State:
        """Return the states of a shard in torch's form, as views of the stored ones; empty if it was never updated."""
        return dict(self._inner.state.get(shard.parameter) or {})

    def show(self) -> None:  # noqa: B027  torch's optimizers need nothing
        """Bring ``inner.state`` up to date, after the device has skipped an update."""

    @abstractmethod
    def load_state(self, shard: OptimParamShard, state: Mapping[str, Any]) -> None:
        """Copy states in torch's form; an empty mapping stands for a shard that was never updated."""

    @abstractmethod
    def make_state(
        self, shard: OptimParamShard, numbers: Mapping[str, Any], tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> dict[str, torch.Tensor]:
        """Make a shard's states anew. Without numbers and tensors the shard is as if it was never updated.

        Args:
            shard: the shard.
            numbers: values of states without a value per element, such as "step".
            tensors: shape and dtype of the other states, by name. A method that has dtypes of its own keeps them.

        Returns:
            the tensors, which the caller fills.
        """

    def end_load(self) -> None:  # noqa: B027  most methods keep the tensors themselves
        """Take over what the caller has filled into the tensors of :meth:`make_state`."""

    def drop_load(self) -> None:  # noqa: B027  most methods keep the tensors themselves
        """Forget the tensors of :meth:`make_state`, because the caller could not fill them."""

    @abstractmethod
    def memory(self) -> Iterable[torch.Tensor]:
        """Return all tensors of states, for reports."""

    @abstractmethod
    def add_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Begin to update the shards of these buckets, which have them already."""


_GONE = object()  # in place of a value that a param group has no more


def _fits(key: str, value: object, default: object) -> bool:
    """Return True if an optimizer with this default can use the value."""
    if isinstance(default, bool) or value is _GONE:
        return value is not _GONE
    if isinstance(default, (Real, torch.Tensor)):
        return isinstance(value, (Real, torch.Tensor)) or (value is None and key != "lr")
    if not isinstance(default, (tuple, list)):
        return True
    if not isinstance(value, (tuple, list)) or len(value) != len(default):
        return False
    return all(type(one) is type(of) or _fits("lr", one, of) for one, of in zip(value, default, strict=True))


# -------------------------------------------------------------------- spans


def full_span(bucket: Bucket, numel: int) -> Span:
    """Return the span of a full shard of ``numel`` elements."""
    return Span(bucket, 0, numel, True)


def sub_groups(numels: Sequence[tuple[Bucket, int]], limit: int, alignment: int) -> list[list[Span]]:
    """Divide shards in their order into groups of at most ``limit`` elements. An empty shard has an empty span.

    Args:
        numels: (bucket, elements of its shard).
        limit: most elements of a group.
        alignment: shards may be split at multiples of so many elements. With 0 none is split, and a shard above the
            limit is a group of its own.
    """
    groups: list[list[Span]] = []
    room = 0
    for bucket, numel in numels:
        if not alignment:
            if not groups or numel > room:
                groups.append([])
                room = limit
            groups[-1].append(full_span(bucket, numel))
            room -= numel
            continue
        low = 0
        while True:
            if not groups or room < min(numel - low, alignment):
                groups.append([])
                room = max(limit, alignment)
            high = numel if numel - low <= room else low + room // alignment * alignment
            groups[-1].append(Span(bucket, low, high, high == numel))
            room -= high - low
            low = high
            if low == numel:
                break
    return groups


def group_equal(keys: Iterable[Hashable | None]) -> list[tuple[int, ...]]:
    """Return the indices of equal keys, one tuple per key. Entries that are None are left out."""
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        if key is not None:
            groups.setdefault(key, []).append(index)
    return [tuple(indices) for indices in groups.values()]


def segments(
    spans: Iterable[Span], ranges: Callable[[Bucket], Iterable[tuple[int, int, Key]]]
) -> list[tuple[int, int, int, Key]]:
    """Return the segments of some spans. Adjacent ranges with equal keys form one segment.

    Args:
        spans: the spans.
        ranges: function that returns the ranges of a bucket's shard in order: start, elements and key of each.

    Returns:
        (index in ``spans``, start from the span's ``low``, elements, key) of each segment.
    """
    result: list[tuple[int, int, int, Key]] = []
    for index, (bucket, low, high, _) in enumerate(spans):
        for first, count, key in ranges(bucket):
            start = max(first, low)
            numel = min(first + count, high) - start
            if numel <= 0:
                continue
            last = result[-1] if result else None
            if last and (last[0], last[1] + last[2], last[3]) == (index, start - low, key):
                result[-1] = index, last[1], last[2] + numel, key
            else:
                result.append((index, start - low, numel, key))
    return result
