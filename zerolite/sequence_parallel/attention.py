"""Attention over whole sequences, wherever a model calls it.

While a forward or backward of an engine with divided sequences runs, these take each rank's part of query, key and
value, and return this rank's part of the attention that the whole sequences have:

- the functions of Hugging Face's ``ALL_ATTENTION_FUNCTIONS``, under names of ours in the model's config
  (huggingface.py);
- ``torch.nn.functional.scaled_dot_product_attention``, which is replaced while such an engine lives.

Outside of that they call the original, so generation and other models are as they were.

Ranks may exchange tokens for heads and call the attention that the model has chosen (exchange.py, "ulysses"), or pass
keys and values on (ring.py, "ring"), or both at once: neighbours exchange, and rings go across them (Fang & Zhao,
"USP", 2024)::

    4 ranks, 2 that exchange          rank 0   rank 1   rank 2   rank 3
    tokens, of all heads                0        1        2        3
    exchanged: tokens, half the heads  0 1      0 1      2 3      2 3
    rings                              0 2      1 3      0 2      1 3
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zerolite.comm import Communicator, collective
from zerolite.comm.topology import Topology, sets_of
from zerolite.sequence_parallel.cut import Cut
from zerolite.sequence_parallel.exchange import exchange
from zerolite.sequence_parallel.ring import Ring, attend_over_ring
from zerolite.sequence_parallel.visibility import Visibility

HEADS, TOKENS = 1, 2
"""Dimensions of query, key and value, [batch, heads, tokens, width]."""

States = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""

_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: neighbouring ranks get distant seeds


class Way(NamedTuple):
    """Ranks by which one call of attention sees the other parts.

    Attributes:
        heads: ranks that exchange tokens for heads; None: no exchange.
        ring: ranks that pass keys and values on; None: no ring.
    """

    heads: Communicator | None
    ring: Communicator | None


@dataclass(frozen=True)
class AttentionRanks:
    """The ranks that have parts of the same sequences.

    Attributes:
        comm: all of them.
        heads: neighbours that exchange tokens for heads; None: no exchange.
        ring: ranks at this one's place among all such neighbours; None: no ring.
        setting: the config's ``sequence_parallel.attention``.
    """

    comm: Communicator
    heads: Communicator | None
    ring: Communicator | None
    setting: str

    def way(self, heads: int, in_ring: bool) -> Way:
        """Return the way for attention with this number of heads.

        Raises ValueError if there is none.

        Args:
            in_ring: a ring can compute it.
        """
        if self.ring is None or (not in_ring and self.setting == "auto"):
            check_heads(heads, self.comm.world_size)
            return Way(self.comm, None)
        if not in_ring:
            raise ValueError(
                'sequence_parallel: expected attention that a ring can compute ("attention": "ring"): causal or full, '
                "with a sliding window, padding, documents or a mask without a gradient, got another mask; use "
                '"auto", or leave sequence_parallel out'
            )
        if self.heads is not None and heads % self.heads.world_size:
            return Way(None, self.comm)
        return Way(self.heads, self.ring)


@collective
def attention_ranks(topology: Topology, device: torch.device, setting: str, heads: Sequence[int]) -> AttentionRanks:
    """Divide the ranks that have parts of the same sequences, for attention.

    Args:
        setting: the config's ``sequence_parallel.attention``.
        heads: numbers of attention heads, as far as they are known.
    """
    comm, tensor = topology.sequence, topology.tensor.world_size
    size = {"ulysses": comm.world_size, "ring": 1}.get(setting)
    if size is None:
        near = topology.host or topology.world.world_size
        numbers = [near // math.gcd(near, tensor), *(number // math.gcd(number, tensor) for number in heads)]
        size = math.gcd(comm.world_size, *numbers)
    if size == comm.world_size:
        return AttentionRanks(comm, comm, None, setting)
    if size == 1:
        return AttentionRanks(comm, None, comm, setting)
    exchanging, ring = sets_of(comm, device, size, "heads and rings")
    exchanging.serve("sequence", comm.is_rank0)
    return AttentionRanks(comm, exchanging, ring.serve("ring", comm.is_rank0), setting)


@dataclass(frozen=True)
class Parts:
    """The forward under way, as far as attention must know it.

    Attributes:
        ranks: those that have the other parts of the sequences.
        cut: how they are divided.
    """

    ranks: AttentionRanks
    cut: Cut

    def padding(self, is_causal: bool) -> Tensor | None:
        """Return a mask of keys, [1, tokens], without the padding of the cut; None if no query sees that."""
        cut = self.cut
        return None if is_causal or cut.padded == cut.length else torch.arange(cut.padded)[None] < cut.length


_current: Parts | None = None  # of the process, because autograd recomputes in threads of its own on CUDA


@contextlib.contextmanager
def attending(parts: Parts | None) -> Iterator[None]:
    """Context in which attention is over whole sequences; None: over what it is given."""
    global _current
    before, _current = _current, parts
    try:
        yield
    finally:
        _current = before


def current_parts() -> Parts | None:
    """Return the forward under way; None outside of one."""
    return _current


def check_heads(heads: int, size: int) -> None:
    """Raise ValueError if ``size`` ranks cannot share ``heads`` heads equally."""
    if heads % size:
        raise ValueError(
            f"sequence_parallel: expected a number of attention heads that sequence_parallel.size {size} divides "
            f'("ulysses" exchanges tokens for heads), got {heads}; choose a divisor, or "attention": "ring"'
        )


def check_states(parts: Parts, states: States) -> None:
    """Raise an error for a call that is not self-attention over the tokens of this rank."""
    query, key, value = states
    lengths = {tensor.shape[TOKENS] for tensor in states}
    if lengths != {parts.cut.part}:
        raise ValueError(
            f"sequence_parallel: expected self-attention over the {parts.cut.part} tokens of this rank, got query, "
            f"key and value of {query.shape[TOKENS]}, {key.shape[TOKENS]} and {value.shape[TOKENS]} tokens; "
            "cross-attention and caches are not supported"
        )
    if torch.compiler.is_compiling():
        raise RuntimeError("sequence_parallel: expected a model that is not compiled, got one; leave compile out")


def check_padding(parts: Parts, is_causal: bool, has_mask: bool) -> None:
    """Raise ValueError if the model's own attention would see the padding of the cut."""
    if parts.cut.padded != parts.cut.length and not is_causal and not has_mask:
        raise ValueError(
            f"sequence_parallel: expected a length that {parts.cut.ranks} ranks can share equally, got "
            f"{parts.cut.length}, and attention that is neither causal nor masked would see the padding; pad the "
            "sequences yourself and give the model an attention_mask"
        )


