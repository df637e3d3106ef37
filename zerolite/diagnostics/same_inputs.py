"""Comparison of the inputs of ranks that share layers (tensor parallelism) and so must compute the same batch."""

from __future__ import annotations

import zlib

import torch

from zerolite.comm import Communicator, ControlChannel
from zerolite.comm.ranks import name_ranks
from zerolite.zero.grad_stats import SAME_BATCH
from zerolite.zero.step import StepPipeline


class SameInputs:
    """Compares the shapes of inputs before a forward, and their values with the step's statistics.

    Args:
        comm: ranks that share layers.
        channel: channel between these ranks on the host; None if shapes are not compared.
    """

    def __init__(self, pipeline: StepPipeline, comm: Communicator, channel: ControlChannel | None) -> None:
        self._pipeline, self._comm, self._channel = pipeline, comm, channel

    def compare(self, tensors: list[torch.Tensor]) -> None:
        """Compare the inputs before a forward; called on all ranks of ``comm``.

        Raises RuntimeError on all of them if shapes differ: the collectives of the layers would exchange tensors of
        different sizes. Values are compared later, with the step's statistics, which costs no collective of its own.
        """
        if self._channel is not None:
            shapes = zlib.crc32(repr([(tuple(t.shape), t.dtype) for t in tensors]).encode())
            rows = self._channel.exchange([shapes])
            if any(row != rows[0] for row in rows):
                raise RuntimeError(
                    f"engine(...): expected inputs of the same shapes on {name_ranks(self._comm.members())}, "
                    f"which share layers, got different shapes, here {[tuple(t.shape) for t in tensors]}; {SAME_BATCH}"
                )
        self._pipeline.note_inputs(tensors)
