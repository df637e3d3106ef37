"""Launches of kernels: what they check and when, tensors without memory, and the same bits without kernels."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ops.cases import BF16, assert_same, needs_fma, numbers, rule
from zerolite.ops import library, reference
from zerolite.ops.call import COLUMNS, SGD, SquaresCall, UpdateCall
from zerolite.ops.launches import SquaresLaunch, UpdateLaunch

STATES = {"adamw": 2, "lion-decay": 1, "adagrad": 1, "sgd-nesterov": 1}
UPDATES = pytest.mark.parametrize("name", STATES)
NUMELS, TABLE = (40, 3, 17), [[0, 0, 30, 0], [2, 1, 16, 1], [0, 30, 10, 1]]


def _arguments(name: str) -> dict[str, Any]:
    """Two tensors updated in three segments with two rows, one without a segment; keys are those of UpdateCall."""
    of = rule(name)
    lists = [[numbers(n, seed=n + kind, special=0.0) for n in NUMELS] for kind in range(2 + STATES[name])]
    return {
        "params": lists[0],
        "grads": [g.bfloat16() for g in lists[1]],
        "states": [[s.abs() for s in state] for state in lists[2:]],
        "outs": [torch.zeros(n, dtype=BF16) for n in NUMELS],
        "table": torch.tensor(TABLE),
        "rows": torch.tensor([of.row(1), of.row(9)]),
        "factor": torch.tensor(0.25),
        "skip": torch.tensor(0.0),
    }


def _launch(name: str, arguments: dict[str, Any]) -> UpdateLaunch:
    return UpdateLaunch(rule(name).rule.number, arguments["table"])


def _run(launch: UpdateLaunch, arguments: dict[str, Any]) -> None:
    launch.run(**{key: value for key, value in arguments.items() if key != "table"})


def _call(name: str, arguments: dict[str, Any]) -> None:
    _run(_launch(name, arguments), arguments)


def _changed(arguments: dict[str, Any]) -> list[torch.Tensor]:
    return [tensor for kind in (arguments["params"], *arguments["states"], arguments["outs"]) for tensor in kind]


def _squares_arguments() -> tuple[Any, ...]:
    return torch.ones(2, dtype=torch.float64), [numbers(n, seed=n, special=0.0) for n in NUMELS], torch.tensor(TABLE)


# ------------------------------------------------------------------- what they do


@UPDATES
@needs_fma
def test_launches_are_the_reference(name: str) -> None:
    got, expected, before = (_arguments(name) for _ in range(3))
    _call(name, got)
    reference.update(UpdateCall(rule(name).rule.number, *expected.values()))
    assert_same(_changed(got), _changed(expected))
    assert_same(got["grads"], before["grads"])
    differ = [not torch.equal(a, b) for a, b in zip(_changed(got), _changed(before), strict=True)]
    assert sum(differ) == 2 * (2 + STATES[name])


def test_squares_follow_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, values, table = _squares_arguments()
    launch = SquaresLaunch(table)
    for _ in range(3):
        expected = sums.clone()
        values = [value + 1 for value in values]
        launch.run(sums, values)
        reference.squares(SquaresCall(expected, values, table))
        assert torch.allclose(sums, expected, rtol=1e-15)
    with pytest.raises(ValueError, match="expected every segment"):
        launch.run(sums, [values[0][:9], *values[1:]])


def test_launches_keep_no_gradients() -> None:
    """Their memory is free between two steps."""
    arguments = _arguments("adamw")
    launch, squares = _launch("adamw", arguments), SquaresLaunch(arguments["table"])
    _run(launch, arguments)
    squares.run(torch.zeros(2, dtype=torch.float64), arguments["grads"])
    gradients = [weakref.ref(gradient) for gradient in arguments.pop("grads")]
    assert [gradient() for gradient in gradients] == [None] * len(NUMELS)


@UPDATES
def test_fake_tensors_are_checked_and_not_computed(name: str) -> None:
    arguments = _arguments(name)
    with FakeTensorMode() as mode:
        fake = {key: _fake(mode, value) for key, value in arguments.items()}
        _call(name, fake)
        with pytest.raises(ValueError, match="expected grads\\[1\\] contiguous"):
            _call(name, {**fake, "grads": [fake["grads"][0], fake["grads"][0], fake["grads"][2]]})
        with pytest.raises(ValueError, match="expected a contiguous int64 table"):
            _call(name, {**fake, "table": fake["table"].int()})


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, list):
        return [_fake(mode, one) for one in value]
    return value if value is None or isinstance(value, torch._subclasses.FakeTensor) else mode.from_tensor(value)


def test_autograd_notices_an_update() -> None:
    """A weight that was updated after a forward pass that saved it: backward says so, as after torch's optimizers."""
    weight = torch.nn.Parameter(torch.ones(4))
    out = (weight * weight).sum()
    arguments = _arguments("sgd-nesterov")
    table, rows = torch.tensor([[0, 0, 4, 0]]), arguments["rows"]
    with torch.no_grad():
        UpdateLaunch(SGD, table).run([weight], [torch.ones(4)], [[torch.zeros(4)]], [], rows)
    assert bool((weight != 1).all())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_a_kernel_that_fails_keeps_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, launch = _arguments("adamw"), _launch("adamw", _arguments("adamw"))
    _run(launch, arguments)
    assert launch._kernels is not None

    def fail(call: UpdateCall) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(type(launch._kernels), "update", lambda self, call: fail(call))
    gradients = [weakref.ref(grad) for grad in arguments["grads"]]
    with pytest.raises(RuntimeError, match="the device is lost"):
        _run(launch, arguments)
    arguments["grads"] = ()
    assert [ref() for ref in gradients] == [None] * 3


