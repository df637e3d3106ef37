"""Stages for torch's pipeline schedules. Only this file and schedules.py use torch's private pipeline interfaces.

A schedule (``torch.distributed.pipelining``) decides when a stage receives, computes and sends. The stage is zerolite's
own: it frees an activation as soon as its backward has used it, takes micro-batches from a list, learns shapes from the
forwards themselves, and tells the engine of each backward. If a computation has failed, it continues with zeros, so
that no other rank waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from zerolite.comm import HostLinks, recorder
from zerolite.pipe.boundary import BoundarySpec, TensorSpec, same_specs, tensors_of
from zerolite.pipe.chunks import Chunk
from zerolite.pipe.schedules import KEEPS_ONE, Launch, launch_together
from zerolite.pipe.step import TAG, Key, Step

Method = TypeVar("Method", bound=Callable[..., Any])


def computation(method: Method) -> Method:
    """Decorate a method of a stage that computes: its time is not counted as a wait for other ranks."""

    @functools.wraps(method)
    def compute(stage: ChunkStage, *args: Any, **kwargs: Any) -> object:
        step = stage.step
        if step.waiting is None:  # a plan, which has no messages
            return method(stage, *args, **kwargs)
        step.pause(True)
        try:
            return method(stage, *args, **kwargs)
        finally:
            step.pause(False)

    return compute  # type: ignore[return-value]


@dataclass
class _MicroBatchState:
    """State of a micro-batch in a stage, from its forward to its backward.

    Attributes:
        received: tensors from the part before.
        outputs: the outputs, or the loss.
        gradients: received gradients of the outputs.
        sent_back: gradients of the received tensors, to be sent.
        groups: torch's parameter groups, with which the backward of the weights continues.
    """

    received: tuple[torch.Tensor, ...] = ()
    outputs: tuple[torch.Tensor, ...] = ()
    gradients: tuple[torch.Tensor | None, ...] = ()
    sent_back: tuple[torch.Tensor | None, ...] = ()
    groups: Any = None

    def take_roots(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Forget the outputs, so that their memory is freed in backward. Returns those with a graph, and their
        gradients."""
        gradients = self.gradients or (None,) * len(self.outputs)
        pairs = [(o, g) for o, g in zip(self.outputs, gradients, strict=True) if o.requires_grad]
        self.outputs, self.gradients = (), ()
        return [output for output, _ in pairs], [gradient for _, gradient in pairs]


