"""One loop, written once, over an engine and in plain PyTorch: the cases of docs/drop-in.md.

A case belongs to one row of the table and is a function of a :class:`Run`. It runs with plain PyTorch first, each rank
on its own data and gradients averaged over ranks by hand (or by DDP), then with an engine at each stage. The outcome is
``works`` if parameters and whatever the case has seen are the same, ``raises`` if the engine refused with the words
that help, and a sentence otherwise. No case knows what its cell says.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from tests.toolkit.configs import PARTITIONED, config
from tests.toolkit.training import snapshot
from zerolite.zero import GatheredParameters

HEADER = ["what a loop does", "0", "1", "2", "3", "instead"]
STAGES = (0, 1, 2, 3)
STEPS = 3
SGD: tuple[str, dict[str, Any]] = ("SGD", {"lr": 0.0625})  # lr × gradient is exact: no rounding but that of the sum

# Three ranks: a sum of three terms and a division by three, each rounded once, in another order or by another product
# than plain PyTorch's. Gradients and weights are of order 1, three steps of lr 1/16: a few units of 6e-8.
ROUNDING = 5e-7
# One more or one less rounding to bf16, of a gradient or of a weight.
ROUNDED = 2.0**-7


def read_table() -> dict[str, list[str]]:
    """The cells of docs/drop-in.md by row: what stages 0 to 3 do, and what to do instead."""
    rows: dict[str, list[str]] = {}
    for line in (models.ROOT / "docs" / "drop-in.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and not set(line) <= set("|- ") and cells != HEADER:
            assert len(cells) == len(HEADER), line
            assert cells[0] not in rows, f"two rows {cells[0]!r}"
            rows[cells[0]] = cells[1:]
    return rows


ROWS = read_table()
Function = Callable[..., None]


@dataclass(frozen=True)
class Case:
    """A function that runs for a row.

    Attributes:
        variants: values of the function's second argument, all of which must come out alike.
        settings: of stage 3 (see PARTITIONED).
        error: what a refusal is.
        words: what it says.
        close: the largest difference from plain PyTorch; 0.0: the same bits (on one and two ranks).
        reordered: whether several contributions to a gradient are averaged over ranks one by one, so that on two ranks
            they are added in another order than plain PyTorch's, which adds them before it averages.
        bf16: as ``close``, for runs in bf16.
        given: further arguments of the function.
        name: of the row's test.
    """

    function: Function
    variants: Sequence[Any] = ()
    words: Sequence[str] = ()
    error: type[BaseException] | tuple[type[BaseException], ...] = RuntimeError
    settings: Sequence[str] = ("moving", "defaults")
    close: float = 0.0
    reordered: bool = False
    bf16: float = 0.0
    given: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    def run(self, run: Run, *variant: Any) -> None:
        self.function(run, *variant, **self.given)


CASES: dict[str, Case] = {}  # by row


def case(row: str, variants: Sequence[Any] = (), **more: Any) -> Callable[[Function], Function]:
    """Register a function for the row that begins with ``row``; one function may stand for several rows.

    more: the other attributes of :class:`Case`; what is none of them is an argument of the function. The name is the
    function's, followed by each flag that it is given and by the value of any other argument.
    """
    given = {key: more.pop(key) for key in list(more) if key not in Case.__dataclass_fields__}

    def register(function: Function) -> Function:
        (found,) = [known for known in ROWS if known == row] or [known for known in ROWS if known.startswith(row)]
        assert found not in CASES, f"two cases for {found!r}"
        name = "_".join([function.__name__, *(key if value is True else value for key, value in given.items())])
        CASES[found] = Case(function, variants, **{"given": given, "name": name, **more})
        return function

    return register


def between(row: str, *case_arguments: Any, **more: Any) -> Callable[[Function], Function]:
    """Register a function that runs after a first step; two more follow."""

    def register(function: Function) -> Function:
        @functools.wraps(function)
        def run_between(run: Run, *variant: Any, **given: Any) -> None:
            run.start()
            run.train(1)
            function(run, *variant, **given)
            run.train(2, start=1)

        case(row, *case_arguments, **more)(run_between)
        return function

    return register


def each_step(row: str, *case_arguments: Any, **more: Any) -> Callable[[Function], Function]:
    """Register a function that is a step; it gets the step's number after the run."""

    def register(function: Function) -> Function:
        @functools.wraps(function)
        def run_steps(run: Run, *variant: Any, **given: Any) -> None:
            run.start()
            for step in range(STEPS):
                function(run, step, *variant, **given)

        case(row, *case_arguments, **more)(run_steps)
        return function

    return register


