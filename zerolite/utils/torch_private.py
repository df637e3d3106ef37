"""Every private name of torch that zerolite uses, each with the reason why no public one does.

No other file may use one, as ``tests/unit/test_torch_private.py`` checks. It also reads the names of this file, and
looks for each in the installed torch. All were seen in 2.6, 2.11 and 2.13.

Not counted as private: operators (``torch._foreach_add_``), the dicts that an ``nn.Module`` consists of
(``module._parameters``), a tensor's ``_version``, and what torch's own guide to its extension describes
(``TorchDispatchMode``, ``torch.utils._pytree``, ``_make_wrapper_subclass``, ``DisableTorchFunctionSubclass``).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorConverter as FakeTensorConverter
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from zerolite.utils.nested import find_tensors

Function = TypeVar("Function", bound=Callable[..., Any])

# -------------------------------------------------------------------- construction


@contextlib.contextmanager
def trunc_normal_leaves(leaves: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Context in which ``torch.nn.init.trunc_normal_`` leaves tensors alone for which ``leaves`` returns True.

    It reads the values that it draws, and fake tensors have none. Models import the public function before a plan could
    replace it, and it calls this one.
    """
    init: Any = torch.nn.init
    draw = torch.nn.init._no_grad_trunc_normal_

    def draw_or_leave(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if leaves(tensor) else draw(tensor, *args, **kwargs)

    init._no_grad_trunc_normal_ = draw_or_leave
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = draw


# -------------------------------------------------------------------- autograd

current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward that this thread runs; -1 outside of one.

A hook must know if a forward is the recomputation of a checkpoint, and which of several backwards it runs in. Threads
of autograd have no state of their own that would tell.
"""


after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Let autograd call a function at the end of the backward that runs now.

No hook knows that its gradient is the last one: which parameters get a gradient is known only then.
"""


will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Return True if the backward that this thread runs will run a node of its graph.

The ``needs_input_grad`` of an autograd function is that of its forward. A backward for some tensors only
(``torch.autograd.grad``, a pipeline that splits its backwards) would compute, and send, what it does not need. Raises
RuntimeError for a leaf that torch.autograd.grad was asked for.
"""


next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Return the number of the next node that this thread adds to a graph; see :func:`sequence_number`."""


def sequence_number(node: Any) -> int:
    """Return the number of a node of a graph, which grows from node to node.

    The nodes of a module's forward have larger ones than those before it. Nothing else tells them apart.
    """
    return int(node._sequence_nr())


current_node: Callable[[], Any] = torch._C._current_autograd_node
"""Return the node of a graph that this thread runs in a backward; None outside of one. A plan names its module."""


transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
"""Return the depth of torch.func's transforms around this call; None outside of them.

Their tensors stand for others, so stage 3 cannot gather inside.
"""

# -------------------------------------------------------------------- tensors

as_plain_tensors: Any = torch._C.DisableTorchFunctionSubclass
"""Context for the engine's own work, in which torch does not ask for the values of absent parameters."""

without_functions: Any = torch._C.DisableTorchFunction
"""Context in which torch calls neither overrides of tensor classes nor function modes: ``zero.Init``'s would gather."""


def storage_users(storage: torch.UntypedStorage) -> int:
    """Return how many tensors, graphs and Python objects hold the memory of ``storage``.

    Values that another tensor or a graph still reads must not be freed, nor still be in flight.
    """
    return int(torch._C._storage_Use_Count(storage._cdata))


_sources: weakref.WeakValueDictionary[int, Source] = weakref.WeakValueDictionary()  # by storage of a deferred tensor
_operators: list[torch.library.Library] = []  # what it has registered lasts as long as the object


class Source(Protocol):
    """Source of the values of deferred tensors."""

    def wait_in_operator(self) -> None:
        """Wait for the values, in an operator that reads them. Parameters have them then."""

    def values_of(self, alias: torch.Tensor) -> torch.Tensor:
        """Return the values of another tensor that has the data of such a parameter, or of a view of that data."""


@functools.cache
def _deferred_keys() -> Any:
    """Return the set of the one dispatch key of deferred tensors, and register their operators the first time."""
    key: Any = torch._C._parse_dispatch_key("DeferredInit")
    if key is None:
        raise RuntimeError(f"torch {torch.__version__} has no dispatch key DeferredInit")
    operators = torch.library.Library("_", "IMPL")
    operators.fallback(_run_with_values, "DeferredInit")
    _operators.append(operators)
    return torch._C.DispatchKeySet(key)


class _Deferred(torch.Tensor):
    __torch_dispatch__ = None  # type: ignore[assignment]  # ``_make_wrapper_subclass`` asks for it; nothing calls it


def deferred_tensor(like: torch.Tensor, source: Source, message: str) -> torch.Tensor:
    """Return a tensor with the geometry of ``like`` and without memory, to be the data of a parameter for a while.

    Every operator that is given the parameter asks ``source`` first, from Python or C++, in a function of TorchScript
    or a transform of torch.func. A pointer to the memory cannot be had past operators. If torch
    is built with CUDA, ``message`` is the error; otherwise torch says that no memory has been allocated.

    A class with ``__torch_function__`` sees only what Python gives the parameter to, and one with
    ``__torch_dispatch__`` cannot be assigned to a parameter that exists. The dispatch key is one that torch leaves to
    others: torchdistx had it, for values that come later. It works in no dispatch mode; torch raises there.

    Raises:
        RuntimeError: this torch has no such key, or another library has taken its operators.
    """
    made: Any = torch.Tensor._make_wrapper_subclass(
        _Deferred,
        like.shape,
        like.stride(),
        like.storage_offset(),
        dtype=like.dtype,
        device=like.device,
        storage_size=like.untyped_storage().nbytes(),
        _extra_dispatch_keys=_deferred_keys(),
    )
    storage = made.untyped_storage()._cdata
    torch._C._set_throw_on_mutable_data_ptr(made)
    if hasattr(torch._C, "_set_storage_data_ptr_access_error_msg"):
        torch._C._set_storage_data_ptr_access_error_msg(storage, message)
    _sources[storage] = source
    return cast(torch.Tensor, made)


def _is_deferred(tensor: torch.Tensor) -> bool:
    keys: Any = torch._C._dispatch_keys(tensor)
    return bool((keys & _deferred_keys()).raw_repr())


def undeferred() -> contextlib.AbstractContextManager[Any]:
    """Context in which operators take deferred tensors as they are, and must not touch their values."""
    guard: contextlib.AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(_deferred_keys())
    return guard


def _run_with_values(operator: Callable[..., object], *args: Any, **kwargs: Any) -> object:
    with as_plain_tensors():
        for tensor in find_tensors((args, kwargs), torch.Tensor):
            if not _is_deferred(tensor):
                continue
            source = _sources.get(tensor.untyped_storage()._cdata)
            if source is None:
                raise RuntimeError(
                    f"{operator}: expected a tensor with values, got an alias of a parameter that C++ code has made "
                    "while the parameter's values were on their way, and whose engine has ended: keep the engine, or "
                    "make the alias after engine.module"
                )
            source.wait_in_operator()
            if _is_deferred(tensor):
                with undeferred():
                    tensor.data = source.values_of(tensor)
    return operator(*args, **kwargs)


def swap_tensor(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange device, memory and dtype of two parameters. They stay the same objects, with their attributes.

    ``torch.utils.swap_tensors`` exchanges attributes too, and refuses tensors with weak references.
    """
    torch._C._swap_tensor_impl(one, other)


# -------------------------------------------------------------------- operators and modules

foreach_types: list[type[torch.Tensor]] = torch.utils._foreach_utils._foreach_supported_types
"""The classes of tensors for which torch calls its _foreach functions; DTensor adds itself in the same way.

With the class of ``p.grad`` in it, ``clip_grad_norm_`` makes one call for all gradients, a tenth of the time.
"""

CALL, COMPILED_CALL = "_call_impl", "_compiled_call_impl"
"""Attributes that the call of an nn.Module runs: the second, if torch.compile has set it, and otherwise the first.

Hooks cannot replace a call together with the hooks that it runs. A checkpointed module does, and a module whose
parameters are on another pipeline stage.
"""

# -------------------------------------------------------------------- dispatch

_NO_CONTEXT = contextlib.nullcontext()
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def undispatched() -> contextlib.AbstractContextManager[Any]:
    """Hide operators of the engine from dispatch modes.

    Selective checkpointing is a mode that records all operators. The engine's are none of the forward that is repeated.
    """
    return _disable_current_modes() if _modes() else _NO_CONTEXT


def fake_mode() -> FakeTensorMode | None:
    """Return the active mode that makes tensors without memory; None if there is none.

    Those tensors are torch's only ones that have a device, shapes and no memory. The plan of a model runs the engine on
    them.
    """
    mode: FakeTensorMode | None = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode


as_meta_tensors: Any = torch._C._DisableTorchDispatch
"""Context in which operators see a fake tensor as the meta tensor that it is."""


def call_meta_kernel(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operator with fake tensors as torch's fake mode does, whose own way takes several times as long."""
    with as_meta_tensors(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(True)  # the guard restores it
        return function(*args, **kwargs)


def as_fake_tensor(meta: torch.Tensor, attributes: dict[str, Any]) -> FakeTensor:
    """Return a meta tensor as a FakeTensor on the CPU with ``attributes``. Its own constructor takes as long as the
    rest of an operator."""
    made: Any = torch.Tensor._make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=torch.device("cpu")
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(attributes)
    return cast(FakeTensor, made)


# -------------------------------------------------------------------- torch.compile

_eval_frame: Any = torch._C._dynamo.eval_frame


def untraced(function: Function) -> Function:
    """Exclude ``function`` and its calls from torch.compile.

    ``torch.compiler.disable`` does the same, but would import the compiler together with zerolite.
    """
    excluded: Any = function
    if hasattr(_eval_frame, "set_code_exec_strategy"):
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    else:  # torch 2.6

        @functools.wraps(function)
        def excluded(*args: Any, **kwargs: Any) -> object:
            before = _eval_frame.set_eval_frame(None)
            try:
                return function(*args, **kwargs)
            finally:
                _eval_frame.set_eval_frame(before)

        _eval_frame.skip_code(excluded.__code__)
    excluded._torchdynamo_disable = True  # excludes it also when a caller is traced
    return cast(Function, excluded)


def compiler_is_used() -> bool:
    """Return True if the program has called torch.compile, in any form.

    Its guards compare the classes of parameters. Only the compiler itself knows of what is compiled after
    ``initialize``, around a model or a function that uses it.
    """
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and any(map(callable, compiler.cached_backends.values()))


def before_scripting(notify: Callable[[torch.nn.Module], None]) -> None:
    """Call ``notify`` with every module that TorchScript is about to script or to trace.

    What is scripted reads parameters in C++, when it is saved, copied or frozen. ``torch.jit.script`` itself looks at
    its caller's frame, so it cannot be wrapped.
    """
    recursive: Any = torch.jit._recursive
    create = recursive.create_script_module

    @functools.wraps(create)
    def create_script_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        notify(module)
        return create(module, *args, **kwargs)

    recursive.create_script_module = create_script_module


def profiler_is_on() -> bool:
    """Return True if torch.profiler records.

    A collective of gloo must not outlive the profiler under which it was launched: it then writes into freed memory of
    torch (seen with 2.13: "double free or corruption").
    """
    return bool(torch.autograd._profiler_enabled())


# -------------------------------------------------------------------- process groups


def job_store() -> dist.Store:
    """Return the rendezvous store of the default group, also where the user has started torch.distributed."""
    return distributed_c10d._get_default_store()


def process_groups() -> MutableMapping[Any, str]:
    """Return torch's own dict of the names of all process groups of this process.

    torch names a new group by the length of this dict, so its length must be equal on the ranks that make one. No other
    list contains the groups that programs have made themselves.
    """
    return cast("MutableMapping[Any, str]", distributed_c10d._world.pg_names)


def backends_of(group: dist.ProcessGroup) -> Iterator[tuple[str, Any]]:
    """Yield type of device and backend of ``group``. Only the backend knows the timeout, and its destructor must run
    outside of torch's."""
    for device in group._device_types:
        yield device.type, group._get_backend(device)


def timeout_of(group: dist.ProcessGroup, default: timedelta) -> timedelta:
    """Return the time that ranks of ``group`` wait for each other in a collective."""
    for _, backend in backends_of(group):
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if timeout is not None:
            return cast(timedelta, timeout)
    return default


def launched_collectives(group: dist.ProcessGroup) -> int:
    """Return the number of collectives that this rank has launched on ``group``; 0 if its backend does not count.

    A program's own collectives inside a backward pass no code of zerolite.
    """
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return 0


# -------------------------------------------------------------------- pipelines


def run_schedule(schedule: Any, micro_batches: int, launch: Callable[..., Any] | None) -> None:
    """Run one step of a schedule whose stages know their micro-batches.

    torch's own ``step`` divides tensors and joins outputs. Nothing public replaces the messages of a schedule.

    Args:
        launch: sends a batch of messages; None: torch's own function.
    """
    from torch.distributed.pipelining import schedules  # takes a while: not before there is a pipeline

    module: Any = schedules
    before = module._batch_p2p
    module._batch_p2p = launch or before
    try:
        schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches, [None] * micro_batches)
    finally:
        module._batch_p2p = before


def schedules_wait_for_all() -> bool:
    """Return False if schedules wait only for the last message of a batch, as those of torch 2.6 do."""
    from torch.distributed.pipelining import schedules

    return hasattr(schedules, "_wait_batch_p2p")


def backward_of_inputs(
    outputs: list[torch.Tensor],
    gradients: list[torch.Tensor],
    inputs: list[torch.Tensor],
    parameters: Iterator[torch.nn.Parameter],
) -> list[dict[str, Any]]:
    """Run the part of a stage's backward that the stage before it waits for. Returns what
    :func:`backward_of_weights` continues with.

    Schedules without a bubble are made of these two, and torch has no other interface to them.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    return stage_backward_input(outputs, gradients, inputs, parameters)[1]


def backward_of_weights(parameters: Iterator[torch.nn.Parameter], groups: list[dict[str, Any]]) -> None:
    """Run the rest of a backward. It writes ``p.grad``, past the hooks of the parameters."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(parameters, groups)
