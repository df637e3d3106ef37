"""Calls of save_checkpoint and load_checkpoint: their arguments, when they may be made, and by whom."""

from __future__ import annotations

import os
import time
import warnings
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import zerolite
from tests.checkpoint import faults
from tests.checkpoint.cases.recipes import RECIPES, Recipe
from tests.checkpoint.cases.resume import (
    ADAM,
    differences,
    expect,
    expect_words,
    facts,
    make_engine,
    message,
    reloaded,
    train,
    trained,
)
from tests.toolkit import models
from tests.toolkit.configs import SGD
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from zerolite.checkpoint import reader
from zerolite.checkpoint.directory import find
from zerolite.checkpoint.reader import CheckpointReader, Target
from zerolite.checkpoint.safetensors import as_bytes

# -------------------------------------------------------------------- tags


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_tags(directory: str, stage: int) -> None:
    recipe = Recipe()
    engine = trained(recipe, stage, 1)
    assert engine.save_checkpoint(directory) == str(Path(directory) / "global_step1")
    first = facts(engine, ADAM)
    train(engine, recipe, 1, 2)
    assert engine.save_checkpoint(Path(directory), tag="mine", save_latest=False) == str(Path(directory) / "mine")
    second = facts(engine, ADAM)
    engine.wait_for_checkpoint()
    for tag in ("a/b", "", ".hidden", "latest", "..", 5, f"{directory}/x"):
        said = message(engine.save_checkpoint, directory, tag=tag)
        expect_words(said, "ValueError", "name of a directory", repr(tag))
    for where in (None, 3, ""):
        expect_words(message(engine.save_checkpoint, where), "ValueError", "save_dir", repr(where))
        expect_words(message(engine.load_checkpoint, where), "ValueError", "load_dir", repr(where))
    assert sorted(entry for entry in os.listdir(directory) if not entry.startswith(".")) == [
        "global_step1",
        "latest",
        "mine",
    ]
    assert Path(directory, "latest").read_text().strip() == "global_step1"
    path, _ = engine.load_checkpoint(directory)
    assert path == str(Path(directory) / "global_step1")
    expect(differences(first, facts(engine, ADAM)))
    engine.load_checkpoint(directory, tag="mine")
    expect(differences(second, facts(engine, ADAM)))
    engine.load_checkpoint(Path(directory) / "global_step1")  # itself
    expect(differences(first, facts(engine, ADAM)))
    expect_words(message(engine.load_checkpoint, directory, tag="none"), "CheckpointError", "'none'", "is 'mine'")
    engine.reduce(0)
    latest = Path(directory, "latest")
    _on_rank0(engine, latest.unlink)
    path, _ = engine.load_checkpoint(directory)  # the newest
    assert path == str(Path(directory) / "mine")
    for text, words in (("gone\n", ["'gone'", "is not there", "'mine'"]), ("../x", ["'../x'", "latest", "'mine'"])):
        _on_rank0(engine, lambda text=text: latest.write_text(text))
        said = message(engine.load_checkpoint, directory, missing_ok=True)
        expect_words(said, "CheckpointError", *words)
    expect(differences(second, facts(engine, ADAM)))


def _on_rank0(engine: Any, action: Any) -> None:
    engine.reduce(0)
    if engine.rank == 0:
        action()
    engine.reduce(0)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [2])
def test_nothing_there(directory: str, stage: int) -> None:
    engine = trained(Recipe(), stage, 1)
    before = facts(engine, ADAM)
    for where in (directory, f"{directory}/not/there"):
        assert engine.load_checkpoint(where, missing_ok=True) == (None, {})
        said = message(engine.load_checkpoint, where)
        expect_words(said, "no checkpoint in", where, "latest", "manifest.json")
        try:
            engine.load_checkpoint(where, tag="some")
        except FileNotFoundError as error:
            expect_words(str(error), "'some'", "no complete one")
        assert engine.load_checkpoint(where, tag="some", missing_ok=True) == (None, {})
    expect(differences(before, facts(engine, ADAM)))
    train(engine, Recipe(), 1, 2)


# -------------------------------------------------------------------- client state


