"""Comparison of the inputs of ranks that share layers (tensor parallelism) and so must compute the same batch."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from zerolite.comm import Communicator, HostMaximum, collective
from zerolite.utils.text import name_ranks
from zerolite.zero.engine_parts import EngineParts
from zerolite.zero.stats import SAME_BATCH

NoteInputs = Callable[[list[torch.Tensor]], None]
"""Function that takes the inputs of a forward, to be compared with the step's statistics."""


class SameInputs:
    """Compares the shapes of inputs before a forward, and their values with the step's statistics.

    Args:
        note: takes the inputs whose values are compared with the step's statistics; None if none are.
        comm: ranks that share layers.
        maximum: the largest numbers of these ranks, on the host; None if shapes are not compared.
    """

    def __init__(self, note: NoteInputs | None, comm: Communicator, maximum: HostMaximum | None) -> None:
        self._note, self._comm, self._maximum = note, comm, maximum

    @classmethod
    def of(cls, parts: EngineParts) -> SameInputs | None:
        """Return the comparison for an engine; None where no ranks share layers."""
        tensor = parts.topology.tensor
        if tensor.world_size == 1:
            return None
        compares_shapes = tensor.group is not None and parts.device.type == "cpu"
        return cls(parts.note_inputs, tensor, HostMaximum(tensor) if compares_shapes else None)

    @collective
    def compare(self, tensors: list[torch.Tensor]) -> None:
        """Compare the inputs before a forward.

        Raises RuntimeError on all of them if shapes differ: the collectives of the layers would exchange tensors of
        different sizes. Values are compared later, with the step's statistics, which costs no collective of its own.
        """
        if self._maximum is not None:
            shapes = zlib.crc32(repr([(tuple(t.shape), t.dtype) for t in tensors]).encode())
            highest, lowest = self._maximum.of([shapes, -shapes])
            if highest != -lowest:
                raise RuntimeError(
                    f"engine(...): expected inputs of the same shapes on {name_ranks(self._comm.members())}, "
                    f"which share layers, got different shapes, here {[tuple(t.shape) for t in tensors]}; {SAME_BATCH}"
                )
        if self._note is not None:
            self._note(tensors)
