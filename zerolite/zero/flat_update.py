"""Updates by zerolite's kernels: flat states per bucket, one launch for all buckets of the same dtypes."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from zerolite.optim.update_rules import UpdateRule
from zerolite.utils.memory_tags import STATES
from zerolite.zero.bucket import Bucket
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.optim_shards import Groups, OptimParamShard, SpanTensors, State
from zerolite.zero.spans import Span, group_by_kind, segments

_Row = tuple[int, int, int]
Flat = list[torch.Tensor]  # one flat tensor per bucket, laid out like the masters


@dataclass(frozen=True)
class _Launch:
    """One launch of a kernel over several spans.

    A segment is a range of adjacent elements that share one row of scalars (learning rate, betas, bias corrections).

    Attributes:
        members: indices of the spans in the sub-group.
        table: int64, [segments, 4] on the host: index in ``members``, start in the span, elements, row of scalars.
        rows: for each row, its param group, the number of steps that its parameters have missed, and -1. Or the row is
            of a single parameter that the device may leave out: its param group, 0, and the parameter, whose number of
            missed steps changes.
        use: int64, [segments] on the host: the parameter that the device may leave out, or -1; None if all are -1.
    """

    members: tuple[int, ...]
    table: torch.Tensor
    rows: tuple[_Row, ...]
    use: torch.Tensor | None


class FlatUpdate:
    """Update by the kernels of one rule, with its states in flat tensors at the optimizer's placement.

    States are allocated at once, so that a job that does not fit fails before it trains.

    Steps are counted on the host, once for all shards. ``_steps_missed`` counts the steps in which a parameter got no
    gradient. A Python integer does not stop at 2^24, as the count in torch's fp32 tensors does.

    ``inner.state`` has views of the flat tensors as in torch, and shards with the same count of steps share its tensor.
    An update begins with what the user has changed there.
    """

    one_launch: ClassVar[bool] = True
    syncs_masters: ClassVar[bool] = True
    splits_buckets: ClassVar[bool] = True
    most_maybe_unused: ClassVar[int | None] = None
    can_skip_on_device = True

    def __init__(
        self,
        rule: UpdateRule,
        inner: Optimizer,
        buffer: ParameterBuffer,
        shards: Sequence[list[OptimParamShard]],
        update_dtypes: Sequence[torch.dtype],
    ) -> None:
        """
        Args:
            rule: the kernels' rule.
            inner: optimizer whose param groups have the hyperparameters.
            buffer: buffer with the masters.
            shards: optimizer shards of each bucket.
            update_dtypes: dtype in which each bucket is updated.
        """
        self._rule = rule
        self._inner = inner
        self._buffer = buffer
        self._shards: list[list[OptimParamShard]] = []
        self._state_dtypes: list[torch.dtype] = []
        self._states: list[Flat] | None = None  # by name, then by bucket
        self._steps = 0
        self._steps_missed: Counter[int] = Counter()  # by index of the parameter
        self._counts = False  # the last update counts as a step, because some param group has states
        self._not_counted: list[int] = []  # parameters that missed the last update
        self._maybe_unused: frozenset[int] = frozenset()
        self._entries: dict[int, State] = {}  # what `inner.state` was given, by index of the parameter
        self._shown = False  # `inner.state` fits the plan
        self._values: list[object] = []  # all values in `inner.state`; []: compare it entry by entry
        self._counters: list[torch.Tensor] = []  # the counts of steps in it
        self._versions: list[int] = []  # of `_counters`
        self._advancing: list[torch.Tensor] = []  # those of the shards that the last update has counted
        # Arguments for which `_not_counted` and `_launches` were made. None: both are outdated.
        self._plan_key: tuple[object, ...] | None = None
        self._launches: dict[tuple[object, ...], list[_Launch]] = {}
        self.extend(shards, update_dtypes)

    def extend(self, shards: Sequence[list[OptimParamShard]], update_dtypes: Sequence[torch.dtype]) -> None:
        """Add the shards of further buckets. They have missed all steps so far."""
        first = len(self._shards)
        groups = self._inner.param_groups
        self._state_dtypes += [self._rule.state_dtype(groups, dtype) for dtype in update_dtypes]
        for members in shards:
            self._shards.append([shard for shard in members if shard.fragment.numel])
            for shard in self._shards[-1]:
                shard.use_master(self._buffer)
                self._steps_missed[shard.index] = self._steps
        for flats in self._states or []:
            flats += self._new_states(groups, first)
        self._ensure_states(groups)
        self._plan_key = None

    def begin(self, used: frozenset[int] | None, maybe_unused: frozenset[int] = frozenset()) -> None:
        """Begin the updates of a step and count it.

        Raises:
            ValueError: the user has set a key of a param group that the kernels do not have.
        """
        groups = self._inner.param_groups
        for index, group in enumerate(groups):
            key = self._rule.unsupported(group)
            if key is not None:
                raise ValueError(
                    f"optimizer.param_groups[{index}]['{key}'] is {group[key]!r}, which zerolite's kernels cannot "
                    "follow; give it when the optimizer is made, and torch's own implementation is used"
                )
        if self._states is None:  # the user may have given a momentum to a group that had none
            self._ensure_states(groups)
        values = list(chain.from_iterable(map(dict.values, self._inner.state.values())))
        versions = [counter._version for counter in self._counters]
        known = self._values or ()
        if versions != self._versions or len(values) != len(known) or not all(map(operator.is_, values, known)):
            self._adopt_changes(versions != self._versions)
        self._count(used, maybe_unused, groups)

    def on_left_out(self, indices: Iterable[int]) -> None:
        if self._counts:
            left_out = set(indices).difference(self._not_counted)
            for index in left_out:
                self._steps_missed[index] += 1
            if left_out:
                self._show()

    def states_of(self, bucket: Bucket) -> Mapping[str, torch.Tensor]:
        return {name: flats[bucket.index] for name, flats in zip(self._rule.states, self._states or (), strict=False)}

    @torch.no_grad()
    def update(
        self,
        sub_group: Sequence[SpanTensors],
        factor: float | torch.Tensor,
        used: frozenset[int] | None,
        found_inf: torch.Tensor | None,
        uses: torch.Tensor | None = None,
    ) -> None:
        groups, names = self._inner.param_groups, self._rule.states if self._states is not None else ()
        for launch in self._plan(sub_group, used):
            # In float64 on the host and rounded once, because bias corrections lose digits in fp32 after many steps.
            rows = [
                self._rule.row(groups[group], self._steps - (missed if alone < 0 else self._steps_missed[alone]))
                for group, missed, alone in launch.rows
            ]
            scalars = torch.tensor(rows, dtype=torch.float64, device="cpu")
            on_device = factor if isinstance(factor, torch.Tensor) else None
            if on_device is None:
                scalars[:, 0] *= factor
            members = [sub_group[i] for i in launch.members]
            self._rule.launch(
                [tensors.master for tensors in members],
                [tensors.gradient for tensors in members],
                [[tensors.states[name] for tensors in members] for name in names],
                [tensors.out for tensors in members if tensors.out is not None],
                launch.table,
                scalars.float(),
                on_device,
                found_inf,
                launch.use,
                None if launch.use is None else uses,
            )

    def on_update_skipped(self) -> None:
        """Take back the count of the last update."""
        if self._counts:
            self._steps -= 1
            for index in self._not_counted:
                self._steps_missed[index] -= 1
            self._show()

    # ---------------------------------------------------------------- states

    def state_of(self, shard: OptimParamShard) -> State:
        state: State = dict(self._inner.state.get(self._buffer.parameters[shard.index]) or {})
        if "step" in state:  # shards share it, and another optimizer that loads it would count once for each of them
            state["step"] = torch.as_tensor(state["step"]).clone()
        return state

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(self._rule.states)

    def memory(self) -> Iterable[torch.Tensor]:
        return [flat for flats in self._states or () for flat in flats]

    def load_state(self, shard: OptimParamShard, state: Mapping[str, Any]) -> None:
        tensors = {name: state[name] for name in self._rule.states if state.get(name) is not None}
        views = self.make_state(shard, state, {name: (value.shape, value.dtype) for name, value in tensors.items()})
        for name, view in views.items():
            if tensors[name].numel() != view.numel():
                raise ValueError(
                    f"optimizer.state: expected '{name}' of parameter '{shard.fragment.slot.name}' in the shape of "
                    f"this rank's shard {tuple(view.shape)}, got {tuple(tensors[name].shape)}; "
                    "zerolite.set_full_optimizer_state takes the full state"
                )
            view.copy_(tensors[name])

    def make_state(
        self, shard: OptimParamShard, numbers: Mapping[str, Any], tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> dict[str, torch.Tensor]:
        """Return views of the flat states, in the rule's dtype."""
        step = int(numbers["step"]) if "step" in numbers else int(bool(tensors))
        if step > self._steps:  # it becomes the common count, and all other shards have missed the difference
            for other in self._all_shards():
                self._steps_missed[other.index] += step - self._steps
            self._steps = step
        self._steps_missed[shard.index] = self._steps - step
        self._plan_key = None
        groups = self._inner.param_groups
        if step:
            self._ensure_states(groups)
        counter = _counter(step)
        self._counters.append(counter)
        self._versions.append(counter._version)
        self._show_shard(shard, counter)
        self._values = []
        views = self._views_of(shard)
        for name in views.keys() - tensors.keys():
            views[name].fill_(self._rule.initial(groups[shard.group]))
        return {name: view for name, view in views.items() if name in tensors}

    def _ensure_states(self, groups: Groups) -> list[Flat]:
        """Return the states. They are allocated as soon as one param group has any."""
        if self._states is None:
            if not any(self._rule.has_states(group) for group in groups):
                return []
            self._states = [self._new_states(groups, 0) for _ in self._rule.states]
        return self._states

    def _new_states(self, groups: Groups, first: int) -> Flat:
        """Allocate one state of the buckets from ``first`` on, with its initial values."""
        flats: Flat = []
        buckets = zip(self._buffer.buckets, self._state_dtypes, self._shards, strict=True)
        for bucket, dtype, members in list(buckets)[first:]:
            flat = bucket.placement.zeros(bucket.master.numel(), dtype, STATES)
            for shard in members:
                value = self._rule.initial(groups[shard.group])
                if value:
                    self._buffer.view_of(shard.fragment, flat).fill_(value)
            flats.append(flat)
        return flats

    # ---------------------------------------------------------------- optimizer.state

    def _views_of(self, shard: OptimParamShard) -> dict[str, torch.Tensor]:
        states = zip(self._rule.states, self._states or (), strict=False)
        return {name: self._buffer.view_of(shard.fragment, flats[shard.bucket]) for name, flats in states}

    def _show(self) -> None:
        """Show the states of all shards in ``inner.state``."""
        uncounted = set(self._not_counted)
        counters: dict[tuple[int, bool], torch.Tensor] = {}
        for shard in self._all_shards():
            key = self._steps - self._steps_missed[shard.index], shard.index not in uncounted
            if key not in counters:
                counters[key] = _counter(key[0])
            self._show_shard(shard, counters[key])
        self._counters = list(counters.values())
        self._advancing = [counter for (_, advances), counter in counters.items() if advances]
        self._note_values()
        self._shown = True

    def _show_shard(self, shard: OptimParamShard, counter: torch.Tensor) -> None:
        """Show the states of a shard in ``inner.state``, if it has any. counter: its count of steps."""
        parameter, entry = self._buffer.parameters[shard.index], self._entries.pop(shard.index, {})
        self._inner.state.pop(parameter, None)
        if self._states is not None and self._steps > self._steps_missed[shard.index]:
            if self._rule.counts_steps:
                entry["step"] = counter
            entry = entry if len(entry) > 1 else entry | self._views_of(shard)
            self._entries[shard.index] = entry
            self._inner.state[parameter] = dict(entry)

    def _note_values(self) -> None:
        self._versions = [counter._version for counter in self._counters]
        self._values = list(chain.from_iterable(map(dict.values, self._inner.state.values())))

    def _adopt_changes(self, counted: bool) -> None:
        """Take over what the user has changed in ``inner.state``.

        Args:
            counted: counts of steps were changed in place.

        Raises:
            RuntimeError: counts of steps were changed in place; other shards may share them.
        """
        if counted:
            raise RuntimeError(
                "optimizer.state[p]['step']: expected a count that only the optimizer changes, because parameters "
                "share it, got one that was changed in place; zerolite.set_full_optimizer_state(p, 'step', n) sets it"
            )
        state, parameters = self._inner.state, self._buffer.parameters
        for shard in self._all_shards():
            entry, shown = state.get(parameters[shard.index]) or {}, self._entries.get(shard.index, {})
            if entry.keys() != shown.keys() or any(entry[name] is not shown[name] for name in shown):
                self.load_state(shard, entry)
        self._note_values()

    # ---------------------------------------------------------------- counting

    def _all_shards(self) -> Iterable[OptimParamShard]:
        return (shard for members in self._shards for shard in members)

    def _count(self, used: frozenset[int] | None, maybe_unused: frozenset[int], groups: Groups) -> None:
        """Count one more step. Parameters that do not take part, or whose group has no states, have missed it."""
        if used is not None and len(used) == len(self._buffer.parameters):
            used = None
        stateless = tuple(index for index, group in enumerate(groups) if not self._rule.has_states(group))
        plan_key = (used, maybe_unused, stateless)
        if plan_key != self._plan_key:
            self._plan_key, self._maybe_unused = plan_key, maybe_unused
            self._not_counted = [
                shard.index
                for shard in self._all_shards()
                if shard.group in stateless or (used is not None and shard.index not in used)
            ]
            self._launches.clear()
            self._shown = False
        self._counts = len(stateless) < len(groups)
        if not self._counts:
            return
        self._steps += 1
        for index in self._not_counted:
            self._steps_missed[index] += 1
        if not self._shown:
            self._show()
        elif self._advancing:
            torch._foreach_add_(self._advancing, 1.0)
            self._versions = [counter._version for counter in self._counters]

    # ---------------------------------------------------------------- planning

    def _plan(self, sub_group: Sequence[SpanTensors], used: frozenset[int] | None) -> list[_Launch]:
        """Return the launches for these tensors, from the cache if possible."""
        key = tuple((tensors.span, tensors.gradient.dtype, tensors.out is None) for tensors in sub_group)
        plan = self._launches.get(key)
        if plan is None:
            launches = (
                self._launch([sub_group[i].span for i in members], members, used)
                for members in self._group_by_kind(sub_group)
            )
            plan = self._launches[key] = [launch for launch in launches if launch is not None]
        return plan

    def _group_by_kind(self, sub_group: Sequence[SpanTensors]) -> list[tuple[int, ...]]:
        def kind(tensors: SpanTensors) -> tuple[torch.dtype | None, ...]:
            out = None if tensors.out is None else tensors.out.dtype
            return tensors.master.dtype, tensors.gradient.dtype, self._state_dtypes[tensors.span.bucket.index], out

        return group_by_kind(map(kind, sub_group))

    def _launch(self, spans: Sequence[Span], members: tuple[int, ...], used: frozenset[int] | None) -> _Launch | None:
        """Make a launch for these spans, None if no parameter in them is used.

        Adjacent shards with equal group and step count form one segment. One that the device may leave out is a segment
        of its own.
        """

        def owned(bucket: Bucket) -> Iterator[tuple[int, int, _Row]]:
            for shard in self._shards[bucket.index]:
                fragment, index = shard.fragment, shard.index
                if index in self._maybe_unused:
                    yield fragment.shard_start, fragment.numel, (shard.group, 0, index)
                elif used is None or index in used:
                    yield fragment.shard_start, fragment.numel, (shard.group, self._steps_missed[index], -1)

        rows: dict[_Row, int] = {}
        table = [[*segment, rows.setdefault(row, len(rows))] for *segment, row in segments(spans, owned)]
        if not table:
            return None
        keys = list(rows)
        parameters = [keys[row][2] for *_, row in table]
        use = None if max(parameters) < 0 else torch.tensor(parameters, dtype=torch.int64, device="cpu")
        return _Launch(members, torch.tensor(table, dtype=torch.int64, device="cpu"), tuple(keys), use)


def _counter(step: int) -> torch.Tensor:
    """Return a count of steps as torch's optimizers keep it."""
    return torch.full((), float(step), dtype=torch.float32, device="cpu")
