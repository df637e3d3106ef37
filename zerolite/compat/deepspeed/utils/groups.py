"""``deepspeed.utils.groups``: sizes and ranks of data and sequence parallelism; all other groups have one rank here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerolite.comm import collective, create_communicator, local_rank
from zerolite.comm.topology import create_topology, with_sequence
from zerolite.compat.deepspeed import comm
from zerolite.utils.accelerator import default_device


@dataclass(frozen=True)
class SequenceGroups:
    """The argument ``mpu`` of ``deepspeed.initialize``: groups of neighbouring ranks share sequences.

    Attributes:
        size: ranks of a group.
        disable_in_eval: in eval mode each rank computes whole sequences of its own.
        is_causal: no token of the model sees a later one, as its attention says.
    """

    size: int
    disable_in_eval: bool
    is_causal: bool

    @property
    def inputs(self) -> str:
        """The config's ``sequence_parallel.inputs``."""
        return "parts in training" if self.disable_in_eval else "parts"

    def get_sequence_parallel_group(self) -> Any:
        return _get_sequence_parallel_group()

    def get_sequence_parallel_world_size(self) -> int:
        return self.size

    def get_sequence_parallel_rank(self) -> int:
        return int(comm.get_rank()) % self.size


_sequences: SequenceGroups | None = None  # of the latest call of share_sequences


@collective
def share_sequences(size: int, disable_in_eval: bool, is_causal: bool) -> SequenceGroups:
    """Let groups of ``size`` neighbouring ranks share sequences, in the engines that are given the result."""
    global _sequences
    comm.init_distributed()
    _sequences = SequenceGroups(size, disable_in_eval, is_causal)
    _get_sequence_parallel_group()
    return _sequences


def are_causal() -> bool:
    """Return True if tokens of the shared sequences see no later ones, as far as is known."""
    return _sequences is not None and _sequences.is_causal


def _get_sequence_parallel_group() -> Any:
    """Return the ranks that share sequences with this one, the engine's own group; None before there are any."""
    if _sequences is None:
        return None
    device = default_device(local_rank())
    topology = create_topology(create_communicator(device), device)
    return with_sequence(topology, device, _sequences.size).sequence.group


def _get_sequence_parallel_world_size() -> int:
    return 1 if _sequences is None else _sequences.size


def _get_sequence_parallel_rank() -> int:
    return int(comm.get_rank()) % _get_sequence_parallel_world_size()


def _get_data_parallel_group() -> object:
    return comm.group.WORLD


def _get_data_parallel_world_size() -> int:
    return int(comm.get_world_size()) // _get_sequence_parallel_world_size()


def _get_data_parallel_rank() -> int:
    return int(comm.get_rank()) // _get_sequence_parallel_world_size()


def _get_model_parallel_world_size() -> int:
    return 1


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
