"""Windows that are saved in their middle and continued where something is other than it was. Run on every rank."""

from __future__ import annotations

from typing import Any

import torch

import zerolite

MICROS = 3


def engine_for(stage: int, precision: str) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 1))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return zerolite.initialize(model, config)


def micro(engine: Any, number: int, weight: float | None = None) -> None:
    x = torch.arange(8.0).reshape(2, 4) / 8 + 0.1 * number + 0.3 * engine.rank
    engine.backward(engine(x).mean(), weight=weight)
    engine.step()


def masters(engine: Any) -> list[torch.Tensor]:
    return list(zerolite.get_full_master(list(engine.module.parameters())))


def in_another_precision(directory: str, saved: str, loaded: str, stages: tuple[int, int]) -> float:
    """The largest difference of the update that closes the window from that of the uninterrupted one, over it."""
    before = engine_for(stages[0], saved)
    micro(before, 0)
    before.save_checkpoint(directory)
    after = engine_for(stages[1], loaded)
    after.load_checkpoint(directory)
    start = masters(after)
    for engine in (before, after):
        for number in range(1, MICROS):
            micro(engine, number)
    assert before.global_steps == after.global_steps == 1 and before.skipped_steps == after.skipped_steps == 0
    updates = [[new - old for new, old in zip(masters(e), start, strict=True)] for e in (before, after)]
    largest = max(float(update.abs().max()) for update in updates[0])
    return max(float((a - b).abs().max()) for a, b in zip(*updates, strict=True)) / largest


def of_a_rank_without_gradients(directory: str, stages: tuple[int, int], void: int) -> None:
    """One rank's micro-batches so far had nothing that counts: it takes part in the same collectives all the same."""
    before = engine_for(stages[0], "fp32")
    for number in range(2):
        micro(before, number, weight=0.0 if before.rank == void else 2.0)
    before.save_checkpoint(directory)
    after = engine_for(stages[1], "fp32")
    after.load_checkpoint(directory)
    for engine in (before, after):
        micro(engine, 2, weight=3.0)
    for ours, theirs in zip(masters(before), masters(after), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-7)


def engine_that_is_gone(directory: str) -> list[str]:
    """The engine goes out of scope while its checkpoint is being written; what is waited for is the checkpoint."""
    import gc

    from zerolite.checkpoint import saving

    engine = engine_for(2, "fp32")
    micro(engine, 0)
    engine.save_checkpoint(directory, async_save=True)
    del engine
    gc.collect()
    for saver in list(saving._unfinished):
        saver.close()
    other = engine_for(1, "fp32")
    path, _ = other.load_checkpoint(directory)
    assert path is not None and not saving._unfinished
    assert gc.isenabled()  # it is off within the calls
    return [path]
