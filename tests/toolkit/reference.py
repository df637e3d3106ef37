"""Reference of every stage: one process, plain PyTorch, the joint batch of all ranks.

fp32: one forward and backward over the concatenation of all micro-batches of the window.

16 bits: weights, activations and the gradients of one micro-batch on one rank are 16-bit; the masters are the fp32
weights from before the cast; gradients are averaged over ranks in fp32 and rounded to 16 bits once (one micro-batch),
or accumulated in fp32 (several); the update happens in fp32; the masters are rounded to the compute weights. fp16:
the fp32 loss is multiplied by the loss scale.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

LossFunction = Callable[[nn.Module, Any], Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Trajectory:
    """Per step: the mean loss over ranks and micro-batches, the gradient norm before clipping. At the end: weights by
    name, fp32."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)  # compute weights
    masters: dict[str, Tensor] = field(default_factory=dict)


def make_optimizer(kind: str, parameters: Sequence[nn.Parameter], params: dict[str, Any]) -> torch.optim.Optimizer:
    """The torch optimizer that a config's ``optimizer`` section means."""
    return {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[kind](parameters, **params)


def train(
    model: nn.Module,
    loss_of: LossFunction,
    batches: Sequence[Sequence[Sequence[Any]]],
    precision: str,
    optimizer: tuple[str, dict[str, Any]],
    clip: float = 0.0,
    loss_scale: float = 1.0,
    masters: str = "fp32",
    compute: nn.Module | None = None,
) -> Trajectory:
    """Train ``model`` (fp32, its values become the final masters). ``batches[step][micro][rank]`` is one rank's
    micro-batch.

    precision: "fp32", "bf16", "fp16", or "autocast" (fp32 weights under torch.autocast to bf16). masters, for bf16
    and fp16: "fp32", or "rounded" (kept in 16 bits, updated in fp32).
    compute: the model in 16 bits, where that is not ``model.to(dtype)``; modules called "inner" have no name.
    """
    torch.set_num_threads(1)  # as in the workers: 16-bit sums over a batch depend on how many threads share them
    if precision == "fp32":
        run: Any = _Fp32(model)
    elif precision == "autocast":
        run = _Autocast(model)
    else:
        run = _MixedPrecision(model, compute, DTYPES[precision], loss_scale, masters)
    trained = [p for p in run.masters.values() if p.requires_grad]
    torch_optimizer = make_optimizer(optimizer[0], trained, optimizer[1])
    trajectory = Trajectory()
    for window in batches:
        torch_optimizer.zero_grad()
        trajectory.losses.append(run.gradients(loss_of, window))
        norm = global_norm([p.grad for p in trained if p.grad is not None])
        trajectory.norms.append(norm)
        if clip and norm > clip:
            for parameter in trained:
                if parameter.grad is not None:
                    parameter.grad.mul_(clip / (norm + 1e-6))  # torch.nn.utils.clip_grad_norm_'s formula
        torch_optimizer.step()
        run.publish()

    trajectory.parameters = {name: p.detach().float().clone() for name, p in _named(run.compute)}
    trajectory.masters = {name: p.detach().clone() for name, p in run.masters.items()}
    return trajectory


def global_norm(gradients: Sequence[Tensor]) -> float:
    """The 2-norm of all gradients together, squares summed in double."""
    return float(sum(float(g.double().square().sum()) for g in gradients) ** 0.5)


def join(batches: Sequence[Any]) -> Any:
    """Concatenate micro-batches along the batch dimension."""
    return tuple(torch.cat([batch[i] for batch in batches]) for i in range(len(batches[0])))


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name.replace(".inner", ""), parameter) for name, parameter in model.named_parameters()]


class _Fp32:
    def __init__(self, model: nn.Module) -> None:
        self.compute = model
        self.masters = dict(model.named_parameters())

    def gradients(self, loss_of: LossFunction, window: Sequence[Sequence[Any]]) -> float:
        loss = loss_of(self.compute, join([batch for ranks in window for batch in ranks]))
        loss.backward()
        return loss.item()

    def publish(self) -> None:
        pass


class _MixedPrecision:
    def __init__(
        self, model: nn.Module, compute: nn.Module | None, dtype: torch.dtype, loss_scale: float, masters: str
    ) -> None:
        self.compute = compute or copy.deepcopy(model).to(dtype)
        self.rounds = masters == "rounded"
        self.masters = dict(model.named_parameters())
        self.loss_scale = loss_scale
        if self.rounds:
            self.publish()

    def gradients(self, loss_of: LossFunction, window: Sequence[Sequence[Any]]) -> float:
        sums: dict[str, Tensor] = {}
        dtypes = {name: parameter.dtype for name, parameter in _named(self.compute)}
        total = 0.0
        for ranks in window:
            mean: dict[str, Tensor] = {}
            for batch in ranks:
                self.compute.zero_grad()
                loss = loss_of(self.compute, batch)
                (loss * self.loss_scale / len(window)).backward()
                total += loss.item()
                for name, parameter in _named(self.compute):
                    if parameter.grad is not None:
                        gradient = parameter.grad.float()
                        mean[name] = mean[name] + gradient if name in mean else gradient
            for name, gradient in mean.items():
                gradient = gradient / len(ranks)
                if len(window) == 1 or self.rounds:
                    gradient = gradient.to(dtypes[name])
                sums[name] = sums[name] + gradient if name in sums else gradient
        for name, gradient in sums.items():
            self.masters[name].grad = gradient.float() / self.loss_scale
        return total / sum(len(ranks) for ranks in window)

    def publish(self) -> None:
        with torch.no_grad():
            for name, parameter in _named(self.compute):
                parameter.copy_(self.masters[name])
                if self.rounds:
                    self.masters[name].copy_(parameter)


class _Autocast(_Fp32):
    """The gradients of each rank's micro-batch come from 16-bit products, so the micro-batches must stay apart."""

    def gradients(self, loss_of: LossFunction, window: Sequence[Sequence[Any]]) -> float:
        total, count = 0.0, sum(len(ranks) for ranks in window)
        for ranks in window:
            for batch in ranks:
                loss = loss_of(lambda x: torch.autocast("cpu", torch.bfloat16)(self.compute)(x), batch)  # type: ignore[arg-type]
                (loss / count).backward()
                total += loss.item() / count
        return total
