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
