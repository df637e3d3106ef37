"""torch.nn.SyncBatchNorm, which trains on CUDA only, at every stage: the numbers of one process on the joint batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.cli.example_cases import load
from tests.gpu import NEEDS_GPU
from tests.toolkit.configs import PARTITIONED, SGD
from tests.toolkit.pool import Pool

pytestmark = NEEDS_GPU

STEPS, JOINT_BATCH = 4, 12
SECTIONS: dict[str, dict[str, Any]] = {
    **{str(stage): {"stage": stage} for stage in range(4)},
    "3-moving": {"stage": 3, **PARTITIONED["moving"]},
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The joint batch of a step: images [JOINT_BATCH, 1, 8, 8], whose samples are unlike each other, and digits."""
    random = torch.Generator().manual_seed(step)
    images = torch.randn(JOINT_BATCH, 1, 8, 8, generator=random) + torch.arange(JOINT_BATCH)[:, None, None, None] / 4
    return images, torch.randint(10, (JOINT_BATCH,), generator=random)


def exact_arithmetic() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def train(sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The model of examples/digits at each stage: losses, final state (buffers too), classes of its norms."""
    exact_arithmetic()
    digits = load("digits")
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    results = {}
    for name, section in sections.items():
        config = {"optimizer": {"type": SGD[0], "params": SGD[1]}, "zero_optimization": section}
        engine = zerolite.initialize(digits.build_model(on_gpu=True), config)
        batches = [[tensor[rows] for tensor in batch(step)] for step in range(STEPS)]
        losses = [digits.train_step(engine, *own).item() for own in batches]
        norms = {type(m).__name__ for m in engine.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
        results[name] = {"losses": losses, "state": engine.full_state_dict(), "norms": norms}
        del engine
    return results


def train_plain() -> dict[str, Any]:
    """One process, BatchNorm2d."""
    exact_arithmetic()
    digits = load("digits")
    torch.manual_seed(0)
    model = digits.Classifier(nn.BatchNorm2d).cuda()
    optimizer = torch.optim.SGD(model.parameters(), **SGD[1])
    losses = []
    for step in range(STEPS):
        images, labels = (tensor.cuda() for tensor in batch(step))
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": {name: value.cpu() for name, value in model.state_dict().items()}}


@pytest.mark.parametrize("world", [1, 2])
def test_joint_batch(world: int) -> None:
    """Two ranks share the device; NCCL refuses that, so their group is gloo's."""
    with Pool(world) as pool:
        ranks = pool.run("tests.gpu.test_sync_batchnorm:train", {"sections": SECTIONS}, timeout=180)
    wanted = train_plain()
    for name in SECTIONS:
        results = [rank[name] for rank in ranks]
        means = [sum(losses) / world for losses in zip(*(result["losses"] for result in results), strict=True)]
        assert means == pytest.approx(wanted["losses"], rel=1e-5)
        for result in results:
            assert result["norms"] == {"SyncBatchNorm"}
            torch.testing.assert_close(result["state"], wanted["state"], rtol=1e-4, atol=1e-5)
