"""Dtypes of parameters, inputs and outputs, and the loss scale in the autograd graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from zerolite.utils.dtypes import DTYPES, HALF, is_castable, is_quantized
from zerolite.utils.nested import find_tensors, map_tensors


def scales_of_quantized(model: torch.nn.Module) -> Callable[[torch.Tensor], bool]:
    """Return a function that is True for quantized weights and for their scales.

    A module's frozen parameters in integers or fp8 are quantized weights. Its other frozen parameters, except biases,
    scale them, and a cast of the scales would change every weight.
    """
    scales: WeakIdKeyDictionary = WeakIdKeyDictionary()
    for module in model.modules():
        frozen = {name: p for name, p in module._parameters.items() if p is not None and not p.requires_grad}
        if any(is_quantized(p.dtype) for p in frozen.values()):
            scales.update({p: None for name, p in frozen.items() if name != "bias"})
    return scales.__contains__


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of everything that training computes with.

    Attributes:
        compute: dtype of the parameters in forward; None lets each keep its own.
        separate_masters: the update works on fp32 copies of 16-bit parameters.
        update_in_fp32: the arithmetic and states of the update are fp32 even if the masters are 16-bit.
        autocast: dtype of torch.autocast around forward; None without autocast.
        buffers: dtype of the model's floating buffers; None lets each keep its own.
        outputs_in_fp32: True: all 16-bit outputs of the model become fp32. False: only a loss does. None: only a loss
            does, or all outputs if the model returns no loss.
        keeps_fp32: returns True for a parameter or buffer of a module that stays in fp32.
        keeps_dtype: returns True for a frozen parameter that scales quantized values.
    """

    compute: torch.dtype | None = None
    separate_masters: bool = False
    update_in_fp32: bool = True
    autocast: torch.dtype | None = None
    buffers: torch.dtype | None = None
    outputs_in_fp32: bool | None = None
    keeps_fp32: Callable[[torch.Tensor], bool] = lambda tensor: False
    keeps_dtype: Callable[[torch.Tensor], bool] = lambda tensor: False

    def compute_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        if not parameter.is_floating_point() or not (is_castable(parameter) or parameter.requires_grad):
            return parameter.dtype
        if self.keeps_fp32(parameter):
            return torch.float32
        if self.keeps_dtype(parameter) and not parameter.requires_grad:
            return parameter.dtype
        return self.compute or parameter.dtype

    def buffer_dtype(self, buffer: torch.Tensor) -> torch.dtype:
        if self.buffers is None or buffer.dtype not in DTYPES.values() or self.keeps_fp32(buffer):
            return buffer.dtype
        return self.buffers

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
        """Return ``inputs`` in the compute dtype: every floating tensor, at any depth of containers, unless it is
        quantized."""
        if self.compute is None:
            return inputs
        return map_tensors(lambda t: t.to(self.compute) if is_castable(t) else t, inputs)

    def widens(self, outputs: object) -> Callable[[torch.Tensor], bool]:
        """Return a predicate that is True for the tensors in the model's ``outputs`` that become fp32."""
        every = self.outputs_in_fp32
        if every is None:
            every = not any(map(is_loss, find_tensors(outputs)))
        return lambda tensor: tensor.dtype in HALF and (every or is_loss(tensor))


def is_loss(tensor: torch.Tensor) -> bool:
    """Return True if an output of a model is taken for a loss.

    A loss is a floating tensor without dimensions. If gradients are recorded, it must also require one.
    """
    return tensor.dim() == 0 and tensor.is_floating_point() and (tensor.requires_grad or not torch.is_grad_enabled())


class GraphBoundary:
    """Boundary between the engine's autograd graph and the user's. It reports the begin of a backward, and keeps the
    loss scale inside.

    Gradients are multiplied by the scale, in fp32, where they enter the model through its outputs. They are divided by
    it where they leave the model through its inputs. So `loss.backward()` and `engine.backward(loss)`, several losses,
    and modules or engines before and behind this one all see unscaled gradients.

    Args:
        on_backward_begin: called at every gradient that enters through an output.
        loss_scale: returns the current scale; None without a loss scale.
        precision: dtypes of inputs and outputs.
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
        self.scaled = False  # True once the current backward has been scaled
        self._changes_of_inputs: list[Callable[[Any], Any]] = []
        if loss_scale is not None:
            self._changes_of_inputs.append(functools.partial(map_tensors, self._unscale_on_the_way_out))
        if precision.compute is not None:
            self._changes_of_inputs.append(precision.cast)

    def enter(self, inputs: object) -> Any:
        """Return ``inputs`` in the compute dtype. Hooks will unscale their gradients, in the dtype of the original."""
        for change in self._changes_of_inputs:
            inputs = change(inputs)
        return inputs

    def leave(self, outputs: object) -> Any:
        """Return ``outputs`` in the dtypes for the caller, with hooks on those that require gradients."""
        if type(outputs) is torch.Tensor and outputs.dtype not in HALF:  # a loss, nearly always
            return self._watch(outputs, widen=False)
        widens = self._precision.widens(outputs)
        return map_tensors(lambda tensor: self._watch(tensor, widens(tensor)), outputs)

    def expect_scale(self) -> None:
        """Note the begin of a backward, which must be scaled."""
        self.scaled = False

    def note_scaled(self) -> None:
        """Note that the current backward has been scaled."""
        self.scaled = True

    def check_scaled(self, name: str) -> None:
        """Raise RuntimeError if the current backward, whose first gradient has arrived, has not been scaled."""
        if not self.scaled:
            raise RuntimeError(
                f"fp16: the gradient of parameter '{name}' comes from a graph that did not pass through the engine, so "
                "it lacks the loss scale. Call engine(...) instead of the bare module."
            )

    def _watch(self, tensor: torch.Tensor, widen: bool) -> torch.Tensor:
        if widen:
            tensor = tensor.float()
        elif self._loss_scale is not None and tensor.requires_grad:
            # The graph of another output may contain this tensor; a hook on it would scale that gradient a second time.
            tensor = tensor.view_as(tensor)
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
                "engine, and its loss scale would also be in the second derivatives. Use bf16 or fp32 for this model."
            )
        if gradient.dtype in HALF:  # it was rounded before the scale was applied: small values are 0 already
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
