"""load_config: sources, types, "auto", frozenness. Errors of the keys themselves are in test_config_errors.py."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ValidationError

from tests.toolkit.config_errors import errors_of, nested
from zerolite.config import ConfigError, ZeroliteConfig, load_config
from zerolite.config.values import block_model, describe_type

SAMPLE: dict[str, Any] = {
    "train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.002, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
    "bf16": {"enabled": True, "output_dtype": "bf16"}, "fp32_modules": ["*.router", "norm"], "gradient_clipping": 1,
    "zero_optimization": {
        "stage": 2, "reduce_bucket_size": 500000000.0, "leaf_module": {"classes": ["package.Moe"]},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 6},
    },
    "tensor_parallel": {"size": 2, "plan": {"blocks.*.qkv": {"style": "column", "parts": 3}}},
    "steps_per_print": 10,
}  # fmt: skip


def leaves(model: type[BaseModel] = ZeroliteConfig, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """(path, type in words, default) of every key; optimizer and scheduler have no default."""
    for name, info in model.model_fields.items():
        inner = block_model(info)
        if inner is not None:
            yield from leaves(inner, f"{prefix}{name}.")
        elif not prefix.startswith(("optimizer", "scheduler")):
            yield prefix + name, describe_type(info), info.get_default(call_default_factory=True)


KEYS = {path: (words, default) for path, words, default in leaves()}


def keys_of(words: str) -> list[str]:
    return [path for path in KEYS if KEYS[path][0].startswith(words)]


def get(config: BaseModel, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


# Values that no number is, or none that a size or a limit may be.
NUMBERS = [
    True, False, "", "abc", "1e", "0x10", "1_000", "nan", "inf", "1 000", float("nan"), float("inf"), -float("inf"),
    [], [1], {}, {"a": 1}, -2, -2.0, "-2", 10**400, "1e400", "1e999999999",
]  # fmt: skip
WRONG: dict[str, list[Any]] = {
    "an integer": [*NUMBERS, 1.5, "1.5", 2**63, 1e300],
    "a finite number": NUMBERS,
    "true": [0, 1, 0.0, 1.0, "true", "False", "yes", [], {}],
    "an array of strings": ["torch.nn.Linear", [1], [""], {"a": 1}, True, [None]],
    "a path": ["", " ", 3, True, ["/a"], b"/a"],
    "a non-empty string": ["", " ", 1, True, ["a"]],
    '"': ["", "Error", "gpu", "fp8", "int8", 16, True, [0], ["fp16"], {}],
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_value_is_one_error(words: str) -> None:
    """Each is one error: what was expected, what came and what to do."""
    assert keys_of(words)
    for path, value in itertools.product(keys_of(words), WRONG[words]):
        empty_path = path.endswith("output_path") and value in ("", " ")
        if empty_path or path == "steps_per_print" and value == float("inf"):
            continue
        errors = errors_of(nested(path, value))
        assert list(errors) == [path], value
        assert errors[path].startswith(f"expected {words}")
        assert ", got " in errors[path] and "; " in errors[path], "what came and what to do"


def test_auto_is_the_default_and_null_only_where_it_means_something() -> None:
    for path, (words, default) in KEYS.items():
        if path not in ("zero_optimization.stage", "tiled_loss", "tiled_mlp"):
            assert get(load_config(nested(path, "auto")), path) == default
        if words.endswith("or null"):
            assert get(load_config(nested(path, None)), path) == default
        else:
            assert list(errors_of(nested(path, None))) == [path]


def test_the_kinds_of_keys_are_complete() -> None:
    others = set(KEYS) - {path for words in WRONG for path in keys_of(words)}
    assert others == {"tensor_parallel.plan", "tiled_loss", "tiled_mlp"}
    for path in ("tiled_loss", "tiled_mlp"):
        assert get(load_config(nested(path, "auto")), path) == "auto"
        for value in (0, -1, 1.5, "yes", [], {}):
            assert errors_of(nested(path, value))[path].startswith(f"expected {KEYS[path][0]}, got ")


# ------------------------------------------------------------------ sources


HJSON = """
  # a comment
  train_batch_size: 8   // another
  zero_optimization: {
    stage: 2
    reduce_bucket_size: 1e9
  }
  /* and
     another */
  optimizer: {
    type: AdamW
    params: { lr: 0.001, betas: [0.9, 0.95] }
  }
