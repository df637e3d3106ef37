"""Schedules against literal numbers of DeepSpeed's formulas.

Each list is the learning rate that update 1, 2, 3 ... used when the schedule was stepped after each update.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from zerolite.config.errors import ConfigError
from zerolite.optim.schedulers import build_scheduler

OURS = {
    "WarmupLR": {"warmup_num_steps": 3},
    "WarmupDecayLR": {"warmup_num_steps": 3, "total_num_steps": 9},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 9},
    "LRRangeTest": {"lr_range_test_step_size": 2},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 3, "decay_step_size": 2},
}


def make_optimizer(kind=torch.optim.AdamW, groups=1, **options):
    params = [{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(groups)]
    return kind(params, **{"lr": 0.01, **options})


def run(scheduler, updates, value=lambda optimizer: optimizer.param_groups[0]["lr"]):
    used = []
    for _ in range(updates):
        used.append(value(scheduler.optimizer))
        scheduler.optimizer.step()
        scheduler.step()
    return used


def momentum(optimizer):
    return optimizer.param_groups[0]["betas"][0]


def rate_and_momentum(optimizer):
    return optimizer.param_groups[0]["lr"], momentum(optimizer)


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("WarmupLR", {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 4},
         [0.0, 0.0, 0.05, 0.0792481250, 0.1, 0.1, 0.1]),
        ("WarmupLR", {"warmup_min_lr": 0.02, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"},
         [0.02, 0.02, 0.04, 0.06, 0.08, 0.1, 0.1]),
        ("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}, [0.0, 0.0, 0.005, 0.01, 0.01]),
        ("WarmupLR", {"warmup_num_steps": 1}, [0.0, 0.0, 0.01, 0.01]),
        ("WarmupDecayLR", {"total_num_steps": 8, "warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 4,
                           "warmup_type": "linear"},
         [0.01, 0.01, 0.0325, 0.055, 0.0775, 0.1, 0.0775, 0.055, 0.0325, 0.01, 0.01]),
        ("WarmupCosineLR", {"total_num_steps": 8, "warmup_min_ratio": 0.2, "warmup_num_steps": 4, "cos_min_ratio": 0.1,
                            "warmup_type": "linear"},
         [0.0, 0.002, 0.004, 0.006, 0.008, 0.00868198052, 0.0055, 0.00231801948, 0.001, 0.001, 0.001]),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 0.5},
         [0.01, 0.0125, 0.015, 0.0175, 0.02, 0.0225]),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 0.5,
                         "lr_range_test_staircase": True},
         [0.01, 0.01, 0.015, 0.015, 0.02, 0.02, 0.025]),
        ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.05, "cycle_first_step_size": 4,
                      "cycle_second_step_size": 2, "decay_step_size": 2, "decay_lr_rate": 1.0},
         [0.01, 0.02, 0.03, 0.04, 0.05, 0.03, 0.01, 0.01 / 1.5, 0.005, 0.004, 0.01 / 3]),
        ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.05, "cycle_first_step_size": 4,
                      "cycle_first_stair_count": 2},
         [0.01, 0.01, 0.03, 0.03, 0.05, 0.03, 0.03, 0.01, 0.01, 0.01, 0.01]),
        ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.04, "cycle_first_step_size": 3,
                      "cycle_second_step_size": 0},
         [0.01, 0.02, 0.03, 0.01, 0.01]),
    ],
)  # fmt: skip
def test_learning_rates(name, params, expected):
    scheduler = build_scheduler(name, params, make_optimizer())
    assert run(scheduler, len(expected)) == pytest.approx(expected, rel=1e-8, abs=1e-15)


def test_one_cycle_moves_the_momentum_too():
    params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.05, "cycle_first_step_size": 4, "cycle_second_step_size": 2}
    params |= {"decay_step_size": 2, "decay_mom_rate": 0.02}
    expected = [0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.909, 0.918, 0.927, 0.936]
    optimizer = make_optimizer(betas=(0.95, 0.98))
    assert run(build_scheduler("OneCycle", params, optimizer), 11, momentum) == pytest.approx(expected)
    assert optimizer.param_groups[0]["betas"][1] == 0.98
    sgd = make_optimizer(torch.optim.SGD, momentum=0.5)
    scheduler = build_scheduler("OneCycle", params, sgd)
    assert run(scheduler, 11, lambda o: o.param_groups[0]["momentum"]) == pytest.approx(expected)
    steep = build_scheduler("OneCycle", {**params, "decay_mom_rate": 1.0}, make_optimizer())
    assert max(run(steep, 20, momentum)) == 0.9999


@pytest.mark.parametrize("name", OURS)
def test_a_tensor_learning_rate_is_filled_in_place(name):
    optimizer = make_optimizer(lr=torch.tensor(0.01), foreach=False)
    tensor = optimizer.param_groups[0]["lr"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = build_scheduler(name, OURS[name], optimizer)
        used = run(scheduler, 6, lambda o: o.param_groups[0]["lr"].item())
        scheduler.load_state_dict({"last_epoch": 2})
        assert tensor.item() == pytest.approx(used[2])
    assert optimizer.param_groups[0]["lr"] is tensor
    assert used == pytest.approx(run(build_scheduler(name, OURS[name], make_optimizer()), 6), rel=1e-6)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("cut", [1, 4])
def test_state_continues_a_run_and_sets_the_rates(name, cut):
    whole = run(build_scheduler(name, OURS[name], make_optimizer()), 12, rate_and_momentum)
    first = build_scheduler(name, OURS[name], make_optimizer())
    begin = run(first, cut, rate_and_momentum)
    second = build_scheduler(name, OURS[name], make_optimizer())
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == [whole[cut][0]]
    assert begin + run(second, 12 - cut, rate_and_momentum) == whole


@pytest.mark.parametrize("name", OURS)
def test_step_with_a_number_sets_deepspeeds_count(name):
    """DeepSpeed's step(n) gives the rate that n + 1 calls of step() give, forwards and backwards."""
    counted = build_scheduler(name, OURS[name], make_optimizer())
    updates = run(counted, 13, rate_and_momentum)
    optimizer = make_optimizer()
    scheduler = build_scheduler(name, OURS[name], optimizer)
    for iteration in (7, 3, 11, -1, 0):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler.step(iteration)
        assert scheduler.last_batch_iteration == iteration
        assert rate_and_momentum(optimizer) == updates[iteration + 1]
        assert scheduler.get_last_lr() == [updates[iteration + 1][0]]
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == updates[2][0], "it goes on from there"
    scheduler.load_state_dict({"last_batch_iteration": 5})  # DeepSpeed's
    assert optimizer.param_groups[0]["lr"] == updates[6][0] and scheduler.state_dict() == {"last_epoch": 6}
    with pytest.raises(ValueError, match="last_batch_iteration"):
        scheduler.step(-2)


