"""Attention over whole sequences, wherever a model calls it.

While a forward or backward of an engine with divided sequences runs, these take each rank's part of query, key and
value, exchange tokens for heads, call the attention that the model has chosen, and exchange back:

- the functions of Hugging Face's ``ALL_ATTENTION_FUNCTIONS``, under names of ours in the model's config;
- ``torch.nn.functional.scaled_dot_product_attention``, which is replaced while such an engine lives.

Outside of that they call the original, so generation and other models are as they were.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerolite.comm import Communicator
from zerolite.sequence_parallel.cut import Cut
from zerolite.sequence_parallel.exchange import exchange

HEADS, TOKENS = 1, 2
"""Dimensions of query, key and value, [batch, heads, tokens, width]."""

_PREFIX = "sequence_parallel_"


@dataclass(frozen=True)
class AttentionRanks:
    """The ranks that have parts of the same sequences.

    Attributes:
        comm: all of them.
    """

    comm: Communicator


@dataclass(frozen=True)
class Parts:
    """The forward under way, as far as attention must know it.

    Attributes:
        ranks: those that have the other parts of the sequences.
        cut: how they are divided.
    """

    ranks: AttentionRanks
    cut: Cut

    @property
    def comm(self) -> Communicator:
        """All ranks that have parts of the sequences."""
        return self.ranks.comm


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


def attends() -> bool:
    """Return True in a context in which attention is over whole sequences."""
    return _current is not None


def check_heads(heads: int, size: int) -> None:
    """Raise ValueError if ``size`` ranks cannot share ``heads`` heads equally."""
    if heads % size:
        raise ValueError(
            f"sequence_parallel: expected a number of attention heads that sequence_parallel.size {size} divides "
            f'("ulysses" exchanges tokens for heads), got {heads}; choose a divisor'
        )


def to_heads(parts: Parts, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Exchange this rank's tokens of all heads for all tokens of its heads.

    Args:
        query: [batch, heads, tokens of this rank, width].
        key: the same for the heads of key and value, which may be fewer.
        value: as ``key``.

    Returns:
        The three, and by how much key and value heads were repeated, so that the ranks can share them.
    """
    size, heads, shared = parts.comm.world_size, query.shape[HEADS], key.shape[HEADS]
    lengths = {tensor.shape[TOKENS] for tensor in (query, key, value)}
    if lengths != {parts.cut.part}:
        raise ValueError(
            f"sequence_parallel: expected self-attention over the {parts.cut.part} tokens of this rank, got query, "
            f"key and value of {query.shape[TOKENS]}, {key.shape[TOKENS]} and {value.shape[TOKENS]} tokens; "
            "cross-attention and caches are not supported"
        )
    if torch.compiler.is_compiling():
        raise RuntimeError("sequence_parallel: expected a model that is not compiled, got one; leave compile out")
    check_heads(heads, size)
    repeats = size // math.gcd(shared, size)
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, HEADS) for tensor in (key, value))
    return *exchange((query, key, value), parts.comm, HEADS, TOKENS), repeats  # type: ignore[return-value]


def _check_padding(parts: Parts, is_causal: bool, has_mask: bool) -> None:
    if parts.cut.padded != parts.cut.length and not is_causal and not has_mask:
        raise ValueError(
            f"sequence_parallel: expected a length that {parts.cut.ranks} ranks can share equally, got "
            f"{parts.cut.length}, and attention that is neither causal nor masked would see the padding; pad the "
            "sequences yourself and give the model an attention_mask"
        )


# -------------------------------------------------------------------- scaled_dot_product_attention


_NAME = "scaled_dot_product_attention"
_plain_attention = getattr(F, _NAME)
_users = 0


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """``scaled_dot_product_attention``, over whole sequences while an engine that divides them is at work."""
    parts = _current
    if parts is None:
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if query.dim() != 4:
        raise ValueError(
            "sequence_parallel: expected query, key and value [batch, heads, tokens, width] in "
            f"scaled_dot_product_attention, got a query of shape {list(query.shape)}; add the missing dimensions"
        )
    _check_padding(parts, is_causal, attn_mask is not None)
    heads = query.shape[HEADS]
    mask = None if attn_mask is None else _mask_of_heads(attn_mask, parts, heads)
    query, key, value, _ = to_heads(parts, query, key, value)
    output = _plain_attention(query, key, value, mask, dropout_p, is_causal, **options)
    return exchange((output,), parts.comm, TOKENS, HEADS)[0]


def _mask_of_heads(mask: Tensor, parts: Parts, heads: int) -> Tensor:
    """Return the mask of this rank's heads. Raises ValueError if it is not one of whole sequences."""
    length, comm = parts.cut.padded, parts.comm
    if mask.shape[-1] != length or mask.shape[-2] not in (1, length):
        raise ValueError(
            f"sequence_parallel: expected a mask of whole sequences, [..., {length}, {length}] or [..., 1, {length}], "
            f"in scaled_dot_product_attention, got {list(mask.shape)}; make it from the model's attention_mask, which "
            "is not divided, or use is_causal"
        )
    if mask.dim() < 3 or mask.shape[-3] == 1:
        return mask
    own = heads // comm.world_size
    return mask.narrow(-3, comm.rank * own, own)


class _Installed:
    """Handle of what has been installed in torch or in a model."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Undo it."""
        self._undo()


