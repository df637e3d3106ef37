"""The account of the CPU's memory by which real steps are measured."""

from __future__ import annotations

import threading

import pytest
import torch

from zerolite.planning.measure import _HostAccount, _is_one_step


@torch.library.custom_op("zerolite_tests::takes_inside", mutates_args=())
def takes_inside(x: torch.Tensor, numel: int) -> torch.Tensor:
    """``x`` + 0, with ``numel`` fp32 elements taken and given back."""
    return x + torch.zeros(numel).sum()


def test_bytes_at_rest_and_at_the_peak_of_a_step() -> None:
    account = _HostAccount()
    before = torch.zeros(10**6)  # from before the account
    with account.counting():
        kept = torch.zeros(1000)
        torch.zeros(10**6)  # comes and goes
        account.begin_step()
        large = torch.zeros(2000)
        del large
        also_kept = torch.zeros(100)
        account.end_step()
        after = torch.zeros(10**6)
    assert account.peak == 4 * (1000 + 2000)
    assert account.at_rest == 4 * (1000 + 100)
    assert account.inside_operators == 0
    del before, kept, also_kept, after


@pytest.mark.fast("12")
@pytest.mark.parametrize("numel", [12, 30_000])
def test_what_another_thread_releases_is_gone_before_the_step(numel: int) -> None:
    account = _HostAccount()
    with account.counting():
        kept = torch.zeros(1000)
        box = [torch.zeros(numel)]
        thread = threading.Thread(target=box.clear)  # where the profiler does not look
        thread.start()
        thread.join()
        account.begin_step()
        kept_too = torch.zeros(numel)  # in the same place, perhaps
        account.end_step()
    assert account.peak == account.at_rest == kept.nbytes + kept_too.nbytes


def test_what_an_operator_takes_inside_itself_is_told_apart() -> None:
    account = _HostAccount()
    x = torch.zeros(100)
    with account.counting():
        account.begin_step()
        kept = takes_inside(x, 5000)
        account.end_step()
    assert account.at_rest == kept.nbytes
    assert account.peak >= 4 * 5000
    assert account.peak - account.inside_operators == kept.nbytes


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("aten::mm", True),
        ("aten::mul", True),  # TorchScript has further overloads
        ("zerolite::squares_", True),
        ("aten::linear", False),  # made of others, which a plan sees
        ("autograd::engine::evaluate_function: MulBackward0", False),
        ("zerolite.planning.measure begins", False),
        ("MulBackward0", False),
    ],
)
def test_operators_that_a_plan_sees_as_one(name: str, seen: bool) -> None:
    assert _is_one_step(name) is seen