class Run:
    """The two sides of a comparison behind one face. stage None: plain PyTorch."""

    def __init__(self, stage: int | None, setting: str = "") -> None:
        self.stage, self.setting = stage, setting
        self.plain = stage is None
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.seen: list[Any] = []
        self.module: Any = None
        self.optimizer: Any = None
        self.engine: Any = None
        self._masters: dict[str, nn.Parameter] = {}

    # ---------------------------------------------------------------- start

    def start(
        self,
        kind: Callable[[], nn.Module] = models.Mlp,
        *,
        optimizer: Any = SGD,
        own: Callable[[Any], Any] | None = None,
        precision: str = "fp32",
        accumulation: int = 1,
        zero: dict[str, Any] | None = None,
        clip: float = 0.0,
        ddp: dict[str, Any] | None = None,
        loss: Callable[[Any, Any], Tensor] = models.square_loss,
        batch: Callable[..., Any] = models.float_batch,
        more: dict[str, Any] | None = None,
        **initialize: Any,
    ) -> None:
        """A model of ``kind`` with the weights of seed 7, and what trains it.

        optimizer: name and parameters; or, for an engine only, a class or a factory. own: makes an optimizer of the
        user's own over a model, given to the engine instead. ddp: the plain side is a DistributedDataParallel with
        these arguments. more: further keys of the config. initialize: further arguments of zerolite.initialize.
        """
        model = models.build(kind)
        self.accumulation, self.micros, self.precision = accumulation, 0, precision
        self._loss, self._batch = loss, batch
        self.initial = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.own: Any = own(model) if own is not None else None
        if self.plain:
            self._start_plain(model, optimizer, ddp)
            return
        assert self.stage is not None
        named = optimizer if isinstance(optimizer, tuple) else SGD
        settings = config(self.stage, precision, accumulation, clip, named, self.zero(zero))
        settings |= {"train_micro_batch_size_per_gpu": 4, **(more or {})}
        if self.own is not None or named is not optimizer:
            del settings["optimizer"]
            initialize["optimizer"] = optimizer if self.own is None else self.own
        self.engine = zerolite.initialize(model, settings, **initialize)
        self.module, self.optimizer = self.engine.module, self.engine.optimizer

    def zero(self, more: dict[str, Any] | None = None) -> dict[str, Any]:
        """The zero_optimization section of this run's setting. At stages 1 and 2 updated values are on their way
        between steps."""
        return (PARTITIONED.get(self.setting, {}) if self.stage == 3 else {}) | (more or {})

    def _start_plain(self, model: nn.Module, optimizer: tuple[str, dict[str, Any]], ddp: dict[str, Any] | None) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.module = model
        self._called: nn.Module = model
        self._ddp = ddp is not None and self.world > 1
        if self.precision == "bf16":
            self._masters = {name: nn.Parameter(p.detach().clone()) for name, p in trained.items()}
            model.to(torch.bfloat16)
        if self._ddp:
            assert ddp is not None
            self._called = nn.parallel.DistributedDataParallel(model, **ddp)
        self.optimizer = self.own
        if self.own is None:
            self.optimizer = getattr(torch.optim, optimizer[0])((self._masters or trained).values(), **optimizer[1])

    # ---------------------------------------------------------------- the loop

    def __call__(self, *inputs: Any) -> Any:
        """The engine's forward, or the module's as the engine does it."""
        if self.engine is not None:
            return self.engine(*inputs)
        if not self._masters:
            return self._called(*inputs)
        outputs = self._called(*(i.to(torch.bfloat16) if torch.is_floating_point(i) else i for i in inputs))
        if isinstance(outputs, tuple):  # with a loss in it
            return tuple(output if output.dim() else output.float() for output in outputs)
        return outputs.float()

    def batch(self, step: int, micro: int = 0) -> Any:
        """This rank's."""
        return self._batch(step, micro, self.rank)

    def loss(self, step: int, micro: int = 0) -> Tensor:
        return self._loss(self, self.batch(step, micro))

    def backward(self, loss: Tensor, **more: Any) -> None:
        if self.engine is not None:
            self.engine.backward(loss, **more)
        else:
            (loss / self.accumulation).backward(**more)

    def step(self) -> None:
        """engine.step(), and what it means."""
        if self.engine is not None:
            self.engine.step()
            return
        self.micros += 1
        if self.micros % self.accumulation == 0:
            self.torch_step()

    def torch_step(self) -> None:
        """The end of an ordinary loop."""
        self.average()
        self.optimizer.step()
        self.published()
        self.optimizer.zero_grad()

    def train(self, steps: int = STEPS, start: int = 0) -> None:
        for step in range(start, start + steps):
            self.backward(self.loss(step))
            self.step()

    def average(self) -> None:
        """The mean of p.grad over ranks, which an engine takes by itself. A gradient that some ranks do not have counts
        as zero there."""
        if not self.plain or (self._ddp and not self._masters):
            return
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        counts = torch.tensor([float(p.grad is not None) for _, p in named])
        dist.all_reduce(counts)
        for (name, parameter), count in zip(named, counts.tolist(), strict=True):
            if not count:
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            mean = rank_mean(gradient)
            if self._masters:
                self._give_master(name, parameter, mean)
            else:
                parameter.grad = mean

    def _give_master(self, name: str, parameter: Tensor, mean: Tensor) -> None:
        """The master goes on from what the parameter holds, if the user has written to that."""
        master = self._masters[name]
        with torch.no_grad():
            written = master.to(torch.bfloat16) != parameter
            master.copy_(torch.where(written, parameter.float(), master))
        master.grad = mean.float()

    @torch.no_grad()
    def published(self) -> None:
        """Compute parameters follow their masters, after an update."""
        if self._masters:
            self.module.zero_grad()
            for name, parameter in self.module.named_parameters():
                if name in self._masters:
                    parameter.copy_(self._masters[name])

    # ---------------------------------------------------------------- what is compared

    def see(self, *values: Any) -> None:
        """Values that must be the same on both sides."""
        self.seen += [copied(value) for value in values]

    def refuses(self, ways: dict[str, Callable[[], Any]], error: type[BaseException], *words: str) -> None:
        """Raises the error that all ``ways`` raise with these words; AssertionError if one does not. In plain PyTorch
        they all go through."""
        last: BaseException | None = None
        for name, way in ways.items():
            try:
                way()
            except error as raised:
                missing = [word for word in words if word not in str(raised)]
                assert not missing and not self.plain, f"{name}: {type(raised).__name__}: {raised} (without {missing})"
                last = raised
            else:
                assert self.plain, f"{name}: passed over in silence"
        if last is not None:
            raise last

    def gathered(
        self, really: bool = True, modifier_rank: int | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Whole parameters inside, if ``really``. In plain PyTorch they always are."""
        if self.plain or not really:
            return contextlib.nullcontext()
        return GatheredParameters(self.module, modifier_rank=modifier_rank, check=False)

    def parameters(self) -> dict[str, Tensor]:
        if self.engine is not None:
            return snapshot(self.engine)
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}


def rank_mean(tensor: Tensor) -> Tensor:
    """The mean over ranks, summed in rank order and in fp32 or more, in the tensor's dtype."""
    world = dist.get_world_size()
    exact = torch.promote_types(tensor.dtype, torch.float32)
    parts = [torch.empty(tensor.shape, dtype=tensor.dtype) for _ in range(world)]
    dist.all_gather(parts, tensor.contiguous())
    total = parts[0].to(exact)
    for part in parts[1:]:
        total = total + part.to(exact)
    return (total / world).to(tensor.dtype)


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(item) for item in value]
    return value


