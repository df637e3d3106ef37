"""``memory_check`` and stage "auto" at ``zerolite.initialize``."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerolite
from tests.planning.fits_cases import NUMEL, PLENTY, START, stack, start
from tests.toolkit.configs import PARTITIONED
from tests.toolkit.pool import Pools
from zerolite.comm import record
from zerolite.config import ConfigError, load_config
from zerolite.engine.arguments import OWNERS
from zerolite.planning import available, fits
from zerolite.planning.errors import PlanError
from zerolite.planning.skeleton import DrySkeleton
from zerolite.utils.accelerator import is_fake
from zerolite.zero import Init

SIZE = {"train_micro_batch_size_per_gpu": 2}
BUCKETS = {"stage3_max_live_parameters": 5000, "stage3_prefetch_bucket_size": 4200, "reduce_bucket_size": 4200}


def config(stage: Any = 0, **more: Any) -> dict[str, Any]:
    optimizer, zero = {"type": "Adam", "params": {"lr": 1e-3}}, {"stage": stage, **PARTITIONED["kept"], **BUCKETS}
    return {**SIZE, "optimizer": optimizer, "zero_optimization": zero, **more}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> int:
    """A device that holds half of what stage 0 needs on one rank, beside the model itself."""
    free = 4 * NUMEL
    monkeypatch.setattr(fits, "available_memory", lambda device: free)
    return free


def test_what_does_not_fit_is_refused_before_anything_is_allocated(short: int) -> None:
    model = stack()
    before = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    with pytest.raises(MemoryError) as caught:
        zerolite.initialize(model, config())
    what = f"({NUMEL:,} parameters) at ZeRO stage 0 on 1 rank"
    for words in (what, "optimizer states", "memory_check", "zerolite plan"):
        assert words in str(caught.value)
    for parameter, values in before:
        assert type(parameter) is nn.Parameter and torch.equal(parameter, values) and parameter.grad is None
    model(torch.ones(2, 64)).sum().backward()  # it has no hooks of an engine


@pytest.mark.slow
def test_warn_and_off(short: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zerolite"):
        zerolite.initialize(stack(), config(memory_check="warn"))
    assert [entry.message for entry in caplog.records if "needs" in entry.message and "are free" in entry.message]
    caplog.clear()
    with record() as recorder:
        zerolite.initialize(stack(), config(memory_check="off"))
    assert not [entry for entry in caplog.records if "needs" in entry.getMessage()]
    assert recorder.calls == []


def test_what_fits_easily_costs_no_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "run", lambda job: pytest.fail("no dry run was needed"))
    zerolite.initialize(stack(), config())
    assert zerolite.initialize(stack(), config("auto")).config.zero_optimization.stage == 0


@pytest.mark.slow
def test_what_fits_narrowly_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between what the engine needs and the bound below which no plan is made."""
    ran = []
    real = fits.run
    monkeypatch.setattr(fits, "run", lambda job: ran.append(1) or real(job))
    monkeypatch.setattr(fits, "available_memory", lambda device: 20 * NUMEL)
    with record() as recorder:
        engine = zerolite.initialize(stack(), config())
    assert ran == [1]
    assert recorder.calls == []  # the dry run's are no collectives of this process
    assert engine.config.zero_optimization.stage == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["class", "instance", "function", "groups"])
