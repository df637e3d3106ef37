"""`zerolite import-deepspeed`: what it writes, what it says, and what it keeps in memory."""

from __future__ import annotations

import struct
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.deepspeed_fakes import example
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.reader import CheckpointReader
from zerolite.compat import deepspeed_reader
from zerolite.compat.deepspeed_import import import_deepspeed, main
from zerolite.compat.deepspeed_reader import read_deepspeed


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_written_is_what_was_read(tmp_path: Path, stage: int) -> None:
    client_state = {"epoch": 3, "weights": torch.arange(3.0), "nothing": torch.empty(0, 2)}
    fake = example(stage, 2, client_state=client_state)
    fake.buffers["nothing"] = fake.heads[0]["module"]["nothing"] = torch.empty(2, 0)
    fake.heads[0]["buffer_names"].append("nothing")
    fake.write(tmp_path / "theirs")
    imported = read_deepspeed(tmp_path / "theirs")
    path = import_deepspeed(tmp_path / "theirs", tmp_path / "ours")
    assert path == tmp_path / "ours" / "global_step6"
    assert (tmp_path / "ours" / "latest").read_text().strip() == "global_step6"
    reader = CheckpointReader(path)
    values = {shard.key: shard.values() for shard in imported.tensors}
    for key, value in values.items():
        found = reader.read(key)
        assert found.dtype == value.dtype and found.shape == value.shape and torch.equal(found, value), key
    assert set(reader.tensors) == set(values) | {"client_state/0", "client_state/1"}
    assert [problem for _, problem in reader.verify() if problem] == []
    state = reader.state
    assert state["client_state"]["epoch"] == 3 and torch.equal(state["client_state"]["weights"], torch.arange(3.0))
    assert state["client_state"]["nothing"].shape == (0, 2)
    for key in ("parameters", "buffers", "lr_scheduler", "loss_scaler", "counters", "loaders", "extra"):
        assert state[key] == imported.state[key], key
    assert state["optimizer"] == imported.state["optimizer"]
    about = reader.manifest.about
    assert (about.tag, about.global_steps, about.world_size, about.stage) == ("global_step6", 6, 2, stage)
    assert about.precision == {"compute": "BF16, F32", "master": "F32"} and about.versions["deepspeed"] == "0.19.8"
    assert about.parameters == {"tensors": 5, "elements": 31, "trained_tensors": 4, "trained_elements": 25}
    assert not about.exclude_frozen_parameters


def test_wrappers_are_no_part_of_names(tmp_path: Path) -> None:
    fake = example(2, 2)
    for mapping in (fake.heads[0]["module"], fake.heads[0]["param_shapes"][0]):
        for name in list(mapping):
            mapping[f"_orig_mod.{name}"] = mapping.pop(name)
    fake.heads[0]["shared_params"] = {"_orig_mod.head.weight": "_orig_mod.a.weight"}
    fake.heads[0]["buffer_names"] = [f"_orig_mod.{name}" for name in fake.buffers]
    fake.write(tmp_path / "wrapped")
    example(2, 2).write(tmp_path / "plain")
    wrapped, plain = read_deepspeed(tmp_path / "wrapped"), read_deepspeed(tmp_path / "plain")
    assert wrapped.state == plain.state
    assert sorted(shard.key for shard in wrapped.tensors) == sorted(shard.key for shard in plain.tensors)


def test_without_frozen_parameters_the_checkpoint_says_so(tmp_path: Path) -> None:
    fake = example(2, 1)
    del fake.heads[0]["module"]["c.weight"]
    fake.write(tmp_path / "theirs")
    path = import_deepspeed(tmp_path / "theirs", tmp_path / "ours")
    assert CheckpointReader(path).manifest.about.exclude_frozen_parameters


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    path = example(2, 1).write(tmp_path)
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
    example(2, 2, client_state={"where": Path("/x")}).write(tmp_path / "theirs", "one")
    example(2, 2).write(tmp_path / "theirs", "two")
    assert main([str(tmp_path / "theirs"), str(tmp_path / "ours"), "--tag", "one"]) == 0
    assert capsys.readouterr().out == f"imported '{tmp_path}/theirs' to '{tmp_path}/ours/one'\n"
    assert "left out: client_state['where'], a pathlib.PosixPath" in caplog.text
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "ours")]) == 1
    assert capsys.readouterr().err.startswith("zerolite import-deepspeed: ")
    optimizer = tmp_path / "theirs" / "two" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(optimizer.read_bytes())
    content[content.index(struct.pack("<2f", 3.0, 4.0))] ^= 1
    optimizer.write_bytes(content)
    assert main([str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 1
    assert "checksum" in capsys.readouterr().err
    assert main([str(tmp_path / "theirs"), str(tmp_path / "ours"), "--no-verify"]) == 0


def test_one_tensor_at_a_time_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is put together before it is asked for, and nothing is kept; the rest are views of mapped files."""
    example(3, 2).write(tmp_path)
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
        shard.values()
    assert len(made) == 3 * 4 + 1
