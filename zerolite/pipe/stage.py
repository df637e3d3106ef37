"""Stages for torch's pipeline schedules.

A schedule (``torch.distributed.pipelining``) decides when a stage receives, computes and sends. The stage is zerolite's
own. It frees an activation as soon as its backward has used it. It takes micro-batches from a list, learns shapes from
the forwards, and tells the engine of each backward. After a failed computation it sends zeros, so that no other rank
waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from zerolite.comm import HostLinks, recorder
from zerolite.pipe.boundary import BoundarySpec, TensorSpec, same_specs, tensors_of
from zerolite.pipe.chunks import Chunk
from zerolite.pipe.schedules import Launch, launch_batch
from zerolite.pipe.step import TAG, Key, Step
from zerolite.utils.torch_private import backward_of_inputs, backward_of_weights, schedules_wait_for_all
from zerolite.zero.sharded_gradient import ShardedGradient

Method = TypeVar("Method", bound=Callable[..., Any])


def computation(method: Method) -> Method:
    """Decorate a method of a stage that computes: its time is not counted as a wait for other ranks."""

    @functools.wraps(method)
    def compute(stage: ChunkStage, *args: Any, **kwargs: Any) -> object:
        step = stage.step
        if step.waiting is None:  # a plan, which has no messages
            return method(stage, *args, **kwargs)
        step.end_wait()
        try:
            return method(stage, *args, **kwargs)
        finally:
            step.begin_wait()

    return compute  # type: ignore[return-value]


@dataclass
class _MicroBatchState:
    """State of a micro-batch in a stage, from its forward to its backward.

    Attributes:
        received: tensors from the part before; they are leaves that collect the gradients to send back.
        outputs: the outputs, or the loss.
        gradients: received gradients of the outputs.
        input_gradients: gradients of the received tensors, to be sent.
        param_groups: torch's parameter groups, with which the backward of the weights continues;
            :data:`_FULL_BACKWARD` if the whole backward is still to come.
    """

    received: tuple[torch.Tensor, ...] = ()
    outputs: tuple[torch.Tensor, ...] = ()
    gradients: tuple[torch.Tensor | None, ...] = ()
    input_gradients: tuple[torch.Tensor | None, ...] = ()
    param_groups: Any = None

    def end_forward(self, outputs: tuple[torch.Tensor, ...], keep_inputs: bool) -> None:
        self.outputs, self.received = outputs, self.received if keep_inputs else ()

    def receive_gradients(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        self.gradients = gradients

    def backward(self) -> None:
        """Compute the gradients of the received tensors and of the parameters."""
        outputs, gradients = self._pop_roots()
        if outputs:
            torch.autograd.backward(outputs, gradients)

    def backward_inputs(self, parameters: Sequence[nn.Parameter]) -> None:
        """Compute the gradients of the received tensors; :meth:`backward_weights` computes those of the parameters."""
        outputs, gradients = self._pop_roots()
        # torch calls detach_() on them, which autograd refuses for views and leaves.
        roots = [output.clone() if output._is_view() or output.is_leaf else output for output in outputs]
        complete = [torch.ones_like(o) if g is None else g for o, g in zip(outputs, gradients, strict=True)]
        received = [tensor for tensor in self.received if tensor.requires_grad]
        try:
            self.param_groups = backward_of_inputs(roots, complete, received, iter(parameters))
        except RuntimeError as error:
            raise error.__cause__ or error from None  # torch's own text only lists the tensors

    def defer_backward(self) -> None:
        """Leave the whole backward to :meth:`backward_weights`."""
        self.param_groups = _FULL_BACKWARD

    def backward_weights(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.param_groups is _FULL_BACKWARD:
            self.backward()
            return
        backward_of_weights(iter(parameters), self.param_groups)
        for parameter in parameters:  # torch wrote p.grad directly, so its post-accumulate hooks have not run
            if parameter.grad is not None:
                hooks: Any = parameter._post_accumulate_grad_hooks or {}
                for hook in list(hooks.values()):
                    hook(parameter)

    def _pop_roots(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Return the outputs that have a graph, and their gradients. Drop both, so that backward frees their memory."""
        gradients = self.gradients or (None,) * len(self.outputs)
        pairs = [(o, g) for o, g in zip(self.outputs, gradients, strict=True) if o.requires_grad]
        self.outputs, self.gradients = (), ()
        return [output for output, _ in pairs], [gradient for _, gradient in pairs]

    def collect_input_gradients(self, specs: Sequence[TensorSpec], device: torch.device) -> None:
        """Store the gradients of the received tensors, to be sent; zeros for tensors that were not used."""
        gradients: list[torch.Tensor | None] = []
        for index, spec in enumerate(specs):
            gradient = None
            if self.received:  # it is empty if a computation failed before
                gradient, self.received[index].grad = self.received[index].grad, None
            if spec.requires_grad and gradient is None:
                gradient = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
            gradients.append(gradient if spec.requires_grad else None)
        self.received, self.input_gradients = (), tuple(gradients)

    def pop_input_gradients(self) -> tuple[torch.Tensor | None, ...]:
        gradients, self.input_gradients = self.input_gradients, ()
        return gradients


