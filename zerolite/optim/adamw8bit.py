"""AdamW whose moments are stored in 8 bits, in blocks of 256 elements with a maximum each.

A code is an index of a table of numbers from -1 to 1 (from 0 to 1 for the second moment) that are close together near
zero, and the block's largest magnitude multiplies them: dynamic block-wise quantisation (Dettmers et al., 2022,
section 2). The moments of a step are computed in fp32, chunk by chunk, so no parameter ever has all of them in fp32.

Two things differ from the paper. The largest magnitude of a block has the code 1 or -1, so numbers that were stored
once have the same codes when they are stored again: a checkpoint in fp32 loses nothing. And a second moment above zero
never becomes zero, which would make the next step of its element as large as the first moment over epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.optim import Optimizer

from zerolite.ops.call import CELL_LEAST, CELLS, CODES, Adam8Call, CodeTable
from zerolite.ops.moments import adam8_step
from zerolite.ops.reference import correct_root

BLOCK = 256  # elements that share a maximum
_CHUNK = 1 << 22  # elements whose moments are in fp32 at a time
_EXPONENTS = 7  # powers of ten in a table
_BORDERS = 254  # of a table, without the infinite ones
MOMENTS = ("exp_avg", "exp_avg_sq")
MAXIMA = ("exp_avg_max", "exp_avg_sq_max")  # of the moments' blocks


class Blocks(NamedTuple):
    """One moment of one parameter, or of a shard of it.

    Blocks begin at multiples of 256 of the parameter's elements in the order of memory. So a shard that begins or ends
    within a block has a part of that block, with a maximum of its own, and all other blocks are those of the whole
    parameter.

    Attributes:
        codes: uint8 [elements].
        maxima: fp32 [blocks].
        lead: elements of the first block that are before the shard.
        table: table of the codes.
    """

    codes: torch.Tensor
    maxima: torch.Tensor
    lead: int
    table: CodeTable

    def chunks(self) -> Iterator[slice]:
        """Yield ranges of elements, each with whole blocks."""
        start, numel = 0, self.codes.numel()
        while start < numel:
            end = min(numel, start + _CHUNK - (start + self.lead) % BLOCK)
            yield slice(start, end)
            start = end

    def read(self, chunk: slice) -> torch.Tensor:
        """Return the numbers of a chunk in fp32, shape [elements]."""
        codes, lead = self.codes[chunk], (chunk.start + self.lead) % BLOCK
        numbers = self.table.numbers[_in_blocks(codes, lead).int()]
        numbers *= self.maxima[self._blocks(chunk)].unsqueeze(1)
        return numbers.view(-1).narrow(0, lead, codes.numel())

    def write(self, chunk: slice, numbers: torch.Tensor) -> None:
        """Store the numbers of a chunk, fp32 [elements]."""
        lead = (chunk.start + self.lead) % BLOCK
        blocks = _in_blocks(numbers, lead)
        maxima = blocks.abs().amax(1)
        self.maxima[self._blocks(chunk)] = maxima
        relative = blocks / torch.where(maxima > 0, maxima, 1.0).unsqueeze(1)
        codes = _codes(relative, self.table.borders).view(-1)
        self.codes[chunk] = codes.narrow(0, lead, numbers.numel())

    def _blocks(self, chunk: slice) -> slice:
        return slice((chunk.start + self.lead) // BLOCK, block_count(chunk.stop, self.lead))


class AdamW8bit(Optimizer):
    """torch.optim.AdamW with moments in 8 bits, and in fp32 for parameters of fewer than two dimensions.

    An attribute ``fp32_states`` of a parameter decides if it has one; :func:`keep_embeddings_in_fp32` sets it, and
    engines call that. ``lead`` of a shard is the number of elements between a multiple of 256 of its parameter's
    elements and its first one.

    A state has "step" (an int), "exp_avg" and "exp_avg_sq": tensors in fp32 of the parameter's shape, or codes (uint8)
    of this shape and "exp_avg_max" and "exp_avg_sq_max", the largest magnitudes of their blocks (fp32 [blocks]).
    """

    zerolite_elementwise = True  # but for the maximum of a block that a border of shards divides

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        """Arguments and defaults are those of torch.optim.AdamW."""
        for name, value in (("learning rate", lr), ("epsilon value", eps), ("weight_decay value", weight_decay)):
            if value < 0:
                raise ValueError(f"Invalid {name}: {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Invalid betas: {betas}")
        self._tables: dict[torch.device, tuple[CodeTable, CodeTable]] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self.new_state(parameter, parameter))
        state["step"] += 1
        assert parameter.grad is not None, "see step()"
        flat, gradient = _flat(parameter), _flat(_like(parameter.grad, parameter))
        if MAXIMA[0] not in state:
            _adamw(flat, gradient, _flat(state["exp_avg"]), _flat(state["exp_avg_sq"]), state["step"], group)
            return
        first, second = self.blocks(parameter, state)
        moments = (first.codes, second.codes), (first.maxima, second.maxima), (first.table, second.table)
        if adam8_step(Adam8Call(flat, gradient, *moments, first.lead, _scalars(state["step"], group))):
            return
        # The kernel's root, so that ranks without it have its bits. On CUDA torch's own is rounded correctly.
        root = correct_root if flat.device.type == "cpu" else torch.sqrt
        for chunk in first.chunks():
            exp_avg, exp_avg_sq = first.read(chunk), second.read(chunk)
            _adamw(flat[chunk], gradient[chunk], exp_avg, exp_avg_sq, state["step"], group, root)
            first.write(chunk, exp_avg)
            second.write(chunk, exp_avg_sq)

    def new_state(
        self, parameter: torch.Tensor, like: torch.Tensor, device: torch.device | None = None
    ) -> dict[str, Any]:
        """Return the state of a parameter, or shard, that was never updated.

        Args:
            parameter: its attributes say how it is stored.
            like: has its shape and strides.
            device: by default that of ``like``.
        """
        device = like.device if device is None else device
        has_codes = not getattr(parameter, "fp32_states", like.dim() < 2)
        dtype, state = torch.uint8 if has_codes else torch.float32, dict[str, Any](step=0)
        for name in MOMENTS:
            state[name] = torch.zeros_like(like, dtype=dtype, device=device, memory_format=torch.preserve_format)
        for name in MAXIMA if has_codes else ():
            count = block_count(like.numel(), getattr(parameter, "lead", 0))
            state[name] = torch.zeros(count, dtype=torch.float32, device=device)
        return state

    def blocks(self, parameter: torch.Tensor, state: dict[str, Any]) -> tuple[Blocks, Blocks]:
        """Return both moments of a state with codes."""
        device, lead = state[MAXIMA[0]].device, getattr(parameter, "lead", 0)
        if device not in self._tables:
            self._tables[device] = _table(True, device), _table(False, device)
        first, second = (
            Blocks(_flat(state[codes]), _flat(state[maxima]), lead, table)
            for codes, maxima, table in zip(MOMENTS, MAXIMA, self._tables[device], strict=True)
        )
        return first, second

    def in_fp32(
        self, parameter: torch.Tensor, state: dict[str, Any], device: torch.device | None = None
    ) -> dict[str, Any]:
        """Return a state with moments in fp32: its own, or what its codes say, in new memory.

        Args:
            parameter: its attributes say where blocks begin.
            state: the state.
            device: of the new memory; by default that of the codes.
        """
        if MAXIMA[0] not in state:
            return state
        read = {"step": state["step"]}
        for name, blocks in zip(MOMENTS, self.blocks(parameter, state), strict=True):
            codes = state[name]
            read[name] = torch.empty_strided(
                codes.shape, codes.stride(), dtype=torch.float32, device=codes.device if device is None else device
            )
            flat = _flat(read[name])
            for chunk in blocks.chunks():
                flat[chunk] = blocks.read(chunk)
        return read

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of ``state_dict()``. Tensors keep their dtypes; torch gives them those of the parameters."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    self.state[parameter][key] = value.to(parameter.device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set what a copy, a pickle or a load has, none of which has tables."""
        super().__setstate__(state)
        self._tables = {}