# ---------------------------------------------------------------- outcomes


def outcomes(module: str, row: str, everything: bool) -> dict[int, list[str]]:
    """Return the outcome of each variant and setting by stage: ``works``, ``raises``, or what is wrong.

    everything: all variants and settings of stage 3; otherwise two or three variants and one setting.
    """
    importlib.import_module(module)
    the_case = CASES[row]
    every = 1 if everything else len(the_case.variants) // 2 | 1  # odd: of pairs, both members change
    result: dict[int, list[str]] = {stage: [] for stage in STAGES}
    warnings.simplefilter("ignore")
    for variant in the_case.variants[::every] or (None,):
        arguments = (variant,) if the_case.variants else ()
        torch.manual_seed(0)
        wanted = Run(None)
        the_case.run(wanted, *arguments)
        reference = (wanted.parameters(), wanted.seen)
        changed = any(not torch.equal(reference[0][n], v) for n, v in wanted.initial.items() if n in reference[0])
        assert changed, f"{row}: plain PyTorch trains nothing here, so the comparison would be empty"
        del wanted
        settings = the_case.settings if everything else the_case.settings[:1]
        for stage, setting in [(0, ""), (1, ""), (2, ""), *((3, setting) for setting in settings)]:
            outcome = outcome_of(the_case, arguments, stage, setting, reference)
            where = "" if outcome in ("works", "raises") else f"{variant}, {setting}: "
            result[stage].append(where + " ".join(outcome.split())[:400])
        gc.collect()
    return result


