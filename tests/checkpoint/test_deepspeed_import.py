"""Importing DeepSpeed's universal checkpoints, hand-made ones: what is in the files, every reason to refuse them, and
the command `zerolite import-deepspeed`. Real ones are imported in test_deepspeed_real.py."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.crafted import flip
from tests.checkpoint.deepspeed_fakes import Fake
from tests.checkpoint.runs import assert_equal
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.manifest import SavedGrid
from zerolite.checkpoint.reader import CheckpointReader
from zerolite.compat.deepspeed_import import import_deepspeed, main
from zerolite.compat.deepspeed_universal import UniversalReader, find_checkpoint
from zerolite.precision.loss_scaler import LossScaler


def read(directory: Path, tag: str | None = None) -> UniversalReader:
    return UniversalReader(find_checkpoint(directory, tag))


@pytest.mark.parametrize(("stage", "world_size"), [(2, 3), (3, 1), (3, 4)])
def test_every_value_of_a_checkpoint_is_imported(tmp_path: Path, stage: int, world_size: int) -> None:
    """Also buffers under two names, empty parameters, and wrappers in names."""
    client_state = {"epoch": 3, "weights": torch.arange(3.0)}
    fake = Fake(stage, world_size, client_state=client_state)
    for head in fake.heads:
        head["module"] |= {"mean_again": head["module"]["mean"], "_orig_mod.nothing": torch.empty(0, 3)}
        head["module"] |= {"nothing_either": torch.empty(0)}
        head["buffer_names"].append("mean_again")
    if stage < 3:  # it compares addresses there, and all empty tensors are at 0
        fake.heads[0]["shared_params"]["nothing_either"] = "_orig_mod.nothing"
    fake.write(tmp_path / "theirs")
    path = import_deepspeed(tmp_path / "theirs", tmp_path / "ours")
    assert path == tmp_path / "ours" / "step6_universal"
    expected = {f"parameters/{name}": value for name, value in {**fake.trained, **fake.frozen}.items()}
    expected |= {"parameters/nothing": torch.empty(0, 3), "parameters/nothing_either": torch.empty(0)}
    expected |= {f"buffers/{name}": value for name, value in fake.buffers.items()}
    for kind, values in fake.moments.items():
        expected |= {f"optimizer/{kind}/{name}": value for name, value in values.items()}
    reader = CheckpointReader(path)
    assert_equal(
        {key: reader.read(key) for key in reader.tensors}, expected | {"client_state/0": client_state["weights"]}
    )
    assert list(reader.problems()) == []
    state = reader.state
    assert state["parameters"]["a.weight"] == {
        "shape": [3, 5], "dtype": "F32", "trained": True, "aliases": ["head.weight"],
    }  # fmt: skip
    assert state["parameters"]["c.weight"] == {"shape": [2, 3], "dtype": "BF16", "trained": False, "aliases": []}
    assert state["buffers"]["mean"]["aliases"] == ["mean_again"]
    (group,) = state["optimizer"]["groups"]
    assert group["names"] == list(fake.trained)
    assert group["values"] == {
        "lr": 0.5, "betas": (0.9, 0.99), "weight_decay": 0.25, "amsgrad": False, "decoupled_weight_decay": True,
    }  # fmt: skip
    assert_equal(state["optimizer"]["scalars"]["step"], dict.fromkeys(fake.trained, torch.tensor(5.0)))
    assert state["lr_scheduler"] == {"type": None, "state": {"last_epoch": 5}}
    counters = state["counters"]
    assert (counters["global_steps"], counters["skipped_steps"], counters["micro_steps"]) == (6, 1, 12)
    assert state["loss_scaler"] is None and state["client_state"]["epoch"] == 3
    manifest = reader.manifest
    assert (manifest.global_steps, manifest.stage, manifest.grid) == (6, stage, SavedGrid(1, world_size, 1))
    assert manifest.versions["deepspeed"] == "0.19.8" and not manifest.exclude_frozen_parameters


def test_the_checkpoint_is_found_by_its_tag_by_a_file_and_by_its_own_directory(tmp_path: Path) -> None:
    Fake(2, 1).write(tmp_path, "old")
    path = Fake(2, 1).write(tmp_path, "new")
    (tmp_path / "latest").write_text("native")
    assert find_checkpoint(tmp_path, None) == find_checkpoint(path, None) == path
    assert find_checkpoint(tmp_path, "old").name == "old"
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "manifest.json").touch()
    (tmp_path / "latest").write_text("ours")
    assert find_checkpoint(tmp_path, None).name == "ours", "what zerolite has saved since"
    with pytest.raises(CheckpointError, match=r"no checkpoint 'newer' in .*\['new', 'old', 'ours'\]"):
        find_checkpoint(tmp_path, "newer")
    with pytest.raises(CheckpointError, match="expected a file 'latest_universal'"):
        find_checkpoint(tmp_path / "nowhere", None)


def test_steps_in_the_param_group_and_a_setting_that_torch_lacks(tmp_path: Path) -> None:
    fake = Fake(3, 1)
    fake.optimizer["optimizer_state_dict"] = {"state": {0: {}}}
    fake.optimizer["param_groups"][0] |= {"step": 4, "bias_correction": True}
    fake.write(tmp_path)
    imported = read(tmp_path)
    assert_equal(imported.state["optimizer"]["scalars"]["step"], dict.fromkeys(fake.trained, torch.tensor(4.0)))
    assert not {"step", "bias_correction"} & set(imported.state["optimizer"]["groups"][0]["values"])
    fake.optimizer["param_groups"][0]["bias_correction"] = False
    fake.write(tmp_path, "uncorrected")
    with pytest.raises(CheckpointError, match="an Adam without bias_correction"):
        read(tmp_path)


def deepspeed_step(state: dict[str, Any], overflow: bool) -> dict[str, Any]:
    """Its rule: the scale grows when the good steps since the last overflow, but one, are a multiple of the window."""
    state = dict(state)
    if overflow:
        state["cur_scale"] /= 2
        state["last_overflow_iter"] = state["cur_iter"]
    else:
        stable = state["cur_iter"] - state["last_overflow_iter"] - 1
        if stable > 0 and stable % state["scale_window"] == 0:
            state["cur_scale"] *= 2
    state["cur_iter"] += 1
    return state


@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_loss_scale_grows_when_it_would_have_grown(tmp_path: Path, window: int) -> None:
    theirs: dict[str, Any] = {
        "cur_scale": 256.0, "dynamic": True, "cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0,
        "scale_window": window, "min_scale": 1, "delayed_shift": 2, "cur_hysteresis": 2,
    }  # fmt: skip
    for step in range(12):
        theirs = deepspeed_step(theirs, overflow=step == 4)
        fake = Fake(2, 1, scaler=theirs)
        for name in fake.trained:
            fake.heads[0]["module"][name] = fake.heads[0]["module"][name].half()
        fake.write(tmp_path / str(step))
        ours = LossScaler(window=window)
        ours.load_state_dict(read(tmp_path / str(step)).state["loss_scaler"])
        scale = ours.scale
        assert scale == theirs["cur_scale"]
        later, count, wanted = theirs, 0, 0
        while later["cur_scale"] == scale:
            later, wanted = deepspeed_step(later, False), wanted + 1
        while ours.scale == scale:
            ours.update(False)
            count += 1
        assert count == min(wanted, window), "directly after an overflow DeepSpeed takes a step more than the window"


# -------------------------------------------------------------------- refusals


def cut(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def flip_a_bit(path: Path) -> None:
    """Flip a bit of the last element of b.pair."""
    content = (path / "zero" / "b.pair" / "fp32.pt").read_bytes()
    flip(path / "zero" / "b.pair" / "fp32.pt", content.index(struct.pack("<2f", 3.0, 4.0)) + 6)


HEAD = "mp_rank_00_model_states.pt"
BROKEN_FILES: dict[str, tuple[int, Callable[[Path], Any], str]] = {
    "native": (
        2, lambda p: (p / "zero" / "optimizer_state.pt").unlink(),
        "-m deepspeed.checkpoint.ds_to_universal --input_folder {path} --output_folder {path}_universal --inject_mis",
    ),
    "no_head": (2, lambda p: (p / HEAD).unlink(), "no DeepSpeed checkpoint: it has no files"),
    "missing_rank": (3, lambda p: (p / f"zero_pp_rank_1_{HEAD}").unlink(), "expected 3 files"),
    "missing_weight": (2, lambda p: (p / "zero" / "scale" / "fp32.pt").unlink(), "scale/fp32.pt' cannot be read: No"),
    "truncated": (2, lambda p: cut(p / "zero" / "scale" / "fp32.pt", 0.7), "scale/fp32.pt' is truncated or damaged"),
    "empty": (2, lambda p: cut(p / HEAD, 0), "got 0 bytes"),
    "flipped": (2, flip_a_bit, "does not have the checksum that was written with it"),
    "not_deepspeed": (2, lambda p: torch.save({"model": 1}, p / HEAD), "does not have the layout of DeepSpeed 0.19"),
    "model_parallel": (2, lambda p: (p / "mp_rank_01_model_states.pt").touch(), "a pipeline, tensor parallelism or"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_missing_damaged_and_foreign_files_are_named(tmp_path: Path, name: str) -> None:
    stage, breaks, message = BROKEN_FILES[name]
    path = Fake(stage, 3).write(tmp_path)
    breaks(path)
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path)
    assert str(path) in str(caught.value) and message.format(path=path) in str(caught.value)


BROKEN_CONTENT: dict[str, tuple[int, Callable[[Fake], Any], str]] = {
    "experts": (2, lambda f: f.heads[0].update(ds_autoep_layers=[{}]), "mixture of experts"),
    "mixed_up": (
        2, lambda f: f.heads[0]["ds_config"].update(zero_optimization={"round_robin_gradients": True}), "takes values",
    ),
    "shape": (2, lambda f: f.trained.update(scale=torch.ones(2)), r"expected a tensor of shape \(\), got \(2,\)"),
    "no_model": (3, lambda f: f.heads[0].update(module=None), "the layout of"),
    "groups": (3, lambda f: f.heads[0]["param_shapes"].append({}), "expected 2 flat groups .* got 1"),
    "frozen_part": (
        3, lambda f: f.heads[1]["frozen_param_fragments"].update({"c.weight": torch.ones(1)}),
        r"frozen parameter 'c.weight' of shape \(2, 3\) .* got \[2, 1, 2\]",
    ),
    "complex": (2, lambda f: f.heads[0]["module"].update(mean=torch.ones(2).to(torch.complex128)), "which no ch"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_CONTENT)
def test_contents_that_do_not_fit_together_are_refused(tmp_path: Path, name: str) -> None:
    stage, breaks, message = BROKEN_CONTENT[name]
    fake = Fake(stage, 3)
    breaks(fake)
    fake.write(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path)


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    path = Fake(2, 1).write(tmp_path)
    with pytest.raises(CheckpointError, match="is there already, and is no checkpoint of zerolite"):
        import_deepspeed(tmp_path, tmp_path)
    first = import_deepspeed(tmp_path, tmp_path / "ours")
    assert import_deepspeed(tmp_path, tmp_path / "ours") == first  # one of zerolite is replaced
    path.rename(tmp_path / ".hidden")
    with pytest.raises(CheckpointError, match="cannot be imported under its name: expected tag to be"):
        import_deepspeed(tmp_path / ".hidden", tmp_path / "ours")


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake(2, 2)
    del fake.heads[0]["module"]["c.weight"]
    fake.write(tmp_path / "theirs", "one")
    Fake(2, 2).write(tmp_path / "theirs", "two")
    assert main([str(tmp_path / "theirs"), str(tmp_path / "ours"), "--tag", "one"]) == 0
    assert capsys.readouterr().out == f"imported '{tmp_path}/theirs' to '{tmp_path}/ours/one'\n"
    assert CheckpointReader(tmp_path / "ours" / "one").manifest.exclude_frozen_parameters
    flip_a_bit(tmp_path / "theirs" / "two")
    assert main([str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 1
    output = capsys.readouterr().err
    assert output.startswith("zerolite import-deepspeed: ") and "checksum" in output
