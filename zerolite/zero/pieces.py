"""Optimizer shards of parameters, and the interface of the two update methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from zerolite.zero.buffer import ParameterBuffer, flattened
from zerolite.zero.layout import Fragment
from zerolite.zero.spans import Span
from zerolite.zero.stage3.partitioned_parameter import whole_shape

Groups = list[dict[str, Any]]
State = dict[str, Any]  # of one parameter, as in torch's optimizer.state[parameter]


@dataclass
class Piece:
    """The owned part of one parameter.

    Attributes:
        group: index of its param group.
        tensor: a view of its master bucket, in the parameter's shape if it is whole; what the inner optimizer was made
            of.
        position: among the pieces of its bucket.
    """

    fragment: Fragment
    group: int
    tensor: torch.Tensor
    position: int


class Hand(NamedTuple):
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
    """Update of the optimizer pieces, and owner of their states.

    one_launch: whether all buckets are best updated in one call. follows: whether ``update`` is given ``out`` also for
    what is updated where it rests; otherwise the caller lets masters follow, once before all updates of a bucket,
    because an update leaves masters that the compute parameters do not round to yet. cuts_buckets: whether a span may
    be a part of a bucket. can_skip_on_device: whether ``found_inf`` is taken. begin: before the updates of a step,
    once, with the parameters that take part, and those of them that the device may leave out: they are updated apart,
    and :meth:`leave_out` tells later which of them took no part. forget_last: the last update was skipped on the
    device. states_of: a bucket's states that are laid out like its master, where they rest; those there are. update:
    the pieces in ``hands`` from ``factor × gradient``; parameters that are not in ``used`` (None: all are) are left
    alone, as torch leaves alone those whose ``grad`` is None; ``found_inf`` is 0-dim fp32 on the device, not zero to
    skip the update there. state_names: of the states that have a value for each element; None if only the states there
    are tell. make_state: a piece's states with these numbers, and the tensors, of these shapes and dtypes where that is
    free, that the caller fills; without any the piece is as if never updated. memory: the states' tensors.
    """

    @property
    def one_launch(self) -> bool: ...

    @property
    def follows(self) -> bool: ...

    @property
    def cuts_buckets(self) -> bool: ...

    @property
    def can_skip_on_device(self) -> bool: ...

    def begin(self, used: frozenset[int] | None, doubtful: frozenset[int] = frozenset()) -> None: ...

    def leave_out(self, indices: Iterable[int]) -> None: ...

    def states_of(self, bucket: int) -> Mapping[str, torch.Tensor]: ...

    def update(
        self,
        hands: Sequence[Hand],
        factor: float | torch.Tensor,
        used: frozenset[int] | None,
        found_inf: torch.Tensor | None,
    ) -> None: ...

    def forget_last(self) -> None: ...

    def state_of(self, piece: Piece) -> State: ...

    def load_state(self, piece: Piece, state: Mapping[str, Any]) -> None: ...

    def make_state(
        self, piece: Piece, numbers: Mapping[str, Any], tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> dict[str, torch.Tensor]: ...

    @property
    def state_names(self) -> tuple[str, ...] | None: ...

    def memory(self) -> Iterable[torch.Tensor]: ...

    def extend(self, pieces: Sequence[list[Piece]], update_dtypes: Sequence[torch.dtype]) -> None: ...


def cut(
    groups: Groups, buffer: ParameterBuffer, update_dtype: Callable[[torch.dtype], torch.dtype], first: int = 0
) -> list[list[Piece]]:
    """The pieces of every bucket from ``first`` on. Where masters are kept in fewer bits than the update computes in,
    their tensors are copies in the update's dtype."""
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    pieces: list[list[Piece]] = []
    for bucket, fragments in list(enumerate(buffer.fragments))[first:]:
        source = buffer.master[bucket].to(update_dtype(buffer.master[bucket].dtype))
        pieces.append(
            [
                Piece(f, group_of[id(buffer.parameters[f.slot.index])], buffer.piece(f, source), i)
                for i, f in enumerate(fragments)
            ]
        )
    return pieces


def cut_state(value: Any, parameter: torch.Tensor, piece: Piece, keeps_shape: bool) -> Any:
    """The piece's part, where the piece is, of a state that belongs to the whole parameter; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = whole_shape(parameter)
    if value.shape != shape or not shape:
        return value.clone()
    if keeps_shape:
        return value.to(piece.tensor.device, piece.tensor.dtype, copy=True)
    part = flattened(value).narrow(0, piece.fragment.param_start, piece.fragment.numel)
    return part.to(piece.tensor.device, piece.tensor.dtype, copy=True)
