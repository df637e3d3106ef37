"""The forward of an engine whose ranks have parts of each sequence: it is given whole sequences and cuts them."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zerolite.comm import Communicator, HostMaximum, collective
from zerolite.comm.initial_sync import content_hash
from zerolite.sequence_parallel import trial
from zerolite.sequence_parallel.attention import Parts, attending, chosen_attention
from zerolite.sequence_parallel.cut import Cut, Inputs, Rules, cut_inputs, targets_of
from zerolite.tensor_parallel.regions import fork_random_state
from zerolite.utils.accelerator import host_value
from zerolite.utils.nested import find_tensors
from zerolite.utils.torch_private import current_backward

_STATE_IN_TIME = (nn.Conv1d, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_STATE_NAMES = ("A_log", "dt_bias", "time_decay")


def check_model(model: nn.Module) -> None:
    """Raise ValueError for a module that carries something along the sequence past the attention that is hooked."""
    for name, module in model.named_modules():
        state = next((key for key in _STATE_NAMES if key in module._parameters), None)
        if state is None and not isinstance(module, _STATE_IN_TIME):
            continue
        what = type(module).__name__ if state is None else f"{type(module).__name__} with '{state}'"
        raise ValueError(
            "sequence_parallel: expected a model in which tokens see each other by scaled_dot_product_attention, or by "
            f"Hugging Face's attention, alone, got '{name}' ({what}), of which each rank would compute a part; leave "
            "sequence_parallel out"
        )


class SequenceForward:
    """Function that takes the place of the model in an engine's forward.

    Attributes:
        weight: labels of this rank's part in the last forward that are counted; None if it had no labels.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        model: nn.Module,
        sequence: Communicator,
        world: Communicator,
        device: torch.device,
        note_inputs: Callable[[Iterable[Tensor]], None] | None,
    ) -> None:
        """
        Args:
            call: runs the model.
            model: the model.
            sequence: ranks that have the other parts of the same sequences.
            world: all ranks of the job.
            note_inputs: takes the inputs, which are compared with the step's statistics; None if others do so.
        """
        self._call, self._model, self._sequence, self._world = call, model, sequence, world
        self._device, self._note_inputs = device, note_inputs
        self._same = HostMaximum(sequence)
        self._tried = self._compared = False
        self._positional, self._rules, self._is_huggingface = _arguments_of(model)
        self.weight: int | None = None
        self._latest: Cut | None = None
        self._pending: list[tuple[Cut, int | None]] = []  # forwards with a graph since the last backward

    @collective
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's part of its arguments, which are whole sequences."""
        recomputes = current_backward() != -1
        if not recomputes:
            self._compare(find_tensors((args, kwargs)))
        values = self._named(args, kwargs)
        inputs = self._cut(values)
        if not (self._tried or recomputes):
            self._tried = self._try(values, inputs.cut)
        restore = fork_random_state(self._device, self._sequence.rank) if self._model.training else None
        try:
            outputs = self._part(inputs, len(args))
        finally:
            if restore is not None:
                restore()
        self.weight, self._latest = inputs.counted, inputs.cut
        if torch.is_grad_enabled() and not recomputes:
            self._pending.append((inputs.cut, inputs.counted))
        return outputs

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, positional ones first."""
        names = [*self._positional[: len(args)], *(f"argument {i}" for i in range(len(self._positional), len(args)))]
        values = {**dict(zip(names, args, strict=True)), **kwargs}
        if self._is_huggingface and "use_cache" not in values:
            values["use_cache"] = False
        return values

    def _cut(self, values: dict[str, Any]) -> Inputs:
        return cut_inputs(values, self._sequence.world_size, self._sequence.rank, self._rules)

    def _part(self, inputs: Inputs, positional: int = 0) -> Any:
        with attending(Parts(self._sequence, inputs.cut)):
            return self._run(inputs.values, positional)

    @collective
    @torch.no_grad()
    def _try(self, values: dict[str, Any], cut: Cut) -> bool:
        """Compare the model's outputs on the first tokens of a batch, as parts and as a whole, in eval mode.

        Returns False if the sequences are too short. Raises RuntimeError on all ranks if they differ.
        """
        tokens = trial.tokens_of_trial(cut)
        if not tokens:
            return False
        short = trial.inputs_of_trial(values, cut, tokens, self._rules.shifts_labels)
        training = [module for module in self._model.modules() if module.training]
        self._model.eval()
        try:
            with attending(None):
                whole = find_tensors(self._run(short, 0))
            inputs = self._cut(short)
            parts = find_tensors(self._part(inputs))
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
        names = list(values)
        extra = [name for name in names if name.startswith("argument ")]
        if extra:  # behind *args nothing has a name
            positional = max(positional, len(self._positional) + len(extra))
        args = [values[name] for name in names[:positional]]
        return self._call(*args, **{name: values[name] for name in names[positional:]})

    # ---------------------------------------------------------------- the same inputs

    def _compare(self, tensors: list[Tensor]) -> None:
        """Compare the inputs of the ranks that will take parts of them: shapes before each forward, values before the
        first one. Later the step's statistics compare the values.

        Raises RuntimeError, in the first forward on all ranks of the job.
        """
        described = repr([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
        numbers = [zlib.crc32(described.encode())]
        if not self._compared:
            hashes = [content_hash(tensor, self._device) for tensor in tensors]
            numbers += [int(host_value(torch.stack(hashes).sum())) >> 1] if hashes else [0]
        highest = self._same.of([*numbers, *(-number for number in numbers)])
        differs = any(high != -low for high, low in zip(highest[: len(numbers)], highest[len(numbers) :], strict=True))
        if not self._compared:
            differs = bool(HostMaximum(self._world).of([int(differs)])[0])
        self._compared = True
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

    def split(self, targets: Tensor) -> tuple[Tensor, int]:
        """Return this rank's part of ``targets``, [batch, length, ...], and how many of them are counted.

        The weight of the loss is then this number.
        """
        if self._latest is None:
            raise RuntimeError(
                "engine.split_sequence: expected a forward of the inputs first, got none; call engine(...)"
            )
        part, counted = targets_of(targets, self._latest)
        self.weight = counted
        if self._pending and torch.is_grad_enabled():
            self._pending[-1] = (self._latest, counted)
        return part, counted

    def backward_of(self, weight: float | Tensor | None) -> tuple[Any, AbstractContextManager[None]]:
        """Return the weight of the backward that begins, and the context to run it in.

        Raises RuntimeError, on all ranks, if the weight is not known.
        """
        pending, self._pending = self._pending, []
        if weight is None:
            if len(pending) != 1 or pending[0][1] is None:
                got = f"one after {len(pending)} forwards" if len(pending) != 1 else "a forward without labels"
                raise RuntimeError(
                    "engine.backward: expected one forward with labels before each backward (labels=, shift_labels=, "
                    f"targets= or engine.split_sequence(targets)), whose number weights this rank's part, got {got}; "
                    "or pass the number of tokens of which the loss is the mean as weight="
                )
            weight = pending[0][1]
        cuts = [cut for cut, _ in pending]
        if any(_differ(cut, cuts[0]) for cut in cuts[1:]):
            raise RuntimeError(
                "engine.backward: expected forwards of equal sequence lengths and without packed documents in one "
                "backward, which may repeat them, got different ones; call engine.backward once for each forward"
            )
        return weight, self._attending(cuts[0] if cuts else self._latest)

    @contextmanager
    def _attending(self, cut: Cut | None) -> Iterator[None]:
        with attending(None if cut is None else Parts(self._sequence, cut)):
            yield


def _differ(one: Cut, other: Cut) -> bool:
    return one.length != other.length or one.documents is not None or other.documents is not None


def _arguments_of(model: nn.Module) -> tuple[list[str], Rules, bool]:
    """Return the names of positional parameters of the model's forward, what its arguments mean, and True for a model
    of Hugging Face's."""
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
    return positional, rules, huggingface


def _shifts(model: nn.Module) -> bool:
    """Return True if the model's loss is that of a causal language model, which shifts labels."""
    loss = getattr(model, "loss_function", None)
    return getattr(loss, "__name__", "") == "ForCausalLMLoss"
