"""Grid of ranks: pipeline, data and tensor dimensions, and their process groups.

pipe × data × tensor, tensor innermost: the ranks of one tensor group are neighbours, on one host where they fit.

    world size 8, pipe 2, data 2, tensor 2         tensor groups   0 1 | 2 3 | 4 5 | 6 7
                                                   data groups     0 2 | 1 3 | 4 6 | 5 7
    stage 0:  0 1   stage 1:  4 5                  pipe groups     0 4 | 1 5 | 2 6 | 3 7
              2 3             6 7                  model groups    0 1 4 5 | 2 3 6 7

The data dimension may be two, replicate × shard: ranks of one shard group divide ZeRO's states, and ranks of one
replicate group hold the same shard. Shard groups are neighbours among the data ranks, so that they lie on one host.

    world size 8, shard 4                          shard groups    0 1 2 3 | 4 5 6 7
                                                   replicate groups  0 4 | 1 5 | 2 6 | 3 7

It may also be two in another way, batch × sequence: ranks of one sequence group have parts of the same samples. They
are neighbours among the data ranks too. Both ways say nothing of each other.

    world size 8, sequence 2                       sequence groups   0 1 | 2 3 | 4 5 | 6 7
                                                   batch groups      0 2 4 6 | 1 3 5 7

Experts may be spread over data × tensor ranks, which are expert data × expert: ranks of one expert group have
different experts, and are neighbours, so that such a group consists of whole tensor groups; ranks of one expert data
group have the same experts. Ranks of a data group have other samples, or other parts of them.

    world size 8, tensor 2, expert 4               expert groups        0 1 2 3 | 4 5 6 7
                                                   expert data groups   0 4 | 1 5 | 2 6 | 3 7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from zerolite.comm.communicator import Communicator
from zerolite.comm.create import create_communicator, dry_communicator
from zerolite.comm.flight_recorder import collective
from zerolite.comm.process_group import group_within


@dataclass(frozen=True)
class Topology:
    """Coordinates of one rank in the grid, and a communicator for each dimension.

    A dimension of one rank has a communicator that sends nothing.

    Attributes:
        world: all ranks.
        data: ranks with the same parameters and other data, batch × sequence. States are sharded over them, and
            gradients averaged.
        batch: ranks with other samples (dp): ``data`` itself, unless sequences are divided. Samplers and metrics know
            these alone.
        sequence: ranks with the other parts of the same samples (sp).
        tensor: ranks with the other shards of the same layers (tp).
        pipe: ranks with the other pipeline stages (pp).
        model: ranks of one full copy of the model, tensor × pipe.
        shard: data ranks over which ZeRO splits buckets: all of them, unless some hold the same shards.
        replicate: data ranks that hold the same shard; None if there are no others.
        expert: ranks that have the other experts (ep), of whole tensor groups; one rank where each has all.
        expert_data: data ranks that have the same experts (edp); all of them where each has all.
        expert_shard: those of them that are in one set of ``shard``.
        host: ranks on each host; None if unknown.
    """

    world: Communicator
    data: Communicator
    batch: Communicator
    sequence: Communicator
    tensor: Communicator
    pipe: Communicator
    model: Communicator
    shard: Communicator
    replicate: Communicator | None = None
    expert: Communicator = field(default_factory=Communicator)
    expert_data: Communicator = field(default_factory=Communicator)
    expert_shard: Communicator = field(default_factory=Communicator)
    host: int | None = None

    def sharing(self, dimension: str) -> Communicator:
        """Return the ranks that have the other shards of parameters that "tensor" or "expert" ranks divide."""
        return self.expert if dimension == "expert" else self.tensor

    @property
    def grid(self) -> str:
        """The sizes of the dimensions, as text."""
        parts = f"sequence={self.sequence.world_size}, " if self.sequence.world_size > 1 else ""
        return f"pipe={self.pipe.world_size}, data={self.batch.world_size}, {parts}tensor={self.tensor.world_size}"

    @property
    def expert_spread(self) -> int:
        """Neighbouring data ranks that have other experts; 1 if all of them have the same."""
        return max(1, self.expert.world_size // self.tensor.world_size)

    @property
    def coordinates(self) -> tuple[int, int, int]:
        """Coordinates (pipe, data, tensor) of this rank."""
        return self.pipe.rank, self.data.rank, self.tensor.rank

    @property
    def divides_layers(self) -> bool:
        """True if a rank has parts of some layers' parameters: tensor-parallel shards or experts."""
        return self.tensor.world_size > 1 or self.expert.world_size > 1

    @property
    def trivial(self) -> bool:
        """True if every rank has the full model: for data and sequence parallelism alone."""
        return self.model.world_size == 1

    def communicators(self) -> dict[str, Communicator]:
        """Return the communicators of a training step, by what they are for in messages; those of pipe and world, which
        send other things, are left out."""
        listed = {"gradients and statistics": self.data}
        if self.replicate is not None:
            listed |= {"gradients within a replica": self.shard, "gradients of replicas": self.replicate}
        if self.sequence.world_size > 1:
            listed["parts of sequences"] = self.sequence
        if self.expert.world_size > 1:
            listed |= {"tokens of experts": self.expert, "gradients of experts": self.expert_data}
            if self.expert_shard is not self.expert_data:
                listed["gradients of experts within a replica"] = self.expert_shard
        if self.tensor.world_size > 1:
            listed["parts of layers"] = self.tensor
        if not self.trivial and self.model is not self.tensor:
            listed["parts of the model"] = self.model
        return listed


