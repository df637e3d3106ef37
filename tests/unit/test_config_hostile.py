"""load_config: values that are made to break it end in a sentence, and at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from zerolite.config import ConfigError, load_config


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