def keep_embeddings_in_fp32(model: torch.nn.Module) -> None:
    """Give the weights of embeddings the attribute ``fp32_states``, unless they have it."""
    for module in model.modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            weight: Any = module.weight
            weight.fp32_states = getattr(weight, "fp32_states", True)


def block_count(numel: int, lead: int) -> int:
    """Return the number of blocks in which ``numel`` elements lie."""
    return -(-(lead + numel) // BLOCK)


def _adamw(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: int,
    group: dict[str, Any],
    root: Callable[[torch.Tensor], torch.Tensor] = torch.sqrt,
) -> None:
    """Make a step of torch's AdamW, in place and with its order of operations."""
    gradient = gradient.float()
    keep, mean, keep_square, square, correction2, eps, change = _scalars(step, group)
    parameter.mul_(keep)
    exp_avg.lerp_(gradient, mean)
    exp_avg_sq.mul_(keep_square).addcmul_(gradient, gradient, value=square)
    denominator = (root(exp_avg_sq) / correction2).add_(eps)
    parameter.addcdiv_(exp_avg, denominator, value=change)


def _scalars(step: int, group: dict[str, Any]) -> tuple[float, float, float, float, float, float, float]:
    """Return the scalars of a step, counted from 1, as Adam8Call describes them."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    keep, correction2 = 1 - lr * group["weight_decay"], (1 - beta2**step) ** 0.5
    return keep, 1 - beta1, beta2, 1 - beta2, correction2, group["eps"], -lr / (1 - beta1**step)


def _table(signed: bool, device: torch.device) -> CodeTable:
    """Make a table: each power of ten has twice as many numbers as the one below, evenly spaced."""
    positive: list[float] = []
    for exponent in range(_EXPONENTS):
        count = 2 ** (exponent + (0 if signed else 1))
        scale = 10.0 ** (exponent - _EXPONENTS + 1)
        positive += [scale * (0.1 + 0.9 * (index + 0.5) / count) for index in range(count)]
    positive = [number / positive[-1] for number in positive]
    numbers = [*(-number for number in reversed(positive) if signed), 0.0, *positive]
    borders = [(low + high) / 2 for low, high in zip(numbers, numbers[1:], strict=False)]
    if not signed:
        borders[0] = 0.0  # what is above zero stays above zero
    numbers += [math.nan] * (CODES - len(numbers))
    borders += [math.inf] * (CODES - len(borders))
    table = torch.tensor([numbers, borders], dtype=torch.float32, device=device)
    return CodeTable(table[0], table[1], _codes(_lowest_of_cells(device), table[1]))


def _lowest_of_cells(device: torch.device) -> torch.Tensor:
    """Return the lowest number of each cell of csrc/kernels.h, fp32 [8192]."""
    upper = torch.arange(CELL_LEAST, CELL_LEAST + CELLS // 2, dtype=torch.int32, device=device) << 16
    positive, negative = upper.view(torch.float32), -(upper + 0xFFFF).view(torch.float32)
    return torch.cat([positive.masked_fill(upper == CELL_LEAST << 16, 0.0), negative])


def _codes(relative: torch.Tensor, borders: torch.Tensor) -> torch.Tensor:
    """Return the codes of numbers from -1 to 1, uint8. NaN has the last code."""
    return torch.bucketize(relative, borders[:_BORDERS], out_int32=True).to(torch.uint8)


def _in_blocks(flat: torch.Tensor, lead: int) -> torch.Tensor:
    """Return the elements in rows of a block each, with zeros where the first and the last block have no elements."""
    tail = -(lead + flat.numel()) % BLOCK
    return (F.pad(flat, (lead, tail)) if lead or tail else flat).view(-1, BLOCK)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a dense tensor's elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _like(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient with the parameter's strides."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
