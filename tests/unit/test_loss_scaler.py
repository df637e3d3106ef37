"""The state machine of the loss scale."""

from __future__ import annotations

import math

import pytest

from zerolite.precision.loss_scaler import MAX_SCALE, LossScaler

G, O = False, True  # noqa: E741 - a good step, an overflow


def scales(scaler: LossScaler, steps: list[bool]) -> list[float]:
    return [scaler.update(overflow).after for overflow in steps]


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        # Doubles after `window` good steps in a row, and after as many again.
        ({"window": 3, "hysteresis": 1}, [G] * 7, [16, 16, 32, 32, 32, 64, 64]),
        # An overflow halves at once without hysteresis and starts the window anew.
        ({"window": 2, "hysteresis": 1}, [G, O, G, G, O, O, G, G], [16, 8, 8, 16, 8, 4, 4, 8]),
        # Hysteresis 3: two overflows are used up, the third one halves and so does each one after it.
        ({"window": 99, "hysteresis": 3}, [O, O, O, O], [16, 16, 8, 4]),
        # Good steps between overflows do not refill it ...
        ({"window": 99, "hysteresis": 3}, [O, G, O, G, O], [16, 16, 16, 16, 8]),
        # ... unless consecutive_hysteresis says so.
        ({"window": 99, "hysteresis": 3, "consecutive_hysteresis": True},
         [O, O, G, O, O, G, O, O, O, O, G, O, O, O], [16, 16, 16, 16, 16, 16, 16, 16, 8, 4, 4, 4, 4, 2]),
        # Growth refills it; an overflow that is only used up starts the window anew, too.
        ({"window": 2, "hysteresis": 2}, [O, O, G, G, O, G, O, G, O], [16, 8, 8, 16, 16, 16, 8, 8, 4]),
        ({"window": 2, "hysteresis": 2}, [O, G, G, O, O], [16, 16, 32, 32, 16]),
        # Never below the minimum, also where a halving would jump over it.
        ({"window": 99, "hysteresis": 1, "min_scale": 3.0}, [O] * 5, [8, 4, 3, 3, 3]),
        ({"window": 1, "hysteresis": 1}, [G, O, O, G], [32, 16, 8, 16]),
        ({"dynamic": False, "window": 1, "hysteresis": 1}, [G, G, O, O, O], [16] * 5),
    ],
)  # fmt: skip
def test_the_scale_follows_overflows(options: dict, steps: list[bool], expected: list[float]) -> None:
    assert scales(LossScaler(16.0, **options), steps) == expected


def test_follows_deepspeed_but_for_one_step_of_the_first_window() -> None:
    """The literal scales of DeepSpeed 0.19.8's DynamicLossScaler, initial 2**4, window 2, hysteresis 2, minimum 1.

    It counts the first good step after an overflow, and the very first one, as step 0 of the window. With one good step
    put in at these places for DeepSpeed, the scales agree at every other step.
    """
    #         start         used up     halved at once  grows, refilled    used up, halved, at the minimum
    theirs = [(G, 16), (G, 16), (G, 32), (O, 32), (O, 16), (O, 8), (G, 8), (G, 8), (G, 16), (G, 16), (G, 32), (O, 32)]
    theirs += [(O, 16), (O, 8), (O, 4), (O, 2), (O, 1)]
    extra = {0, 6}  # the first step, and the first good one after an overflow
    steps = [overflow for i, (overflow, _) in enumerate(theirs) if i not in extra]
    expected = [scale for i, (_, scale) in enumerate(theirs) if i not in extra]
    assert scales(LossScaler(16.0, window=2, hysteresis=2, min_scale=1.0), steps) == expected


def test_growth_stops_where_fp32_ends() -> None:
    scaler = LossScaler(MAX_SCALE / 2, window=1)
    assert scales(scaler, [G, G, G, O, O]) == [MAX_SCALE] * 4 + [MAX_SCALE / 2]


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_state_continues_a_run(cut: int) -> None:
    options = {"window": 2, "hysteresis": 2}
    steps = [O, O, G, G, O, G, O, G, O]
    first, second = LossScaler(16.0, **options), LossScaler(2.0, **options)
    before = scales(first, steps[:cut])
    second.load_state_dict(first.state_dict())
    assert before + scales(second, steps[cut:]) == [16, 8, 8, 16, 16, 16, 8, 8, 4]


def test_configuration_wins_over_a_loaded_state() -> None:
    state = {"scale": 0.25, "good_steps": 7, "hysteresis_left": 5}
    scaler = LossScaler(16.0, window=3, hysteresis=2, min_scale=1.0)
    scaler.load_state_dict(state)
    assert scales(scaler, [G, O, O]) == [2.0, 2.0, 1.0]
    scaler.load_state_dict({**state, "scale": 8.0})
    assert scales(scaler, [O, O]) == [8.0, 4.0]
    static = LossScaler(16.0, dynamic=False)
    static.load_state_dict(state)
    assert static.scale == 16.0


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"scale": math.nan}, "loss scale"), ({"scale": math.inf}, "loss scale"), ({"scale": 0.0}, "loss scale"),
     ({"scale": "16"}, "loss scale"), ({"good_steps": -1}, "good_steps"), ({"good_steps": 1.5}, "good_steps"),
     ({"hysteresis_left": 0}, "hysteresis_left"), ({"hysteresis_left": True}, "hysteresis_left"),
     ({"surplus": 1}, "keys")],
)  # fmt: skip
def test_refuses_a_broken_state_and_keeps_its_own(changes: dict, word: str) -> None:
    scaler = LossScaler(16.0)
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=word):
        scaler.load_state_dict({**before, **changes})
    assert scaler.state_dict() == before
    with pytest.raises(ValueError, match="keys"):
        scaler.load_state_dict({"scale": 1.0})


@pytest.mark.parametrize(
    ("options", "words"),
    [({"scale": 0.0}, "scale must be"), ({"scale": -1.0, "dynamic": False}, "scale must be"),
     ({"scale": math.inf}, "scale must be"), ({"scale": 2.0**127}, "up to 2\\*\\*126"),
     ({"scale": 2.0, "min_scale": 4.0}, "fp16.min_loss_scale"), ({"window": 0}, "window"), ({"window": 1.5}, "window"),
     ({"hysteresis": 0}, "hysteresis"), ({"min_scale": 0.0}, "min_scale"),
     ({"window": 0, "hysteresis": 0}, "window.*hysteresis")],
)  # fmt: skip
def test_refuses_settings_without_sense(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LossScaler(**options)
