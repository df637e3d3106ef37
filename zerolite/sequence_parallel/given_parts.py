"""Parts of sequences that the caller has cut: what a model must know of the other ranks' tokens is gathered.

A loader that reads or sends each rank its own tokens alone gives them to ``engine(...)`` as they are. Positions and
padding masks are those of all tokens, which are numbers of a few bytes a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zerolite.comm import Communicator
from zerolite.sequence_parallel.cut import Cut, Inputs, Rules, cut_of, length_of
from zerolite.sequence_parallel.exchange import TAG

_WHOLE = ("attention_mask", "position_ids")


def take_parts(values: Mapping[str, Any], comm: Communicator, rules: Rules) -> Inputs:
    """Return the arguments of a model's forward, given by the names of its parameters, for parts of this rank.

    Called on all ranks of ``comm`` with tensors of equal shapes. Raises ValueError for labels that the model would
    shift: a label at a seam would be lost.
    """
    if rules.shifts_labels and values.get("labels") is not None and values.get("shift_labels") is None:
        raise ValueError(
            "sequence_parallel.inputs: expected shift_labels, each at the token before it, beside parts of sequences, "
            "got labels, which the model shifts by itself, so that the last token of each part has none; shift them "
            "before the cut"
        )
    values, part = dict(values), length_of(values)
    for name in _WHOLE:
        value = values.get(name)
        if value is None:
            continue
        if value.dim() != 2 or value.shape[1] != part:
            raise ValueError(
                f"sequence_parallel.inputs: expected {name} of shape [batch, {part}] for parts of {part} tokens, got "
                f"{list(value.shape)}; leave it out, or give one number for each token of this rank"
            )
        values[name] = join(value, comm)
    cut = cut_of(values, Cut(part * comm.world_size, comm.world_size, comm.rank), rules)
    if cut.positions is not None:
        values["position_ids"] = cut.own(cut.positions)
    return Inputs(values, cut, None)


def join(tensor: Tensor, comm: Communicator) -> Tensor:
    """Join what the ranks of ``comm`` have along dimension 1. Without a gradient."""
    own = tensor.detach()
    full = own.new_empty(comm.world_size, *own.shape)
    full[comm.rank].copy_(own)
    comm.all_gather(full.view(-1), TAG).wait()
    return full.movedim(0, 1).flatten(1, 2)


def first_tokens(values: Mapping[str, Any], cut: Cut, tokens: int, comm: Communicator, rules: Rules) -> dict[str, Any]:
    """Return the arguments of a model for sequences that consist of the first ``tokens`` tokens of each rank's part."""
    whole = {}
    for name, value in values.items():
        if name == "position_ids" or (rules.shifts_labels and name == "labels"):
            continue  # there are shift_labels, and positions of these sequences begin at 0
        if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == cut.part:
            value = join(value[:, :tokens], comm)
        whole[name] = value
    return whole