@dataclass
class _Boundary:
    """Boundary with a neighbouring part: the tensors that cross it, by the key of a step's shapes.

    Attributes:
        specs: specifications by key.
        dead: the part before it failed in this step before the tensors were known: nothing crosses.
    """

    specs: dict[Key, BoundarySpec] = field(default_factory=dict)
    dead: bool = False

    def begin_step(self) -> None:
        self.dead = False

    def learn(self, key: Key, spec: BoundarySpec | None) -> None:
        if spec is None:
            self.dead = True
        else:
            self.specs[key] = spec

    def spec(self, key: Key) -> BoundarySpec | None:
        return None if self.dead else self.specs[key]


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

    launch: Launch | None = launch_together if KEEPS_ONE else None  # launches its messages; None: torch's own function

    def __init__(
        self, chunk: Chunk, parts: int, device: torch.device, group: dist.ProcessGroup, links: HostLinks
    ) -> None:
        super().__init__(chunk.module, chunk.index, parts, device, group=group)
        self._set_up(chunk, links, dist.get_process_group_ranks(group))

    def _set_up(self, chunk: Chunk, links: HostLinks | None, ranks: Sequence[int]) -> None:
        """Set the attributes that torch's stage does not have.

        Args:
            ranks: global ranks of the pipeline.
        """
        self.chunk = chunk
        self.step: Step
        self.next_here: ChunkStage | None = None  # the stages of neighbouring parts, where they are on this rank
        self.previous_here: ChunkStage | None = None
        self._links = links
        self._before, self._after = _Boundary(), _Boundary()
        self._micro_batches: dict[int, _MicroBatchState] = {}
        self._ranks = list(ranks)
        self._fresh: BoundarySpec | None = None  # outputs of the first forward with new shapes
        self.args_recv_info, self.act_send_info = {0: ()}, {}  # torch reads these to check that stages are neighbours

    def begin(self, step: Step) -> None:
        """Begin a step, before its schedule runs."""
        self.step = step
        self._micro_batches.clear()
        self._before.begin_step()
        self._after.begin_step()
        self.has_backward = step.training

    def end(self) -> None:
        """End a step whose schedule has run or failed. The runner owns micro-batches and losses again."""
        self._micro_batches.clear()
        del self.step

    # ------------------------------------------------ torch's preparations, which are not needed here

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)

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
        spec = None if self.is_first else self._incoming()
        if spec is None:
            return []
        room = self._room(spec.tensors)
        self._micro_batches[fwd_chunk_id] = _MicroBatchState(received=room)
        return [self._receive(tensor, self.stage_index - 1) for tensor in room]

    def _incoming(self) -> BoundarySpec | None:
        """Return the tensors to expect from the part before; None if nothing comes. With new shapes that part sends
        this first."""
        key = self.step.key
        if not self._before.dead and key not in self._before.specs:
            assert self._links is not None
            self._before.learn(key, self._links.receive(self._rank_of(self.stage_index - 1)))
        return self._before.spec(key)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        spec = self._outgoing()
        if spec is None:
            return []
        # After a failure there are no outputs: zeros are sent, so that the next part need not wait for ever.
        outputs = self._micro_batches[fwd_chunk_id].outputs or self._zeros(spec.tensors)
        if not self.has_backward:
            del self._micro_batches[fwd_chunk_id]
        return [self._send(output.detach(), self.stage_index + 1) for output in outputs]

    def _outgoing(self) -> BoundarySpec | None:
        return self._after.spec(self.step.key)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        spec = None if self.is_last or not self.has_backward else self._outgoing()
        if spec is None:
            return []
        wanted = [tensor for tensor in spec.tensors if tensor.requires_grad]
        room = self._room(wanted)
        rest = iter(room)
        self._micro_batches[bwd_chunk_id].gradients = tuple(
            next(rest) if tensor.requires_grad else None for tensor in spec.tensors
        )
        return [self._receive(tensor, self.stage_index + 1) for tensor in room]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or not self.has_backward:
            return []
        gradients = self.get_local_bwd_output(bwd_chunk_id)
        return [self._send(gradient, self.stage_index - 1) for gradient in gradients if gradient is not None]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the outputs of the part before, which is on this rank too, without a message."""
        assert self.previous_here is not None
        spec = self.previous_here._outgoing()
        self._before.learn(self.step.key, spec)
        if spec is not None:
            outputs = prev_stage_outputs or self._zeros(spec.tensors)
            self._micro_batches[mb_index] = _MicroBatchState(received=tuple(output.detach() for output in outputs))

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        if not self.has_backward:
            return ()
        state = self._micro_batches[mb_index]
        gradients, state.sent_back = state.sent_back, ()
        if state.groups is None:
            del self._micro_batches[mb_index]
        return gradients

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            self._micro_batches[mb_index].gradients = next_stage_bwd_outputs

    def _room(self, specs: Sequence[TensorSpec]) -> tuple[torch.Tensor, ...]:
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
        """Run a forward. Returns outputs only for a next part on this rank, which gets no message.

        The schedule would keep other outputs alive longer than their backward needs them.
        """
        state = self._micro_batches.setdefault(fwd_chunk_id, _MicroBatchState())
        if self.step.failure is None and not self._before.dead:
            try:
                state.outputs = self._forward(state.received, fwd_chunk_id)
            except Exception as error:
                self.step.fail(error)
        if not self.is_last:
            self._announce()
        outputs = state.outputs
        if not self.has_backward:
            state.received = ()
            if self.is_last or self.next_here is not None:
                del self._micro_batches[fwd_chunk_id]
        return outputs if self.next_here is not None else ()

    def _forward(self, received: tuple[torch.Tensor, ...], index: int) -> tuple[torch.Tensor, ...]:
        step = self.step
        single = True
        if not self.is_first:
            spec = self._before.specs[step.key]
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
        expected = self._after.specs.get(step.key)
        made = BoundarySpec(single, tuple(map(TensorSpec.of, tensors)))
        if expected is None:
            # Sent to the next part by _announce(), which also runs if this forward fails.
            self._fresh = made
        elif not same_specs(tensors, expected.tensors):
            raise RuntimeError(
                f"expected part {self.stage_index} of the pipeline to give {expected} for every micro-batch of these "
                f"shapes, as it did at first, got {made}"
            )
        return tensors

    def _announce(self) -> None:
        """Send the shapes of the outputs to the next part, if they are new to it."""
        key = self.step.key
        if self._after.dead or key in self._after.specs:
            return
        fresh, self._fresh = self._fresh, None
        self._after.learn(key, fresh)
        if self.next_here is None:
            assert self._links is not None
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
            self._guarded(functools.partial(self._backward, state))
        elif split and self.step.failure is None:
            try:
                self._backward_of_inputs(state)
            except Exception as error:
                self.step.fail(error)
        if not full_backward:
            state.groups = state.groups if split and self.step.failure is None else _WHOLE
        self._keep_gradients(state)
        if full_backward and self.is_first:
            del self._micro_batches[bwd_chunk_id]

    @computation
    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        state = self._micro_batches.pop(bwd_chunk_id)
        whole = state.groups is _WHOLE
        self._guarded(functools.partial(self._backward if whole else self._backward_of_weights, state))

    def _guarded(self, compute: Callable[[], None]) -> None:
        """Run a backward that gives parameters their gradients.

        The engine is told even if it has failed, because the other data ranks reduce gradients together with this one.
        """
        step = self.step
        try:
            step.begin_backward()
            if step.failure is None:
                compute()
        except Exception as error:
            step.fail(error)
        step.end_backward(step.failure is None)

    def _backward(self, state: _MicroBatchState) -> None:
        outputs, gradients = state.take_roots()
        if outputs:
            torch.autograd.backward(outputs, gradients)

    def _backward_of_inputs(self, state: _MicroBatchState) -> None:
        outputs, gradients = state.take_roots()
        # torch calls detach_() on them, which autograd refuses for views and leaves.
        roots = [output.clone() if output._is_view() or output.is_leaf else output for output in outputs]
        given = [torch.ones_like(o) if g is None else g for o, g in zip(outputs, gradients, strict=True)]
        parameters = iter(self.chunk.parameters())
        received = [tensor for tensor in state.received if tensor.requires_grad]
        try:
            _, state.groups = stage_backward_input(roots, given, received, parameters)
        except RuntimeError as error:
            raise error.__cause__ or error from None  # torch's own text only lists the tensors

    def _backward_of_weights(self, state: _MicroBatchState) -> None:
        parameters = self.chunk.parameters()
        stage_backward_weight(iter(parameters), state.groups)
        for parameter in parameters:  # torch wrote p.grad directly, so its post-accumulate hooks have not run
            if parameter.grad is not None:
                hooks: Any = parameter._post_accumulate_grad_hooks or {}
                for hook in list(hooks.values()):
                    hook(parameter)

    def _keep_gradients(self, state: _MicroBatchState) -> None:
        """Keep the gradients of the received tensors for the part before; zeros for tensors that were not used."""
        spec = None if self.is_first else self._before.spec(self.step.key)
        if spec is None:
            return
        received = state.received or self._room(spec.tensors)
        gradients = []
        for tensor, described in zip(received, spec.tensors, strict=True):
            gradient, tensor.grad = tensor.grad, None
            if described.requires_grad and gradient is None:
                gradient = torch.zeros(described.shape, dtype=described.dtype, device=self.device)
            gradients.append(gradient if described.requires_grad else None)
        state.received = ()
        state.sent_back = tuple(gradients)


_WHOLE = object()  # in place of parameter groups: the whole backward, of inputs and weights, is still to come
