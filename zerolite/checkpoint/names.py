"""Names of a model's tensors in checkpoints and exports."""

from __future__ import annotations

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, and its wrapper of checkpointed modules


def clean(name: str) -> str:
    """Return a parameter's name in the model as it was written, without the names of wrappers around its modules."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
