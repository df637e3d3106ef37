"""Comparison of ZeRO settings: stages, sizes of buckets and prefetch, and offload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from zerolite.config import ConfigError, ZeroliteConfig, load_config
from zerolite.config.contradictions import find_contradictions
from zerolite.config.without_effect import find_dropped
from zerolite.planning.dry_run import older_objects_frozen
from zerolite.planning.errors import RefusedError
from zerolite.planning.make import ConfigLike, plan
from zerolite.planning.result import Comparison, Plan
from zerolite.utils.memory_tags import BUCKETS, GATHERED, OTHER

_LARGE, _SMALL = 500_000_000, 50_000_000
"""Sizes of buckets to try, in elements: DeepSpeed's default, and a tenth of it."""

_LOCATIONS = {"cpu": "on the host", "nvme": "on disk"}

_EQUAL = 1.001
"""Amounts within this factor count as equal, because they differ by padding."""

_SIZED = (BUCKETS, GATHERED, OTHER)
"""Items whose size depends on the sizes that are tried."""

_NO_OTHER_SIZES = "Other sizes of buckets and prefetch are not planned for stages that no size makes small enough."
_NO_OFFLOAD = (
    "Settings with offload are not planned, because others fit. To plan them, add offload_optimizer to the config."
)


class Setting(NamedTuple):
    """A ZeRO setting to plan.

    Attributes:
        keys: values for ``zero_optimization`` that replace the config's own.
        resized: the keys contain sizes of buckets or prefetch.
    """

    name: str
    stage: int
    keys: dict[str, Any]
    resized: bool = False


