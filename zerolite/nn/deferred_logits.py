"""Logits of a head that has not computed yet: its loss goes over tiles of tokens."""

from __future__ import annotations

import logging
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zerolite.nn.logits_on_demand import Cast, Change, LogitsOnDemand, LogitsState
from zerolite.nn.tiled_loss import Head, LossOptions, cross_entropy_of_head
from zerolite.utils.nested import Arguments, Function, Keywords
from zerolite.utils.torch_private import CALL, as_plain_tensors

logger = logging.getLogger("zerolite")

OLD_LOGITS = (
    "expected logits to be read before the update that follows their loss, got a read after it: they were not kept, "
    'and the head has new weights now. Read them earlier, or set "tiled_loss": false'
)


class DeferredLogits(LogitsOnDemand):
    """Logits [..., vocabulary] of a head that computes when they are needed.

    ``F.cross_entropy`` with one target for each token computes them tile by tile. Casts, views, slices of tokens,
    multiplications by numbers and tanh (a soft cap) may come before. Every other operation computes all logits, once.
    """

    _state: _Deferred

    @staticmethod
    def of(call: HeadCall) -> DeferredLogits:
        """Return the logits of one call of a head."""
        like = torch.empty((*call.hidden.shape[:-1], call.vocabulary), dtype=call.dtype, device="meta")
        return _wrapped(_Deferred(call, (), like))

    @property
    def call(self) -> HeadCall:
        """The call of the head."""
        return self._state.call

    @property
    def state(self) -> _Deferred:
        """State behind these logits."""
        return self._state


