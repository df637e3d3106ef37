"""``deepspeed.runtime.sequence_parallel.ulysses_sp``: what accelerate's ``ParallelismConfig(sp_size=...)`` calls.

Attention is divided by the engine itself. Loaders give each rank samples of its own; the adapter lets the ranks of a
group share them, one rank's batch after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import IterableDataset

from zerolite.comm import collective
from zerolite.compat.deepspeed import comm
from zerolite.compat.deepspeed.utils import groups
from zerolite.sequence_parallel.cut import OFFSETS

_IGNORED = -100


class UlyssesSPAttentionHF:
    """Attention of Hugging Face's models over sequences that several ranks share."""

    @staticmethod
    @collective
    def register_with_transformers(
        model_name_or_path: Any,
        core_attn_implementation: str | None = None,
        sequence_parallel_size: int = 1,
        micro_batch_size: object = 1,
        seq_length: object = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
    ) -> groups.SequenceGroups | None:
        """Let neighbouring ranks share sequences.

        Args:
            model_name_or_path: a model; its name needs no registration.
            core_attn_implementation: the attention of transformers that each rank computes; default: the model's own.
            sequence_parallel_size: ranks of a group.
            micro_batch_size: has no effect.
            seq_length: has no effect, because lengths may vary.
            seq_length_is_variable: has no effect.
            disable_in_eval: in eval mode each rank computes whole sequences of its own.

        Returns:
            The argument ``mpu`` of ``deepspeed.initialize``; None for groups of one rank.
        """
        if sequence_parallel_size == 1:
            return None
        is_model = isinstance(model_name_or_path, torch.nn.Module)
        if core_attn_implementation is not None and is_model:
            model_name_or_path.set_attn_implementation(core_attn_implementation)
        is_causal = is_model and _is_causal(model_name_or_path)
        return groups.share_sequences(sequence_parallel_size, disable_in_eval, is_causal)


def _is_causal(model: torch.nn.Module) -> bool:
    """Return True if attention of ``model`` says that it is causal, and none says that it is not."""
    said = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    return bool(said) and all(said)


class UlyssesSPDataLoaderAdapter(IterableDataset[dict[str, Any]]):
    """Loader of this rank's parts of the sequences that the loaders of a group have.

    Each batch becomes as many as there are ranks: the first rank's, the second's, ... Labels are shifted before the
    cut, as ``shift_labels``, positions are those of whole sequences, and lengths that do not divide are padded, where
    an attention mask hides the padding or the registered model is causal.

    accelerate's ``skip_first_batches`` makes a loader of its attribute ``dataset``, which is the adapter itself: a
    dataset of batches.
    """

    batch_size, drop_last, prefetch_factor = None, False, None  # of a loader of it

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        """
        Args:
            dl: a loader of batches, dicts with ``input_ids`` [batch, length]; as many on each rank.
            sp_rank: this rank in its group.
            sp_group: the ranks that share sequences.
            sp_world_size: their number.
            device: of the tensors.
        """
        self.dl, self._rank, self._group, self._size, self._device = dl, sp_rank, sp_group, sp_world_size, device

    def __len__(self) -> int:
        return len(self.dl) * self._size

    @property
    def dataset(self) -> UlyssesSPDataLoaderAdapter:
        """The adapter itself."""
        return self

    @property
    def batch_sampler(self) -> Any:
        """The loader's, whose epoch Trainer sets."""
        return getattr(self.dl, "batch_sampler", None)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader."""
        if hasattr(self.dl, "set_epoch"):
            self.dl.set_epoch(epoch)

    @collective
    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(self.dl)
        while True:
            batch, error = next(batches, None), ""
            try:
                batch = None if batch is None else self._prepared(batch)
            except ValueError as wrong:
                error = str(wrong)
            layouts: list[Any] = [None] * self._size
            comm.all_gather_object(layouts, error or batch and _layout_of(batch, self._size), group=self._group)
            if layouts == [None] * self._size:
                return
            for rank, layout in enumerate(layouts):
                if not isinstance(layout, dict):
                    got = layout or "none"
                    raise RuntimeError(
                        "UlyssesSPDataLoaderAdapter: expected a batch with input_ids from the loader of each rank that "
                        f"shares sequences, got from rank {rank} of the group: {got}"
                    )
            for source, layout in enumerate(layouts):
                yield {name: self._part(name, about, batch or {}, source) for name, about in layout.items()}

    def _prepared(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch with all that must be known before the cut, padded to a length that the ranks can share."""
        if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
            raise ValueError(f"{type(batch).__name__} without input_ids; return a dict from the collate function")
        values = {n: v.to(self._device) if isinstance(v, Tensor) else v for n, v in batch.items()}
        rows, length = values["input_ids"].shape
        if "position_ids" not in values:
            values["position_ids"] = torch.arange(length, device=self._device).expand(rows, -1)
        labels = values.pop("labels", None)
        if labels is not None:
            values.setdefault("shift_labels", F.pad(labels[:, 1:], (0, 1), value=_IGNORED))
        missing = -length % self._size
        if missing and "shift_labels" not in values:
            raise ValueError(
                f"sequences of {length} tokens without labels, which {self._size} ranks cannot share equally; pad them"
            )
        if missing and values.get("attention_mask") is None and not groups.are_causal():
            raise ValueError(
                f"sequences of {length} tokens without an attention_mask, which {self._size} ranks cannot share "
                "equally, for a model that is not known to be causal and would see padding; add the mask, or give the "
                "model itself to UlyssesSPAttentionHF.register_with_transformers"
            )
        offsets = [name for name in OFFSETS if values.get(name) is not None]
        if missing and offsets:
            raise ValueError(
                f"sequences of {length} tokens with {offsets[0]}, which {self._size} ranks cannot share equally, "
                "because padding would belong to no document; pad them"
            )
        return {name: _padded(name, value, length, missing) for name, value in values.items()}

    def _part(self, name: str, about: Any, batch: dict[str, Any], source: int) -> Any:
        """Return this rank's part of ``name`` in the batch of rank ``source`` of the group."""
        if not isinstance(about, _Part):
            return about.to(self._device) if isinstance(about, Tensor) else about
        part = torch.empty(about.shape, dtype=about.dtype, device=self._device)
        is_source = self._rank == source
        parts = [part.contiguous() for part in batch[name].chunk(self._size, 1)] if is_source else None
        comm.scatter(part, parts, src=comm.get_global_rank(self._group, source), group=self._group)
        return part


class _Part(NamedTuple):
    """Shape and dtype of each rank's part of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _layout_of(batch: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return what the other ranks must know of a batch: how tensors are cut, and everything else itself."""
    length = batch["input_ids"].shape[1]
    layout: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == length:
            layout[name] = _Part((value.shape[0], length // ranks, *value.shape[2:]), value.dtype)
        else:
            layout[name] = value.cpu() if isinstance(value, Tensor) else value
    return layout


def _padded(name: str, value: Any, length: int, missing: int) -> Any:
    """Return a value of a batch, with ``missing`` tokens more if it is a tensor [batch, length, ...]."""
    if not missing or not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != length:
        return value
    more = value.new_full((value.shape[0], missing, *value.shape[2:]), _IGNORED if name == "shift_labels" else 0)
    if name == "position_ids":
        more = value[:, -1:] + torch.arange(1, missing + 1, device=value.device)
    return torch.cat([value, more], 1)
