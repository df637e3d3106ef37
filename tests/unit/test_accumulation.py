import pytest

from zerolite.zero.accumulation import GradAccumulation


def run_engine_loop(window, micro_batches):
    """DeepSpeed's loop; gives for each micro-batch (backward reduces, step closes)."""
    answers = []
    for _ in range(micro_batches):
        reduces = window.next_backward_closes()
        window.on_backward(scaled=True)
        closes = window.on_engine_step()
        answers.append((reduces, closes))
        if closes:
            window.reset()
    return answers


@pytest.mark.parametrize("size", [1, 3])
def test_engine_loop_closes_every_size_micro_batches(size):
    expected = [(i % size == size - 1,) * 2 for i in range(3 * size)]
    assert run_engine_loop(GradAccumulation(size), 3 * size) == expected


def test_is_boundary_before_and_after_the_backward_of_a_micro_batch():
    window = GradAccumulation(2)
    assert not window.is_boundary()
    window.on_backward(True)
    assert not window.is_boundary()
    assert window.on_engine_step() is False
    assert window.is_boundary()
    window.on_backward(True)
    assert window.is_boundary()
    assert window.on_engine_step() is True


def test_two_engine_backwards_a_micro_batch_reduce_in_the_last_one_only():
    window = GradAccumulation(3)
    answers = []
    for _ in range(3):
        for _ in range(2):
            answers.append(window.next_backward_closes())
            window.on_backward(scaled=True)
        answers.append(("step", window.is_boundary(), window.on_engine_step()))
    no, yes = ("step", False, False), ("step", True, True)
    assert answers == [False, False, no, False, False, no, True, True, yes]


def test_no_sync_defers_reduction_but_not_the_step():
    window = GradAccumulation(1)
    window.sync_disabled += 1
    assert not window.next_backward_closes()
    window.on_backward(True)
    window.sync_disabled -= 1
    assert window.next_backward_closes() and window.on_engine_step()


def test_forced_boundary_rules_until_taken_back():
    window = GradAccumulation(4)
    window.force_boundary(True)
    window.on_backward(True)
    assert window.is_boundary() and window.next_backward_closes() and window.on_engine_step()
    window.reset()
    window.force_boundary(False)
    for _ in range(9):
        window.on_backward(True)
        assert not window.on_engine_step()
    window.force_boundary(None)
    assert window.is_boundary()


@pytest.mark.parametrize("contained", [1, 3])
def test_flush_factor_restores_the_mean(contained):
    window = GradAccumulation(4)
    for _ in range(contained):
        window.on_backward(True)
        window.on_engine_step()
    assert window.flush_factor() == 4 / contained


def test_flush_leaves_alone_what_the_user_scaled():
    window = GradAccumulation(4)
    window.on_backward(scaled=False)
    assert window.flush_factor() == 1.0
