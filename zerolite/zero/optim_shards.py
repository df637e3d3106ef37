"""Optimizer shards of parameters, and the interface of the two update methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from zerolite.zero.buffer import ParameterBuffer, flattened
from zerolite.zero.layout import Fragment
from zerolite.zero.spans import Span
from zerolite.zero.stage3.partitioned_parameter import whole_shape

Groups = list[dict[str, Any]]
State = dict[str, Any]  # of one parameter, as in torch's optimizer.state[parameter]


@dataclass
class OptimParamShard:
    """The owned part of one parameter.

    Attributes:
        group: index of its param group.
        tensor: a view of its master bucket, in the parameter's shape if it is whole; what the inner optimizer was made
            of.
        position: among the shards of its bucket.
    """

    fragment: Fragment
    group: int
    tensor: torch.Tensor
    position: int


class SpanTensors(NamedTuple):
    """Tensors that the update of one span reads and writes: where they rest, or staging copies.

    Attributes:
        gradient: laid out like the master, in any floating dtype; may be scaled in place.
        states: by name, those of :meth:`UpdateMethod.states_of`.
        out: this rank's range of the compute parameters, where masters are others and the update is to round into it.
            The master follows first what has been written there.
    """

    span: Span
    gradient: torch.Tensor
    master: torch.Tensor
    states: Mapping[str, torch.Tensor]
    out: torch.Tensor | None


class UpdateMethod(Protocol):
    """Update of the optimizer shards, and owner of their states.

    Attributes:
        one_launch: all buckets are best updated in one call.
        syncs_masters: ``update`` first copies values that the user has written into ``out`` to the masters, so it gets
            ``out`` also for buckets that are updated in place. Otherwise the caller does it for these, once before
            all updates of a bucket: an update leaves masters that the compute parameters do not round to yet.
        splits_buckets: a span may be a part of a bucket.
        can_skip_on_device: ``found_inf`` is taken.
        state_names: of the states that have a value for each element; None if only the states there are tell.
    """

    one_launch: ClassVar[bool]
    syncs_masters: ClassVar[bool]
    splits_buckets: ClassVar[bool]

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

    def states_of(self, bucket: int) -> Mapping[str, torch.Tensor]:
        """Return a bucket's states that are laid out like its master, where they rest; those there are."""
        raise NotImplementedError

    def update(
        self,
        sub_group: Sequence[SpanTensors],
        factor: float | torch.Tensor,
        used: frozenset[int] | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Update the shards in ``sub_group`` from ``factor × gradient``.

        Args:
            used: the parameters that are updated (None: all); torch, too, leaves alone those whose ``grad`` is None.
            found_inf: 0-dim fp32 on the device, not zero to skip the update there.
        """

    def on_update_skipped(self) -> None:
        """The last update was skipped on the device."""

    def state_of(self, shard: OptimParamShard) -> State: ...

    def load_state(self, shard: OptimParamShard, state: Mapping[str, Any]) -> None: ...

    def make_state(
        self, shard: OptimParamShard, numbers: Mapping[str, Any], tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> dict[str, torch.Tensor]:
        """Make a shard's states with these numbers, and return the tensors, of these shapes and dtypes where that is
        free, that the caller fills. Without any the shard is as if never updated."""
        raise NotImplementedError

    @property
    def state_names(self) -> tuple[str, ...] | None: ...

    def memory(self) -> Iterable[torch.Tensor]: ...

    def extend(self, shards: Sequence[list[OptimParamShard]], update_dtypes: Sequence[torch.dtype]) -> None: ...


def optim_shards(
    groups: Groups, buffer: ParameterBuffer, update_dtype: Callable[[torch.dtype], torch.dtype], first: int = 0
) -> list[list[OptimParamShard]]:
    """The shards of every bucket from ``first`` on. Where masters are kept in fewer bits than the update computes in,
    their tensors are copies in the update's dtype."""
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    shards: list[list[OptimParamShard]] = []
    for bucket, fragments in list(enumerate(buffer.fragments))[first:]:
        source = buffer.master[bucket].to(update_dtype(buffer.master[bucket].dtype))
        shards.append(
            [
                OptimParamShard(f, group_of[id(buffer.parameters[f.slot.index])], buffer.view_of(f, source), i)
                for i, f in enumerate(fragments)
            ]
        )
    return shards


def shard_of_state(value: object, parameter: torch.Tensor, shard: OptimParamShard, keeps_shape: bool) -> Any:
    """The shard's part, where the shard is, of a state that belongs to the whole parameter; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = whole_shape(parameter)
    if value.shape != shape or not shape:
        return value.clone()
    if keeps_shape:
        return value.to(shard.tensor.device, shard.tensor.dtype, copy=True)
    part = flattened(value).narrow(0, shard.fragment.param_start, shard.fragment.numel)
    return part.to(shard.tensor.device, shard.tensor.dtype, copy=True)
