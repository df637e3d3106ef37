"""Inference with a model in training: its full weights for an inference engine, and generation by the model itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from zerolite.checkpoint.weight_stream import Names, StreamOptions, WeightStream
from zerolite.comm import collective
from zerolite.engine.engine_base import EngineBase
from zerolite.moe.experts import experts_on_every_rank
from zerolite.zero.stage3.gathered_parameters import GatheredParameters


@collective
def stream_full_weights(
    engine: EngineBase,
    *,
    bucket_bytes: int = 256 * 1024**2,
    names: Names = None,
    dtype: torch.dtype | None = None,
    merge_lora: bool = True,
) -> WeightStream:
    """Return an iterator over the full weights in buckets of whole tensors, for an inference engine::

        for bucket in zerolite.stream_full_weights(engine):
            inference_engine.load_weights(bucket)  # a sequence of (name, tensor)

    It works at every stage, with tensor parallelism and with offloading. The next bucket is gathered while the caller
    uses this one, so memory is needed for two. Each bucket is one gather (two with tensor parallelism).

    The tensors are copies on the engine's device, of the values with which the model computes: parameters and buffers
    of ``state_dict()``, a tied weight once, by its first name. All ranks get all of them. A rank may stop early: the
    stream takes part in the gathers of the other ranks when it is closed or nothing refers to it.

    Args:
        engine: the engine.
        bucket_bytes: bytes of a bucket at most, or of one larger tensor; of a layer with adapters that is merged.
        names: the tensors to yield: names, a mapping from names to those to yield them by, or a function from a name
            to the name to yield it by, or None to leave it out. None yields all.
        dtype: of floating tensors of 16 bits or more; None: that in which the model computes.
        merge_lora: merge active adapters of PEFT into copies, and yield the tensors of the base model by its own
            names. False yields adapters as they are.

    Raises:
        ValueError: on all ranks, for an unknown name or another wrong argument, and if ranks pass different ones.
        RuntimeError: with a pipeline, and from the iterator if the engine has made a step since.
    """
    return engine._full_state.stream(StreamOptions(bucket_bytes, names, dtype, merge_lora))


@collective
@contextlib.contextmanager
def gathered_for_generation(engine: EngineBase) -> Iterator[torch.nn.Module]:
    """Context in which an engine's module has all its parameters, at every stage; it yields the module::

        with zerolite.gathered_for_generation(engine) as model, torch.no_grad():
            tokens = model.generate(prompts, max_new_tokens=512)

    At stage 3 one all-gather brings the parameters and the end of the context releases them, so each device needs room
    for all of them. Experts of several ranks are gathered at every stage, one all-gather for each of their weights, so
    each device needs room for all experts beside its own. They exchange no tokens and drop none for a capacity.

    Forwards inside launch nothing: ranks may run different numbers of them, or one alone. With tensor parallelism they
    launch what the layers need, and ranks of one group run equally many. The parameters are for reading: changes do not
    reach the shards, and a backward to experts of several ranks raises.

    Args:
        engine: the engine.

    Raises:
        RuntimeError: with a pipeline.
    """
    if engine.topology.pipe.world_size > 1:
        raise RuntimeError(
            "zerolite.gathered_for_generation: expected all layers on every rank, got a pipeline, whose stages each "
            "have their own; generate with a copy of the model that has engine.full_state_dict()"
        )
    engine._parts.pipeline.check_available()
    with GatheredParameters(engine.module, check=False), experts_on_every_rank(engine.module):
        yield engine.module
