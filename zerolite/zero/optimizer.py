"""`engine.optimizer`: any torch optimizer over this rank's shards, with the interface of one over the model."""

from __future__ import annotations

import functools
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from zerolite.comm import collective
from zerolite.optim.adamw8bit import AdamW8bit
from zerolite.optim.muon import MUON
from zerolite.optim.update_rules import UpdateRule
from zerolite.utils.module_hook import finalize_before_exit
from zerolite.zero.bucket import Bucket
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.eight_bit_update import EightBitUpdate
from zerolite.zero.kernel_update import KernelUpdate
from zerolite.zero.muon_update import MuonUpdate
from zerolite.zero.torch_update import TorchUpdate
from zerolite.zero.update import Groups, OptimParamShard, State, UpdateMethod
from zerolite.zero.whole_update import WholeUpdate, fill_whole_parameters, set_owners, whole_parameters

if TYPE_CHECKING:
    from zerolite.zero.step import StepPipeline


def _hooks_of_all_optimizers(register: Callable[[Any], RemovableHandle]) -> Mapping[int, Any]:
    """Return torch's dict of the hooks that ``register`` adds. torch runs them in its own optimizers' ``step``, which
    updates by kernels do not call."""
    handle = register(lambda *_: None)
    hooks: Any = handle.hooks_dict_ref()
    handle.remove()
    return cast("Mapping[int, Any]", hooks)


_STEP_HOOKS = {
    "pre": _hooks_of_all_optimizers(register_optimizer_step_pre_hook),
    "post": _hooks_of_all_optimizers(register_optimizer_step_post_hook),
}


