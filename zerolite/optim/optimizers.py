"""Optimizers by name, and the check that an optimizer is elementwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from zerolite.config.errors import ConfigError
from zerolite.ops.lion import Lion
from zerolite.optim.adamw8bit import AdamW8bit
from zerolite.optim.keyword_params import check_keyword_params, nearest
from zerolite.optim.muon import MuonWithAdamW
from zerolite.optim.update_rules import ONLY_HERE, unsupported

_PATH = "optimizer.params"

Errors = list[tuple[str, str]]  # (JSON path, sentence)

TORCH_OPTIMIZERS: dict[str, type[Optimizer]] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
}

# Optimizers that update each element from its own parameter, gradient and state, and from scalars of its param group.
# So ranks can update their shards on their own.
_ELEMENTWISE_NAMES = "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD"  # torch.optim
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {Lion} | {TORCH_OPTIMIZERS[name.lower()] for name in _ELEMENTWISE_NAMES.split() if name.lower() in TORCH_OPTIMIZERS}
)
_WHY_NOT_ELEMENTWISE = {
    "LBFGS": "it evaluates the loss several times a step and takes inner products over all parameters",
    "Adafactor": "its second moments are row and column averages, and it scales by the norm of a whole parameter",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it updates the rows of sparse gradients only, and gradients that live in a flat buffer are dense",
}
NOT_ELEMENTWISE: dict[type[Optimizer], str] = {
    TORCH_OPTIMIZERS[name.lower()]: why
    for name, why in _WHY_NOT_ELEMENTWISE.items()
    if name.lower() in TORCH_OPTIMIZERS
} | {MuonWithAdamW: _WHY_NOT_ELEMENTWISE["Muon"]}

# Classes of other libraries that need whole parameters, in lower case; their subclasses do too.
_WHOLE_NAMES = frozenset(
    "adafactor muon muonwithauxadam singledevicemuon singledevicemuonwithauxadam lamb lars shampoo distributedshampoo "
    "soap came adammini".split()
)

# Optimizers that do not work with an engine at any stage.
_UNUSABLE = {
    "lbfgs": "it needs a closure that evaluates the loss anew several times a step, and engine.step() has none",
    "sparseadam": "it needs sparse gradients, and zerolite keeps gradients in flat, dense buffers",
}

# Optimizers of DeepSpeed that do not exist here, and the nearest one that does.
_DEEPSPEED_ONLY = {
    "onebitadam": "Adam",
    "zerooneadam": "Adam",
    "onebitlamb": "AdamW",
    "lamb": "AdamW",
    "muadam": "Adam",
    "muadamw": "AdamW",
    "musgd": "SGD",
}
_COMPRESSION_KEYS = frozenset(
    "freeze_step cuda_aware comm_backend_name var_freeze_step var_update_scaler local_step_scaler local_step_clipper "
    "coeff_beta factor_max factor_min factor_threshold max_coeff min_coeff eps_inside_sqrt".split()
)
# Keys of DeepSpeed's Adam and Lion: the only supported value, and the reason.
_DEEPSPEED_SWITCHES = {
    "set_grad_none": (True, "gradients are always released by zero_grad()"),
}


@dataclass(frozen=True)
class OptimizerSpec:
    """Checked optimizer block of the configuration.

    Attributes:
        cls: class of the optimizer.
        defaults: arguments of the constructor.
        options: entries of the param groups that only zerolite's kernels support.
    """

    cls: type[Optimizer]
    defaults: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, groups: Any) -> Optimizer:
        """Make the optimizer of ``groups``, which are parameters or param groups."""
        optimizer = self.cls(groups, **self.defaults)
        optimizer.defaults.update(self.options)
        for group in optimizer.param_groups:
            for key, value in self.options.items():
                group.setdefault(key, value)
        return optimizer


def resolve_optimizer(type_name: str, params: Mapping[str, object] | None = None) -> OptimizerSpec:
    """Find the class and the constructor's arguments for `{"optimizer": {"type": type_name, "params": params}}`.

    Args:
        type_name: "AdamW8bit", "Lion" or any class of torch.optim, in upper or lower case.
        params: the constructor's parameters.

    These differ from torch:

    - "Adam" means decoupled weight decay (torch's AdamW) with a default of 0.0, as in DeepSpeed; `"adam_w_mode":
      false` makes it torch's Adam, which adds the decay to the gradient.
    - "AdamW" is torch's AdamW with torch's weight decay of 0.01 (DeepSpeed: 0.01 with `torch_adam`, else 0.0).
    - "AdamW8bit" is `zerolite.optim.adamw8bit.AdamW8bit`, "Adam8bit" the same with Adam's weight decay of 0.0.
    - "Lion" has DeepSpeed's defaults lr = 1e-3, betas = (0.9, 0.999) (the paper and `zerolite.ops.Lion`: 1e-4, (0.9,
      0.99)).
    - "Muon" is `zerolite.optim.muon.MuonWithAdamW`: Muon for the matrices of hidden layers, AdamW for everything else.
    - `torch_adam` is accepted and has no effect: Adam is always torch's.
    - Adam and AdamW have two more keys: `"bias_correction": false` and `"fp32_optimizer_states": false` (moments in
      bf16). Only zerolite's kernels support them, so they cannot be combined with keys that choose an implementation
      or a variant of torch's.

    Raises:
        ConfigError: with a sentence for each key that is unknown, unsupported or of the wrong type.
    """
    cls = _find_class(type_name)
    remaining = dict(params or {})
    errors: Errors = []
    own_keys: tuple[str, ...] = ()
    options: dict[str, Any] = {}
    if type_name.lower() in ("adam", "adamw"):
        own_keys = ("adam_w_mode", "torch_adam", *ONLY_HERE, *_DEEPSPEED_SWITCHES)
        options = {key: False for key in ONLY_HERE if not _pop_bool(key, True, remaining, errors)}
        cls = _pop_adam_keys(type_name.lower(), remaining, errors)
    elif cls is Lion:
        own_keys = ("set_grad_none",)
        _pop_switches(own_keys, remaining, errors)
    _pop_foreign_keys(remaining, errors)
    kwargs, problems = check_keyword_params(
        _PATH, cls, remaining, hidden=("params", *_hidden(cls)), also_known=own_keys
    )
    errors += problems
    errors += _contradictions(options, kwargs)
    if kwargs.get("differentiable"):
        errors.append((f"{_PATH}.differentiable", "expected false, got true; the step is not recorded by autograd"))
    if errors:
        raise ConfigError(errors)
    defaults = {**_config_defaults(type_name.lower(), cls), **kwargs}
    _try_to_make(cls, defaults)
    return OptimizerSpec(cls, defaults, options)


def _contradictions(options: Mapping[str, object], kwargs: Mapping[str, object]) -> Errors:
    """Return an error for each key that needs zerolite's kernels, if another key asks for torch's implementation."""
    other = unsupported(kwargs)
    if other is None:
        return []
    sentence = f"expected true beside '{other}', which only torch's implementation has; got false"
    return [(f"{_PATH}.{key}", sentence) for key in options]


def check_elementwise(optimizer: Optimizer | type[Optimizer]) -> str | None:
    """Return None if each rank may update its own shard of a parameter, otherwise a sentence that says why not.

    The classes of torch.optim and `zerolite.ops.Lion` are known. Their subclasses are not, because a subclass may
    compute anything. Another class counts as elementwise if its own body has `zerolite_elementwise = True`; the value
    is not inherited, for the same reason.
    """
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    if cls in ELEMENTWISE:
        return None
    if cls in NOT_ELEMENTWISE:
        return f"{cls.__name__} cannot update a part of a parameter: {NOT_ELEMENTWISE[cls]}."
    declared = vars(cls).get("zerolite_elementwise")
    if declared is True:
        return None
    if declared is False:
        return f"{cls.__name__} cannot update a part of a parameter: its class says zerolite_elementwise = False."
    around = [name for name, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)]
    if around and not isinstance(optimizer, type):
        return (
            f"{cls.__name__} steps another optimizer, and so cannot update a part of a parameter by itself. Give that "
            f"one to zerolite.initialize(optimizer=optimizer.{around[0]}), and call its step around the engine's."
        )
    return (
        f"It is not known whether {cls.__module__}.{cls.__qualname__} can update a part of a parameter by itself. "
        "If each element's update depends only on that element's gradient and state, and on scalars, set "
        "`zerolite_elementwise = True` on the class, or zero_allow_untested_optimizer = true in the config; "
        "otherwise set zero_optimization.whole_parameters = true."
    )


def needs_whole_parameters(optimizer: Optimizer | type[Optimizer]) -> bool:
    """Return True if this class is known to need whole parameters.

    These are some classes of torch, some classes of other libraries (by name), and classes whose own body has
    `zerolite_elementwise = False`.
    """
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    if cls in ELEMENTWISE or "zerolite_elementwise" in vars(cls):
        return vars(cls).get("zerolite_elementwise") is False
    return any(base in NOT_ELEMENTWISE or base.__name__.lower() in _WHOLE_NAMES for base in cls.__mro__)


def check_usable(optimizer: Optimizer | type[Optimizer]) -> None:
    """Raise ValueError for an optimizer that does not work with an engine at any stage."""
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    for base in cls.__mro__:
        why = _UNUSABLE.get(base.__name__.lower()) if base in NOT_ELEMENTWISE else None
        if why is not None:
            raise ValueError(f"zerolite.initialize: optimizer {cls.__name__} is not supported: {why}; use another one")


def _find_class(type_name: str) -> type[Optimizer]:
    known = {**TORCH_OPTIMIZERS, "lion": Lion, "adamw8bit": AdamW8bit, "adam8bit": AdamW8bit}
    name = type_name.lower()
    if name == "muon":
        if name not in known:
            sentence = f"'{type_name}' needs torch 2.9 or newer, whose Muon it is; this is torch {torch.__version__}"
            raise ConfigError([("optimizer.type", sentence)])
        return MuonWithAdamW
    if name in _UNUSABLE:
        raise ConfigError([("optimizer.type", f"'{type_name}' is not supported: {_UNUSABLE[name]}")])
    if name in known:
        return known[name]
    names = sorted({cls.__name__ for key, cls in known.items() if key not in _UNUSABLE})
    if name in _DEEPSPEED_ONLY:
        sentence = f"'{type_name}' is not supported; the nearest that is: '{_DEEPSPEED_ONLY[name]}'"
    else:
        sentence = (
            f"'{type_name}' is not known{nearest(type_name, names)}; known are {', '.join(names)}; an optimizer of "
            f"your own goes to zerolite.initialize(..., optimizer=...)"
        )
    raise ConfigError([("optimizer.type", sentence)])


def _pop_adam_keys(name: str, remaining: dict[str, object], errors: Errors) -> type[Optimizer]:
    """Pop DeepSpeed's own keys from `remaining`. Return torch's class with the same weight decay."""
    _pop_switches(tuple(_DEEPSPEED_SWITCHES), remaining, errors)
    _pop_bool("torch_adam", True, remaining, errors)
    decoupled = _pop_bool("adam_w_mode", True, remaining, errors)
    if name == "adamw" and not decoupled:
        sentence = "false, but AdamW always decouples its weight decay; remove the key, or set optimizer.type to 'Adam'"
        errors.append((f"{_PATH}.adam_w_mode", sentence))
    return torch.optim.AdamW if decoupled else torch.optim.Adam


def _pop_bool(key: str, default: bool, remaining: dict[str, object], errors: Errors) -> bool:
    value = remaining.pop(key, default)
    if isinstance(value, bool):
        return value
    if value != "auto":
        errors.append((f"{_PATH}.{key}", f"expected true or false, got {value!r}"))
    return default


def _pop_switches(keys: tuple[str, ...], remaining: dict[str, object], errors: Errors) -> None:
    for key in keys:
        supported, otherwise = _DEEPSPEED_SWITCHES[key]
        if _pop_bool(key, supported, remaining, errors) is not supported:
            errors.append((f"{_PATH}.{key}", f"expected {str(supported).lower()}; {otherwise}"))


def _pop_foreign_keys(remaining: dict[str, object], errors: Errors) -> None:
    """Pop keys from `remaining` that are not parameters of this optimizer, with an error for each."""
    for key in [key for key in remaining if key in _COMPRESSION_KEYS]:
        del remaining[key]
        sentence = "belongs to DeepSpeed's Lamb and 1-bit optimizers, which are not supported; remove it"
        errors.append((f"{_PATH}.{key}", sentence))
    if remaining.pop("max_grad_norm", None) is not None:
        sentence = "not a parameter of an optimizer; use the top-level key gradient_clipping"
        errors.append((f"{_PATH}.max_grad_norm", sentence))


def _hidden(cls: type[Optimizer]) -> tuple[str, ...]:
    """Return the constructor's parameters that the configuration does not offer.

    Adam's `decoupled_weight_decay` means the same as `adam_w_mode`, and two keys could contradict each other.
    """
    return ("decoupled_weight_decay",) if cls is torch.optim.Adam else ()


def _config_defaults(name: str, cls: type[Optimizer]) -> dict[str, object]:
    """Return the defaults in which the configuration differs from the class."""
    if name == "adam8bit" or (name == "adam" and cls is torch.optim.AdamW):
        return {"weight_decay": 0.0}
    if cls is Lion:
        return {"lr": 1e-3, "betas": (0.9, 0.999)}
    return {}


def _try_to_make(cls: type[Optimizer], defaults: dict[str, Any]) -> None:
    """Let the class check its arguments on a tiny parameter, so that an error can name the block of the config."""
    try:
        cls([torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))], **defaults)
    except Exception as error:  # torch checks few of these values: any exception is about them
        reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError([(_PATH, f"{cls.__name__} does not take these values: {reason}")]) from error