def to_heads(comm: Communicator, states: States) -> tuple[States, int]:
    """Exchange this rank's tokens of all heads for the tokens of all ranks of ``comm`` and some heads.

    Args:
        states: [batch, heads, tokens of this rank, width]; key and value may have fewer heads.

    Returns:
        The three, and by how much key and value heads were repeated, so that the ranks can share them.
    """
    query, key, value = states
    repeats = comm.world_size // math.gcd(key.shape[HEADS], comm.world_size)
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, HEADS) for tensor in (key, value))
    exchanged = (exchange(query, comm, HEADS, TOKENS), exchange(key, comm, HEADS, TOKENS))
    return (*exchanged, exchange(value, comm, HEADS, TOKENS)), repeats


def attend_in_ring(
    parts: Parts, way: Way, states: States, visible: Visibility, scale: float | None, dropout: float
) -> Tensor:
    """Return this rank's part of the attention, [batch, heads, tokens, width], by a ring.

    Args:
        visible: what the queries of whole sequences see.
        scale: factor of the products of queries and keys; None: 1 / sqrt(width).
        dropout: probability.
    """
    assert way.ring is not None
    query, device = states[0], states[0].device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:  # as torch's own attention is
        query, key, value = (state.to(torch.get_autocast_dtype(device)) for state in states)
        states = query, key, value
    if way.heads is not None:
        visible = replace(visible, dense=_dense_of_heads(visible.dense, way.heads, query.shape[HEADS]))
        states, _ = to_heads(way.heads, states)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    seed = 0
    if dropout:  # other numbers on each rank, which a checkpoint draws again
        seed = (int(torch.randint(1 << 62, (), device="cpu")) + parts.ranks.comm.rank * _STRIDE) % (1 << 62)
    output = attend_over_ring(Ring(way.ring, visible, states[0].shape[TOKENS], scale, dropout, seed), states)
    return output if way.heads is None else exchange(output, way.heads, TOKENS, HEADS)


