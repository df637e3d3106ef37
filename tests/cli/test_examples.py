"""The examples beside the main job: the numbers of plain PyTorch at every stage, and each of them started for real."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.cli import example_cases
from tests.cli.helpers import COMMAND, ROOT, free_port, output_of
from tests.cli.test_documentation import code_blocks
from tests.toolkit.pool import Pool
from tests.toolkit.ranks import on_ranks

EXAMPLES = ROOT / "examples"
GPT = EXAMPLES / "gpt"


def needs(module: str, extra: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"needs {module} (pip install -e '.[{extra}]')")


NEEDS_SKLEARN = needs("sklearn", "digits")
NEEDS_PEFT = needs("peft", "lora")


# ------------------------------------------------------------------------------------------------ plain loops

PLAIN = ["plain_ddp.py", "plain_zerolite.py"]


@pytest.mark.parametrize("page", [ROOT / "README.md", GPT / "README.md"], ids=["README", "gpt"])
def test_the_diff_that_is_shown(page: Path) -> None:
    """The diff has the very words of the files, and nothing else that is not in both."""
    (block,) = code_blocks(page, "diff")
    before, after = ((GPT / name).read_text().splitlines() for name in PLAIN)
    changed = {line[0] + line[2:] for line in difflib.ndiff(before, after) if line.startswith(("- ", "+ "))}
    shown = [line for line in block.splitlines() if line.startswith(("-", "+"))]
    assert set(shown) == changed and len(shown) == 6
    assert {line[1:] for line in block.splitlines() if line and line not in shown} <= set(before) & set(after)


SMALL = {"context": 32, "layers": 1, "width": 64}


def losses_of(output: str) -> list[str]:
    return re.findall(r"^step \d+: loss (\d+\.\d{6}), [\d,]+ bytes/s$", output, re.MULTILINE)


@pytest.mark.slow
def test_the_plain_loops_agree(text: Path, tmp_path: Path) -> None:
    """DDP and the example's config, at these stages, on two ranks: to all digits that are printed, which are those of
    fp32. With the same update, that is: here torch's (foreach). zerolite's own AdamW rounds less often. Nor does the
    bound on the norm bite there: zerolite sums the squares in float64, torch in float32, so that the factors of their
    clipping differ by a millionth. Where it bites the losses are close."""
    copy = tmp_path / "gpt"
    copy.mkdir()
    for file in GPT.glob("*.py"):
        (copy / file.name).write_text(file.read_text())
    config = example_cases.read_config("gpt", "plain", foreach=True)
    assert config["zero_optimization"] == {"stage": 2}
    for script in PLAIN:
        code = (copy / script).read_text()
        assert code.count("clip_grad_norm_(model.parameters(), 1.0)") == 1
        (copy / f"unclipped_{script}").write_text(code.replace("(), 1.0)", "(), 1e9)"))
    arguments = ["--steps", "3", "--log-every", "1", "--batch-size", "1", "--data", str(text)]
    with Pool(2, init_group=False) as pool:

        def losses(script: str, stage: int | None = None) -> list[str]:
            (copy / "plain.json").write_text(json.dumps({**config, "zero_optimization": {"stage": stage}}))
            kwargs = {"path": str(copy / script), "arguments": arguments, "port": free_port()}
            printed, silent = pool.run("tests.cli.example_cases:run_script", kwargs)
            assert silent == ""
            return losses_of(printed)

        wanted = losses(f"unclipped_{PLAIN[0]}")
        assert len(wanted) == 3
        for stage in range(4):
            assert losses(f"unclipped_{PLAIN[1]}", stage) == wanted, f"stage {stage}"
        clipped = [float(loss) for loss in losses(PLAIN[0])]
        assert clipped[2] != pytest.approx(float(wanted[2]), rel=1e-4)
        assert [float(loss) for loss in losses(PLAIN[1], 2)] == pytest.approx(clipped, rel=2e-6)


@pytest.mark.slow
def test_the_loop_of_nanogpt_resumes(text: Path, tmp_path: Path) -> None:
    """GradScaler, clipping and a learning rate set by hand: a run that is cut in two prints what one in a piece
    does."""
    for file in (*GPT.glob("*.py"), *GPT.glob("*.json")):
        code = file.read_text()
        if file.name == "model.py":  # products in fp16 take long on CPUs
            code = re.sub(r"(context|layers|width): int = \d+", lambda m: f"{m[1]}: int = {SMALL[m[1]]}", code)
        (tmp_path / file.name).write_text(code)

    def lines(*more: str) -> list[str]:
        script = ["amp.py", "--steps", "4", "--log-every", "1", "--batch-size", "1", "--data", str(text), *more]
        return run(*COMMAND, "--nproc", "2", *script, cwd=tmp_path).splitlines()

    whole = lines("--out", "whole")
    assert len(whole) == 4 and all("scale 65536" in line for line in whole)
    assert lines("--out", "cut", "--save-every", "2", "--stop-after", "2") == whole[:2]
    assert lines("--out", "cut", "--resume") == whole[2:]


# ------------------------------------------------------------------------------------------------ digits


def norm_of(kind: type[nn.BatchNorm2d]) -> nn.BatchNorm2d:
    norm = kind(3)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
        norm.bias.copy_(torch.tensor([0.1, 0.0, -0.3]))
    return norm


def train_norm(norm: nn.BatchNorm2d, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Two passes: the last outputs, and the gradient of the inputs."""
    for _ in range(2):
        x = x.detach().requires_grad_()
        norm.zero_grad()
        y = norm(x)
        (y * weights).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@on_ranks(2)
