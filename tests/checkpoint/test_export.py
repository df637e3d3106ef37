"""Models in safetensors files: exported from a checkpoint, and written by an engine."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zerolite
from tests.checkpoint import faults, runs
from tests.checkpoint.crafted import flip
from tests.checkpoint.exported import BUFFERS, PARAMETERS, contents, make_checkpoint, read_file, read_model
from tests.checkpoint.recipes import RECIPES
from tests.checkpoint.runs import assert_equal
from tests.toolkit import models
from tests.toolkit.compare import assert_same_on_ranks
from tests.toolkit.configs import ADAMW, at
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import make_engine, raised, run_steps
from zerolite.checkpoint import export
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.full_model import FullModel
from zerolite.checkpoint.huggingface import plan_files
from zerolite.checkpoint.safetensors import ToStore
from zerolite.utils.dtypes import BY_CODE

FLOATS = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def expected(dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    stored = contents()
    wanted = {n: stored[f"parameters/{n}"].to(dtype or BY_CODE[about["dtype"]]) for n, about in PARAMETERS.items()}
    for name, own in BUFFERS.items():
        wanted[name] = stored[f"buffers/{name}"].to(dtype if dtype is not None and own.is_floating_point else own)
    return wanted


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_files_are_filled_in_order_and_hold_at_most_what_was_asked_for() -> None:
    sizes = {"a": 6, "b": 4, "c": 1, "big": 30, "d": 10, "none": 0}
    entries = [ToStore(name, torch.uint8, (size,)) for name, size in sizes.items()]
    files = plan_files(entries, "10B", {"x": "c", "y": "a", "z": "a"}, {})
    assert [[entry.name for entry in file.entries] for file in files] == [["a", "b"], ["c"], ["big"], ["d", "none"]]
    assert [file.name for file in files] == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert files[0].metadata == {"y": "a", "z": "a", "format": "pt"}
    assert files[1].metadata == {"x": "c", "format": "pt"}
    assert [file.name for file in plan_files(entries, "51B", {}, {})] == ["model.safetensors"]
    assert [file.name for file in plan_files([], "51B", {}, {})] == ["model.safetensors"]


@pytest.mark.parametrize(("dtype", "size"), [(None, "60B"), ("fp32", "5GB"), ("bf16", "60B"), ("fp16", "60B")])
def test_a_checkpoint_is_exported(checkpoint: Path, tmp_path: Path, dtype: str | None, size: str) -> None:
    out = tmp_path / "deep" / "model"
    files = export.export_checkpoint(checkpoint, out, FLOATS[dtype], size)
    got, aliases = read_model(out)
    assert_equal(got, expected(FLOATS[dtype]), "exported tensors")
    assert aliases == {"head.weight": "embed.weight", "again.weight": "embed.weight"}
    assert sorted(path.name for path in files) == [name for name in listing(out) if "index" not in name]
    if size == "60B":
        assert len(files) > 2
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": sum(value.nbytes for value in got.values())}


def test_frozen_parameters_that_were_not_saved_are_asked_about(tmp_path: Path) -> None:
    stored = {key: value for key, value in contents().items() if key != "parameters/frozen.weight"}
    make_checkpoint(tmp_path / "c", stored, PARAMETERS, BUFFERS, exclude_frozen_parameters=True)
    with pytest.raises(CheckpointError, match=r"'frozen.weight'.*Pass --exclude-frozen-parameters"):
        export.export_checkpoint(tmp_path / "c", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export.export_checkpoint(tmp_path / "c", tmp_path / "out", exclude_frozen=True)
    assert "frozen.weight" not in read_model(tmp_path / "out")[0]


def test_an_earlier_export_is_replaced_whatever_its_files_and_others_stay(checkpoint: Path, tmp_path: Path) -> None:
    """Leftovers of an export that was killed are replaced too."""
    out = tmp_path / "out"
    out.mkdir()
    foreign = ("config.json", "model-00001-of-00077.safetensors", "pytorch_model.bin", "model.safetensors.bak")
    for name in (*foreign, ".model-00001-of-00002.safetensors.incomplete", ".model.safetensors.incomplete"):
        (out / name).write_text(name)
    for size in ("60B", "100B", "5GB", "100B", "100B", "5GB"):
        files = export.export_checkpoint(checkpoint, out, torch.bfloat16, size)
        index = ["model.safetensors.index.json"] * (size != "5GB")
        assert listing(out) == sorted([*foreign, *(path.name for path in files), *index])
        assert_equal(read_model(out)[0], expected(torch.bfloat16), size)
    assert all((out / name).read_text() == name for name in foreign)


@pytest.mark.fast("5GB-5GB")
@pytest.mark.parametrize(("first", "second"), [("5GB", "5GB"), ("5GB", "60B"), ("60B", "5GB")])
def test_a_failure_at_any_point_leaves_a_whole_model_or_none(
    checkpoint: Path, tmp_path: Path, first: str, second: str
) -> None:
    out = tmp_path / "out"
    outcomes = []
    for number in range(200):
        export.export_checkpoint(checkpoint, out, torch.float32, first)
        try:
            with faults.failing(number, errno.EIO, always=True):
                export.export_checkpoint(checkpoint, out, torch.bfloat16, second)
        except CheckpointError as error:
            assert f"'{out}" in str(error) and "Input/output error" in str(error)
        else:
            break
        if (out / "model.safetensors").exists() or (out / "model.safetensors.index.json").exists():
            found = read_model(out)[0]
            outcomes.append(str(found["gain"].dtype))
            assert_equal(found, expected(found["gain"].dtype), f"operation {number}")
        else:
            outcomes.append("none")
        assert not list(out.glob(".model*incomplete"))
    assert number >= 5
    assert outcomes[0] == "torch.float32"
    assert_equal(read_model(out)[0], expected(torch.bfloat16), "at last")
    if first == second == "5GB":
        assert "none" not in outcomes


def test_a_damaged_checkpoint_leaves_an_earlier_export_alone(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export.export_checkpoint(checkpoint, out)
    flip(checkpoint / "rank_00000.safetensors", -1)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors' is damaged.*expected checksum"):
        export.export_checkpoint(checkpoint, out, torch.float32, "60B")
    assert listing(out) == ["model.safetensors"]
    assert_equal(read_model(out)[0], expected(None), "the earlier export")


def test_the_command_says_what_it_wrote(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main([str(checkpoint.parent), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out == f"exported '{checkpoint.parent}' to {tmp_path / 'out' / 'model.safetensors'}\n"
    assert export.main([str(checkpoint), str(tmp_path / "out"), "--max-shard-size", "0.1kB"]) == 0
    assert f"files and model.safetensors.index.json in '{tmp_path / 'out'}'" in capsys.readouterr().out
    assert_equal(read_model(tmp_path / "out")[0], expected(None), "without --dtype")


def test_values_beyond_fp16_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = {"parameters/large": torch.tensor([1e5, 1.0]), "parameters/small": torch.tensor([6e4, 1.0])}
    make_checkpoint(tmp_path / "c", values, dict.fromkeys(("large", "small"), faults.describe([2])))
    for dtype, told in (("bf16", False), ("fp16", True)):
        assert export.main([str(tmp_path / "c"), str(tmp_path / "out"), "--dtype", dtype]) == 0
        assert ("'large' has values beyond what fp16 holds" in caplog.text) == told
        assert "'small'" not in caplog.text


MEASURED = """
import re, sys
from zerolite.checkpoint import export
def status(name):
    return int(re.search(name + r":\\s*(\\d+) kB", open("/proc/self/status").read())[1])