def test_torch_schedulers_by_name():
    scheduler = build_scheduler("steplr", {"step_size": 2.0, "gamma": 0.5}, make_optimizer())
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    assert run(scheduler, 4) == [0.01, 0.01, 0.005, 0.005]
    several = build_scheduler("MultiStepLR", {"milestones": [1, 2], "gamma": 0.1}, make_optimizer())
    assert run(several, 3) == pytest.approx([0.01, 0.001, 0.0001])
    two = {"max_lr": [0.1, 0.2], "total_steps": 9, "anneal_strategy": "linear"}
    build_scheduler("OneCycleLR", two, make_optimizer(groups=2))
    build_scheduler("LambdaLR", {"lr_lambda": lambda step: 1.0}, make_optimizer())
    build_scheduler("CosineAnnealingLR", {"T_max": 5, "eta_min": "auto"}, make_optimizer())


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("WarmupLr2", {}, "scheduler.type: 'WarmupLr2' is not known .*nearest: 'WarmupLR'"),
        ("ReduceLROnPlateau", {}, "scheduler.type: .*metric"),
        ("WarmupLR", {"warmup_steps": 3}, "scheduler.params.warmup_steps: .*nearest: 'warmup_num_steps'"),
        ("WarmupLR", {"warmup_max_lr": "1e-3"}, "scheduler.params.warmup_max_lr: expected a number or a list.*quotes"),
        ("WarmupLR", {"warmup_num_steps": 1.5}, "scheduler.params.warmup_num_steps: expected a whole number"),
        ("WarmupLR", {"warmup_type": "cubic"}, "scheduler.params.warmup_type: expected 'log' or 'linear'"),
        ("WarmupLR", {"warmup_max_lr": [0.1, 0.2]}, "warmup_max_lr has 2 values.*1 parameter group"),
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps: missing"),
        ("WarmupDecayLR", {"total_num_steps": "auto"}, "scheduler.params.total_num_steps: .*'auto'.*no default"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_max_mom": 1.0}, "cycle_max_mom must be below 1"),
        ("StepLR", {"step_size": 2, "gama": 0.5}, "scheduler.params.gama: .*nearest: 'gamma'"),
        ("LambdaLR", {"lr_lambda": "lambda x: x"}, r"scheduler\.params(: LambdaLR|\.lr_lambda)"),
        ("SequentialLR", {}, "scheduler.type: .*lr_scheduler="),
        ("WarmupLR", {"warmup_num_steps": -1}, "scheduler.params: .*warmup_num_steps"),
        ("OneCycle", {"cycle_min_lr": 0.1}, "scheduler.params.cycle_max_lr: missing"),
        ("StepLR", {"step_size": 0}, "scheduler.params.step_size: expected a whole number of at least 1, got 0"),
        ("CosineAnnealingLR", {"T_max": 0}, "scheduler.params.T_max: expected a whole number of at least 1, got 0"),
        ("MultiStepLR", {"milestones": "abc"}, "milestones: expected a list of whole numbers, got 'abc'"),
        ("MultiStepLR", {"milestones": [2, 4.5]}, "milestones: expected a list of whole numbers, got"),
        ("MultiStepLR", {"milestones": ["a"]}, "milestones: expected a list of whole numbers, got"),
    ],
)
def test_mistakes_are_named(name, params, words):
    with pytest.raises(ConfigError, match=words):
        build_scheduler(name, params, make_optimizer())
