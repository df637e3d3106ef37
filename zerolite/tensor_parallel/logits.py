"""Vocabulary-parallel logits: a sharded tensor that behaves like the full one.

An operation that needs all logits of a token gathers them first; other operations work on the shard. See
:class:`VocabParallelLogits`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zerolite.comm import Communicator, collective
from zerolite.nn.logits_on_demand import Change, LogitsOnDemand, LogitsState
from zerolite.tensor_parallel import functions
from zerolite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from zerolite.utils.nested import Arguments, Function, Keywords


@collective
class VocabParallelLogits(LogitsOnDemand):
    """Logits [..., vocabulary], of which this rank has [..., ceil(vocabulary / ranks)].

    ``F.cross_entropy`` (nn.CrossEntropyLoss) with one target for each token is computed on the shards. The dtype or the
    leading dimensions may change before, and the logits may be multiplied by a number. Every other operation first
    gathers the logits, once, and continues with an ordinary tensor. So results are always those of the full logits.
    """

    _state: _Shard

    @staticmethod
    def of(local: Tensor, comm: Communicator, vocabulary: int) -> VocabParallelLogits:
        """Return the logits with this rank's shard ``local``, [..., ceil(vocabulary / ranks)], padded at the end."""
        return _wrapped(_Shard(local, comm, vocabulary))

    @collective
    def gathered(self) -> Tensor:
        """Return an ordinary tensor with all logits."""
        return self._state.whole()


class _Shard(LogitsState):
    """This rank's part of one VocabParallelLogits.

    Attributes:
        local: this rank's logits.
        full: the gathered logits, which replace ``local`` as soon as they exist.
        aliased: the ``local`` of another object shares this memory.
    """

    def __init__(self, local: Tensor, comm: Communicator, vocabulary: int, aliased: bool = False) -> None:
        self.local, self.comm, self.vocabulary, self.aliased = local, comm, vocabulary, aliased
        self.shape, self.dtype, self.device = (*local.shape[:-1], vocabulary), local.dtype, local.device
        self.full: Tensor | None = None

    @property
    def is_whole(self) -> bool:
        return self.full is not None

    def whole(self) -> Tensor:
        if self.full is None and self.local.requires_grad and not torch.is_grad_enabled():
            return self.values()  # without a graph they must not take the place of these logits
        if self.full is None:
            self.full = _without_padding(functions.gather(self.local, self.comm), self.vocabulary)
        return self.full

    def values(self) -> Tensor:
        full = functions.gather(self.local.detach(), self.comm) if self.full is None else self.full.detach()
        return _without_padding(full, self.vocabulary)

    def change_elements(self, change: Change) -> VocabParallelLogits:
        return self.change_rows(change)

    def change_rows(self, change: Change) -> VocabParallelLogits:
        local = change(self.local)
        # A view shares memory with these logits: a write into one of them would have to reach the other.
        same = local.untyped_storage() is self.local.untyped_storage()
        self.aliased = self.aliased or same
        return _wrapped(_Shard(local, self.comm, self.vocabulary, same))

    def describe(self, function: Function, args: Arguments, kwargs: Keywords) -> object:
        return function(self.local, *args, **kwargs)

    def cross_entropy(self, target: Tensor, options: dict[str, Any]) -> Tensor:
        rows = self.local.reshape(-1, self.local.shape[-1])
        losses = vocab_parallel_cross_entropy(rows, target.reshape(-1), self.comm, self.vocabulary, **options)
        return losses.reshape(target.shape) if options["reduction"] == "none" else losses

    def before_write(self, name: str) -> None:
        """Raise RuntimeError for a write to memory that another object shares: it would go to the gathered copy."""
        if self.aliased:
            raise RuntimeError(
                f"expected no {name} on a view of logits that are sharded over tensor-parallel ranks; write to a copy, "
                "logits.gathered().clone()"
            )


