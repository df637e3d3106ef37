"""Importing DeepSpeed's checkpoints, hand-made ones: what is in the files, every reason to refuse them, and the command
`zerolite import-deepspeed`. Real ones are imported in test_deepspeed_real.py."""

from __future__ import annotations

import re
import struct
import weakref
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
from zerolite.compat import deepspeed_reader
from zerolite.compat.deepspeed_import import import_deepspeed, main
from zerolite.compat.deepspeed_reader import ImportedCheckpoint, read_deepspeed
from zerolite.precision.loss_scaler import LossScaler


def values_of(imported: ImportedCheckpoint) -> dict[str, torch.Tensor]:
    found = {}
    for shard in imported.tensors:
        found[shard.key] = shard.tensor()
        assert found[shard.key].shape == shard.shape and found[shard.key].dtype == shard.dtype
    assert len(found) == len(list(imported.tensors))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_value_of_a_checkpoint_is_imported(tmp_path: Path, stage: int, world_size: int) -> None:
    client_state = {"epoch": 3, "weights": torch.arange(3.0), "nothing": torch.empty(0, 2)}
    fake = Fake(stage, world_size, client_state=client_state)
    fake.buffers["nothing"] = fake.heads[0]["module"]["nothing"] = torch.empty(2, 0)
    fake.heads[0]["buffer_names"].append("nothing")
    fake.write(tmp_path / "theirs")
    imported = read_deepspeed(tmp_path / "theirs")
    expected = {f"parameters/{name}": value for name, value in {**fake.trained, **fake.frozen}.items()}
    expected |= {f"buffers/{name}": value for name, value in fake.buffers.items()}
    for kind, values in fake.moments.items():
        expected |= {f"optimizer/{kind}/{name}": value for name, value in values.items()}
    assert_equal(values_of(imported), expected)
    state = imported.state
    assert list(state["parameters"]) == ["a.weight", "scale", "b.bias", "b.pair", "c.weight"]
    assert state["parameters"]["a.weight"] == {
        "shape": [3, 5], "dtype": "F32", "trained": True, "aliases": ["head.weight"],
    }  # fmt: skip
    assert state["parameters"]["c.weight"] == {"shape": [2, 3], "dtype": "BF16", "trained": False, "aliases": []}
    assert state["parameters"]["scale"]["shape"] == []
    assert state["buffers"]["seen"] == {"shape": [], "dtype": "I64", "aliases": []}
    (group,) = state["optimizer"]["groups"]
    assert group["names"] == list(fake.trained)
    assert group["values"] == {
        "lr": 0.5, "betas": (0.9, 0.99), "weight_decay": 0.25, "amsgrad": False, "decoupled_weight_decay": True,
    }  # fmt: skip
    assert_equal(state["optimizer"]["scalars"]["step"], dict.fromkeys(fake.trained, torch.tensor(5.0)))
    assert state["optimizer"]["type"] == "AdamW"
    assert state["lr_scheduler"] == {"type": None, "state": {"last_epoch": 5}}
    assert state["counters"] == {
        "global_steps": 6, "skipped_steps": 1, "skipped_in_a_row": 0, "micro_steps": 12, "last_norm": None,
        "weight_unit": 1.0,
    }  # fmt: skip
    assert state["loss_scaler"] is None and state["client_state"]["epoch"] == 3
    assert (imported.tag, imported.stage, imported.world_size) == ("global_step6", stage, world_size)
    assert imported.left_out == []
    path = import_deepspeed(tmp_path / "theirs", tmp_path / "ours")
    assert path == tmp_path / "ours" / "global_step6"
    assert (tmp_path / "ours" / "latest").read_text().strip() == "global_step6"
    reader = CheckpointReader(path)
    of_client = {"client_state/0": client_state["weights"], "client_state/1": client_state["nothing"]}
    assert_equal({key: reader.read(key) for key in reader.tensors}, expected | of_client)
    assert list(reader.problems()) == []
    restored = dict(reader.state["client_state"])
    assert restored.pop("epoch") == 3
    assert_equal(restored, {name: client_state[name] for name in ("weights", "nothing")})
    for key in state.keys() - {"client_state"}:
        assert reader.state[key] == state[key], key
    manifest = reader.manifest
    assert (manifest.tag, manifest.global_steps, manifest.stage) == ("global_step6", 6, stage)
    assert manifest.grid == SavedGrid(1, world_size, 1)
    assert manifest.versions["deepspeed"] == "0.19.8"
    assert not manifest.exclude_frozen_parameters


