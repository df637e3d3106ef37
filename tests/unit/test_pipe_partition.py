"""Division of layers over ranks, a sequence of layers on one process, and where a step of a pipeline meets: no process
group needed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zerolite.comm import create_topology, dry_communicator, record
from zerolite.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from zerolite.pipe.partition import balanced, by_type, uniform
from zerolite.pipe.runner import READY, StepBarrier


def heaviest(weights: list[float], bounds: list[int]) -> float:
    return max(sum(weights[low:high]) for low, high in itertools.pairwise(bounds))


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_balanced_is_the_best_of_all_partitions(parts: int) -> None:
    generator = torch.Generator().manual_seed(parts)
    for count in range(parts, 9):
        weights = torch.randint(0, 20, (count,), generator=generator).tolist()
        bounds = balanced(weights, parts)
        assert bounds[0] == 0 and bounds[-1] == count and bounds == sorted(set(bounds))
        others = [[0, *inner, count] for inner in itertools.combinations(range(1, count), parts - 1)]
        assert heaviest(weights, bounds) == min(heaviest(weights, other) for other in others)


def test_layers_are_divided_by_number_or_by_type() -> None:
    assert uniform(7, 3) == [0, 3, 5, 7]
    assert by_type(["Embedding", "Block", "Block", "Norm", "Block", "Block"], "^block$", 2) in ([0, 3, 6], [0, 4, 6])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: balanced([1.0], 2), "got 1"),
        (lambda: uniform(2, 3), "= 3), got 2"),
        (lambda: by_type(["Block"], "(", 1), "regular expression"),
        (lambda: by_type(["Block", "Norm"], "Head", 1), "none among Block, Norm"),
    ],
)
def test_what_cannot_be_divided(call: Any, said: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert said in str(raised.value)


def head(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return x @ embedding.weight.t()


def tied(**more: Any) -> PipelineModule:
    words = ("words", nn.Embedding, 5, 4)
    layers = [TiedLayerSpec(*words), LayerSpec(nn.Linear, 4, 4), torch.tanh, TiedLayerSpec(*words, forward_fn=head)]
    return PipelineModule(layers, **more)


def test_with_one_process_it_is_an_ordinary_module() -> None:
    model = tied(base_seed=3)
    assert list(dict(model.named_parameters())) == ["layers.0.weight", "layers.1.weight", "layers.1.bias"]
    tokens = torch.tensor([[0, 3], [2, 4]])
    weight = model.get_parameter("layers.0.weight")
    wanted = torch.tanh(model.layers.get_submodule("1")(weight[tokens])) @ weight.t()  # type: ignore[operator]
    assert torch.equal(model(tokens), wanted)
    assert set(model.state_dict()) == set(dict(model.named_parameters()))


def test_values_depend_on_the_seed_and_the_place_alone() -> None:
    one, other = tied(base_seed=3), tied(base_seed=3)
    state = torch.random.get_rng_state()
    other.build([3])  # the tied layer is made where it is first
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(one.get_parameter("layers.0.weight"), other.get_parameter("layers.0.weight"))
    assert not torch.equal(one.get_parameter("layers.0.weight"), tied(base_seed=4).get_parameter("layers.0.weight"))


def test_checkpointed_layers_give_the_same_gradients() -> None:
    tokens, gradients = torch.tensor([[0, 3]]), []
    for interval in (0, 1, 3):
        model = tied(base_seed=3, activation_checkpoint_interval=interval)
        model(tokens).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for others in gradients[1:]:
        assert all(torch.equal(one, other) for one, other in zip(gradients[0], others, strict=True))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PipelineModule([]), "at least one layer"),
        (lambda: PipelineModule([3]), "layer 0"),
        (lambda: PipelineModule([nn.Tanh()], 2), "num_stages="),  # type: ignore[arg-type]
        (lambda: PipelineModule([nn.Tanh()], num_stages=0), "at least 1, got 0"),
        (lambda: PipelineModule([nn.Tanh()], topology=object()), "pipeline.stages"),
        (lambda: PipelineModule([nn.Tanh()], activation_checkpoint_func=print), "torch.utils.checkpoint"),
        (lambda: LayerSpec(nn.Tanh()).build and LayerSpec(3), "class of modules"),  # type: ignore[arg-type]
        (lambda: TiedLayerSpec(nn.Embedding, 3, 4), "the key"),  # type: ignore[arg-type]
        (lambda: PipelineModule([TiedLayerSpec("a", nn.Tanh)]).parameters().__next__(), "'weight'"),
        (lambda: PipelineModule([LayerSpec(int)]).parameters().__next__(), "got int"),
    ],
)
def test_bad_layers_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError) as raised:
        make()
    assert said in str(raised.value)


def test_a_pipeline_step_meets_in_no_group_of_all_ranks() -> None:
    for pipe, tensor, groups in (
        (4, 1, [("pipe", 4), ("data", 256)]),
        (2, 2, [("pipe", 2), ("tensor", 2), ("data", 256)]),
    ):
        meeting = StepBarrier(create_topology(dry_communicator("nccl", 5, 1024), torch.device("cpu"), pipe, tensor))
        with record() as recorder:
            meeting.begin("train_batch", READY, None, 1, 2)
            meeting.end("train_batch", None)
        assert [(call.dimension, call.ranks) for call in recorder.calls] == groups * 2
        assert {call.numel for call in recorder.calls} <= {1, 3, 6}
