"""Kernels in plain PyTorch: the fallback if they cannot be built, and their reference in tests.

The operations are those of csrc/rules.h, which has the reasons, and give the same bits on processors with FMA. They run
on a limited number of elements at a time, so that temporaries stay small.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from zerolite.ops.call import (
    ADAGRAD,
    ADAM,
    LION,
    QUANT_BLOCK,
    QUANT_LEAST,
    QUANT_TOPS,
    SGD,
    QuantCall,
    SquaresCall,
    UpdateCall,
)  # fmt: skip
from zerolite.utils.accelerator import host_value
from zerolite.utils.dtypes import sync_master_from_param_

_STRETCH = 1 << 20
_EXACT = 1 << 15  # elements that are converted to double at once: 256 KB, which stays in the second-level cache

Row = list[float]
Rule = Callable[[Row, torch.Tensor, torch.Tensor, list[torch.Tensor]], None]


@torch.no_grad()
def update(call: UpdateCall) -> None:
    if call.skip is not None and host_value(call.skip) != 0:
        return
    rule = _RULES[call.rule]
    rows = call.rows.double().tolist()
    for tensor, start, numel, row in call.table.tolist():
        for at in range(start, start + numel, _STRETCH):
            part = slice(at, min(at + _STRETCH, start + numel))
            lists = (call.params, call.grads, *call.states)
            param, grad, *states = (_flat(tensors[tensor])[part] for tensors in lists)
            exact = param.float()
            if call.outs:
                sync_master_from_param_(exact, _flat(call.outs[tensor])[part])
            exact_states = [state.float() for state in states]
            scaled = grad.float() * rows[row][0]
            if call.factor is not None:
                scaled = grad.float() * (
                    call.factor * torch.tensor(rows[row][0], dtype=torch.float32, device="cpu")
                ).to(grad.device)
            rule(rows[row], exact, scaled, exact_states)
            for stored, value in zip([param, *states], [exact, *exact_states], strict=True):
                if stored.data_ptr() != value.data_ptr():
                    stored.copy_(value)
            if call.outs:
                _flat(call.outs[tensor])[part].copy_(exact)


@torch.no_grad()
def squares(call: SquaresCall) -> None:
    """Add the sum of squares of each segment (tensor, start, elements, owner) to ``sums[owner]``, in double."""
    sums, values, segments = call.sums, call.values, call.table.tolist()
    if sums.is_cuda:
        flats = [_flat(values[tensor])[start : start + numel] for tensor, start, numel, _ in segments]
        norms = torch.stack(list(torch._foreach_norm(flats, 2.0, dtype=torch.float64)))
        owners = call.table[:, 3].contiguous().pin_memory().to(sums.device, non_blocking=True)
        sums.index_add_(0, owners, norms * norms)
        return
    for tensor, start, numel, owner in segments:
        for chunk in _flat(values[tensor])[start : start + numel].split(_EXACT):
            exact = chunk.double()
            sums[owner] += torch.dot(exact, exact)


@torch.no_grad()
def quantize(call: QuantCall) -> None:
    """Pack rows."""
    errors = [None] * call.rows if call.error is None else call.error.view(call.rows, -1)
    for values, error, row in zip(call.values.view(call.rows, -1), errors, call.packed, strict=True):
        for codes, scales, part in _stretches(call, row):
            exact = values[part].float()
            if error is not None:
                exact = exact + error[part].float()
            blocks = _in_blocks(exact)
            most = blocks.abs().amax(1, keepdim=True).clamp_(min=QUANT_LEAST)
            top = torch.full_like(most, QUANT_TOPS[call.bits])
            scale, finite = most / top, most.isfinite()
            code = torch.where(finite, (blocks * (top / most)).round_(), 0.0)
            scales.copy_(torch.where(finite, scale, torch.nan).view(-1))
            if error is not None:
                lost = torch.where(finite, (blocks - code * scale) * call.take, 0.0)
                kept = torch.where(finite, _in_blocks(error[part].float()) * call.keep, 0.0)
                error[part] = (kept + lost).view(-1)[: exact.numel()].to(error.dtype)
            code = code.view(-1)[: exact.numel()].to(torch.int8)
            codes.copy_(code.view(torch.uint8) if call.bits == 8 else _halves(code))


@torch.no_grad()
def dequantize(call: QuantCall) -> None:
    """Unpack rows, or their sum in the order of the rows."""
    targets = [call.values] if call.is_sum else call.values.view(call.rows, -1)
    for target, rows in zip(targets, [call.packed] if call.is_sum else call.packed.unsqueeze(1), strict=True):
        total = torch.zeros_like(target, dtype=torch.float32)
        for row in rows:
            for codes, scales, part in _stretches(call, row):
                code = codes.view(torch.int8)
                if call.bits == 4:
                    code = torch.stack([code << 4 >> 4, code >> 4], 1).view(-1)
                numel = total[part].numel()
                exact = _in_blocks(code[:numel].float()) * scales.view(-1, 1)
                total[part] += exact.view(-1)[:numel]
        target.copy_(total if call.divisor == 1.0 else total.div_(call.divisor))


def _stretches(call: QuantCall, row: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice]]:
    """Yield (codes, scales, elements) for parts of a packed row: views of it, and a slice of its values."""
    scales = row[call.scale_offset :].view(torch.float32)
    for start in range(0, call.numel, _STRETCH):
        end = min(start + _STRETCH, call.numel)
        codes = row[start * call.bits // 8 : (end * call.bits + 7) // 8]
        yield codes, scales[start // QUANT_BLOCK : -(-end // QUANT_BLOCK)], slice(start, end)


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return flat values as [blocks, 256], filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -values.numel() % QUANT_BLOCK)).view(-1, QUANT_BLOCK)


def _halves(code: torch.Tensor) -> torch.Tensor:
    """Return pairs of 4-bit codes in a byte, the first in the low half."""
    low, high = torch.nn.functional.pad(code, (0, code.numel() % 2)).view(-1, 2).unbind(1)
    return (low & 15).bitwise_or_(high << 4).view(torch.uint8)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1)


def correct_root(value: torch.Tensor) -> torch.Tensor:
    """Return the correctly rounded fp32 square root.

    torch's fp32 root comes from the vector library of its build, and may be off by one unit in the last place. The root
    in double, rounded to fp32, is always right.
    """
    return value.double().sqrt_().float()


def _adam(row: Row, p: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor]) -> None:
    _, decay, l2, weight1, weight2, correction2, eps, step = row
    m, v = states
    if l2:
        g = g.add(p, alpha=l2)
    m.lerp_(g, weight1)
    difference = torch.addcmul(-v, g, g)
    if weight2 < 0.5:
        v.add_(difference, alpha=weight2)
    else:
        torch.add(g * g, difference, alpha=weight2 - 1.0, out=v)
    change = (m * step).div_(correct_root(v).div_(correction2).add_(eps))
    p.add_(change.add_(p, alpha=decay) if decay else change)


def _lion(row: Row, p: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor]) -> None:
    _, decay, weight1, weight2, step, *_ = row
    (m,) = states
    change = m.lerp(g, weight1).sign_().mul_(step)
    p.add_(change.add_(p, alpha=decay) if decay else change)
    m.lerp_(g, weight2)


def _adagrad(row: Row, p: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor]) -> None:
    _, l2, eps, step, *_ = row
    (total,) = states
    if l2:
        g = g.add(p, alpha=l2)
    total.addcmul_(g, g, value=1)
    p.addcdiv_(g, correct_root(total).add_(eps), value=step)


def _sgd(row: Row, p: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor]) -> None:
    _, l2, momentum, weight, first, nesterov, step, *_ = row
    if l2:
        g = g.add(p, alpha=l2)
    for buffer in itertools.islice(states, 1 if momentum else 0):
        if first:
            buffer.copy_(g)
        else:
            buffer.mul_(momentum).add_(g, alpha=weight)
        g = g.add(buffer, alpha=momentum) if nesterov else buffer
    p.add_(g, alpha=step)


_RULES: dict[int, Rule] = {ADAM: _adam, LION: _lion, ADAGRAD: _adagrad, SGD: _sgd}
