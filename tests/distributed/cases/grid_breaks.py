"""Grids of ranks that are used in every way, and wrongly."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.distributed.cases import grid as cases
from tests.toolkit import models, reference

Change = Callable[[nn.Module, Any, int], None]


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def decays(model: nn.Module) -> list[dict[str, Any]]:
    """Param groups as users make them; that of the head alone is empty on other stages."""
    own = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    wide = [p for n, p in own if p.dim() > 1 and not n.startswith("head")]
    narrow = [p for n, p in own if p.dim() <= 1 and not n.startswith("head")]
    head = [p for n, p in own if n.startswith("head")]
    return [
        {"params": wide, "weight_decay": 0.1},
        {"params": narrow, "weight_decay": 0.0},
        {"params": head, "lr": 0.02},
    ]


def own_optimizer(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(decays(model), lr=0.05, momentum=0.9)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


def torch_adam(model: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.Adam(decays(model), lr=1e-2, eps=1e-2, foreach=True)}


def some_parameters(model: nn.Module) -> dict[str, Any]:
    return {"model_parameters": [p for n, p in model.named_parameters() if "qkv" not in n and p.requires_grad]}


def groups_for_config(model: nn.Module) -> dict[str, Any]:
    return {"model_parameters": decays(model)}


def nothing(model: nn.Module) -> dict[str, Any]:
    return {}


def unfreeze(model: nn.Module, optimizer: Any, step: int) -> None:
    if step == 2:
        for name, parameter in model.named_parameters():
            if "frozen" in name or name == "positions":
                parameter.requires_grad_(True)
    if step == 0:
        dict(model.named_parameters()).get("positions", nn.Parameter(torch.ones(1))).requires_grad_(False)


def plain_optimizer(model: nn.Module, settings: dict[str, Any], made: dict[str, Any]) -> Any:
    if "optimizer" in made:
        return made["optimizer"]
    trained = made.get("model_parameters", list(model.parameters()))
    return reference.make_optimizer(settings["optimizer"]["type"], trained, settings["optimizer"]["params"])


def compare(
    config: dict[str, Any],
    steps: int = 4,
    made: str = "nothing",
    change: str = "",
    sample: dict[str, int] | None = None,
    **model: Any,
) -> dict[str, Any]:
    """A run with ``train_batch`` beside plain PyTorch in the same process. made: the function here that gives
    arguments of ``initialize``; change: the one that is called before each step; sample: of token_batch."""
    whole = models.build(cases.Gpt, **model)
    first = models.build(cases.Gpt, seed=7 + dist.get_rank(), **model)
    before = globals()[change] if change else lambda *_: None
    before(whole, None, 0), before(first, None, 0)
    engine = zerolite.initialize(first, dict(config), **globals()[made](first))
    arguments = globals()[made](whole)
    optimizer = plain_optimizer(whole, config, arguments)
    scheduler = arguments.get("lr_scheduler")
    data, accumulation = engine.data_parallel_world_size, engine.gradient_accumulation_steps
    result: dict[str, Any] = {
        key: [] for key in ("losses", "norms", "lrs", "wanted_losses", "wanted_norms", "wanted_lrs")
    }
    for step in range(steps):
        before(engine.module, engine.optimizer, step) if step else None
        before(whole, optimizer, step) if step else None
        own = batches(step, accumulation, engine.data_parallel_rank, sample)
        result["losses"].append(engine.train_batch(own).item())
        result["norms"].append(engine.get_global_grad_norm())
        result["lrs"].append(engine.get_lr())
        window = [batch for rank in range(data) for batch in batches(step, accumulation, rank, sample)]
        loss, norm = plain_step(whole, optimizer, window, config.get("gradient_clipping", 0.0))
        if scheduler is not None:
            scheduler.step()
        result["wanted_losses"].append(loss)
        result["wanted_norms"].append(norm)
        result["wanted_lrs"].append([group["lr"] for group in optimizer.param_groups])
    return result | cases.told(engine) | {"wanted": {n: p.detach().clone() for n, p in whole.named_parameters()}}


def batches(step: int, count: int, rank: int, sample: dict[str, int] | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    return (models.token_batch(step, micro, rank, **(sample or {"length": 8})) for micro in range(count))


def plain_step(whole: nn.Module, optimizer: Any, window: list[Any], clip: float) -> tuple[float, float]:
    optimizer.zero_grad()
    total = 0.0
    for batch in window:
        loss = whole(*batch) / len(window)
        loss.backward()
        total += loss.item()
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in trained if p.grad is not None]
    norm = reference.global_norm(gradients)
    if clip and norm > clip:
        for gradient in gradients:
            gradient.mul_(clip / (norm + 1e-6))
    optimizer.step()
    return total, norm


def compare_many(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: compare(**run) for name, run in runs.items()}


# -------------------------------------------------------------------- what is not finite, and what raises


def poison(engine: Any, place: tuple[int, int, int], value: float) -> Any:
    """On the rank of ``place``, its last trained parameter's gradient has that value in one place from now on."""
    if engine.topology.place != place:
        return None
    parameter = [p for n, p in engine.module.named_parameters() if n.endswith("proj.weight")][-1]

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = value
        return gradient

    return parameter.register_hook(spoil)


