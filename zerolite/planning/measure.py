"""Measured memory and traffic of real steps, for comparison with a plan."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch.profiler import ProfilerActivity, profile, record_function

from zerolite.comm import local_rank, record
from zerolite.comm.topology import DIMENSIONS
from zerolite.config import load_config
from zerolite.engine.engine import Engine
from zerolite.engine.pipeline_engine import PipelineEngine
from zerolite.monitor.memory_report import Holding, holdings
from zerolite.planning.dry_run import WARM_UP
from zerolite.planning.initialize import initialize
from zerolite.planning.make import ConfigLike, of_micro_batch, silent
from zerolite.planning.places import Grid
from zerolite.planning.result import AT_REST, Items, Traffic
from zerolite.planning.steps import STEP, loss_fn_of, train_one_step
from zerolite.planning.traffic import summarize
from zerolite.planning.walk import walk_through_parameters
from zerolite.utils.accelerator import collector_off, default_device, is_fake
from zerolite.utils.memory_tags import DEVICE, DISK, HOST, ITEMS, OTHER, PLACES, listeners
from zerolite.utils.nested import map_tensors

_MOST_STEPS = 50
_BEGIN, _END = "zerolite.planning.measure begins", "zerolite.planning.measure ends"


class Measurement(BaseModel):
    """One rank of a real job: the fields of :class:`~zerolite.planning.result.Plan` that can be measured. Sizes in
    bytes, of the step after as many as a plan takes to warm up."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    world_size: int
    device: str = Field(description="cuda or cpu")
    states: Items = Field(description="model states and buffers, each item at its largest within the step")
    host: Items = Field(description="what rests on the host or passes through it, each item at its largest")
    disk: Items = Field(description="the same of the disk")
    at_rest: Items = Field(description='held after the step; "other" is what the allocator counts beyond the items')
    step_peak: int = Field(description="the most that the allocator had given out at once")
    inside_operators: int = Field(
        description="by how much that is more than the peak without what single operators take and give back inside "
        "themselves, which no plan sees; 0 on CUDA, where it is not known"
    )
    traffic: list[Traffic]


def measure(
    make_model: Callable[[], torch.nn.Module],
    config: ConfigLike,
    batch: Callable[..., Any] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
) -> Measurement:
    """Make the model and its engine in this process and train a few steps, as a plan does on tensors without memory.

    Args:
        config: as for ``zerolite.initialize``; its monitors and the like stay off.
        batch, loss: as for ``zerolite.plan``; batch None: every parameter is used once, by itself.

    Counts from before the model is made; what the process holds already does not count. A pipeline needs a batch.
    Called on all ranks, with equal arguments.
    """
    device = default_device(local_rank())
    account = _DeviceAccount(device) if device.type == "cuda" else _HostAccount()
    with account.counting():
        model = make_model()
        settings = silent(load_config(config))
        engine = initialize(model, settings, loss_fn=loss_fn_of(model, settings.pipeline.stages, loss))
        made = of_micro_batch(batch, engine.train_micro_batch_size_per_gpu)
        if made is None:
            walk_through_parameters(model)

        def micro_batch() -> Any:
            return map_tensors(lambda tensor: tensor.to(engine.device), torch.zeros(()) if made is None else made())

        for step in range(_MOST_STEPS):  # as many as a plan takes, and until a loss scale has found its size
            skipped = engine.skipped_steps
            train_one_step(engine, micro_batch, loss)
            if step + 1 >= WARM_UP and engine.skipped_steps == skipped:
                break
        gc.collect()
        most = _Most(engine)
        account.begin_step()
        with collector_off(), record() as recorder, most.asking():
            train_one_step(engine, micro_batch, loss, most.around)
        account.end_step()
        most.ask()
        held = engine.memory_report().items
    grid = Grid(**{name: getattr(engine.topology, name).world_size for name in DIMENSIONS})
    items = most.items
    return Measurement(
        rank=engine.rank,
        world_size=engine.world_size,
        device=engine.device.type,
        states=dict.fromkeys(ITEMS, 0) | {item: items[DEVICE][item] for item in AT_REST},
        host=items[HOST],
        disk=items[DISK],
        at_rest={**held, OTHER: account.at_rest - sum(held.values())},
        step_peak=account.peak,
        inside_operators=account.inside_operators,
        traffic=summarize(recorder.calls, grid),
    )


