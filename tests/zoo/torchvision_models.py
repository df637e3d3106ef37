"""Models of torchvision, thin, without dropout: convolutions, batch norms, shuffles, windows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.zoo.architectures import Architecture

CLASSES = 2
Makers = dict[str, Callable[[Any], Any]]

_MAKERS: Makers = {  # each given torchvision.models
    "ResNet": lambda of: of.ResNet(of.resnet.BasicBlock, [1, 1, 1, 1], CLASSES),
    "MobileNetV2": lambda of: of.MobileNetV2(CLASSES, width_mult=0.1, dropout=0.0),
    "ShuffleNetV2": lambda of: of.ShuffleNetV2([2, 2, 2], [8, 8, 16, 32, 32], CLASSES),
    "DenseNet": lambda of: of.DenseNet(4, (2, 2, 2, 2), 8, num_classes=CLASSES),
    "RegNet": lambda of: of.RegNet(
        of.regnet.BlockParams.from_init_params(1, 8, 4.0, 2.0, 8, se_ratio=0.25), CLASSES, stem_width=8
    ),
    "ConvNeXt": lambda of: of.ConvNeXt(
        [of.convnext.CNBlockConfig(8, 16, 1), of.convnext.CNBlockConfig(16, None, 1)], num_classes=CLASSES
    ),
    "VisionTransformer": lambda of: of.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=CLASSES),
    "SwinTransformer": lambda of: of.SwinTransformer(
        [4, 4], 8, [1, 1], [1, 2], [2, 2], stochastic_depth_prob=0.0, num_classes=CLASSES
    ),
}


def make(name: str) -> Any:
    """The model of that name. Raises ImportError without torchvision."""
    from torchvision import models

    return _MAKERS[name](models)


MODELS = [
    Architecture(name, {"image_size": 32}, "image", checkpointing=False, make=partial(make, name)) for name in _MAKERS
]
