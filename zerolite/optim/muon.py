"""Muon for the matrices of hidden layers and AdamW for everything else, in one optimizer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

_NOT_HIDDEN = re.compile(r"(^|\.)([^.]*embed[^.]*|(lm_)?head|classifier|score)(\.|$)")
"""Pattern of the names of parameters outside of hidden layers: embeddings and output heads."""

_BATCH = 1 << 26
"""Most elements of the matrices that :func:`orthogonalize` puts into one batch: large ones fill a device alone."""


class MuonWithAdamW(Optimizer):
    """torch.optim.Muon for param groups with ``use_muon``, torch.optim.AdamW for the others. Needs torch 2.9."""

    zerolite_elementwise = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
    ) -> None:
        """A group without the key ``use_muon`` uses Muon if all its parameters are matrices.

        Args:
            params: parameters or param groups.
            lr: learning rate of both optimizers.
            weight_decay: weight decay of both.
            momentum: of Muon, and so are the next four.
            nesterov: see torch.optim.Muon.
            ns_coefficients: see torch.optim.Muon.
            ns_steps: see torch.optim.Muon.
            adjust_lr_fn: see torch.optim.Muon.
            betas: of AdamW.
            eps: of AdamW.
            muon_lr: learning rate of Muon in place of ``lr``.
            adam_lr: learning rate of AdamW in place of ``lr``.
        """
        muon: Any = torch.optim.Muon
        self._muon: Optimizer = muon(
            [{"params": []}],
            lr=lr if muon_lr is None else muon_lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        rate = lr if adam_lr is None else adam_lr
        self._adamw = torch.optim.AdamW([{"params": []}], lr=rate, weight_decay=weight_decay, betas=betas, eps=eps)
        # A group's own defaults come first. The ranks compare the values of all keys that are here.
        super().__init__(params, {**self._adamw.defaults, **self._muon.defaults, "use_muon": True})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_muon": self._muon, "_adamw": self._adamw}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the defaults of its optimizer. Raises ValueError if Muon would get a non-matrix."""
        group = dict(param_group)
        members = group["params"]
        group["params"] = [members] if isinstance(members, torch.Tensor) else list(members)
        shapes = [_shape(p) for p in group["params"]]
        other = next((shape for shape in shapes if len(shape) != 2), None)
        uses = group.setdefault("use_muon", other is None)
        if uses and other is not None:
            raise ValueError(f"Muon updates matrices, and got use_muon for a parameter of shape {other}")
        super().add_param_group({**(self._muon if uses else self._adamw).defaults, **group})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, uses in ((self._muon, True), (self._adamw, False)):
            part.param_groups = [group for group in self.param_groups if bool(group["use_muon"]) is uses]
            part.state = self.state
            step: Any = type(part).step
            # Call step() without torch's wrapper: its hooks belong to the whole step, which has that wrapper itself.
            if part.param_groups:
                (step.__wrapped__ if getattr(step, "hooked", False) else step)(part)
        return loss


MUON: frozenset[type[Optimizer]] = frozenset(
    cls for cls in (MuonWithAdamW, getattr(torch.optim, "Muon", None)) if cls is not None
)
"""Classes whose updates of matrices zerolite makes itself, from the parts that the ranks have."""


def uses_muon(group: Mapping[str, Any]) -> bool:
    """Return True if Muon updates the parameters of a group of one of the classes of :data:`MUON`."""
    return bool(group.get("use_muon", True))


def check_matrices(parameters: Iterable[torch.Tensor], caller: str) -> None:
    """Raise ValueError, which begins with the name of the caller, if one of these is no matrix."""
    for shape in map(_shape, parameters):
        if len(shape) != 2:
            raise ValueError(
                f"{caller}: expected matrices for Muon, got a parameter of shape {shape}; give it to another "
                'optimizer: the optimizer "Muon" of the config does so, in AdamW'
            )


