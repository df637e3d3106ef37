"""Communication: start-up of torch.distributed, process groups, collectives, and the record of calls.

Other packages launch no collectives of torch.distributed. ``pipe`` builds on its pipelines, ``checkpoint`` on its
checkpoints, ``launcher`` on its agent, and ``compat`` passes its functions on.
"""

from zerolite.comm.communicator import Chained, Communicator, Pending, done
from zerolite.comm.create import create_communicator, dry_communicator, second_communicator, use_communicator
from zerolite.comm.environment import ranks_of_host, ranks_of_job
from zerolite.comm.flight_recorder import collective, wait_for_result
from zerolite.comm.host_group import HostGroup, HostLinks, HostMaximum, RaiseTogether, largest, raise_together
from zerolite.comm.process_group import destroy, init_distributed, keep_track, local_rank
from zerolite.comm.recorder import CollectiveCall, Recorder, record, unrecorded
from zerolite.comm.store import SharedStore
from zerolite.comm.topology import (
    Topology,
    create_topology,
    data_topology,
    make_stage_groups,
    stages_communicator,
    with_experts,
    with_replicas,
    with_sequence,
)

__all__ = [
    "Chained",
    "CollectiveCall",
    "Communicator",
    "HostGroup",
    "HostLinks",
    "HostMaximum",
    "Pending",
    "RaiseTogether",
    "Recorder",
    "SharedStore",
    "Topology",
    "collective",
    "create_communicator",
    "create_topology",
    "data_topology",
    "destroy",
    "done",
    "dry_communicator",
    "init_distributed",
    "keep_track",
    "largest",
    "local_rank",
    "make_stage_groups",
    "raise_together",
    "ranks_of_host",
    "ranks_of_job",
    "record",
    "second_communicator",
    "stages_communicator",
    "unrecorded",
    "use_communicator",
    "wait_for_result",
    "with_experts",
    "with_replicas",
    "with_sequence",
]