@on_ranks(2)
@pytest.mark.parametrize("stage", [2])
def test_client_state(directory: str, stage: int) -> None:
    engine = trained(Recipe(), stage, 1)
    given = {
        "epoch": 3,
        "best": float("-inf"),
        "history": [(1, 0.5), (2, 0.25)],
        "names": {"a", "b"},
        "order": OrderedDict(x=1),
        "tensor": torch.arange(5) * (engine.rank + 1),
        "half": torch.ones(2, 2, dtype=torch.bfloat16),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(0.5),
        "by number": {0: "zero", (1, 2): None},
        "rank": engine.rank,
    }
    before = repr(given)
    engine.save_checkpoint(directory, client_state=given)
    assert repr(given) == before
    given["tensor"] += 1
    _, found = engine.load_checkpoint(directory)
    given |= {"rank": 0, "tensor": torch.arange(5)}
    assert list(found) == list(given)
    expect(differences(given, found))
    assert type(found["order"]) is OrderedDict and type(found["history"][0]) is tuple
    _, again = engine.load_checkpoint(directory, load_module_only=True)
    expect(differences(given, again))


# -------------------------------------------------------------------- by whom


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [2])
def test_different_arguments(directory: str, stage: int) -> None:
    """Arguments that differ between ranks are an error on all of them, and the next call works."""
    engine = trained(Recipe(), stage, 1)
    rank = engine.rank
    for arguments in (
        {"tag": f"by-{rank}"},
        {"save_latest": rank == 0},
        {"exclude_frozen_parameters": rank == 0},
        {"async_save": rank == 0},
    ):
        said = message(engine.save_checkpoint, directory, **arguments)
        expect_words(said, "CheckpointError", "same arguments on all ranks", "on rank 0", "on rank 1")
    said = message(engine.save_checkpoint, f"{directory}/{rank}")
    expect_words(said, "CheckpointError", "same arguments on all ranks", f"{directory}/0", f"{directory}/1")
    said = message(engine.save_checkpoint, directory, tag="a/b" if rank else "ok")
    expect_words(said, "ValueError", "'a/b'")
    assert not os.path.exists(directory) or os.listdir(directory) == []
    engine.save_checkpoint(directory)
    for arguments in ({"tag": f"by-{rank}"}, {"load_module_strict": rank == 0}, {"missing_ok": rank == 0}):
        said = message(engine.load_checkpoint, directory, **arguments)
        expect_words(said, "CheckpointError", "same arguments on all ranks", "on rank 0", "on rank 1")
    engine.load_checkpoint(directory)


@on_ranks(2)
@pytest.mark.fast("0-save-*")
@pytest.mark.parametrize(("missing", "how", "stage"), [(0, "save", 1), (1, "load", 3)])
def test_a_rank_that_does_not_take_part_is_named(directory: str, stage: int, missing: int, how: str) -> None:
    """A rank that does not take part is named, and hinders nothing else."""
    engine = make_engine(Recipe(), stage, checkpoint={"timeout_s": 0.5})
    train(engine, Recipe(), 0, 1)
    engine.save_checkpoint(directory)
    call = engine.save_checkpoint if how == "save" else engine.load_checkpoint
    if engine.rank != missing:
        began = time.monotonic()
        said = message(call, directory)
        assert time.monotonic() - began < 5
        expect_words(said, f"rank {missing} did not take part within 0.5 s", f"engine.{how}_checkpoint")
    train(engine, Recipe(), 1, 2)
    engine.reduce(0)
    engine.save_checkpoint(directory)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize(("missing", "stage"), [(0, 1), (1, 3)])
