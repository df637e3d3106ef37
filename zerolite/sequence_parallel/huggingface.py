"""Attention of Hugging Face's models over whole sequences, and their masks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zerolite.sequence_parallel.attention import (
    Installed,
    Parts,
    States,
    attend_in_ring,
    attending,
    check_heads,
    check_padding,
    check_states,
    current_parts,
    to_heads,
)
from zerolite.sequence_parallel.cut import OFFSETS
from zerolite.sequence_parallel.exchange import exchange
from zerolite.sequence_parallel.visibility import Visibility
from zerolite.utils.accelerator import host_value

_PREFIX = "sequence_parallel_"
_NAME = "_attn_implementation_internal"  # of the chosen attention, in a config


def chosen_attention(model: nn.Module) -> dict[int, tuple[Any, str]]:
    """Return the configs of Hugging Face's models in ``model``, and the attention that each has chosen, by id."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    return {id(c): (c, c._attn_implementation) for c in configs if getattr(c, "_attn_implementation", None) is not None}


def heads_of(chosen: dict[int, tuple[Any, str]]) -> list[int]:
    """Return the numbers of attention heads that these configs say."""
    numbers = [getattr(config, "num_attention_heads", None) for config, _ in chosen.values()]
    return [number for number in numbers if isinstance(number, int)]


def check_huggingface(chosen: dict[int, tuple[Any, str]], size: int, setting: str) -> None:
    """Raise ValueError for models whose attention ``size`` ranks cannot compute, or whose config another engine has.

    Args:
        chosen: see :func:`chosen_attention`.
        setting: the config's ``sequence_parallel.attention``.
    """
    for config, name in chosen.values():
        if name.startswith(_PREFIX):
            raise ValueError(
                "sequence_parallel: expected a model with a config of its own, got one whose config is also that of "
                "another engine's model; make it with copy.deepcopy(config), or end that engine with engine.destroy()"
            )
        _check_name(name)
        if setting == "ring" and name == "eager":
            raise ValueError(
                'sequence_parallel: expected an attention other than "eager" with "attention": "ring", because a ring '
                'cannot call what a model writes out itself; load it with attn_implementation="sdpa", or use "ulysses"'
            )
        for heads in heads_of({0: (config, name)}):
            if setting == "ulysses" or name == "eager":
                check_heads(heads, size)


def _check_name(name: str) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name not in ALL_MASK_ATTENTION_FUNCTIONS or (name != "eager" and name not in ALL_ATTENTION_FUNCTIONS):
        raise ValueError(
            f'sequence_parallel: expected a model with attn_implementation "sdpa", "eager", "flex_attention" or a '
            f'flash attention, got "{name}"; load it with one of these'
        )


def install_huggingface(chosen: dict[int, tuple[Any, str]]) -> list[Installed]:
    """Let the models with these configs attend over whole sequences."""
    handles = []
    for config, name in chosen.values():
        _register(name)
        setattr(config, _NAME, _PREFIX + name)

        def undo(config: Any = config, name: str = name) -> None:
            setattr(config, _NAME, name)

        handles.append(Installed(undo))
    return handles


