"""Calls of save_checkpoint and load_checkpoint: their arguments, when they may be made, and by whom."""

from __future__ import annotations

import functools
import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.checkpoint.recipes import Recipe
from tests.checkpoint.runs import assert_equal, facts, make_engine, on_rank_0, tags_in, train, trained
from tests.toolkit import models
from tests.toolkit.compare import assert_same_on_ranks
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import expect_words, raised
from zerolite.checkpoint import filesystem
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.reader import CheckpointReader


@pytest.mark.slow
@on_ranks(2)
def test_a_tag_names_the_checkpoint(directory: str) -> None:
    engine = trained(Recipe(), 3, 1)
    assert engine.save_checkpoint(directory) == f"{directory}/global_step1"
    first = facts(engine)
    train(engine, Recipe(), 1, 2)
    assert engine.save_checkpoint(Path(directory), tag="mine", save_latest=False) == f"{directory}/mine"
    second = facts(engine)
    for tag in ("", "..", "a/b", ".hidden", "latest", " a", "a\n", "a\0", "\ud800", 5):
        said = raised(engine.save_checkpoint, directory, tag=tag)
        expect_words(said, "ValueError", "name of a directory", repr(tag))
    for where in (None, 3, ""):
        expect_words(raised(engine.save_checkpoint, where), "ValueError", "save_dir", repr(where))
        expect_words(raised(engine.load_checkpoint, where), "ValueError", "load_dir", repr(where))
    assert tags_in(directory) == ["global_step1", "mine"]
    latest = Path(directory, "latest")
    assert latest.read_text().strip() == "global_step1"
    for where, tag, wanted in (
        (directory, None, first), (directory, "mine", second), (Path(directory, "global_step1"), None, first),
    ):  # fmt: skip
        path, _ = engine.load_checkpoint(where, tag=tag)
        assert path == f"{directory}/{tag or 'global_step1'}"
        assert_equal(wanted, facts(engine))
    expect_words(raised(engine.load_checkpoint, directory, tag="none"), "CheckpointError", "'none'", "is 'mine'")
    on_rank_0(engine, latest.unlink)
    assert engine.load_checkpoint(directory)[0] == f"{directory}/mine"  # the newest
    for text, words in (("gone\n", ["'gone'", "is not there", "'mine'"]), ("../x", ["'../x'", "latest", "'mine'"])):
        on_rank_0(engine, functools.partial(latest.write_text, text))
        said = raised(engine.load_checkpoint, directory, missing_ok=True)
        expect_words(said, "CheckpointError", *words)
    assert_equal(second, facts(engine))


@pytest.mark.slow
@on_ranks(2)
def test_nothing_is_loaded_where_nothing_is(directory: str) -> None:
    engine = trained(Recipe(), 2, 1)
    before = facts(engine)
    for where in (directory, f"{directory}/not/there"):
        for tag, words in (
            (None, ("no checkpoint in", "latest", "manifest.json")),
            ("some", ("'some'", "no complete")),
        ):
            assert engine.load_checkpoint(where, tag=tag, missing_ok=True) == (None, {})
            expect_words(raised(engine.load_checkpoint, where, tag=tag), where, *words)
    os.makedirs(f"{directory}/something", exist_ok=True)
    with pytest.raises(FileNotFoundError):
        engine.load_checkpoint(directory)
    assert_equal(before, facts(engine))
    train(engine, Recipe(), 1, 2)


@on_ranks(2)
def test_the_client_state_comes_back(directory: str) -> None:
    engine = trained(Recipe(), 2, 1)
    given = {
        "epoch": 3, "best": float("-inf"), "history": [(1, 0.5), (2, 0.25)], "names": {"a", "b"},
        "order": OrderedDict(x=1), "by number": {0: "zero", (1, 2): None}, "rank": engine.rank,
        "tensor": torch.arange(5) * (engine.rank + 1), "half": torch.ones(2, 2, dtype=torch.bfloat16),
        "none": torch.empty(0, 3), "scalar": torch.tensor(0.5),
    }  # fmt: skip
    before = repr(given)
    engine.save_checkpoint(directory, client_state=given)
    assert repr(given) == before
    given["tensor"] += 1
    _, found = engine.load_checkpoint(directory)
    given |= {"rank": 0, "tensor": torch.arange(5)}
    assert list(found) == list(given)
    assert_equal(given, found)
    assert type(found["order"]) is OrderedDict and type(found["history"][0]) is tuple
    _, again = engine.load_checkpoint(directory, load_module_only=True)
    assert_equal(given, again)


@on_ranks(2)
@pytest.mark.parametrize("background", [False, True])
def test_what_one_rank_cannot_save_is_refused_on_all(directory: str, background: bool) -> None:
    """The call itself raises, in the background too."""
    engine = make_engine(Recipe(), 2)
    client_state = {"f": print if engine.rank else 1}
    said = raised(engine.save_checkpoint, directory, async_save=background, client_state=client_state)
    expect_words(said, "TypeError: client_state['f']", "builtin_function", *["rank 1"] * (engine.rank == 0))
    assert_same_on_ranks({"said": said.partition("TypeError")[2]})
    engine.wait_for_checkpoint()
    assert not os.path.exists(directory)
    engine.save_checkpoint(directory, client_state={"f": engine.rank})


