"""Comparison of ZeRO stages, and of what is offloaded to the host or to disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from zerolite.config import ConfigError, ZeroliteConfig, load_config
from zerolite.config.contradictions import find_contradictions
from zerolite.config.without_effect import find_dropped
from zerolite.config.zero import LocoConfig
from zerolite.planning.dry_run import older_objects_frozen
from zerolite.planning.make import ConfigLike, plan
from zerolite.planning.result import Comparison, Plan, RefusedError

_LOCATIONS = {"cpu": "on the host", "nvme": "on disk"}
_ALL_RANKS: dict[str, Any] = {
    "shard_size": None,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "zeropp_loco_param": LocoConfig(),
}
_FEW_BITS: dict[str, Any] = {
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
    "zeropp_loco_param": LocoConfig(err_beta=0.8),
}
"""Compression that is planned for a config without these keys; error feedback as in docs/many-nodes.md."""
_NO_OFFLOAD = (
    "Settings with offload are not planned, because others fit. To plan them, add offload_optimizer to the config."
)


class Setting(NamedTuple):
    """ZeRO setting to plan; ``keys`` replace values of the config's ``zero_optimization``."""

    name: str
    keys: dict[str, Any]

    @property
    def is_compressed(self) -> bool:
        return any(self.keys.get(name) for name in ("zero_quantized_weights", "zero_quantized_gradients"))


@older_objects_frozen()
def compare(model_fn: Callable[[], torch.nn.Module], config: ConfigLike, world_size: int, **options: Any) -> Comparison:
    """Plan stages 0 to 3, without offload and with it, and choose the first setting that fits; with a ``machine`` the
    fastest one.

    Settings come in this order: everything on the device, offload to the host, offload to disk; within each the lowest
    stage first. Where there are several nodes, stages 1 to 3 come with sets of ranks too, then with compressed traffic
    between the sets, which is chosen only if ``config`` compresses: it changes the numbers of a training. If a setting
    without offload fits, those with offload are planned only if ``config`` offloads. Settings that the engine refuses
    are left out. Arguments and errors are those of :func:`~zerolite.planning.make.plan`; an error is raised only if no
    setting can be planned.
    """
    loaded = load_config(config)
    rows: list[tuple[str, Plan]] = []
    compressed: set[int] = set()  # indices of rows
    refused: list[tuple[str, RefusedError | ConfigError]] = []

    def add(settings: Iterable[Setting]) -> None:
        for setting in settings:
            try:
                made = plan(model_fn, with_zero(loaded, **setting.keys), world_size, **options)
            except (RefusedError, ConfigError) as error:  # for example an optimizer that works at stage 0 only
                refused.append((setting.name, error))
                continue
            compressed.update([len(rows)] if setting.is_compressed else [])
            rows.append((setting.name, made))

    add(plain_settings(loaded))
    add(settings_of_sets(loaded, world_size, options.get("nodes")))
    with_offload = offloads(loaded) or not any(made.fits for _, made in rows)
    if with_offload:
        add(offload_settings(loaded, options.get("device", "cuda")))
    if not rows:
        raise refused[0][1]
    seconds = [made.time.step if made.time is not None else math.inf for _, made in rows]

    def fastest(indices: Iterable[int]) -> int | None:
        """Return the first of equals."""
        return min((index for index in indices if rows[index][1].fits), key=lambda index: seconds[index], default=None)

    barred = set() if compresses(loaded) else compressed
    chosen, best = fastest(index for index in range(len(rows)) if index not in barred), fastest(range(len(rows)))
    left_out = [*_left_out(refused), *([] if with_offload else [_NO_OFFLOAD])]
    if best is not None and best in barred:
        left_out.append(_not_chosen(rows[best][0]))
    return Comparison(rows=rows, chosen=chosen, left_out=left_out)


def compresses(config: ZeroliteConfig) -> bool:
    """Return True if ``config`` has keys of compressed traffic."""
    zero = config.zero_optimization
    return zero.zero_quantized_weights or zero.zero_quantized_gradients


def _not_chosen(name: str) -> str:
    return (
        f"{name[0].upper()}{name[1:]} is the fastest that fits, and is not chosen because compressed traffic changes "
        "the numbers of a training. To have it chosen, add zero_quantized_weights or zero_quantized_gradients to the "
        "config."
    )


def _left_out(refused: Iterable[tuple[str, RefusedError | ConfigError]]) -> Iterator[str]:
    """Yield one sentence for each reason, with the names of the settings that are refused for it."""
    names: dict[str, list[str]] = {}
    for name, error in refused:
        errors = error.errors if isinstance(error, ConfigError) else [("", str(error))]
        reason = "; ".join(f"{path}: {sentence}" if path else sentence for path, sentence in errors)
        names.setdefault(" ".join(reason.split()), []).append(name)
    for reason, settings in names.items():
        yield f"{'; '.join(settings)} {'is' if len(settings) == 1 else 'are'} left out: {reason}"