def test_optimizers_of_the_user(short: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack()
    optimizer: Any = {
        "class": torch.optim.Adam, "instance": torch.optim.Adam(model.parameters()),
        "function": lambda params: torch.optim.Adam(params, lr=0.1),
    }.get(kind)  # fmt: skip
    groups = ({"params": [p for p in model.parameters() if p.dim() == dim], "lr": 0.1 * dim} for dim in (1, 2))
    given = {"optimizer": optimizer} if optimizer else {"model_parameters": groups}
    settings = SIZE if optimizer else config()
    with pytest.raises(MemoryError, match="optimizer states 266.24 KB"):
        zerolite.initialize(model, settings, **given)
    if kind == "instance":
        assert not optimizer.state
    monkeypatch.setattr(fits, "available_memory", lambda device: PLENTY)
    if optimizer:  # the generator of groups is spent by now
        zerolite.initialize(model, settings, **given)


@pytest.mark.slow
def test_the_stage_that_fits_is_chosen_on_all_ranks(pools: Pools) -> None:
    def stages(free: list[int], partitioned: bool = False) -> set[Any]:
        kwargs = {"config": config("auto"), "free": free, "partitioned": partitioned}
        return {result.get("stage", "error") for result in pools(2).run(START, kwargs)}

    assert stages([PLENTY, 16 * NUMEL]) == {1}  # with the model's 4 bytes: 80 % of 20
    assert stages([PLENTY, 12 * NUMEL], partitioned=True) == {3}


@pytest.mark.slow
def test_few_dry_runs_choose_the_stage_and_check_the_memory(pools: Pools) -> None:
    """Stage 1 fits, so 2 and 3 are not asked; its plan is the one that is checked. Where its states alone are too
    large, stage 2 is not asked either."""

    def runs(free: float) -> list[int]:
        settings = config("auto", bf16={"enabled": True}, memory_check="warn")
        kwargs = {"config": settings, "free": [int(free * NUMEL)] * 2}
        return pools(2).run(START, kwargs)[0]["runs"]

    assert runs(13.3) == [1]  # with the model's 4 bytes 80 % are less than 2 + 4 + 8, which stage 0 keeps
    assert runs(14) == [1, 0]
    assert runs(5.5) == [1, 3]  # 80 % of 9.5 are less than 2 + 2 + 4


def test_one_rank_without_memory_stops_all(pools: Pools) -> None:
    for stage in (0, 2, 3):
        results = pools(2).run(START, {"config": config(stage), "free": [PLENTY, NUMEL]})
        (error,) = {result["error"] for result in results}
        assert "on rank 1 of 2" in error and f"at ZeRO stage {stage} on 2 ranks" in error


PARTS = {
    "pipeline": {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 2},
    "tensor": {"tensor_parallel": {"size": 2, "plan": {"0": "column", "1": "row"}}},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARTS)
def test_ranks_with_other_parts_of_the_model_agree(pools: Pools, kind: str) -> None:
    """Each plans its own part, none of which is whole; all take the same stage, or stop together."""
    parts: dict[str, Any] = PARTS[kind]
    results = pools(2).run(START, {"config": config("auto", **parts), "free": [PLENTY, 22 * NUMEL]})
    assert [result["stage"] for result in results] == [0, 0]
    results = pools(2).run(START, {"config": config(1, **parts), "free": [PLENTY, NUMEL]})
    (error,) = {result["error"] for result in results}
    assert "on rank 1 of 2" in error and "=2" in error


def test_auto_is_for_initialize_alone() -> None:
    with pytest.raises(ConfigError, match="zerolite.initialize"):
        load_config(config("auto")).resolve(2).zero_optimization.chosen_stage  # noqa: B018
    with Init(config_dict_or_path=config("auto")):
        layer = nn.Linear(3, 3)
    assert hasattr(layer.weight, "ds_id")


def test_the_free_memory_of_a_host_is_shared_by_its_ranks() -> None:
    assert available.local_ranks({"LOCAL_WORLD_SIZE": "4"}) == 4
    assert available.local_ranks({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}) == 2
    assert available.local_ranks({"LOCAL_WORLD_SIZE": "0"}) is available.local_ranks({}) is None


def test_control_groups_of_version_2(tmp_path: Path) -> None:
    left = functools.partial(available.control_group_left, tmp_path, tmp_path / "cgroup")

    def account(group: Path, **files: str) -> None:
        """Write the memory controller's files of a control group."""
        group.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (group / f"memory.{name}").write_text(text and text + "\n")

    assert left() is None
    (tmp_path / "cgroup").write_text("0::/jobs/one\n")
    assert left() is None
    account(tmp_path / "jobs" / "one", max="1000", current="700", stat="anon 500\ninactive_file 150")
    assert left() == 450
    account(tmp_path / "jobs", max="max", current="900", stat="")
    assert left() == 450
    account(tmp_path / "jobs", max="910")
    assert left() == 10


def test_a_skeleton_has_the_structure_and_shares_no_tensor() -> None:
    model = stack()
    model[1].weight = model[0].weight
    model.register_buffer("kept", torch.ones(3))
    model[2].register_forward_hook(lambda *args: pytest.fail("the model's hooks are not run"))
    model[3].weight.requires_grad_(False)
    model.eval()
    copied = DrySkeleton(model).model
    assert [name for name, _ in copied.named_modules()] == [name for name, _ in model.named_modules()]
    assert [(n, p.shape, p.requires_grad) for n, p in copied.named_parameters()] == [
        (n, p.shape, p.requires_grad) for n, p in model.named_parameters()
    ]
    assert copied[1].weight is copied[0].weight and not copied.training
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    assert not own & {id(tensor) for tensor in (*copied.parameters(), *copied.buffers())}
    copied(torch.ones(2, 64))
    assert start(config(), [PLENTY])["steps"] == 1


class Remembering(torch.optim.SGD):
    """Notes what it has updated; torch's rule, of which it is unknown whether it may be sharded."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.updated: list[int] = []

    def step(self, closure: Any = None) -> None:
        self.updated += [p.numel() for group in self.param_groups for p in group["params"] if p.grad is not None]
        super().step(closure)


@pytest.mark.slow
def test_a_dry_run_leaves_the_job_as_it_is(short: int) -> None:
    model = stack()
    nn.utils.parametrizations.weight_norm(model[0])
    model[1].register_forward_hook(lambda *args: pytest.fail("the model's hooks are not run"))
    model[2].values = model[3].weight * 2  # a tensor that comes from a parameter
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_step_pre_hook(lambda *args: pytest.fail("the optimizer's hooks are not run"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def picture() -> Any:
        tensors = (*model.parameters(), *model.buffers(), model[2].values)
        kept = [
            (id(t), t._version, t.is_leaf and t.grad, t.requires_grad, t._backward_hooks, sorted(vars(t)))
            for t in tensors
        ]
        modules = [(id(m), type(m), list(vars(m)), m.training) for m in model.modules()]
        places = [id(p) for group in optimizer.param_groups for p in group["params"]]
        modes = (torch.is_grad_enabled(), torch.get_default_dtype(), logging.getLogger("zerolite").level)
        return kept, modules, places, dict(optimizer.state), torch.get_rng_state().tolist(), modes

    before = picture()
    with pytest.raises(MemoryError):
        zerolite.initialize(model, SIZE, optimizer=optimizer)
    assert picture() == before
    assert all(parameter not in OWNERS for parameter in model.parameters())


@pytest.mark.slow
def test_what_cannot_be_planned_is_tried(short: int, caplog: pytest.LogCaptureFixture) -> None:
    model = stack()
    names = {parameter: name for name, parameter in model.named_parameters()}

    def by_name(params: Any) -> torch.optim.Optimizer:
        members = [(names[p], p) for group in params for p in group["params"]]
        return torch.optim.Adam([p for _, p in sorted(members, key=lambda entry: entry[0])])

    with caplog.at_level(logging.WARNING, "zerolite"):
        zerolite.initialize(model, SIZE, optimizer=by_name)
    assert any("no plan can be made (KeyError" in entry.message for entry in caplog.records)
    model = stack()
    names.update({parameter: name for name, parameter in model.named_parameters()})
    with pytest.raises(PlanError, match="KeyError.*give a stage, 0 to 3"):
        zerolite.initialize(model, {**SIZE, "zero_optimization": {"stage": "auto"}}, optimizer=by_name)


@pytest.mark.slow
def test_auto_leaves_out_stages_that_the_engine_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "available_memory", lambda device: 24 * NUMEL)
    model = stack()
    optimizer = Remembering(model.parameters())
    engine = zerolite.initialize(model, {**SIZE, "zero_optimization": {"stage": "auto"}}, optimizer=optimizer)
    assert engine.config.zero_optimization.stage == 0
    assert optimizer.updated == []


@pytest.mark.slow
def test_a_traced_model_still_trains(short: int) -> None:
    """And its param groups, whose parameters can be read once only, are not spent by the dry run."""
    model = torch.jit.trace(stack(), torch.ones(2, 64))
    groups = [{"params": model.parameters(), "lr": 0.2}]
    engine = zerolite.initialize(model, config(memory_check="warn"), model_parameters=groups)
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    engine.step()
    assert engine.get_lr() == [0.2] and not any(is_fake(parameter) for parameter in model.parameters())
