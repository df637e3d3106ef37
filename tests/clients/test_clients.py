"""accelerate, transformers, PEFT and TRL on two ranks, unchanged, with zerolite behind `import deepspeed`.

Each script in scripts/ runs under DeepSpeed as well as under zerolite. The numbers here marked so are what DeepSpeed
0.16.3 gave for the same script, on two ranks with gloo and torch 2.13.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_deepspeed_real import interpreter
from tests.cli.helpers import ROOT, output_of

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 600

# DeepSpeed's, stages 2 and 3 in fp32: the last three losses, and the last norm before clipping.
ACCELERATE_LOSSES = [1.5538098812103271, 0.7038121223449707, 0.7791683077812195]
ACCELERATE_NORM = 1.0579493045806885
# DeepSpeed's, stage 2.
TRAINER_LOSSES = [
    4.5691118240356445, 4.580258846282959, 4.556103706359863, 4.571515083312988, 4.572039604187012, 4.587225914001465,
]  # fmt: skip
TRAINER_EVALS = [4.537005424499512, 4.483879089355469]
TRAINER_TOKENS = [10, 56, 25, 3, 3, 3, 3, 3]
# DeepSpeed's, stage 2.
LIGHTNING_LOSSES = [
    0.16932038962841034, 0.002040319610387087, 0.01804976724088192, 0.006850617006421089,
    0.05211067944765091, 0.013547906652092934, 0.034861970692873, 0.03187110275030136,
]  # fmt: skip
# DeepSpeed's, stage 2.
LORA_LOSSES = [
    4.5691118240356445, 4.580258846282959, 4.556103706359863, 4.565469264984131, 4.567890167236328, 4.586223602294922,
]  # fmt: skip
# DeepSpeed 0.19.8's, stage 2.
TRL_LOSSES = {
    "grpo": [-0.06425970047712326, 3.3924975468835328e-06, 6.283323273237329e-06],
    "sft": [4.176846504211426, 4.158027648925781, 4.159123420715332],
    "dpo": [0.6931471824645996, 0.6957588195800781, 0.7003217935562134],
}
# DeepSpeed 0.19.8's, the same with every file.
FACTORY_LOSSES = {
    "file": [
        4.5691118240356445, 4.580258846282959, 4.554867744445801, 4.574511528015137, 4.573663711547852,
        4.586941719055176,
    ],
    "file_lora": [
        4.5691118240356445, 4.580258846282959, 4.555839538574219, 4.565810203552246, 4.567974090576172,
        4.586265563964844,
    ],
}  # fmt: skip
# DeepSpeed 0.19.8's, the same at stages 2 and 3 in fp32, with offload and without.
OPENRLHF = {
    "losses": [4.187839508056641, 4.47670841217041, 4.818925142288208, 4.62690544128418],
    "norms": [0.9554874897003174, 1.024904489517212, 0.9308106303215027, 0.8987794518470764],
    "rates": [0.0015, 0.003, 0.00165, 0.0003],
    "evaluated": -67.52816009521484,
    "sum": 168.58350025117397,
}
# DeepSpeed 0.19.8's in bf16, stage 3.
OPENRLHF_BF16 = {
    "losses": [4.18782114982605, 4.476691246032715, 4.81914758682251, 4.626835107803345],
    "norms": [0.9553665518760681, 1.025002121925354, 0.9310365319252014, 0.8975398540496826],
    "rates": OPENRLHF["rates"],
    "evaluated": -67.52220916748047,
    "sum": 168.548554033041,
}
# The sum of squares of the moving average. At stage 3 OpenRLHF writes it inside a gather, where DeepSpeed drops it.
OPENRLHF_AVERAGES = {"2": 168.4774583876133, "3": 168.4896393418312}


def need(*modules: str) -> None:
    for name in modules:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


LAUNCHER = ("-m", "zerolite.launcher.cli", "--nproc", "2", "--deepspeed-compat")
ON_FOUR = ("-m", "zerolite.launcher.cli", "--nproc", "4", "--deepspeed-compat")


def run_python(
    directory: Path,
    *arguments: str | Path,
    python: str | Path = sys.executable,
    timeout: float = TIMEOUT_S,
    **more: str,
) -> str:
    """Run Python with these arguments, which must succeed, without a network; return what it prints."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    changes = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
    return output_of(python, *arguments, cwd=directory, timeout=timeout, **changes, **more)


