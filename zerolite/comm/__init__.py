"""The only caller of torch.distributed: starting it, groups, collectives and the record of what was sent."""

from zerolite.comm.communicator import Communicator, Pending, create_communicator
from zerolite.comm.process_group import destroy, init_distributed, local_rank
from zerolite.comm.recorder import CollectiveCall, Recorder, record

__all__ = [
    "CollectiveCall",
    "Communicator",
    "Pending",
    "Recorder",
    "create_communicator",
    "destroy",
    "init_distributed",
    "local_rank",
    "record",
]