def test_a_rank_that_comes_too_late(directory: str, stage: int, missing: int) -> None:
    """A rank comes when the others have given up: an error for it too, no hang, and the next save is whole."""
    engine = make_engine(Recipe(), stage, checkpoint={"timeout_s": 0.3})
    train(engine, Recipe(), 0, 1)
    engine.reduce(0)
    late = engine.rank == missing
    if late:
        time.sleep(1.5)
    expect_words(
        message(engine.save_checkpoint, directory), f"rank {1 - missing if late else missing} did not take part"
    )
    engine.reduce(0)
    engine.save_checkpoint(directory)
    expect(differences(facts(engine, ADAM), reloaded(directory, Recipe(), stage)))


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize(("finished", "stage"), [(0, 3), (1, 1)])
def test_a_rank_that_has_finished_follows(directory: str, stage: int, finished: int) -> None:
    """A rank has no batches any more while the others save."""
    recipe = RECIPES["groups"]
    engine = make_engine(recipe, stage)
    with engine.join():
        for step in range(2 if engine.rank == finished else 4):
            x, y = models.float_batch(step, 0, engine.rank)
            engine.backward(models.square_loss(engine, (x, y)))
            engine.step()
            if step == 2:
                path = engine.save_checkpoint(directory, client_state={"rank": engine.rank})
                assert path == str(Path(directory) / "global_step3")
    own = facts(engine, ADAM)
    other = make_engine(recipe, 3 - stage, seed=5)
    _, client = other.load_checkpoint(directory)
    assert client == {"rank": 1 if finished == 0 else 0} and other.global_steps == 3
    with other.join():
        for _ in range(0 if other.rank == finished else 1):
            other.backward(models.square_loss(other, models.float_batch(3, 0, other.rank)))
            other.step()
    expect(differences(own, facts(other, ADAM)))


@on_ranks(2)
@pytest.mark.parametrize("stage", [3])
def test_loading_where_a_rank_has_finished(directory: str, stage: int) -> None:
    """Loading is refused on a part of the ranks."""
    engine = trained(RECIPES["groups"], stage, 1)
    engine.save_checkpoint(directory)
    with engine.join():
        engine.load_checkpoint(directory)  # no rank has finished
    said = ""
    try:
        with engine.join():
            if engine.rank == 0:
                engine.load_checkpoint(directory)
    except RuntimeError as error:
        said = str(error)
    assert said


@on_ranks(2)
def test_one_process_of_several_needs_no_other(directory: str) -> None:
    """Rank 1 writes and reads a checkpoint by itself, without a warning."""
    if torch.distributed.get_rank() == 0:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        faults.save(Path(directory), 1)
        stored = CheckpointReader(find(Path(directory)))
        weight = torch.zeros(4, 700)
        stored.load([Target("parameters/weight", ((0, 0), (4, 700)), weight)])
    assert faults.load(Path(directory)) == 1
    assert torch.equal(weight, faults.values(1)["parameters/weight"])


# -------------------------------------------------------------------- who writes and reads what