class LossTiling:
    """State that the heads of one model share.

    Attributes:
        always: defer and tile logits of few tokens too. At stage 3 logits that are read later gather the head's weight,
            and a loss over tiles begins the head's backward at another place than whole logits do. So all ranks must
            do alike, whatever their numbers of tokens are.
        depth: forwards of the model under way.
        updates: updates of its weights so far.
    """

    def __init__(self, always: bool, logs: bool) -> None:
        """logs: this rank logs."""
        self.always, self.depth, self.updates = always, 0, 0
        self._logs = logs

    def on_weights_changed(self) -> None:
        self.updates += 1

    def on_all_logits(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Log what it costs that an operation needs all logits of more than a tile, once."""
        if self._logs:
            size = math.prod(shape) * dtype.itemsize / 2**30
            logger.warning(
                f"tiled_loss: an operation other than a cross entropy needs all logits, {list(shape)} in {dtype}: they "
                f'are computed for it and take {size:.3g} GiB. "tiled_loss": false keeps those of the loss instead'
            )
        self._logs = False


class HeadCall:
    """One call of a linear head, which is carried out when logits are needed, at first with the head's hooks.

    Hooks of stage 3 gather the head's parameters around it, once for all tiles. After the model's forward it uses the
    parameters as any other operation does (:attr:`ended`).

    Attributes:
        hidden: input of the head.
        vocabulary: number of outputs.
        dtype: of the logits.
        tile: tokens of a tile.
        tiling: what the heads of the model share.
        has_loss: a loss has been computed from these logits.
        ended: the model's forward has ended.
        warns: log that all logits are needed.
        states: all objects that stand for these logits or a change of them.
    """

    def __init__(self, head: torch.nn.Linear, hidden: Tensor, tile: int, tiling: LossTiling) -> None:
        self._head, self.hidden, self.tile, self.tiling = head, hidden, tile, tiling
        self._updates = tiling.updates
        self.vocabulary = head.out_features
        kind = hidden.device.type
        self._autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        is_cast = self._autocast is not None and hidden.dtype != torch.float64
        self.dtype: torch.dtype = self._autocast if is_cast and self._autocast is not None else hidden.dtype
        self.has_loss = self.ended = False
        self.warns = True
        self.states: weakref.WeakSet[_Deferred] = weakref.WeakSet()
        self._version = hidden._version
        self._logits: Tensor | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """Weight and bias."""
        return list(self._head.parameters(recurse=False))

    def run(self, function: Callable[[Tensor], Any] | None = None, recomputes: bool = False) -> Any:
        """Return ``function(hidden)`` in place of the head's forward; None: the logits, without keeping them.

        Args:
            recomputes: a backward computes the logits again, with the head's hooks.
        """
        if self.hidden._version != self._version:
            raise RuntimeError(
                "expected the input of the head to stay as it is until its loss is computed, got a change in place; "
                'change a copy, or set "tiled_loss": false'
            )
        with self._as_in_call():
            if self.ended and not recomputes:
                if self.tiling.updates != self._updates:
                    raise RuntimeError(OLD_LOGITS)
                return self._computed_late()
            call = getattr(type(self._head), CALL)
            if function is None:
                return call(self._head, self.hidden)
            self._head.__dict__["forward"] = function
            try:
                return call(self._head, self.hidden)
            finally:
                del self._head.__dict__["forward"]

    def _computed_late(self) -> Tensor:
        """Return the logits after the model's forward, by the parameters as they are."""
        head = self._head
        try:
            return F.linear(self.hidden, head.weight, head.bias)
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise  # out of memory keeps its type
            raise RuntimeError(
                f'{error}. It was needed for logits beside a loss, which were not kept: "tiled_loss": false keeps them'
            ) from error

    def end(self, with_loss: bool) -> None:
        """Note that the model's forward has ended. Logits without a loss are what it was called for."""
        self.ended, self.warns = with_loss, with_loss

    def _as_in_call(self) -> Any:
        kind = self.hidden.device.type
        return torch.autocast(kind, dtype=self._autocast, enabled=self._autocast is not None)

    def loss(self, changes: Change | None, rows: Change, target: Tensor, options: LossOptions) -> Tensor:
        """Return the loss over tiles.

        Args:
            changes: of a tile's logits.
            rows: changes ``hidden`` to the rows that have targets.
        """

        def compute(hidden: Tensor) -> Tensor:
            head = Head(self._head.weight, self._head.bias)
            return cross_entropy_of_head(rows(hidden), head, target, options, None, changes, self.tile)

        loss: Tensor = self.run(compute)
        return loss

    def logits(self) -> Tensor:
        """Return all logits, computed once."""
        if self._logits is None:
            self._warn()
            self._logits = self.run()
        return self._logits

    def values(self) -> Tensor:
        """Return all logits without a graph."""
        self._warn()
        with torch.no_grad():
            values: Tensor = self.run()
        return values

    def _warn(self) -> None:
        shape = (*self.hidden.shape[:-1], self.vocabulary)
        if self.warns and math.prod(shape[:-1]) > self.tile:
            self.tiling.on_all_logits(shape, self.dtype)


class _Deferred(LogitsState):
    """Changes of the logits of one call.

    Attributes:
        call: the call of the head.
        changes: (True for a change of elements and False for one of rows, the change), in their order.
        hooks: hooks for the whole logits, registered after the model's forward.
    """

    def __init__(
        self,
        call: HeadCall,
        changes: tuple[tuple[bool, Change], ...],
        like: Tensor,
        parent: tuple[_Deferred, Change] | None = None,
    ) -> None:
        """
        Args:
            like: a tensor without memory with the shape and strides of these logits.
            parent: the logits of which these are a change, and the change.
        """
        self.call, self.changes = call, changes
        self.shape, self.dtype, self.device = tuple(like.shape), like.dtype, call.hidden.device
        self.hooks: OrderedDict[int, Any] = OrderedDict()
        self._like, self._parent = like, parent
        self._whole: Tensor | None = None
        self._values: Tensor | None = None
        self._wrapper: weakref.ref[DeferredLogits] | None = None
        self._has_graph = False
        call.states.add(self)

    def set_wrapper(self, wrapper: DeferredLogits) -> None:
        """Set the tensor that has this state."""
        self._wrapper = weakref.ref(wrapper)
        with as_plain_tensors():
            self._has_graph = wrapper.requires_grad

    @property
    def is_whole(self) -> bool:
        return self._whole is not None or self._has_foreign_graph()

    def _has_foreign_graph(self) -> bool:
        """Return True if these logits were made without a graph and are the output of an autograd function: reentrant
        checkpointing. Their gradient must go through that function."""
        wrapper = None if self._has_graph or self._wrapper is None else self._wrapper()
        with as_plain_tensors():
            return wrapper is not None and wrapper.requires_grad

    def whole(self) -> Tensor:
        if self._has_foreign_graph() and torch.is_grad_enabled():
            assert self._wrapper is not None
            if self._whole is None or not self._whole.requires_grad:
                self._whole = _Values.apply(self._wrapper(), self)
            return self._whole
        if self._whole is None and self._has_graph and not torch.is_grad_enabled():
            return self.values()  # without a graph they must not take the place of these logits
        if self._whole is None:
            self._whole = self._computed()
            self._parent = self._values = None  # the logits before the change may be freed
            for hook in self.hooks.values():
                if self._whole.requires_grad:
                    self._whole.register_hook(hook)
        return self._whole

    def _computed(self) -> Tensor:
        if self._parent is None:
            return self.call.logits()
        parent, change = self._parent
        return change(parent.whole())

    def values(self) -> Tensor:
        if self._whole is not None:
            return self._whole.detach()
        if self._values is None:
            with torch.no_grad():
                self._values = self.replay(self.call.values())
        return self._values

    def replay(self, logits: Tensor) -> Tensor:
        """Return the changes of whole logits."""
        for _, change in self.changes:
            logits = change(logits)
        return logits

    def change_elements(self, change: Change) -> Any:
        if self.call.ended and not isinstance(change, Cast):
            return NotImplemented  # a copy must stay what it is after an update; the engine casts outputs
        return self._changed(True, change)

    def change_rows(self, change: Change) -> DeferredLogits:
        return self._changed(False, change)

    def _changed(self, elements: bool, change: Change) -> DeferredLogits:
        with as_plain_tensors():
            like = change(self._like)
        return _wrapped(_Deferred(self.call, (*self.changes, (elements, change)), like, (self, change)))

    def describe(self, function: Function, args: Arguments, kwargs: Keywords) -> object:
        if function is Tensor.is_contiguous:
            return self._like.is_contiguous(*args, **kwargs)
        if function is Tensor.register_hook:
            if not self.call.ended:
                return NotImplemented
            handle = RemovableHandle(self.hooks)
            self.hooks[handle.id] = args[0]
            return handle
        wrapper = None if self._wrapper is None else self._wrapper()
        with as_plain_tensors():
            return function(wrapper, *args, **kwargs)

    def cross_entropy(self, target: Tensor, options: dict[str, Any]) -> Any:
        call = self.call
        detached = any(change in (Tensor.detach, torch.detach) for _, change in self.changes)
        if call.ended or detached:
            return NotImplemented
        call.has_loss = True
        if target.numel() <= call.tile and not call.tiling.always:
            return F.cross_entropy(self.replay(call.run()), target, **options)  # the bits of plain PyTorch
        loss = call.loss(self._elementwise(), self._rows_of, target, LossOptions(**options))
        # Another tensor than the head's output: stage 3 begins the backward of a module at the gradient of its own.
        loss = loss.clone()
        return loss if torch.is_autocast_enabled(self.device.type) else loss.to(self.dtype)

    def _rows_of(self, hidden: Tensor) -> Tensor:
        for elements, change in self.changes:
            # A view of contiguous logits may not be one of the head's input.
            hidden = hidden if elements else change(hidden.contiguous())
        return hidden

    def _elementwise(self) -> Change | None:
        """Return the function of a tile's logits; None if it is nothing but a cast to a wider dtype."""
        changes = [change for elements, change in self.changes if elements and change is not Tensor.contiguous]
        casts = [change for change in changes if isinstance(change, Cast)]
        if len(casts) == len(changes):
            sizes = [self.call.dtype.itemsize, *(cast.dtype.itemsize for cast in casts)]
            if sizes == sorted(sizes) and (not casts or casts[-1].dtype is torch.float32):
                return None

        def apply(logits: Tensor) -> Tensor:
            for change in changes:
                logits = change(logits)
            return logits

        return apply

    def before_write(self, name: str) -> None:
        """Compute all other logits that come from this call, since these have the values from before the write."""
        with torch.set_grad_enabled(self._has_graph):
            for state in list(self.call.states):
                state.whole()


def _wrapped(state: _Deferred) -> DeferredLogits:
    call = state.call
    logits: DeferredLogits = _Computed.apply(call.hidden, *call.parameters, state)
    state.set_wrapper(logits)
    return logits


class _Computed(torch.autograd.Function):
    """The logits in the graph, for code that ignores ``__torch_function__``, such as an autograd function.

    Its backward is that of a checkpoint: it computes the logits again.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters_and_state: Any) -> Tensor:
        *parameters, state = parameters_and_state
        ctx.state, ctx.count = state, len(parameters)
        return DeferredLogits(state)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        state: _Deferred = ctx.state
        call = state.call
        hidden = call.hidden
        call.hidden = hidden.detach().requires_grad_(hidden.requires_grad)
        try:
            with torch.enable_grad():
                logits = state.replay(call.run(recomputes=True))
            torch.autograd.backward(logits, gradient)
            return (call.hidden.grad, *(None,) * (ctx.count + 1))
        finally:
            call.hidden = hidden


class _Values(torch.autograd.Function):
    """The whole logits as a function of the tensor that stands for them in a graph."""

    @staticmethod
    def forward(ctx: Any, wrapper: Tensor, state: _Deferred) -> Tensor:
        return state.values().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None
