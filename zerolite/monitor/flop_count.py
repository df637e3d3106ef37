"""FLOPs of a model's forwards and backwards, by module, with torch's formulas.

A dispatch mode counts the operators. It is active while the model's forward runs, and while autograd runs a node of the
graph that this forward has built. It is off everywhere else, so the user's training loop never runs under it, not even
after an exception. If a node raises, autograd restores the stack of modes, so no cleanup is necessary here.

A node belongs to the innermost module whose forward has made it. Such a node can be reached from the module's outputs.
Its sequence number is at least that of the first node after the module began.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerolite.monitor.flop_formulas import OperatorFlops
from zerolite.utils.module_hook import WeakHook
from zerolite.utils.nested import Arguments, Function, Keywords, find_in_objects
from zerolite.utils.torch_private import current_backward
from zerolite.zero.stage3.partitioned_parameter import unpartitioned_numel

FORWARD, BACKWARD, RECOMPUTED = "forward", "backward", "recomputed"

_next_sequence_number = torch._C._autograd._get_sequence_nr
_no_graph_task = -1


class CallHolder(Protocol):
    """Holder of the function that runs the module when the engine is called."""

    def replace(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Call ``function`` from now on, and return the function that was called before."""


class ModuleFlops(NamedTuple):
    """FLOPs of one module, with its submodules, between start and stop.

    Attributes:
        name: qualified name; "" for the model.
        kind: name of its class.
        parameters: elements of its full parameters; a shared parameter counts once.
        forward: FLOPs of its forwards.
        backward: FLOPs of its backwards.
        recomputed: FLOPs of forwards that activation checkpointing runs again inside backward.
    """

    name: str
    kind: str
    parameters: int
    forward: int
    backward: int
    recomputed: int

    @property
    def model(self) -> int:
        """FLOPs that the model needs without activation checkpointing."""
        return self.forward + self.backward

    @property
    def depth(self) -> int:
        return self.name.count(".") + 1 if self.name else 0


class _Owner(NamedTuple):
    """Owner of the operators that run now: the forward of a module, or a node of autograd.

    Attributes:
        module: name of the module.
        task: number of the backward inside which it began; -1 outside of backward.
        is_forward: True for a module's forward, False for a node.
        first: sequence number from which nodes belong to this forward.
    """

    module: str
    task: int
    is_forward: bool
    first: int = 0


class _Thread(threading.local):
    """State of one thread: autograd runs the nodes of a CUDA device on a separate thread."""

    def __init__(self) -> None:
        self.owners: list[_Owner] = []
        self.modes: list[_Counting | None] = []  # one per running node; None if an outer mode counts already
        self.first_order = _no_graph_task  # the latest backward that is known to run without create_graph

    def enter_node(self, module: str, mode: _Counting | None) -> None:
        task = current_backward()
        # Nodes run with gradients enabled only if backward was called with create_graph=True.
        if not torch.is_grad_enabled():
            self.first_order = task
        self.owners.append(_Owner(module, task, False))
        self.modes.append(mode)


