"""Rank, world size and coordinates of an engine in the grid."""

from __future__ import annotations

from zerolite.comm import DeviceMesh, Topology


class Place:
    """Mixed into :class:`~zerolite.engine.engine.Engine`."""

    topology: Topology

    @property
    def rank(self) -> int:
        """Among all processes of the job."""
        return self.topology.world.rank

    @property
    def world_size(self) -> int:
        return self.topology.world.world_size

    @property
    def data_parallel_rank(self) -> int:
        """Which of the batches of a step are this rank's: what a sampler needs. The rank, where no other kind of
        parallelism is."""
        return self.topology.data.rank

    @property
    def data_parallel_world_size(self) -> int:
        return self.topology.data.world_size

    @property
    def tensor_parallel_rank(self) -> int:
        """Which part of each layer is here."""
        return self.topology.tensor.rank

    @property
    def tensor_parallel_world_size(self) -> int:
        return self.topology.tensor.world_size

    @property
    def pipeline_stage(self) -> int:
        """Which of the stages is here."""
        return self.topology.pipe.rank

    @property
    def pipeline_stages(self) -> int:
        return self.topology.pipe.world_size

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks as a grid with the dimensions "pipe", "data" and "tensor"; None with data parallelism alone."""
        return self.topology.mesh
