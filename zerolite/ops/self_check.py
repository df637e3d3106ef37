"""Comparison of compiled kernels with their PyTorch reference, before they update weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerolite.ops import reference
from zerolite.ops.call import ADAGRAD, ADAM, LION, QUANT_TOPS, SGD, QuantCall, SquaresCall, UpdateCall, row_bytes
from zerolite.ops.library import Kernels
from zerolite.utils.dtypes import FLOATS

# Rows of scalars as in csrc/rules.h, chosen so that every operation of each rule has an effect.
_ROWS = {
    ADAM: (1.0, -1e-5, 0.01, 0.1, 0.05, 0.3, 1e-8, -1e-2),
    LION: (1.0, -1e-4, 0.1, 0.01, -1e-3, 0.0, 0.0, 0.0),
    ADAGRAD: (1.0, 0.01, 1e-10, -1e-2, 0.0, 0.0, 0.0, 0.0),
    SGD: (1.0, 0.01, 0.9, 0.5, 0.0, 1.0, -1e-2, 0.0),
}
_STATES = {ADAM: 2, LION: 1, ADAGRAD: 1, SGD: 1}  # number of states
_NUMELS = (4099, 33)  # several blocks, a tail, and a tensor that begins within a quad of the next
# Dtypes of (parameters, gradients, states, outs): fp32 with each dtype of gradients, and the kernel for any dtypes.
_DTYPES: tuple[tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype | None], ...] = (
    (torch.float32, torch.float32, torch.float32, None),
    (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.float32, torch.float16, torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16, None),
)
# Relative tolerance: results may be rounded differently, so bf16 and fp16 may differ by one unit in the last place.
_CLOSE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def check_kernels(kernels: Kernels, device: torch.device) -> None:
    """Compare an update by each rule, sums of squares, and packed rows with the reference on the host. Waits for the
    device.

    Raises:
        RuntimeError: results differ by more than rounding, or a skipped update changes something.
    """
    for rule in _ROWS:
        for dtypes in _DTYPES:
            for skip, largest in ((0.0, 1.0), (1.0, 1.0), (0.0, float("inf"))):
                wanted = _call(rule, dtypes, skip, largest, torch.device("cpu"))
                result = _call(rule, dtypes, skip, largest, device)
                kernels.update(result)
                if not skip:
                    reference.update(wanted)
                _compare(result, wanted, rule)
    _check_squares(kernels, device)
    for bits in QUANT_TOPS:
        for dtype in FLOATS:
            _check_rows(kernels, device, bits, dtype)


def _check_squares(kernels: Kernels, device: torch.device) -> None:
    table = torch.tensor([[i, 0, numel, i] for i, numel in enumerate(_NUMELS)], dtype=torch.int64, device="cpu")
    for dtype in FLOATS:
        values = _tensors(dtype, 9, torch.device("cpu"))
        sums = torch.zeros(len(_NUMELS), dtype=torch.float64, device=device)
        kernels.squares(SquaresCall(sums, [value.to(device) for value in values], table))
        exact = torch.stack([value.double().square().sum() for value in values])
        if not torch.allclose(sums.cpu(), exact, rtol=1e-12, atol=0.0):
            raise RuntimeError(_WRONG.format(f"the sum of squares of {dtype}"))


def _check_rows(kernels: Kernels, device: torch.device, bits: int, dtype: torch.dtype) -> None:
    """Compare packing, unpacking and a sum of rows. Both have the same bits."""
    results: list[list[torch.Tensor]] = []
    for run, where in ((kernels, device), (reference, torch.device("cpu"))):
        values = torch.cat([_tensors(dtype, 7, where)[0]] * 2)
        values[300] = float("nan")
        error = torch.cat([_tensors(torch.float32, 8, where)[0]] * 2)
        numel = values.numel() // 2
        packed = torch.zeros(2, row_bytes(numel, bits), dtype=torch.uint8, device=where)
        arrived, total = torch.empty_like(values), torch.empty_like(values[:numel])
        run.quantize(QuantCall(bits, values, packed, error, 0.8, 0.2))
        run.dequantize(QuantCall(bits, arrived, packed))
        run.dequantize(QuantCall(bits, total, packed, is_sum=True, divisor=3.0))
        results.append([packed.cpu(), error.cpu(), arrived.cpu(), total.cpu()])
    if not all(torch.allclose(one, other, 0.0, 0.0, equal_nan=True) for one, other in zip(*results, strict=True)):
        raise RuntimeError(_WRONG.format(f"rows of {dtype} with {bits} bits"))


_WRONG = (
    "the compiled kernels do not compute what their reference does ({0}), so they are not used. Please report this "
    "with the output of `zerolite report`."
)


def _compare(result: UpdateCall, wanted: UpdateCall, rule: int) -> None:
    pairs = [
        (result.params, wanted.params),
        (result.outs, wanted.outs),
        *zip(result.states, wanted.states, strict=True),
    ]
    for results, expected in pairs:
        for one, other in zip(results, expected, strict=True):
            close = _CLOSE[one.dtype]
            if not torch.allclose(one.cpu().float(), other.float(), rtol=close, atol=close * 1e-2, equal_nan=True):
                raise RuntimeError(
                    _WRONG.format(f"an update by rule {rule} of {one.dtype} with {result.grads[0].dtype}")
                )


def _call(
    rule: int, dtypes: Sequence[torch.dtype | None], skip: float, largest: float, device: torch.device
) -> UpdateCall:
    """largest: the last gradient, relative to the others."""
    param, grad, state, out = dtypes
    assert param is not None and grad is not None and state is not None
    params, grads = _tensors(param, 0, device), _tensors(grad, 1, device)
    grads[0][-1] *= largest
    return UpdateCall(
        rule,
        params,
        grads,
        [[tensor.abs_() for tensor in _tensors(state, 2 + i, device)] for i in range(_STATES[rule])],
        [] if out is None else [tensor.to(out) for tensor in params],
        torch.tensor([[0, 0, _NUMELS[0], 0], [1, 1, 16, 0], [1, 17, 16, 0]], dtype=torch.int64, device="cpu"),
        torch.tensor([_ROWS[rule]], dtype=torch.float32, device="cpu"),
        torch.tensor([0.5], dtype=torch.float32, device=device),
        torch.tensor([skip], dtype=torch.float32, device=device),
    )


def _tensors(dtype: torch.dtype, seed: int, device: torch.device) -> list[torch.Tensor]:
    """Return random tensors with the same values on every device, each of another order of magnitude."""
    made = []
    for scale, numel in enumerate(_NUMELS):
        generator = torch.Generator("cpu").manual_seed(10 * seed + scale)
        values = torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu") * 10.0**-scale
        made.append(values.to(dtype).to(device))
    return made
