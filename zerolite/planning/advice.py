"""Advice for jobs that do not fit, limited to what the plan's numbers support."""

from __future__ import annotations

from typing import NamedTuple

from zerolite.planning.result import Plan, spoken
from zerolite.utils.sizes import format_size

_PARTITIONED = {1: ("master_weights", "optimizer_states"), 2: ("gradients",), 3: ("compute_parameters",)}
"""What each stage partitions beside what those below it do."""

_OFFLOADED = ("master_weights", "optimizer_states", "gradients")

_WORTH = 0.05
"""Least part of what is missing that a measure must save to be named."""

_TIMES = (2, 4, 8, 16)
"""Times as many ranks that may be advised."""


class Measure(NamedTuple):
    """Something to try, and the bytes that it saves at the peak. bound: whether it saves less than that."""

    action: str
    saved: int
    bound: bool = False

    def sentence(self, missing: int) -> str:
        size = format_size(self.saved)
        if self.bound:
            return f"{self.action}: at most {size} less{', not enough by itself' if self.saved < missing else ''}."
        return f"{self.action}: about {size} less, {'enough' if self.saved >= missing else 'not enough by itself'}."


def advise(plan: Plan, stages: bool = True) -> list[str]:
    """Sentences, those first that save the most; none if it fits or no memory was given. stages: name those too."""
    return [*_of_device(plan, stages), *_of_host(plan)]


def _of_host(plan: Plan) -> list[str]:
    if plan.host_spare is None or plan.host_spare >= 0 or plan.ranks_per_host is None or plan.host_memory is None:
        return []
    rest = sum((plan.host or {}).values())
    if plan.device == "cuda" and plan.ranks_per_host * rest <= plan.host_memory:
        return [
            "Only making the model needs that much host memory: a model that is built in `with zerolite.zero.Init():` "
            "is never whole in a process."
        ]
    sentences = []
    ranks = plan.host_memory // max(plan.host_peak, 1)
    if 1 <= ranks < plan.ranks_per_host:
        sentences.append(f"{ranks} of these ranks on a host: its memory is enough for so many.")
    if plan.host is not None:
        sentences.append('"nvme" as the device of offload_optimizer and offload_param: a disk holds what rests.')
    return sentences


def _of_device(plan: Plan, stages: bool) -> list[str]:
    if plan.spare is None or plan.spare >= 0 or plan.device_memory is None:
        return []
    missing = -plan.spare
    if plan.peak.phase == "initialize" and plan.step_peak.bytes <= plan.device_memory:
        return [
            f"Only making the engine needs that much: a step needs {format_size(plan.step_peak.bytes)}, which fits. "
            "At stage 3, a model that is built in `with zerolite.zero.Init():` is never whole on a rank."
        ]
    measures = [*_ranks(plan, missing), *_activations(plan, missing), *_transient(plan), *_offload(plan)]
    measures += _stage(plan, missing) if stages else []
    worth = [measure for measure in measures if measure.saved >= _WORTH * missing]
    return [measure.sentence(missing) for measure in sorted(worth, key=lambda measure: -measure.saved)]


def _stage(plan: Plan, missing: int) -> list[Measure]:
    """The lowest stage that saves enough, or else the highest."""
    saved = 0
    items: list[str] = []
    for stage in range(plan.stage + 1, 4):
        held = [item for item in _PARTITIONED[stage] if plan.peak.items[item] > 0]
        items += [spoken(item) for item in held]
        saved += sum(plan.peak.items[item] for item in held) * (plan.world_size - 1) // plan.world_size
        if items and (saved >= missing or stage == 3):
            action = f"Stage {stage} (zero_optimization.stage) spreads {_listed(items)} over {plan.world_size} ranks"
            if stage == 3:  # which gathers parameters while they are used
                return [Measure(f"{action}, and gathers what is at work", saved, bound=True)]
            return [Measure(action, saved)]
    return []


def _ranks(plan: Plan, missing: int) -> list[Measure]:
    """Twice as many ranks, or four times, ...: until the partitioned items are small enough."""
    names = [item for stage in range(1, plan.stage + 1) for item in _PARTITIONED[stage]]
    partitioned = sum(plan.peak.items[item] for item in names)
    for times in _TIMES:
        saved = partitioned - partitioned // times
        if saved >= missing:
            items = _listed([spoken(item) for item in names if plan.peak.items[item] > 0])
            return [
                Measure(f"{times * plan.world_size} ranks instead of {plan.world_size} spread {items} further", saved)
            ]
    return []


def _activations(plan: Plan, missing: int) -> list[Measure]:
    """The largest micro-batch that is small enough, or else 1, of those with which the batch can stay the same."""
    held = plan.peak.items["activations"]
    checkpointing = "Activation checkpointing (torch.utils.checkpoint) keeps the inputs of layers and no more of them"
    measures = [Measure(checkpointing, held, bound=True)]
    size = plan.micro_batch
    if size is not None and size > 1:
        possible = [part for part in range(1, size) if size * plan.accumulation % part == 0]
        enough = [part for part in possible if held - held * part // size >= missing]
        smaller = max(enough, default=1)
        accumulation = size * plan.accumulation // smaller
        action = (
            f"A micro-batch of {smaller} instead of {size} (train_micro_batch_size_per_gpu), {accumulation} of them in "
            "a step, needs smaller activations"
        )
        measures.append(Measure(action, held - held * smaller // size))
    return measures


def _offload(plan: Plan) -> list[Measure]:
    """Return measures that put states on the host."""
    measures = []
    held = [item for item in _OFFLOADED if plan.peak.items[item] > 0]
    if plan.stage >= 1 and held:
        action = f"zero_optimization.offload_optimizer on the host keeps {_listed([spoken(i) for i in held])} there"
        measures.append(Measure(action, sum(plan.peak.items[item] for item in held), bound=True))
    if plan.stage == 3 and plan.peak.items["compute_parameters"]:
        action = "zero_optimization.offload_param on the host keeps compute parameters there"
        measures.append(Measure(action, plan.peak.items["compute_parameters"], bound=True))
    return measures


def _transient(plan: Plan) -> list[Measure]:
    """Return measures about the sizes of buckets and of the prefetch."""
    buckets, gathered = (plan.peak.items[item] for item in ("communication_buckets", "gathered_parameters"))
    fewer = "zero_optimization.stage3_max_live_parameters and stage3_prefetch_bucket_size"
    return [
        Measure("Smaller buckets (zero_optimization.reduce_bucket_size)", buckets, bound=True),
        Measure(f"Fewer parameters gathered at a time ({fewer})", gathered, bound=True),
    ]


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
