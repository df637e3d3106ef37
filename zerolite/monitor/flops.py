"""FLOPs of operators, by torch.utils.flop_counter's formulas; and ``flops_profiler``, which reports those of a step.

torch's FlopCounterMode cannot be used itself. It tries to decompose every operator and raises for unknown higher-order
operators. Nor does it count the forwards apart that checkpointing runs again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

from zerolite.config.monitors import FlopsProfilerConfig
from zerolite.monitor.device_timers import DeviceTimers, TimingEvent
from zerolite.utils.nested import Arguments, Function, Keywords, find_in_objects
from zerolite.utils.text import with_unit
from zerolite.utils.torch_private import current_backward, next_sequence_number, sequence_number
from zerolite.zero.engine_parts import ModuleCall

Shape = Sequence[int]
_TORCHS_OWN = ("aten", "prims", "prim", "profiler", "c10d", "_c10d_functional", "c10d_functional", "zerolite")
"""Namespaces that are not reported as unknown: their operators without a formula do few products or none."""


_NO_BACKWARD = -1


class Flops:
    """FLOPs of the operators that are added. A multiply-add is two; attention counts masked pairs of positions too.

    Attributes:
        forward: FLOPs outside of backward.
        backward: FLOPs of backward that the model needs.
        recomputed: FLOPs of forwards that activation checkpointing runs again inside backward. A backward with
            ``create_graph=True`` counts here too, because it also runs with gradients enabled.
        unknown: names of operators that have no formula and are not torch's own: their FLOPs are missing.
    """

    def __init__(self) -> None:
        more = {_operator(name): shape_wrapper(formula) for name, formula in MORE_FORMULAS.items()}
        more |= {_operator(name): flop_registry[other] for name, other in _SAME_FORMULA.items()}
        # Formulas in torch's registry take precedence: the user has registered them, or a newer torch has them.
        self._formulas: dict[Any, Callable[..., int]] = more | flop_registry
        self.forward = self.backward = self.recomputed = 0
        self.unknown: set[str] = set()

    @property
    def model(self) -> int:
        """FLOPs that the model needs without activation checkpointing."""
        return self.forward + self.backward

    def add(self, func: Function, args: Arguments, kwargs: Keywords, out: object) -> None:
        """Count a call of an operator that has returned ``out``."""
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        if formula is None:
            if isinstance(func, torch._ops.OpOverload) and func.namespace not in _TORCHS_OWN:
                self.unknown.add(func._schema.name)
            return
        flops = int(formula(*args, **kwargs, out_val=out))
        if current_backward() == _NO_BACKWARD:
            self.forward += flops
        elif torch.is_grad_enabled():
            self.recomputed += flops
        else:
            self.backward += flops


class FlopCount:
    """Counter of the FLOPs of an engine's calls in training mode, and of the backward of the graph that they build.

    A dispatch mode counts the operators. It is active while the model's forward runs, and while autograd runs a node of
    its graph. It is off everywhere else, so the user's training loop never runs under it, not even after an exception:
    if a node raises, autograd restores the stack of modes.
    """

    def __init__(self, call: ModuleCall, module: torch.nn.Module) -> None:
        self._call, self._module = call, module
        self._uncounted: Callable[..., Any] | None = None  # what the engine called before
        self.flops = Flops()

    def start(self) -> None:
        """Put the counter around what the engine calls."""
        self._uncounted = self._call.replace(self._counted)

    def stop(self) -> None:
        """Stop counting. May be called twice."""
        if self._uncounted is not None:
            self._call.replace(self._uncounted)
            self._uncounted = None

    def _counted(self, *args: Any, **kwargs: Any) -> object:
        call = self._uncounted or self._module
        if not self._module.training:
            return call(*args, **kwargs)
        first = next_sequence_number()
        with _Counting(self.flops):
            outputs = call(*args, **kwargs)
        if torch.is_grad_enabled():
            self._watch_nodes(first, find_in_objects(outputs))
        return outputs

    def _watch_nodes(self, first: int, outputs: Iterable[torch.Tensor]) -> None:
        """Count the backward of all nodes behind ``outputs`` from sequence number ``first`` on."""
        todo: list[Any] = [tensor.grad_fn for tensor in outputs]
        seen: set[Any] = set()
        while todo:
            node = todo.pop()
            if node is None or node in seen or hasattr(node, "variable"):  # the last: a parameter's AccumulateGrad
                continue
            seen.add(node)
            # Sequence numbers only grow: a node with a smaller one existed before this forward, and so did its inputs.
            if sequence_number(node) >= first:
                todo += [following for following, _ in node.next_functions]
                modes: list[_Counting] = []
                node.register_prehook(lambda *_, modes=modes: self._enter(modes))
                node.register_hook(lambda *_, modes=modes: _leave(modes))

    def _enter(self, modes: list[_Counting]) -> None:
        if self._uncounted is not None:
            modes.append(_Counting(self.flops))
            modes[-1].__enter__()


def _leave(modes: list[_Counting]) -> None:
    if modes:
        modes.pop().__exit__(None, None, None)


class _Counting(TorchDispatchMode):
    """Dispatch mode that counts operators and runs them unchanged."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile as without this mode, which is on again when compiled code runs, and sees the operators in it."""
        return True

    def __init__(self, flops: Flops) -> None:
        super().__init__()
        self._flops = flops

    def __torch_dispatch__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        self._flops.add(func, args, kwargs or {}, out)
        return out


# -------------------------------------------------------------------- the profiler


Write = Callable[[int, Mapping[str, float]], None]
"""Function (step, values by name) that writes to the monitors."""


