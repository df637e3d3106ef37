"""Trial before the first forward: on the first tokens, parts must give what the whole sequence gives.

A model may use more than the attention that is hooked: positions that it counts itself, attention that it writes out,
convolutions, tokens that it looks up next to each other. Nothing else would notice, and it would train on the numbers
of another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zerolite.comm import Communicator
from zerolite.sequence_parallel.cut import IGNORED, LABELS, OFFSETS, Cut, Inputs
from zerolite.sequence_parallel.exchange import TAG
from zerolite.utils.accelerator import host_values
from zerolite.utils.dtypes import HALF

_TOKENS = 16
_TOLERANCE, _TOLERANCE_OF_TF32, _TOLERANCE_IN_16_BITS = 1e-4, 2e-3, 2e-2  # of the largest value


def tolerance_of(model: nn.Module, autocasts: bool) -> float:
    """Return how far outputs of ``model`` may differ by rounding, relative to the largest one."""
    if autocasts or any(parameter.dtype in HALF for parameter in model.parameters()):
        return _TOLERANCE_IN_16_BITS
    return _TOLERANCE if torch.get_float32_matmul_precision() == "highest" else _TOLERANCE_OF_TF32


def tokens_of_trial(cut: Cut) -> int:
    """Return how many tokens of the whole sequences a trial is given; 0 if they are too short."""
    part = min(_TOKENS, cut.length // cut.ranks)
    return part * cut.ranks if part > 1 else 0


def inputs_of_trial(values: Mapping[str, Any], cut: Cut, tokens: int, shifts_labels: bool) -> dict[str, Any]:
    """Return the arguments of a model with the first ``tokens`` tokens of their sequences.

    Only labels of the tokens on both sides of a seam are counted. So a label that is lost there leaves the last rank
    without any, and one that belongs to another token shows. If there is a padding mask, the first row is padded on the
    left, which shows in a model that counts positions from the mask.

    Args:
        values: by name, with whole sequences.
        shifts_labels: the model shifts ``labels`` by itself.
    """
    short = {}
    for name, value in values.items():
        if name in OFFSETS:  # of the documents in all tokens
            continue
        if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == cut.length:
            value = value[:, :tokens]
            if name == "attention_mask":
                value = value.clone()
                value[0] = 1
                value[0, 0] = 0
            if name in LABELS and not value.is_floating_point():
                after = torch.arange(1, cut.ranks, device=value.device) * (tokens // cut.ranks)
                seams = torch.cat([after - 1, after]) + int(shifts_labels and name == "labels")
                counted = value[:, seams]
                value = torch.full_like(value, IGNORED)
                value[:, seams] = counted.masked_fill(counted == IGNORED, 0)
        short[name] = value
    if shifts_labels and short.get("shift_labels") is not None:  # with parts the model is given both
        short.setdefault("labels", short["shift_labels"])
    return short


def find_difference(
    expected: list[Tensor], got: list[Tensor], inputs: Inputs, comm: Communicator, tolerance: float
) -> str:
    """Compare the tensors that a model has returned for whole sequences, and for this rank's part of them.

    Called on all ranks of ``comm``.

    Args:
        inputs: those of this rank's part.
        tolerance: difference that rounding may make, relative to the largest number.

    Returns:
        What differs, as text; "" if nothing does.
    """
    if len(expected) != len(got):
        return f"{len(got)} tensors instead of {len(expected)}"
    found, cut = "", inputs.cut
    for one, other in zip(expected, got, strict=True):
        if not one.is_floating_point():
            continue
        is_divided = one.dim() > 1 and one.shape[1] == cut.length and other.dim() > 1 and other.shape[1] == cut.part
        if one.dim() == 0:  # a loss: the mean of the parts, weighted by their labels
            weight = float(cut.tokens if inputs.counted is None else inputs.counted)
            sums = torch.stack([other.double() * weight, torch.full_like(other, weight, dtype=torch.float64)])
            total = comm.all_reduce(sums, TAG).wait()
            other = (total[0] / total[1]).to(one.dtype)
        elif is_divided:
            one = cut.own(one)
        difference = _difference(one, other, tolerance)
        found = found or difference
    return found


def _difference(expected: Tensor, got: Tensor, tolerance: float) -> str:
    if expected.shape != got.shape:
        return f"an output of shape {list(got.shape)} instead of {list(expected.shape)}"
    one, other = expected.double(), got.double()
    finite = torch.isfinite(one)  # rows of padding may be anything
    differences = torch.where(finite, (one - other).abs(), 0.0)
    largest_of = [tensor.flatten().max() for tensor in (differences, torch.where(finite, one.abs(), 0.0))]
    difference, largest = host_values(torch.stack(largest_of)) if one.numel() else (0.0, 0.0)
    if difference <= tolerance * max(largest, 1e-30):
        return ""
    return f"an output of shape {list(got.shape)} that differs by {difference:.2g}, where the largest is {largest:.2g}"
