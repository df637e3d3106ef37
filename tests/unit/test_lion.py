"""Lion against a plain loop."""

from __future__ import annotations

import pytest
import torch

from zerolite.ops import Lion

SHAPES = [(), (1,), (7,), (3, 5), (2, 1, 33), (0,), (4, 0)]


def plain_lion(p, g, m, lr, beta1, beta2, weight_decay):
    """Algorithm 2 of the paper for one tensor: the new parameter and the new momentum."""
    change = torch.sign(torch.lerp(m, g, 1 - beta1)) * -lr
    if weight_decay:
        change = torch.add(change, p, alpha=-lr * weight_decay)
    return p + change, torch.lerp(m, g, 1 - beta2)


def gradients(shapes, dtype, step):
    generator = torch.Generator().manual_seed(step)
    grads = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    for grad in grads:
        if grad.numel() > 2:
            grad.view(-1)[1] = 0.0  # sign(0) is 0: no step
    return grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
def test_equals_the_plain_loop_to_the_bit(dtype, weight_decay):
    params = [torch.nn.Parameter(t) for t in gradients(SHAPES, dtype, step=99)]
    expected = [(p.detach().clone(), torch.zeros_like(p)) for p in params]
    # These factors are exact in every dtype: 16-bit foreach kernels round the scalar itself, plain ones do not.
    lr, betas = 2.0**-6, (0.875, 0.96875)
    optimizer = Lion(params, lr=lr, betas=betas, weight_decay=weight_decay)
    for step in range(5):
        grads = gradients(SHAPES, dtype, step)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        expected = [plain_lion(p, g, m, lr, *betas, weight_decay) for (p, m), g in zip(expected, grads, strict=True)]
        for p, grad, (want, momentum) in zip(params, grads, expected, strict=True):
            assert torch.equal(optimizer.state[p]["exp_avg"], momentum)
            assert torch.equal(p.detach(), want)
            assert torch.equal(p.grad, grad), "gradients stay as they are"


def test_numbers_by_hand():
    p = torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    optimizer = Lion([p], lr=0.5, betas=(0.5, 0.75), weight_decay=0.5)
    p.grad = torch.tensor([4.0, -4.0, 0.0])
    optimizer.step()  # p = 0.75 - 0.5 * sign(g / 2); m = g / 4
    assert p.tolist() == [0.25, 1.25, 0.75]
    assert optimizer.state[p]["exp_avg"].tolist() == [1.0, -1.0, 0.0]
    p.grad = torch.tensor([-0.5, 2.0, 1.0])
    optimizer.step()  # c = (m + g) / 2 = 0.25, 0.5, 0.5: the momentum outvotes the first gradient
    assert p.tolist() == [0.25 * 0.75 - 0.5, 1.25 * 0.75 - 0.5, 0.75 * 0.75 - 0.5]
    assert optimizer.state[p]["exp_avg"].tolist() == [0.625, -0.25, 0.25]


def test_groups_and_mixed_dtypes_keep_their_own_settings():
    one = torch.nn.Parameter(torch.zeros(3))
    two = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    three = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = Lion([{"params": [one, two]}, {"params": [three], "lr": 0.25}], lr=0.5)
    for p in (one, two, three):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [p.tolist() for p in (one, two, three)] == [[-0.5] * 3, [-0.5] * 3, [-0.25] * 3]
    assert [optimizer.state[p]["exp_avg"].dtype for p in (one, two, three)] == [p.dtype for p in (one, two, three)]


def test_a_parameter_without_gradient_is_left_alone():
    used, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = Lion([used, unused], lr=0.5, weight_decay=0.1)
    used.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(unused, torch.ones(3)) and unused not in optimizer.state


def test_state_dict_continues_a_run():
    def run(steps, state=None):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 9))
        optimizer = Lion([p], lr=0.01)
        if state is not None:
            optimizer.load_state_dict(state[0])
            p.data.copy_(state[1])
        for step in steps:
            (p.grad,) = gradients([(9,)], torch.float32, step)
            optimizer.step()
        return optimizer.state_dict(), p.detach().clone()

    whole, halves = run(range(6)), run(range(3, 6), run(range(3)))
    assert torch.equal(whole[1], halves[1])
    assert torch.equal(whole[0]["state"][0]["exp_avg"], halves[0]["state"][0]["exp_avg"])


def test_closure_is_evaluated_with_gradients():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = Lion([p], lr=0.5)

    def closure():
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert p.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"betas": (0.9,)}, "betas"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (-0.1, 0.9)}, "betas"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_refuses_values_out_of_range(options, word):
    with pytest.raises(ValueError, match=word):
        Lion([torch.nn.Parameter(torch.zeros(1))], **options)


def test_refuses_complex_parameters_and_sparse_gradients():
    with pytest.raises(ValueError, match="complex64"):
        Lion([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = Lion(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="dense"):
        optimizer.step()
