"""Values over time (loss, learning rate, the user's own) to CSV, JSON lines, TensorBoard and Weights & Biases."""

from .monitor import Monitor
from .open import open_monitor
from .step_log import StepLog
from .writer import Event, Writer

__all__ = ["Event", "Monitor", "StepLog", "Writer", "open_monitor"]
