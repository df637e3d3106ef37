"""Cut of a batch: this rank's part of every tensor that has the sequence.

tokens      0  1  2  3  4  5  6            two ranks, seven tokens
labels      1  2  3  4  5  6  -            shifted before the cut, so that no token is lost at the seam
rank 0      0  1  2  3                     targets  1  2  3  4
rank 1      4  5  6  .                     targets  5  6  -  -       padded, and not counted
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerolite.utils.accelerator import host_value
from zerolite.utils.nested import find_tensors

IGNORED = -100
"""Label of a token that is not counted, torch's default."""

LABELS = ("labels", "shift_labels", "targets", "target")
_TOKENS = ("input_ids", "inputs_embeds")
OFFSETS = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_LEFT_OUT = ("past_key_values", "num_items_in_batch")


@dataclass(frozen=True)
class Cut:
    """Division of sequences among ranks.

    Attributes:
        length: tokens of a sequence as the caller has given it.
        ranks: number of parts.
        rank: this rank's part.
        mask: attention mask of the whole sequences, bool or integers [batch, padded]; None without one.
        positions: position ids of the whole sequences, [batch or 1, padded]; None if the model takes none.
        documents: number of each token's document in packed sequences, [batch or 1, padded]; None if there is one.
    """

    length: int
    ranks: int
    rank: int
    mask: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None

    @property
    def part(self) -> int:
        """Tokens of each rank."""
        return -(-self.length // self.ranks)

    @property
    def padded(self) -> int:
        """Tokens of all ranks."""
        return self.part * self.ranks

    @property
    def tokens(self) -> int:
        """Tokens of this rank that are no padding."""
        return max(0, min(self.part, self.length - self.rank * self.part))

    def pad(self, tensor: Tensor, fill: float = 0) -> Tensor:
        """Pad dimension 1 to :attr:`padded`."""
        missing = self.padded - self.length
        if not missing:
            return tensor
        return torch.cat([tensor, tensor.new_full((tensor.shape[0], missing, *tensor.shape[2:]), fill)], 1)

    def own(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a padded tensor along dimension 1, contiguous."""
        return tensor.narrow(1, self.rank * self.part, self.part).contiguous()


class Targets(NamedTuple):
    """Labels of this rank's part, and how many of them are counted."""

    labels: Tensor
    counted: int


class Inputs(NamedTuple):
    """A batch that has been cut.

    Attributes:
        values: of the model's arguments, by name.
        cut: how.
        counted: labels of this rank that are counted; None if the batch has no labels.
    """

    values: dict[str, Any]
    cut: Cut
    counted: int | None


def targets_of(labels: Tensor, cut: Cut) -> Targets:
    """Cut labels that are aligned with the tokens they belong to, [batch, length, ...].

    Where none is counted, one is, at the label 0: a mean over nothing is not a number, and so would be its gradient
    on the other ranks, even with a weight of 0.
    """
    if labels.dim() < 2 or labels.shape[1] != cut.length:
        raise ValueError(
            f"sequence_parallel: expected labels [batch, {cut.length}, ...] as long as the inputs of the last forward, "
            f"got {list(labels.shape)}; give whole sequences"
        )
    if labels.is_floating_point():
        if cut.padded != cut.length:
            raise ValueError(
                f"sequence_parallel: expected a length that {cut.ranks} ranks can share equally, got {cut.length} and "
                f"labels of {labels.dtype}, which cannot be marked as padding; pad or cut the sequences"
            )
        return Targets(cut.own(labels), labels.shape[0] * cut.part)
    part = cut.own(cut.pad(labels, IGNORED))
    # A plan reads zeros, and counts all labels.
    counted = part.numel() - int(host_value((part == IGNORED).sum()))
    if not counted:
        part = part.clone(memory_format=torch.contiguous_format)
        part.view(-1)[:1] = 0
    return Targets(part, counted)


def shifted(labels: Tensor) -> Tensor:
    """Return at each token the label of the next one."""
    return torch.cat([labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORED)], 1)


def length_of(values: Mapping[str, Any]) -> int:
    """Return the length of the sequences in a model's arguments. Raises ValueError if there are none."""
    named = [values[name] for name in _TOKENS if isinstance(values.get(name), Tensor)]
    tensors = named or [value for value in values.values() if isinstance(value, Tensor) and value.dim() >= 2]
    if not tensors or tensors[0].dim() < 2 or not tensors[0].shape[1]:
        raise ValueError(
            "sequence_parallel: expected a tensor [batch, length, ...] among the inputs of engine(...), got none; give "
            "whole sequences, of which each rank takes its part"
        )
    return int(tensors[0].shape[1])


@dataclass(frozen=True)
class Rules:
    """The meaning of a model's arguments.

    Attributes:
        shifts_labels: the model shifts ``labels`` by itself, and takes ``shift_labels`` that are shifted already.
        whole_masks: it is given the attention mask of the whole sequences, and masks documents where positions begin
            anew, unless it is given an attention mask.
        takes_positions: it takes ``position_ids``, and would count from 0 without them.
    """

    shifts_labels: bool = False
    whole_masks: bool = False
    takes_positions: bool = False


def cut_inputs(values: Mapping[str, Any], ranks: int, rank: int, rules: Rules) -> Inputs:
    """Cut the arguments of a model's forward, which have whole sequences, given by the names of its parameters.

    Raises ValueError for an argument that cannot be cut.
    """
    values = dict(values)
    cut = cut_of(values, Cut(length_of(values), ranks, rank), rules)
    cuts: dict[str, Any] = {}
    counted: int | None = None
    for name, value in values.items():
        if name in LABELS and isinstance(value, Tensor):
            is_shifted = rules.shifts_labels and name == "labels"
            if is_shifted and values.get("shift_labels") is not None:
                continue
            labels, counted = targets_of(shifted(value) if is_shifted else value, cut)
            cuts[name] = labels
            if rules.shifts_labels:
                cuts["labels"] = cuts["shift_labels"] = labels
        elif name == "attention_mask" and cut.mask is not None:
            cuts[name] = cut.mask
        elif name == "position_ids" and cut.positions is not None:
            cuts[name] = cut.own(cut.positions)
        else:
            cuts[name] = _cut_other(name, value, cut)
    return Inputs(cuts, cut, counted)


def cut_of(values: dict[str, Any], cut: Cut, rules: Rules) -> Cut:
    """Return ``cut`` with the mask and positions in ``values``, which are those of whole sequences.

    Positions and a mask that the model must be given are added to ``values``.
    """
    length = cut.length
    mask, positions = values.get("attention_mask"), values.get("position_ids")
    if mask is not None:
        _check(mask, length, "attention_mask")
        mask = cut.pad(mask)
    documents = None
    device = next(value.device for value in values.values() if isinstance(value, Tensor) and value.dim() >= 2)
    if positions is not None:
        _check(positions, length, "position_ids")
        after = torch.arange(1, cut.padded - length + 1, device=positions.device)
        positions = torch.cat([positions, positions[:, -1:] + after], 1)
        if rules.whole_masks and mask is None:
            documents = documents_of(positions)
    elif rules.takes_positions:
        positions = values["position_ids"] = torch.arange(cut.padded, device=device)[None]
    if documents is not None:
        # With a mask the model does not look for documents among this rank's positions.
        rows = next(values[name].shape[0] for name in _TOKENS if isinstance(values.get(name), Tensor))
        mask = values["attention_mask"] = torch.ones(rows, cut.padded, dtype=torch.bool, device=device)
    return Cut(length, cut.ranks, cut.rank, mask, positions, documents)


def documents_of(positions: Tensor) -> Tensor | None:
    """Return the document of each token, where positions begin anew; None if each sequence is one document."""
    begins = positions[:, 1:] - positions[:, :-1] != 1
    if not host_value(begins.any()):
        return None
    first = begins.new_zeros(begins.shape[0], 1, dtype=torch.int64)
    return torch.cat([first, begins.cumsum(1)], 1)


def _check(tensor: Tensor, length: int, name: str) -> None:
    if tensor.dim() != 2 or tensor.shape[1] != length:
        raise ValueError(
            f"sequence_parallel: expected {name} of shape [batch, {length}] for whole sequences of {length} tokens, "
            f"got {list(tensor.shape)}; leave it out, or give one number for each token"
        )


def _cut_other(name: str, value: Any, cut: Cut) -> Any:
    if name in _LEFT_OUT and value is not None:
        raise ValueError(
            f"sequence_parallel: expected engine(...) without {name}, which counts or keeps whole sequences, got one; "
            "leave it out (engine.backward weights each part by its labels)"
        )
    if not isinstance(value, Tensor):
        if find_tensors(value):
            raise ValueError(
                f"sequence_parallel: expected tensors as arguments of engine(...), got '{name}', a "
                f"{type(value).__name__} with tensors; pass them by themselves"
            )
        return value
    if value.dim() == 0:
        return value
    if name in OFFSETS and cut.padded == cut.length:
        return value
    if value.dim() < 2 or value.shape[1] != cut.length:
        raise ValueError(
            f"sequence_parallel: expected tensors [batch, {cut.length}, ...] among the inputs of engine(...), got "
            f"'{name}' of shape {list(value.shape)}, which has no part for each rank; leave it out"
        )
    return cut.own(cut.pad(value))
