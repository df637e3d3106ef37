"""Settings that a comparison plans: stages, bucket sizes, prefetch sizes and offload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from zerolite.config import ConfigError, ZeroliteConfig
from zerolite.config.contradictions import find_contradictions
from zerolite.config.without_effect import find_lost
from zerolite.planning.host_room import offloads

_LARGE, _SMALL = 500_000_000, 50_000_000
"""Sizes of buckets in elements that are tried: DeepSpeed's default, and a tenth of it."""

_PLACES = {"cpu": "on the host", "nvme": "on disk"}


class Setting(NamedTuple):
    """Settings of ZeRO to plan.

    Attributes:
        keys: of ``zero_optimization``, beside the config's own.
        resized: with other sizes than that has.
    """

    name: str
    stage: int
    keys: dict[str, Any]
    resized: bool = False


class OffloadDevices(NamedTuple):
    """The devices of ``offload_optimizer`` and ``offload_param``."""

    optimizer: str
    parameters: str


def with_zero(config: ZeroliteConfig, **keys: Any) -> ZeroliteConfig:
    """``config`` with other values in its ``zero_optimization`` block. Raises ConfigError if they contradict it."""
    return with_blocks(config, zero_optimization=keys)


def with_blocks(config: ZeroliteConfig, **blocks: dict[str, Any]) -> ZeroliteConfig:
    """``config`` with other values in some of its blocks. Raises ConfigError if they contradict each other, or if the
    stage has no use for one of them."""
    changed = config.model_copy(
        update={name: getattr(config, name).model_copy(update=keys) for name, keys in blocks.items()}
    )
    found = [(entry.paths[0], entry.sentence) for entry in find_contradictions(changed)] + find_lost(changed)
    if found:
        raise ConfigError(found)
    return changed


def plain_settings(config: ZeroliteConfig) -> list[Setting]:
    """Stages 0 to 3 with everything on the device, each followed by a few sizes, unless ``config`` offloads: then where
    things rest is what is compared."""
    on_device = _offload_keys(config, OffloadDevices("none", "none"))
    found = [setting for setting in _stages(config) if not (setting.resized and offloads(config))]
    return [setting._replace(keys=setting.keys | on_device) for setting in found]


def offload_settings(config: ZeroliteConfig, device: str) -> list[Setting]:
    """Each stage with what it may have elsewhere, the fewest bytes first: on the host, unless ``device`` is "cpu",
    whose memory that is; on disk where ``config`` names a folder for it; and as ``config`` says."""
    zero = config.zero_optimization
    own = OffloadDevices(zero.offload_optimizer.device, zero.offload_param.device)
    places = [*(["cpu"] if device != "cpu" else []), *(["nvme"] if _disk(config) else [])]
    tried = [OffloadDevices(place, "none") for place in places] + [OffloadDevices(place, place) for place in places]
    if offloads(config) and own not in tried:
        tried.append(own)
    return [
        Setting(
            f"stage {stage}, {_name(placements, config)}", stage, {"stage": stage, **_offload_keys(config, placements)}
        )
        for stage in (1, 2, 3)
        for placements in tried
        if stage == 3 or placements.parameters == "none"
    ]


def _stages(config: ZeroliteConfig) -> Iterator[Setting]:
    """Buckets that the config leaves to zerolite are about as large as the small ones, or whole models."""
    both = (_SMALL, _LARGE)
    of_buckets = both if config.zero_optimization.reduce_bucket_size is not None else (_LARGE,)
    for stage, numels in enumerate(((), of_buckets, of_buckets, both)):
        yield Setting(f"stage {stage}", stage, {"stage": stage})
        for numel in numels:
            millions = f"{numel / 1e6:.0f}M"
            if stage < 3:
                name = f"buckets of {millions}"
                keys = {"reduce_bucket_size": numel, "allgather_bucket_size": numel}
            else:
                name = f"prefetch {millions}, live {2 * numel / 1e6:.0f}M"
                keys = {"stage3_prefetch_bucket_size": numel, "stage3_max_live_parameters": 2 * numel}
            yield Setting(f"stage {stage}, {name}", stage, {"stage": stage, **keys}, resized=True)


def _disk(config: ZeroliteConfig) -> str | None:
    """The folder that ``config`` names, whether it is used or not."""
    zero = config.zero_optimization
    return zero.offload_optimizer.nvme_path or zero.offload_param.nvme_path


def _offload_keys(config: ZeroliteConfig, placements: OffloadDevices) -> dict[str, Any]:
    """Both blocks as ``config`` has them, for other devices."""
    optimizer, parameters = config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param
    disk = _disk(config)
    update: dict[str, Any] = {"device": placements.optimizer, "nvme_path": optimizer.nvme_path or disk}
    if placements.optimizer == "nvme":
        update["ratio"] = 1.0  # a part is for the host alone
    return {
        "offload_optimizer": optimizer.model_copy(update=update),
        "offload_param": parameters.model_copy(
            update={"device": placements.parameters, "nvme_path": parameters.nvme_path or disk}
        ),
    }


def _name(placements: OffloadDevices, config: ZeroliteConfig) -> str:
    """Name the placements, as in "optimizer and parameters on the host"."""
    ratio = config.zero_optimization.offload_optimizer.ratio if placements.optimizer == "cpu" else 1.0
    optimizer = "optimizer" if ratio == 1.0 else f"{100 * ratio:.3g} % of the optimizer"
    if placements.optimizer == placements.parameters:
        return f"{optimizer} and parameters {_PLACES[placements.optimizer]}"
    held = ((optimizer, placements.optimizer), ("parameters", placements.parameters))
    return ", ".join(f"{what} {_PLACES[where]}" for what, where in held if where != "none")