class _Most:
    """The most of each item in each place that the engine held when it was asked: whenever a part of it says that it
    allocates, and before every update, when all gradients have been reduced."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.items = {place: dict.fromkeys(ITEMS, 0) for place in PLACES}

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        listeners.append(self)
        try:
            yield
        finally:
            listeners.remove(self)

    def tag_memory(self, storage: torch.UntypedStorage, item: str, place: str) -> None:
        there = HOST if place == DEVICE and storage.device.type != self._engine.device.type else place
        self.ask({storage._cdata: Holding(item, storage.nbytes(), there)})  # which has no owner yet

    def resized(self, storage: torch.UntypedStorage) -> None:
        self.ask()

    @contextlib.contextmanager
    def around(self, phase: str) -> Iterator[None]:
        engine = self._engine
        if phase == STEP and (isinstance(engine, PipelineEngine) or engine.is_gradient_accumulation_boundary()):
            engine.reduce_gradients()
            self.ask()
        yield

    def ask(self, allocated: dict[int, Holding] | None = None) -> None:
        now = {place: dict.fromkeys(ITEMS, 0) for place in PLACES}
        for item, nbytes, place in (holdings(self._engine.memory_parts) | (allocated or {})).values():
            now[place][item] += nbytes
        for place, items in self.items.items():
            items.update({item: max(nbytes, now[place][item]) for item, nbytes in items.items()})


class _DeviceAccount:
    """Bytes beyond those before, after the step and at most within it, by CUDA's caching allocator."""

    at_rest = peak = inside_operators = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        self._before = torch.cuda.memory_allocated(self._device)
        yield

    def begin_step(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def end_step(self) -> None:
        torch.cuda.synchronize(self._device)
        self.at_rest = torch.cuda.memory_allocated(self._device) - self._before
        self.peak = torch.cuda.max_memory_allocated(self._device) - self._before


class _HostAccount:
    """The same of the CPU's allocator, which tells torch's profiler of every allocation and release, with addresses. It
    does not tell of what threads of gloo's release: blocks from before the step that no tensor has when it ends are
    such."""

    at_rest = peak = inside_operators = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            yield
        inner: Any = profiler.profiler
        events, waiting = [], list(inner.kineto_results.experimental_event_tree())
        while waiting:
            events.append(waiting.pop())
            waiting.extend(events[-1].children)
        times = {event.name: event.start_time_ns for event in events if event.name in (_BEGIN, _END)}
        begin, end = times[_BEGIN], times[_END]
        memory = sorted((event for event in events if event.name == "[memory]"), key=lambda event: event.start_time_ns)
        blocks = [
            block
            for block in _blocks(memory)
            if block.start >= begin or block.released or (block.end > end and block.address in self._addresses)
        ]
        self.at_rest = sum(block.nbytes for block in blocks if block.start < end <= block.end)
        self.peak = _most(blocks, begin, end)
        self.inside_operators = self.peak - _most([block for block in blocks if not block.inside], begin, end)

    def begin_step(self) -> None:
        with record_function(_BEGIN):
            pass

    def end_step(self) -> None:
        with record_function(_END):
            pass
        self._addresses = set()  # of every tensor's memory that Python knows
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor) and not is_fake(thing):
                with contextlib.suppress(RuntimeError, NotImplementedError):  # tensors without a storage
                    self._addresses.add(thing.untyped_storage().data_ptr())


class _Block(NamedTuple):
    """Memory that was given out from ``start`` to ``end``, in nanoseconds.

    Attributes:
        released: that end has been seen, and is not just when the address was given out again, if ever.
        inside: one operator took it and gave it back.
    """

    address: int
    start: int
    end: float
    nbytes: int
    released: bool
    inside: bool


def _blocks(events: list[Any]) -> list[_Block]:
    """The blocks behind the events of the allocator, which are in order of time."""
    taken: dict[int, Any] = {}  # by address
    blocks = []
    for event in events:
        address, nbytes = event.extra_fields.ptr, event.extra_fields.alloc_size
        if address in taken:
            blocks.append(_block(taken.pop(address), event.start_time_ns, released=nbytes < 0))
        if nbytes > 0:
            taken[address] = event
    return blocks + [_block(event, math.inf, released=False) for event in taken.values()]


def _block(event: Any, end: float, released: bool) -> _Block:
    chain: list[Any] = []  # the innermost first
    above = event.parent
    while above is not None:
        chain.append(above)
        above = above.parent
    operator = next((entry for entry in reversed(chain) if _is_one_step(entry.name)), None)
    inside = operator is not None and end <= operator.end_time_ns
    allocation = event.extra_fields
    return _Block(allocation.ptr, event.start_time_ns, end, allocation.alloc_size, released, inside)


@functools.cache
def _is_one_step(name: str) -> bool:
    """True if the profiler's event ``name`` is an operator that a plan sees as one: not a part of Python or autograd,
    and not an operator that is visibly made of others."""
    namespace, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), operator, None) if operator.isidentifier() else None
    if packet is None:
        return False
    overloads = [f"{name}.{overload}".removesuffix(".default") for overload in packet.overloads()]
    known = [n for n in overloads if torch._C._dispatch_has_kernel(n)]  # the others are TorchScript's
    return not any(torch._C._dispatch_has_kernel_for_dispatch_key(n, "CompositeImplicitAutograd") for n in known)


def _most(blocks: list[_Block], begin: int, end: int) -> int:
    """The most bytes that were given out at once between ``begin`` and ``end``."""
    changes = [(block.start, block.nbytes) for block in blocks] + [(block.end, -block.nbytes) for block in blocks]
    held = most = sum(nbytes for time, nbytes in changes if time <= begin)
    for time, nbytes in sorted(changes):
        if begin < time < end:
            held += nbytes
            most = max(most, held)
    return most