def install_attention() -> _Installed:
    """Replace torch's attention, until the last handle is removed."""
    global _users, _plain_attention
    if not _users:
        _plain_attention = getattr(F, _NAME)
        setattr(F, _NAME, _attention)
    _users += 1

    def undo() -> None:
        global _users
        _users -= 1
        if not _users and getattr(F, _NAME) is _attention:  # else it has been replaced since
            setattr(F, _NAME, _plain_attention)

    return _Installed(undo)


# -------------------------------------------------------------------- Hugging Face


def chosen_attention(model: nn.Module) -> dict[int, tuple[Any, str]]:
    """Return the configs of Hugging Face's models in ``model``, and the attention that each has chosen, by id."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    return {id(c): (c, c._attn_implementation) for c in configs if getattr(c, "_attn_implementation", None) is not None}


def check_huggingface(model: nn.Module, size: int) -> None:
    """Raise ValueError if ``size`` ranks cannot share the heads of a model, or if another engine has its config."""
    for config, name in chosen_attention(model).values():
        heads = getattr(config, "num_attention_heads", None)
        if isinstance(heads, int):
            check_heads(heads, size)
        if name.startswith(_PREFIX):
            raise ValueError(
                "sequence_parallel: expected a model with a config of its own, got one whose config is also that of "
                "another engine's model; make it with copy.deepcopy(config), or end that engine with engine.destroy()"
            )


def install_huggingface(model: nn.Module) -> list[_Installed]:
    """Let Hugging Face's models in ``model`` attend over whole sequences.

    Raises ValueError if a model has an attention that is not known.
    """
    handles = []
    chosen = list(chosen_attention(model).values())
    for _, name in chosen:
        _register(name)
    for config, name in chosen:
        config._attn_implementation_internal = _PREFIX + name

        def undo(config: Any = config, name: str = name) -> None:
            config._attn_implementation_internal = name

        handles.append(_Installed(undo))
    return handles


def _register(name: str) -> None:
    """Register our attention over the one with this name, and its masks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name not in ALL_MASK_ATTENTION_FUNCTIONS or (name != "eager" and name not in ALL_ATTENTION_FUNCTIONS):
        raise ValueError(
            f'sequence_parallel: expected a model with attn_implementation "sdpa", "eager", "flex_attention" or a '
            f'flash attention, got "{name}"; load it with one of these'
        )
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS[name]

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        inner = _eager_of(module) if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        with _under_its_name(module, name):
            return _attend(inner, module, (query, key, value), args, kwargs)

    def mask(**kwargs: Any) -> Any:
        return _make_mask(make_mask, kwargs)

    ALL_ATTENTION_FUNCTIONS.register(_PREFIX + name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_PREFIX + name, mask)


@contextlib.contextmanager
def _under_its_name(module: nn.Module, name: str) -> Iterator[None]:
    """Context in which the module's config has the name that the attention itself looks for there."""
    config: Any = getattr(module, "config", None)
    before = getattr(config, "_attn_implementation_internal", None)
    if before is not None:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        if before is not None:
            config._attn_implementation_internal = before


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """Return the attention that a model writes out itself, a function of its file by convention."""
    function: Callable[..., Any] | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise ValueError(
            f'sequence_parallel: expected an attention other than "eager" for {type(module).__name__}, whose file has '
            'no eager_attention_forward; load the model with attn_implementation="sdpa"'
        )
    return function


class _Groups:
    """An attention module with another number of query heads for each head of key and value."""

    def __init__(self, module: nn.Module, num_key_value_groups: int) -> None:
        self._module, self.num_key_value_groups = module, num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _attend(
    inner: Callable[..., Any],
    module: nn.Module,
    states: tuple[Tensor, Tensor, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    parts = _current
    if parts is None:
        return inner(module, *states, *args, **kwargs)
    for name in ("s_aux", "position_bias", "cache"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"sequence_parallel: expected attention without {name}, got one in {type(module).__name__}; leave "
                "sequence_parallel out"
            )
    mask = args[0] if args else kwargs.get("attention_mask")
    is_causal = kwargs.get("is_causal")
    _check_padding(parts, getattr(module, "is_causal", True) if is_causal is None else is_causal, mask is not None)
    query, key, value, repeats = to_heads(parts, *states)
    holder: Any = module
    groups = getattr(module, "num_key_value_groups", None)
    if repeats > 1 and groups is not None:
        holder = _Groups(module, groups // repeats)
    if kwargs.get("position_ids") is not None and parts.cut.positions is not None:
        kwargs["position_ids"] = parts.cut.positions
    with attending(None):
        output, *rest = inner(holder, query, key, value, *args, **kwargs)
    tokens, heads = 1, 2  # output: [batch, tokens, heads, width]
    return exchange((output,), parts.comm, tokens, heads)[0], *rest


def _make_mask(make: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Make the mask of whole sequences."""
    parts = _current
    if parts is None:
        return make(**kwargs)
    if kwargs.get("use_vmap"):
        raise ValueError(
            "sequence_parallel: expected causal, sliding or full attention, got a mask function of the model's own, "
            "which knows this rank's tokens alone; leave sequence_parallel out"
        )
    from transformers.masking_utils import and_masks, packed_sequence_mask_function

    cut = parts.cut
    kwargs |= {"q_length": cut.padded, "kv_length": cut.padded, "q_offset": 0, "kv_offset": 0}
    if cut.mask is not None:
        kwargs["attention_mask"] = cut.mask.bool()
    if cut.documents is not None:
        kwargs["allow_is_causal_skip"] = False
        packed = packed_sequence_mask_function(cut.documents.expand(kwargs["batch_size"], -1))
        kwargs["mask_function"] = and_masks(kwargs["mask_function"], packed)
    return make(**kwargs)
