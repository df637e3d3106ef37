"""The CUDA kernels on a device: the CPU kernels' bits, streams, graphs, and nothing that waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.gpu import NEEDS_GPU
from tests.ops.cases import ALL_DTYPES, F32, FLOATS, MIXED, Dtypes
from tests.ops.cuda_calls import LENGTHS, RULES, copy_call, copy_tensor, differences, dtype_name, finite, make_call
from tests.ops.quant_calls import copy_quant, make_quant, unpacking
from zerolite.ops.call import ADAM, COLUMNS, LION, SGD, SquaresCall, UpdateCall
from zerolite.ops.cpu_kernels import CpuKernels
from zerolite.ops.cuda_kernels import CudaKernels
from zerolite.ops.launches import UpdateLaunch
from zerolite.ops.self_check import check_kernels
from zerolite.utils.builder import op_builder

pytestmark = NEEDS_GPU

DEVICE = "cuda"
FP32 = Dtypes(out=F32)
LONG = 1_000_003
BUSY = 1_000_000_000  # cycles: half a second, in which the host gets far ahead of the device


@pytest.fixture(scope="module", params=["cuda_kernels", "cuda_kernels_nvrtc"])
def kernels(request: pytest.FixtureRequest) -> CudaKernels:
    capability = torch.cuda.get_device_capability()
    try:
        made = CudaKernels(op_builder.load(request.param, capability=capability, torch_cuda=torch.version.cuda))
        check_kernels(made, torch.device(DEVICE, torch.cuda.current_device()))
        return made
    except op_builder.OpUnavailable as error:
        pytest.skip(f"the CUDA kernels cannot be built here: {error}")


@pytest.fixture(scope="module")
def cpu() -> CpuKernels:
    try:
        return CpuKernels(op_builder.load("cpu_kernels"))
    except op_builder.OpUnavailable as error:
        pytest.skip(f"the kernels are compared with the CPU's, and there are none here: {error}")


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Anything by which torch would wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_update(kernels: CudaKernels, cpu: CpuKernels, call: UpdateCall) -> None:
    on_device = copy_call(call, DEVICE)
    with no_synchronisation():
        kernels.update(on_device)
    cpu.update(call)
    assert differences(on_device, call) == []


def many_segments(count: int, rule: int = ADAM, dtypes: Dtypes = MIXED, **scalars: float) -> UpdateCall:
    """Segments of four tensors, in no order, with gaps between them, some of them empty, with the rows in turn."""
    per_tensor = (count + 3) // 4
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count)).tolist()
    table = [(i // per_tensor, i % per_tensor * 1021 + 2, i * 7 % 1019, i % 2) for i in order]
    return make_call(rule, dtypes, (per_tensor * 1021 + 20,) * 4, table=table, **scalars)


def device_work(run: Callable[[], None]) -> list[str]:
    """Names of the kernels that run, without copies and fills of memory."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    run()  # loads the module
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    events: list[Any] = list(profile.events())
    names = [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in names if not name.startswith(("Memcpy", "Memset"))]