class ShardedOptimizer(Optimizer):
    """Optimizer behind ``engine.optimizer``.

    The inner optimizer (the user's instance, or one made from the config) updates *shards*. A shard is the part of one
    parameter's master weights that this rank owns; at stage 0 it is the full parameter. Both optimizers share one list
    of param-group dicts and the states. To users, ``group["params"]`` and the keys of ``state`` are the model's
    parameters; during the update of a bucket they are its shards. So the update sees a learning rate that was changed
    in either optimizer, by a scheduler for example.

    ``step`` and ``zero_grad`` are those of the engine: reduce, clip, update, all-gather.

    Attributes:
        inner: the inner optimizer.
        method: method that updates the shards.
    """

    def __init__(
        self,
        make_inner: Callable[[Groups], Optimizer] | Optimizer,
        groups: Groups,
        buffer: ParameterBuffer,
        update_dtype: Callable[[torch.dtype], torch.dtype],
        choose_rule: Callable[[Optimizer, Sequence[torch.dtype]], UpdateRule | None],
        undivided: bool = False,
    ) -> None:
        """
        Args:
            make_inner: the user's optimizer, or a function that makes one from param groups of shards.
            groups: param groups of the model's parameters.
            buffer: buckets with the masters.
            update_dtype: function from the dtype of masters to the dtype in which they are updated.
            choose_rule: function that returns the kernels' rule for an optimizer and the dtypes of the masters; None if
                the optimizer itself updates them.
            undivided: the optimizer needs whole parameters.
        """
        self._buffer, self._undivided = buffer, undivided and buffer.shard
        self._update_dtype = update_dtype
        self._make_shards(buffer.buckets, groups)
        self._pipeline: StepPipeline | None = None  # of the engine
        self.inner = make_inner if isinstance(make_inner, Optimizer) else self._make_inner(make_inner, groups)
        dtypes = [bucket.master.dtype for bucket in buffer.buckets]
        rule = None if self._undivided else choose_rule(self.inner, dtypes)
        states = self._take_states(buffer.parameters)
        for shard in self.shards():  # Adagrad's constructor makes states
            if shard.tensor in self.inner.state:
                states[shard.index] = self.inner.state.pop(shard.tensor)
        self.method = self._make_method(rule)
        self._load_states(buffer.buckets, states)
        self._constructed = False
        super().__init__(self.inner.param_groups[:1], dict(self.inner.defaults))
        self._constructed = True

    def _make_inner(self, make_inner: Callable[[Groups], Optimizer], groups: Groups) -> Optimizer:
        """Make the optimizer of the shards, in the param groups of their parameters."""
        if self._undivided:
            fill_whole_parameters(self._buffer)
        tensors: list[list[torch.Tensor]] = [[] for _ in groups]
        for shard in self.shards():
            tensors[shard.group].append(shard.tensor)
        inner = make_inner([{**group, "params": tensors[index]} for index, group in enumerate(groups)])
        for index, group in enumerate(inner.param_groups):
            group["params"] = list(groups[index]["params"])
        return inner

    def _make_method(self, rule: UpdateRule | None) -> UpdateMethod:
        if rule is not None:
            return KernelUpdate(rule, self.inner, self._buffer)
        if self._undivided:
            return WholeUpdate(self.inner, self._buffer)
        if isinstance(self.inner, AdamW8bit):
            return EightBitUpdate(self.inner, self._buffer)
        return (MuonUpdate if type(self.inner) in MUON else TorchUpdate)(self.inner, self._buffer)

    @collective
    def add_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Update these new buckets too, whose parameters are in the param groups."""
        self._make_shards(buckets, self.inner.param_groups)
        states = self._take_states(parameter for bucket in buckets for parameter in bucket.parameters)
        self.method.add_buckets(buckets)
        self._load_states(buckets, states)

    @property
    def param_groups(self) -> Groups:
        """Param groups of the inner optimizer, with the learning rates of the engine's schedule."""
        if self._pipeline is not None:
            self._before_groups_are_read()
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Groups) -> None:
        # Ignored in torch's constructor, which sets an empty list and adds groups that the inner optimizer has already.
        if getattr(self, "_constructed", True):
            self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """States of the inner optimizer: this rank's part, by parameter of the model."""
        if self._pipeline is not None:
            self._settle()
            self.method.show()
        return self.inner.state

    @state.setter
    def state(self, states: Any) -> None:
        if getattr(self, "_constructed", True):  # see param_groups
            self.inner.state = states

    def connect(
        self,
        pipeline: StepPipeline,
        add_group: Callable[[dict[str, Any]], None],
        before_groups_are_read: Callable[[], None],
        step: Callable[[], None] | None = None,
        *,
        raise_together: Callable[[ValueError | None], None],
        grid: Mapping[str, int],
    ) -> None:
        """Let the engine carry out calls of this optimizer and of the user's own optimizer object. So a loop that still
        calls the latter trains.

        Args:
            pipeline: the engine's step pipeline.
            add_group: trains the parameters of another param group.
            before_groups_are_read: brings learning rates up to date.
            step: runs a step instead of ``pipeline.step``.
            raise_together: raises on all ranks of the job if one of them has an error.
            grid: this rank's indices "tensor" and "pipe", if it has a part of the model only.
        """
        self._raise_together, self._grid = raise_together, grid
        self._pipeline, self._add_group, self._before_groups_are_read = pipeline, add_group, before_groups_are_read
        self._step = pipeline.step if step is None else step
        self._redirect_inner()

    def _settle(self) -> StepPipeline:
        """Read the outcome of the last step and return the pipeline. If the device has skipped the step, the counts in
        the states are corrected."""
        assert self._pipeline is not None, "states are saved and loaded after the engine was made"
        self._pipeline.state.settle()
        return self._pipeline

    def _redirect_inner(self) -> None:
        optimizer_ref = weakref.ref(self)  # the user's object may outlive the engine
        wrapped = getattr(self.inner.step, "_wrapped_by_lr_sched", None)
        for name in _REDIRECTED:
            function = _redirect(optimizer_ref, name)
            if name == "step" and wrapped is not None:  # torch's schedulers warn if their mark is missing
                function._wrapped_by_lr_sched = wrapped  # type: ignore[attr-defined]
            vars(self.inner)[name] = types.MethodType(function, self.inner)
        installed = {name: vars(self.inner)[name] for name in _REDIRECTED}
        takes_scale = getattr(self.inner, _TAKES_SCALE, False)
        release = functools.partial(_release_inner, self.inner, installed, takes_scale)
        self._release, self._releases = release, finalize_before_exit(self, release)  # if no engine comes of it
        vars(self.inner)[_TAKES_SCALE] = False  # else GradScaler would leave the unscaling to `step`

    def release_inner(self, refuses: bool) -> None:
        """Make the user's optimizer an ordinary one again, without the states of shards; ``refuses``: but for its
        ``step``, which raises. May be called twice."""
        if self._releases.detach() is not None:
            self._release(refuses)

    # ---------------------------------------------------------------- torch's interface

    @collective
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update from all gradients since the last update, as ``engine.step()`` does at a boundary."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @collective
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step."""
        if self._pipeline is not None:
            self._pipeline.zero_grad()

    def __reduce__(self) -> Any:
        raise TypeError(
            "engine.optimizer works on parts of an engine's parameters and cannot be copied or pickled; save "
            "engine.optimizer.state_dict() and engine.full_state_dict()"
        )

    def run_hooks(self, when: str) -> bool:
        """Call the hooks that the user has registered on this optimizer, on the inner one or on all optimizers. Return
        True if there are any.

        Args:
            when: "pre" or "post".
        """
        if when == "pre":  # torch's schedulers look for this mark before they warn that step() was never called
            self._opt_called = self.inner._opt_called = True  # type: ignore[attr-defined]
        calls: list[tuple[Optimizer, Any]] = [(self, hook) for hook in _STEP_HOOKS[when].values()]
        for optimizer in (self.inner, self):
            hooks = getattr(optimizer, f"_optimizer_step_{when}_hooks")
            calls += [(optimizer, hook) for hook in hooks.values()]
        for optimizer, hook in calls:
            hook(optimizer, (), {})
        return bool(calls)

    @collective
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters of the engine's module. Called between steps.

        Args:
            param_group: ``params`` and the hyperparameters that differ from the defaults, as in torch.

        Raises:
            ValueError: the module does not have one of the parameters, or it is trained already. Nothing has changed.
        """
        if getattr(self, "_constructed", False):
            self._add_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's states by parameter position, in torch's form, with the masters that are separate.

        They can be loaded into an engine of the same stage, world size and buckets; at stage 0 those of any rank into
        an engine of any world size. Tensors are not copied.
        """
        pipeline = self._settle()
        pipeline.check_available()
        pipeline.written.collect_all()
        position = self.positions()
        states, masters = {}, {}
        for shard in self.shards():
            index = position[shard.index]
            state = self.method.state_of(shard)
            if state:
                states[index] = state
        for bucket in self._buffer.buckets:
            for fragment in bucket.fragments if bucket.separate else ():
                masters[position[fragment.slot.index]] = bucket.master_view(fragment)
        groups = self.numbered_groups()
        if self._is_sharded:
            for group in groups:
                group[SHARDED_OVER] = self._buffer.layout.world_size
        return {"state": states, "masters": masters, "param_groups": groups, "partition": self._partition()}

    @collective
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`. Each rank passes its own state.

        Keys that choose an implementation (``foreach``, ``fused``, …) are not loaded.

        Raises:
            ValueError: on all ranks, if a state was saved under another partition or other param groups. Nothing has
            changed.
        """
        pipeline = self._settle()
        error = None
        try:
            self._check_loadable(state_dict)
        except ValueError as refused:
            error = refused
        self._raise_together(error)  # the ranks that could load would wait in the gather of the loaded weights
        position = self.positions()
        for shard in self.shards():
            self.method.load_state(shard, state_dict["state"].get(position[shard.index], {}))
        for bucket in self._buffer.buckets:
            for fragment in bucket.fragments:
                if (index := position[fragment.slot.index]) in state_dict["masters"]:
                    bucket.master_view(fragment).copy_(state_dict["masters"][index])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key not in LOCAL_GROUP_KEYS})
        pipeline.on_masters_loaded()

    # ---------------------------------------------------------------- shards

    def shards(self) -> Iterator[OptimParamShard]:
        """Yield the shards that this rank updates."""
        return (shard for bucket in self._buffer.buckets for shard in bucket.shards)

    def _make_shards(self, buckets: Iterable[Bucket], groups: Groups) -> None:
        group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
        buckets = list(buckets)
        if self._undivided:
            set_owners(buckets, self._buffer)
        for bucket in buckets:
            bucket.update_dtype = self._update_dtype(bucket.master.dtype)
            source = bucket.master.to(bucket.update_dtype)
            pairs = [(fragment, bucket.view_of(fragment, source)) for fragment in bucket.fragments]
            if self._undivided:
                pairs = list(whole_parameters(bucket, self._buffer.placements.device))
            for position, (fragment, tensor) in enumerate(pairs):
                parameter = self._buffer.parameters[fragment.slot.index]
                group = group_of[id(parameter)]
                bucket.shards.append(OptimParamShard(bucket, fragment, group, tensor, position, parameter))

    def _take_states(self, parameters: Iterable[torch.Tensor]) -> dict[int, State]:
        """Remove the states of full parameters from the inner optimizer. Return them by index of the parameter."""
        index_of = {id(parameter): index for index, parameter in enumerate(self._buffer.parameters)}
        return {index_of[id(p)]: self.inner.state.pop(p) for p in parameters if p in self.inner.state}

    def _load_states(self, buckets: Iterable[Bucket], states: Mapping[int, State]) -> None:
        """Give the shards their part of the states from :meth:`_take_states`."""
        for shard in (shard for bucket in buckets for shard in bucket.shards):
            if state := states.get(shard.index):
                if isinstance(self.inner, AdamW8bit):
                    state = self.inner.in_fp32(shard.parameter, state)
                self.method.load_state(shard, {key: shard.part_of(v) for key, v in state.items()})

    # ---------------------------------------------------------------- saving

    def numbered_groups(self) -> Groups:
        """Return the param groups with positions in place of parameters, as in torch's state dicts."""
        groups, start = [], 0
        for group in self.param_groups:
            count = len(group["params"])
            entry = {key: value for key, value in group.items() if key != "params"}
            groups.append({**entry, "params": list(range(start, start + count))})
            start += count
        return groups

    def positions(self) -> dict[int, int]:
        """Return the position among all parameters of the param groups, by index in the layout."""
        order = {id(p): i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        return {index: order[id(p)] for index, p in enumerate(self._buffer.parameters)}

    @property
    def _is_sharded(self) -> bool:
        return self._buffer.shard and self._buffer.layout.world_size > 1

    def _partition(self) -> dict[str, Any]:
        layout = self._buffer.layout
        rows = max((bucket.rows for bucket in layout.buckets), default=0)
        owners = [self._buffer.buckets[slot.bucket].owners.get(slot.index) for slot in layout.slots]
        return {
            "shard": self._buffer.shard,
            "world_size": layout.world_size,
            "rank": self._buffer.rank,
            "buckets": [bucket.numel for bucket in layout.buckets],
            **({"owners": owners} if self._undivided else {}),
            **({"rows": rows} if 0 < rows < layout.world_size else {}),
            **self._grid,
        }

    def _check_loadable(self, state_dict: dict[str, Any]) -> None:
        missing = [key for key in ("state", "masters", "param_groups", "partition") if key not in state_dict]
        if missing:
            raise ValueError(
                "engine.optimizer.load_state_dict: expected the result of engine.optimizer.state_dict(), got one "
                f"without {missing}; load the state of a plain optimizer into it before zerolite.initialize"
            )
        expected, got = self._partition(), state_dict["partition"]
        if not (self._buffer.shard or got.get("shard")):  # whole on each rank, whatever the buckets
            expected, got = ({key: partition.get(key) for key in _GRID} for partition in (expected, got))
        if got != expected:
            differ = [key for key in {**expected, **got} if expected.get(key) != got.get(key)]
            expected, got = ({key: partition.get(key) for key in differ} for partition in (expected, got))
            both = [partition.get("owners") or () for partition in (expected, got)]
            if len(both[0]) == len(both[1]) > 0:  # name one parameter of maybe thousands
                index = next(i for i, (owner, other) in enumerate(zip(*both, strict=True)) if owner != other)
                name = self._buffer.layout.slots[index].name
                expected["owners"], got["owners"] = {name: both[0][index]}, {name: both[1][index]}
            raise ValueError(
                "engine.optimizer.load_state_dict: expected a state of this rank's partition, with "
                f"{expected}, got one with {got}; each rank loads the state that it has saved itself, at the same "
                "stage, world size and bucket size. A checkpoint of engine.save_checkpoint fits any"
            )
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        expected_sizes = [len(group["params"]) for group in self.param_groups]
        if saved != expected_sizes:
            raise ValueError(
                f"engine.optimizer.load_state_dict: expected param groups of {expected_sizes} parameters, got "
                f"groups of {saved}"
            )


GONE = (
    "the engine is gone, because nothing refers to it any more. Keep what zerolite.initialize returns for as long as "
    "the model trains (engine = zerolite.initialize(...)); engine.destroy() ends an engine on purpose"
)

# So torch does not wrap `step`: its wrapper calls the user's hooks only if a loop calls `step`, and not for
# `engine.step()`. `run_hooks` calls them in every step.
ShardedOptimizer.step.hooked = True  # type: ignore[attr-defined]
# Key in the param groups of a saved state that is one rank's part. A plain optimizer keeps it when it loads the state,
# so an engine that gets this optimizer knows that its states are not whole.
SHARDED_OVER = "zerolite_sharded_over"
# Keys of a param group that are not loaded, saved or compared: they choose this rank's implementation or class.
LOCAL_GROUP_KEYS = (
    *("params", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", SHARDED_OVER),
)
_GRID = ("tensor", "pipe")
_TAKES_SCALE = "_step_supports_amp_scaling"
_REDIRECTED = ("step", "zero_grad", "state_dict", "load_state_dict")


def _redirect(optimizer_ref: weakref.ref[ShardedOptimizer], name: str) -> Callable[..., Any]:
    def method(inner: Optimizer, *args: Any, **kwargs: Any) -> Any:
        optimizer = optimizer_ref()
        assert optimizer is not None, "_release_inner removes this method with the optimizer"
        return getattr(optimizer, name)(*args, **kwargs)

    return method


def _release_inner(inner: Optimizer, installed: dict[str, Any], takes_scale: bool, refuses: bool = False) -> None:
    """Take back what :meth:`ShardedOptimizer._redirect_inner` has installed on the user's optimizer, and the states of
    shards. refuses: the engine is gone although the user has not ended it, so a step would average nothing."""
    if vars(inner).get("zero_grad") is not installed["zero_grad"]:
        return  # another engine has the optimizer now
    for name in _REDIRECTED:
        vars(inner).pop(name, None)
    vars(inner)[_TAKES_SCALE] = takes_scale
    inner.state = defaultdict(dict)
    if refuses:
        vars(inner)["step"] = types.MethodType(_refuse_step, inner)


def _refuse_step(inner: Optimizer, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(f"{type(inner).__name__}.step: {GONE}")