class FlopsProfiler:
    """Reports the FLOPs of one step, and the used share of the device's peak in the steps after it.

    Counting slows a step down, so the counted step is not timed. :meth:`end_step` is called after each optimizer step.

    Args:
        config: the block ``flops_profiler``.
        count: counts the FLOPs of the engine.
        device: the engine's device.
        every: a line of speed is printed after each step whose number is a multiple of it.
        write: writes values to the monitors.
    """

    def __init__(
        self, config: FlopsProfilerConfig, count: FlopCount, device: torch.device, every: int, write: Write
    ) -> None:
        self._config, self._count, self._every, self._write = config, count, every, write
        self._timers = DeviceTimers(device)
        self._steps = 0  # since the engine was made
        self._last_step = 0  # the latest step that has ended
        self._hardware = 0.0  # FLOPs of a step, recomputed ones included
        self._since: tuple[int, TimingEvent] | None = None  # first timed step - 1, and the event at its start
        if config.profile_step == 0:
            count.start()

    def end_step(self, step: int) -> None:
        """Note the end of step number ``step``. A second call with the same number does nothing."""
        if step == self._last_step:
            return
        self._last_step = step
        self._steps += 1
        if self._steps == self._config.profile_step:
            self._count.start()
        elif self._steps == self._config.profile_step + 1:
            self._count.stop()
            self._report(step)
            self._since = (step, self._timers.now())
        elif self._since is not None and step % self._every == 0:
            first, start = self._since
            end = self._timers.now()
            self._timers.add(start, end, functools.partial(self._report_speed, step, step - first))
            self._since = (step, end)
        self._timers.read()

    def close(self) -> None:
        """Stop. Called when the engine is gone, perhaps in the middle of the counted step."""
        self._count.stop()
        self._timers.forget()

    def _report(self, step: int) -> None:
        flops = self._count.flops
        # The counter misses recomputation inside compiled regions; the user can give its amount by the factor.
        again = max(float(flops.recomputed), self._config.recompute_fwd_factor * flops.forward)
        self._hardware = flops.model + again
        values = {"forward": flops.forward, "backward": flops.backward, "recomputed": again, "model": flops.model}
        text = ", ".join(f"{name} {with_unit(count, 'FLOP')}" for name, count in values.items())
        unknown = f"; without {', '.join(sorted(flops.unknown))}" if flops.unknown else ""
        print(f"step {step}: matrix products, convolutions and attention on rank 0: {text}{unknown}", flush=True)
        self._write(step, {f"{name}_tflop_per_step": count / 1e12 for name, count in values.items()})

    def _report_speed(self, step: int, steps: int, milliseconds: float) -> None:
        seconds = milliseconds / 1e3 / steps
        if not seconds:
            return
        model = self._count.flops.model / seconds
        values = {"step_seconds": seconds, "tflops": model / 1e12}
        text = f"step {step}: {with_unit(model, 'FLOP/s')} on rank 0 ({seconds * 1e3:.2f} ms a step)"
        if self._config.peak_tflops is not None:
            peak = self._config.peak_tflops * 1e12
            values |= {"mfu": model / peak, "hfu": self._hardware / seconds / peak}
            text += (
                f", model FLOPs utilization {values['mfu']:.2%}, hardware FLOPs utilization {values['hfu']:.2%} of "
                f"{with_unit(peak, 'FLOP/s')}"
            )
        print(text, flush=True)
        self._write(step, values)


# -------------------------------------------------------------------- formulas


def _operator(name: str) -> object:
    """Return the operator ``name``; None if this version of torch or the imported libraries lack it."""
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator, None)


# Each formula is called like its operator, with a shape in place of every tensor.


def _grouped_mm(one: Shape, other: Shape, *args: Any, out_shape: object = None, **kwargs: Any) -> int:
    """Return the FLOPs of a grouped product of matrices.

    If both have a group dimension, each group is a product of full matrices. Otherwise the groups share out the rows,
    the columns or the inner dimension, so together they are as much as one product.
    """
    groups = one[0] if len(one) == len(other) == 3 else 1
    return int(2 * groups * one[-2] * one[-1] * other[-1])


def _recurrent(inputs: Shape, *args: Any, out_shape: object = None, **kwargs: Any) -> int:
    """Return the FLOPs of a recurrent layer: every matrix is used once at each position.

    Args:
        inputs: shape [positions..., features].
        args: shapes of the weights: one list of them, or the first two arguments.
    """
    weights = args[0] if isinstance(args[0], list) else args[:2]
    return 2 * math.prod(inputs[:-1]) * sum(math.prod(shape) for shape in weights if len(shape) == 2)


def _twice(forward: Callable[..., int]) -> Callable[..., int]:
    """Return the formula of the backward of an operator with as many FLOPs for each of its two gradients."""
    return lambda *args, **kwargs: 2 * forward(*args, **kwargs)


MORE_FORMULAS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"), _grouped_mm),
    "aten::_scaled_mm_v2": _grouped_mm,
    "transformers::grouped_mm_fallback": _grouped_mm,
    "transformers::grouped_mm_fallback_backward": _twice(_grouped_mm),
    **dict.fromkeys(("aten::mkldnn_rnn_layer", "aten::_cudnn_rnn"), _recurrent),
    **dict.fromkeys(("aten::mkldnn_rnn_layer_backward", "aten::_cudnn_rnn_backward"), _twice(_recurrent)),
}
"""Formulas missing in torch: grouped products of experts, recurrent layers in one kernel."""

_SAME_FORMULA = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": torch.ops.aten._scaled_dot_product_flash_attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Attention on CPUs, by the operator of CUDA whose formula torch has."""