def offloads(config: ZeroliteConfig) -> bool:
    """Return True if ``config`` keeps optimizer states or parameters off the device."""
    zero = config.zero_optimization
    return zero.offload_optimizer.enabled or zero.offload_param.enabled


def with_zero(config: ZeroliteConfig, **keys: Any) -> ZeroliteConfig:
    """Return ``config`` with other values in its ``zero_optimization`` block.

    Raises ConfigError if they contradict each other, or if the stage ignores one of them.
    """
    # model_copy does not validate, so the checks across keys run here.
    changed = config.model_copy(update={"zero_optimization": config.zero_optimization.model_copy(update=keys)})
    found = [(paths[0], sentence) for paths, sentence in find_contradictions(changed)] + find_dropped(changed)
    if found:
        raise ConfigError(found)
    return changed


def plain_settings(config: ZeroliteConfig) -> list[Setting]:
    """Return the settings without offload and sets of ranks: stages 0 to 3."""
    on_device = _devices(config, "none", "none")
    return [Setting(f"stage {stage}", {"stage": stage, **_ALL_RANKS, **on_device}) for stage in range(4)]


def settings_of_sets(config: ZeroliteConfig, world_size: int, nodes: int | None) -> list[Setting]:
    """Return stages 1 to 3 with a replica of the states in each node, or in as many ranks as ``config`` says, and
    stage 3 with parameters divided there and states over all ranks; then the same with compressed traffic.

    What is compressed is what ``config`` compresses, or all of it if it compresses nothing. There are no settings on
    one node, or where a node has one data-parallel rank.
    """
    zero = config.zero_optimization
    ranks = zero.ranks_of_shards or world_size // ((nodes or 1) * config.tensor_parallel.size)
    if (nodes or 1) == 1 or ranks <= 1:
        return []
    few_bits = {name: getattr(zero, name) for name in _FEW_BITS} if compresses(config) else _FEW_BITS
    of_gradients = few_bits | {"zero_quantized_weights": False}  # replicas send no weights
    keys = {**_ALL_RANKS, **_devices(config, "none", "none")}
    plain = [
        Setting(f"stage {stage}, replicas of {ranks}", {**keys, "stage": stage, "shard_size": ranks})
        for stage in (1, 2, 3)
    ]
    plain.append(Setting(f"stage 3, parameters in {ranks}", {**keys, "stage": 3, "zero_hpz_partition_size": ranks}))
    compressed = [
        Setting(f"{name}, compressed", {**own, **(of_gradients if own["shard_size"] else few_bits)})
        for name, own in plain
    ]
    return [*plain, *(setting for setting in compressed if setting.is_compressed)]


def offload_settings(config: ZeroliteConfig, device: str) -> list[Setting]:
    """Return the settings with offload, those of the host before those of the disk, the lowest stage first.

    The host is tried unless ``device`` is "cpu", whose memory is the host's. The disk is tried if ``config`` names a
    folder. The offload of ``config`` itself is tried too.
    """
    zero = config.zero_optimization
    own = (zero.offload_optimizer.device, zero.offload_param.device)
    targets = [*(["cpu"] if device != "cpu" else []), *(["nvme"] if _disk(config) else [])]
    tried = [(target, parameters) for target in targets for parameters in ("none", target)]
    if offloads(config) and own not in tried:
        tried.append(own)
    return [
        Setting(f"stage {stage}, {_name(config, *devices)}", {"stage": stage, **_devices(config, *devices)})
        for on_disk in (False, True)
        for stage in (1, 2, 3)
        for devices in tried
        if ("nvme" in devices) == on_disk and (stage == 3 or devices[1] == "none")
    ]


def _disk(config: ZeroliteConfig) -> str | None:
    """Return the folder that ``config`` names for offload, even if it does not offload to disk."""
    zero = config.zero_optimization
    return zero.offload_optimizer.nvme_path or zero.offload_param.nvme_path


def _devices(config: ZeroliteConfig, optimizer: str, parameters: str) -> dict[str, Any]:
    """Return both offload blocks of ``config`` with other devices."""
    blocks: dict[str, Any] = {"offload_optimizer": {"device": optimizer}, "offload_param": {"device": parameters}}
    if optimizer == "nvme":
        blocks["offload_optimizer"]["ratio"] = 1.0  # partial offload works with the host alone
    for name, update in blocks.items():
        block = getattr(config.zero_optimization, name)
        blocks[name] = block.model_copy(update={**update, "nvme_path": block.nvme_path or _disk(config)})
    return blocks


def _name(config: ZeroliteConfig, optimizer: str, parameters: str) -> str:
    """Name the devices, as in "optimizer and parameters on the host"."""
    ratio = config.zero_optimization.offload_optimizer.ratio if optimizer == "cpu" else 1.0
    states = "optimizer" if ratio == 1.0 else f"{100 * ratio:.3g} % of the optimizer"
    if optimizer == parameters:
        return f"{states} and parameters {_LOCATIONS[optimizer]}"
    offloaded = ((states, optimizer), ("parameters", parameters))
    return ", ".join(f"{what} {_LOCATIONS[where]}" for what, where in offloaded if where != "none")