_FULL_BACKWARD = object()


@dataclass
class _Boundary:
    """Boundary with a neighbouring part.

    Attributes:
        specs: tensors that cross the boundary, by the key of a step's shapes.
        failed: the part before the boundary failed in this step before its outputs were known, so nothing is sent.
    """

    specs: dict[Key, BoundarySpec] = field(default_factory=dict)
    failed: bool = False

    def begin_step(self) -> None:
        self.failed = False

    def learn(self, key: Key, spec: BoundarySpec | None) -> None:
        if spec is None:
            self.failed = True
        else:
            self.specs[key] = spec

    def spec(self, key: Key) -> BoundarySpec | None:
        return None if self.failed else self.specs[key]


class _WritableInput(torch.autograd.Function):
    """Identity whose result may be written in place.

    The received tensor is a leaf that collects the gradient to be sent back, and autograd refuses in-place writes to
    leaves.
    """

    @staticmethod
    def forward(ctx: object, received: torch.Tensor) -> torch.Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class ChunkStage(PipelineStage):
    """One part of the model as torch's schedules see it.

    Args:
        links: sends objects to the other ranks of ``group``.
    """

    launch: Launch | None = (
        # gloo does not finish messages in order, so a stage that receives two tensors could compute too early.
        None if schedules_wait_for_all() else launch_batch
    )

    def __init__(
        self, chunk: Chunk, parts: int, device: torch.device, group: dist.ProcessGroup, links: HostLinks
    ) -> None:
        super().__init__(chunk.module, chunk.index, parts, device, group=group)
        self.chunk = chunk
        self.step: Step
        self.next_here: ChunkStage | None = None  # stage of the next part, if it is on this rank
        self._previous_here: ChunkStage | None = None
        self._links = links
        self._input_boundary, self._output_boundary = _Boundary(), _Boundary()
        self._micro_batches: dict[int, _MicroBatchState] = {}
        self._ranks = dist.get_process_group_ranks(group)
        self._new_output_spec: BoundarySpec | None = None  # outputs of the first forward with new shapes
        self.args_recv_info, self.act_send_info = {0: ()}, {}  # torch reads these to check that stages are neighbours

    def set_neighbours(self, previous: ChunkStage | None, following: ChunkStage | None) -> None:
        """Set the stages of the neighbouring parts that are on this rank: their tensors are passed on directly."""
        self._previous_here, self.next_here = previous, following

    def begin(self, step: Step) -> None:
        """Begin a step, before its schedule runs."""
        self.step = step
        self._micro_batches.clear()
        self._input_boundary.begin_step()
        self._output_boundary.begin_step()
        self.has_backward = step.training

    def end(self) -> None:
        """End a step whose schedule has run or failed, and drop the references to its micro-batches."""
        self._micro_batches.clear()
        del self.step

    # ------------------------------------------------ torch's preparations, which are not needed here

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32, device="cpu")

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32, device="cpu")

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self.chunks = num_microbatches

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def clear_runtime_states(self) -> None: ...

    def scale_grads(self, grad_scale_factor: int) -> None: ...

    def perform_reduce_grad(self, grad_scale_factor: int) -> None: ...

    # ---------------------------------------------------------------- messages

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        spec = None if self.is_first else self._input_spec()
        if spec is None:
            return []
        buffers = self._receive_buffers(spec.tensors)
        self._micro_batches[fwd_chunk_id] = _MicroBatchState(received=buffers)
        return [self._receive(tensor, self.stage_index - 1) for tensor in buffers]

    def _input_spec(self) -> BoundarySpec | None:
        """Return the tensors to expect from the part before; None if it sends nothing.

        For new shapes that part sends the specification first.
        """
        key = self.step.key
        if not self._input_boundary.failed and key not in self._input_boundary.specs:
            self._input_boundary.learn(key, self._links.receive(self._rank_of(self.stage_index - 1)))
        return self._input_boundary.spec(key)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        spec = self._output_spec()
        if spec is None:
            return []
        # After a failure there are no outputs. Send zeros, so that the next part does not wait for ever.
        outputs = self._micro_batches[fwd_chunk_id].outputs or self._zeros(spec.tensors)
        if not self.has_backward:
            del self._micro_batches[fwd_chunk_id]
        return [self._send(output.detach(), self.stage_index + 1) for output in outputs]

    def _output_spec(self) -> BoundarySpec | None:
        return self._output_boundary.spec(self.step.key)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        spec = None if self.is_last or not self.has_backward else self._output_spec()
        if spec is None:
            return []
        buffers = self._receive_buffers([tensor for tensor in spec.tensors if tensor.requires_grad])
        rest = iter(buffers)
        self._micro_batches[bwd_chunk_id].receive_gradients(
            tuple(next(rest) if tensor.requires_grad else None for tensor in spec.tensors)
        )
        return [self._receive(tensor, self.stage_index + 1) for tensor in buffers]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or not self.has_backward:
            return []
        gradients = self.get_local_bwd_output(bwd_chunk_id)
        return [self._send(gradient, self.stage_index - 1) for gradient in gradients if gradient is not None]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Receive the outputs of the part before without a message: it is on this rank too."""
        assert self._previous_here is not None
        spec = self._previous_here._output_spec()
        self._input_boundary.learn(self.step.key, spec)
        if spec is not None:
            outputs = prev_stage_outputs or self._zeros(spec.tensors)
            self._micro_batches[mb_index] = _MicroBatchState(received=tuple(output.detach() for output in outputs))

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        if not self.has_backward:
            return ()
        state = self._micro_batches[mb_index]
        if state.param_groups is None:
            del self._micro_batches[mb_index]
        return state.pop_input_gradients()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            self._micro_batches[mb_index].receive_gradients(next_stage_bwd_outputs)

    def _receive_buffers(self, specs: Sequence[TensorSpec]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs)

    def _zeros(self, specs: Sequence[TensorSpec]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs)

    def _rank_of(self, stage_index: int) -> int:
        return self.stage_index_to_group_rank[stage_index]

    def _send(self, tensor: torch.Tensor, stage_index: int) -> dist.P2POp:
        tensor = tensor.contiguous()
        recorder.note("send", tensor, TAG, "pipe", self.group_size)
        return dist.P2POp(dist.isend, tensor, self._ranks[self._rank_of(stage_index)], self.group)

    def _receive(self, tensor: torch.Tensor, stage_index: int) -> dist.P2POp:
        recorder.note("receive", tensor, TAG, "pipe", self.group_size)
        return dist.P2POp(dist.irecv, tensor, self._ranks[self._rank_of(stage_index)], self.group)

    # ---------------------------------------------------------------- computations

    @computation
    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a forward. Return the outputs only if the next part is on this rank and gets no message.

        The schedule would keep other outputs alive longer than their backward needs them.
        """
        state = self._micro_batches.setdefault(fwd_chunk_id, _MicroBatchState())
        if self.step.failure is None and not self._input_boundary.failed:
            try:
                outputs = self._forward(state.received, fwd_chunk_id)
                state.end_forward(outputs, keep_inputs=self.has_backward)
            except Exception as error:
                self.step.fail(error)
        if not self.is_last:
            self._send_output_spec()
        if not self.has_backward and (self.is_last or self.next_here is not None):
            del self._micro_batches[fwd_chunk_id]
        return state.outputs if self.next_here is not None else ()

    def _forward(self, received: tuple[torch.Tensor, ...], index: int) -> tuple[torch.Tensor, ...]:
        step = self.step
        single = True
        if not self.is_first:
            spec = self._input_boundary.specs[step.key]
            single = spec.single
            if self.has_backward:
                for tensor, described in zip(received, spec.tensors, strict=True):
                    tensor.requires_grad_(described.requires_grad)
        entered = tuple(_WritableInput.apply(t) if t.requires_grad else t for t in received)
        outputs = step.forward(self.chunk, entered, single, index)
        if self.is_last:
            loss = step.loss(outputs, index)
            return () if loss is None else (loss,)
        single, tensors = tensors_of(outputs, self.stage_index)
        expected = self._output_boundary.specs.get(step.key)
        made = BoundarySpec(single, tuple(map(TensorSpec.of, tensors)))
        if expected is None:
            self._new_output_spec = made  # _send_output_spec() sends it; it also runs if this forward fails
        elif not same_specs(tensors, expected.tensors):
            raise RuntimeError(
                f"expected part {self.stage_index} of the pipeline to return {expected} for every micro-batch of these "
                f"shapes, as it did for the first one, got {made}"
            )
        return tensors

    def _send_output_spec(self) -> None:
        """Send the specification of the outputs to the next part, if it does not know it yet."""
        key = self.step.key
        if self._output_boundary.failed or key in self._output_boundary.specs:
            return
        fresh, self._new_output_spec = self._new_output_spec, None
        self._output_boundary.learn(key, fresh)
        if self.next_here is None:
            self._links.send(fresh, self._rank_of(self.stage_index + 1))

    @computation
    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: object = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        state = self._micro_batches[bwd_chunk_id]
        split = not full_backward and any(tensor.requires_grad for tensor in state.received)
        if full_backward:
            self._run_backward(state.backward)
        elif split and self.step.failure is None:
            try:
                state.backward_inputs(self.chunk.parameters())
            except Exception as error:
                self.step.fail(error)
        if not full_backward and not (split and self.step.failure is None):
            state.defer_backward()
        spec = None if self.is_first else self._input_boundary.spec(self.step.key)
        if spec is not None:
            state.collect_input_gradients(spec.tensors, self.device)
        if full_backward and self.is_first:
            del self._micro_batches[bwd_chunk_id]

    @computation
    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        state = self._micro_batches.pop(bwd_chunk_id)
        self._run_backward(lambda: state.backward_weights(self.chunk.parameters()))

    def _run_backward(self, compute: Callable[[], None]) -> None:
        """Run a backward that computes gradients of parameters.

        The engine is told of its end even if it has failed: the other data ranks reduce gradients together with this
        one.
        """
        step = self.step
        try:
            step.begin_backward()
            if step.failure is None:
                compute()
        except Exception as error:
            step.fail(error)
            self._drop_written_gradients()
        step.end_backward(step.failure is None)

    def _drop_written_gradients(self) -> None:
        """Drop what :func:`backward_of_weights` has written into ``p.grad`` and no hook has taken. The next backward
        would refuse it as a tensor of the user, and not take part in the reductions of the other data ranks."""
        for parameter in self.chunk.parameters():
            if not isinstance(parameter.grad, ShardedGradient):
                parameter.grad = None
