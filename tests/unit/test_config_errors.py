"""load_config: unknown, unsupported, deprecated, duplicated and contradictory keys, and all of them at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.toolkit.config_errors import errors_of, nested
from zerolite.config import ConfigError, load_config
from zerolite.config.known_keys import OTHER_NAMES, RENAMED, UNSUPPORTED, Key
from zerolite.config.load import supported_keys


@pytest.mark.parametrize(
    ("path", "meant"),
    [("zero_optimization.reduce_bucket_sizes", "zero_optimization.reduce_bucket_size"),
     ("zero_optimisation", "zero_optimization"), ("stage", "zero_optimization.stage"),
     ("zero_optimization.gradient_clipping", "gradient_clipping"), ("Gradient_Clipping", "gradient_clipping"),
     ("loss_scale", "fp16.loss_scale"), ("fp16.loss_scaling_window", "fp16.loss_scale_window"),
     ("bf16.enable", "bf16.enabled"), ("train_micro_batch_size", "train_micro_batch_size_per_gpu"),
     ("zero_optimization.stage3_max_live_params", "zero_optimization.stage3_max_live_parameters"),
     ("zero_optimization.leaf_module.clases", "zero_optimization.leaf_module.classes"),
     ("offload_optimizer", "zero_optimization.offload_optimizer"),
     ("checkpoint.parallel_writes", "checkpoint.parallel_write")],
)  # fmt: skip
def test_unknown_keys_name_the_nearest(path: str, meant: str) -> None:
    errors = errors_of(nested(path, 1))
    assert list(errors) == [path]
    assert f"did you mean {meant}?" in errors[path]


def test_unknown_keys_of_other_kinds() -> None:
    errors = errors_of({"qqqqqq": 1, "fp16": {"xyz": None}})
    assert set(errors) == {"qqqqqq", "fp16.xyz"}, "they resemble nothing"
    assert all("did you mean" not in sentence for sentence in errors.values())
    errors = errors_of({"optimizer": {"type": "Adam", "lr": 1e-3}, "scheduler": {"type": "X", "warmup_num_steps": 1}})
    assert "optimizer.params" in errors["optimizer.lr"]
    assert "scheduler.params" in errors["scheduler.warmup_num_steps"]
    assert "did you mean zero_optimization?" in errors_of({"zero_optimization.stage": 1})["zero_optimization.stage"]


def test_keys_that_would_steer_a_terminal_are_escaped() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"zero\x1b[31m\n": 1, "fp16": {"\x9b2Jx": 1}, "größe": 1})
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        r"  fp16.\x9b2Jx", r"  zero\x1b[31m\n", "  größe",
    ]  # fmt: skip


def test_a_type_and_free_params() -> None:
    params = {"anything": {"at": [{"any": "depth"}]}, "type": 1, "enabled": None, "stage": "x"}
    config = load_config({"optimizer": {"type": "Mine", "params": params}})
    assert config.optimizer is not None and config.optimizer.params == params
    assert set(errors_of({"optimizer": {"params": {"lr": 1}}, "scheduler": {}})) == {"optimizer.type", "scheduler.type"}
    for wrong in (3, " "):
        assert list(errors_of({"optimizer": {"type": wrong}})) == ["optimizer.type"]
    assert list(errors_of({"optimizer": {"type": "Adam", "params": [1]}})) == ["optimizer.params"]


def test_keys_that_are_not_strings() -> None:
    errors = errors_of({1: 2, "fp16": {None: 1}, "optimizer": {"type": "x", "params": {3: 4}}})
    assert set(errors) == {"1", "fp16.None", "optimizer.params.3"}
    assert all("string as the key" in sentence for sentence in errors.values())
    assert list(errors_of({"fp16": {"half\udc80": 1}})) == ["fp16.half\\udc80"]


@pytest.mark.parametrize(
    "path", ["fp16", "bfloat16", "optimizer", "zero_optimization", "zero_optimization.leaf_module"]
)
def test_a_block_must_be_an_object(path: str) -> None:
    for value in (1, "x", [], [{}], 1.5, True):
        errors = errors_of(nested(path, value))
        assert list(errors) == [path]
        assert "expected an object" in errors[path] and ", got " in errors[path] and "; " in errors[path]
    assert '"stage": 1' in errors_of({"zero_optimization": True})["zero_optimization"], "DeepSpeed's old spelling"


def test_duplicates_at_every_depth() -> None:
    text = (
        '{"fp16": {"enabled": true, "hysteresis": 2, "enabled": false}, "train_batch_size": 4, '
        '"optimizer": {"type": "A", "params": {"a": [{"b": 1, "b": 1}]}}, "train_batch_size": 4, "train_batch_size": 8}'
    )
    errors = errors_of(text)
    assert set(errors) == {"fp16.enabled", "train_batch_size", "optimizer.params.a[0].b"}
    assert "2 times" in errors["fp16.enabled"] and "3 times" in errors["train_batch_size"]
    hjson = "zero_optimization: {\n stage: 1\n stage: 2\n}\ndump_state: true\ndump_state: true\n"
    assert set(errors_of(hjson)) == {"zero_optimization.stage", "dump_state"}


def test_the_other_spelling_of_a_block() -> None:
    """It is read, errors are told in it, and beside the first one it is an error."""
    assert load_config({"bfloat16": {"enabled": True}}).bf16.enabled
    assert list(errors_of({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}})) == ["bfloat16"]
    errors = errors_of({"bfloat16": {"enabled": 1, "enbled": True, "check_overflow": False}})
    assert set(errors) == {"bfloat16.enabled", "bfloat16.enbled", "bfloat16.check_overflow"}
    on = {"enabled": True, "bf16_optimizer_states": True}
    (sentence,) = errors_of({"bfloat16": on}).values()
    assert "expected bfloat16.bf16_master_weights_and_grads = true" in sentence, "sentences are told in it too"
    (sentence,) = errors_of(grads("fp16", bfloat16=ON)).values()
    assert '"fp32" or "bf16"' in sentence
    hierarchy = {"stage": 3, "mics_shard_size": 2, "zero_hpz_partition_size": 2}
    (sentence,) = errors_of({"zero_optimization": hierarchy}).values()
    assert "beside zero_optimization.mics_shard_size" in sentence


@pytest.mark.parametrize(("other", "name"), [pair for pair in OTHER_NAMES.items() if "." in pair[0]])
def test_the_other_name_of_a_number(other: str, name: str) -> None:
    for unused in (0, -1, "0", None, "auto"):
        assert load_config(nested(other, unused)) == load_config({})
    config = load_config(nested(other, "4"))
    assert config.model_dump() == load_config(nested(name, 4)).model_dump()
    assert [path for path, _ in config.without_effect] in ([], [other]), "messages have the name that was written"
    assert list(errors_of(nested(other, "four"))) == [other]
    block, _, key = name.rpartition(".")
    assert list(errors_of({block: {key: 2, other.rpartition(".")[2]: 4}})) == [other]
    assert load_config({block: {key: 4, other.rpartition(".")[2]: 4}}).model_dump() == config.model_dump()


# ------------------------------------------------------------------ contradictions

ON = {"enabled": True}
PIPE = {"stages": 2}
ACCUMULATION, UNMANAGED = "gradient_accumulation_steps", "managed_gradient_accumulation"
DTYPE, MASTERS = "data_types.grad_accum_dtype", "master_weights_and_grads"


def zero(stage: Any, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def grads(dtype: str, **blocks: Any) -> dict[str, Any]:
    return {"data_types": {"grad_accum_dtype": dtype}, **blocks}


SAFE_KEY, OFFLOAD = "lower_precision_safe_modules", "zero_optimization.offload"
SAFE, DISK = {**ON, SAFE_KEY: ["a"]}, {"device": "nvme"}
HOST, SEQUENCES = zero(2, offload_optimizer={"device": "cpu"}), {"size": 2, "sequence_parallel": True}
# (key that is named, configuration, what its sentence says)
CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    (
        "zero_optimization.zero_quantized_weights",
        zero(3, zero_quantized_weights=True),
        "it needs zero_optimization.shard_size or zero_hpz_partition_size",
    ),
    ("zero_optimization.zero_quantized_gradients", zero(3, zero_quantized_gradients=True), "traffic between sets"),
    (
        "zero_optimization.zero_quantized_gradients",
        zero(2, zero_quantized_gradients=True, shard_size=2, reduce_scatter=False),
        "reduce_scatter = true",
    ),
    ("zero_optimization.zeropp_loco_param", zero(3, shard_size=2, zeropp_loco_param={"reset_T": 9}), "errors it feeds"),
    ("fp16.enabled", {"fp16": ON, "bf16": ON}, "bf16.enabled"),
    ("fp16.enabled", {"fp16": ON, "torch_autocast": ON}, "torch_autocast.enabled"),
    ("bf16.enabled", {"bf16": ON, "torch_autocast": ON}, "torch_autocast.enabled"),
    ("bf16.bf16_optimizer_states", {"bf16": {**ON, "bf16_optimizer_states": True}}, "master_weights"),
    ("gradient_predivide_factor", {"prescale_gradients": True, "gradient_predivide_factor": 2.0}, "prescale_gradients"),
    ("gradient_allreduce_op", {"gradient_allreduce_op": "SUM", "sequence_parallel": {"size": 2}}, "parts of one loss"),
    (ACCUMULATION, {UNMANAGED: False, ACCUMULATION: 2}, "every engine.step() updates"),
    (UNMANAGED, {UNMANAGED: False, "pipeline": PIPE}, "runs whole steps"),
    (DTYPE, grads("bf16"), "fp32"),
    (DTYPE, grads("fp16", bf16=ON), "bf16"),
    (DTYPE, grads("bf16", fp16=ON), "fp16"),
    (DTYPE, grads("bf16", torch_autocast=ON), "fp32"),
    (DTYPE, grads("fp32", bf16={**ON, f"bf16_{MASTERS}": True}), f"bf16.bf16_{MASTERS}"),
    (DTYPE, grads("fp32", fp16={**ON, f"fp16_{MASTERS}": True}), f"fp16.fp16_{MASTERS}"),
    ("communication_data_type", {"communication_data_type": "fp32", "torch_autocast": SAFE}, SAFE_KEY),
    (f"{OFFLOAD}_optimizer.nvme_path", zero(1, offload_optimizer=DISK), 'offload_optimizer.device is "nvme"'),
    (f"{OFFLOAD}_param.nvme_path", zero(3, offload_param={**DISK, "nvme_path": None}), 'offload_param.device is "nv'),
    (f"{OFFLOAD}_optimizer.ratio", zero(3, offload_optimizer={**DISK, "nvme_path": "/", "ratio": 0.5}), 'use "cpu"'),
    (f"{OFFLOAD}_optimizer.device", {**HOST, "tensor_parallel": SEQUENCES}, "tensor_parallel.sequence_parallel"),
    ("aio.intra_op_parallelism", {"aio": {"thread_count": 1, "intra_op_parallelism": 2}}, "aio.thread_count = 1"),
    ("tensor_parallel.autotp_size", {"tensor_parallel": {"size": 2, "autotp_size": 4}}, "leave one of the two"),
    ("zero_optimization.stage", {"pipeline": PIPE, **zero(2)}, "once for every micro-b"),
    ("zero_optimization.stage", {"pipeline": PIPE, **zero(3)}, "gather all parameters"),
    ("pipeline.chunks", {"pipeline": {**PIPE, "chunks": 2}}, 'expected 1 with pipeline.schedule = "1f1b"'),
    ("pipeline.chunks", {"pipeline": {**PIPE, "chunks": 1, "schedule": "interleaved_1f1b"}}, "expected 2 or more"),
    ("pipeline.chunks", {"pipeline": {**PIPE, "chunks": 3, "schedule": "zbv"}}, "expected 2 with"),
    ("pipeline.split", {"pipeline": {**PIPE, "split": ["a", "b"]}}, "expected 1 name"),
    ("pipeline.split", {"pipeline": {**PIPE, "split": ["a"], "schedule": "interleaved_1f1b"}}, "expected 3 names"),
]


@pytest.mark.parametrize(("path", "source", "names"), CONTRADICTIONS)
def test_a_contradiction_is_one_error(path: str, source: dict[str, Any], names: str) -> None:
    """One error, at one of the keys, in a sentence with what was expected, what came and what to do."""
    ((where, sentence),) = errors_of(source).items()
    assert where == path and names in sentence
    assert sentence.startswith("expected ") and ", got " in sentence and "; " in sentence


@pytest.mark.parametrize(
    "source",
    [{"fp16": ON, "bf16": {"enabled": False}, "torch_autocast": {"enabled": False}}, {"prescale_gradients": True},
     {"bf16": {"bf16_optimizer_states": True, "bf16_master_weights_and_grads": True}}, {"gradient_predivide_factor": 4},
     grads("fp32", bf16=ON), {"torch_autocast": SAFE},
     grads("bf16", bf16={**ON, f"bf16_{MASTERS}": True}), zero(2, reduce_scatter=False),
     zero(1, offload_optimizer={"device": "cpu", "ratio": 0.5}),
     zero(3, offload_param={"device": "cpu", "nvme_path": "/a"}),
     zero(0, offload_optimizer={}, offload_param={"pin_memory": "auto"})],
)  # fmt: skip
def test_what_does_not_contradict(source: dict[str, Any]) -> None:
    load_config(source)


def test_a_wrong_value_causes_no_second_error() -> None:
    """The default that stands in for a wrong value must not be reported as contradicting the rest."""
    states = {"bf16_optimizer_states": True, "bf16_master_weights_and_grads": "yes"}
    offload = {"offload_optimizer": {"device": "disk", "ratio": 0.5}, "offload_param": {"device": "cpu"}}
    for source, wrong in (
        ({"bf16": states}, ["bf16.bf16_master_weights_and_grads"]),
        (zero("three", reduce_scatter=False, legacy_stage1=False), ["zero_optimization.stage"]),
        (zero(9, **offload), ["zero_optimization.stage", "zero_optimization.offload_optimizer.device"]),
        ({"bf16": {"enabled": "yes"}, "data_types": {"grad_accum_dtype": "bf16"}}, ["bf16.enabled"]),
    ):
        assert set(errors_of(source)) == set(wrong)


# ------------------------------------------------------------------ known, not supported yet

BLOCKS = {path: entry for path, entry in UNSUPPORTED.items() if entry.switch}


def test_unsupported_keys_are_known_by_name() -> None:
    """With a value of no feature the error is at the key, and never says unknown."""
    for path, entry in UNSUPPORTED.items():
        if not (entry.free or entry.ignored or entry.stage3):
            assert "known to zerolite but not supported yet" in errors_of(nested(path, 12345))[path]


def test_values_that_ask_for_what_is_done_anyway_are_accepted() -> None:
    for path, entry in UNSUPPORTED.items():
        without = {"optimizer": {"type": "Adam"}} if path.startswith("optimizer") else {}
        for value in (*entry.accepted, "auto", None):
            assert load_config(nested(path, value)) == load_config(without), path


@pytest.mark.parametrize(("path", "entry"), BLOCKS.items())
def test_blocks_with_a_switch(path: str, entry: Key) -> None:
    load_config(nested(path, {entry.switch: entry.accepted[0], "another": "anything"}))
    errors = errors_of(nested(path, {entry.switch: 12345}))
    assert list(errors) == [path] and f"only {entry.switch} = " in errors[path]
    for off in ({"another": "anything"}, False, None):
        load_config(nested(path, off))


@pytest.mark.parametrize(
    ("path", "value"),
    [("disable_python_gc", True), ("disable_python_gc", 0), ("aio.use_gds", True),
     ("zero_optimization.offload_optimizer.super_offload", True), ("zero_optimization.zenflow", {}),
     ("comet", True), ("comet", {"enabled": True}),
     ("amp", {"enabled": True, "opt_level": "O1"}), ("zero_optimization.load_from_fp32_weights", False),
     ("datastates_ckpt", {}), ("checkpoint.writer", {"type": "fast"}), ("sparse_attention", {"mode": "dense"})],
)  # fmt: skip
def test_values_that_ask_for_more(path: str, value: Any) -> None:
    errors = errors_of(nested(path, value))
    assert list(errors) == [path]
    assert "known to zerolite but not supported yet" in errors[path]


def test_deprecated_spellings_name_todays_key() -> None:
    for old, new in RENAMED.items():
        errors = errors_of(nested(old, "x"))
        assert list(errors) == [old] and f"; use {new}" in errors[old]
        assert new.split(" ")[0] in {*supported_keys(), *UNSUPPORTED}
    (sentence,) = errors_of(nested("zero_optimization.cpu_offload_param", True)).values()
    assert '; use zero_optimization.offload_param = {"device": "cpu"}' in sentence


EVERYTHING_WRONG = """{
    "stage": 2, "zero_optimization": {"stage": 4, "reduce_bucket_sizes": 1, "reduce_bucket_size": 1.5},
    "fp16": {"enabled": true, "loss_scale": -1}, "optimizer": {"params": {}}, "comet": {"enabled": true},
    "bf16": {"enabled": true, "bf16_optimizer_states": true, "immediate_grad_update": false},
    "allgather_size": 1, "gradient_clipping": "high", "dump_state": 1, "steps_per_print": 1, "steps_per_print": 2
}"""


def test_all_errors_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(EVERYTHING_WRONG)
    assert sorted(path for path, _ in caught.value.errors) == [
        "allgather_size", "bf16.bf16_optimizer_states", "bf16.immediate_grad_update", "comet", "dump_state",
        "fp16.enabled", "fp16.loss_scale", "gradient_clipping", "optimizer.type", "stage", "steps_per_print",
        "zero_optimization.reduce_bucket_size", "zero_optimization.reduce_bucket_sizes", "zero_optimization.stage",
    ]  # fmt: skip
    message = str(caught.value)
    assert message.startswith("14 errors in the configuration:") and isinstance(caught.value, ValueError)
    assert all(f"\n  {path}: {sentence}" in message for path, sentence in caught.value.errors)