def orthogonalize(
    matrices: Sequence[torch.Tensor], coefficients: Sequence[float], steps: int, eps: float
) -> list[torch.Tensor]:
    """Return the Newton-Schulz iterates of matrices, as torch.optim.Muon computes them, in batches of equal shapes.

    Args:
        matrices: in bf16.
        coefficients: three coefficients of the iteration.
        steps: number of iterations.
        eps: smallest norm by which a matrix is divided.
    """
    results: dict[int, torch.Tensor] = {}
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, matrix in enumerate(matrices):
        alike.setdefault(tuple(matrix.shape), []).append(number)
    for (rows, columns), numbers in alike.items():
        size = max(1, _BATCH // (rows * columns))
        for start in range(0, len(numbers), size):
            batch = [matrices[number] for number in numbers[start : start + size]]
            # The smaller of the two Gram matrices has the shorter side.
            wide = [matrix.T for matrix in batch] if rows > columns else batch
            for number, result in zip(numbers[start:], _iterate(wide, coefficients, steps, eps), strict=False):
                results[number] = result.T if rows > columns else result
    return [results[number] for number in range(len(matrices))]


def _iterate(
    matrices: Sequence[torch.Tensor], coefficients: Sequence[float], steps: int, eps: float
) -> Sequence[torch.Tensor]:
    """Return the iterates of matrices of one shape."""
    a, b, c = coefficients
    norms = torch.stack(torch._foreach_norm(list(matrices))).clamp_(min=eps)
    x = torch.stack(list(matrices)).div_(norms[:, None, None])  # spectral norms of 1 at most
    if len(matrices) == 1:
        x = x[0]
        for _ in range(steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return [x]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.unbind()


def work_of(shape: Sequence[int]) -> float:
    """Return the multiplications of one iteration of :func:`orthogonalize` for a matrix of this shape."""
    short, long = sorted(shape)
    return float(short * short * (2 * long + short))


def adjusted_lr(lr: float, how: str | None, shape: Sequence[int]) -> float:
    """Return the learning rate of a matrix of this shape, as torch.optim.Muon's ``adjust_lr_fn`` names it."""
    rows, columns = shape
    if how is None or how == "original":
        return lr * math.sqrt(max(1, rows / columns))
    return lr * (0.2 * math.sqrt(max(rows, columns)) if how == "match_rms_adamw" else 1.0)


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the full shape: a parameter that stage 3 divides has another one meanwhile."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def muon_groups(model: torch.nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Split each group without the key ``use_muon`` into two: the parameters for Muon, and the others.

    If any parameter of the model has the attribute ``use_muon``, the attribute decides, and parameters without it are
    not for Muon. Otherwise Muon updates all matrices of hidden layers. Weights of embeddings are left out, and
    parameters with a part of their name such as "lm_head", "head", "classifier", "score" or "*embed*".

    Raises:
        ValueError: the attribute is True for a parameter that is no matrix.
    """
    chosen: dict[int, bool] = {}
    marked = any(hasattr(parameter, "use_muon") for parameter in model.parameters())
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, embeddings)}
    # A tied parameter has several names, and any of them can exclude it.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shape = _shape(parameter)
        if marked:
            hidden = bool(getattr(parameter, "use_muon", False))
            if hidden and len(shape) != 2:
                raise ValueError(
                    f"zerolite.initialize: expected use_muon of matrices, got it of parameter '{name}' of shape "
                    f"{shape}; set its use_muon to False"
                )
        else:
            hidden = len(shape) == 2 and id(parameter) not in tables and not _NOT_HIDDEN.search(name)
        chosen[id(parameter)] = hidden and chosen.get(id(parameter), True)
    result: list[dict[str, Any]] = []
    for group in groups:
        if "use_muon" in group:
            result.append(dict(group))
            continue
        for uses in (True, False):
            members = [p for p in group["params"] if chosen[id(p)] is uses]
            result.append({**group, "params": members, "use_muon": uses})
    return result