def test_batch_norm_of_uneven_batches() -> None:
    """Rank r has r + 1 samples, far from zero mean: the numbers of torch's BatchNorm2d of all of them."""
    rank, random = dist.get_rank(), torch.Generator().manual_seed(3)
    rows = slice(0, 1) if rank == 0 else slice(1, 3)
    x, weights = torch.randn(3, 3, 2, 4, generator=random) + 5, torch.randn(3, 3, 2, 4, generator=random)
    plain, norm = norm_of(nn.BatchNorm2d), norm_of(example_cases.load("digits", "batch_norm").JointBatchNorm2d)
    (wanted, wanted_gradient), (y, gradient) = train_norm(plain, x, weights), train_norm(norm, x[rows], weights[rows])
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(y, wanted[rows])
    close(gradient, wanted_gradient[rows])
    for one, other in zip(norm.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(one.grad)
        close(one.grad, other.grad)
    close(dict(norm.named_buffers()), dict(plain.named_buffers()), rtol=1e-6, atol=1e-6)
    kept = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    half = norm(x[rows].bfloat16())
    assert half.dtype == torch.bfloat16
    close(half.float(), wanted[rows], rtol=0.02, atol=0.1)
    norm.load_state_dict(kept, strict=False)
    close(norm.eval()(x[rows]), plain.eval()(x)[rows])


# ------------------------------------------------------------------------------------------------ LoRA


def write_model(directory: Path) -> None:
    """A model and a tokenizer of words, as `from_pretrained` wants them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "sat": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(directory)
    config = GPT2Config(vocab_size=4, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(directory)


# ------------------------------------------------------------------------------------------------ started for real

LAUNCHERS = {
    "zerolite": [*COMMAND, "--nproc", "2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


def run(*command: str, cwd: Path) -> str:
    """Run to the end without a way to the outside; returns what was printed."""
    return output_of(*command, cwd=cwd, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [
        pytest.param("gpt/plain_zerolite.py", "--batch-size 1 --data {text}", id="plain_zerolite"),
        pytest.param("lora/train.py", "--length 16 --out adapter", id="lora", marks=NEEDS_PEFT),
    ],
)
def test_launchers_agree(script: str, options: str, text: Path, tmp_path: Path) -> None:
    """`zerolite` and `torchrun`, from a directory of their own: the same lines, each from one rank, with losses."""
    arguments = [str(EXAMPLES / script), *f"--steps 2 --log-every 1 {options.format(text=text)}".split()]
    printed = [run(*launcher, *arguments, cwd=tmp_path) for launcher in LAUNCHERS.values()]
    by_zerolite, by_torchrun = (re.sub(r"[\d,]+ (\w+/s)", r"\1", output) for output in printed)
    assert by_zerolite == by_torchrun
    lines = printed[0].splitlines()
    assert len(lines) == len(set(lines))
    assert [line for line in lines if re.search(r"loss.* \d+\.\d{4}", line)], printed[0]


@pytest.mark.slow
def test_gan_finds_the_gaussians(tmp_path: Path) -> None:
    lines = run(*LAUNCHERS["zerolite"], str(EXAMPLES / "gan" / "train.py"), cwd=tmp_path).splitlines()
    share, found = re.search(r"(\d+)% of the points are good, (\d) of 8 Gaussians found", lines[-1]).groups()
    assert int(share) > 60 and found == "8"


@pytest.mark.slow
@NEEDS_SKLEARN
def test_digits_accuracy(tmp_path: Path) -> None:
    lines = run(*LAUNCHERS["zerolite"], str(EXAMPLES / "digits" / "train.py"), cwd=tmp_path).splitlines()
    assert float(re.search(r"([\d.]+)% of the test images right", lines[-1])[1]) > 95


@pytest.mark.slow
@NEEDS_PEFT
def test_lora_of_a_model_on_disk(tmp_path: Path) -> None:
    """At stage 3, with the tokenizer beside it; the adapter remembers where its base is."""
    from peft import AutoPeftModelForCausalLM

    write_model(tmp_path / "model")
    (tmp_path / "notes.txt").write_text("the cat sat the sat cat the dog sat " * 20)
    arguments = f"--model {tmp_path}/model --data notes.txt --length 8 --steps 30 --stage 3".split()
    command = [*LAUNCHERS["zerolite"], str(EXAMPLES / "lora" / "train.py"), *arguments]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+),", run(*command, cwd=tmp_path))]
    assert losses[-1] < losses[0]
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "runs" / "lora", local_files_only=True)
    adapters = {name: value for name, value in model.state_dict().items() if "lora_B" in name}
    assert adapters and all(value.any() for value in adapters.values())