class FlopCount:
    """FLOPs of an engine between :meth:`start` and :meth:`stop`: of its calls in training mode and of their backward.

    Only products (matrices, convolutions, attention) are counted, by zerolite.monitor.flop_formulas. Operators outside
    the model's forward are not, such as a loss that is computed from its outputs.
    """

    def __init__(self, call: CallHolder, module: torch.nn.Module) -> None:
        self._call, self._module = weakref.ref(call), module
        self._uncounted: Callable[..., Any] = module  # the function that the holder called before
        self._flops: Counter[tuple[str, str]] = Counter()  # by (module, FORWARD ...), without submodules
        self.operators = OperatorFlops()
        self._thread = _Thread()
        self._handles: list[Any] = []
        self._open = False

    def start(self) -> None:
        """Install hooks on the modules, and replace the engine's call of the module by one that counts."""
        call = self._call()
        if self._open or call is None:
            return
        self._open = True
        self._uncounted = call.replace(self._counted_call)
        compiled = _compiled(self._module)
        for name, module in self._module.named_modules():
            if module is self._module or module in compiled:
                continue
            self._handles.append(_Enter(self, name).install(module.register_forward_pre_hook, prepend=True))
            self._handles.append(_Leave(self).install(module.register_forward_hook, always_call=True))

    def stop(self) -> None:
        """Stop counting and remove the hooks. May be called twice."""
        if self._open:
            self._open = False
            call = self._call()
            if call is not None:
                call.replace(self._uncounted)
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def modules(self) -> list[ModuleFlops]:
        """Return the FLOPs of every module, the model first, in the order of ``named_modules``."""
        return [self._of(name, module) for name, module in self._module.named_modules()]

    @property
    def total(self) -> ModuleFlops:
        """FLOPs of the full model."""
        return self._of("", self._module)

    def _of(self, name: str, module: torch.nn.Module) -> ModuleFlops:
        sums = dict.fromkeys((FORWARD, BACKWARD, RECOMPUTED), 0)
        for (owner, kind), flops in self._flops.items():
            if not name or owner == name or owner.startswith(f"{name}."):
                sums[kind] += flops
        parameters = sum(unpartitioned_numel(parameter) for parameter in module.parameters())
        return ModuleFlops(name, type(module).__name__, parameters, *sums.values())

    # ---------------------------------------------------------------- forward

    def _counted_call(self, *args: Any, **kwargs: Any) -> object:
        if not self._module.training or self._counting():
            return self._uncounted(*args, **kwargs)
        thread = self._thread
        thread.owners.clear()  # an earlier call that raised may have left entries
        thread.modes.clear()
        mode = _Counting(self)
        with mode:
            self.enter_module("")
            outputs = self._uncounted(*args, **kwargs)
            self.leave_module(self._module, outputs)
        self._add(mode)
        return outputs

    def enter_module(self, name: str) -> None:
        if self._counting():
            self._thread.owners.append(_Owner(name, current_backward(), True, _next_sequence_number()))

    def leave_module(self, module: torch.nn.Module, outputs: object) -> None:
        """End the forward of a module; ``outputs`` is None if it raised."""
        owners = self._thread.owners
        if not (self._counting() and owners and owners[-1].is_forward):
            return
        owner = owners.pop()
        if torch.is_grad_enabled():
            # A module may store a tensor as an attribute, such as an auxiliary loss, and not return it.
            attributes = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
            self._watch_nodes(owner, [*find_in_objects(outputs), *attributes])

    def _watch_nodes(self, owner: _Owner, tensors: Iterable[torch.Tensor]) -> None:
        """Count the backward of the nodes that ``owner`` has made, except nodes that a submodule owns already."""
        todo = [tensor.grad_fn for tensor in tensors]
        seen: set[int] = set()
        while todo:
            node: Any = todo.pop()
            if node is None or type(node).__name__ == "AccumulateGrad":
                continue
            number = node._sequence_nr()
            # Sequence numbers only grow: a node with a smaller one existed before this forward, and so did its inputs.
            if number < owner.first or number in seen:
                continue
            seen.add(number)
            todo += [following for following, _ in node.next_functions]
            if _MARK not in node.metadata:
                node.metadata[_MARK] = True
                node.register_prehook(_hook(self.enter_node, owner.module))
                node.register_hook(_hook(self.leave_node))

    # ---------------------------------------------------------------- backward

    def enter_node(self, module: str) -> None:
        if not self._open:
            return
        mode = None if self._counting() else _Counting(self)
        self._thread.enter_node(module, mode)
        if mode is not None:
            mode.__enter__()

    def leave_node(self) -> None:
        thread = self._thread
        if not (self._open and thread.modes and thread.owners):
            return
        thread.owners.pop()
        mode = thread.modes.pop()
        if mode is not None:
            mode.__exit__(None, None, None)
            self._add(mode)

    # ---------------------------------------------------------------- counting

    def current_owner(self) -> tuple[str, str]:
        """Return the owner of an operator that runs now: (module, FORWARD, BACKWARD or RECOMPUTED)."""
        thread, task = self._thread, current_backward()
        owner = thread.owners[-1] if thread.owners else _Owner("", _no_graph_task, True)
        if task == _no_graph_task:
            return owner.module, FORWARD
        # Inside backward, an operator belongs to a recomputed forward if a module's forward runs. It also does if
        # gradients are enabled although this backward was started without create_graph, because checkpointing enables
        # them.
        inside = owner.is_forward and owner.task != _no_graph_task
        again = inside or (torch.is_grad_enabled() and thread.first_order == task)
        return owner.module, RECOMPUTED if again else BACKWARD

    def _counting(self) -> bool:
        """Return True if the operators that run now are counted.

        The stack of modes says it, not a field of this object, because autograd passes only that stack to its threads.
        """
        modes = (torch._C._get_dispatch_stack_at(index) for index in range(torch._C._len_torch_dispatch_stack()))
        return any(isinstance(mode, _Counting) and mode.count is self for mode in modes)

    def _add(self, mode: _Counting) -> None:
        if self._open:
            self._flops.update(mode.flops)


@contextlib.contextmanager
def count_flops(call: CallHolder, module: torch.nn.Module) -> Iterator[FlopCount]:
    """Count the FLOPs of ``call``, which runs ``module``, inside the context. Fake tensors work as well."""
    count = FlopCount(call, module)
    count.start()
    try:
        yield count
    finally:
        count.stop()


class _Counting(TorchDispatchMode):
    """Dispatch mode that counts operators and runs them unchanged.

    torch's FlopCounterMode cannot be used: it tries to decompose every operator, hooks all modules of the process, and
    raises for unknown higher-order operators.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile as without this mode. It is on again when compiled code runs, and sees the operators called there."""
        return True

    def __init__(self, count: FlopCount) -> None:
        super().__init__()
        self.count = count
        self.flops: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        flops = self.count.operators.of_call(func, args, kwargs, out)
        if flops:
            self.flops[self.count.current_owner()] += flops
        return out


class _Enter(WeakHook[FlopCount]):
    def __init__(self, owner: FlopCount, name: str) -> None:
        super().__init__(owner)
        self._name = name

    def __call__(self, module: torch.nn.Module, args: object) -> None:
        count = self.owner()
        if count is not None:
            count.enter_module(self._name)


class _Leave(WeakHook[FlopCount]):
    def __call__(self, module: torch.nn.Module, args: object, outputs: object) -> None:
        count = self.owner()
        if count is not None:
            count.leave_module(module, outputs)


def _hook(call: Callable[..., None], *args: str) -> Callable[..., None]:
    """Return a hook that calls ``call(*args)`` and ignores its own arguments."""
    return lambda *_: call(*args)


_MARK = "zerolite_flops"  # key in a node's metadata: the node has its hooks


def _compiled(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the compiled modules and their submodules. They get no hooks, because torch.compile would trace them."""
    found: set[torch.nn.Module] = set()
    for module in model.modules():
        if module._compiled_call_impl is not None:
            found.update(module.modules())
        elif isinstance(inside := getattr(module, "_orig_mod", None), torch.nn.Module):
            found.update(inside.modules())
    return found