options = sys.argv[1:]
export.build_parser("x").parse_args(options)
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = status("VmRSS")
assert export.main(options) == 0
print("peak", status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_the_largest_tensor(tmp_path: Path) -> None:
    tensors = {f"parameters/{i}": torch.full((1 << 21,), float(i)) for i in range(12)}  # 8 MiB each
    make_checkpoint(tmp_path / "c", tensors, {str(i): faults.describe([1 << 21]) for i in range(12)})
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "c"), str(tmp_path / "out"), "--dtype", "bf16"]
    # Freed memory goes back at once, as that of tensors above 32 MiB always does.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ran.returncode == 0, ran.stderr
    peak = int(ran.stdout.split("peak")[1]) / 1024
    assert peak < 8 * 1.5 + 16 + 6  # MiB: the tensor, half of it as it is stored, two buffers, and reading itself


@pytest.mark.fast("hugging_face_gpt2-*")
@pytest.mark.parametrize(("kind", "size"), [(models.hugging_face_gpt2, "2KB"), (models.hugging_face_llama, "5GB")])
def test_from_pretrained_loads_it(tmp_path: Path, kind: Any, size: str) -> None:
    """A model whose fp32 masters bf16 does not hold, in either dtype."""
    pytest.importorskip("transformers")
    model, out = models.build(kind), tmp_path / "out"
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    masters = {n: p.detach() + torch.randn(p.shape) * 1e-4 for n, p in model.named_parameters()}
    about = {n: faults.describe(p.shape, aliases=names[id(p)][1:]) for n, p in model.named_parameters()}
    make_checkpoint(tmp_path / "c", {f"parameters/{name}": value for name, value in masters.items()}, about)
    for dtype in (torch.float32, torch.bfloat16):
        export.export_checkpoint(tmp_path / "c", out, dtype, size)
        model.config.save_pretrained(out)
        loaded, told = type(model).from_pretrained(out, dtype=dtype, output_loading_info=True)
        assert not any(told.values()), told
        found = {name: p.detach() for name, p in loaded.named_parameters()}
        assert_equal(found, {name: value.to(dtype) for name, value in masters.items()}, f"loaded in {dtype}")