def skips(
    config: dict[str, Any], place: tuple[int, int, int], value: float = float("nan"), **model: Any
) -> dict[str, Any]:
    """Six steps; the gradients of the third are not finite on one rank."""
    engine = cases.make_engine(config, **model)
    norms, scales = [], []
    for step in range(6):
        handle = poison(engine, place, value) if step == 2 else None
        cases_loss = engine.train_batch(batches(step, engine.gradient_accumulation_steps, engine.data_parallel_rank))
        assert cases_loss.isfinite()
        norms.append(engine.get_global_grad_norm())
        scales.append(engine.loss_scale)
        if handle is not None:
            handle.remove()
    return {"norms": [repr(n) for n in norms], "scales": scales, **cases.told(engine)}


class _Deliberate(Exception):
    pass


def raises_inside(config: dict[str, Any], place: tuple[int, int, int], when: str) -> dict[str, Any]:
    """The second step raises on one rank in a forward (or backward) of one of its blocks; then training goes on."""
    import time

    engine = cases.make_engine(config)
    mine = engine.topology.place == place
    count = engine.gradient_accumulation_steps
    engine.train_batch(batches(0, count, engine.data_parallel_rank))
    handle = None
    if mine:
        calls = []

        def fail(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise _Deliberate("on purpose")

        block = [m for m in engine.module.modules() if isinstance(m, cases.Block) and m.proj.weight is not None][-1]
        handle = block.register_forward_hook(fail) if when == "forward" else block.proj.weight.register_hook(fail)
    started = time.monotonic()
    said = message(lambda: engine.train_batch(batches(1, count, engine.data_parallel_rank)))
    seconds = time.monotonic() - started
    if handle is not None:
        handle.remove()
    losses = [engine.train_batch(batches(step, count, engine.data_parallel_rank)).item() for step in (1, 2)]
    return {"said": said, "seconds": seconds, "later": losses, **cases.told(engine)}


def iterators(config: dict[str, Any]) -> dict[str, Any]:
    """Return the messages about iterators that end, and about ranks that read other data."""
    engine = cases.make_engine(config)
    count, rank = engine.gradient_accumulation_steps, engine.data_parallel_rank
    said = {}
    last = engine.rank == engine.world_size - 1
    said["short on one"] = message(lambda: engine.train_batch(batches(0, count - int(last), rank)))
    said["short on all"] = message(lambda: engine.train_batch(batches(0, count - 1, rank)))
    said["empty"] = message(lambda: engine.train_batch(iter(())))
    said["list"] = message(lambda: engine.train_batch(list(batches(0, count, rank))))
    said["none"] = message(lambda: engine.train_batch())
    said["eval short"] = message(lambda: engine.eval_batch(batches(0, count - int(last), rank)))

    def broken() -> Iterator[Any]:
        yield from batches(0, 1, rank)
        if last:
            raise _Deliberate("no file")
        yield from batches(1, count - 1, rank)

    said["raises"] = message(lambda: engine.train_batch(broken()))
    said["lengths"] = message(
        lambda: engine.train_batch(models.token_batch(0, m, rank, length=8 - 4 * (m == 1)) for m in range(count))
    )
    said["other data"] = message(lambda: engine.train_batch(batches(0, count, engine.rank)))
    said["works"] = message(lambda: engine.train_batch(batches(0, count, rank)))
    return said | {"steps": engine.global_steps}


def other_data(config: dict[str, Any], shapes: bool = False) -> str:
    engine = cases.make_engine(config)
    count = engine.gradient_accumulation_steps
    length = 8 - 4 * (engine.rank % 2) if shapes else 8
    return message(
        lambda: engine.train_batch(models.token_batch(0, m, engine.rank, length=length) for m in range(count))
    )


def wrong_use(config: dict[str, Any]) -> dict[str, str]:
    engine = cases.make_engine(config)
    batch = models.token_batch(0, 0, 0, length=8)
    said = {
        "call": message(lambda: engine(*batch)),
        "forward": message(lambda: engine.forward(*batch)),
        "backward": message(lambda: engine.backward(torch.ones((), requires_grad=True))),
        "step": message(lambda: engine.step()),
        "module": message(lambda: engine.module(*batch)),
        "optimizer": message(lambda: engine.optimizer.step()),
        "no_sync": message(lambda: engine.no_sync().__enter__()),
        "boundary": message(lambda: engine.set_gradient_accumulation_boundary(False)),
    }

    def join() -> None:
        with engine.join():
            pass

    return said | {"join": message(join)}


def initialize_says(config: dict[str, Any], odd: dict[str, Any] | None = None, **model: Any) -> str:
    """odd: config of the last rank."""
    last = dist.get_rank() == dist.get_world_size() - 1
    return message(lambda: cases.make_engine(odd if odd is not None and last else config, **model))


def odd_windows(config: dict[str, Any]) -> dict[str, Any]:
    """Return the changes where windows are set by hand."""
    found = {}

    def steps(engine: Any) -> Any:
        count, rank = engine.gradient_accumulation_steps, engine.data_parallel_rank
        said = message(lambda: engine.train_batch(batches(0, count, rank)))
        return said, engine.global_steps, engine.micro_steps, engine.get_global_grad_norm()

    engine = cases.make_engine(config)
    with engine.no_sync():
        found["no_sync"] = steps(engine)
    found["after no_sync"] = steps(engine)
    engine = cases.make_engine(config)
    engine.set_gradient_accumulation_boundary(False)
    found["no boundary"] = steps(engine)
    engine.set_gradient_accumulation_boundary(None)
    found["after no boundary"] = steps(engine)
    engine = cases.make_engine(config)
    before = cases.held(engine)
    engine.optimizer.step()
    found["optimizer.step"] = engine.global_steps, cases.held(engine) == before
    return found


# -------------------------------------------------------------------- other ways of training and looking


def loops(config: dict[str, Any], kind: str, steps: int = 4) -> dict[str, Any]:
    """Without a pipeline: kind "engine", "plain", "phases", "no_sync" or "module"."""
    engine = cases.make_engine(config)
    count = engine.gradient_accumulation_steps
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for micro, batch in enumerate(batches(step, count, engine.data_parallel_rank)):
            last = micro == count - 1
            with engine.no_sync() if kind == "no_sync" and not last else contextlib.nullcontext():
                loss = (engine.module if kind == "module" else engine)(*batch)
                if kind in ("engine", "no_sync", "phases"):
                    engine.backward(loss)
                else:
                    (loss / count).backward()
            if kind == "engine" or (kind == "no_sync" and last):
                engine.step()
            total += loss.item() / count
        if kind == "phases":
            engine.reduce_gradients()
            norms.append(float(engine.clip_gradients(0.4)))
            engine.update()
            engine.publish()
            engine.zero_grad()
        elif kind in ("plain", "module"):
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        elif kind == "no_sync":
            pass
        if kind != "phases":
            norms.append(engine.get_global_grad_norm())
        losses.append(engine.reduce(total))
    return {"losses": losses, "norms": norms, **cases.told(engine)}


def evaluation(config: dict[str, Any]) -> dict[str, Any]:
    """eval_batch in several ways, and what training does afterwards."""
    engine = cases.make_engine(config, dropout=0.2)
    whole = models.build(cases.Gpt, dropout=0.2).eval()
    count, rank = engine.gradient_accumulation_steps, engine.data_parallel_rank
    with torch.no_grad():
        losses = [whole(*b) for d in range(engine.data_parallel_world_size) for b in batches(5, count, d)]
    found = {"wanted": torch.stack(losses).mean().item()}
    found["eval_batch"] = engine.eval_batch(batches(5, count, rank)).item()
    with torch.inference_mode():
        found["inference"] = engine.eval_batch(batches(5, count, rank)).item()
    found["training"] = all(m.training for m in engine.module.modules())
    loss, logits = engine.eval_batch(batches(5, count, rank), return_logits=True)
    found["with logits"] = loss.item()
    found["logits"] = None if logits is None else [tuple(x.shape) for x in logits]
    found["step"] = engine.train_batch(batches(0, count, rank)).isfinite().item()
    return found


def two_engines(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All alive at once, trained in turn."""
    engines = [cases.make_engine(config) for config in configs]
    runs: list[dict[str, Any]] = [{"losses": [], "norms": []} for _ in engines]
    for step in range(3):
        for engine, run in zip(engines, runs, strict=True):
            made = cases.train_engine(engine, 1, step)
            run["losses"] += made["losses"]
            run["norms"] += made["norms"]
    return [run | cases.told(engine) for engine, run in zip(engines, runs, strict=True)]


def offloaded(config: dict[str, Any]) -> dict[str, Any]:
    engine = cases.make_engine(config)
    first = cases.train_engine(engine, 2)
    engine.offload_states()
    said = message(
        lambda: engine.train_batch(batches(2, engine.gradient_accumulation_steps, engine.data_parallel_rank))
    )
    engine.reload_states()
    second = cases.train_engine(engine, 2, 2)
    return {
        "losses": first["losses"] + second["losses"],
        "norms": first["norms"] + second["norms"],
        "said": said,
    } | cases.told(engine)


def init_context(config: dict[str, Any]) -> str:
    def make() -> None:
        with zerolite.zero.Init(config_dict_or_path=config):
            model = models.build(cases.Gpt)
        zerolite.initialize(model, config)

    return message(make)


def dropouts(config: dict[str, Any], steps: int = 20, how: str = "", dropout: float = 0.3) -> dict[str, Any]:
    """With dropout inside and outside of what is cut."""
    engine = cases.make_engine(config, dropout=dropout)
    if how:
        for block in engine.module.blocks:
            checkpointed(block, how)
    return cases.train_engine(engine, steps)


def checkpointed(block: nn.Module, how: str) -> None:
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    forward = block.forward
    block.forward = lambda x: torch_checkpoint(forward, x, use_reentrant=how == "reentrant")  # type: ignore[method-assign]


def printed(config: dict[str, Any], steps: int = 4) -> dict[str, Any]:
    torn = io.StringIO()
    with contextlib.redirect_stdout(torn):
        engine = cases.make_engine(config)
        cases.train_engine(engine, steps)
        writes = engine.step_log is not None
        engine = None
        gc.collect()
    return {"lines": torn.getvalue(), "writes": writes}


# -------------------------------------------------------------------- Hugging Face


def hugging_face(family: str, tied: bool = True) -> nn.Module:
    """Small, four layers; heads that two and four ranks can share."""
    import transformers

    common = {"vocab_size": 37, "tie_word_embeddings": tied, "use_cache": False}
    if family == "GPT2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(n_embd=16, n_layer=4, n_head=4, n_positions=16, **dropout, **common)
        return transformers.GPT2LMHeadModel(config)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "max_position_embeddings": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, **common)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def tokens(step: int, micro: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * step + 1009 * micro + rank)
    ids = torch.randint(0, 37, (2, 8), generator=generator)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def train_hugging_face(config: dict[str, Any], family: str, tied: bool = True, steps: int = 3) -> dict[str, Any]:
    torch.manual_seed(7)
    whole = hugging_face(family, tied)
    model = copy.deepcopy(whole)
    engine = zerolite.initialize(model, config)
    optimizer = plain_optimizer(whole, config, {})
    count, data = engine.gradient_accumulation_steps, engine.data_parallel_world_size
    result: dict[str, Any] = {
        key: [] for key in ("losses", "norms", "lrs", "wanted_losses", "wanted_norms", "wanted_lrs")
    }
    for step in range(steps):
        own = (tokens(step, micro, engine.data_parallel_rank) for micro in range(count))
        result["losses"].append(engine.train_batch(own).item())
        result["norms"].append(engine.get_global_grad_norm())
        optimizer.zero_grad()
        losses = []
        for rank in range(data):
            for micro in range(count):
                loss = whole(**tokens(step, micro, rank)).loss
                (loss / (data * count)).backward()
                losses.append(loss.detach())
        result["wanted_losses"].append(torch.stack(losses).mean().item())
        result["wanted_norms"].append(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.4).item())
        optimizer.step()
    return result | cases.told(engine) | {"wanted": {n: p.detach().clone() for n, p in whole.named_parameters()}}