class Interrupted(dict[str, Any]):
    """A client state during which Ctrl-C comes."""

    def __bool__(self) -> bool:
        raise KeyboardInterrupt


@on_ranks(2)
def test_ctrl_c_on_one_rank_ends_a_save_on_all(directory: str) -> None:
    engine = make_engine(Recipe(), 2)
    interrupted = engine.rank == 1
    with pytest.raises(KeyboardInterrupt if interrupted else CheckpointError) as ended:
        engine.save_checkpoint(directory, client_state=Interrupted() if interrupted else {})
    assert interrupted or "rank 1 stopped with KeyboardInterrupt" in str(ended.value)
    engine.save_checkpoint(directory)


@on_ranks(2)
def test_a_schedule_that_the_user_steps_goes_on_from_the_client_state(directory: str) -> None:
    """ReduceLROnPlateau needs a metric, so the engine does not have it."""
    metrics = [3.0, 2.0, 2.5, 2.6, 2.7, 2.8, 2.9, 1.0]

    def rates(engine: Any, schedule: Any, start: int, end: int) -> list[float]:
        found = []
        for step in range(start, end):
            train(engine, Recipe(), step, step + 1)
            schedule.step(metrics[step])
            found += engine.get_lr()
        return found

    engines = [make_engine(Recipe(), stage) for stage in (1, 3)]
    one, other = (ReduceLROnPlateau(e.optimizer, factor=0.5, patience=1, cooldown=1) for e in engines)
    assert rates(engines[0], one, 0, 4) == [1e-3, 1e-3, 1e-3, 5e-4]
    engines[0].save_checkpoint(directory, client_state={"schedule": one.state_dict()})
    other.load_state_dict(engines[1].load_checkpoint(directory)[1]["schedule"])
    assert other.state_dict() == one.state_dict()
    after = rates(engines[0], one, 4, 8)
    assert rates(engines[1], other, 4, 8) == after and after[-1] < 5e-4


@pytest.mark.slow
@on_ranks(2)
def test_arguments_that_differ_between_ranks_are_an_error_on_all(directory: str) -> None:
    engine = trained(Recipe(), 2, 1)
    rank = engine.rank
    given = {
        engine.save_checkpoint: ("save_latest", "exclude_frozen_parameters", "async_save"),
        engine.load_checkpoint: ("load_module_strict", "missing_ok"),
    }
    for call, names in given.items():
        for arguments in ({"tag": f"by-{rank}"}, *({name: rank == 0} for name in names)):
            said = raised(call, directory, **arguments)
            expect_words(said, "CheckpointError", "same arguments on all ranks", "on rank 0", "on rank 1")
        said = raised(call, f"{directory}/{rank}")
        expect_words(said, "CheckpointError", "same arguments on all ranks", f"{directory}/0", f"{directory}/1")
    assert not os.path.exists(directory) or os.listdir(directory) == []
    engine.save_checkpoint(directory)
    engine.load_checkpoint(directory)


@on_ranks(3)
@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_writes_and_reads_its_share(directory: str, stage: int) -> None:
    width, depth, block = 331, 4, filesystem.BLOCK_BYTES
    recipe = Recipe(functools.partial(models.Chain, width=width, depth=depth), optimizer=("AdamW", {"lr": 1e-3}))
    engine = make_engine(recipe, stage, zero={"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 200_000})
    engine.backward(engine(torch.ones(2, width)).square().mean())
    engine.step()
    stored = CheckpointReader(Path(engine.save_checkpoint(directory)))
    written = dict.fromkeys((name for name in stored.manifest.files if name.startswith("rank_")), 0)
    for tensor in stored.tensors.values():
        for box in tensor.boxes:
            assert 0 not in box.box[1]
            written[box.file] += math.prod(box.box[1]) * tensor.dtype.itemsize
    total = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in stored.tensors.values())
    world = engine.world_size
    assert len(written) == world and sum(written.values()) == total
    # The random state of each rank is about 10 KB; a bucket is padded to a multiple of 64 elements for each rank.
    slack = 20_000 + 3 * depth * 64 * 4 * world
    assert all(abs(count - total / world) <= slack for count in written.values()), written
    seen: list[tuple[str, int]] = []
    read_blocks = filesystem.CheckedFile.read_blocks

    def counting(file: Any, start: int, view: memoryview) -> None:
        seen.extend((file._path.name, start + low) for low in range(0, len(view), block) if file._path.name in written)
        read_blocks(file, start, view)

    with mock.patch.object(filesystem.CheckedFile, "read_blocks", counting):
        engine.load_checkpoint(directory)
    own = f"rank_{engine.rank:05d}.safetensors"
    assert len(seen) <= len(set(seen)) + 1, "a block was read twice, and not for the random state"
    needed = set(written) if stage == 0 else {own}  # at stage 0 each rank needs everything
    assert {name for name, _ in seen} == needed
    assert stage == 0 or len(seen) <= -(-(written[own] + 20_000) // block) + 1