class Trials:
    """Plans of one job with several configs, and the errors of those that the engine refuses."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, Plan]] = []
        self.refused: list[tuple[str, Exception]] = []

    def attempt(self, row: str, setting: str, make: Callable[..., Plan], *args: Any, **given: Any) -> bool:
        """Add the plan that ``make(*args, **given)`` returns as ``row``.

        If the engine refuses the job, record the error as that of ``setting`` and return False.
        """
        try:
            self.rows.append((row, make(*args, **given)))
        except (RefusedError, ConfigError) as error:  # for example an optimizer that works at stage 0 only
            self.refused.append((setting, error))
            return False
        return True

    def comparison(self, chosen: int | None, notes: Iterable[str] = (), **more: Any) -> Comparison:
        reasons = [*_left_out(self.refused), *dict.fromkeys(notes)]
        return Comparison(rows=self.rows, chosen=chosen, left_out=reasons, **more)


def _left_out(refused: Iterable[tuple[str, Exception]]) -> Iterator[str]:
    """Yield one sentence for each reason of the (name, error) in ``refused``, with the names that have it."""
    names: dict[str, list[str]] = {}
    for name, error in refused:
        errors = error.errors if isinstance(error, ConfigError) else [("", str(error))]
        reason = "; ".join(f"{path}: {sentence}" if path else sentence for path, sentence in errors)
        names.setdefault(" ".join(reason.split()), []).append(name)
    for reason, settings in names.items():
        yield f"{'; '.join(settings)} {'is' if len(settings) == 1 else 'are'} left out: {reason}"


@older_objects_frozen()
def compare(
    model_fn: Callable[[], torch.nn.Module],
    config: ConfigLike,
    world_size: int,
    *,
    offload_host_memory: int | str | None = None,
    **options: Any,
) -> Comparison:
    """Plan stages 0 to 3 with a few bucket sizes and kinds of offload, and choose the cheapest that fits.

    If a setting without offload fits, settings with offload are planned only if ``config`` offloads. Settings that the
    engine refuses are left out. Other arguments and errors are those of :func:`~zerolite.planning.make.plan`; an error
    is raised only if no setting can be planned.

    Args:
        offload_host_memory: ``host_memory`` of settings that offload, if the ``options`` have none.
        options: further arguments of :func:`~zerolite.planning.make.plan`.
    """
    loaded, trials = load_config(config), Trials()
    notes: list[str] = []

    def planned(setting: Setting, **more: Any) -> Plan:
        return plan(model_fn, with_zero(loaded, **setting.keys), world_size, **{**options, **more})

    refused: set[int] = set()
    for setting in plain_settings(loaded):
        if setting.resized and any(row.stage == setting.stage and _too_large(row) for _, row in trials.rows):
            notes.append(_NO_OTHER_SIZES)
        elif setting.stage not in refused and not trials.attempt(setting.name, setting.name, planned, setting):
            refused.add(setting.stage)
    stages = {row.stage for _, row in trials.rows}
    with_offload = offloads(loaded) or cheapest([row for _, row in trials.rows]) is None
    for setting in offload_settings(loaded, options.get("device", "cuda")):
        if setting.stage in stages and not with_offload:
            notes.append(_NO_OFFLOAD)
        elif setting.stage in stages:
            host_memory = options.get("host_memory") or offload_host_memory
            trials.attempt(setting.name, setting.name, planned, setting, host_memory=host_memory)
    if not trials.rows:
        raise trials.refused[0][1]
    trials.rows.sort(key=lambda row: row[1].stage)
    return trials.comparison(cheapest([row for _, row in trials.rows]), notes)


def cheapest(plans: list[Plan]) -> int | None:
    """Return the index of the cheapest plan that fits, or None.

    The criteria are, in this order: no offload, fewest bytes sent, fewest bytes off the device, nothing on disk, lowest
    stage, lowest peak. Bytes that differ by less than a thousandth count as equal.
    """
    fitting = [index for index, entry in enumerate(plans) if entry.fits]
    if not fitting:
        return None
    fitting = [index for index in fitting if not plans[index].offloaded] or fitting
    for amount in (lambda entry: entry.sent, lambda entry: entry.offloaded):
        limit = _EQUAL * min(amount(plans[index]) for index in fitting)
        fitting = [index for index in fitting if amount(plans[index]) <= limit]
    return min(fitting, key=lambda index: (bool(plans[index].disk), plans[index].stage, plans[index].peak.bytes))


def offloads(config: ZeroliteConfig) -> bool:
    """Return True if ``config`` keeps optimizer states or parameters off the device."""
    zero = config.zero_optimization
    return zero.offload_optimizer.enabled or zero.offload_param.enabled


def _too_large(entry: Plan) -> bool:
    """Return True if the setting would not fit even with the smallest buckets and prefetch."""
    return entry.spare is not None and entry.spare + sum(entry.peak.items[item] for item in _SIZED) < 0


# -------------------------------------------------------------------- settings


def with_zero(config: ZeroliteConfig, **keys: Any) -> ZeroliteConfig:
    """Return ``config`` with other values in its ``zero_optimization`` block. Raises as :func:`with_blocks`."""
    return with_blocks(config, zero_optimization=keys)


def with_blocks(config: ZeroliteConfig, **blocks: dict[str, Any]) -> ZeroliteConfig:
    """Return ``config`` with other values in some of its blocks.

    Raises ConfigError if they contradict each other, or if the stage ignores one of them.
    """
    # model_copy does not validate, so the checks across keys run here.
    changed = config.model_copy(
        update={name: getattr(config, name).model_copy(update=keys) for name, keys in blocks.items()}
    )
    found = [(entry.paths[0], entry.sentence) for entry in find_contradictions(changed)] + find_dropped(changed)
    if found:
        raise ConfigError(found)
    return changed


def plain_settings(config: ZeroliteConfig) -> list[Setting]:
    """Return settings without offload: stages 0 to 3, each followed by a few sizes.

    If ``config`` offloads, only placements are compared, with its own sizes. If it sets no size of buckets, small
    buckets are left out, because the default is about as large.
    """
    zero = config.zero_optimization
    on_device = _devices(config, "none", "none")
    of_buckets = (_LARGE,) if zero.reduce_bucket_size is None else (_SMALL, _LARGE)
    found = []
    for stage, numels in enumerate(((), of_buckets, of_buckets, (_SMALL, _LARGE))):
        found.append(Setting(f"stage {stage}", stage, {"stage": stage, **on_device}))
        for numel in numels if not offloads(config) else ():
            millions, twice = numel // 10**6, 2 * numel // 10**6
            if stage < 3:
                name = f"buckets of {millions}M"
                keys = {"reduce_bucket_size": numel, "allgather_bucket_size": numel}
            else:
                name = f"prefetch {millions}M, live {twice}M"
                keys = {"stage3_prefetch_bucket_size": numel, "stage3_max_live_parameters": 2 * numel}
            found.append(Setting(f"stage {stage}, {name}", stage, {"stage": stage, **keys, **on_device}, resized=True))
    return found


def offload_settings(config: ZeroliteConfig, device: str) -> list[Setting]:
    """Return settings with offload for each stage, the one with the fewest offloaded bytes first.

    The host is tried unless ``device`` is "cpu", whose memory is the host's. The disk is tried if ``config`` names a
    folder. The offload of ``config`` itself is tried too.
    """
    zero = config.zero_optimization
    own = (zero.offload_optimizer.device, zero.offload_param.device)
    targets = [*(["cpu"] if device != "cpu" else []), *(["nvme"] if _disk(config) else [])]
    tried = [(target, "none") for target in targets] + [(target, target) for target in targets]
    if offloads(config) and own not in tried:
        tried.append(own)
    return [
        Setting(f"stage {stage}, {_name(config, *devices)}", stage, {"stage": stage, **_devices(config, *devices)})
        for stage in (1, 2, 3)
        for devices in tried
        if stage == 3 or devices[1] == "none"
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
