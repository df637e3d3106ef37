"""``deepspeed.utils.groups``: sizes and ranks of data parallelism; all other groups have one rank here."""

from __future__ import annotations

from zerolite.compat.deepspeed import comm


def _get_data_parallel_group() -> object:
    return comm.group.WORLD


def _get_data_parallel_world_size() -> int:
    return int(comm.get_world_size())


def _get_data_parallel_rank() -> int:
    return int(comm.get_rank())


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0


def _get_model_parallel_world_size() -> int:
    return 1


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
