import pytest

from zerolite.zero.accumulation import GradAccumulation


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("backwards", [1, 2])
def test_the_last_backward_before_the_last_step_reduces(size, backwards):
    """DeepSpeed's loop, with one or two backwards for each micro-batch."""
    window = GradAccumulation(size)
    for number in range(3 * size):
        last = number % size == size - 1
        if number % size:
            assert window.is_boundary() == last, "before the backward, too"
        for _ in range(backwards):
            assert window.next_backward_closes() == last
            window.on_backward(scaled=True)
        assert window.is_boundary() == last
        assert window.on_engine_step() == last
        if last:
            window.reset()


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
