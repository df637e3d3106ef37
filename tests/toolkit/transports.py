"""Communicators over every transport."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from zerolite.comm import Communicator, create_communicator, host_memory, second_communicator, use_communicator
from zerolite.comm.communicator import NativeCommunicator
from zerolite.comm.process_group import engine_group
from zerolite.comm.transport import ProcessGroupTransport

CPU = torch.device("cpu")


F32, BF16, F64, I64, U8 = torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8


# Lengths of the shards and their dtypes. The last ones are longer than what travels as one message.
UNITS: dict[str, list[tuple[int, torch.dtype]]] = {
    "nothing": [],
    "one element": [(1, F32)],
    "no element": [(0, F32), (0, BF16)],
    "odd lengths": [(3, F32), (17, F32), (1, F32), (1001, F32)],
    "mixed": [(5, U8), (7, F32), (0, I64), (3, BF16), (9, F64), (2, BF16), (11, I64)],
    "long": [(33333, F32), (0, F32), (1, BF16), (20001, BF16)],
}


@contextlib.contextmanager
def transport(name: str) -> Iterator[None]:
    """``shared memory``, ``messages``, ``little memory`` (files of at most 20000 bytes), or ``native``."""
    create = host_memory._create
    native = use_communicator(lambda rank, world: NativeCommunicator(ProcessGroupTransport(engine_group())))
    with pytest.MonkeyPatch.context() as patch, native if name == "native" else contextlib.nullcontext():
        if name == "little memory":
            patch.setattr(host_memory, "_create", lambda path, size: size <= 20000 and create(path, size))
        patch.setenv("ZEROLITE_SHARED_MEMORY", "0" if name == "messages" else "1")
        yield  # with "native", gloo knows the calls that NCCL gets


def pair() -> tuple[Communicator, Communicator]:
    comm = create_communicator(CPU)
    return comm, second_communicator(comm, CPU)