@pytest.mark.fast(every=13)
@pytest.mark.parametrize("dtypes", ALL_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("rule", RULES)
def test_all_dtypes(kernels: CudaKernels, cpu: CpuKernels, rule: int, dtypes: Dtypes) -> None:
    check_update(kernels, cpu, make_call(rule, dtypes, (1000, 17, 5), factor=0.37, skip=0.0))


@pytest.mark.fast(every=2)
@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("rule", RULES)
def test_lengths_at_every_alignment(kernels: CudaKernels, cpu: CpuKernels, rule: int, offset: int) -> None:
    """Arrays that are aligned alike, and each its own way."""
    lengths = (*LENGTHS, LONG)
    check_update(kernels, cpu, make_call(rule, MIXED, lengths, lambda array, tensor: offset))
    check_update(kernels, cpu, make_call(rule, MIXED, lengths, lambda array, tensor: offset * (array + tensor) % 8))
    check_update(kernels, cpu, make_call(rule, FP32[:3] + (None,), lengths, lambda array, tensor: offset))


@pytest.mark.parametrize("count", [1, 42, 43, 1000])
@pytest.mark.parametrize("rule", RULES)
def test_many_segments(kernels: CudaKernels, cpu: CpuKernels, rule: int, count: int) -> None:
    check_update(kernels, cpu, many_segments(count, rule, factor=0.25, skip=0.0))


@pytest.mark.parametrize("skip", [1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("count", [3, 1000])
def test_a_skipped_call_changes_nothing(kernels: CudaKernels, count: int, skip: float) -> None:
    call = many_segments(count, skip=skip)
    on_device = copy_call(call, DEVICE)
    with no_synchronisation():
        kernels.update(on_device)
    assert differences(on_device, call) == []


@pytest.mark.parametrize("count", [3, 39, 1000])
def test_one_launch(kernels: CudaKernels, count: int) -> None:
    call = copy_call(many_segments(count), DEVICE)
    names = device_work(lambda: kernels.update(call))
    assert len(names) == 1
    assert "update_kernel" in names[0]


@pytest.mark.parametrize("count", [3, 100])
def test_calls_on_another_stream_wait_for_what_is_before_them(
    kernels: CudaKernels, cpu: CpuKernels, count: int
) -> None:
    """The device is far behind: gradients come late, and the tables of all calls are on their way at once."""
    calls = [make_call(ADAM, MIXED, (40 + i,) * count, factor=0.5) for i in range(40)]
    on_device = [copy_call(call, DEVICE) for call in calls]
    late = [[grad.clone() for grad in call.grads] for call in on_device]
    for call in on_device:
        for grad in call.grads:
            grad.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), no_synchronisation():
        torch.cuda._sleep(BUSY)
        for call, grads in zip(on_device, late, strict=True):
            torch._foreach_copy_(list(call.grads), grads)
            kernels.update(call)
        assert not stream.query()
    stream.synchronize()
    for call, moved in zip(calls, on_device, strict=True):
        cpu.update(call)
        assert differences(moved, call) == []


@pytest.mark.parametrize("count", [3, 1000])
def test_a_captured_call_replays(kernels: CudaKernels, cpu: CpuKernels, count: int) -> None:
    """With the scalars of the capture and the factor, the skip flag and the gradients of the replay, also after other
    calls have used the memory in which tables travel."""
    call = many_segments(count, factor=1.0, skip=0.0)
    on_device, other = copy_call(call, DEVICE), copy_call(many_segments(500, LION), DEVICE)
    assert on_device.factor is not None and on_device.skip is not None
    assert call.factor is not None and call.skip is not None
    for once in (other, copy_call(call, DEVICE)):
        kernels.update(once)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.update(on_device)
    assert differences(on_device, call) == []  # captured, not executed
    for factor, skip in ((1.0, 0.0), (0.5, 0.0), (0.5, 1.0), (0.25, 0.0)):
        for changed in (call, on_device):
            changed.factor.fill_(factor)
            changed.skip.fill_(skip)
            for grad in changed.grads:
                grad.mul_(0.5)
        for _ in range(3):
            kernels.update(other)
        graph.replay()
        cpu.update(call)
        assert differences(on_device, call) == []


def test_a_capture_takes_as_many_launches_as_the_table_needs(kernels: CudaKernels) -> None:
    call = copy_call(make_call(LION, FP32[:3] + (None,), (8,) * 80), DEVICE)
    kernels.update(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.update(call)
    assert len(device_work(graph.replay)) == 2  # 80 segments, 42 to a launch


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices; this machine has fewer")
@pytest.mark.parametrize("count", [3, 1000])
def test_tensors_of_a_device_that_is_not_the_current_one(kernels: CudaKernels, cpu: CpuKernels, count: int) -> None:
    if torch.cuda.get_device_capability(1) != torch.cuda.get_device_capability(0):
        pytest.skip("needs two devices of one compute capability")
    call = many_segments(count)
    on_device = copy_call(call, "cuda:1")
    with torch.cuda.device(0):
        kernels.update(on_device)
        assert torch.cuda.current_device() == 0
    cpu.update(call)
    assert differences(on_device, call) == []


def test_more_elements_than_32_bits_count(kernels: CudaKernels) -> None:
    """SGD on ones, in bf16: 1 - 0.25 x 2. The segments begin and end beyond 2^31 elements."""
    numel = 2**31 + 4 * 4096 + 5
    if torch.cuda.mem_get_info()[0] < 4.5 * numel:
        pytest.skip(f"needs {4.5 * numel / 2**30:.0f} GiB of free device memory")
    params, grads = (torch.full((numel,), x, dtype=torch.bfloat16, device=DEVICE) for x in (1.0, 2.0))
    row = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0, 0.0, -0.25] + [0.0] * (COLUMNS - 7)])
    table = torch.tensor([(0, 0, numel - 7, 0), (0, numel - 7, 6, 0)])
    kernels.update(UpdateCall(SGD, [params], [grads], [], [], table, row, None, None))
    low, high = params[:-1].aminmax()
    assert (low.item(), high.item(), params[-1].item()) == (0.5, 0.5, 1.0)
    sums = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    kernels.squares(SquaresCall(sums, [grads], table))
    assert sums.tolist() == [4.0 * (numel - 1), 0.0]


