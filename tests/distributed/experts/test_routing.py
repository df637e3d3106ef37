"""Experts that one forward has chosen, or that were given, are chosen again: router replay."""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import zerolite
from tests.distributed.experts.test_parity import EXACT
from tests.toolkit import experts
from tests.toolkit.ranks import on_ranks
from tests.toolkit.sequences import needs_transformers
from zerolite.moe import ExpertParallel, record_routing, replay_routing
from zerolite.moe.experts import experts_in

TOKENS = 10


def gradients(model: nn.Module, *, inside: bool = True, choices: Any = None, **more: Any) -> list[Tensor]:
    """Return the loss and the gradients of a batch. inside: the backward runs within the context of the choices."""
    model.zero_grad()
    batch = experts.batch_of(0, TOKENS // 2)
    if choices is None:
        experts.loss_of(model(**batch, **more)).backward()
    elif inside:
        with replay_routing(model, choices):
            experts.loss_of(model(**batch, **more)).backward()
    else:
        with replay_routing(model, choices):
            loss = experts.loss_of(model(**batch, **more))
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def other_choices(model: nn.Module, seed: int = 0, tokens: int = TOKENS) -> dict[str, Tensor]:
    """Return random experts of each token, as many as the model chooses."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), record_routing(model) as own:
        model(**experts.batch_of(0, 1))
    numbers = {name: len(next(module.parameters())) for name, module in experts_in(model)[0].items()}
    return {
        name: torch.rand(tokens, numbers[name], generator=generator).topk(given.shape[1]).indices
        for name, given in own.items()
    }


@needs_transformers
@pytest.mark.fast("deepseek_v3", "gpt_oss")
@pytest.mark.parametrize("name", ["Mixture", *sorted(set(experts.FAMILIES) - {"llama4_text"})])
def test_own_choices_give_the_same_bits(name: str) -> None:
    model = experts.build(name, False)
    batch = experts.batch_of(0, TOKENS // 2)
    with record_routing(model) as choices:
        model(**batch)
    assert list(choices) == list(experts_in(model)[0])
    assert all(given.shape[0] == TOKENS and given.dtype == torch.int64 for given in choices.values())
    wanted = gradients(model)
    for given in (choices, {name: index.to(torch.int16) for name, index in choices.items()}):
        assert all(map(torch.equal, gradients(model, choices=given), wanted))
    own = [torch.full_like(index, -1) for index in choices.values()]
    assert all(map(torch.equal, gradients(model, choices=own), wanted))
    others = gradients(model, choices=other_choices(model))
    assert not all(map(torch.equal, others, wanted))
    assert all(map(torch.equal, gradients(model), wanted))


def by_hand(name: str, logits: Tensor, index: Tensor) -> Tensor:
    """Return the weights that a family gives to the experts ``index``."""
    if name == "gpt_oss":
        return logits.gather(1, index).softmax(-1)
    if name == "deepseek_v3":
        weights = logits.sigmoid().gather(1, index)
        return 2.5 * weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = logits.softmax(-1).gather(1, index)
    if name == "deepseek_v2":
        return weights
    return weights / weights.sum(-1, keepdim=True)


@needs_transformers
@pytest.mark.fast("deepseek_v2")
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_weights_of_given_experts_come_from_the_logits(name: str) -> None:
    """The given experts are also outside the groups that the router would choose."""
    groups: dict[str, Any] = {"n_group": 2, "topk_group": 1} if name.startswith("deepseek") else {}
    if name == "deepseek_v2":
        groups |= {"topk_method": "group_limited_greedy"}
    if name == "qwen3_moe":
        groups["norm_topk_prob"] = True
    model: Any = experts.family(name, **groups)
    block = model.model.layers[-1].mlp
    router = block.gate if hasattr(block, "gate") else block.router
    seen: dict[str, Tensor] = {}

    def see(module: nn.Module, args: Any) -> None:
        seen["index"], seen["weights"] = args[1], args[2]

    router.register_forward_hook(lambda module, args, outputs: seen.update(logits=outputs[0], x=args[0]))
    block.experts.register_forward_pre_hook(see)
    choices = other_choices(model)
    with replay_routing(model, choices):
        model(**experts.batch_of(0, TOKENS // 2))
    given = list(choices.values())[-1]
    assert torch.equal(seen["index"], given)
    logits = F.linear(seen["x"].reshape(TOKENS, -1).float(), router.weight.float(), getattr(router, "bias", None))
    torch.testing.assert_close(seen["weights"].float(), by_hand(name, logits, given), rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(seen["weights"].square().sum(), router.weight)
    assert bool(gradient.any())


@needs_transformers
@pytest.mark.fast("deepseek_v3")
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_rows_that_choose_for_themselves_are_limited_to_groups(name: str) -> None:
    limited = {"n_group": 4, "topk_group": 1, "n_routed_experts": 8}
    model: Any = experts.family(name, **limited, **({"topk_method": "group_limited_greedy"} if "v2" in name else {}))
    batch = experts.batch_of(0, TOKENS // 2)
    with record_routing(model) as own:
        model(**batch)
    others = other_choices(model)
    mixed = {given: torch.where(torch.arange(TOKENS)[:, None] % 2 == 0, others[given], -1) for given in own}
    with record_routing(model) as found, replay_routing(model, mixed):
        model(**batch)
    (given,) = own  # of one layer, so the other tokens are as before
    assert torch.equal(found[given][::2], others[given][::2])
    assert torch.equal(found[given][1::2].sort(-1).values, own[given][1::2].sort(-1).values)


@needs_transformers
@pytest.mark.fast("True-False")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_recomputed_blocks_make_the_given_choices(inside: bool, reentrant: bool) -> None:
    """Also where another context has been opened since their forward."""
    model: Any = experts.build("qwen3_moe", False)
    choices, later = other_choices(model), other_choices(model, 1)
    wanted = gradients(model, choices=choices)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients(model, choices=choices, inside=inside, use_cache=False)
    assert all(map(torch.equal, found, wanted))
    batch, losses = experts.batch_of(0, TOKENS // 2), []
    model.zero_grad()
    for given in (choices, later):
        with replay_routing(model, given):
            losses.append(model(**batch, use_cache=False).loss)
    with replay_routing(model, later):  # and where one is open
        losses[0].backward()
        model(**batch, use_cache=False)
    assert all(map(torch.equal, [p.grad for p in model.parameters() if p.grad is not None], wanted))
    with record_routing(model) as own:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    assert not any(torch.equal(own[name], given) for name, given in choices.items())
    assert all(len(index) == TOKENS for index in own.values())


class Clipped(nn.Linear):
    """An expert as wide as there are experts, which fills by a mask as routers do."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.masked_fill(y < 0, 0.0)


def test_only_routing_is_replayed() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(4, 4), ExpertParallel(Clipped(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            weights, index = self.router(x).softmax(-1).topk(2)
            mixed: Tensor = self.experts(x, index, weights)
            return mixed + mixed.masked_fill(mixed < 1, 0.0).topk(2)[0].sum(-1, keepdim=True)

    model, x = nn.Sequential(Block(), Block()), torch.randn(6, 4)
    with record_routing(model) as choices:
        wanted = model(x)
    with replay_routing(model, choices):
        assert torch.equal(model(x), wanted)


class ByHand(experts.Mixture):
    """The model with the experts ``choices`` of its blocks, written out."""

    def forward(self, input_ids: Tensor, labels: Tensor, choices: list[Tensor] | None = None) -> Tensor:
        x, z_losses = self.embed(input_ids), []
        for block, index in zip(cast(Any, self.blocks), choices or [], strict=True):
            rows = block.norm(x).reshape(-1, experts.WIDTH)
            logits = block.router(rows)
            z_losses.append(logits.logsumexp(-1).square().mean())
            weights = logits.softmax(-1).gather(-1, index)
            mixed = block.experts(rows, index, weights / weights.sum(-1, keepdim=True).detach())
            x = x + mixed.view(x.shape) + block.shared(block.norm(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.1 * sum(z_losses)


@pytest.mark.fast("3 moving-2-1-2")
@on_ranks(2, 4, timeout=120)
@pytest.mark.parametrize(("size", "tensor"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("stage", ["0", "1", "2", "3 moving"])
def test_given_choices_train_as_a_model_written_by_hand(stage: str, size: int, tensor: int) -> None:
    """With blocks that are recomputed behind the context, accumulation, and other choices in each micro-batch."""
    how: dict[str, Any] = {"activation_checkpointing": {"modules": ["blocks.*"]}, "accumulation": 2, "clip": 0.3}
    if tensor > 1:
        how["tensor_parallel"] = {"size": tensor, "plan": {"*.shared.up": "column", "*.shared.down": "row"}}
    engine = experts.make("Mixture", size, stage, True, **how)
    plain, ranks, rank = ByHand(), engine.data_parallel_world_size, engine.data_parallel_rank
    plain.load_state_dict(experts.build("Mixture", True).state_dict())
    plain.double()
    kind, settings = experts.optimizer_of(True)
    optimizer = getattr(torch.optim, kind)(plain.parameters(), **settings)
    generator = torch.Generator().manual_seed(7)
    for step in range(2):
        for micro in range(2):
            lengths = [3 + r for r in range(ranks)]
            batches = [experts.batch_of(ranks * (2 * step + micro) + r, length) for r, length in enumerate(lengths)]
            given = [
                torch.rand(2, 2 * length, experts.EXPERTS, generator=generator).topk(experts.CHOSEN).indices
                for length in lengths
            ]
            with replay_routing(engine, given[rank]):
                loss = engine(**batches[rank])
            engine.backward(loss)
            engine.step()
            for batch, choices in zip(batches, given, strict=True):
                (plain(**batch, choices=list(choices)) / (2 * ranks)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    wanted = experts.own_part(engine, {name: p.detach() for name, p in plain.named_parameters()})
    torch.testing.assert_close(experts.parameters_of(engine), wanted, rtol=0, atol=EXACT)


class WithoutTopk(experts.Mixture):
    def __init__(self) -> None:
        super().__init__(favourite=2)  # the experts' index is not the topk's


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c[:1], r"choices for 2 modules of experts \(blocks.0.experts, blocks.1.experts\), got 1"),
        (lambda c: {"blocks.2.experts": c[0]}, "names of blocks.0.experts, blocks.1.experts, got blocks.2.experts"),
        (lambda c: c.float(), r"expected integers \[n, k\] for 'blocks.0.experts', got torch.float32"),
        (lambda c: c + 1, "expected experts 0 to 7 of 'blocks.0.experts', or -1, got 1 to 8"),
        (lambda c: c * 0, r"different experts for a token of 'blocks.0.experts', .*, got \[0, 0, 0\] for token 0"),
        (lambda c: c - (c == 7) * 8, "or -1 for all of them, got"),
        (lambda c: c[:, :-1], "expected the choices of 10 tokens for 'blocks.0.experts', got 9"),
        (lambda c: c[..., :-1], "expected 3 experts of a token for 'blocks.0.experts', got 2"),
    ],
)
def test_choices_that_do_not_fit(change: Any, message: str) -> None:
    model = experts.Mixture()
    choices = torch.stack([torch.arange(8)[:3]] * (TOKENS - 1) + [torch.tensor([7, 5, 6])]).repeat(2, 1, 1)
    with pytest.raises(ValueError, match=message), replay_routing(model, change(choices)):
        model(**experts.batch_of(0, TOKENS // 2))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    interrupt = model.get_submodule("blocks.0.experts").register_forward_pre_hook(
        mock.Mock(side_effect=KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt), replay_routing(model, choices):
        model(**experts.batch_of(0, TOKENS // 2))
    interrupt.remove()
    assert not _get_current_function_mode_stack()
    experts.loss_of(model(**experts.batch_of(0, TOKENS // 2))).backward()


@pytest.mark.fast("tokens-2")
@on_ranks(2, 4, timeout=60)
@pytest.mark.parametrize("wrong", ["values", "tokens", "not called"])
def test_wrong_choices_of_one_rank_raise_on_all(wrong: str) -> None:
    """No rank waits for the one that has them, and the next step is as usual."""
    engine, last = experts.make("Mixture", 2, "3 moving", True), dist.get_world_size() - 1
    choices = torch.arange(3).repeat(2, TOKENS, 1)
    if dist.get_rank() == last:
        choices = {"values": choices * 0, "tokens": choices[:, 1:]}.get(wrong, choices)
    message = {
        "values": "rank {0}: expected different experts for a token of 'blocks.0.experts'",
        "tokens": f"rank {{0}}: expected the choices of {TOKENS} tokens for 'blocks.0.experts', got {TOKENS - 1}",
        "not called": "expected a forward of 'blocks.0.experts' in the context, got none",
    }[wrong].format(last)
    if dist.get_rank() == last:
        message = message.removeprefix(f"rank {last}: ")
    kind = RuntimeError if wrong == "not called" else ValueError
    with pytest.raises(kind, match=message), replay_routing(engine, choices):
        if wrong != "not called":
            engine(**experts.batch_of(0, TOKENS // 2))
    engine.backward(engine(**experts.batch_of(0, TOKENS // 2)))
    engine.step()


def test_routers_that_are_not_understood_are_refused_by_name() -> None:
    choices = torch.arange(3).repeat(2, TOKENS, 1)
    with pytest.raises(ValueError, match="expected 1 experts of a token for 'blocks.0.experts', got 3"):
        with replay_routing(model := WithoutTopk(), choices):
            model(**experts.batch_of(0, TOKENS // 2))
    message = "the block around 'blocks.0.experts' to call it with the experts that one topk"
    with pytest.raises(RuntimeError, match=message), replay_routing(model := WithoutTopk(), choices[..., 1:2]):
        model(**experts.batch_of(0, TOKENS // 2))
    with pytest.raises(RuntimeError, match="expected a forward of 'blocks.0.experts' in the context, got none"):
        with replay_routing(model, choices):
            pass
    for function in (record_routing, lambda model: replay_routing(model, choices)):
        with (
            pytest.raises(ValueError, match="expected a model whose experts .* got one without"),
            function(nn.Linear(2, 2)),
        ):
            pass


@needs_transformers
def test_families_with_other_calls_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"got 'model.layers.0.feed_forward.experts' \(Llama4TextExperts\)"):
        with record_routing(experts.family("llama4_text")):
            pass
    sizes = {"num_experts_per_tok": 2, "num_local_experts": 4}
    model = experts.family("phimoe", **sizes)
    index = torch.arange(2).repeat(2, TOKENS, 1)
    with pytest.raises((RuntimeError, ValueError), match="the block around 'model.layers.0.mlp.experts'"):
        with replay_routing(model, index):
            model(**experts.batch_of(0, TOKENS // 2))
    assert zerolite.moe.replay_routing is replay_routing


def test_recorded_forwards_stand_one_after_the_other() -> None:
    model = experts.Mixture()
    with torch.inference_mode(), record_routing(model) as choices:
        for length in (2, 3):
            model(**experts.batch_of(0, length))
    assert [len(index) for index in choices.values()] == [10, 10]
    with replay_routing(model, {"blocks.1.experts": choices["blocks.1.experts"]}):
        model(**experts.batch_of(0, 5)).backward()
