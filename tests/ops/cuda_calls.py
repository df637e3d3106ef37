"""Calls for the tests of the CUDA kernels, and what tells whether two of them have become the same, to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from tests.ops.cases import Dtypes, differing
from zerolite.ops.call import ADAGRAD, ADAM, COLUMNS, LION, SGD, UpdateCall

LENGTHS = (0, 1, 7, 8, 15, 16, 17)
STATES = {ADAM: 2, LION: 1, ADAGRAD: 1, SGD: 1}
RULES = tuple(STATES)
PADDING = 16  # elements after an array, which must not be touched

# Zeros, denormals of every dtype, numbers that overflow when they are squared or rounded, and none at all.
SPECIAL = (0.0, -0.0, 1e-45, -1e-40, 6e-8, 6e-5, 65504.0, 65519.9, -65520.0, 1e30, 3.39e38, float("inf"), float("-inf"))
NANS = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # CUDA's own is the second

# Rows of scalars (csrc/rules.h) that take every branch of the rules between them.
ROWS = {
    ADAM: (
        (1.0, -1e-5, 0.0, 0.1, 1e-3, 0.0447, 1e-8, -1e-2),
        (-1.0, 0.0, 0.01, 0.75, 0.05, 0.3, 1e-6, -3e-3),
        (1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, -1e-3),
    ),
    LION: ((1.0, -1e-3, 0.1, 0.01, -1e-4), (1.0, 0.0, 1.0, 1.0, -1e-2)),
    ADAGRAD: ((1.0, 0.0, 1e-10, -1e-2), (-1.0, 0.1, 1e-6, -1e-3)),
    SGD: (
        (1.0, 0.0, 0.9, 1.0, 0.0, 0.0, -1e-2),
        (1.0, 0.01, 0.9, 0.5, 0.0, 1.0, -1e-2),
        (-1.0, 0.0, 0.9, 1.0, 1.0, 0.0, -1e-2),
        (1.0, 0.1, 0.0, 1.0, 0.0, 0.0, -1e-2),
    ),
}


def dtype_name(dtypes: Dtypes) -> str:
    return "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def flat(numel: int, offset: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """An array `offset` elements after an address that is a multiple of 64 bytes, of all sizes and with some special
    values."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-8, 4, (numel,), generator=generator)
    specials = torch.cat([torch.tensor(SPECIAL), NANS])
    special = specials[torch.randint(0, specials.numel(), (numel,), generator=generator)]
    values = torch.where(torch.rand(numel, generator=generator) < 0.1, special, values)
    memory = torch.full((offset + numel + PADDING,), 77.0, dtype=dtype)
    memory[offset : offset + numel] = values.to(dtype)
    return memory[offset : offset + numel]


def finite(numel: int, offset: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The same of numbers whose squares every sum holds."""
    values = flat(numel, offset, dtype, seed)
    return values.copy_(values.float().nan_to_num(3.0, 1e5, -1e5).clamp(-1e4, 1e4).to(dtype))


def make_call(
    rule: int,
    dtypes: Dtypes,
    lengths: Sequence[int],
    offset: Callable[[int, int], int] = lambda array, tensor: 0,
    table: Sequence[Sequence[int]] | None = None,
    factor: float | None = None,
    skip: float | None = None,
) -> UpdateCall:
    """offset(array, tensor): elements before the tensor-th array of list 0 (parameters), 1 (gradients), 2 and 3
    (states), 4 (outs). table: by default a segment for each tensor, with the rows in turn."""
    rows = torch.tensor([[*row, *[0.0] * (COLUMNS - len(row))] for row in ROWS[rule]]).reshape(-1, COLUMNS)
    assert len(rows) == len(ROWS[rule])  # kernels read them by this width

    def arrays(place: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [flat(numel, offset(place, i), dtype, 1000 * place + i) for i, numel in enumerate(lengths)]

    param, grad, state, out = dtypes
    states = [arrays(2 + i, state) for i in range(STATES[rule])]
    if rule in (ADAM, ADAGRAD):
        for tensor in states[-1]:
            tensor.abs_()
    if table is None:
        table = [(i, 0, numel, i % len(rows)) for i, numel in enumerate(lengths)]
    outs = [written(new, old) for new, old in zip(arrays(4, out), arrays(0, param), strict=True)] if out else []
    segments = torch.tensor(table, dtype=torch.int64).reshape(-1, 4)
    scalars = [None if one is None else torch.tensor([one]) for one in (factor, skip)]
    return UpdateCall(rule, arrays(0, param), arrays(1, grad), states, outs, segments, rows, *scalars)


def written(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """``new`` with the rounded values of ``old`` in it, but for every third."""
    values = torch.where(torch.arange(old.numel()) % 3 == 0, new, old.to(new.dtype))
    return new.copy_(values)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor is a view of."""
    return tensor.new_empty(0).set_(tensor.untyped_storage())


def copy_tensor(tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """Copy a tensor with all of its memory, and so with its alignment."""
    return whole(tensor).to(device, copy=True)[tensor.storage_offset() :][: tensor.numel()]


def copy_call(call: UpdateCall, device: torch.device | str = "cpu") -> UpdateCall:
    """The same call on copies of its arrays."""

    def arrays(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [copy_tensor(tensor, device) for tensor in tensors]

    factor, skip = (None if one is None else one.to(device) for one in (call.factor, call.skip))
    return dataclasses.replace(
        call, params=arrays(call.params), grads=arrays(call.grads), states=[arrays(states) for states in call.states],
        outs=arrays(call.outs), factor=factor, skip=skip,
    )  # fmt: skip


def differences(a: UpdateCall, b: UpdateCall) -> list[str]:
    """Return the arrays of two calls that differ in a bit, the memory around them included. All NaNs are one."""
    pairs = [("params", a.params, b.params), ("grads", a.grads, b.grads), ("outs", a.outs, b.outs)]
    pairs += [(f"states {i}", x, y) for i, (x, y) in enumerate(zip(a.states, b.states, strict=True))]
    return [
        f"{name}[{i}]: {int(found.sum())} of {x.numel()}"
        for name, xs, ys in pairs
        for i, (x, y) in enumerate(zip(xs, ys, strict=True))
        if (found := differing(whole(x).cpu(), whole(y).cpu())).any()
    ]
