"""Weights & Biases writer."""

from __future__ import annotations

from collections.abc import Sequence

from .writer import Event, by_step


class WandbWriter:
    """A run of ``project``; the one that the process has begun already, if there is one, which is then left open.

    group, team: as in the run's page; None for the account's defaults. Raises ImportError, with the extra to install,
    where wandb is missing, and what ``wandb.init`` raises.
    """

    def __init__(self, project: str, group: str | None, team: str | None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                f"wandb.enabled: expected the package wandb, got: {error}. Install it with "
                "pip install 'zerolite[wandb]', or use csv_monitor or jsonl_monitor, which need nothing"
            ) from error
        self._project = project
        self._finishes = wandb.run is None
        self._run = wandb.run or wandb.init(project=project, group=group, entity=team)

    @property
    def name(self) -> str:
        return f"wandb (project {self._project})"

    def write(self, events: Sequence[Event]) -> None:
        """wandb's own process takes the values and sends them when it can. It drops steps that go backwards."""
        for step, values in by_step(events).items():
            self._run.log(values, step=step)

    def close(self) -> None:
        if self._finishes:
            self._finishes = False
            self._run.finish()
