"""Buckets of whole tensors for an inference engine: values, collectives, memory, and ranks that stop early."""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.distributed.test_offload_param import placements
from tests.distributed.test_quantized import Quantized
from tests.toolkit import experts, grids, models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, at
from tests.toolkit.memory import events_in_order, mark, memory_profile
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import make_engine, raised, raises, run_steps, snapshot
from zerolite.comm import record
from zerolite.zero.inner_tensors import flattened

QUANTIZED = ("block.weight", "block.scale", "whole", "packed", "_wrapped_qdata", "_wrapped_scale")


def streamed(engine: Any, **options: Any) -> dict[str, torch.Tensor]:
    """All tensors of a stream in buckets of 200 bytes."""
    stream = zerolite.stream_full_weights(engine, **{"bucket_bytes": 200, **options})
    return {name: tensor for bucket in stream for name, tensor in bucket}


def once(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict without the further names of tied tensors."""
    first: dict[int, str] = {}
    for name, value in state.items():
        first.setdefault(id(value), name)
    return {name: state[name] for name in first.values()}


@pytest.mark.fast("bf16-0-2", "bf16-3-2")
@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3, "3 defaults"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_values_of_every_stage(precision: str, stage: int | str) -> None:
    engine, described = make_engine(at(stage, precision)), []
    streamed(engine)
    run_steps(engine, 2, model="OddModel")
    engine.module.register_state_dict_post_hook(lambda module, *state: described.append(module))
    found = streamed(engine)
    assert not described, "the plan of the first stream serves the second one"
    assert_same_bits(found, once(engine.full_state_dict()), f"stage {stage}")
    half = streamed(engine, dtype=torch.float16)
    assert_same_bits(half, {name: value.half() for name, value in found.items()}, "cast")
    before = snapshot(engine)
    for value in found.values():
        value.zero_()
    assert_same_bits(snapshot(engine), before, "what a caller writes into a bucket")
    run_steps(engine, 1, 2, model="OddModel")  # no collective was left behind
    for value in (1.0, 2.0):
        engine.module.register_buffer("later", torch.full((3,), value))
        assert_same_bits(streamed(engine), once(engine.full_state_dict()), "a buffer that came later, or another one")


@on_ranks(2)
def test_the_values_of_offloaded_shards(tmp_path: Path) -> None:
    for name, made in placements(tmp_path, "moving").items():
        engine = zerolite.initialize(models.build(models.Mlp), made)
        run_steps(engine)
        assert_same_bits(streamed(engine), engine.full_state_dict(), name)
        run_steps(engine)


@pytest.mark.fast("3-2-2")
@on_ranks(2, 4)
@pytest.mark.parametrize("tensor", [2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_values_of_tensor_parallel_layers(stage: int, tensor: int) -> None:
    data = dist.get_world_size() // tensor
    engine = grids.make_engine(grids.on_grid(at(stage, "bf16"), (1, data, tensor)))
    grids.train(engine, 2)
    with record() as recorder:
        buckets = [dict(bucket) for bucket in zerolite.stream_full_weights(engine, bucket_bytes=2000)]
    found = {name: value for bucket in buckets for name, value in bucket.items()}
    assert_same_bits(found, once(engine.full_state_dict()), f"stage {stage}")
    tensor_gathers = [call for call in recorder.select("all_gather") if call.dimension == "tensor"]
    assert 0 < len(tensor_gathers) <= len(buckets)


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("stage", ["0", "3 moving"])
def test_the_values_of_experts_that_ranks_spread(stage: str) -> None:
    engine = experts.make("Mixture", 2, stage)
    assert_same_bits(streamed(engine), once(engine.full_state_dict()), f"stage {stage}")


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_quantized_weights_keep_their_bits(stage: int) -> None:
    torch.manual_seed(1)
    wanted = {name: value.detach().clone() for name, value in flattened(Quantized().state_dict()).items()}
    torch.manual_seed(1)
    engine = zerolite.initialize(Quantized(), at(stage, "bf16", optimizer=ADAMW))
    found = streamed(engine, dtype=torch.float16)
    assert set(found) == set(wanted)
    for name, value in found.items():
        assert value.dtype == (wanted[name].dtype if name in QUANTIZED else torch.float16), name
        if name in QUANTIZED:
            assert torch.equal(value.view(torch.uint8), wanted[name].view(torch.uint8)), name


@on_ranks(2)
def test_one_gather_a_bucket_while_the_one_before_is_used() -> None:
    engine = zerolite.initialize(models.build(models.Chain, depth=7, width=32), at(3))
    run_steps_of_chain(engine)
    with record() as recorder:
        stream = zerolite.stream_full_weights(engine, bucket_bytes=2 * 32 * 32 * 4)
        launched = []
        sizes = []
        for bucket in stream:
            launched.append(recorder.count("all_gather"))
            sizes.append(len(bucket))
    assert sizes == [2, 2, 2, 1]
    assert launched == [2, 3, 4, 4]
    assert [call.tensors for call in recorder.select("all_gather")] == sizes
    # Below stage 3 every rank has all weights, so nothing is sent.
    engine = zerolite.initialize(models.build(models.Chain, depth=7, width=32), at(2))
    with record() as recorder:
        assert len(list(itertools.chain(*map(dict, zerolite.stream_full_weights(engine))))) == 7
    assert not recorder.calls


def run_steps_of_chain(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 32)).square().mean())
    engine.step()


@pytest.mark.fast("3-None-2")
@on_ranks(2)
@pytest.mark.parametrize(("stage", "dtype"), [(0, None), (3, None), (0, torch.bfloat16), (3, torch.bfloat16)])
def test_memory_is_that_of_two_buckets(stage: int, dtype: torch.dtype | None) -> None:
    width, depth, in_bucket = 192, 24, 4
    engine = zerolite.initialize(models.build(models.Chain, depth=depth, width=width), at(stage))
    nbytes = in_bucket * width**2 * 4
    streamed(engine, bucket_bytes=nbytes)  # the transport keeps memory of its own from here on
    with memory_profile() as profiler:
        stream = zerolite.stream_full_weights(engine, bucket_bytes=nbytes, dtype=dtype)
        mark("begin")
        for bucket in stream:
            assert sum(tensor.numel() for _, tensor in bucket) * 4 == nbytes
        mark("end")
    events = events_in_order(profiler)
    held = list(itertools.accumulate(size for _, size, _ in events))
    begin, end = (next(i for i, event in enumerate(events) if event[2] == name) for name in ("begin", "end"))
    peak = max(held[begin:end])
    assert nbytes < peak <= 2 * nbytes * 1.05, peak / nbytes
    with raises(RuntimeError, "before the next one is asked for", "dict(bucket)"):
        len(bucket)


@on_ranks(2)
def test_names() -> None:
    engine = make_engine(at(3, "bf16"))
    whole = streamed(engine)
    assert list(streamed(engine, names=["up.bias", "embed.weight"])) == ["embed.weight", "up.bias"]
    renamed = streamed(engine, names={"up.bias": "model.up.bias"})
    assert list(renamed) == ["model.up.bias"] and torch.equal(renamed["model.up.bias"], whole["up.bias"])
    mapped = streamed(engine, names=lambda name: f"a.{name}" if "norm" in name else None)
    assert list(mapped) == ["a.norm.weight", "a.norm.bias"]
    assert streamed(engine, names=[]) == {}


@pytest.mark.fast("2")
@on_ranks(2)
def test_wrong_arguments_are_known_on_all_ranks() -> None:
    engine, rank = make_engine(at(3)), dist.get_rank()
    for options, words in (
        ({"names": ["up.bias", "no.such"] if rank else None}, "no.such"),
        ({"bucket_bytes": 0}, "positive integer"),
        ({"dtype": torch.int8 if not rank else None}, "torch.int8"),
        ({"names": "up.bias"}, "collection of names"),
        ({"names": ["up.bias"] if rank else ["down.bias"]}, "same arguments on all ranks"),
        ({"bucket_bytes": 100 + 100 * rank}, "same arguments on all ranks"),
    ):
        told = raised(zerolite.stream_full_weights, engine, **options)
        assert told.startswith("ValueError") and words in told, told
    run_steps(engine, model="OddModel")


def leaves(engine: Any) -> None:
    for _ in zerolite.stream_full_weights(engine, bucket_bytes=100):
        break


def fails(engine: Any) -> None:
    try:
        for number, _ in enumerate(zerolite.stream_full_weights(engine, bucket_bytes=100)):
            if number == 1:
                raise ValueError("a consumer that fails")
    except ValueError:
        pass


def never_begins(engine: Any) -> None:
    zerolite.stream_full_weights(engine, bucket_bytes=100)


def closes(engine: Any) -> None:
    stream = zerolite.stream_full_weights(engine, bucket_bytes=100)
    next(stream)
    stream.close()
    assert list(stream) == []
    stream.close()


def lacks_memory(engine: Any) -> None:
    stream = zerolite.stream_full_weights(engine, bucket_bytes=100)
    stream._made = None  # type: ignore[method-assign,assignment]  # calling it raises, as a cast without memory does
    with raises(TypeError):
        next(stream)


@pytest.mark.fast("leaves-2", "lacks_memory-2")
@on_ranks(2, timeout=30)
@pytest.mark.parametrize("stops", [leaves, fails, never_begins, closes, lacks_memory])
def test_a_rank_that_stops_early_leaves_no_other_waiting(stops: Callable[[Any], None]) -> None:
    engine = make_engine(at(3))
    for stopping in (0, 1, None):
        wanted = once(engine.full_state_dict())
        if dist.get_rank() == stopping or stopping is None:
            stops(engine)
        else:
            assert_same_bits(streamed(engine, bucket_bytes=100), wanted, "the others")
        run_steps(engine, model="OddModel")


@on_ranks(2)
def test_a_step_inside_of_a_stream_raises_on_all_ranks() -> None:
    engine = make_engine(at(3))
    stream = zerolite.stream_full_weights(engine, bucket_bytes=100)
    next(stream)
    run_steps(engine, model="OddModel")
    with raises(RuntimeError, "stay as they are"):
        next(stream)
    assert list(stream) == []
    assert_same_bits(streamed(engine), once(engine.full_state_dict()), "afterwards")


@on_ranks(2)
def test_a_pipeline_is_refused() -> None:
    engine = grids.make_engine(grids.on_grid(at(1, accumulation=2), (2, 1, 1)))
    with raises(RuntimeError, "a pipeline"):
        zerolite.stream_full_weights(engine)


# -------------------------------------------------------------------- adapters


def adapted(kind: str) -> Any:
    import peft

    torch.manual_seed(5)
    options: Any = {
        "lora": {"target_modules": ["q_proj", "v_proj"]},
        "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
        "embedding": {"target_modules": ["embed_tokens", "o_proj"], "lora_bias": False},
        "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 3]},
    }[kind]
    return peft.get_peft_model(
        models.build(models.hugging_face_llama), peft.LoraConfig(r=2, init_lora_weights=False, **options)
    )


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.fast("lora-3-2")
@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", ["lora", "dora", "embedding", "saved", "tokens"])
def test_adapters_are_merged_into_copies(kind: str, stage: int) -> None:
    """The values are those of PEFT's own merge in a full copy, to the bit, and the training weights keep theirs."""
    engine = zerolite.initialize(adapted(kind), at(stage, "bf16", optimizer=ADAMW))
    run_steps(engine, model="hugging_face_llama")
    before = snapshot(engine)
    with record() as recorder:
        buckets = [dict(bucket) for bucket in zerolite.stream_full_weights(engine, bucket_bytes=1000)]
    assert recorder.count("all_gather") <= len(buckets)
    found = {name: value for bucket in buckets for name, value in bucket.items()}
    whole: Any = copy.deepcopy(engine.module)
    merged = whole.merge_and_unload()
    assert_same_bits(found, dict(merged.state_dict()), kind)
    plain = models.build(models.hugging_face_llama).state_dict()
    assert found.keys() == plain.keys()
    assert any(not torch.equal(found[name], plain[name].bfloat16()) for name in plain)
    assert_same_bits(snapshot(engine), before, "the training weights")
    unmerged = streamed(engine, merge_lora=False)
    assert_same_bits(unmerged, once(engine.full_state_dict()), "with adapters")
    assert list(streamed(engine, names=["lm_head.weight"])) == ["lm_head.weight"]
    run_steps(engine, model="hugging_face_llama")