# ------------------------------------------------------------------- what they refuse

Change = Callable[[dict[str, Any]], dict[str, Any]]
NO_TABLE = r"expected a contiguous int64 table \[segments, 4\]"
NO_ROWS = rf"expected contiguous fp32 rows \[rows, {COLUMNS}\]"
REFUSED: dict[str, tuple[Change, str]] = {  # the rules take turns, and the first one has two states
    # These would be read and written past their ends.
    "states of two dtypes": (lambda a: {"states": [[s.half() for s in a["states"][0]], a["states"][1]]}, "float16"),
    "params in float64": (
        lambda a: {"params": [p.double() for p in a["params"]]},
        "expected params of torch.float32 or torch.bfloat16 or torch.float16, got torch.float64",
    ),
    "too few grads": (lambda a: {"grads": a["grads"][:2]}, "expected as many grads as params, 3, got 2"),
    "short grads": (
        lambda a: {"grads": [a["grads"][0][:39], *a["grads"][1:]]},
        r"expected grads\[0\] contiguous, .* with the 40 elements of params\[0\], got torch.bfloat16 \[39\] on cpu",
    ),
    "grads elsewhere": (lambda a: {"grads": [g.to("meta") for g in a["grads"]]}, r"grads\[0\] contiguous.* on meta"),
    "outs in fp32": (
        lambda a: {"outs": [o.float() for o in a["outs"]]},
        "expected outs of torch.bfloat16 or torch.float16, got torch.float32",
    ),
    "a table of 3 columns": (lambda a: {"table": a["table"][:, :3].contiguous()}, rf"{NO_TABLE}.*got .*\[3, 3\]"),
    "rows with gaps": (lambda a: {"rows": a["rows"].t().contiguous().t()}, rf"{NO_ROWS}.*with gaps"),
    "a factor elsewhere": (lambda a: {"factor": a["factor"].to("meta")}, "expected factor to be one .*on meta"),
    "a skip of int64": (lambda a: {"skip": torch.tensor(1)}, "expected skip to be one fp32 number.*int64"),
}