def _register(name: str) -> None:
    """Register our attention over the one with this name, and its masks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    make_mask = ALL_MASK_ATTENTION_FUNCTIONS[name]

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        inner = _eager_of(module) if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        holder: Any = _Attending(module, name, 1)
        parts, states = current_parts(), (query, key, value)
        if parts is None:
            return inner(holder, *states, *args, **kwargs)
        if args:
            kwargs["attention_mask"], *args = args  # type: ignore[assignment]
        assert not args, "Hugging Face passes the mask alone by position"
        check_states(parts, states)
        return _attend(parts, inner, holder, states, kwargs)

    def mask(**kwargs: Any) -> Any:
        parts = current_parts()
        return make_mask(**kwargs) if parts is None else _make_mask(parts, name, make_mask, kwargs)

    ALL_ATTENTION_FUNCTIONS.register(_PREFIX + name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_PREFIX + name, mask)


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """Return the attention that a model writes out itself, a function of its file by convention."""
    function: Callable[..., Any] | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise ValueError(
            f'sequence_parallel: expected an attention other than "eager" for {type(module).__name__}, whose file has '
            'no eager_attention_forward; load the model with attn_implementation="sdpa"'
        )
    return function


class _Attending:
    """An attention module as the chosen attention is to see it: with its own name in the config, and perhaps with
    another number of query heads for each head of key and value.

    Attributes:
        attention: the name.
        repeats: how often heads of key and value were repeated.
    """

    def __init__(self, module: Any, attention: str, repeats: int) -> None:
        self.module, self.attention, self.repeats = module, attention, repeats

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        if name == "config":
            return _Config(value, self.attention)
        return value // self.repeats if name == "num_key_value_groups" else value


class _Config:
    """A config with the name of another attention."""

    def __init__(self, config: Any, attention: str) -> None:
        self._config, self._attn_implementation = config, attention
        self._attn_implementation_internal = attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _attend(parts: Parts, inner: Callable[..., Any], holder: _Attending, states: States, kwargs: dict[str, Any]) -> Any:
    """Attend over whole sequences. Returns the output, [batch, tokens, heads, width], and what else ``inner`` returns.

    Args:
        inner: the attention that the model has chosen.
        holder: the module that attends.
    """
    module = holder.module
    for name in ("s_aux", "position_bias", "cache"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"sequence_parallel: expected attention without {name}, got one in {type(module).__name__}; leave "
                "sequence_parallel out"
            )
    mask, is_causal = kwargs.get("attention_mask"), kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    visible = _visible(parts, mask, is_causal, kwargs) if holder.attention != "eager" else None
    way = parts.ranks.way(states[0].shape[1], visible is not None)
    if way.ring is not None and visible is not None:
        output = attend_in_ring(parts, way, states, visible, kwargs.get("scaling"), kwargs.get("dropout", 0.0))
        return output.transpose(1, 2).contiguous(), None
    if isinstance(mask, _MaskInRing):
        kwargs["attention_mask"] = mask = mask.make()
    check_padding(parts, is_causal, mask is not None)
    comm = parts.ranks.comm
    states, repeats = to_heads(comm, states)
    if kwargs.get("position_ids") is not None and parts.cut.positions is not None:
        kwargs["position_ids"] = parts.cut.positions
    with attending(None):
        output, *rest = inner(_Attending(module, holder.attention, repeats), *states, **kwargs)
    tokens, heads = 1, 2  # output: [batch, tokens, heads, width]
    return exchange(output, comm, tokens, heads), *rest


# -------------------------------------------------------------------- masks


class _MaskInRing:
    """Stands for a mask of whole sequences in a model whose attention may be a ring.

    Attributes:
        visible: what the mask lets queries see; None if a ring cannot tell.
        make: makes the mask for the attention that the model has chosen.
    """

    def __init__(self, visible: Visibility | None, make: Callable[[], Any]) -> None:
        self.visible, self.make = visible, make

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_CHANGED.format(f"asks for its '{name}'"))

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(_CHANGED.format("takes a part of it"))


_CHANGED = (
    "sequence_parallel: expected a model that hands its attention mask on as it is, because in a ring no rank has "
    'the whole of it, got one that {}; use "attention": "ulysses"'
)


def _visible(parts: Parts, mask: Any, is_causal: bool, kwargs: dict[str, Any]) -> Visibility | None:
    """Return what queries see; None if a ring cannot tell.

    Args:
        mask: the one that attention is given.
        kwargs: the other arguments of attention.
    """
    if parts.ranks.ring is None or kwargs.get("softcap") is not None:
        return None
    if parts.cut.documents is None and any(kwargs.get(name) is not None for name in OFFSETS):
        return None  # documents that only offsets tell of
    if isinstance(mask, _MaskInRing):
        return mask.visible
    if mask is not None:  # one that the model was given, or has made itself
        whole = isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[-1] == parts.cut.padded
        return Visibility(dense=mask) if whole and mask.shape[-2] in (1, parts.cut.padded) else None
    return _with_padding(parts, Visibility(is_causal, kwargs.get("sliding_window") if is_causal else None))


def _with_padding(parts: Parts, visible: Visibility) -> Visibility:
    keys, cut = parts.padding(visible.causal), parts.cut
    if cut.mask is not None and cut.documents is None:
        keys = cut.mask.bool()
        if not host_value((~keys).any()):  # a mask of ones costs as much as any
            keys = None
    return Visibility(visible.causal, visible.window, keys, cut.documents)


def _make_mask(parts: Parts, name: str, make: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Make the mask of whole sequences, or what stands for it in a ring."""
    if kwargs.get("use_vmap"):
        raise ValueError(
            "sequence_parallel: expected causal, sliding or full attention, got a mask function of the model's own, "
            "which knows this rank's tokens alone; leave sequence_parallel out"
        )

    def whole() -> Any:
        return _whole_mask(parts, make, kwargs)

    return whole() if parts.ranks.ring is None or name == "eager" else _MaskInRing(_seen_by(parts, kwargs), whole)


def _seen_by(parts: Parts, kwargs: dict[str, Any]) -> Visibility | None:
    """Return what a mask function of Hugging Face's lets queries see; None for one that is not known."""
    from transformers import masking_utils

    function, window = kwargs["mask_function"], kwargs.get("local_size")
    if function is masking_utils.causal_mask_function:
        return _with_padding(parts, Visibility(causal=True))
    if function is masking_utils.bidirectional_mask_function:
        return _with_padding(parts, Visibility())
    # transformers itself takes a function for causal within this distance where it permits to leave out the mask.
    if not (kwargs.get("allow_is_causal_skip") and type(window) is int and window > 1):
        return None
    none, row, column = (torch.tensor(number) for number in (0, window, 1))
    if not bool(function(none, none, row, column)):  # in chunks of this length, not in a window
        return None
    return _with_padding(parts, Visibility(causal=True, window=window))


def _whole_mask(parts: Parts, make: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    from transformers import masking_utils as masks

    cut = parts.cut
    kwargs = {**kwargs, "q_length": cut.padded, "kv_length": cut.padded, "q_offset": 0, "kv_offset": 0}
    if cut.mask is not None:
        kwargs["attention_mask"] = cut.mask.bool()
    if cut.documents is not None:
        kwargs["allow_is_causal_skip"] = False
        rows, function = kwargs["batch_size"], kwargs["mask_function"]
        documents = cut.documents.expand(rows, -1)
        in_documents = getattr(masks, "packed_sequence_compatibility_function", None)  # counts chunks in each document
        if in_documents is not None and cut.positions is not None:
            kwargs["mask_function"] = in_documents(function, cut.positions.expand(rows, -1), documents)
        else:
            kwargs["mask_function"] = masks.and_masks(function, masks.packed_sequence_mask_function(documents))
    return make(**kwargs)
