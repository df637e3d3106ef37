"""Gradients of an unfinished gradient accumulation step: saved midway, resumed at any stage and world size.

Ranks are data-parallel ones here: tensor-parallel ones that compute together have parts of one gradient, or the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerolite.checkpoint.manifest import StoredTensor
from zerolite.checkpoint.model_state import GRADIENTS, RANKS, ModelState
from zerolite.checkpoint.pieces import FlatRange, cut_evenly
from zerolite.checkpoint.planner import Shard, Target
from zerolite.tensor_parallel.cuts import is_partial
from zerolite.zero.bucket_state import WindowSums
from zerolite.zero.grad_reducer import GradReducer


def _own_key(rank: int, name: str) -> str:
    return f"{RANKS}{rank}/{GRADIENTS}{name}"


def obstacle_here(model: ModelState) -> str | None:
    """Why gradients that no step has used can be neither saved nor loaded here, or None."""
    if model.topology.pipe.world_size > 1:
        return (
            "with a pipeline, whose steps are made of whole calls of engine.train_batch(); save after one that has "
            "ended, or call engine.zero_grad() if one has failed"
        )
    if any(is_partial(parameter) for parameter in model.buffer.parameters):
        return (
            "with tensor_parallel.sequence_parallel, where tensor-parallel ranks have shares of some gradients, which "
            "are summed in the step; save after engine.step()"
        )
    return None


def window_shards(model: ModelState, reducer: GradReducer) -> tuple[list[Shard], WindowSums]:
    """What this rank writes of the window's gradients."""
    rank, world_size = model.comm.rank, model.comm.world_size
    sums = reducer.sums()
    names = model.names_by_index()
    writes = [model.writes(parameter) for parameter in model.buffer.parameters]
    shards: list[Shard] = []
    for index, values in sums.local.items():
        if writes[index]:
            shards += model.range(_own_key(rank, names[index]), index, 0, values).shards()
    reduced = [part for index, part in _reduced_ranges(model, sums.reduced, names) if writes[index]]
    for part in reduced if model.buffer.shard else cut_evenly(reduced, rank, world_size):
        shards += part.shards()
    return shards, sums


def _reduced_ranges(
    model: ModelState, reduced: Mapping[int, torch.Tensor], names: Sequence[str]
) -> Iterator[tuple[int, FlatRange]]:
    for bucket, fragments in enumerate(model.buffer.fragments):
        for fragment in fragments:
            if bucket in reduced:
                index = fragment.slot.index
                values = reduced[bucket].narrow(0, fragment.shard_start, fragment.numel)
                yield index, model.range(GRADIENTS + names[index], index, fragment.param_start, values)


@dataclass
class WindowLoad:
    """Gradients of a saved window on their way into the engine. ``parts``: sums of single ranks that have no place of
    their own here, because the ranks are others or reduce in every pass; :meth:`finish` adds them to the means.
    scale: of the means, which with weights are sums divided by the number of ranks."""

    targets: list[Target]
    parts: list[tuple[torch.Tensor, torch.Tensor, float]]
    sums: WindowSums
    scale: float

    @torch.no_grad()
    def finish(self, loss_scale: float) -> None:
        """After the targets are filled. loss_scale: of this window over that of the saved one."""
        for place, part, factor in self.parts:
            place.add_(part.to(place.dtype), alpha=factor)
        for mean in self.sums.reduced.values():
            mean.mul_(self.scale * loss_scale)
        for own in self.sums.local.values():
            own.mul_(loss_scale)


def begin_window(
    model: ModelState,
    reducer: GradReducer,
    stored: Mapping[str, StoredTensor],
    stored_names: Mapping[str, str],
    saved: Mapping[str, Any],
    scaled: bool,
) -> WindowLoad:
    """Make room for a saved window's gradients. saved: of state.json. scaled: whether there is a loss scale here; where
    there was one and there is none, or the reverse, sums are kept in fp32. After ``pipeline.zero_grad()``; called on
    all ranks."""
    rank, world_size = model.comm.rank, model.comm.world_size
    widened = scaled != (saved["loss_scale"] is not None)

    def dtype_of(key: str) -> torch.dtype:
        dtype = stored[key].dtype
        return torch.promote_types(dtype, torch.float32) if widened else dtype

    names = [stored_names.get(name, "") for name in model.names_by_index()]
    continues = (
        reducer.sums_locally and world_size == saved["world_size"] and reducer.local_factor == saved["local_factor"]
    )
    means = {i: dtype_of(GRADIENTS + name) for i, name in enumerate(names) if GRADIENTS + name in stored}
    own = {i: dtype_of(key) for i, name in enumerate(names) if (key := _own_key(rank, name)) in stored}
    of_others = {
        i: torch.promote_types(stored[key].dtype, torch.float32)
        for r in range(saved["world_size"])
        for i, name in enumerate(names)
        if (key := _own_key(r, name)) in stored
    }
    reduced: dict[int, torch.dtype] = {}
    for index, dtype in (means if continues else {**of_others, **means}).items():
        bucket = model.buffer.layout.slots[index].bucket
        reduced[bucket] = torch.promote_types(reduced.get(bucket, dtype), dtype)
    if reduced:  # a window has reduced all buckets or none
        first = next(iter(reduced.values()))
        reduced = {bucket.index: reduced.get(bucket.index, first) for bucket in model.buffer.layout.buckets}
    waiting = saved["passes_in_local"] if continues else 0
    sums = reducer.new_sums(own if continues else {}, reduced, waiting, saved["passes"])
    scale = saved["world_size"] / world_size if saved["counts"]["weighted"] else 1.0
    load = WindowLoad([], [], sums, scale)
    for index, values in sums.local.items():
        load.targets += model.range(_own_key(rank, names[index]), index, 0, values).targets()
    for bucket, fragments in enumerate(model.buffer.fragments):
        for fragment in fragments if bucket in reduced else ():
            index = fragment.slot.index
            values = sums.reduced[bucket].narrow(0, fragment.shard_start, fragment.numel)
            if index in means:
                load.targets += model.range(GRADIENTS + names[index], index, fragment.param_start, values).targets()
            for other in () if continues else range(saved["world_size"]):
                if (key := _own_key(other, names[index])) in stored:
                    part = torch.zeros(fragment.numel, dtype=stored[key].dtype, device=values.device)
                    load.targets += model.range(key, index, fragment.param_start, part).targets()
                    load.parts.append((values, part, saved["local_factor"]))
    return load