def run(tmp_path: Path, script: str, *arguments: str, launcher: tuple[str, ...] = LAUNCHER) -> Any:
    """Run a script on two ranks and return what rank 0 has written."""
    out = tmp_path / "out.json"
    run_python(tmp_path, *launcher, SCRIPTS / script, out, *arguments)
    return json.loads(out.read_text())


def test_accelerate_at_every_stage_and_precision(tmp_path: Path) -> None:
    """Accumulation, clipping, a schedule of the user's, save and load."""
    need("accelerate")
    cases = [f"{stage},{precision}" for precision in ("fp32", "bf16") for stage in range(4)] + ["2,fp16"]
    for case, result in run(tmp_path, "accelerate_loop.py", *cases).items():
        close = 1e-6 if case.endswith("fp32") else 3e-2
        assert result["losses"][-3:] == pytest.approx(ACCELERATE_LOSSES, rel=close), case
        assert result["norms"][-1] == pytest.approx(ACCELERATE_NORM, rel=close), case
        assert result["moved"] > 0.0 and result["difference"] == 0.0, case
        assert "scale" in result["names"] and result["lr"] == pytest.approx(1e-2 / 17)


def test_trainer_trains_evaluates_resumes_and_generates(tmp_path: Path) -> None:
    need("accelerate", "transformers")
    for case, result in run(tmp_path, "trainer_loop.py", "full,0", "full,1", "full,2", "full,3").items():
        assert result["losses"] == pytest.approx(TRAINER_LOSSES, rel=1e-6), case
        assert result["evals"] == pytest.approx(TRAINER_EVALS, rel=1e-6), case
        assert result["resumed"] == result["losses"][3:], case
        assert result["tokens"] == [TRAINER_TOKENS], case
        assert {"global_step3", "latest", "zero_to_fp32.py", "model.safetensors"} <= set(result["files"]), case
        assert {"config.json", "model.safetensors"} <= set(result["model"]), case


def test_trainer_divides_layers(tmp_path: Path) -> None:
    """``autotp_size`` 2 on four ranks: two copies of the model, which train on what two ranks train on."""
    need("accelerate", "transformers")
    for case, result in run(tmp_path, "trainer_loop.py", "tensor,1", "tensor,3", launcher=ON_FOUR).items():
        assert result["losses"] == pytest.approx(TRAINER_LOSSES, rel=1e-6), case
        assert result["evals"] == pytest.approx(TRAINER_EVALS, rel=1e-6), case
        assert result["resumed"] == result["losses"][3:] and result["tokens"] == [TRAINER_TOKENS], case


def test_trainer_with_the_files_of_llama_factory(tmp_path: Path) -> None:
    need("accelerate", "transformers", "peft")
    cases = [f"file,{name}" for name in ("z0", "z2", "z2_offload", "z3", "z3_offload")]
    for case, result in run(tmp_path, "trainer_loop.py", *cases, "file_lora,z3").items():
        assert result["losses"] == pytest.approx(FACTORY_LOSSES[case.split(",")[0]], rel=1e-6), case
        assert result["resumed"] == result["losses"][3:], case


def test_trainer_finds_a_batch_size(tmp_path: Path) -> None:
    """The first one has no memory in a backward; the retry has the losses of a run that begins with the next."""
    need("accelerate", "transformers")
    for case, result in run(tmp_path, "trainer_loop.py", "too_large,1", "too_large,2").items():
        assert result["size"] == 2, case
        assert result["losses"] == pytest.approx(TRAINER_LOSSES, rel=1e-6), case