def squares(kernels: CudaKernels, values: list[torch.Tensor], owners: list[int]) -> torch.Tensor:
    sums = torch.zeros(max(owners) + 1, dtype=torch.float64, device=DEVICE)
    pairs = zip(values, owners, strict=True)
    table = torch.tensor([(i, 0, value.numel(), owner) for i, (value, owner) in enumerate(pairs)])
    with no_synchronisation():
        kernels.squares(SquaresCall(sums, values, table))
    return sums


@pytest.mark.parametrize("count", [1, 126, 127, 1000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_squares(kernels: CudaKernels, dtype: torch.dtype, count: int) -> None:
    lengths = [(LONG, 0, 1, 17, 16384, 16385, 4099)[i % 7] if i < 21 else i % 50 for i in range(count)]
    values = [finite(numel, i % 9, dtype, i) for i, numel in enumerate(lengths)]
    owners = [i * 5 % 7 for i in range(count)]
    wanted = torch.zeros(max(owners) + 1, dtype=torch.float64)
    for value, owner in zip(values, owners, strict=True):
        wanted[owner] += value.double().square().sum()
    on_device = [copy_tensor(value, DEVICE) for value in values]
    found = squares(kernels, on_device, owners)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-14, atol=0)
    for _ in range(20):  # whichever block is the last
        assert torch.equal(squares(kernels, on_device, owners), found)


@pytest.mark.parametrize("dtype", FLOATS)
def test_squares_depend_on_the_segment_alone(kernels: CudaKernels, dtype: torch.dtype) -> None:
    value = finite(LONG, 0, dtype, 1).to(DEVICE)
    alone = squares(kernels, [value], [0])[0]
    for offset in range(1, 9):
        moved = torch.zeros(LONG + 9, dtype=dtype, device=DEVICE)[offset : offset + LONG].copy_(value)
        others = [value[: 100 * i] for i in range(40 * offset)]
        assert squares(kernels, [*others, moved], [1] * len(others) + [0])[0] == alone


def test_squares_of_numbers_whose_squares_overflow_in_fp32(kernels: CudaKernels) -> None:
    value = torch.full((LONG,), 1e30, dtype=torch.float32, device=DEVICE)
    wanted = value.double().square().sum()
    torch.testing.assert_close(squares(kernels, [value], [0])[0], wanted, rtol=1e-14, atol=0)


@pytest.mark.parametrize("count", [3, 1000])
def test_squares_are_one_launch(kernels: CudaKernels, count: int) -> None:
    values = [torch.ones(20_000, device=DEVICE) for _ in range(count)]
    table = torch.tensor([(i, 0, 20_000, i) for i in range(count)])
    sums = torch.zeros(count, dtype=torch.float64, device=DEVICE)
    names = device_work(lambda: kernels.squares(SquaresCall(sums, values, table)))
    assert len(names) == 1
    assert "norm_kernel" in names[0]


@pytest.mark.parametrize("count", [3, 1000])
def test_captured_squares_replay(kernels: CudaKernels, count: int) -> None:
    """Every replay starts its counters anew, and gives the bits of a call that was not captured."""
    values = [copy_tensor(finite(20_000, i % 9, torch.bfloat16, i), DEVICE) for i in range(count)]
    owners = [i % 7 for i in range(count)]
    wanted = squares(kernels, values, owners)
    sums = torch.zeros_like(wanted)
    table = torch.tensor([(i, 0, 20_000, owner) for i, owner in enumerate(owners)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.squares(SquaresCall(sums, values, table))
    for _ in range(3):
        sums.zero_()
        squares(kernels, values, owners)
        graph.replay()
        assert torch.equal(sums, wanted)


def test_launches_run_these_kernels(kernels: CudaKernels) -> None:
    call = copy_call(many_segments(39), DEVICE)
    launch = UpdateLaunch(ADAM, call.table)

    def run() -> None:
        launch.run(call.params, call.grads, call.states, call.outs, call.rows, call.factor, call.skip)

    names = device_work(run)
    assert len(names) == 1
    assert "update_kernel" in names[0]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_packed_to_the_bits_of_the_cpu(
    kernels: CudaKernels, cpu: CpuKernels, bits: int, dtype: torch.dtype
) -> None:
    for numel, error, offset in [(257, None, 0), (LONG, torch.bfloat16, 1), (2**20, F32, 0)]:
        call = make_quant(bits, 3, numel, dtype, error, offset)
        for one, run in ((call, "quantize"), *((back, "dequantize") for back in unpacking(call))):
            on_device = copy_quant(one, DEVICE)
            with no_synchronisation():
                getattr(kernels, run)(on_device)
            getattr(cpu, run)(one)
            assert on_device.differences(one) == [], (numel, run)
