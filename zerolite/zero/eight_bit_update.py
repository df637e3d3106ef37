"""Updates by AdamW8bit, whose states look like AdamW's from outside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zerolite.optim.adamw8bit import BLOCK, AdamW8bit, Maxima
from zerolite.utils.memory_tags import STATES, tag_memory
from zerolite.zero.bucket import Bucket
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.stage3.partitioned_parameter import unpartitioned_shape
from zerolite.zero.torch_update import TorchUpdate
from zerolite.zero.update import OptimParamShard, State


class EightBitUpdate(TorchUpdate):
    """Update by an AdamW8bit.

    ``inner.state`` has codes and maxima. What reads, saves and loads states has those of AdamW: fp32, one value for
    each element, which fit any stage and world size. They are made on the host, because a device that needs 8-bit
    states has no room for them.
    """

    state_names = Maxima._fields

    def __init__(self, inner: AdamW8bit, buffer: ParameterBuffer) -> None:
        self._optimizer = inner
        self._loading: dict[int, tuple[OptimParamShard, dict[str, Any]]] = {}  # by index of the parameter
        super().__init__(inner, buffer)

    def add_buckets(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            for shard in bucket.shards:
                default, tensor = len(unpartitioned_shape(shard.parameter)) < 2, shard.tensor
                vars(tensor)["fp32_states"] = getattr(shard.parameter, "fp32_states", default)
                vars(tensor)["lead"] = shard.fragment.param_start % BLOCK
        super().add_buckets(buckets)

    def state_of(self, shard: OptimParamShard) -> State:
        state = super().state_of(shard)
        if not state:
            return state
        state["step"] = torch.tensor(float(state["step"]), device="cpu")
        if "maxima" in state:
            for name, blocks in zip(Maxima._fields, self._optimizer.blocks(shard.tensor, state), strict=True):
                values = self._host_values(shard)
                flat = values.as_strided((values.numel(),), (1,))
                for chunk in blocks.chunks():
                    flat[chunk] = blocks.read(chunk)
                state[name] = values
            del state["maxima"]
        return state

    def load_state(self, shard: OptimParamShard, state: Mapping[str, Any]) -> None:
        if not state:
            super().load_state(shard, state)
            return
        like = shard.view(shard.bucket.master)
        made = self._optimizer.new_state(shard.tensor, like, self._device_of(shard))
        made["step"] = int(state["step"])
        if "maxima" not in made:
            for name in Maxima._fields:
                made[name].copy_(state[name])
        else:
            for name, blocks in zip(Maxima._fields, self._optimizer.blocks(shard.tensor, made), strict=True):
                values = self._host_values(shard).copy_(state[name])
                flat = values.as_strided((values.numel(),), (1,))
                for chunk in blocks.chunks():
                    blocks.write(chunk, flat[chunk].to(blocks.codes.device))
        super().load_state(shard, made)

    def make_state(
        self, shard: OptimParamShard, numbers: Mapping[str, Any], tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> dict[str, torch.Tensor]:
        """Return tensors on the host, which :meth:`end_load` turns into codes."""
        self._loading.pop(shard.index, None)
        if not tensors:
            return super().make_state(shard, {}, {})
        made = {name: self._host_values(shard) for name in tensors}
        self._loading[shard.index] = shard, {"step": int(numbers["step"]), **made}
        return made

    def end_load(self) -> None:
        while self._loading:
            _, (shard, state) = self._loading.popitem()
            self.load_state(shard, state)

    def memory(self) -> Iterable[torch.Tensor]:
        yield from super().memory()
        for shard in self.shards():
            yield from self._state(shard).get("maxima", ())

    def _tag_states(self, shards: Iterable[OptimParamShard]) -> None:
        shards = list(shards)
        super()._tag_states(shards)
        for shard in shards:
            for maxima in self._state(shard).get("maxima", ()):
                tag_memory(maxima, STATES)

    def _host_values(self, shard: OptimParamShard) -> torch.Tensor:
        """Return new memory for a state in fp32 on the host, in the shape and strides of the shard."""
        like = shard.view(shard.bucket.master)
        return torch.empty_strided(like.shape, like.stride(), dtype=torch.float32, device="cpu")
