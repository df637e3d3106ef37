"""load_config: values that are made to break it end in a sentence, and at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from zerolite.config import ConfigError, load_config
from zerolite.utils.sizes import parse_size


def refused(source: Any) -> dict[str, str]:
    """The errors, which can be printed and take less than a second of the processor."""
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert time.process_time() - began < 1
    str(caught.value).encode()
    return dict(caught.value.errors)


@pytest.mark.parametrize("text", ["{ a: 1 /* and so on", "{ a: '''and so on", "a: 1\n/*", "{a: '''\n"])
def test_hjson_that_ends_too_early(text: str) -> None:
    (sentence,) = refused(text).values()
    assert "as hjson: the text ends within a comment" in sentence or "expected" in sentence


def test_numbers_that_no_float_holds() -> None:
    params = {"lr": 10**400, "betas": [0.9, 10**5000]}
    errors = refused({"optimizer": {"type": "Adam", "params": params}, "gradient_clipping": 10**5000, 10**5000: 1})
    assert set(errors) == {
        "optimizer.params.lr",
        "optimizer.params.betas[1]",
        "gradient_clipping",
        "an integer of more than 308 digits",
    }
    assert "got an integer of more than 308 digits" in errors["optimizer.params.lr"]
    assert list(refused('{"train_batch_size": ' + "1" * 60_000 + "}")) == ["train_batch_size"]


@pytest.mark.parametrize(
    "text", ["1" * 60_000 + "x", "1" * 60_000, "." + "1" * 60_000 + "x", "1e" + "1" * 60_000, " " * 60_000 + "x",
             "1" + " " * 60_000 + "x", "1e" + "9" * 9, "0." + "0" * 60_000]
)  # fmt: skip
@pytest.mark.parametrize("path", ["gradient_clipping", "train_batch_size"])
def test_long_numbers_are_refused_at_once(path: str, text: str) -> None:
    assert list(refused({path: text})) == [path]
    began = time.process_time()
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(text)
    assert time.process_time() - began < 1


@pytest.mark.parametrize("text", ["٣", "٣.٥", "１", "²", "1٣", "1e٣", "५"])
def test_digits_of_other_scripts_are_no_numbers(text: str) -> None:
    assert list(refused({"gradient_clipping": text})) == ["gradient_clipping"]
    assert list(refused({"train_batch_size": text})) == ["train_batch_size"]
    for size in (text, text + "GB", "5\u212a"):  # the last is the Kelvin sign, which is a K if case does not matter
        with pytest.raises(ValueError, match="expected a size"):
            parse_size(size)


def test_five_hundred_unknown_keys() -> None:
    assert len(refused({f"train_batch_siz{i}": i for i in range(500)})) == 500
    assert len(refused({"zero_optimization": {f"stage{i}": i for i in range(500)}})) == 500
    long = refused({"x" * 100_000: 1})
    assert len(str(long)) < 500


@pytest.mark.parametrize(
    "path",
    [
        "optimizer.type",
        "gradient_clipping",
        "csv_monitor.output_path",
        "aio.block_size",
        "zero_optimization.offload_param.nvme_path",
        "wandb.project",
        "fp32_modules",
    ],
)
@pytest.mark.parametrize("bad", ["a\ud800", "a\0b"])
def test_texts_that_are_no_texts(path: str, bad: str) -> None:
    block, _, key = path.rpartition(".")
    value: Any = [bad] if path == "fp32_modules" else bad
    for part in reversed(path.split(".")):
        value = {part: value}
    (error,) = refused(value)
    assert error.removesuffix("[0]") == path
    value = {bad: 1}
    for part in reversed(block.split(".") if block else []):
        value = {part: value}
    assert any("unknown" in sentence for sentence in refused(value).values())
    params = {"type": "Adam", "params": {"x": [{"y": bad}], bad: 1}}
    assert len(refused({"optimizer": params})) == 2


def test_files_with_impossible_names(tmp_path: Path) -> None:
    for name in ("a\0.json", tmp_path / "a\0.json", "/no/\udcff.json", tmp_path / "\udcff.json", "x" * 5000 + ".json"):
        refused(name)


@pytest.mark.parametrize("block", ["csv_monitor", "jsonl_monitor", "tensorboard"])
def test_the_folder_of_a_job_stays_in_its_own(block: str) -> None:
    for name in ("..", "../x", "a/../../x", "/tmp/x"):
        (sentence,) = refused({block: {"job_name": name}}).values()
        assert "leads out of it" in sentence
    for name in ("job", "team/job", "a..b", "..."):
        load_config({block: {"job_name": name}})


def test_the_largest_elasticity_blocks() -> None:
    micros = {"one": [1], "primes": [7, 11, 13, 17, 19, 23], "many": list(range(100, 200))}
    for sizes in micros.values():
        for larger in (True, False):
            block = {"enabled": True, "max_train_batch_size": 1_000_000, "micro_batch_sizes": sizes,
                     "max_gpus": 1_000_000, "prefer_larger_batch": larger}  # fmt: skip
            config = load_config({"elasticity": block})
            began = time.process_time()
            with pytest.raises(ConfigError):
                config.resolve(999_983)
            assert time.process_time() - began < 1
    refused({"elasticity": {"enabled": True, "micro_batch_sizes": list(range(1, 100_000))}})


@pytest.mark.parametrize("depth", [500, 100_000])
def test_nesting(depth: int) -> None:
    refused("[" * depth)
    value: Any = 1
    for _ in range(depth):
        value = {"fp16": value}
    refused(value)
    refused({"optimizer": {"type": value, "params": value}})