def data_topology(comm: Communicator) -> Topology:
    """Make the topology of ranks that all have the full model."""
    alone = Communicator()
    return Topology(comm, data=comm, batch=comm, sequence=alone, tensor=alone, pipe=alone, model=alone, shard=comm)


@collective
def with_replicas(topology: Topology, device: torch.device, shard: int) -> Topology:
    """Divide the data ranks into sets of ``shard`` neighbours, each of which has all shards, and all experts.

    Args:
        device: of the tensors.
        shard: ranks of a set.

    Raises:
        ValueError: ``shard`` does not divide the number of data ranks, sets begin and end in the middle of hosts, or
            experts are spread over ranks of several sets.
    """
    experts, tensor = topology.expert_spread, topology.tensor.world_size
    if shard % experts:
        of_ranks = f"expert_parallel.size = {experts * tensor}"
        if tensor > 1:
            of_ranks = f"{experts} data-parallel ranks ({of_ranks}, tensor_parallel.size = {tensor})"
        raise ValueError(
            f"expected a multiple of {of_ranks}, so that each set of ranks has all experts, got {shard}; choose one, "
            "or lower expert_parallel.size"
        )
    data, host, span = topology.data, topology.host, shard * topology.tensor.world_size
    if host is not None and host < topology.world.world_size and host % span and span % host:
        raise ValueError(
            f"expected sets of ranks that divide a host or consist of whole hosts, got {shard} data-parallel ranks × "
            f"{topology.tensor.world_size} tensor-parallel ones = {span} on hosts of {host} ranks; choose a size that "
            "fits"
        )
    if shard == data.world_size:
        return topology
    within, across = sets_of(data, device, shard, "shards and replicas")
    within.serve("shard", data.is_rank0)
    topology = replace(topology, shard=within, replicate=across.serve("replicate", data.is_rank0))
    if topology.expert.world_size == 1:
        return topology
    alike = set_of(topology.expert_data, device, shard // experts, "experts and replicas")
    return replace(topology, expert_shard=alike.serve("expert shard", data.is_rank0))


@collective
def with_sequence(topology: Topology, device: torch.device, size: int) -> Topology:
    """Divide the data ranks into sets of ``size`` neighbours, which have parts of the same samples.

    Args:
        device: of the tensors.
        size: ranks of a set.

    Raises:
        ValueError: ``size`` does not divide the number of data ranks.
    """
    data = topology.data
    if size == 1:
        return topology
    within, across = sets_of(data, device, size, "parts of sequences")
    within.serve("sequence", data.is_rank0)
    # Named as data parallelism is elsewhere, which it is: these ranks have other samples.
    across.serve("data", data.is_rank0)
    return replace(topology, sequence=within, batch=across)


@collective
def with_experts(topology: Topology, device: torch.device, size: int) -> Topology:
    """Let ``size`` neighbouring ranks have different experts, those of whole tensor groups. There is no pipeline.

    Args:
        device: of the tensors.
        size: ranks that have all experts together.

    Raises:
        ValueError: ``size`` is no multiple of the ranks of a tensor group, or does not divide the number of all.
    """
    world, tensor = topology.world, topology.tensor.world_size
    if size == 1:
        return topology
    if tensor > 1 and (size % tensor or world.world_size % size):
        raise ValueError(
            f"expected a multiple of tensor_parallel.size = {tensor} that divides the {world.world_size} ranks, so "
            f"that those of a tensor group have different experts, got {size}; choose one, or leave the block out"
        )
    within, across = sets_of(world, device, size, "experts")
    within.serve("expert", world.is_rank0)
    across.serve("expert data", world.is_rank0)
    return replace(topology, expert=within, expert_data=across, expert_shard=across)


@collective
def create_topology(
    world: Communicator, device: torch.device, pipe: int = 1, tensor: int = 1, host: int | None = None
) -> Topology:
    """Make the grid of ``world``, all processes, for tensors on ``device``. In a dry run its communicators are dry too.

    Groups are made once. Raises ValueError if pipe × tensor does not divide the number of processes.

    Args:
        host: ranks on each host; None if unknown.
    """
    model = pipe * tensor
    if world.world_size % model:
        raise ValueError(
            f"expected the number of processes to be a multiple of pipeline.stages × tensor_parallel.size, got "
            f"{world.world_size} processes for {pipe} × {tensor} = {model}; start a multiple of {model}, or lower one"
        )
    if model == 1:
        return replace(data_topology(world), host=host)
    size, rank = world.world_size, world.rank
    stage = size // pipe  # ranks of a pipeline stage
    tensor_rank, first = rank % tensor, rank // stage * stage
    places: dict[str, Sequence[int]] = {
        "pipe": range(rank % stage, size, stage),
        "data": range(first + tensor_rank, first + stage, tensor),
        "tensor": range(rank - tensor_rank, rank - tensor_rank + tensor),
    }
    if pipe > 1 and tensor > 1:  # otherwise one of the dimensions is a copy of the model
        places["model"] = [one + other - rank for one in places["pipe"] for other in places["tensor"]]
    made = {name: _among(world, device, of, "topology") for name, of in places.items()}
    for name, comm in made.items():
        comm.serve(name, world.is_rank0)  # a communicator of one rank would take itself for the job's first rank
    world.serve("world", world.is_rank0)
    data, alone = made["data"], Communicator()
    model_comm = made.get("model") or made["tensor" if pipe == 1 else "pipe"]
    return Topology(world, data, data, alone, made["tensor"], made["pipe"], model_comm, shard=data, host=host)


def sets_of(comm: Communicator, device: torch.device, size: int, purpose: str) -> tuple[Communicator, Communicator]:
    """Return the communicators of this rank's set of ``size`` neighbours, and of the ranks at its place in all sets.

    Raises ValueError if ``size`` does not divide the number of ranks.
    """
    within = set_of(comm, device, size, purpose)
    return within, _among(comm, device, range(comm.rank % size, comm.world_size, size), purpose)


def set_of(comm: Communicator, device: torch.device, size: int, purpose: str) -> Communicator:
    """Return the communicator of this rank's set of ``size`` neighbours, as :func:`sets_of` does."""
    if comm.world_size % size:
        raise ValueError(
            f"expected a divisor of the {comm.world_size} data-parallel ranks, got {size}; choose one, or start a "
            "multiple of it"
        )
    first = comm.rank // size * size
    return _among(comm, device, range(first, first + size), purpose)


def _among(comm: Communicator, device: torch.device, places: Sequence[int], purpose: str) -> Communicator:
    """Return the communicator of the ranks of ``comm`` at ``places``, which are the same or others on each rank of it.

    It sends nothing if it is this rank alone, or in a dry run.
    """
    if comm.group is None:
        return dry_communicator(_kind_of(comm), places.index(comm.rank), len(places))
    if len(places) == 1:
        return Communicator()
    ranks = dist.get_process_group_ranks(comm.group)
    return create_communicator(device, group_within(comm.group, [ranks[place] for place in places], purpose))


def _kind_of(world: Communicator) -> str:
    return {"NativeCommunicator": "nccl", "GlooCommunicator": "gloo"}.get(type(world).__name__, "shared_memory")


def stages_communicator(topology: Topology, stages: tuple[int, ...], device: torch.device) -> Communicator:
    """Make the communicator of this rank and the ranks at its coordinates in some other ``stages``.

    Called on all ranks of these stages, in the same order, after :func:`make_stage_groups`.

    Args:
        stages: sorted, including this rank's own.
    """
    if len(stages) == topology.pipe.world_size:
        return topology.pipe
    pipe = topology.pipe.group
    assert pipe is not None, "plans refuse pipelines"
    comm = create_communicator(device, group_within(pipe, _ranks_of(pipe, stages)))
    return comm.serve("pipe", comm.is_rank0)


def make_stage_groups(topology: Topology, combinations: Sequence[tuple[int, ...]]) -> None:
    """Make the groups for :func:`stages_communicator`, for each of these sorted combinations of stages.

    Called on all ranks of ``topology.pipe``, with equal arguments.
    """
    pipe = topology.pipe.group
    for stages in combinations:
        if pipe is not None and len(stages) < topology.pipe.world_size:
            group_within(pipe, _ranks_of(pipe, stages))


def _ranks_of(pipe: dist.ProcessGroup, stages: Sequence[int]) -> tuple[int, ...]:
    members = dist.get_process_group_ranks(pipe)
    return tuple(members[stage] for stage in stages)