def written_bytes(directory: str, stage: int, sizes: dict[str, Any]) -> dict[str, Any]:
    """The payload of each rank's file, and what each rank has read in blocks."""
    recipe = Recipe(lambda: models.build(models.Chain, **sizes), optimizer=("AdamW", {"lr": 1e-3}))
    engine = make_engine(recipe, stage, zero={"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 200_000})
    x = torch.ones(2, sizes["width"])
    engine.backward(engine(x).square().mean())
    engine.step()
    path = engine.save_checkpoint(directory)
    found = CheckpointReader(Path(path))
    by_file = dict.fromkeys((name for name in found.manifest.files if name.startswith("rank_")), 0)
    for stored in found.tensors.values():
        for box in stored.boxes:
            by_file[box.file] += int(torch.Size(box.box[1]).numel()) * stored.dtype.itemsize
    blocks: list[tuple[str, int]] = []
    read_blocks = reader._CheckedFile.read_blocks

    def counting(file: Any, start: int, view: memoryview) -> None:
        blocks.extend((file.path.name, start + low) for low in range(0, len(view), reader.BLOCK_BYTES))
        read_blocks(file, start, view)

    reader._CheckedFile.read_blocks = counting  # type: ignore[method-assign]
    try:
        engine.load_checkpoint(directory)
    finally:
        reader._CheckedFile.read_blocks = read_blocks  # type: ignore[method-assign]
    empty = [key for key, stored in found.tensors.items() for box in stored.boxes if 0 in box.box[1]]
    return {"written": by_file, "empty": empty, "read": blocks, "total": sum(t.nbytes for t in found.tensors.values())}


def large(directory: str, stage: int, part: str) -> dict[str, int]:
    """Checksums of weights and states of several blocks each, after a step and a save ("save"), or a load."""
    recipe = Recipe(lambda: models.build(models.Chain, depth=2, width=701), optimizer=SGD, states=("momentum_buffer",))
    engine = make_engine(recipe, stage, seed=None if part == "save" else 5, zero={"reduce_bucket_size": 400_000})
    if part == "save":
        generator = torch.Generator().manual_seed(3)
        engine.backward(engine(torch.randn(2, 701, generator=generator)).square().mean())
        engine.step()
        engine.save_checkpoint(directory)
    else:
        engine.load_checkpoint(directory)
    found = facts(engine, recipe.states)
    tensors = {f"{kind} {name}": t for kind in ("masters", "momentum_buffer") for name, t in found[kind].items()}
    return {key: zlib.crc32(as_bytes(tensor.contiguous())) for key, tensor in tensors.items()}


def data_position(directory: str, stage: int, part: str) -> list[int]:
    """The samples that this rank sees before it saves in the middle of a pass ("save"), or after it loads."""
    data = torch.arange(48)
    engine = zerolite.initialize(
        models.build(models.Mlp),
        {
            "train_micro_batch_size_per_gpu": 12 // torch.distributed.get_world_size(),
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage},
        },
    )
    loader = engine.deepspeed_io(data)
    seen = []
    if part != "save":
        engine.load_checkpoint(directory)
    for batch in loader:
        seen += batch.tolist()
        if part == "save" and len(seen) * engine.world_size == 24:
            engine.save_checkpoint(directory)
            break
    return seen


def case(pools: Pools, name: str, directory: str, world: int = 2, **kwargs: Any) -> list[Any]:
    return pools(world).run(f"{__name__}:{name}", {"directory": directory, **kwargs})


@pytest.mark.fast("0-2", "3-2")
@pytest.mark.parametrize(("stage", "world"), [(0, 2), (3, 2), (1, 3), (3, 3)])
def test_each_rank_writes_and_reads_its_share(pools: Pools, directory: str, stage: int, world: int) -> None:
    width, depth = 331, 4
    ranks = case(pools, "written_bytes", directory, world, stage=stage, sizes={"width": width, "depth": depth})
    written, total = ranks[0]["written"], ranks[0]["total"]
    assert len(written) == world and sum(written.values()) == total
    assert all(rank["empty"] == [] for rank in ranks)
    # The random state of each rank is about 10 KB; a bucket is padded to a multiple of 64 elements for each rank.
    slack = 20_000 + 3 * depth * 64 * 4 * world
    for count in written.values():
        assert abs(count - total / world) <= slack, written
    block = 1 << 20
    for number, rank in enumerate(ranks):
        seen = [entry for entry in rank["read"] if entry[0].startswith("rank_")]
        assert len(seen) <= len(set(seen)) + 1, "a block was read twice, and not for the random state"
        if stage == 0:  # every rank needs everything
            assert {name for name, _ in seen} == set(written)
        else:
            assert {name for name, _ in seen} == {f"rank_{number:05d}.safetensors"}
            assert len(seen) <= -(-(written[f"rank_{number:05d}.safetensors"] + 20_000) // block) + 1


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), [((2, 3), (3, 1)), ((3, 1), (2, 3))])
def test_weights_of_several_blocks(
    pools: Pools, directory: str, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    before = case(pools, "large", directory, saved[0], stage=saved[1], part="save")
    after = case(pools, "large", directory, loaded[0], stage=loaded[1], part="load")
    assert len(before[0]) == 4
    assert all(rank == before[0] for rank in (*before, *after))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(2, 3), pytest.param(3, 2, marks=pytest.mark.slow)],
)
def test_a_pass_over_the_data_goes_on_in_its_middle(pools: Pools, directory: str, saved: int, loaded: int) -> None:
    before = case(pools, "data_position", directory, saved, stage=1, part="save")
    after = case(pools, "data_position", directory, loaded, stage=3, part="load")
    samples = torch.tensor([*sum(before, []), *sum(after, [])])
    assert samples.sort().values.tolist() == list(range(48))
