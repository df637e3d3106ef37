"""Router replay: the experts that one forward has chosen are chosen by another, which computes their weights anew.

    block's forward:   logits ─▶ scores ─▶ topk ─▶ index [n, k] ─▶ weights ─▶ module of experts(hidden, index, weights)
                                            │                                              │
                                  replayed: index given,                          recorded: its index
                                  values = scores at index

Two forwards with equal weights can choose different experts: another engine rounds otherwise, and a tie of two scores
falls to either side. Reinforcement learning then trains experts that have not produced the tokens. So the policy's
update takes the choices of the old policy's forward, "routing replay" (arXiv:2507.18071, section 5.3), or those of the
inference engine, "rollout routing replay" (arXiv:2510.11370, section 4). Weights come from this forward's logits, with
gradients.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zerolite.comm import collective
from zerolite.comm.host_group import raise_together
from zerolite.moe.experts import SpreadCall, experts_in, routes_of, spread_calls
from zerolite.utils.nested import find_tensors
from zerolite.utils.torch_private import after_backward, current_backward

Choices = Mapping[str, Tensor] | Sequence[Tensor] | Tensor
Result = TypeVar("Result")

_TOPK = (torch.topk, Tensor.topk)
_MASKED_FILL = (torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_)


@contextlib.contextmanager
def record_routing(model: Any) -> Iterator[dict[str, Tensor]]:
    """Context that records the experts that forwards choose. It yields a dict, which its end fills::

        with torch.no_grad(), zerolite.moe.record_routing(model) as choices:
            model(input_ids=tokens)

    The dict has an entry for each module of experts, by its name in the model: int64 [n, k], the experts of the n
    tokens of this rank. Tokens of several forwards stand one after the other. What checkpointing computes again in a
    backward is not recorded again.

    Args:
        model: a model or an engine.

    Raises:
        ValueError: the model has no module of experts, or one that is not known.
    """
    recorded: dict[str, list[Tensor]] = {}

    def recorder(name: str) -> Any:
        def record(module: nn.Module, args: Any, kwargs: Any) -> None:
            if current_backward() < 0:
                recorded[name].append(routes_of(module, args, kwargs)[1].detach())

        return record

    choices: dict[str, Tensor] = {}
    with contextlib.ExitStack() as hooks:
        for name, module in _known_experts(_module_of(model), "record_routing").items():
            recorded[name] = []
            hooks.callback(module.register_forward_pre_hook(recorder(name), with_kwargs=True).remove)
        yield choices
    choices.update((name, torch.cat(parts).long()) for name, parts in recorded.items() if parts)


@contextlib.contextmanager
def replay_routing(model: Any, choices: Choices) -> Iterator[None]:
    """Context whose forwards choose the given experts::

        with zerolite.moe.replay_routing(engine, choices):
            loss = loss_of(engine(input_ids=tokens))
        engine.backward(loss)

    Every forward inside takes the same choices, and so does what checkpointing computes again in the backward of these
    forwards, also behind the end of the context. The weights of the experts are computed from the router's logits, with
    gradients. A selection that is limited to groups of experts is not limited again, but where a token chooses for
    itself. Losses that count choices by a topk of their own, as transformers' auxiliary loss does, count that one.

    Args:
        model: a model or an engine.
        choices: for each module of experts the experts of this rank's tokens [n, k], of any integer dtype and on any
            device, in the order of the forward's tokens; dimensions before the last one are flattened. Rows of -1
            choose for themselves. A mapping has the names of the modules, and those that it leaves out choose for
            themselves; a sequence, or a tensor [modules, n, k], has all of them in the model's order.

    Raises:
        ValueError: at the start for choices that do not fit the model; in a forward for another number of tokens or of
            experts of a token.
        RuntimeError: a block's router is not understood (its experts are not those of a ``topk`` in the block's
            forward), or the context has ended and no forward has come to one of the modules.

    With experts over ranks (``expert_parallel``) all ranks open the context, and errors of one rank are
    raised on all: at the start, or at the end, because a forward that stopped would leave the others in the exchange.
    """
    module = _module_of(model)
    replay = _together(module, lambda: _Replay(module, choices))
    opened = _opened.setdefault(module, [])
    opened.append(replay)
    _install(module, replay)
    try:
        yield
    finally:
        opened.remove(replay)
        _install(module, opened[-1] if opened else None)
    _together(module, replay.check)


@collective
def _together(model: nn.Module, action: Callable[[], Result]) -> Result:
    """Return the result of ``action()``. If ranks exchange tokens, it raises on all of them if it raises on one."""
    calls = list(spread_calls(model).values())
    if not calls:
        return action()
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    device = next(model.parameters()).device
    raise_together(calls[0].topology.world, device, "errors", error, "zerolite.moe.replay_routing", ValueError)
    return result


def _module_of(model: Any) -> nn.Module:
    return model if isinstance(model, nn.Module) else model.module


def _known_experts(model: nn.Module, function: str) -> dict[str, nn.Module]:
    found, unknown = experts_in(model)
    if unknown or not found:
        raise ValueError(
            f"zerolite.moe.{function}: expected a model whose experts are called with the experts of each token, got "
            f"{unknown[0] if unknown else 'one without experts'}; use zerolite.moe.ExpertParallel for them"
        )
    return found


# Replays of a model whose contexts are open, and the one whose hooks are installed. In a backward this is the replay of
# the forward that the backward belongs to.
_opened: weakref.WeakKeyDictionary[nn.Module, list[_Replay]] = weakref.WeakKeyDictionary()
_installed: weakref.WeakKeyDictionary[nn.Module, _Replay] = weakref.WeakKeyDictionary()


def _install(model: nn.Module, replay: _Replay | None) -> None:
    before = _installed.pop(model, None)
    if before is not None and before is not replay:
        before.remove()
    if replay is not None:
        _installed[model] = replay
        if before is not replay:
            replay.add_hooks()


class _Replay:
    """Choices of all layers of a model, and the hooks that let its forwards make them."""

    def __init__(self, model: nn.Module, choices: Choices) -> None:
        self._model = weakref.ref(model)
        self._hooks = contextlib.ExitStack()
        found = _known_experts(model, "replay_routing")
        if not isinstance(choices, Mapping):
            if len(choices) != len(found):
                raise _wrong(f"choices for {len(found)} modules of experts ({', '.join(found)})", f"{len(choices)}")
            choices = dict(zip(found, choices, strict=True))
        if unknown := [name for name in choices if name not in found]:
            raise _wrong(f"names of {', '.join(found)}", ", ".join(unknown))
        modules = dict(model.named_modules())
        parents = {name: modules.get(name.rpartition(".")[0]) if name else None for name in choices}
        if orphans := [name for name, parent in parents.items() if parent is None]:
            raise _wrong("experts in a block that has their router", f"the module '{orphans[0]}' itself")
        self._layers = [
            _Layer(name, found[name], cast(nn.Module, parents[name]), torch.as_tensor(given))
            for name, given in choices.items()
        ]
        _check_values(self._layers)
        self._around = [
            module for name, module in modules.items() if any(_is_inside(layer.name, name) for layer in self._layers)
        ]

    def add_hooks(self) -> None:
        for layer in self._layers:
            layer.add_hooks(self._hooks)
        for module in self._around:
            self._hooks.callback(module.register_forward_hook(self._watch).remove)

    def remove(self) -> None:
        self._hooks.close()

    def _watch(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Let the backward of a module's outputs replay: a checkpoint behind them may compute the module again."""
        if current_backward() < 0:
            for tensor in find_tensors(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: Tensor) -> None:
        model = self._model()
        if model is None or _installed.get(model) is self:
            return

        def end() -> None:
            opened = _opened.get(model)
            _install(model, opened[-1] if opened else None)

        _install(model, self)
        after_backward(end)

    def check(self) -> None:
        """Raise for layers that have not made the given choices. The host waits for the device."""
        if (error := next((layer.error for layer in self._layers if layer.error is not None), None)) is not None:
            raise error
        if missed := [layer.name for layer in self._layers if layer.wrong is None]:
            raise RuntimeError(
                f"zerolite.moe.replay_routing: expected a forward of '{missed[0]}' in the context, got none; call the "
                "model there, uncompiled, or leave the module out of the choices"
            )
        wrong = torch.stack([cast(Tensor, layer.wrong).cpu() for layer in self._layers]).tolist()
        if others := [layer.name for layer, is_wrong in zip(self._layers, wrong, strict=True) if is_wrong]:
            raise _not_understood(others[0])