"""


@pytest.mark.parametrize("text", [HJSON, "{" + HJSON + "}"])
def test_hjson_is_read(text: str) -> None:
    config = load_config(text)
    assert config.train_batch_size == 8 and config.optimizer is not None
    assert (config.zero_optimization.stage, config.zero_optimization.reduce_bucket_size) == (2, 10**9)
    assert config.optimizer.type == "AdamW" and config.optimizer.params == {"lr": 0.001, "betas": [0.9, 0.95]}
    assert load_config('{"train_batch_size": 8,}') == load_config("train_batch_size: 8")


@pytest.mark.parametrize("name", ["config.json", "config.hjson", "config", "a: b"])
@pytest.mark.parametrize("text", [json.dumps(SAMPLE, indent=2), HJSON, "\ufeff{}"], ids=["json", "hjson", "mark"])
def test_text_and_files_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    wanted = load_config(SAMPLE) if text.startswith("{") else load_config(text)
    file = tmp_path / name
    file.write_text(text)
    monkeypatch.chdir(tmp_path)
    assert load_config(text) == load_config(file) == load_config(str(file)) == load_config(name) == wanted


@pytest.mark.parametrize("name", ["missing.json", "missing", "some/where/zero2.hjson", "C:\\conf.json"])
def test_a_missing_file_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = errors_of(name)[""]
    assert f'at "{name}"' in message and str(tmp_path) in message and "No such file" in message


def test_files_that_are_no_configuration_are_named(tmp_path: Path) -> None:
    assert "Is a directory" in errors_of(tmp_path)[""]
    assert "File name too long" in errors_of("a" * 5000)[""]
    file = tmp_path / "config.json"
    for content, said in (
        (b"{\xff}", "start byte"),
        (b" \n", "empty"),
        (b'{"stage": 1}', "zero_optimization.stage"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=said) as caught:
            load_config(file)
        assert str(file) in str(caught.value)


@pytest.mark.parametrize("text", ["", "  ", "[1, 2]", "{", '{"a": }', '{"a": 1', "{]}", '{"a": [1, 2}', "[" * 100_000])
def test_what_is_no_configuration(text: str) -> None:
    """Neither such a text nor another type; where the text ends too early, the line is named."""
    assert list(errors_of(text)) == [""]
    message = errors_of('{\n  "train_batch_size": 8\n  "fp16": {\n')[""]
    assert "as JSON" in message and "as hjson" in message and "line 3" in message
    for source in (None, 3, [], b"{}", object()):
        assert type(source).__name__ in errors_of(source)[""]


def test_the_source_is_neither_changed_nor_kept() -> None:
    source = copy.deepcopy(SAMPLE)
    config = load_config(source)
    assert source == SAMPLE == config.model_dump(mode="json", exclude_unset=True) and load_config(config) is config
    source["optimizer"]["params"]["betas"].append(1)
    source["optimizer"]["params"]["lr"] = 9
    assert config == load_config(SAMPLE)


@pytest.mark.parametrize(
    ("written", "meant"),
    [(1e9, 10**9), ("1e9", 10**9), ("2", 2), (" 1.5e3 ", 1500), (4.0, 4), ("5e8", 5 * 10**8), ("0.2e1", 2),
     (2**63 - 1, 2**63 - 1), (str(2**62 + 1), 2**62 + 1)],
)  # fmt: skip
def test_integers_in_other_spellings(written: Any, meant: int) -> None:
    source = nested("zero_optimization.reduce_bucket_size", written)
    for config in (load_config(source), load_config(json.dumps(source))):
        got = config.zero_optimization.reduce_bucket_size
        assert got == meant and type(got) is int


@pytest.mark.parametrize(
    ("path", "least", "most"),
    [("train_batch_size", 1, 2**31 - 1), ("steps_per_print", 1, None), ("fp16.initial_scale_power", 0, 127),
     ("zero_optimization.stage", 0, 3), ("zero_optimization.stage3_max_live_parameters", 0, None),
     ("zero_optimization.stage3_prefetch_bucket_size", 0, None), ("zero_optimization.offload_optimizer.ratio", 0, 1),
     ("flops_profiler.profile_step", 0, None), ("aio.block_size", 4096, 2**30)],
)  # fmt: skip
def test_numbers_have_bounds(path: str, least: int, most: int | None) -> None:
    assert get(load_config(nested(path, least)), path) == least
    assert list(errors_of(nested(path, least - 1))) == [path]
    if most is not None:
        assert get(load_config(nested(path, most)), path) == most
        assert list(errors_of(nested(path, most + 1))) == [path]


DTYPES = {
    "fp32": ["fp32", "float32", "float", "torch.float32", "torch.float", "FP32", torch.float32],
    "fp16": ["fp16", "float16", "half", "torch.float16", "torch.half", torch.half],
    "bf16": ["bf16", "bfloat16", "torch.bfloat16", "BF16", torch.bfloat16],
}


def test_dtypes_have_several_spellings() -> None:
    for name, spellings in DTYPES.items():
        for spelling in spellings:
            assert load_config({"communication_data_type": spelling}).communication_data_type == name
            if name != "fp32":
                assert load_config({"torch_autocast": {"dtype": spelling}}).torch_autocast.dtype == name
    assert list(errors_of({"communication_data_type": torch.int8})) == ["communication_data_type"]
    assert load_config({"bf16": {"output_dtype": "bfloat16"}}).bf16.output_dtype == "bf16"
    for block, dtype in (("bf16", "fp16"), ("fp16", "bf16"), ("torch_autocast", "bf16")):
        assert list(errors_of({block: {"output_dtype": dtype}})) == [f"{block}.output_dtype"], "its own or fp32"
    assert list(errors_of({"torch_autocast": {"dtype": "fp32"}})) == ["torch_autocast.dtype"]


def test_the_remedy_names_the_nearest_values() -> None:
    assert "write 1 or 2" in errors_of({"steps_per_print": 1.5})["steps_per_print"]
    assert "the nearest allowed value is 1" in errors_of({"steps_per_print": 0})["steps_per_print"]
    assert "write 4096 or 8192" in errors_of({"aio": {"block_size": 5000}})["aio.block_size"]


@pytest.mark.parametrize("key", ["offload_optimizer", "offload_param"])
def test_the_device_that_states_are_offloaded_to(key: str, tmp_path: Path) -> None:
    def block(**values: Any) -> Any:
        return get(load_config({"zero_optimization": {"stage": 3, key: values}}), f"zero_optimization.{key}")

    for value in ("none", None, "auto"):
        assert block(device=value).device == "none" and not block(device=value).enabled
    for device in ("cpu", "nvme"):
        got = block(device=device, nvme_path=tmp_path)
        assert (got.device, got.enabled, got.nvme_path) == (device, True, str(tmp_path))


# ------------------------------------------------------------------ "auto"


def test_a_stage_is_a_number() -> None:
    """Elsewhere "auto" is the default. Here it would be stage 0, which is none that a user who writes it has meant."""
    with pytest.raises(ConfigError, match=r'0 to 3, got "auto"; `zerolite plan --compare` says which stage'):
        load_config({"zero_optimization": {"stage": "auto", "reduce_scatter": False}, "train_batch_size": 8})


def test_auto_in_params_is_left_to_the_constructor() -> None:
    params = {"lr": "auto", "betas": "auto", "eps": 1e-6, "mode": "automatic"}
    config = load_config({"optimizer": {"type": "AdamW", "params": params}})
    assert config.optimizer is not None
    assert config.optimizer.params == {"eps": 1e-6, "mode": "automatic"}


def test_frozen_at_every_depth() -> None:
    source = {**SAMPLE, "optimizer": {"type": "X", "params": {"lr": 1, "inner": {"a": 1}}}}
    config = load_config(source)
    assert config.optimizer is not None
    for block, name in ((config, "dump_state"), (config.zero_optimization, "stage"), (config.optimizer, "params")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(block, name, 0)
        with pytest.raises(ValidationError, match="frozen"):
            delattr(block, name)
    params: Any = config.optimizer.params
    for change in (lambda: params.__setitem__("lr", 1), params.clear, lambda: params["inner"].update(a=2)):
        with pytest.raises(TypeError, match="frozen"):
            change()
    dict(params)["lr"] = 2  # a copy is free
    assert config == load_config(source)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("source", [SAMPLE, {}], ids=["sample", "defaults"])
def test_copies_pickles_and_dumps_are_equal(source: dict[str, Any]) -> None:
    config = load_config(source)
    revived = pickle.loads(pickle.dumps(config))
    assert revived == copy.deepcopy(config) == config
    for dump in (config.model_dump(), config.model_dump(mode="json"), config.model_dump_json()):
        assert load_config(dump) == config
    if source:
        with pytest.raises(TypeError, match="frozen"):
            revived.optimizer.params["lr"] = 1


def test_deepspeeds_names_for_parallelism() -> None:
    pipeline = {"stages": "auto", "partition": "best", "seed_layers": False, "pipe_partitioned": True}
    tensor = {"autotp_size": 4, "dtype": "bf16", "tp": {"tp_size": 1}}
    config = load_config({"tensor_parallel": tensor, "pipeline": pipeline})
    assert config.tensor_parallel.size == 4 and config.tensor_parallel.plan == "auto"
    assert config.pipeline.stages == 1
    empty = load_config({"tensor_parallel": None, "pipeline": None})
    assert empty.tensor_parallel.size == empty.pipeline.stages == 1


@pytest.mark.parametrize(
    "plan", [3, [], {}, {"a": 3}, {"a": {"parts": 3}}, {"a": {"style": "column", "part": 3}}, "column"]
)
def test_what_is_no_plan_of_tensor_parallelism(plan: Any) -> None:
    assert list(errors_of({"tensor_parallel": {"size": 2, "plan": plan}})) == ["tensor_parallel.plan"]


@pytest.mark.parametrize("value", ["best", "types:x", 3, None, ""])
def test_a_partition_method_is_one_of_three(value: Any) -> None:
    sentence = errors_of({"pipeline": {"partition_method": value}})["pipeline.partition_method"]
    assert '"parameters", "uniform" or "type:REGEX"' in sentence
    for written, meant in (("Uniform", "uniform"), ("type:Block|Head", "type:Block|Head")):
        assert load_config({"pipeline": {"partition_method": written}}).pipeline.partition_method == meant


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite(text: str) -> None:
    for path in ("gradient_clipping", "train_batch_size", "optimizer.params.lr"):
        assert list(errors_of(json.dumps(nested(path, 12345)).replace("12345", text))) == [path]
    params = {"betas": [0.9, float("nan")], "more": {"x": [[float("inf")]]}}
    errors = errors_of({"optimizer": {"type": "Adam", "params": params}})
    assert list(errors) == ["optimizer.params.betas[1]", "optimizer.params.more.x[0][0]"]