@pytest.mark.parametrize(("name", "case"), list(zip(itertools.cycle(STATES), REFUSED, strict=False)))
def test_wrong_arguments_are_refused(name: str, case: str) -> None:
    change, sentence = REFUSED[case]
    arguments, before = _arguments(name), _arguments(name)
    with pytest.raises(ValueError, match=sentence):
        _call(name, {**arguments, **change(arguments)})
    assert_same(_changed(arguments), _changed(before))


END = (1 << 63) - 1


@pytest.mark.parametrize(
    "segment",
    [[0, 0, 41, 0], [0, 40, 1, 0], [0, 41, 0, 0], [0, -1, 2, 0], [0, 3, -1, 0], [3, 0, 1, 0], [-1, 0, 1, 0],
     [0, 0, 1, 2], [0, 0, 1, -1], [0, END, END, 0], [0, 1, END, 0]],
    ids=str,
)  # fmt: skip
def test_segments_outside_are_refused(segment: list[int]) -> None:
    """Before anything is changed: no other segment is done either."""
    arguments, before = _arguments("adamw"), _arguments("adamw")
    arguments["table"] = torch.tensor([[0, 0, 30, 0], segment])
    with pytest.raises((RuntimeError, ValueError), match="segment"):
        _call("adamw", arguments)
    assert_same(_changed(arguments), _changed(before))
    sums, values, _ = _squares_arguments()
    with pytest.raises((RuntimeError, ValueError), match="segment"):
        SquaresLaunch(arguments["table"]).run(sums, values)
    assert sums.tolist() == [1.0, 1.0]


ONES, ONE_SEGMENT, SUM = torch.ones(3), torch.tensor([[0, 0, 3, 0]]), torch.zeros(1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("sums", "values", "table", "sentence"),
    [
        (SUM.float(), [ONES], ONE_SEGMENT, "expected sums to be contiguous float64"),
        (SUM, [ONES, ONES.half()], ONE_SEGMENT, r"expected values\[1\] contiguous, torch.float32"),
        (SUM, [ONES.int()], ONE_SEGMENT, "expected values of torch.float32 .*got torch.int32"),
        (SUM, [ONES], ONE_SEGMENT[:, :3].contiguous(), "expected a contiguous int64 table"),
    ],
)
def test_wrong_arguments_of_squares_are_refused(sums: Any, values: Any, table: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SquaresLaunch(table).run(sums, values)


# ------------------------------------------------------------------- without kernels


def _results() -> tuple[list[torch.Tensor], torch.Tensor]:
    every = {name: _arguments(name) for name in STATES}
    for name, arguments in every.items():
        _call(name, arguments)
    sums, values, table = squares = _squares_arguments()
    SquaresLaunch(table).run(sums, values)
    return [tensor for arguments in every.values() for tensor in _changed(arguments)], squares[0]


@needs_fma
def test_without_kernels_the_reference_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    (expected, squares), cpu = _results(), torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setenv("ZEROLITE_KERNELS", "0")
        library._load.cache_clear()
        assert library.kernels_for(cpu) is None and "ZEROLITE_KERNELS" in (library.unavailable_reason(cpu) or "")
        results, sums = _results()
    library._load.cache_clear()
    assert_same(results, expected)
    assert torch.allclose(sums, squares, rtol=1e-15)


@pytest.mark.parametrize("other", [torch.zeros(40, dtype=BF16), torch.zeros(10)], ids=["dtype", "size"])
def test_other_memory_in_the_same_tensor_is_checked(other: torch.Tensor) -> None:
    """The kernel would write past its end."""
    arguments = _arguments("sgd-nesterov")
    launch = _launch("sgd-nesterov", arguments)
    _run(launch, arguments)
    arguments["params"][0].data = other
    with pytest.raises(ValueError, match="expected"):
        _run(launch, arguments)
