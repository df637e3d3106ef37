"""Grid of ranks that a config requests."""

from __future__ import annotations

from zerolite.config import ConfigError, ZeroliteConfig
from zerolite.planning.places import Grid


def grid_of(config: ZeroliteConfig, world_size: int) -> Grid:
    """Return the grid of ``config``. Raises ConfigError if so many ranks do not form it."""
    pipe, tensor = config.pipeline.stages, config.tensor_parallel.ranks
    if world_size % (pipe * tensor):
        raise ConfigError(
            [
                (
                    "pipeline.stages" if pipe > 1 else "tensor_parallel.size",
                    f"expected the number of ranks to be a multiple of pipeline.stages × tensor_parallel.size = {pipe} "
                    f"× {tensor} = {pipe * tensor}, got {world_size} ranks",
                )
            ]
        )
    return Grid(pipe, world_size // (pipe * tensor), tensor)