def trained(stage: int, precision: str = "bf16", model: str = "OddModel") -> Any:
    """An engine after one step."""
    engine = make_engine(at(stage, precision, 1, 0.0, ADAMW), model)
    run_steps(engine, model=model)
    return engine


@pytest.mark.fast("0-2")
@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_whole_states_in_any_dtype_and_the_model_in_files(stage: int, tmp_path: Path) -> None:
    for precision, model in (("bf16", "OddModel"), ("fp16", "OddModel"), ("fp32", "ConvNet")):
        engine, directory = trained(stage, precision, model), tmp_path / precision
        half = torch.float16 if precision == "fp16" else torch.bfloat16
        states = {dtype: engine.full_state_dict(dtype=dtype) for dtype in FLOATS.values()}
        fp32 = states[torch.float32]
        names = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
        masters = dict(zip(names, zerolite.get_full_master(names.values()), strict=True))
        assert_equal({name: fp32[name] for name in masters}, masters, "masters")
        assert precision == "fp32" or any((m != m.to(half).float()).any() for m in masters.values())
        for dtype, state in states.items():
            assert dtype is None or {v.dtype for v in state.values() if v.is_floating_point()} == {dtype}
            assert_equal(state, {n: v.to(state[n].dtype) for n, v in fp32.items()}, f"{dtype}")
        assert states[None].keys() == models.build(getattr(models, model)).state_dict().keys()
        refused = raised(lambda engine=engine: engine.full_state_dict(dtype=torch.int8))
        assert "expected dtype to be None or one of torch.float32" in refused
        on_rank_0 = engine.full_state_dict(rank0_only=True, dtype=torch.float32)
        assert_equal(on_rank_0, fp32 if engine.rank == 0 else {}, "rank 0 only")
        for size in ("1GB", "200B"):
            engine.save_16bit_model(directory / size, max_shard_size=size)
        engine.save_16bit_model(str(directory / "trained"), exclude_frozen_parameters=True)
        engine.save_checkpoint(directory / "checkpoints")
        if engine.rank == 0:
            check_files(directory, states, half, {"head.weight": "embed.weight"} if model == "OddModel" else {})


def check_files(directory: Path, states: dict[Any, Any], half: torch.dtype, tied: dict[str, str]) -> None:
    """Check the files of save_16bit_model, and those that are exported from the checkpoint."""

    def check(written: Path, wanted: dict[str, torch.Tensor]) -> None:
        tensors, aliases = read_model(written)
        assert aliases == tied
        assert_equal(tensors, {n: v for n, v in wanted.items() if n not in tied}, str(written))

    for size in ("1GB", "200B"):
        check(directory / size, states[half])
    assert len(list((directory / "200B").glob("model-*"))) > 2
    only_trained = read_model(directory / "trained")[0]
    assert only_trained.keys() == states[half].keys() - tied.keys() - {"frozen.weight", "frozen.bias"}
    for wanted, dtype in ((states[None], None), (only_trained, half), (states[torch.float32], torch.float32)):
        out, excludes = directory / "out", wanted is only_trained
        export.export_checkpoint(directory / "checkpoints", out, dtype, "300B", excludes)
        check(out, wanted)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@on_ranks(2)
def test_adapters_are_written_alone(tmp_path: Path) -> None:
    """LoRA in a small Llama: the whole model, the adapters alone, and those exported from a checkpoint."""
    import peft

    torch.manual_seed(5)
    adapted = peft.get_peft_model(
        models.build(models.hugging_face_llama), peft.LoraConfig(r=2, init_lora_weights=False)
    )
    engine = zerolite.initialize(adapted, at(3, "bf16", 1, 0.0, ADAMW))
    run_steps(engine, model="hugging_face_llama")
    engine.save_16bit_model(tmp_path / "all")
    engine.save_16bit_model(tmp_path / "adapters", exclude_frozen_parameters=True)
    engine.save_checkpoint(tmp_path / "checkpoints", exclude_frozen_parameters=True)
    if engine.rank == 0:
        everything, alone = read_model(tmp_path / "all")[0], read_model(tmp_path / "adapters")[0]
        assert len(alone) == 8 and all("lora_" in name for name in alone)
        assert_equal(alone, {name: everything[name] for name in alone}, "adapters")
        export.export_checkpoint(tmp_path / "checkpoints", tmp_path / "out", exclude_frozen=True)
        assert_equal(read_model(tmp_path / "out")[0], alone, "exported adapters")
        model = peft.get_peft_model(models.build(models.hugging_face_llama).bfloat16(), peft.LoraConfig(r=2))
        loaded = model.load_state_dict(alone, strict=False)
        assert not loaded.unexpected_keys and not any("lora_" in name for name in loaded.missing_keys)


