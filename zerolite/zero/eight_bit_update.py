"""Updates by AdamW8bit, whose states look like AdamW's from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerolite.optim.adamw8bit import BLOCK, MAXIMA, MOMENTS, AdamW8bit
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

    state_names = MOMENTS

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
        step = torch.tensor(float(state["step"]), device="cpu")
        return {**self._optimizer.in_fp32(shard.tensor, state, torch.device("cpu")), "step": step}

    def load_state(self, shard: OptimParamShard, state: Mapping[str, Any]) -> None:
        if not state:
            super().load_state(shard, state)
            return
        like = shard.view(shard.bucket.master)
        made = self._optimizer.new_state(shard.tensor, like, self._device_of(shard))
        made["step"] = int(state["step"])
        if MAXIMA[0] not in made:
            for name in MOMENTS:
                made[name].copy_(state[name])
        else:
            for name, blocks in zip(MOMENTS, self._optimizer.blocks(shard.tensor, made), strict=True):
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

    def drop_load(self) -> None:
        self._loading.clear()

    def _host_values(self, shard: OptimParamShard) -> torch.Tensor:
        """Return new memory for a state in fp32 on the host, in the shape and strides of the shard."""
        like = shard.view(shard.bucket.master)
        return torch.empty_strided(like.shape, like.stride(), dtype=torch.float32, device="cpu")