def test_trainer_with_lora(tmp_path: Path) -> None:
    need("accelerate", "transformers", "peft")
    for case, result in run(tmp_path, "trainer_loop.py", "lora,2", "lora,3").items():
        assert result["losses"] == pytest.approx(LORA_LOSSES, rel=1e-6), case
        assert result["resumed"] == result["losses"][3:], case
        assert "adapter_model.safetensors" in result["files"] and "adapter_model.safetensors" in result["model"], case


def test_trainer_with_experts_of_several_ranks(tmp_path: Path) -> None:
    """The losses and the saved files are those of experts that every rank has, at every stage."""
    need("accelerate", "transformers", "peft")
    from safetensors.torch import load_file

    pairs = [("mixture,0", f"experts,{stage}", "model.safetensors") for stage in (0, 1, 2)]
    pairs += [("mixture,3", "experts,3", "model.safetensors")]  # zero.Init draws other initial values
    pairs += [(f"mixture_lora,{s}", f"experts_lora,{s}", "adapter_model.safetensors") for s in (2, 3)]
    results = run(tmp_path, "trainer_loop.py", *dict.fromkeys(case for pair in pairs for case in pair[:2]))
    for plain, case, file in pairs:
        assert results[case]["tokens"] == results[plain]["tokens"], case
        for name in ("losses", "evals", "resumed"):
            assert results[case][name] == pytest.approx(results[plain][name], rel=1e-6), (case, name)
        saved, wanted = (load_file(tmp_path / f"out.json.{each}.model" / file) for each in (case, plain))
        torch.testing.assert_close(saved, wanted, rtol=0, atol=1e-6)


def test_trained_copies_of_modules_are_saved_and_weights_synced(tmp_path: Path) -> None:
    """PEFT's ``modules_to_save`` of tied embeddings, resized. A save reads their names on rank 0 alone."""
    need("accelerate", "transformers", "peft", "trl")
    from safetensors.torch import load_file

    def saved(case: str, end: str) -> Any:
        return load_file(tmp_path / f"out.json.{case}.{end}" / "adapter_model.safetensors")

    plain = run(tmp_path, "adapter_loop.py", "plain", launcher=())["plain"]
    adapter = saved("plain", "model")
    results = run(tmp_path, "adapter_loop.py", "copies,2", "copies,3", "synced,3")
    for case, result in results.items():
        assert result["losses"] == pytest.approx(plain["losses"], rel=1e-6), case
        assert result["resumed"] == result["losses"][3:], case
        for end in ("model", "resumed"):
            torch.testing.assert_close(saved(case, end), adapter, rtol=0, atol=1e-6)
    assert results["synced,3"]["losses"] == results["copies,3"]["losses"]
    assert results["synced,3"]["difference"] < 1e-6


@pytest.mark.parametrize("kind", ["accelerate", "trainer", "sft"])
def test_sequences_that_two_ranks_share(tmp_path: Path, kind: str) -> None:
    """accelerate's ``ParallelismConfig(sp_size=2)``: losses, norms and evaluations are those of one process."""
    need("accelerate", "transformers", *(("datasets", "trl") if kind == "sft" else ()))
    plain = run(tmp_path, "sequence_loop.py", f"{kind},plain", launcher=())[f"{kind},plain"]
    for case, result in run(tmp_path, "sequence_loop.py", f"{kind},2", f"{kind},3").items():
        assert len(result["losses"]) == (8 if kind == "accelerate" else 6)
        for name in plain:
            assert result[name] == pytest.approx(plain[name], rel=1e-6), (case, name)
        assert result.get("resumed", []) == result["losses"][3:6] or kind == "accelerate", case


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_trl(tmp_path: Path, kind: str) -> None:
    """DPO and GRPO have a reference model: a second engine, without an optimizer. GRPO generates between steps, and
    DPO's reference model generates at the end."""
    need("accelerate", "transformers", "datasets", "trl")
    for case, result in run(tmp_path, "trl_loop.py", f"{kind},2", f"{kind},3").items():
        assert result["losses"] == pytest.approx(TRL_LOSSES[kind], rel=1e-5, abs=1e-8), case
        if kind == "dpo":
            reference, fresh = result["generated"]
            assert reference == fresh, case


