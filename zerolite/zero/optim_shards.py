"""Optimizer shards of parameters, and the interface of the methods that update them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from zerolite.zero.bucket import Bucket
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.flat import flattened
from zerolite.zero.layout import Fragment
from zerolite.zero.spans import Span
from zerolite.zero.stage3.partitioned_parameter import unpartitioned_shape

Groups = list[dict[str, Any]]  # as torch's optimizer.param_groups
State = dict[str, Any]  # of one parameter, as torch's optimizer.state[parameter]


@dataclass
class OptimParamShard:
    """The part of one parameter that this rank updates.

    Attributes:
        fragment: its ranges.
        group: index of its param group.
        tensor: its master weights, which are a parameter of the inner optimizer. They are flat, or have the parameter's
            shape if the rank owns the full parameter. A view of the master bucket, or a copy in the dtype of the
            update if that has more bits.
        position: position among the shards of its bucket.
    """

    fragment: Fragment
    group: int
    tensor: torch.Tensor
    position: int

    @property
    def index(self) -> int:
        """Index of the parameter."""
        return self.fragment.slot.index

    @property
    def bucket(self) -> int:
        return self.fragment.slot.bucket

    def use_master(self, buffer: ParameterBuffer) -> None:
        """Make ``tensor`` a view of the master bucket, also if it was a copy."""
        self.tensor = buffer.master_view(self.fragment)


class SpanTensors(NamedTuple):
    """Tensors that the update of one span reads and writes: the stored ones, or staging copies. All have the shape
    [elements of the span].

    Attributes:
        span: the span.
        gradient: reduced gradient, in any floating dtype. The update may scale it in place.
        master: master weights.
        states: states of :meth:`UpdateMethod.states_of`, by name.
        out: this rank's range of the compute parameters. The update first copies values that the user has written there
            to the master, and then rounds the updated master into it. None if the caller does both, or if the master
            is the compute parameter itself.
    """

    span: Span
    gradient: torch.Tensor
    master: torch.Tensor
    states: Mapping[str, torch.Tensor]
    out: torch.Tensor | None


class UpdateMethod(Protocol):
    """Method that updates the optimizer shards and owns their states: :class:`~zerolite.zero.flat_update.FlatUpdate`
    or :class:`~zerolite.updates.torch_update.TorchUpdate`.

    Attributes:
        one_launch: one call updates all buckets in one launch, so the caller makes as few calls as it can.
        syncs_masters: ``update`` first copies values that the user has written into ``out`` to the masters, so it gets
            ``out`` for every bucket. Otherwise the caller does it for buckets that are updated in place, before their
            first update. After that update the compute parameters differ from the rounded masters, as if the user had
            written them.
        splits_buckets: a span may be a part of a bucket.
        most_maybe_unused: parameters of which ``update`` can leave to the device if they are updated; None: any number.
        can_skip_on_device: ``update`` takes ``found_inf``.
        state_names: names of the states with one value per element; None if they are known only from states that
            exist.
    """

    one_launch: ClassVar[bool]
    syncs_masters: ClassVar[bool]
    splits_buckets: ClassVar[bool]
    most_maybe_unused: ClassVar[int | None]

    @property
    def can_skip_on_device(self) -> bool: ...

    def begin(self, used: frozenset[int] | None, maybe_unused: frozenset[int] = frozenset()) -> None:
        """Begin the updates of a step. Called once per step.

        Args:
            used: parameters that take part (None: all).
            maybe_unused: those of them that the device may leave out.
        """

    def on_left_out(self, indices: Iterable[int]) -> None:
        """Note that the device has left these of the ``maybe_unused`` parameters out of the last update."""

    def states_of(self, bucket: Bucket) -> Mapping[str, torch.Tensor]:
        """Return the stored states of a bucket that are laid out like its master, by name."""
        raise NotImplementedError

    def update(
        self,
        sub_group: Sequence[SpanTensors],
        factor: float | torch.Tensor,
        used: frozenset[int] | None,
        found_inf: torch.Tensor | None,
        uses: torch.Tensor | None = None,
    ) -> None:
        """Update the shards in ``sub_group`` from ``factor × gradient``.

        Args:
            sub_group: spans whose tensors are on one device.
            factor: number, or a tensor of one fp32 element on that device.
            used: parameters that are updated (None: all). The others stay as they are, like parameters of torch whose
                ``grad`` is None.
            found_inf: fp32 tensor of shape [] on the device; if it is not zero, the device skips the update.
            uses: float64 by parameter on the device. The device leaves out the ``maybe_unused`` of :meth:`begin` whose
                number is zero. None if there are none of these.
        """

    def on_update_skipped(self) -> None:
        """Note that the device has skipped the last update."""

    def state_of(self, shard: OptimParamShard) -> State:
        """Return the states of a shard in torch's form, as views of the stored ones; empty if it was never updated."""

    def load_state(self, shard: OptimParamShard, state: Mapping[str, Any]) -> None:
        """Copy states in torch's form; an empty mapping stands for a shard that was never updated."""

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
        raise NotImplementedError

    @property
    def state_names(self) -> tuple[str, ...] | None: ...

    def memory(self) -> Iterable[torch.Tensor]:
        """Return all tensors of states, for reports."""

    def extend(self, shards: Sequence[list[OptimParamShard]], update_dtypes: Sequence[torch.dtype]) -> None:
        """Add the shards of further buckets, and the dtype in which each of them is updated."""


def optim_shards(
    groups: Groups, buffer: ParameterBuffer, update_dtype: Callable[[torch.dtype], torch.dtype], first: int = 0
) -> list[list[OptimParamShard]]:
    """Make the optimizer shards of every bucket from ``first`` on.

    Args:
        groups: param groups of the model's parameters.
        buffer: buffer of the parameters.
        update_dtype: function from the dtype of masters to the dtype in which they are updated. If it is another one,
            the tensors of the shards are copies.
        first: index of the first bucket.

    Returns:
        the shards of each bucket.
    """
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    shards: list[list[OptimParamShard]] = []
    for bucket in buffer.buckets[first:]:
        source = bucket.master.to(update_dtype(bucket.master.dtype))
        shards.append(
            [
                OptimParamShard(f, group_of[id(buffer.parameters[f.slot.index])], bucket.view_of(f, source), i)
                for i, f in enumerate(bucket.fragments)
            ]
        )
    return shards


def shard_of_state(value: object, parameter: torch.Tensor, shard: OptimParamShard, keeps_shape: bool) -> Any:
    """Return a shard's part of a state of the full parameter, on the shard's device and in its dtype. States without a
    value per element are copied.

    Args:
        value: the state.
        parameter: the parameter.
        shard: its shard.
        keeps_shape: the shard is the full parameter, in its shape.
    """
    if not isinstance(value, torch.Tensor):
        return value
    shape = unpartitioned_shape(parameter)
    if value.shape != shape or not shape:
        return value.clone()
    if keeps_shape:
        return value.to(shard.tensor.device, shard.tensor.dtype, copy=True)
    part = flattened(value).narrow(0, shard.fragment.param_start, shard.fragment.numel)
    return part.to(shard.tensor.device, shard.tensor.dtype, copy=True)
