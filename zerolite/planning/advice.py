"""Advice for jobs that do not fit, derived from the plan's numbers alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zerolite.planning.result import Plan, item_label, total
from zerolite.utils.sizes import format_size

_PARTITIONED = {1: ("master_weights", "optimizer_states"), 2: ("gradients",), 3: ("compute_parameters",)}
"""Items that each stage partitions, beside those of the stages below it."""

_OFFLOADED = ("master_weights", "optimizer_states", "gradients")

_WORTH = 0.05
"""Smallest share of the missing bytes that a listed remedy saves."""

_TIMES = (2, 4, 8, 16)
"""Factors of ranks that may be advised."""


class Remedy(NamedTuple):
    """A change to try.

    Attributes:
        action: the change, as the beginning of a sentence.
        saved: bytes that it saves at the peak.
        bound: ``saved`` is an upper bound.
    """

    action: str
    saved: int
    bound: bool = True

    def sentence(self, missing: int) -> str:
        size, enough = format_size(self.saved), self.saved >= missing
        if self.bound:
            return f"{self.action}: at most {size} less{'' if enough else ', not enough by itself'}."
        return f"{self.action}: about {size} less, {'enough' if enough else 'not enough by itself'}."


def advise(plan: Plan, stages: bool = True) -> list[str]:
    """Return sentences, the largest saving first; none if the job fits or no memory was given.

    Args:
        plan: the plan.
        stages: advise a higher ZeRO stage too.
    """
    return [*_advise_device(plan, stages), *_advise_host(plan)]


def _advise_host(plan: Plan) -> Iterator[str]:
    if plan.host_spare is None or plan.host_spare >= 0 or plan.ranks_per_host is None or plan.host_memory is None:
        return
    if plan.device == "cuda" and plan.ranks_per_host * sum((plan.host or {}).values()) <= plan.host_memory:
        yield (
            "Only the construction of the model needs that much host memory. If it is built in `with "
            "zerolite.zero.Init():`, no process holds the full model."
        )
        return
    ranks = plan.host_memory // max(plan.host_peak, 1)
    if 1 <= ranks < plan.ranks_per_host:
        yield f"{ranks} of these ranks on a host: its memory is enough for that many."
    if plan.host is not None:
        yield '"nvme" as the device of offload_optimizer and offload_param keeps the offloaded items on a disk.'


def _advise_device(plan: Plan, stages: bool) -> list[str]:
    if plan.spare is None or plan.spare >= 0 or plan.device_memory is None:
        return []
    missing = -plan.spare
    if plan.peak.phase == "initialize" and plan.step_peak.bytes <= plan.device_memory:
        return [
            f"Only the construction of the engine needs that much. A step needs {format_size(plan.step_peak.bytes)}, "
            "which fits. At stage 3, build the model in `with zerolite.zero.Init():`, so that no rank holds all of it."
        ]
    remedies = [
        *_more_ranks(plan, missing),
        *_other_remedies(plan, missing),
        *(_higher_stage(plan, missing) if stages else ()),
    ]
    worth = [remedy for remedy in remedies if remedy.saved >= _WORTH * missing]
    return [remedy.sentence(missing) for remedy in sorted(worth, key=lambda remedy: -remedy.saved)]


def _higher_stage(plan: Plan, missing: int) -> Iterator[Remedy]:
    """Yield the lowest stage that saves enough, otherwise the highest."""
    held: list[str] = []
    for stage in range(plan.stage + 1, 4):
        held += [item for item in _PARTITIONED[stage] if plan.peak.items[item] > 0]
        saved = total(plan.peak.items, held) * (plan.world_size - 1) // plan.world_size
        if held and (saved >= missing or stage == 3):
            gathers = ", and gathers parameters before they are used" if stage == 3 else ""
            action = f"Stage {stage} (zero_optimization.stage) partitions {_listed(held)} over {plan.world_size} ranks"
            yield Remedy(action + gathers, saved, bound=stage == 3)
            return


def _more_ranks(plan: Plan, missing: int) -> Iterator[Remedy]:
    """Yield the smallest factor of ranks with which the partitioned items are small enough, if there is one."""
    names = [item for stage in range(1, plan.stage + 1) for item in _PARTITIONED[stage] if plan.peak.items[item] > 0]
    partitioned = total(plan.peak.items, names)
    for times in _TIMES:
        saved = partitioned - partitioned // times
        if saved >= missing:
            more = f"{times * plan.world_size} ranks instead of {plan.world_size}"
            yield Remedy(f"{more} partition {_listed(names)} further", saved, bound=False)
            return


def _other_remedies(plan: Plan, missing: int) -> Iterator[Remedy]:
    items, size = plan.peak.items, plan.micro_batch or 1
    activations = items["activations"]
    checkpointing = "Activation checkpointing (torch.utils.checkpoint) keeps only the inputs of layers"
    yield Remedy(checkpointing, activations)
    if size > 1:  # advise the largest micro-batch that saves enough and divides the global batch; otherwise 1
        possible = [part for part in range(1, size) if size * plan.accumulation % part == 0]
        enough = [part for part in possible if activations - activations * part // size >= missing]
        smaller = max(enough, default=1)
        action = (
            f"A micro-batch of {smaller} instead of {size} (train_micro_batch_size_per_gpu), "
            f"{size * plan.accumulation // smaller} of them in a step, has smaller activations"
        )
        yield Remedy(action, activations - activations * smaller // size, bound=False)
    yield Remedy("Smaller buckets (zero_optimization.reduce_bucket_size)", items["communication_buckets"])
    fewer = "zero_optimization.stage3_max_live_parameters and stage3_prefetch_bucket_size"
    yield Remedy(f"Fewer parameters gathered at a time ({fewer})", items["gathered_parameters"])
    held = [item for item in _OFFLOADED if items[item] > 0]
    if plan.stage >= 1 and held:
        action = f"zero_optimization.offload_optimizer on the host keeps {_listed(held)} there"
        yield Remedy(action, total(items, held))
    if plan.stage == 3:
        action = "zero_optimization.offload_param on the host keeps compute parameters there"
        yield Remedy(action, items["compute_parameters"])


def _listed(items: list[str]) -> str:
    *names, last = map(item_label, items)
    return f"{', '.join(names)} and {last}" if names else last
