"""Batch norm over the samples of all processes, for the CPU, where torch.nn.SyncBatchNorm does not run."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class SumOverRanks(torch.autograd.Function):
    """Its gradient is that of the sum of all ranks' losses, each of which depends on every rank's input."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return SumOverRanks.apply(gradient)


class JointBatchNorm2d(nn.BatchNorm2d):
    """nn.BatchNorm2d of the joint batch: [batch, channels, height, width], where batch may differ between ranks. Each
    sample counts the same. Statistics are computed in fp32. In evaluation it is nn.BatchNorm2d. Called on all ranks in
    training."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized():
            return super().forward(x)
        values = x.float()
        own_count = values.new_tensor([x.numel() / self.num_features])
        total = SumOverRanks.apply(torch.cat([values.sum(dim=(0, 2, 3)), own_count]))
        count = total[-1].detach()  # elements of a channel
        mean = total[:-1] / count
        centred = values - mean[:, None, None]
        variance = SumOverRanks.apply(centred.square().sum(dim=(0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)
