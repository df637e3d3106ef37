"""The kernel of AdamW with moments in 8 bits, beside torch's operations: equal bits for every length and dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ops.cases import BF16, F16, F32, GUARD, assert_same, needs_fma, numbers, threads
from zerolite.ops.call import QUANT_BLOCK, Adam8Call
from zerolite.ops.cpu_kernels import CpuKernels
from zerolite.ops.moments import adam8_step
from zerolite.optim import adamw8bit
from zerolite.optim.adamw8bit import MAXIMA, MOMENTS, AdamW8bit

Step = Callable[[Adam8Call], bool]
TABLES = adamw8bit._table(True, torch.device("cpu")), adamw8bit._table(False, torch.device("cpu"))
DTYPES = [(F32, F32), (F32, BF16), (BF16, BF16), (F16, F16), (BF16, F32)]


def by_torch(call: Adam8Call) -> bool:
    return False


def by(kernels: CpuKernels) -> Step:
    def step(call: Adam8Call) -> bool:
        kernels.adam8(call)
        return True

    return step


def guarded(values: Tensor) -> Tensor:
    """A copy with memory around it that `trained` looks at."""
    memory = torch.full((values.numel() + 2 * GUARD,), 77, dtype=values.dtype)
    copy = memory[GUARD:-GUARD]
    copy.copy_(values)
    return copy


def trained(
    step: Step,
    monkeypatch: pytest.MonkeyPatch,
    *,
    numel: int,
    lead: int = 0,
    special: float = 0.0,
    dtypes: tuple[torch.dtype, torch.dtype] = (F32, F32),
    decay: float = 0.1,
) -> list[Tensor]:
    """Weights, codes and maxima after three steps. The second block never gets a gradient that is not zero."""
    monkeypatch.setattr(adamw8bit, "adam8_step", step)
    parameter = guarded(numbers(numel, seed=numel, special=special).to(dtypes[0]))
    vars(parameter).update(lead=lead, fp32_states=False)
    optimizer = AdamW8bit([parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=decay)
    state = optimizer.state[parameter] = optimizer.new_state(parameter, parameter)
    for name in (*MOMENTS, *MAXIMA):
        state[name] = guarded(state[name])
    for seed in range(3):
        gradient = numbers(numel, seed=seed, special=special)
        gradient[QUANT_BLOCK - lead : 2 * QUANT_BLOCK - lead] = 0.0
        if hasattr(parameter, "grad_dtype"):  # torch 2.10 and later
            parameter.grad_dtype = dtypes[1]
        parameter.grad = gradient.to(dtypes[1])
        optimizer.step()
    arrays = [parameter, *(state[name] for name in (*MOMENTS, *MAXIMA))]
    for array in arrays:
        memory = array.detach().as_strided((array.numel() + 2 * GUARD,), (1,), 0)
        assert bool((memory[:GUARD] == 77).all()) and bool((memory[-GUARD:] == 77).all())
    return [array.detach() for array in arrays]


@needs_fma
@pytest.mark.fast(every=5)
@pytest.mark.parametrize("special", [0.0, 1e-3], ids=["finite", "special"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_steps_have_the_bits_of_torch(
    kernels: CpuKernels,
    dtypes: tuple[torch.dtype, torch.dtype],
    special: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lengths within a block, shards that begin within one, zeros, and numbers that are not finite."""
    for numel in (1, 15, 255, 256, 257, 1003, 4096):
        for lead in (0, 3, 255):
            options = {"numel": numel, "lead": lead, "special": special, "dtypes": dtypes, "decay": 0.1 * (lead != 3)}
            ours, theirs = (
                trained(step, monkeypatch, **options)  # type: ignore[arg-type]
                for step in (by(kernels), by_torch)
            )
            assert_same(ours, theirs)


def test_every_border_is_where_torch_has_it(kernels: CpuKernels) -> None:
    """A first moment that is the gradient: each border, its neighbours in fp32, and the smallest and largest."""
    for table in TABLES:
        borders = table.borders[table.borders.isfinite()]
        near = [torch.nextafter(borders, torch.tensor(end)) for end in (-2.0, 2.0)]
        values = torch.cat([borders, *near, torch.tensor([0.0, -0.0, 1e-45, 1e-38, 2**-24, 2.0**-25, 0.999999])])
        values = torch.cat([values, -values])
        blocks = torch.ones(-(-values.numel() // (QUANT_BLOCK - 1)), QUANT_BLOCK)  # the maximum of each is 1
        flat = torch.nn.functional.pad(values, (0, blocks[:, 1:].numel() - values.numel()))
        blocks[:, 1:] = flat.view(len(blocks), -1)
        call = make_call(blocks.numel())
        call.grad, call.tables = blocks.view(-1), (table, TABLES[1])
        call.scalars = (1.0, 1.0, 0.9, 0.1, 1.0, 1e-8, -0.1)
        kernels.adam8(call)
        assert_same([call.codes[0]], [adamw8bit._codes(call.grad, table.borders)])


def make_call(numel: int) -> Adam8Call:
    blocks = -(-numel // QUANT_BLOCK)
    return Adam8Call(
        torch.ones(numel),
        numbers(numel, seed=5, special=0.0),
        (torch.full((numel,), 130, dtype=torch.uint8), torch.full((numel,), 9, dtype=torch.uint8)),
        (torch.ones(blocks), torch.ones(blocks)),
        TABLES,
        0,
        (0.99, 0.1, 0.95, 0.05, 0.3, 1e-8, -0.1),
    )


def test_threads_change_no_bits_and_what_does_not_fit_is_refused(cpu: CpuKernels) -> None:
    results = []
    for count in (1, 3):
        call = make_call(50_001)
        with threads(count):
            cpu.adam8(call)
        results.append([call.param, *call.codes, *call.maxima])
    assert_same(*results)
    call = make_call(1000)
    for wrong in (
        {"grad": call.grad[:-1]},
        {"codes": (call.codes[0], call.codes[1].int())},
        {"maxima": (call.maxima[0][:-1], call.maxima[1])},
        {"lead": 255},
    ):
        with pytest.raises(ValueError, match="expected"):
            adam8_step(replace(call, **wrong))
    before = [tensor.clone() for tensor in (*call.codes, *call.maxima)]
    assert not adam8_step(replace(call, param=torch.ones(1000, dtype=torch.float64)))
    with FakeTensorMode() as mode:
        assert adam8_step(replace(call, param=mode.from_tensor(call.param)))
    assert_same([*call.codes, *call.maxima], before)