def test_grpo_with_experts_of_several_ranks(tmp_path: Path) -> None:
    """Ranks generate completions of different lengths, and exchange tokens for each."""
    need("accelerate", "transformers", "datasets", "trl")
    results = run(tmp_path, "trl_loop.py", "mixture,2", "experts,2", "experts,3")
    wanted = results.pop("mixture,2")["losses"]
    for case, result in results.items():
        assert result["losses"] == pytest.approx(wanted, rel=1e-5), case


def test_the_strategy_of_openrlhf(tmp_path: Path) -> None:
    """OpenRLHF itself (``pip install --no-deps openrlhf``): its strategy, actor and SFTTrainer, without a line changed
    but those that say CUDA. It sends states to sleep, keeps a moving average, saves, resumes, and reads weights one by
    one, as for vLLM."""
    need("openrlhf", "accelerate", "transformers", "peft")
    cases = ["2,fp32,none", "2,fp32,offload", "3,fp32,none", "3,fp32,offload", "2,bf16,none", "3,bf16,offload"]
    results = run(tmp_path, "openrlhf_loop.py", *cases, "2,fp32,muon", "3,fp32,muon")
    muon = [results.pop(f"{stage},fp32,muon")["losses"] for stage in (2, 3)]  # DeepSpeed 0.19.8 refuses OpenRLHF's
    assert muon[0] == pytest.approx(muon[1], rel=1e-6) and muon[0][-1] != pytest.approx(OPENRLHF["losses"][-1])
    for case, result in results.items():
        theirs, close = (OPENRLHF, 1e-6) if "fp32" in case else (OPENRLHF_BF16, 3e-4)
        result["sum"] = sum(result["sums"])
        for name, wanted in theirs.items():
            assert result[name] == pytest.approx(wanted, rel=close), (case, name)
        assert result["resumed"] == result["losses"][2:], case
        assert sum(result["averages"]) == pytest.approx(OPENRLHF_AVERAGES[case[0]], rel=close / 10), case
        saved = {name: value for name, value in result["saved"].items() if name != "lm_head.weight"}
        assert sorted(saved.values()) == sorted(result["sums"]), case


def test_models_made_under_zero_init(tmp_path: Path) -> None:
    need("accelerate", "transformers")
    result = run(tmp_path, "pretrained.py")
    for name in ("partitioned", "loaded", "tied", "names", "same"):
        assert result[name], name
    assert 0.015 < result["spread"] < 0.025  # transformers' initialisation, 0.02
    assert result["worst"] < 1e-6


def test_lightning_trains_and_resumes(tmp_path: Path) -> None:
    need("lightning")
    for stage, result in run(tmp_path, "lightning_loop.py", "1", "2", "3").items():
        assert result["whole"] == pytest.approx(LIGHTNING_LOSSES, rel=3e-6), stage
        assert result["first"] + result["second"] == result["whole"], stage


def test_fabric_trains_and_resumes(tmp_path: Path) -> None:
    need("lightning")
    for stage, result in run(tmp_path, "fabric_loop.py", "1", "2", "3").items():
        assert result["first"] == pytest.approx(result["plain"], rel=1e-6), stage
        assert result["second"] == result["first"][3:], stage


