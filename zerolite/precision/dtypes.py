"""Dtypes of parameters, inputs and outputs, and the loss scale in the autograd graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from zerolite.utils.dtypes import DTYPES, HALF
from zerolite.utils.nested import find_tensors, map_tensors


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of everything that training computes with.

    Attributes:
        compute: of the parameters that forward sees; None: each keeps its own.
        separate_masters: whether the update works on fp32 copies of 16-bit parameters.
        update_in_fp32: whether the arithmetic and states of the update are fp32 where masters are 16-bit.
        autocast: of torch.autocast around forward, or None.
        buffers: of the model's floating buffers; None: each keeps its own.
        outputs_in_fp32: whether the model's 16-bit outputs beside a loss become fp32, as a loss does. None: they do
            where the model returns no loss.
        keeps_fp32: whether a parameter or buffer belongs to a module in fp32, whatever the others are.
    """

    compute: torch.dtype | None = None
    separate_masters: bool = False
    update_in_fp32: bool = True
    autocast: torch.dtype | None = None
    buffers: torch.dtype | None = None
    outputs_in_fp32: bool | None = None
    keeps_fp32: Callable[[torch.Tensor], bool] = lambda tensor: False

    def compute_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        if not parameter.is_floating_point():
            return parameter.dtype
        if self.keeps_fp32(parameter):
            return torch.float32
        return self.compute or parameter.dtype

    def buffer_dtype(self, buffer: torch.Tensor) -> torch.dtype:
        cast = self.buffers is not None and buffer.dtype in DTYPES.values() and not self.keeps_fp32(buffer)
        return self.buffers if cast and self.buffers is not None else buffer.dtype

    def master_dtype(self, compute: torch.dtype) -> torch.dtype:
        return torch.float32 if self.separate_masters and compute in HALF else compute

    def update_dtype(self, master: torch.dtype) -> torch.dtype:
        mixed = self.compute is not None and self.update_in_fp32
        return torch.float32 if mixed and master in HALF else master

    def autocast_context(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)

    def cast(self, inputs: object) -> Any:
        """``inputs`` with every floating tensor in the compute dtype, containers of any depth included."""
        if self.compute is None:
            return inputs
        return map_tensors(lambda t: t.to(self.compute) if t.is_floating_point() else t, inputs)

    def widens(self, outputs: object) -> Callable[[torch.Tensor], bool]:
        """A function that tells of each tensor in ``outputs``, what the model has returned, whether it becomes fp32."""
        every = self.outputs_in_fp32
        if every is None:
            every = not any(map(is_loss, find_tensors(outputs)))
        return lambda tensor: tensor.dtype in HALF and (every or is_loss(tensor))


def is_loss(tensor: torch.Tensor) -> bool:
    """Return whether an output of a model is taken for a loss: a floating tensor without dimensions, through which a
    backward can go where gradients are recorded."""
    return tensor.dim() == 0 and tensor.is_floating_point() and (tensor.requires_grad or not torch.is_grad_enabled())


class GraphBoundary:
    """The edge between the engine's graph and the user's: tells when a backward begins, and keeps the loss
    scale inside.

    Gradients are multiplied by the scale, in fp32, where they enter the model through its outputs, and divided by
    it where they leave through its inputs. So the two loops, several losses, and modules or other engines before
    and behind this one all see what they should.
    """

    def __init__(
        self,
        on_backward_begin: Callable[[], None],
        loss_scale: Callable[[], float] | None,
        precision: Precision,
    ) -> None:
        self._on_backward_begin = on_backward_begin
        self._precision = precision
        self._loss_scale = loss_scale
        self.scaled = False  # whether the backward under way has met the loss scale
        self._changes_of_inputs: list[Callable[[Any], Any]] = []
        if loss_scale is not None:
            self._changes_of_inputs.append(functools.partial(map_tensors, self._unscale_on_the_way_out))
        if precision.compute is not None:
            self._changes_of_inputs.append(precision.cast)

    def enter(self, inputs: object) -> Any:
        """``inputs`` in the compute dtype, their gradients to be unscaled before any cast."""
        for change in self._changes_of_inputs:
            inputs = change(inputs)
        return inputs

    def leave(self, outputs: object) -> Any:
        """``outputs`` in the dtypes that the caller sees, watched where they need gradients."""
        if type(outputs) is torch.Tensor and outputs.dtype not in HALF:  # a loss, nearly always
            return self._watch(outputs, widen=False)
        widens = self._precision.widens(outputs)
        return map_tensors(lambda tensor: self._watch(tensor, widens(tensor)), outputs)

    def expect_scale(self) -> None:
        """A backward begins, whose gradients must meet the loss scale."""
        self.scaled = False

    def note_scaled(self) -> None:
        """The backward under way has met the loss scale."""
        self.scaled = True

    def check_scaled(self, name: str) -> None:
        """The first gradient of a backward has arrived: raise RuntimeError if nothing has scaled it."""
        if not self.scaled:
            raise RuntimeError(
                f"fp16: the gradient of parameter '{name}' comes from a graph that did not pass through the "
                "engine, so the loss scale is "
                "missing from it. Call engine(...) instead of the bare module."
            )

    def _watch(self, tensor: torch.Tensor, widen: bool) -> torch.Tensor:
        if widen:
            tensor = tensor.float()
        elif self._loss_scale is not None and tensor.requires_grad:
            tensor = tensor.view_as(tensor)  # the same tensor may be inside the graph of another output
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(self._on_output_gradient)
        return tensor

    def _on_output_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self._on_backward_begin()
        if self._loss_scale is None:
            return None
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fp16: a backward with create_graph=True (a gradient penalty, double backward) went through the "
                "engine, whose loss scale "
                "would be in the second derivatives as well. Use bf16 or fp32 for this model."
            )
        if gradient.dtype in HALF:  # rounded before the scale could reach it: small values are 0 by now
            raise RuntimeError(
                f"fp16: expected gradients to enter the model through fp32 outputs, got one through a {gradient.dtype} "
                f"output of shape {tuple(gradient.shape)}, which the loss scale reaches too late. Beside a loss, "
                'outputs stay in 16 bits; to compute a loss from them outside of the model, set "output_dtype": "fp32" '
                "in the block that enables 16 bits (fp16 or torch_autocast)."
            )
        self.scaled = True
        return gradient * self._loss_scale()

    def _unscale_on_the_way_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_floating_point() and tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        tensor = tensor.view_as(tensor)
        tensor.register_hook(self._on_input_gradient)
        return tensor

    def _on_input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        assert self._loss_scale is not None
        return gradient / self._loss_scale()