def _wrapped(state: _Shard) -> VocabParallelLogits:
    logits: VocabParallelLogits = _FullLogits.apply(state.local, state)
    return logits


class _FullLogits(torch.autograd.Function):
    """Autograd function that returns the full logits as a tensor without memory.

    So code that ignores ``__torch_function__``, such as an autograd function, is differentiated as with ordinary
    logits.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, state: _Shard) -> Tensor:
        ctx.shard = state.comm.rank * local.shape[-1], local.shape[-1], state.vocabulary
        return VocabParallelLogits(state)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> object:
        start, length, vocabulary = ctx.shard
        start = min(start, vocabulary)
        local_gradient = gradient.narrow(-1, start, min(length, vocabulary - start))
        return F.pad(local_gradient, (0, length - local_gradient.shape[-1])), None


<<<<<<< HEAD
def _gathered(value: Any, how: Callable[[_State], Tensor] = _State.gathered) -> Any:
    if isinstance(value, VocabParallelLogits):
        return how(value._state)
    if type(value) in (tuple, list):
        return type(value)(_gathered(element, how) for element in value)
    if type(value) is dict:
        return {key: _gathered(element, how) for key, element in value.items()}
    return value


def _values(state: _State) -> Tensor:
    """Return the values of the full logits, below autograd."""
    # Not state.gathered(): the gathered tensor would have no graph, and later calls would get it.
    full = functions.gather(state.local.detach(), state.comm) if state.full is None else state.full.detach()
    return _without_padding(full, state.vocabulary)


def _without_padding(full: Tensor, vocabulary: int) -> Tensor:
    return full if full.shape[-1] == vocabulary else full.narrow(-1, 0, vocabulary).contiguous()


def _refuse_lost_writes(func: Function, first: VocabParallelLogits | None) -> None:
    """Raise RuntimeError for an in-place write to memory that another object shares.

    The write would go to the gathered copy, and the other object would not get it.
    """
    name = getattr(func, "__name__", "")
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if writes and first is not None and first._state.aliased and first._state.full is None:
        raise RuntimeError(
            f"expected no {name} on a view of logits that are sharded over tensor-parallel ranks; write to a copy, "
            "logits.gathered().clone()"
        )


# Computes an operation on the shard, or returns NotImplemented if this call needs the full logits.
_Handler = Callable[["_State", Function, Arguments, Keywords], object]
_LOCAL_OPS: dict[Function, _Handler] = {}
# The wrapper itself handles these, with the full shape.
_METADATA: set[Function] = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.__len__,
}


def _computed_locally(*functions: Function) -> Callable[[_Handler], _Handler]:
    def register(handler: _Handler) -> _Handler:
        _LOCAL_OPS.update(dict.fromkeys(functions, handler))
        return handler

    return register


@_computed_locally(
    *(
        getattr(Tensor, name).__get__
        for name in "requires_grad grad_fn is_leaf dtype device is_cuda is_cpu is_meta layout is_sparse".split()
    ),
    Tensor.is_floating_point,
    torch.is_floating_point,
    Tensor.is_complex,
    torch.is_complex,
    Tensor.element_size,
    Tensor.get_device,
    Tensor.is_inference,
    Tensor.register_hook,
    Tensor.is_contiguous,
)
def _metadata_of_the_shard(state: _State, func: Function, args: Arguments, kwargs: Keywords) -> object:
    return func(state.local, *args, **kwargs)


@_computed_locally(
    Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.contiguous, Tensor.clone, Tensor.detach
)
@_computed_locally(
    Tensor.to, Tensor.type_as, torch.clone, torch.detach, Tensor.cpu, Tensor.cuda, Tensor.tanh, torch.tanh
)
def _same_shape(state: _State, func: Function, args: Arguments, kwargs: Keywords) -> object:
    made = func(state.local, *_gathered(args), **_gathered(kwargs))
    # The ranks may have no backend to gather on another device later, so gather now.
    return state.like(made) if made.device == state.local.device else NotImplemented


@_computed_locally(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div, Tensor.__truediv__, torch.mul, torch.div)
@_computed_locally(Tensor.true_divide, torch.true_divide)
def _scale(state: _State, func: Function, args: Arguments, kwargs: Keywords) -> object:
    if kwargs or len(args) != 1 or not isinstance(args[0], (int, float)):
        return NotImplemented
    return state.like(func(state.local, args[0]))


@_computed_locally(Tensor.view, Tensor.reshape, torch.reshape)
def _view(state: _State, func: Function, args: Arguments, kwargs: Keywords) -> object:
    if kwargs or not args or isinstance(args[0], torch.dtype):
        return NotImplemented
    sizes = list(args[0]) if len(args) == 1 and not isinstance(args[0], int) else list(args)
    if not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    product, total = math.prod(size for size in sizes if size != -1), math.prod(state.shape)
    if sizes.count(-1) > 1 or not product or (total % product if -1 in sizes else total != product):
        return NotImplemented
    shape = [total // product if size == -1 else size for size in sizes]
    if shape[-1] != state.vocabulary:
        return NotImplemented
    return state.like(func(state.local, (*shape[:-1], state.local.shape[-1])))


@_computed_locally(Tensor.view_as)
def _view_as(state: _State, func: Function, args: Arguments, kwargs: Keywords) -> object:
    return _view(state, Tensor.view, (tuple(args[0].shape),), kwargs)


@_computed_locally(Tensor.flatten, torch.flatten)
def _flatten(state: _State, func: Function, args: Arguments, kwargs: Keywords) -> object:
    arguments = dict(zip(("start_dim", "end_dim"), args, strict=False)) | kwargs
    first, last = arguments.get("start_dim", 0), arguments.get("end_dim", -1)
    dims = len(state.shape)
    if not (-dims <= last < dims) or last % dims == dims - 1:
        return NotImplemented
    return state.like(func(state.local, first, last))


@_computed_locally(Tensor.__getitem__)
def _slice(state: _State, func: Function, args: Arguments, kwargs: Keywords) -> object:
    """Index leading dimensions; the last one must stay complete."""
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if not all(entry is Ellipsis or type(entry) in (int, slice) for entry in index) or index.count(Ellipsis) > 1:
        return NotImplemented
    named = len(index) - index.count(Ellipsis)
    reaches_last = named >= len(state.shape) or (Ellipsis in index and index[-1] is not Ellipsis)
    if reaches_last and index[-1] != slice(None):
        return NotImplemented
    return state.like(func(state.local, args[0]))


@_computed_locally(F.cross_entropy)
def _cross_entropy(state: _State, func: Function, args: Arguments, kwargs: Keywords) -> object:
    bound = _SIGNATURE.bind(None, *args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    target = arguments["target"]
    unusual = (
        arguments["weight"] is not None or arguments["size_average"] is not None or arguments["reduce"] is not None
    )
    if unusual or isinstance(target, VocabParallelLogits) or target.is_floating_point():
        return NotImplemented
    if len(state.shape) > 2 or target.shape != state.shape[:-1]:
        return NotImplemented
    losses = vocab_parallel_cross_entropy(
        state.local.reshape(-1, state.local.shape[-1]),
        target.reshape(-1),
        state.comm,
        state.vocabulary,
        ignore_index=arguments["ignore_index"],
        reduction=arguments["reduction"],
        label_smoothing=arguments["label_smoothing"],
    )
    return losses.reshape(target.shape) if arguments["reduction"] == "none" else losses


_SIGNATURE = inspect.signature(F.cross_entropy)
=======
def _without_padding(full: Tensor, vocabulary: int) -> Tensor:
    return full if full.shape[-1] == vocabulary else full.narrow(-1, 0, vocabulary).contiguous()
>>>>>>> fabe4778 (Losses over tiles of tokens: a head's logits are never whole in memory)