def test_the_checkpoint_is_found_by_its_tag_by_latest_and_by_its_own_directory(tmp_path: Path) -> None:
    Fake(2, 1).write(tmp_path, "old")
    path = Fake(2, 1).write(tmp_path, "new")
    assert read_deepspeed(tmp_path).tag == "new"
    assert read_deepspeed(tmp_path, "old").tag == "old"
    assert read_deepspeed(path).tag == "new"
    with pytest.raises(CheckpointError, match=re.escape("no checkpoint 'newer' in") + r".*\['new', 'old'\]"):
        read_deepspeed(tmp_path, "newer")
    (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointError, match="expected a file 'latest'"):
        read_deepspeed(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_deepspeed(tmp_path / "nowhere")


def test_a_buffer_with_two_names_is_stored_once(tmp_path: Path) -> None:
    fake = Fake(1, 1)
    fake.heads[0]["module"]["mean_again"] = fake.heads[0]["module"]["mean"]
    fake.heads[0]["module"]["mean_part"] = fake.heads[0]["module"]["mean"][:2]
    fake.heads[0]["buffer_names"] += ["mean_again", "mean_part"]
    fake.write(tmp_path)
    imported = read_deepspeed(tmp_path)
    assert imported.state["buffers"]["mean"]["aliases"] == ["mean_again"]
    assert {key for key in values_of(imported) if "mean" in key} == {"buffers/mean", "buffers/mean_part"}


@pytest.mark.parametrize("corrects", [True, False])
def test_settings_that_no_optimizer_of_torch_has(tmp_path: Path, corrects: bool) -> None:
    fake = Fake(3, 1)
    optimizer(fake, 0)["param_groups"][0]["bias_correction"] = corrects
    fake.write(tmp_path)
    imported = read_deepspeed(tmp_path)
    assert "bias_correction" not in imported.state["optimizer"]["groups"][0]["values"]
    assert imported.left_out == ["parameter group 0['bias_correction'], which is False"] * (not corrects)


@pytest.mark.parametrize(
    ("of_state", "of_group", "expected"),
    [({"step": 3}, {}, 3.0), ({"step": 4}, {"step": 0}, 4.0), ({}, {"step": 5}, 5.0)],
    ids=["state", "state before group", "group"],
)
def test_steps_are_counted_in_the_state_or_else_in_the_group(
    tmp_path: Path, of_state: dict[str, int], of_group: dict[str, int], expected: float
) -> None:
    """Counts of steps are numbers of Python. An optimizer that counts in its state can have an old count in the
    group."""
    fake = Fake(2, 2)
    for saved in (optimizer(fake, rank) for rank in range(2)):
        del saved["state"][0]["step"]
        saved["state"][0] |= of_state
        saved["param_groups"][0] |= of_group
    fake.write(tmp_path)
    found = read_deepspeed(tmp_path).state["optimizer"]
    assert_equal(found["scalars"]["step"], dict.fromkeys(fake.trained, torch.tensor(expected)))
    assert "step" not in found["groups"][0]["values"]


# -------------------------------------------------------------------- the loss scale


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
        ours.load_state_dict(read_deepspeed(tmp_path / str(step)).state["loss_scaler"])
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


def rename(path: Path, old: str, new: str) -> None:
    (path / old).rename(path / new)


def cut(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt".format
MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt".format
HEAD = "mp_rank_00_model_states.pt"

BROKEN_FILES: dict[str, tuple[int, Callable[[Path], Any], str]] = {
    "no_head": (2, lambda p: (p / HEAD).unlink(), "is no DeepSpeed checkpoint"),
    "no_first_head": (3, lambda p: (p / MODEL(0)).unlink(), "zero_pp_rank_0_mp_rank_00_model_states.pt' is missing"),
    "missing_rank": (2, lambda p: (p / OPTIM(1)).unlink(), r"of rank\(s\) 1 are missing: zero_pp_rank_1_mp"),
    "rank_too_many": (1, lambda p: (p / OPTIM(3)).write_bytes(b""), r"saved by 3 ranks, but .* of rank\(s\) 3 too"),
    "two_saves": (2, lambda p: (p / f"bf16_{OPTIM(1)}").write_bytes(b""), "two files of rank 1, 'bf16_zero_pp_rank_1"),
    "stage_0": (2, lambda p: [(p / OPTIM(r)).unlink() for r in range(3)], "was saved without ZeRO"),
    "truncated": (2, lambda p: cut(p / OPTIM(2), 0.7), "rank_2_mp_rank_00_optim_states.pt' is truncated or damaged"),
    "empty": (2, lambda p: cut(p / HEAD, 0), "truncated or damaged: .* got 0 bytes"),
    "not_deepspeed": (2, lambda p: torch.save({"model": 1}, p / HEAD), "expected an entry \\['ds_version'\\]"),
    "model_parallel": (2, lambda p: rename(p, OPTIM(2), "zero_pp_rank_2_mp_rank_01_optim_states.pt"), "model p"),
    "pipeline": (2, lambda p: (p / "layer_00-model_00-model_states.pt").touch(), "is a checkpoint of a pipeline"),
    "experts": (2, lambda p: (p / "layer_0_expert_1_mp_rank_00_model_states.pt").touch(), "mixture of experts"),
    "nvme": (3, lambda p: (p / "offloaded_tensors").mkdir(), "NVMe offload"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_missing_damaged_and_foreign_files_are_named(tmp_path: Path, name: str) -> None:
    stage, breaks, message = BROKEN_FILES[name]
    path = Fake(stage, 3).write(tmp_path)
    breaks(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_deepspeed(tmp_path)
    assert str(path) in str(caught.value)


def flats(fake: Fake, rank: int) -> list[torch.Tensor]:
    saved = fake.states[rank]["optimizer_state_dict"]
    found: list[torch.Tensor] = saved["fp32_flat_groups" if fake.stage == 3 else "single_partition_of_fp32_groups"]
    return found


def optimizer(fake: Fake, rank: int) -> dict[str, Any]:
    saved = fake.states[rank]["optimizer_state_dict"]
    found: dict[str, Any] = saved["optimizer_state_dict" if fake.stage == 3 else "base_optimizer_state"]
    return found


def set_flat(fake: Fake, rank: int, value: Any) -> None:
    flats(fake, rank)[0] = value


BROKEN_CONTENT: dict[str, tuple[int, Callable[[Fake], Any], str]] = {
    "world_size": (2, lambda f: f.heads[0].update(dp_world_size=4), r"by 4 ranks, but .* rank\(s\) 3 are missing"),
    "stages": (
        2, lambda f: f.states[1]["optimizer_state_dict"].update(zero_stage=1), "expected one ZeRO stage .* got 1, 2",
    ),
    "tensor_parallel": (
        2, lambda f: f.heads[0].update(checkpoint_parallel_dimensions={"tp_degree": 2}), "parallelism .of degree 2",
    ),
    "experts": (2, lambda f: f.heads[0].update(ds_autoep_layers=[{}]), "mixture of experts"),
    "short_master": (2, lambda f: set_flat(f, 1, flats(f, 1)[0][:-2]), "25 elements together, but .* 3 ranks 23"),
    "uneven_masters": (
        2, lambda f: (set_flat(f, 0, torch.ones(8)), set_flat(f, 2, torch.ones(7))), r"same length .* got \[8, 10, 7\]",
    ),
    "short_slice": (3, lambda f: set_flat(f, 2, flats(f, 2)[0][:-1]), r"10 elements .* partitions \[10, 10, 9\]"),
    "no_tensor": (2, lambda f: set_flat(f, 1, None), "expected flat tensors in 'single_partition.*got NoneType"),
    "groups": (3, lambda f: flats(f, 1).append(torch.ones(2)), "expected 1 groups of master weights.*got 2"),
    "short_state": (
        2, lambda f: optimizer(f, 1)["state"][0].update(exp_avg=torch.ones(3)), "'exp_avg' of rank 1 .* shape \\(3,\\)",
    ),
    "other_state": (
        2, lambda f: optimizer(f, 0)["state"][0].update(rows=torch.ones(3)), "'rows' to be a number, or .* shape"
    ),
    "steps": (
        3, lambda f: optimizer(f, 1)["state"][0].update(step=torch.tensor(6.0)), r"'step' on all ranks, got \[5.0, 6",
    ),
    "frozen_part": (
        3, lambda f: f.heads[1]["frozen_param_fragments"].update({"c.weight": torch.ones(1)}),
        r"part of 2 elements of frozen parameter 'c.weight' .* got \[2, 1, 2\]",
    ),
    "shape": (2, lambda f: f.heads[0]["param_shapes"][0].update(scale=(-1,)), "expected shapes in 'param_shapes'"),
    "complex": (2, lambda f: f.heads[0]["module"].update(mean=torch.ones(2).to(torch.complex128)), "which no ch"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_CONTENT)
def test_contents_that_do_not_fit_together_are_refused(tmp_path: Path, name: str) -> None:
    stage, breaks, message = BROKEN_CONTENT[name]
    fake = Fake(stage, 3)
    breaks(fake)
    fake.write(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_deepspeed(tmp_path)


def flip_a_bit(path: Path) -> None:
    """Flip a bit of the last element of b.bias."""
    content = path.read_bytes()
    flip(path, content.index(struct.pack("<2f", 3.0, 4.0)) - 2)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    flip_a_bit(Fake(2, 2).write(tmp_path) / OPTIM(1))
    with pytest.raises(CheckpointError, match="does not have the checksum that was written with it"):
        read_deepspeed(tmp_path)


# -------------------------------------------------------------------- what is written


def test_wrappers_are_no_part_of_names(tmp_path: Path) -> None:
    fake = Fake(2, 2)
    for mapping in (fake.heads[0]["module"], fake.heads[0]["param_shapes"][0]):
        for name in list(mapping):
            mapping[f"_orig_mod.{name}"] = mapping.pop(name)
    fake.heads[0]["shared_params"] = {"_orig_mod.head.weight": "_orig_mod.a.weight"}
    fake.heads[0]["buffer_names"] = [f"_orig_mod.{name}" for name in fake.buffers]
    fake.write(tmp_path / "wrapped")
    Fake(2, 2).write(tmp_path / "plain")
    wrapped, plain = read_deepspeed(tmp_path / "wrapped"), read_deepspeed(tmp_path / "plain")
    assert wrapped.state == plain.state
    assert sorted(shard.key for shard in wrapped.tensors) == sorted(shard.key for shard in plain.tensors)


def test_without_frozen_parameters_the_checkpoint_says_so(tmp_path: Path) -> None:
    fake = Fake(2, 1)
    del fake.heads[0]["module"]["c.weight"]
    fake.write(tmp_path / "theirs")
    path = import_deepspeed(tmp_path / "theirs", tmp_path / "ours")
    assert CheckpointReader(path).manifest.exclude_frozen_parameters


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    path = Fake(2, 1).write(tmp_path)
    before = sorted(path.iterdir())
    with pytest.raises(CheckpointError, match="is there already, and is no checkpoint of zerolite"):
        import_deepspeed(tmp_path, tmp_path)
    assert sorted(path.iterdir()) == before
    first = import_deepspeed(tmp_path, tmp_path / "ours")
    assert import_deepspeed(tmp_path, tmp_path / "ours") == first  # one of zerolite is replaced
    path.rename(tmp_path / ".hidden")
    with pytest.raises(CheckpointError, match="cannot be imported under its name: expected tag to be"):
        import_deepspeed(tmp_path / ".hidden", tmp_path / "ours")


def test_the_command_says_what_it_did_and_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    Fake(2, 2, client_state={"where": Path("/x")}).write(tmp_path / "theirs", "one")
    Fake(2, 2).write(tmp_path / "theirs", "two")
    assert main([str(tmp_path / "theirs"), str(tmp_path / "ours"), "--tag", "one"]) == 0
    assert capsys.readouterr().out == f"imported '{tmp_path}/theirs' to '{tmp_path}/ours/one'\n"
    assert "left out: client_state['where'], a pathlib.PosixPath" in caplog.text
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "ours")]) == 1
    assert capsys.readouterr().err.startswith("zerolite import-deepspeed: ")
    flip_a_bit(tmp_path / "theirs" / "two" / OPTIM(1))
    assert main([str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 1
    assert "checksum" in capsys.readouterr().err


def test_empty_parameters_are_not_taken_for_tied_ones(tmp_path: Path) -> None:
    """Below stage 3 DeepSpeed compares addresses, and all empty tensors are at 0."""
    fake = Fake(2, 2)
    empty = {"nothing": torch.empty(0, 3), "nothing_either": torch.empty(0)}
    fake.heads[0]["module"].update(empty)
    fake.heads[0]["shared_params"]["nothing_either"] = "nothing"
    fake.write(tmp_path)
    imported = read_deepspeed(tmp_path)
    assert imported.state["parameters"]["nothing"]["shape"] == [0, 3]
    assert imported.state["parameters"]["nothing_either"]["shape"] == [0]
    assert values_of(imported)["parameters/nothing_either"].shape == (0,)


def test_one_tensor_at_a_time_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is put together before it is asked for, and nothing is kept; the rest are views of mapped files."""
    Fake(3, 2).write(tmp_path)
    made: list[weakref.ref[torch.Tensor]] = []
    gather = deepspeed_reader.gather

    def watched(*arguments: Any) -> torch.Tensor:
        assert [value for value in made if value() is not None] == []
        value = gather(*arguments)
        made.append(weakref.ref(value))
        return value

    monkeypatch.setattr(deepspeed_reader, "gather", watched)
    shards = read_deepspeed(tmp_path).tensors
    assert made == []
    for shard in shards:
        shard.tensor()
    assert len(made) == 3 * 4 + 1