@on_ranks(2)
def test_if_rank_0_cannot_write_all_ranks_say_so_and_go_on(tmp_path: Path) -> None:
    engine = trained(3)

    def save() -> None:
        engine.save_16bit_model(tmp_path, max_shard_size="100B")

    save()
    before = read_model(tmp_path)[0]
    run_steps(engine, model="OddModel")
    for number in (0, 1, 2):  # operations called "write": one a file
        with faults.failing(number if engine.rank == 0 else 10**6, errno.ENOSPC, always=True, only="write"):
            told = raised(save)
        own = told.removeprefix("CheckpointError: ").removeprefix("engine.save_16bit_model: rank 0: ")
        assert own.startswith(f"'{tmp_path}/.model") and own.endswith("could not be written: No space left on device")
        assert ("engine.save_16bit_model: rank 0" in told) == (engine.rank != 0)
        if engine.rank == 0:
            assert_equal(read_model(tmp_path)[0], before, "what was there")
            assert not list(tmp_path.glob(".*"))
    save()
    state = engine.full_state_dict()
    assert_same_on_ranks(state, "after the failures")
    run_steps(engine, model="OddModel")
    tensors = read_model(tmp_path)[0]
    assert_equal(tensors, {name: state[name] for name in tensors}, "written at last")


@on_ranks(2)
def test_an_engine_writes_one_tensor_at_a_time(tmp_path: Path) -> None:
    """No whole tensor that was gathered for a file is alive when the next one is asked for."""
    engine = trained(3)
    gathered: list[Any] = []
    original = FullModel.get

    def counted(*args: Any, **kwargs: Any) -> Any:
        assert not [reference for reference in gathered if reference() is not None]
        copy = original(*args, **kwargs)
        gathered.append(weakref.ref(copy.untyped_storage()) if copy is not None else lambda: None)
        return copy

    with mock.patch.object(FullModel, "get", counted):
        engine.save_16bit_model(tmp_path)
    assert len(gathered) == 13


@on_ranks(2)
def test_names_are_those_of_the_model_inside_wrappers(tmp_path: Path) -> None:
    model = models.build(models.Mlp)
    plain = models.build(models.Mlp).state_dict()
    model.first = checkpoint_wrapper(model.first)
    engine = zerolite.initialize(model, at(3))
    engine.save_16bit_model(tmp_path)
    for dtype in (None, torch.float32):
        assert_equal(engine.full_state_dict(dtype=dtype), plain, "whole state")
    assert_equal(read_model(tmp_path)[0], {n: v.bfloat16() for n, v in plain.items()}, "in a file")
    assert list(read_file(tmp_path / "model.safetensors")[1]) == list(plain)


@on_ranks(2)
def test_models_of_offloaded_engines_are_the_same(tmp_path: Path) -> None:
    """full_state_dict, save_16bit_model, and what ``zerolite export`` makes of the checkpoint."""
    recipe = RECIPES["mixture in bf16"]
    states, files = [], []
    for device in ("none", "cpu", "nvme"):
        path = {"nvme_path": str(tmp_path)} if device == "nvme" else {}
        zero = {"offload_optimizer": {"device": device, **path}, "sub_group_size": 100}
        engine = runs.make_engine(recipe, 3, zero=zero)
        runs.train(engine, recipe, 0, 2)
        engine.save_checkpoint(tmp_path / device / "checkpoints")
        engine.save_16bit_model(tmp_path / device / "model")
        states.append(engine.full_state_dict())
        assert_equal(states[-1], states[0], device)
        if engine.rank == 0:
            export.main([str(tmp_path / device / "checkpoints"), str(tmp_path / device / "exported")])
            parts = [tmp_path / device / part / "model.safetensors" for part in ("model", "exported")]
            files.append([part.read_bytes() for part in parts])
            assert files[-1] == files[0]
    assert any(value.numel() > 100 for value in states[0].values())
