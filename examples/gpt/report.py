"""What a run says about itself: the progress bar, metrics.jsonl, loss.png."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm


class Report:
    """Writes on rank 0. The other ranks make one too, because means over ranks need them all.

    Attributes:
        out_of_time: whether some rank has been at it for more than `max_minutes`. Found out at each `log`, by all ranks
            together, so that all of them stop after the same step.
    """

    def __init__(
        self, engine: Any, directory: Path, steps: int, started: float, max_minutes: float, step: int = 0
    ) -> None:
        """started: `time.perf_counter()` at the start of this process. step: how many are behind the run, which goes on
        in the files of an earlier one; 0: they begin anew."""
        self.engine, self.directory, self.started, self.max_minutes = engine, directory, started, max_minutes
        self.out_of_time = False
        self.loss_sum = torch.zeros((), device=engine.device)
        self.steps = self.tokens = 0
        self.seconds = 0.0  # of training since the last line, validation not counted
        self.earlier_s = 0.0  # elapsed in the runs that this one continues
        self.resumed = time.perf_counter()
        self.file = None
        if engine.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            if step > 0:
                self.earlier_s = cut_off(directory / "metrics.jsonl", step)
            self.file = (directory / "metrics.jsonl").open("a" if step > 0 else "w", buffering=1)
        options: dict[str, Any] = {"mininterval": 0.5, "unit": "step", "dynamic_ncols": True}
        self.bar = tqdm(total=steps, initial=step, disable=engine.rank != 0, **options)

    def add(self, loss: Tensor, tokens: int) -> None:
        """Takes note of a step, whose ``tokens`` are those of all ranks, without waiting for the device."""
        self.loss_sum += loss.detach()
        self.steps += 1
        self.tokens += tokens

    def log(self, step: int, lr: float) -> None:
        """Reports what was added since the last time. The loss is the mean over steps."""
        late = time.perf_counter() - self.started > self.max_minutes * 60
        loss, any_late = mean_over_ranks(self.engine, self.loss_sum / self.steps, float(late))
        self.out_of_time = any_late > 0
        now = time.perf_counter()
        tokens_per_s = self.tokens / (self.seconds + now - self.resumed)
        grad_norm = self.engine.get_global_grad_norm()
        self._write(step=step, loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_s=round(tokens_per_s, 1))
        shown_norm = "none" if grad_norm is None else f"{grad_norm:.2f}"
        self.bar.set_postfix_str(
            f"loss {loss:.3f}, lr {lr:.2e}, grad norm {shown_norm}, {tokens_per_s:,.0f} tokens/s", refresh=False
        )
        self.bar.update(step - self.bar.n)
        self.loss_sum.zero_()
        self.steps = self.tokens = 0
        self.seconds, self.resumed = 0.0, now

    def pause(self) -> None:
        """What follows is not training: it does not count in tokens/s."""
        self.seconds += time.perf_counter() - self.resumed

    def log_validation(self, step: int, loss: float) -> None:
        self._write(step=step, val_loss=loss)
        self.say(f"step {step}: validation loss {loss:.4f} nats a byte")
        self.resumed = time.perf_counter()

    def say(self, text: str) -> None:
        if self.engine.rank == 0:
            tqdm.write(text)

    def close(self) -> None:
        """Ends the bar and the file, and draws the curve."""
        self.bar.close()
        if self.file is not None:
            self.file.close()
            self.say(draw_loss_curve(self.directory))

    def _write(self, **values: float | None) -> None:
        """One line of metrics.jsonl. What is not finite becomes null, since JSON has no word for it."""
        if self.file is None:
            return
        values["elapsed_s"] = round(self.earlier_s + time.perf_counter() - self.started, 3)
        finite = {key: value if value is not None and math.isfinite(value) else None for key, value in values.items()}
        self.file.write(json.dumps(finite) + "\n")


def cut_off(metrics: Path, step: int) -> float:
    """Cuts off the lines behind `step`, which are written again, and one that was not finished. Returns the seconds
    that had elapsed at the last one that stays."""
    metrics.touch()
    kept, elapsed_s = 0, 0.0
    for text in metrics.read_bytes().splitlines(keepends=True):
        line = json.loads(text) if text.endswith(b"\n") else {"step": math.inf}
        if line["step"] > step:
            break
        kept, elapsed_s = kept + len(text), line["elapsed_s"]
    os.truncate(metrics, kept)
    return elapsed_s


def mean_over_ranks(engine: Any, *values: Tensor | float) -> list[float]:
    """The mean over ranks of each value, a scalar tensor or a number. Called on all ranks, in the same order."""
    means = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=engine.device) for value in values])
    if engine.world_size > 1:
        dist.all_reduce(means)
    return (means / engine.world_size).tolist()


def draw_loss_curve(directory: Path) -> str:
    """Draws loss.png from metrics.jsonl and returns a sentence about it."""
    try:
        import matplotlib
    except ImportError:
        return f"wrote {directory}/metrics.jsonl; no loss.png, for want of matplotlib: pip install 'zerolite[plot]'"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for key, label, style in (("loss", "training", "-"), ("val_loss", "validation", "o-")):
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        axes.plot([step for step, _ in points], [loss for _, loss in points], style, label=label)
    axes.set(xlabel="step", ylabel="loss in nats a byte", title="Byte-level GPT")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(directory / "loss.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return f"wrote {directory}/metrics.jsonl and {directory}/loss.png"
