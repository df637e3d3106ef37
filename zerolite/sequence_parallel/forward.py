"""The forward of an engine whose ranks have parts of each sequence: it is given whole sequences and cuts them."""

from __future__ import annotations

import inspect
import itertools
import zlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zerolite.comm import HostMaximum, collective
from zerolite.comm.initial_sync import content_hash
from zerolite.sequence_parallel import trial
from zerolite.sequence_parallel.attention import AttentionRanks, Parts, attending, current_parts
from zerolite.sequence_parallel.cut import Cut, Inputs, Rules, cut_inputs, targets_of
from zerolite.sequence_parallel.given_parts import first_tokens, take_parts
from zerolite.sequence_parallel.huggingface import chosen_attention
from zerolite.tensor_parallel.regions import fork_random_state
from zerolite.utils.accelerator import host_value
from zerolite.utils.nested import find_tensors
from zerolite.utils.torch_private import current_backward
from zerolite.zero.engine_parts import EngineParts

_STATE_IN_TIME = (nn.Conv1d, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_STATE_NAMES = ("A_log", "dt_bias", "time_decay")
_UNNAMED = "argument "  # beginning of the names of arguments that a forward takes as *args


def check_model(model: nn.Module) -> None:
    """Raise ValueError for a module that carries something along the sequence past the attention that is hooked."""
    for name, module in model.named_modules():
        state = next((key for key in _STATE_NAMES if key in module._parameters), None)
        if state is None:
            state = _length_of(module)
        if state is None and not isinstance(module, _STATE_IN_TIME):
            continue
        what = type(module).__name__ if state is None else f"{type(module).__name__} with '{state}'"
        raise ValueError(
            "sequence_parallel: expected a model in which tokens see each other by scaled_dot_product_attention, or by "
            f"Hugging Face's attention, alone, got '{name}' ({what}), of which each rank would compute a part; leave "
            "sequence_parallel out"
        )


def _length_of(module: nn.Module) -> str | None:
    """Return the setting by which a module of Hugging Face's computes with the length of the sequence that it is given,
    or counts positions itself, beyond what a trial of few tokens would show; None without one."""
    config = getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    flat = [parameters, *parameters.values()] if isinstance(parameters, dict) else []
    kinds = {part.get("rope_type", part.get("type")) for part in flat if isinstance(part, dict)}
    kinds.add(getattr(module, "rope_type", None) if isinstance(getattr(module, "rope_type", None), str) else None)
    for kind in ("dynamic", "longrope"):
        if kind in kinds:
            return f"rope_type={kind}"
    return "attn_temperature_tuning" if getattr(config, "attn_temperature_tuning", False) else None


@dataclass
class _Forward:
    """A forward that has run.

    Attributes:
        cut: how its sequences were divided.
        counted: labels of this rank's part that are counted; None if it had none yet.
    """

    cut: Cut
    counted: int | None


class SequenceForward:
    """Function that takes the place of the model in an engine's forward."""

    def __init__(self, parts: EngineParts, ranks: AttentionRanks) -> None:
        """
        Args:
            parts: of the engine.
            ranks: those that have the other parts of the same sequences.
        """
        topology, inputs = parts.topology, parts.config.sequence_parallel.inputs
        self._call, self._model, self._device = parts.call.call_module, parts.model, parts.device
        self._ranks, self._sequence, self._world = ranks, ranks.comm, topology.world
        # Inputs are compared with the step's statistics. Tensor-parallel ranks note them already.
        self._note_inputs = parts.note_inputs if topology.tensor.world_size == 1 else None
        self.takes_parts, self._takes_whole_in_eval = inputs != "whole", inputs == "parts in training"
        self._same = HostMaximum(ranks.comm)
        self._tried = self._compared = False
        self._positional, self._rules, self._takes_cache = _arguments_of(parts.model)
        self._latest: _Forward | None = None
        self._with_graph: _Forward | None = None  # the latest one that a backward may go through
        self._forwards = 0  # with a graph, since the last backward
        self._repeatable = True  # all of them are alike, as far as a checkpoint that repeats them must know

    @collective
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's part of its arguments, which are whole sequences or parts."""
        if self._takes_whole_in_eval and not self._model.training:
            return self._call(*args, **kwargs)
        recomputes = current_backward() != -1
        if not recomputes:
            self._compare(find_tensors((args, kwargs)))
        values = self._named(args, kwargs)
        inputs = self._cut(values)
        if not (self._tried or recomputes):
            self._tried = self._try(*self._whole_of(values, inputs.cut), len(args))
        restore = fork_random_state(self._device, self._sequence.rank) if self._model.training else None
        try:
            outputs = self._part(inputs, len(args))
        finally:
            if restore is not None:
                restore()
        self._latest = _Forward(inputs.cut, inputs.counted)
        if torch.is_grad_enabled() and not recomputes:
            self._repeatable = not self._forwards or (self._repeatable and _alike(self._with_graph, inputs.cut))
            self._with_graph = self._latest
            self._forwards += 1
        return outputs

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, positional ones first."""
        unnamed = (f"{_UNNAMED}{number}" for number in range(len(self._positional), len(args)))
        names = [*self._positional[: len(args)], *unnamed]
        values = {**dict(zip(names, args, strict=True)), **kwargs}
        if self._takes_cache and "use_cache" not in values:
            values["use_cache"] = False
        return values

    def _cut(self, values: dict[str, Any]) -> Inputs:
        if self.takes_parts:
            return take_parts(values, self._sequence, self._rules)
        return cut_inputs(values, self._sequence.world_size, self._sequence.rank, self._rules)

    def _whole_of(self, values: dict[str, Any], cut: Cut) -> tuple[dict[str, Any], Cut]:
        """Return whole sequences for the trial, and their cut. Where parts are given, they are made of the first tokens
        of each."""
        if not self.takes_parts:
            return values, cut
        tokens = trial.tokens_of_trial(cut) // cut.ranks
        short = Cut(tokens * cut.ranks, cut.ranks, cut.rank)
        return first_tokens(values, cut, tokens, self._sequence, self._rules), short

    def _part(self, inputs: Inputs, positional: int) -> Any:
        with attending(Parts(self._ranks, inputs.cut)):
            return self._run(inputs.values, positional)

    @collective
    @torch.no_grad()
    def _try(self, values: dict[str, Any], cut: Cut, positional: int) -> bool:
        """Compare the model's outputs on the first tokens of a batch, as parts and as a whole, in eval mode.

        Returns False if the sequences of some ranks are too short. Raises RuntimeError on all ranks if they differ.
        """
        tokens = trial.tokens_of_trial(cut)
        if HostMaximum(self._world).of([int(not tokens)])[0]:
            return False
        short = trial.inputs_of_trial(values, cut, tokens, self._rules.shifts_labels)
        training = [module for module in self._model.modules() if module.training]
        for module in training:  # eval() of some modules does more than that
            module.training = False
        try:
            with attending(None):
                whole = find_tensors(self._run(short, positional))
            inputs = cut_inputs(short, cut.ranks, cut.rank, self._rules)
            parts = find_tensors(self._part(inputs, positional))
        finally:
            for module in training:
                module.training = True
        tolerance = trial.tolerance_of(self._model, torch.is_autocast_enabled(self._device.type))
        difference = trial.find_difference(whole, parts, inputs, self._sequence, tolerance)
        if HostMaximum(self._world).of([int(bool(difference))])[0]:
            raise RuntimeError(
                "sequence_parallel: expected the same outputs for parts of a sequence as for all of it, got "
                f"{difference or 'others on some rank'}, on its first {tokens} tokens. Tokens must see each other by "
                "scaled_dot_product_attention or by Hugging Face's attention alone, positions must come from an "
                "argument position_ids, and labels in an argument labels, targets or shift_labels must belong to the "
                "token at their place; change the model, or leave sequence_parallel out"
            )
        return True

    def _run(self, values: dict[str, Any], positional: int) -> Any:
        """Call the model, as its caller has: with ``positional`` arguments, as far as each is still there."""
        names = [name for name in values if name.startswith(_UNNAMED)]
        names = [*itertools.takewhile(values.__contains__, self._positional[:positional]), *names]
        others = {name: value for name, value in values.items() if name not in names}
        return self._call(*(values[name] for name in names), **others)

    # ---------------------------------------------------------------- the same inputs

    def _compare(self, tensors: list[Tensor]) -> None:
        """Compare the inputs of the ranks that will take parts of them: shapes before each forward, values before the
        first one. Later the step's statistics compare the values. Where parts are given, only shapes are alike.

        Raises RuntimeError, in the first forward on all ranks of the job.
        """
        described = repr([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
        numbers = [zlib.crc32(described.encode())]
        if not (self._compared or self.takes_parts):
            hashes = [content_hash(tensor, self._device) for tensor in tensors]
            numbers += [int(host_value(torch.stack(hashes).sum())) >> 1] if hashes else [0]
        highest = self._same.of([*numbers, *(-number for number in numbers)])
        differs = any(high != -low for high, low in zip(highest[: len(numbers)], highest[len(numbers) :], strict=True))
        if not self._compared:
            differs = bool(HostMaximum(self._world).of([int(differs)])[0])
        self._compared = True
        if differs and self.takes_parts:
            raise RuntimeError(
                "engine(...): expected parts of equal shapes on all ranks that share sequences "
                "(sequence_parallel.inputs), got different ones; pad the sequences before they are cut"
            )
        if differs:
            raise RuntimeError(
                "engine(...): expected the same inputs on all ranks that have parts of the same sequences "
                "(sequence_parallel), got different ones; load data with engine.deepspeed_io or "
                "initialize(training_data=...), or give your sampler num_replicas=engine.data_parallel_world_size and "
                "rank=engine.data_parallel_rank"
            )
        if self._note_inputs is not None:
            self._note_inputs(tensors)

    # ---------------------------------------------------------------- labels and the backward

    def before_backward(self) -> None:
        """Raise RuntimeError, on all ranks, in a backward that is not the engine's: checkpoints would repeat attention
        over this rank's tokens alone."""
        if self.takes_parts and current_parts() is None:
            raise RuntimeError(
                "expected engine.backward(loss) with parts of sequences (sequence_parallel), got a backward by "
                "loss.backward() or torch.autograd; call engine.backward(loss)"
            )

    def weight(self) -> int:
        """Return how many labels of this rank's part the last forward has counted. Raises RuntimeError, on all ranks,
        if it had none."""
        return _counted_in(self._latest)

    def split(self, targets: Tensor) -> tuple[Tensor, int]:
        """Return this rank's part of ``targets``, [batch, length, ...], and how many of them are counted.

        The weight of the loss is then this number, unless the forward or an earlier call has counted labels.
        """
        if self._latest is None:
            raise RuntimeError(
                "engine.split_sequence: expected a forward of the inputs first, got none; call engine(...)"
            )
        part, counted = targets_of(targets, self._latest.cut)
        if self._latest.counted is None:  # else masks or labels for other uses would change the weight of the loss
            self._latest.counted = counted
        return part, counted

    def backward_of(self, weight: float | Tensor | None) -> tuple[Any, AbstractContextManager[None]]:
        """Return the weight of the backward that begins, and the context to run it in.

        Raises RuntimeError, on all ranks, if the weight is not known.
        """
        forwards, self._forwards = self._forwards, 0
        if weight is None and forwards != 1 and not self.takes_parts:
            _raise_unweighted(f"one after {forwards} forwards (run those of an evaluation under torch.no_grad())")
        if forwards > 1 and not self._repeatable:
            raise RuntimeError(
                "engine.backward: expected forwards of equal sequence lengths and without packed documents in one "
                "backward, which may repeat them, got different ones; call engine.backward once for each forward"
            )
        known = _counted_in(self._with_graph) if weight is None and not self.takes_parts else weight
        return known, attending(None if self._with_graph is None else Parts(self._ranks, self._with_graph.cut))


def _counted_in(forward: _Forward | None) -> int:
    if forward is None or forward.counted is None:
        _raise_unweighted("a forward without labels")
    return forward.counted


def _raise_unweighted(got: str) -> NoReturn:
    raise RuntimeError(
        "sequence_parallel: expected one forward with labels before each backward (labels=, shift_labels=, targets= or "
        f"engine.split_sequence(targets)), whose number weights the loss of this rank's part, got {got}; or pass the "
        "number of tokens of which the loss is the mean to engine.backward as weight="
    )


def _alike(forward: _Forward | None, cut: Cut) -> bool:
    if forward is None or forward.cut.length != cut.length:
        return False
    return forward.cut.documents is None and cut.documents is None


def _arguments_of(model: nn.Module) -> tuple[list[str], Rules, bool]:
    """Return the names of positional parameters of the model's forward, what its arguments mean, and True if it takes
    Hugging Face's ``use_cache``."""
    parameters = inspect.signature(model.forward).parameters
    kinds = inspect.Parameter
    positional = [n for n, p in parameters.items() if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.POSITIONAL_ONLY)]
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    huggingface = bool(chosen_attention(model))
    rules = Rules(
        shifts_labels=huggingface and takes_any and _shifts(model),
        whole_masks=huggingface,
        takes_positions="position_ids" in parameters or (huggingface and takes_any),
    )
    return positional, rules, huggingface and (takes_any or "use_cache" in parameters)


def _shifts(model: nn.Module) -> bool:
    """Return True if the model's loss is that of a causal language model, which shifts labels."""
    loss = getattr(model, "loss_function", None)
    return getattr(loss, "__name__", "") == "ForCausalLMLoss"
