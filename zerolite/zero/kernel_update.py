"""Updates by zerolite's kernels: flat states per bucket, one launch for all buckets of the same dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from zerolite.ops.launches import UpdateLaunch
from zerolite.optim.update_rules import UpdateRule
from zerolite.utils.memory_tags import STATES
from zerolite.zero.bucket import Bucket
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.update import (
    OptimParamShard,
    SpanTensors,
    State,
    UpdateInputs,
    UpdateMethod,
    group_equal,
    segments,
)

_Row = tuple[int, int]


@dataclass(frozen=True)
class _Launch:
    """One launch of a kernel over several spans.

    A segment is a range of adjacent elements that share one row of scalars (learning rate, betas, bias corrections).

    Attributes:
        members: indices of the spans in the sub-group.
        rows: for each row, its param group and the number of steps that its parameters have missed.
        kernel: the launch. A row of its table is: index in ``members``, start in the span, elements, row of scalars.
    """

    members: tuple[int, ...]
    rows: tuple[_Row, ...]
    kernel: UpdateLaunch


class KernelUpdate(UpdateMethod):
    """Update by the kernels of one rule, with its states in flat tensors of the buckets.

    States are allocated at once, so that a job that does not fit fails before it trains.

    Steps are counted on the host, once for all shards. ``_steps_missed`` counts the steps in which a parameter got no
    gradient. A Python integer does not stop at 2^24, as the count in torch's fp32 tensors does.

    ``inner.state`` has views of the flat tensors as in torch, and shards with the same count of steps share its tensor.
    An update begins with what the user has changed there.
    """

    one_launch = syncs_masters = splits_buckets = True

    def __init__(self, rule: UpdateRule, inner: Optimizer, buffer: ParameterBuffer) -> None:
        """
        Args:
            rule: the kernels' rule.
            inner: optimizer whose param groups have the hyperparameters.
            buffer: buckets with the masters.
        """
        super().__init__(inner, buffer)
        self._rule = rule
        self.state_names = tuple(rule.states)
        self._has_states = False  # the buckets have them
        self._steps = 0
        self._steps_missed: Counter[int] = Counter()  # by index of the parameter
        self._counts = False  # the last update counts as a step, because some param group has states
        self._not_counted: list[int] = []  # parameters that missed the last update
        self._group_values: list[object] = []  # of the param groups, when they were last checked
        self._group_lists: list[tuple[list[Any], list[Any]]] = []  # those of them that are lists, and copies
        self._is_shown = False  # `inner.state` has all states, with their counts of steps
        self._has_fresh = False  # it has none of shards that the next update counts for the first time
        self._entries: dict[int, State] = {}  # what `inner.state` was given, by index of the parameter
        self._values: list[object] = []  # all values in `inner.state`; []: compare it entry by entry
        self._counters: list[torch.Tensor] = []  # the counts of steps in it
        self._versions: list[int] = []  # of `_counters`
        self._advancing: list[torch.Tensor] = []  # those of the shards that the last update has counted
        # Arguments for which `_not_counted` and `_launches` were made. None: both are outdated.
        self._plan_key: tuple[object, ...] | None = None
        self._launches: dict[tuple[object, ...], list[_Launch]] = {}
        self.add_buckets(buffer.buckets)

    def add_buckets(self, buckets: Sequence[Bucket]) -> None:
        """See :class:`UpdateMethod`. Their shards have missed all steps so far."""
        for bucket in buckets:
            for shard in bucket.shards:
                shard.tensor = shard.view(bucket.master)
                self._steps_missed[shard.index] = self._steps
            if self._has_states:
                self._make_states(bucket)
        self._ensure_states()
        self._plan_key = None

    def take_over(self) -> None:
        # Compared by identity in C loops: in most steps nothing has changed.
        groups = self._inner.param_groups
        values = list(chain.from_iterable(map(dict.values, groups)))
        is_known = len(values) == len(self._group_values) and all(map(is_, values, self._group_values))
        if any(now != before for now, before in self._group_lists):  # such as betas, changed in place
            is_known = False
        if not is_known or [len(group["params"]) for group in groups] != self._group_sizes:
            self._take_over_groups()
            self._group_values = values
            lists = [value for group in groups for key, value in group.items() if key != "params"]
            self._group_lists = [(value, list(value)) for value in lists if isinstance(value, list)]
        values = list(chain.from_iterable(map(dict.values, self._inner.state.values())))
        versions = [counter._version for counter in self._counters]
        if versions != self._versions or len(values) != len(self._values) or not all(map(is_, values, self._values)):
            self._adopt_changes()

    def _take_over_groups(self) -> None:
        self._check_groups()
        for index, group in enumerate(self._inner.param_groups):
            key = self._rule.unsupported(group)
            if key is not None:
                raise ValueError(
                    f"optimizer.param_groups[{index}]['{key}'] is {group[key]!r}, which zerolite's kernels cannot "
                    "follow; give it when the optimizer is made, and torch's own implementation is used"
                )
        if not self._has_states:  # the user may have given a momentum to a group that had none
            self._ensure_states()

    def begin(self, inputs: UpdateInputs | None) -> None:
        """Count a step. Parameters that do not take part, or whose group has no states, miss it."""
        if inputs is None:
            self._counts = False
            return
        groups, used = self._inner.param_groups, inputs.used
        if used is not None and len(used) == len(self._buffer.parameters):
            used = None
        stateless = tuple(index for index, group in enumerate(groups) if not self._rule.has_states(group))
        plan_key = (used, stateless, len(groups))
        is_planned = plan_key == self._plan_key
        if not is_planned:
            self._plan_key = plan_key
            self._not_counted = [
                shard.index
                for shard in self.shards()
                if shard.group in stateless or (used is not None and shard.index not in used)
            ]
            self._launches.clear()
        self._counts = len(stateless) < len(groups)
        if not self._counts:
            return
        self._steps += 1
        for index in self._not_counted:
            self._steps_missed[index] += 1
        if not (is_planned and self._is_shown) or self._has_fresh:
            self._show()
        elif self._advancing:
            torch._foreach_add_(self._advancing, 1.0)
            self._versions = [counter._version for counter in self._counters]

    @torch.no_grad()
    def update(self, sub_group: Sequence[SpanTensors], inputs: UpdateInputs) -> None:
        groups, names = self._inner.param_groups, self._rule.states if self._has_states else ()
        factor = inputs.factor
        for launch in self._plan(sub_group, inputs.used):
            # In float64 on the host and rounded once, because bias corrections lose digits in fp32 after many steps.
            rows = [self._rule.row(groups[group], self._steps - missed) for group, missed in launch.rows]
            scalars = torch.tensor(rows, dtype=torch.float64, device="cpu")
            on_device = factor if isinstance(factor, torch.Tensor) else None
            if on_device is None:
                scalars[:, 0] *= factor
            members = [sub_group[i] for i in launch.members]
            launch.kernel.run(
                [tensors.master for tensors in members],
                [tensors.gradient for tensors in members],
                [[tensors.states[name] for tensors in members] for name in names],
                [tensors.out for tensors in members if tensors.out is not None],
                scalars.float(),
                on_device,
                inputs.found_inf,
            )
            if members[0].master is not members[0].span.bucket.master:  # a staging copy, whose memory is freed
                launch.kernel.forget()

    def on_update_skipped(self) -> None:
        """Take back the count of the last update."""
        if self._counts:
            self._steps -= 1
            for index in self._not_counted:
                self._steps_missed[index] -= 1
            self._is_shown = False

    # ---------------------------------------------------------------- states

    def state_of(self, shard: OptimParamShard) -> State:
        self.show()
        state = super().state_of(shard)
        if "step" in state:  # shards share it, and another optimizer that loads it would count once for each of them
            state["step"] = state["step"].clone()
        return state

    def memory(self) -> Iterable[torch.Tensor]:
        return [flat for bucket in self._buffer.buckets for flat in bucket.states.values()]

    def load_state(self, shard: OptimParamShard, state: Mapping[str, Any]) -> None:
        tensors = {name: state[name] for name in self._rule.states if state.get(name) is not None}
        for name, value in tensors.items():  # nothing has changed if it raises
            if value.numel() != shard.fragment.numel:
                raise ValueError(
                    f"optimizer.state: expected '{name}' of parameter '{shard.fragment.slot.name}' in the shape of "
                    f"this rank's shard {tuple(shard.view(shard.bucket.master).shape)}, got {tuple(value.shape)}; "
                    "zerolite.set_full_optimizer_state takes the full state"
                )
        views = self.make_state(shard, state, {name: (value.shape, value.dtype) for name, value in tensors.items()})
        for name, view in views.items():
            view.copy_(tensors[name])

    def make_state(
        self, shard: OptimParamShard, numbers: Mapping[str, Any], tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> dict[str, torch.Tensor]:
        """Return views of the flat states, in the rule's dtype."""
        step = int(numbers["step"]) if "step" in numbers else int(bool(tensors))
        if step > self._steps:  # it becomes the common count, and all other shards have missed the difference
            for other in self.shards():
                self._steps_missed[other.index] += step - self._steps
            self._steps = step
        self._steps_missed[shard.index] = self._steps - step
        self._plan_key = None
        if step:
            self._ensure_states()
        counter = _counter(step)
        self._counters.append(counter)
        self._versions.append(counter._version)
        self._show_shard(shard, counter)
        self._values = []
        views = self._views_of(shard)
        for name in views.keys() - tensors.keys():
            views[name].fill_(self._rule.initial(self._inner.param_groups[shard.group]))
        return {name: view for name, view in views.items() if name in tensors}

    def _ensure_states(self) -> None:
        """Allocate the states as soon as one param group has any."""
        if not self._has_states and any(self._rule.has_states(group) for group in self._inner.param_groups):
            self._has_states = True
            for bucket in self._buffer.buckets:
                self._make_states(bucket)

    def _make_states(self, bucket: Bucket) -> None:
        """Allocate the states of a bucket, with their initial values."""
        groups = self._inner.param_groups
        dtype = self._rule.state_dtype(groups, bucket.update_dtype)
        for name in self._rule.states:
            flat = bucket.states[name] = bucket.placement.zeros(bucket.master.numel(), dtype, STATES)
            for shard in bucket.shards:
                value = self._rule.initial(groups[shard.group])
                if value:
                    shard.view(flat).fill_(value)

    # ---------------------------------------------------------------- optimizer.state

    def _views_of(self, shard: OptimParamShard) -> dict[str, torch.Tensor]:
        return {name: shard.view(flat) for name, flat in shard.bucket.states.items()}

    def show(self) -> None:
        if not self._is_shown:
            self._adopt_changes()
            self._show()

    def _show(self) -> None:
        self._is_shown = True
        uncounted = set(self._not_counted)
        counters: dict[tuple[int, bool], torch.Tensor] = {}
        for shard in self.shards():
            key = self._steps - self._steps_missed[shard.index], shard.index not in uncounted
            if key not in counters:
                counters[key] = _counter(key[0])
            self._show_shard(shard, counters[key])
        self._counters = list(counters.values())
        self._has_fresh = (0, True) in counters
        self._advancing = [counter for (_, advances), counter in counters.items() if advances]
        self._note_values()

    def _show_shard(self, shard: OptimParamShard, counter: torch.Tensor) -> None:
        """Show the states of a shard in ``inner.state``, if it has any. counter: its count of steps."""
        self._inner.state.pop(shard.parameter, None)
        entry = self._entries.pop(shard.index, None)
        if self._has_states and self._steps > self._steps_missed[shard.index]:
            if entry is None:
                entry = ({"step": counter} if self._rule.counts_steps else {}) | self._views_of(shard)
            if self._rule.counts_steps:
                entry["step"] = counter
            self._entries[shard.index] = entry
            self._inner.state[shard.parameter] = dict(entry)

    def _note_values(self) -> None:
        self._versions = [counter._version for counter in self._counters]
        self._values = list(chain.from_iterable(map(dict.values, self._inner.state.values())))

    def _adopt_changes(self) -> None:
        """Take over what the user has changed in ``inner.state``.

        Raises:
            RuntimeError: counts of steps were changed in place; other shards may share them.
        """
        counts = {id(entry.get("step")) for entry in self._entries.values()}  # a load has replaced the other counts
        if any(c._version != v and id(c) in counts for c, v in zip(self._counters, self._versions, strict=True)):
            raise RuntimeError(
                "optimizer.state[p]['step']: expected a count that only the optimizer changes, because parameters "
                "share it, got one that was changed in place; zerolite.set_full_optimizer_state(p, 'step', n) sets it"
            )
        some_changed = False
        for shard in self.shards():
            entry, shown = self._inner.state.get(shard.parameter) or {}, self._entries.get(shard.index, {})
            if entry.keys() != shown.keys() or any(entry[name] is not shown[name] for name in shown):
                self.load_state(shard, entry)
                some_changed = True
        if some_changed:
            self._buffer.placements.drop_reads()
        self._note_values()

    # ---------------------------------------------------------------- planning

    def _plan(self, sub_group: Sequence[SpanTensors], used: frozenset[int] | None) -> list[_Launch]:
        """Return the launches for these tensors, from the cache if possible."""
        key = tuple((tensors.span, tensors.gradient.dtype, tensors.out is None) for tensors in sub_group)
        plan = self._launches.get(key)
        if plan is None:
            dtypes = [
                (
                    tensors.master.dtype,
                    tensors.gradient.dtype,
                    *(state.dtype for state in tensors.states.values()),
                    None if tensors.out is None else tensors.out.dtype,
                )
                for tensors in sub_group
            ]
            launches = [self._launch(sub_group, members, used) for members in group_equal(dtypes)]
            plan = self._launches[key] = [launch for launch in launches if launch is not None]
        return plan

    def _launch(
        self, sub_group: Sequence[SpanTensors], members: tuple[int, ...], used: frozenset[int] | None
    ) -> _Launch | None:
        """Make a launch for these members of the sub-group, None if no parameter in them is used.

        Adjacent shards with equal group and step count form one segment.
        """

        def ranges(bucket: Bucket) -> Iterator[tuple[int, int, _Row]]:
            for shard in bucket.shards:
                fragment, index = shard.fragment, shard.index
                if used is None or index in used:
                    yield fragment.shard_start, fragment.numel, (shard.group, self._steps_missed[index])

        rows: dict[_Row, int] = {}
        spans = [sub_group[i].span for i in members]
        table = [[*segment, rows.setdefault(row, len(rows))] for *segment, row in segments(spans, ranges)]
        if not table:
            return None
        kernel = UpdateLaunch(self._rule.number, torch.tensor(table, dtype=torch.int64, device="cpu"))
        return _Launch(members, tuple(rows), kernel)


def _counter(step: int) -> torch.Tensor:
    """Return a count of steps as torch's optimizers keep it."""
    return torch.full((), float(step), dtype=torch.float32, device="cpu")