def outcome_of(the_case: Case, arguments: tuple[Any, ...], stage: int, setting: str, reference: Any) -> str:
    torch.manual_seed(0)
    run = Run(stage, setting)
    rounds = run.world > 2 or (the_case.reordered and run.world > 1)
    close = max(the_case.close, ROUNDING if rounds else 0.0)
    try:
        the_case.run(run, *arguments)
        if run.precision == "bf16":
            close = max(close, the_case.bf16, ROUNDED if rounds else 0.0)
        same((run.parameters(), run.seen), reference, close)
    except AssertionError as error:
        return f"differs from plain PyTorch: {error}"
    except the_case.error as error:
        missing = [word for word in the_case.words if word not in str(error)]
        if the_case.words and not missing:
            return "raises"
        return f"{type(error).__name__}: {error} (without {missing or 'any words that the case expects'})"
    except Exception as error:
        return f"{type(error).__name__}: {error} (expected {the_case.error})"
    return "works"


def same(got: Any, wanted: Any, close: float, where: str = "") -> None:
    """AssertionError unless both are equal in structure and values: tensors to ``close``, or to the bit."""
    if isinstance(wanted, Tensor):
        assert isinstance(got, Tensor) and got.shape == wanted.shape, f"{where}: {got} for {wanted}"
        if close:
            torch.testing.assert_close(
                got.float(), wanted.float(), rtol=close, atol=close, msg=lambda m: f"{where}: {m}"
            )
        else:
            assert torch.equal(got.to(wanted.dtype), wanted), f"{where}: off by {(got - wanted).abs().max().item():.3g}"
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), f"{where}: {sorted(got)} for {sorted(wanted)}"
        for key, value in wanted.items():
            same(got[key], value, close, f"{where}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted), f"{where}: {len(got)} values for {len(wanted)}"
        for number, value in enumerate(wanted):
            same(got[number], value, close, f"{where}[{number}]")
    elif isinstance(wanted, float):
        assert abs(got - wanted) <= max(close, 1e-12) * max(1.0, abs(wanted)), f"{where}: {got} for {wanted}"
    else:
        assert got == wanted, f"{where}: {got} for {wanted}"