def _dense_of_heads(mask: Tensor | None, comm: Communicator, heads: int) -> Tensor | None:
    """Return the mask of the heads that this rank of ``comm`` gets."""
    if mask is None or mask.dim() < 3 or mask.shape[-3] == 1:
        return mask
    own = heads // comm.world_size
    return mask.narrow(-3, comm.rank * own, own)


# -------------------------------------------------------------------- scaled_dot_product_attention


_NAME = "scaled_dot_product_attention"
_users = 0
_installed: Callable[..., Tensor] | None = None  # in torch, if there are users
_replaced: Callable[..., Tensor] = getattr(F, _NAME)


def _over_sequences(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``scaled_dot_product_attention``, over whole sequences while an engine that divides them is at work.

    Args:
        plain: the function that it replaces: torch's, or another library's.
    """

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        parts = _current
        if parts is None:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **options)
        states = query, key, value
        way, visible = _way_and_sight(parts, states, attn_mask, is_causal)
        if visible is not None:
            return attend_in_ring(parts, way, states, visible, options.get("scale"), dropout_p)
        check_padding(parts, is_causal, attn_mask is not None)
        comm, heads = parts.ranks.comm, query.shape[HEADS]
        states, _ = to_heads(comm, states)
        mask = _dense_of_heads(attn_mask, comm, heads)
        with attending(None):  # another library's may call ours, which it has found in torch
            output = plain(*states, mask, dropout_p, is_causal, **options)
        return exchange(output, comm, TOKENS, HEADS)

    return scaled_dot_product_attention


def _way_and_sight(parts: Parts, states: States, mask: Tensor | None, is_causal: bool) -> tuple[Way, Visibility | None]:
    """Return the way of a call of torch's attention, and in a ring what queries see, else None."""
    query = states[0]
    if query.dim() != 4:
        raise ValueError(
            "sequence_parallel: expected query, key and value [batch, heads, tokens, width] in "
            f"scaled_dot_product_attention, got a query of shape {list(query.shape)}; add the missing dimensions"
        )
    if mask is not None:
        _check_mask(mask, parts)
    check_states(parts, states)
    way = parts.ranks.way(query.shape[HEADS], in_ring=mask is None or not mask.requires_grad)
    if way.ring is None:
        return way, None
    dense = None if mask is None else mask[(None,) * (4 - mask.dim())]
    return way, Visibility(is_causal, keys=parts.padding(is_causal or dense is not None), dense=dense)


def _check_mask(mask: Tensor, parts: Parts) -> None:
    """Raise ValueError for a mask that is not one of whole sequences."""
    length = parts.cut.padded
    if mask.shape[-1] != length or mask.dim() < 2 or mask.shape[-2] not in (1, length):
        raise ValueError(
            f"sequence_parallel: expected a mask of whole sequences, [..., {length}, {length}] or [..., 1, {length}], "
            f"in scaled_dot_product_attention, got {list(mask.shape)}; make it from the model's attention_mask, which "
            "is not divided, or use is_causal"
        )


class Installed:
    """Handle of what has been installed in torch or in a model."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Undo it."""
        self._undo()


def install_attention() -> Installed:
    """Replace torch's attention, until the last handle is removed."""
    global _users, _installed, _replaced
    if not _users:
        _replaced = getattr(F, _NAME)
        _installed = _over_sequences(_replaced)
        setattr(F, _NAME, _installed)
    _users += 1

    def undo() -> None:
        global _users
        _users -= 1
        if not _users and getattr(F, _NAME) is _installed:  # else it has been replaced since
            setattr(F, _NAME, _replaced)

    return Installed(undo)