class _Layer:
    """A module of experts, the block whose forward routes to it, and the choices that it is to make.

    Attributes:
        given: [n, k], int64.
        wrong: on the device, True if the experts were called with other choices; None before the first call.
        error: the first one of a forward that other ranks take part in. Forwards go on, with choices of their own.
    """

    wrong: Tensor | None = None
    error: Exception | None = None

    def __init__(self, name: str, experts: nn.Module, block: nn.Module, given: Tensor) -> None:
        if given.dim() < 2 or given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise _wrong(f"integers [n, k] for '{name}'", f"{given.dtype} {list(given.shape)}")
        self.name, self._experts, self._block = name, experts, block
        given = given.detach().reshape(-1, given.shape[-1]).long()
        self.given = given.clone() if given.is_inference() else given  # autograd saves it
        call = vars(experts).get("forward")
        self._is_spread = isinstance(call, SpreadCall)
        self.number = call.experts if isinstance(call, SpreadCall) else int(cast(Any, experts).num_experts)
        self._mode: _Choose | None = None

    def add_hooks(self, hooks: contextlib.ExitStack) -> None:
        hooks.callback(self._leave, self._block, (), None)  # an interrupt in a forward calls no hooks
        hooks.callback(self._block.register_forward_pre_hook(self._enter).remove)
        hooks.callback(self._experts.register_forward_pre_hook(self._arrive, with_kwargs=True).remove)
        # Called after an error too: a checkpoint ends a forward by one as soon as it has what it needs.
        hooks.callback(self._block.register_forward_hook(self._leave, always_call=True).remove)

    def fail(self, error: Exception) -> None:
        """Raise ``error``, or keep it for the end of the context, where all ranks raise it."""
        if not self._is_spread:
            raise error
        self.error = self.error or error

    def _enter(self, block: nn.Module, args: Any) -> None:
        self._mode = _Choose(self)
        self._mode.__enter__()

    def _leave(self, block: nn.Module, args: Any, outputs: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None

    def _arrive(self, experts: nn.Module, args: Any, kwargs: Any) -> None:
        if self._mode is None and current_backward() >= 0:
            return  # a checkpoint around the experts alone keeps its inputs
        chosen = None if self._mode is None else self._mode.chosen
        _, index, _ = routes_of(experts, args, kwargs)
        if index.shape[1:] != self.given.shape[1:]:
            self.fail(_wrong(f"{index.shape[1]} experts of a token for '{self.name}'", self.given.shape[1]))
        elif self._mode is None or chosen is None or chosen.numel() != index.numel():
            self.fail(_not_understood(self.name))
        else:
            self._mode.ended = True
            wrong = (chosen.view(index.shape) != index).any()
            self.wrong = wrong if self.wrong is None else self.wrong | wrong


class _Choose(TorchFunctionMode):
    """Mode in which a block's ``topk`` over all experts chooses what is given.

    Attributes:
        chosen: the choices that the latest one has returned.
        ended: the experts have been called; what comes now is no routing.
    """

    _limited: tuple[Tensor, Tensor] | None = None  # scores, and those that count where a token chooses for itself
    chosen: Tensor | None = None
    ended = False

    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.ended and (function in _TOPK or function in _MASKED_FILL):
            scores = args[0] if args else kwargs.get("input", kwargs.get("self"))
            if isinstance(scores, Tensor) and scores.dim() > 1 and scores.shape[-1] == self._layer.number:
                more = args[1:], {key: value for key, value in kwargs.items() if key not in ("input", "self")}
                if function in _MASKED_FILL:
                    self._limited = scores, torch.masked_fill(scores, *more[0], **more[1])
                    return scores  # it limits the choice to groups of experts: the scores of others count too
                if _takes(self._layer.given.shape[1], scores, args, kwargs):
                    ranked = self._limited[1] if self._limited and self._limited[0] is scores else scores
                    return self._choose(scores, function(ranked, *more[0], **more[1])[1])
        return function(*args, **kwargs)

    def _choose(self, scores: Tensor, own: Tensor) -> Any:
        layer = self._layer
        if own.numel() != layer.given.numel():
            tokens = own.numel() // own.shape[-1]
            layer.fail(_wrong(f"the choices of {tokens} tokens for '{layer.name}'", len(layer.given)))
            self.chosen = own
            return torch.return_types.topk((scores.gather(-1, own), own))
        layer.given = layer.given.to(own.device)
        given = layer.given.view(own.shape)
        self.chosen = torch.where(given < 0, own, given)
        return torch.return_types.topk((scores.gather(-1, self.chosen), self.chosen))


def _takes(chosen: int, scores: Tensor, args: Any, kwargs: Any) -> bool:
    """Return True if arguments of ``topk`` ask for so many experts of each token."""
    k, dim = args[1] if len(args) > 1 else kwargs.get("k"), args[2] if len(args) > 2 else kwargs.get("dim", -1)
    return k == chosen and dim in (-1, scores.dim() - 1)


def _check_values(layers: list[_Layer]) -> None:
    """Raise ValueError for numbers that are no experts, and for a token that has one twice. The host waits once."""
    layers = [layer for layer in layers if layer.given.numel()]
    rows = [layer.given.sort(-1).values for layer in layers]
    beyond = [(row[:, 0] < -1) | (row[:, -1] >= layer.number) for row, layer in zip(rows, layers, strict=True)]
    twice = [
        ((row[:, 1:] == row[:, :-1]) & (row[:, -1:] >= 0)).any(-1) | (row[:, 0] < 0) & (row[:, -1] >= 0) for row in rows
    ]
    found = torch.stack([torch.stack([one.any(), two.any()]).cpu() for one, two in zip(beyond, twice, strict=True)])
    for layer, (is_beyond, is_twice), two in zip(layers, found.tolist(), twice, strict=True):
        if is_beyond:
            bounds = f"{int(layer.given.min())} to {int(layer.given.max())}"
            raise _wrong(f"experts 0 to {layer.number - 1} of '{layer.name}', or -1", bounds)
        if is_twice:
            row = int(two.nonzero()[0])
            wanted = f"different experts for a token of '{layer.name}', or -1 for all of them"
            raise _wrong(wanted, f"{layer.given[row].tolist()} for token {row}")


def _is_inside(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def _wrong(expected: str, got: object) -> ValueError:
    return ValueError(f"zerolite.moe.replay_routing: expected {expected}, got {got}")


def _not_understood(name: str) -> RuntimeError:
    return RuntimeError(
        f"zerolite.moe.replay_routing: expected the block around '{name}' to call it with the experts that one topk "
        "over all of them has chosen, got others; leave the module out of the choices, or choose by topk there"
    )