def test_the_moving_average_of_diffusers(tmp_path: Path) -> None:
    need("diffusers", "transformers")
    assert max(run(tmp_path, "ema_loop.py")) < 1e-6


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (2, "fp32"), (3, "fp32"), (2, "bf16")])
def test_a_run_of_deepspeed_is_resumed(tmp_path: Path, stage: int, precision: str) -> None:
    """The losses are those with which DeepSpeed resumes its own checkpoint."""
    python = interpreter()
    script, out, checkpoint = str(SCRIPTS / "resume_loop.py"), tmp_path / "theirs.json", str(tmp_path / "checkpoint")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    save = ("save", str(stage), precision, checkpoint)
    run_python(tmp_path, *torchrun, script, out, *save, python=python, DS_ACCELERATOR="cpu")
    theirs = json.loads(out.read_text())
    folders = ("--input_folder", f"{checkpoint}/global_step3", "--output_folder", f"{checkpoint}/universal")
    universal = ("-m", "deepspeed.checkpoint.ds_to_universal", *folders, "--inject_missing_state")
    run_python(tmp_path, *universal, python=python, DS_ACCELERATOR="cpu")
    ours = run(tmp_path, "resume_loop.py", "resume", str(stage), precision, checkpoint)
    assert ours["losses"][:2] == theirs["losses"][:2] and ours["rate"] == theirs["rate"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=3e-7)
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-6 if precision == "fp32" else 1e-3)


def test_the_pipeline_example_of_deepspeed(tmp_path: Path) -> None:
    """Two stages have the losses of two data-parallel ranks, over the same samples."""
    result = run(tmp_path, "pipeline_example.py")
    assert len(result["base"]) == 3 and result["pipe"] == pytest.approx(result["base"], rel=1e-5)


def test_the_first_step_of_deepspeed_chat(tmp_path: Path) -> None:
    """LoRA on transformers' OPT: at stage 3 ``zero.Init`` draws other initial values."""
    need("transformers")
    results = run(tmp_path, "chat_step1.py", "0,none", "2,offload", "3,none", "3,offload")
    for case, result in results.items():
        assert result["losses"] == pytest.approx(
            results[f"{case[0] if case[0] == '3' else 0},none"]["losses"], rel=1e-5
        )
        assert result["fused"] == pytest.approx(result["evaluated"], rel=1e-5), case
        assert result["numel"] == results["0,none"]["numel"]


def test_replicas_of_shards_by_accelerate(tmp_path: Path) -> None:
    """``ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)`` is a shard_size of 2, and has the same losses."""
    need("accelerate")
    results = run(tmp_path, "accelerate_loop.py", "2,fp32", "2,fp32,2", "3,fp32,2", launcher=ON_FOUR)
    assert [result["shard_size"] for result in results.values()] == [None, 2, 2]
    for result in results.values():
        assert result["losses"] == pytest.approx(results["2,fp32"]["losses"], rel=1e-6)
        assert result["moved"] > 0 == result["difference"]


def test_accelerate_launch(tmp_path: Path) -> None:
    """accelerate's own launcher, which looks for DeepSpeed itself and hands the config to the script."""
    need("accelerate")
    (tmp_path / "ds.json").write_text('{"train_batch_size": "auto", "zero_optimization": {"stage": 2}}')
    launch = ("-m", "zerolite.compat.deepspeed", "-m", "accelerate.commands.launch", "--use_deepspeed")
    options = ("--num_processes", "2", "--num_machines", "1", "--main_process_port", "0")
    config = ("--deepspeed_config_file", str(tmp_path / "ds.json"), "--mixed_precision", "no")
    result = run(tmp_path, "accelerate_loop.py", "2,fp32", launcher=(*launch, *options, *config))
    assert result["2,fp32"]["losses"][-3:] == pytest.approx(ACCELERATE_LOSSES, rel=1e-6)


def test_the_example_runs_twice_in_one_directory(tmp_path: Path) -> None:
    """The second run replaces the checkpoints of the first, as with DeepSpeed."""
    need("accelerate", "transformers", "peft")
    script = str(ROOT / "examples" / "huggingface" / "train.py")
    for option in ((), ("--sequence", "2"), ("--lora",)):
        run_python(tmp_path, *LAUNCHER, script, "--steps", "2", *option)
    assert (tmp_path / "runs" / "huggingface" / "model" / "adapter_model.safetensors").is_file()
